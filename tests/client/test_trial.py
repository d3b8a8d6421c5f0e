"""A trial step says in one line what does not work with a model, and which learner computes it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.cohorts import ByArrays, cohort_of
from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from tests.helpers.models import draw_hypotheses, own
from tests.helpers.strangers import Recurrent, TiedWriter
from umbel import models
from umbel.client import trial
from umbel.client.cohort import LocalUpdate
from umbel.client.learner import Learner
from umbel.client.trial import try_out
from umbel.data import Dataset, offsets_of
from umbel.models import METRICS, Model
from umbel.models.losses import Loss, Score
from umbel.protocol.errors import ModelError
from umbel.protocol.run_config import RunConfig

Network = Callable[[], nn.Module]
of = partial(own, loss="mse")


def data(features: Any = (), targets: Any = (), lengths: tuple[int, ...] = (2, 1), **entries: Any) -> Dataset:
    """Return a dataset of rows of two numbers with one target, or of other rows."""
    features = np.asarray(features, np.float32) if len(features) == 0 else np.asarray(features)
    rows = sum(lengths)
    features = features if features.size else np.zeros((rows, 2), np.float32)
    targets = np.asarray(targets) if len(targets) else np.zeros(rows, np.float32)
    return Dataset(manifest(len(lengths), **entries), features, targets, offsets_of(lengths))


def tried(network: Network, dataset: Dataset | None = None, engine: str = "auto", loss: str = "mse") -> Learner:
    return try_out(own(network, loss), dataset or data(), "cpu", engine)


class Net(nn.Module):
    """A dense layer from two numbers to one, and whatever a test does in between."""

    between: Callable[[Net, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(2, 4), nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.between(self.hidden(rows)))
        return outputs


def with_between(between: Callable[[Any, Tensor], Tensor]) -> type[Net]:
    return type("Own", (Net,), {"between": between})


class Unused(nn.Linear):
    """A layer with a parameter that its outputs do not hang on."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.spare = nn.Parameter(torch.zeros(3))


class Drawn(nn.Linear):
    """A layer that Python's own generator draws."""

    def __init__(self) -> None:
        super().__init__(2, 1)

    def reset_parameters(self) -> None:
        self.weight.data = torch.tensor([[random.random(), random.random()]])
        self.bias.data = torch.zeros(1)


SEQUENCES = data(np.zeros((3, 5, 2), np.float32), [0, 1, 2])


# --- who computes it


def test_the_two_forms_are_compared_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU convolves in fewer by default, and would seem to compute otherwise in batches; afterwards it does again."""
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before, seen, train = [one.allow_tf32 for one in backends], [], Learner.train

    def watched(self: Learner, *arguments: Any) -> Any:
        seen.append([one.allow_tf32 for one in backends])
        return train(self, *arguments)

    monkeypatch.setattr(Learner, "train", watched)
    trial._tried.cache_clear()
    assert try_out(models.load("linear"), data(), "cpu").engine == "batched"
    assert seen == [[False, False]] * 2
    assert [one.allow_tf32 for one in backends] == before


@pytest.mark.parametrize(
    ("network", "dataset", "reason"),
    [
        (lambda: Recurrent("LSTM"), SEQUENCES, "aten::lstm"),
        (with_between(lambda self, hidden: F.dropout(hidden, 0.5, self.training)), data(), "dropout"),
        (lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), data(), "statistics"),
        (with_between(lambda self, hidden: hidden - hidden.mean(0)), data(), "in the loss"),
    ],
    ids=["recurrent", "dropout", "batch normalisation", "rows that are mixed"],
)
def test_batches_asked_for_in_vain_are_refused(network: Network, dataset: Dataset, reason: str) -> None:
    with raises(ModelError, "model.batches", "'own'", reason, 'engine = "auto"') as error:
        tried(network, dataset, "batched")
    assert "\n" not in error.value.text
    assert tried(network, dataset).engine == "loop"


# --- what does not work


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (with_between(lambda self, hidden: F.dropout(hidden, 0.5)), ("model.random-score", "nn.Dropout")),
        (
            with_between(lambda self, hidden: hidden * (random.random() if self.training else 1)),
            ("model.own-generator", "PyTorch"),
        ),
        (with_between(lambda self, hidden: hidden / 0), ("model.not-finite", "loss 'mse'")),
        (with_between(lambda self, hidden: hidden.detach()), ("model.no-gradient", "'hidden.weight', 'hidden.bias'")),
        (with_between(lambda self, hidden: (hidden * 0).sqrt()), ("model.not-finite", "'hidden.weight'")),
        (Unused, ("model.no-gradient", "['spare']", 'frozen = "spare"')),
        (
            with_between(lambda self, hidden: hidden + self.seen.add_(self.training)),
            ("model.lost-buffers", "['seen']", "local ="),
        ),
        (with_between(lambda self, hidden: hidden.sigmoid().add_(1)), ("model.no-gradient", "inplace operation")),
        (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 1)), ("model.in-place", "inplace=False")),
        (lambda: nn.Sequential(nn.Linear(3, 1)), ("model.misfit", "(2,)")),
        (Drawn, ("model.own-generator", "seed")),
    ],
)
def test_what_does_not_work_is_said_in_one_line(network: Network, reason: tuple[str, ...]) -> None:
    with raises(ModelError, *reason, "'own'") as error:
        tried(network)
    assert "\n" not in error.value.text


def test_what_gets_no_gradient_may_be_frozen_and_a_buffer_that_changes_each_clients_own() -> None:
    assert try_out(of(Unused, frozen=("spare",)), data(), "cpu").model.num_parameters == 3
    network = with_between(lambda self, hidden: hidden + self.seen.add_(self.training))
    learner = try_out(of(network, local=("seen",)), data(), "cpu")
    assert learner.model.local_shapes == {"seen": (4,)}


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return what PyTorch divides by the weights of the rows' classes: of a single row no weight is left."""
    return F.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 9.0]))


