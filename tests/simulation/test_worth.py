"""What a run was worth: each way to serve clients, and each level, on data small enough to work out by hand."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import umbel
from tests.helpers.datasets import manifest
from tests.helpers.history import a_round
from tests.helpers.paper import paper_run
from umbel.data import Dataset, offsets_of, write_dataset
from umbel.protocol.plugins import trust
from umbel.server.history import State
from umbel.server.setup import Setup
from umbel.server.worth import FILE, LABELS, OWN_WAYS, Arm, LeftOut, Way
from umbel.simulation import in_process
from umbel.simulation.worth import Appraisal, Row, Ways, appraise, fit_pooled, judge, measured
from umbel.strategies import Callback

BASE = {"strategy": "fedavg", "hypotheses": 1, "noise-multiplier": 0.0, "clipping": "update", "choice-epsilon": 0.0}


def write(folder: Path, *clients: tuple[Any, Any], train: int, model: str = "linear", **entries: Any) -> Path:
    """Write a dataset of clients (x, y), the first of which train."""
    x = np.concatenate([np.asarray(rows, np.float32) for rows, _ in clients])
    y = np.concatenate([np.asarray(values) for _, values in clients])
    own = manifest(train, len(clients) - train, model=model, **entries)
    write_dataset(folder, own, x, y if y.dtype.kind == "i" else y.astype(np.float32), offsets_of(
        len(values) for _, values in clients))  # fmt: skip
    return folder


def dropped() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(0.1))


def a_run(folder: Path, ended: Any = None, history: Any = None, **changes: Any) -> tuple[Setup, State]:
    """Return a run of a dataset that ended with some hypotheses."""
    setup = Setup.parse(in_process.run_config("synthetic") | BASE | {"dataset": str(folder)} | changes)
    last = setup.model.initial(0) if ended is None else ended
    last = {name: value[None] for name, value in last.items()} if ended is None else last
    rounds = [a_round(0), a_round(1), a_round(2)] if history is None else history
    rounds = [replace(one, nearest=[], groups=[10] if one.asked else []) for one in rounds]
    return setup, State(last, last, 0.5, 2, 0, rounds, "done")


def ways(setup: Setup, state: State) -> Ways:
    dataset = setup.open_dataset()
    assert dataset is not None
    return Ways(setup, dataset, state)


def theta(*rows: tuple[float, float]) -> dict[str, Any]:
    return {"weight": np.array(rows, np.float32)[:, None, :]}


ONES = [[1.0, 0.0]] * 4


def flat(folder: Path, *values: float, train: int = 1, **entries: Any) -> Path:
    """Write clients of four rows (1, 0), each with a target of its own."""
    return write(folder / "d", *((ONES, [value] * 4) for value in values), train=train, **{"loss": "mse"} | entries)


def alone(setup: Setup, state: State) -> Row | LeftOut:
    one = ways(setup, state)
    return one.alone(one.constant().figures)


def arms(setup: Setup, state: State) -> dict[Way, Arm]:
    return {arm.way: arm for arm in appraise(setup, state, {}).arms}


# --- the constant


def test_the_constant_is_the_mean_of_all_training_rows(tmp_path: Path) -> None:
    """Rows of 0, 0, 0 and 4 have the mean 1, whatever the clients' own means; a validation client of 3s is 2 away."""
    folder = write(tmp_path / "d", ([[1, 0]] * 3, [0.0] * 3), ([[1, 0]], [4.0]), (ONES, [3.0] * 4), train=2, loss="mse")
    one = ways(*a_run(folder))
    assert (one.constant().metrics, one.constant().remark) == (pytest.approx([2.0]), "the mean")


def test_of_classes_it_is_the_most_frequent_and_of_likes_the_most_frequent_sign(tmp_path: Path) -> None:
    images = np.zeros((4, 2), np.float32)
    softmax = {"model": "softmax features=2 classes=3", "loss": "cross-entropy"}
    mine = np.array([2, 2, 2, 0])
    folder = write(tmp_path / "d", (images, np.array([2, 2, 1, 0])), (images, mine), train=1, **softmax)
    one = ways(*a_run(folder))
    right = [(one.query.targets == 2).double().mean().item()]
    assert (one.constant().metrics, one.constant().remark) == (pytest.approx(right), "the most frequent class")


def test_of_next_tokens_it_is_the_most_frequent_of_all_places(tmp_path: Path) -> None:
    """Of twelve targets of the training client seven are 2, which half of the validation client's are."""
    tokens, mine = np.array([[0, 1, 2]] * 8), [[2, 1, 2], [2, 2, 0], [2, 0, 1], [1, 2, 2]]
    entries: dict[str, Any] = {"loss": "cross-entropy", "metric": "accuracy", "tokens": 3, "validation": ["b"]}
    folder = umbel.from_arrays(
        tokens, [*mine, *[[2, 2, 2], [0, 1, 0]] * 2], client=[*"aaaabbbb"],
        model="tests.helpers.strangers:TiedWriter words=3", **entries,
    ).write(tmp_path / "d")  # fmt: skip
    one = ways(*a_run(folder))
    np.testing.assert_allclose(one.constant().metrics, [(one.query.targets == 2).double().mean().item()])


# --- pooled rows, alone


def test_pooled_rows_are_fitted_by_least_squares(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 2)).astype(np.float32)
    y = x @ [2.0, -1.0] + generator.normal(size=60)
    parts = [(x[i : i + 20], y[i : i + 20]) for i in (0, 20, 40)]
    setup, state = a_run(write(tmp_path / "d", *parts, train=2, loss="mse"))
    one = ways(setup, state)
    best = np.linalg.lstsq(x[:40], y[:40], rcond=None)[0]
    fitted, doubt = fit_pooled(one.learner, one.rows, 0, state.hypotheses)
    np.testing.assert_allclose(fitted["weight"].ravel(), best, atol=1e-3)
    assert doubt == ""


@pytest.mark.parametrize("way", [Way.POOLED, Way.ALONE])
def test_what_may_be_a_bad_fit_or_has_not_settled_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    """Nothing is concluded from it, as that clients differ."""
    setup, state = a_run(flat(tmp_path, 0.0, 1.0, 2.0, 3.0, train=2))
    assert way in arms(setup, state)
    left_out = LeftOut(LABELS[way], "since it is bad")
    monkeypatch.setattr("umbel.simulation.worth.fit_pooled", lambda *_: (state.hypotheses, "since it is bad"))
    if way is Way.ALONE:
        monkeypatch.setattr(Ways, "alone", lambda self, _: left_out)
    worth = appraise(setup, state, {})
    assert way not in {arm.way for arm in worth.arms}
    assert left_out in worth.left_out
    assert "pooled" not in worth.verdict


def test_a_network_that_draws_at_random_has_no_pooled_row(tmp_path: Path) -> None:
    """L-BFGS would need the same loss of the same parameters."""
    trust(f"{__name__}:dropped")
    found = ways(*a_run(flat(tmp_path, 0.0, 1.0, 2.0, train=2, model=f"{__name__}:dropped"))).pooled()
    assert found == LeftOut(LABELS[Way.POOLED], "since its loss of all rows at once is not that of training")


def test_clients_alone_have_the_step_size_that_serves_them_best(tmp_path: Path) -> None:
    """y = 3 x at x = 1 and 2: the curvature is 5, so steps of 3.2 and .8 diverge, and one of .2 arrives."""
    rows, targets = [[1.0, 0.0], [2.0, 0.0]] * 2, [3.0, 6.0] * 2
    folder = write(tmp_path / "d", (rows, targets), (rows, targets), train=1, loss="mse")
    found = alone(*a_run(folder, **{"step-size": 3.2, "batch-size": 0}))
    assert isinstance(found, Row)
    np.testing.assert_allclose(found.metrics, [0.0], atol=1e-4)
    assert found.remark == "50 epochs of step size 0.2, the best of 7 ways"