def with_scores(outputs: int, loss: Callable[..., Tensor], metric: Callable[..., Tensor] | None = None) -> Model:
    """Return a model of functions of a user's own."""

    def same(mean: Any) -> Any:
        return mean

    score = Score("mine:score", metric or loss, same, by_row=True)
    return Model("own", partial(nn.Linear, 2, outputs), Loss("mine:loss", loss, same, same, by_row=True), score)


SCORES: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "a value a row": (lambda outputs, targets: (outputs - targets).abs(), True),
    "their mean": (lambda outputs, targets: (outputs - targets).abs().mean(), True),
    "reshaped": (lambda outputs, targets: (outputs.squeeze(-1) - targets.reshape(-1)).abs().mean(), True),
    "squeezed": (lambda outputs, targets: (outputs.squeeze(-1) - targets).abs().mean(), True),
    "of one row only": (lambda outputs, targets: (outputs - targets.reshape(1, 1)).abs().mean(), True),
    "a root of the mean": (lambda outputs, targets: (outputs - targets).square().mean().sqrt(), False),
    "a sum": (lambda outputs, targets: (outputs - targets).square().sum(), False),
    "weights of classes": (weighted, False),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_function_of_several_rows_is_their_mean_in_any_form_or_is_refused(name: str) -> None:
    """Row by row, a root of a mean square would silently be an absolute error, and class weights would vanish."""
    (score, fits), classes = SCORES[name], name == "weights of classes"
    dataset, mean = (data(targets=[0, 1, 1]), F.cross_entropy) if classes else (data(), F.mse_loss)
    for model, named in ((with_scores(1 + classes, score), "loss"), (with_scores(1 + classes, mean, score), "score")):
        with nullcontext() if fits else raises(ModelError, "model.score-of-rows", f"mine:{named}"):
            try_out(model, dataset, "cpu")


def test_a_score_of_the_wrong_shape_or_that_is_no_number_is_refused() -> None:
    """A validation client would report the largest number that there is."""
    mean = Loss("mean", lambda outputs, targets: (outputs[:, 0] - targets).square().mean(), torch.sqrt, torch.sqrt)
    with raises(ModelError, "model.score", "2 rows"):
        try_out(Model("own", lambda: nn.Linear(2, 1), mean, METRICS["rmse"]), data(), "cpu")
    with raises(ModelError, "model.not-finite", "mine:score"):
        try_out(with_scores(1, F.l1_loss, lambda outputs, targets: (outputs - targets) * math.nan), data(), "cpu")


def test_hypotheses_that_start_the_same_are_refused() -> None:
    same = of(lambda: nn.Linear(2, 1).apply(lambda layer: [nn.init.zeros_(one) for one in layer.parameters()]))
    with raises(ModelError, "model.same-start"):
        try_out(same, data(), "cpu", hypotheses=2)
    assert try_out(same, data(), "cpu", hypotheses=1)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e30])
def test_whether_a_model_is_refused_does_not_tell_about_the_data(scale: float) -> None:
    """The rows of the trial are made up, whatever the clients' own are."""
    rows = scale * np.ones((3, 2), np.float32)
    assert tried(lambda: nn.Linear(2, 1), data(rows, scale * np.ones(3, np.float32))).engine == "batched"


def test_a_loss_of_ones_own_sees_the_extremes_of_the_targets() -> None:
    """If it failed at some clients and not at others, that would tell about their data."""
    model = replace(of(lambda: nn.Linear(2, 2)), loss=models.load_loss("torch.nn.functional:cross_entropy"))
    model = replace(model, metric=model.loss)
    assert try_out(model, data(targets=[0, 1, 1]), "cpu").engine == "batched"
    with raises(ModelError, "model.misfit"):
        try_out(model, data(targets=[0, 2, 1]), "cpu")


# --- dropout


def dropping(rate: float = 0.5) -> type[Net]:
    return with_between(lambda self, hidden: F.dropout(hidden, rate, self.training))


ROWS = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
UPDATE = LocalUpdate(local_epochs=3, step_size=0.1, batch_size=2)


def trained_with(learner: Learner, clients: list[int], seed: int = 0) -> dict[str, Any]:
    """Train some of three clients of two rows each, with generators of their own."""
    cohort = cohort_of(*((ROWS[2 * c : 2 * c + 2], ROWS[2 * c : 2 * c + 2, 0]) for c in clients))
    own = [np.random.default_rng([seed, c]) for c in clients]
    hypotheses = draw_hypotheses(learner.model, 1)
    return ByArrays(learner).train(hypotheses, np.zeros(len(clients), np.int64), cohort, UPDATE, own)[0]


def test_nothing_drops_out_where_a_model_is_scored() -> None:
    before = torch.random.get_rng_state()
    learner = tried(dropping())
    assert torch.equal(torch.random.get_rng_state(), before), "PyTorch's generator is left alone"
    cohort, hypotheses = cohort_of((ROWS, ROWS[:, 0])), draw_hypotheses(learner.model, 2)
    first, _ = ByArrays(learner).score(hypotheses, cohort)
    assert (first == ByArrays(learner).score(hypotheses, cohort)[0]).all()
    assert (first == ByArrays(tried(dropping(0.0), engine="loop")).score(hypotheses, cohort)[0]).all()


def test_what_drops_out_is_each_clients_own_draw() -> None:
    """It does not hang on who else is there, nor on what was drawn before."""
    learner = tried(dropping())
    together, alone = trained_with(learner, [0, 1, 2]), trained_with(learner, [2])
    for name, value in together.items():
        np.testing.assert_array_equal(value[2], alone[name][0])
    other = trained_with(learner, [2], seed=1)
    assert any((value != other[name]).any() for name, value in alone.items())
    without = trained_with(tried(dropping(0.0), engine="loop"), [2])
    assert any((value != without[name]).any() for name, value in alone.items())


# --- batch normalisation


def normalised(**options: Any) -> Network:
    return lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, **options), nn.Linear(3, 1))


def test_running_statistics_are_each_clients_own() -> None:
    """That they are PyTorch's is in test_learner.py."""
    model = tried(normalised()).model
    assert model.local_shapes == {"1.running_mean": (3,), "1.running_var": (3,), "1.num_batches_tracked": ()}
    assert model.num_parameters == 6 + 3 + 3 + 3 + 3 + 1, "statistics are no parameters that are released"


def test_frozen_statistics_stay_as_they_are() -> None:
    model = of(normalised(), frozen=("1.running_*", "1.num_*"))
    learner = try_out(model, data(), "cpu")
    assert not model.local_shapes
    assert set(model.frozen_values) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert learner.engine == "batched", "a row's outputs no longer hang on those beside it"
    trained_with(learner, [0, 1])
    assert model.frozen_values["1.running_mean"].tolist() == [0, 0, 0]


def test_without_running_statistics_each_client_is_scored_by_its_own() -> None:
    model = of(normalised(track_running_stats=False))
    learner = try_out(model, data(lengths=(2, 3), features=np.zeros((5, 2)), targets=np.zeros(5)), "cpu")
    assert (learner.engine, model.local_shapes) == ("loop", {})
    hypotheses = draw_hypotheses(model, 1)
    together = ByArrays(learner).score(hypotheses, cohort_of((ROWS[:4], ROWS[:4, 0]), (ROWS[4:], ROWS[4:, 0])))[0]
    alone = ByArrays(learner).score(hypotheses, cohort_of((ROWS[4:], ROWS[4:, 0])))[0]
    assert together[0, 1] == alone[0, 0]
    with raises(ModelError, "model.misfit"):
        try_out(model, data(), "cpu")


# --- tied weights


def test_tied_weights_count_once() -> None:
    """That they stay tied is in test_learner.py."""
    once, frozen = own(TiedWriter), own(TiedWriter, frozen=("out.*",))
    assert "words.weight" in once.shapes
    assert "out.weight" not in once.shapes
    assert set(frozen.frozen_values) == {"words.weight", "mask"}, "by either name, beside a constant"


def test_each_engine_of_a_site_is_tried_with_all_that_training_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = set()
    monkeypatch.setattr(
        trial, "_seconds", lambda learner, *rest: tried.add((learner.engine, bool(rest[2].rows), rest[2].descent.plain))
    )
    trial.try_engines()
    assert tried == {(engine, *how) for engine in ("loop", "site") for how in ((True, True), (False, False))}


def test_the_first_update_is_that_of_the_clients_by_hand() -> None:
    """A full-batch step s of squared error on rows (1, 0) -> 1 moves w by 2 s (1 - w) along the first axis."""
    model = models.load("linear", "mse")
    rows = data(np.tile([[1.0, 0.0]], (3, 1)), np.ones(3, np.float32))
    run = RunConfig(step_size=0.25, batch_size=0, local_epochs=1)
    start = model.initial(0)["weight"][0, 0]
    assert trial.first_update(run, model, rows) == pytest.approx(0.5 * abs(1 - start))