@pytest.mark.parametrize(
    ("step_size", "told"),
    [
        (0.15, "100 epochs of step size 0.15, the best of 6 ways"),
        (0.03, "since they still improved after 200 epochs"),
    ],
)
def test_clients_alone_train_until_more_epochs_add_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_size: float, told: str
) -> None:
    """y = 9 x at x = 1 and -1: an epoch adds the step size to the weight, as the slope of the RMSE is 1."""
    rows, targets = [[1.0, 0.0], [-1.0, 0.0]] * 4, [9.0, -9.0] * 4
    folder = write(tmp_path / "d", (rows, targets), (rows, targets), train=1, loss="rmse")
    one = ways(*a_run(folder, **{"step-size": step_size, "batch-size": 0, "rounds": 1}))
    monkeypatch.setattr("umbel.simulation.worth.ridge", lambda *_: None)
    monkeypatch.setattr(Ways, "_made_own", lambda self, _: one.constant().figures)
    found = one.alone(one.constant().figures)
    assert told == (found.remark if isinstance(found, Row) else found.why)


def test_a_client_alone_may_do_best_with_the_mean_of_its_own_rows(tmp_path: Path) -> None:
    """The features are 0, so that a linear model says 0 after any training; all targets are 3."""
    nothing = [[0.0, 0.0]] * 40
    folder = write(tmp_path / "d", (nothing, [9.0] * 40), (nothing, [3.0] * 40), train=1, loss="mse")
    found = alone(*a_run(folder, **{"step-size": 0.1}))
    assert isinstance(found, Row)
    np.testing.assert_allclose(found.metrics, [0.0], atol=1e-5)
    assert found.remark == "the mean of the client's rows, the best of 7 ways"


# --- the run


def test_clients_pick_on_one_half_of_their_rows_and_are_measured_on_the_other(tmp_path: Path) -> None:
    setup, state = a_run(flat(tmp_path, 1.0, 1.0, 5.0), theta((1, 0), (4, 0)), hypotheses=2, strategy="ifca")
    found = arms(setup, state)
    assert (found[Way.LAST].mean, found[Way.LAST].worst_decile) == (0.5, 1.0)
    assert appraise(setup, state, {}).clients == 2
    assert Way.BEST not in found, "the last round is the best"


def test_the_best_round_stands_beside_the_last_and_says_who_chose_it(tmp_path: Path) -> None:
    exact = [a_round(0), a_round(1, exact_reports=1), a_round(2, exact_reports=1)]
    units = {"target": {"name": "price", "unit": "dollars", "scale": 100.0}}
    setup, state = a_run(flat(tmp_path, 1.0, 1.0, units=units), theta((3, 0)), history=exact)
    state.best, state.best_round = theta((1, 0)), 1
    found, worth = arms(setup, state), appraise(setup, state, {})
    assert (found[Way.LAST].mean, found[Way.BEST].mean) == (200.0, 0.0)
    assert (worth.metric, worth.unit) == ("RMSE", "dollars")
    assert found[Way.BEST].remark.startswith("after round 1,")
    assert "exact losses" in found[Way.BEST].remark


# --- whom it may measure


def few(lengths: list[int], train: int) -> Dataset:
    rows = sum(lengths)
    own = manifest(train, len(lengths) - train, model="linear")
    return Dataset(own, np.zeros((rows, 2), np.float32), np.zeros(rows, np.float32), offsets_of(lengths))


def test_validation_clients_with_two_rows_are_measured_and_no_more_than_can_train() -> None:
    assert measured(few([4, 4, 4, 1, 4], 2), 0, 10) == [2, 4], "one row cannot be halved"
    many = few([4] * 2000, 500)
    assert [len(measured(many, 0, rows)) for rows in (10_000, 50, 20, 19)] == [1000, 25, 10, 1000]
    assert min(measured(many, 0, 50)) >= 500
    assert measured(many, 0, 50) != measured(many, 1, 50)


@pytest.mark.parametrize(("rows", "train"), [(4, 1), (1, 1)])
def test_where_no_validation_client_has_two_rows_nothing_ismeasured(tmp_path: Path, rows: int, train: int) -> None:
    folder = write(tmp_path / "d", *[(ONES[:rows], [1.0] * rows)] * (3 - rows // 2), train=train, loss="mse")
    worth = appraise(*a_run(folder), {})
    assert (worth.worth_it, worth.arms) == (False, [])
    assert "Not known" in worth.verdict
    assert worth.lines() == [f"Worth it? {worth.verdict}"]


def test_what_is_too_large_is_left_out_by_name(tmp_path: Path) -> None:
    """Half of 8,020 rows, seven at a time, are 573 steps."""
    big = [(np.zeros((8020, 2), np.float32), np.zeros(8020))] * 2
    folder = write(tmp_path / "d", *big, train=1, loss="mse")
    one = ways(*a_run(folder, **{"batch-size": 7}))
    left_out = [way.label for way in (one.alone(one.constant().figures), *one.own()) if isinstance(way, LeftOut)]
    assert left_out == [LABELS[Way.ALONE], LABELS[Way.OWN]]
    assert not isinstance(one.pooled(), LeftOut)
    assert ways(*a_run(folder, **{"batch-size": 8})).trains


# --- the sentence: gains of 8 clients, more is better, so that only the mean decides


def gains(**means: float) -> dict[Way, Any]:
    return {Way(name.replace("_", "-")): np.full(8, mean) for name, mean in ({"last_round": 1} | means).items()}


@pytest.mark.parametrize(
    ("found", "worth_it", "words"),
    [
        (gains(constant=2), False, "No: it is worse than a constant."),
        (gains(constant=1), False, "Not shown: it is not shown to differ from a constant."),
        (gains(constant=0), True, "Yes: it is better than a constant."),
        (gains(constant=0, alone=2), False, "No: it is better than a constant and worse than each client alone."),
        (gains(constant=0, alone=1), False, "and not shown to differ from each client alone."),
        (gains(constant=0, alone=1, last_round=0, made_own=2), True, "better than each client alone."),
        (gains(constant=0, alone=0, pooled=2), True, "and worse than all rows pooled."),
        (gains(constant=0, alone=0, pooled=1), True, "and not shown to differ from all rows pooled."),
        (gains(constant=0, alone=0, pooled=1, last_round=2), True, "and better than all rows pooled."),
    ],
)
def test_each_sentence(found: dict[Way, Any], worth_it: bool, words: str) -> None:
    answer, sentence = judge(found)
    assert answer is worth_it
    assert sentence.endswith(words)


@pytest.mark.parametrize(("losses", "last"), [((0.1, 0.5), 0), ((0.5, 0.4), math.nan)])
def test_a_run_whose_rounds_led_away_is_not_worth_it_however_well_it_ended(
    tmp_path: Path, losses: tuple[float, float], last: float
) -> None:
    history = [a_round(0, loss=losses[0]), a_round(1, loss=losses[1])]
    worth = appraise(*a_run(flat(tmp_path, 1.0, 0.0), theta((last, 0)), history=history), {})
    assert (worth.worth_it, worth.verdict.startswith("No: it diverged")) == (False, True)


@pytest.mark.usefixtures("umbel_home")
def test_where_training_diverges_at_every_client_the_run_is_not_worth_it(tmp_path: Path) -> None:
    """Such clients release what they got. Made each client's own, even hypotheses that no round changed do well."""
    draw = np.random.default_rng(0)
    x = draw.normal(0, 1e4, (12, 8, 2))
    folder = write(tmp_path / "d", *((rows, rows @ [1e-4, 2e-4]) for rows in x), train=8, loss="mse")
    told = {"dataset": str(folder), "rounds": 2, "restarts": 1, "step-size": 0.3, "clients-per-round": 8}
    told |= {"validation": "clients=4"}
    run = umbel.load(in_process.run(in_process.run_config("synthetic") | BASE | told, 1, [Appraisal()]))
    assert run.history["loss"].nunique() == 1
    assert run.verdict.startswith("No: no round changed the hypotheses")


@pytest.mark.usefixtures("umbel_home")
def test_rows_that_changed_during_the_run_measure_nothing(tmp_path: Path) -> None:
    class Swap(Callback):
        def at_end(self) -> None:
            shutil.rmtree(tmp_path / "d")
            flat(tmp_path, *[9.0] * 4, train=2)

    flat(tmp_path, *[1.0] * 4, train=2)
    told = {"dataset": str(tmp_path / "d"), "rounds": 1, "restarts": 1, "clients-per-round": 2}
    config = in_process.run_config("synthetic") | BASE | told | {"validation": "clients=2"}
    assert not (in_process.run(config, 1, [Swap(), Appraisal()]) / FILE).exists()


@pytest.mark.parametrize("used", OWN_WAYS)
def test_a_run_is_judged_by_what_predictions_use(used: Way) -> None:
    """Which is the best round fitted to each client, if it was measured; the rows after it would say the opposite."""
    worse = OWN_WAYS[: OWN_WAYS.index(used)]
    gains = {Way.CONSTANT: np.zeros(3)} | {way: np.full(3, -1.0) for way in OWN_WAYS if way not in worse}
    assert judge(gains | {used: np.ones(3)})[0]


# --- whole runs


@pytest.mark.rest
@pytest.mark.usefixtures("blank_figures", "umbel_home", "looped")
def test_the_same_seed_has_the_same_worth_on_one_node_and_on_three() -> None:
    config = paper_run() | {"rounds": 4, "restarts": 1}
    one, other = (in_process.run(config, nodes, [Appraisal()]) / FILE for nodes in (1, 3))
    assert one.read_bytes() == other.read_bytes()
    found = json.loads(one.read_text())
    assert {arm["way"] for arm in found["arms"]} >= {"constant", "alone", "pooled", "last-round"}


@pytest.mark.usefixtures("blank_figures", "umbel_home")
def test_a_recommenders_own_rules_stand_in_the_table() -> None:
    config = in_process.run_config("recommender", rounds=3, restarts=1)
    found = json.loads((in_process.run(config, 1, [Appraisal()]) / FILE).read_text())
    labels = {arm["label"] for arm in found["arms"]}
    assert {"rule: all liked", "rule: item and user bias", "each client alone", "this run, last round"} <= labels
    assert {one["label"] for one in found["left_out"]} == {LABELS[one] for one in (Way.OWN, Way.POOLED)}
    assert found["metric"] == "accuracy"


# --- classes


def clinics(folder: Path, positive: int, leak: bool = False) -> Path:
    """Write twelve clients of forty rows, of which some are positive; the first feature orders them, or tells."""
    draw, clients = np.random.default_rng(0), []
    for _ in range(12):
        labels = np.where(np.arange(40) < positive, 1, -1)
        first = labels + (draw.normal(0, 0.01, 40) if leak else draw.normal(-9, 1, 40))
        clients.append((np.stack([first, draw.normal(size=40)], 1), labels.astype(np.int8)))
    units = {"target": {"categories": ["home", "back"]}, "features": [{"name": "id"}, {"name": "age"}]}
    return write(folder, *clients, train=6, model="linear inputs=2 outputs=1", loss="log", units=units)


LEARNT = [a_round(0, loss=0.7), a_round(1, loss=0.5)]


def scorer(weight: float) -> dict[str, Any]:
    """Return a hypothesis of that model, which looks at the first feature alone."""
    return {"1.weight": np.array([[[weight, 0]]], np.float32), "1.bias": np.zeros((1, 1), np.float32)}


def test_of_a_rare_class_the_order_of_rows_decides_and_the_majority_is_named(tmp_path: Path) -> None:
    """With an accuracy of .95 as a constant has, since no score is above 0, the run has most pairs in order.

    Of classes of many rows the accuracy decides, and a perfect run names the column that gives the answer away.
    """
    worth = appraise(*a_run(clinics(tmp_path / "rare", 2), scorer(0.1), LEARNT), {})
    last = worth.arm(Way.LAST)
    assert last.mean == worth.arm(Way.CONSTANT).mean
    scores = {score.name: score.value for score in last.scores}
    assert scores["balanced accuracy"] == 0.5
    assert (scores["AUC"] or 0) > 0.8
    assert "AUC decides" in worth.verdict
    assert "only the majority class, home" in worth.verdict
    verdicts = [
        appraise(*a_run(clinics(tmp_path / f"leak {leak}", 20, leak), scorer(weight), LEARNT), {}).verdict
        for leak, weight in ((False, 0.1), (True, 9))
    ]
    assert ["AUC decides" in verdicts[0], "look at column id" in verdicts[1]] == [False, True]


def test_clients_without_a_labelled_row_are_measured_by_the_mean_of_several_hypotheses(tmp_path: Path) -> None:
    """Of which one has three quarters of the releases: 1.5 is predicted where 1 and 3 are true."""
    setup, state = a_run(flat(tmp_path, 0.0, 1.0, 3.0), theta((1, 0), (3, 0)), hypotheses=2)
    state.history = [replace(entry, groups=[3, 1] if entry.asked else []) for entry in state.history]
    (row,) = ways(setup, state).newcomers()
    assert row.metrics.tolist() == pytest.approx([0.5, 1.5])
    assert not ways(*a_run(flat(tmp_path, 0.0, 1.0, 3.0), theta((1, 0)))).newcomers()


# --- what is tried


@pytest.mark.rest
@pytest.mark.usefixtures("umbel_home")
def test_one_model_stands_beside_several_and_a_better_setting_is_advised(caplog: pytest.LogCaptureFixture) -> None:
    """A step size of a hundredth of the usual learns little in three rounds, and three times that learns more."""
    config = paper_run() | {"rounds": 3, "restarts": 1, "step-size": 0.001}
    run = umbel.load(in_process.run(config, 1, [Appraisal()]))
    worth = run._worth
    assert worth.arm(Way.ONE).label == "one model"
    tried = [one.partition(": trying ")[2] for one in caplog.messages if ": trying " in one]
    assert tried == ["hypotheses=1", "step-size=0.003", "step-size=0.000333"]
    assert worth.advice.endswith(f"umbel run {run.path / 'config.toml'} step-size=0.003")


def test_random_numbers_elsewhere_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    appraise(*a_run(flat(tmp_path, 1.0, 1.0)), {})
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_single_client_shows_nothing_and_few_clients_must_agree_more() -> None:
    """Student's t: of two clients, a gain must be 13.97 standard errors, of five 2.87, of very many 2."""
    for gains, ahead in (
        ([5.0], False), ([1.0, 1.3], False), ([1.0, 1.1], True), ([1.0, 2.0, 3.0, 2.0, 4.2], True),
        ([1.0, 2.0, 3.0, -1.0, 4.2], False), ([3.0, -1.0, 0.0, 0.0], False), ([-3.0, 1.0, 0.0, 0.0], False),
        ([0.6, 0.4, 0.6, 0.4], True),
    ):  # fmt: skip
        found, told = judge({Way.CONSTANT: np.zeros(len(gains)), Way.LAST: np.array(gains)})
        assert (found, told.startswith("Not shown")) == (ahead, not ahead), gains
