"""A network may compute its products in fewer bits; what is trained, chosen and released is in 32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import umbel
from tests.helpers.cohorts import CPU, ByArrays, Kind
from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from tests.helpers.fake_gpu import fake_gpu
from tests.helpers.models import TINY_CNN, Adapted, draw_hypotheses, own
from umbel import models
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import BATCHED, LOOP, SITE, Learner, learner_for
from umbel.client.trial import try_out
from umbel.data import Dataset, offsets_of
from umbel.models import Model
from umbel.privacy.mechanisms.randomness import streams
from umbel.protocol.errors import ConfigError, ModelError
from umbel.protocol.run_config import RunConfig

KINDS = {
    "dense": Kind(models.load("mlp"), (3,)),
    "convolution": Kind(TINY_CNN, (1, 6, 6), 3),
    "frozen backbone": Kind(own(Adapted), (8,), 3),
}


def computed(kind: Kind, engine: str, precision: str) -> list[np.ndarray[Any, Any]]:
    """Return losses, and what three clients have trained, as one vector each."""
    draw, lengths = np.random.default_rng(0), np.array([4, 1, 5])
    rows = [kind.client(draw, int(count)) for count in lengths]
    features, targets = (np.concatenate([one[part] for one in rows]) for part in (0, 1))
    targets = targets.astype(np.float32) if targets.dtype.kind == "f" else targets
    learner = ByArrays(Learner(kind.model, CPU, engine, precision))
    cohort = Cohort(torch.from_numpy(features.astype(np.float32)), torch.from_numpy(targets), lengths)
    hypotheses = draw_hypotheses(kind.model, 2)
    losses, _ = learner.score(hypotheses, cohort)
    trained, _ = learner.train(
        hypotheses, np.array([0, 1, 0]), cohort, LocalUpdate(2, 0.1, 2), streams(0, "shuffle", 1, range(3))
    )
    return [losses, np.concatenate([value.ravel() for value in trained.values()])]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("engine", [LOOP, BATCHED])
def test_16_bits_give_nearly_the_same_in_32(kind: Kind, engine: str) -> None:
    """Numbers of 8 bits differ by 2^-8 at most from those of 24, relative to the largest of a sum."""
    for exact, found in zip(computed(kind, engine, "float32"), computed(kind, engine, "bf16"), strict=True):
        assert found.dtype == exact.dtype
        assert not np.array_equal(found, exact)
        np.testing.assert_allclose(found, exact, rtol=0.03, atol=0.03 * np.abs(exact).max())


def test_a_sites_clients_are_computed_one_by_one_in_16_bits() -> None:
    """An exact engine has only operations whose rounding depends on no other client; those of 16 bits are others."""
    model = models.load("mlp")
    assert [learner_for(model, "cpu", SITE, one).engine for one in ("float32", "bf16")] == [SITE, LOOP]


def data() -> Dataset:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((6, 3), np.float32)
    return Dataset(manifest(2), x, x.sum(1), offsets_of([4, 2]))


def test_a_model_that_cannot_compute_so_is_refused_before_a_run() -> None:
    class Summing(torch.nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(rows), 1).scatter_add(0, torch.arange(len(rows))[:, None], super().forward(rows))

    model = own(lambda: Summing(3, 1), "mse")
    assert try_out(model, data(), "cpu").precision == "float32"
    with raises(ModelError, "model.trial", "bf16"):
        try_out(model, data(), "cpu", LOOP, precision="bf16")


def test_a_row_that_is_hidden_is_clipped_in_32_bits() -> None:
    rows = "clip=1 noise=1.1 rate=0.1 batch=10"
    with raises(ConfigError, "config.conflict", "precision"):
        RunConfig.parse({"protect": "rows", "noise-multiplier": 0.0, "rows": rows, "precision": "bf16"})


def test_pytorchs_switch_is_on_only_while_a_gpu_computes() -> None:
    seen: list[str] = []

    def noted(forward: Callable[..., Any]) -> Callable[..., Any]:
        def with_note(*given: Any, **more: Any) -> Any:
            seen.append(torch.get_float32_matmul_precision())
            return forward(*given, **more)

        return with_note

    kind = KINDS["dense"]
    with fake_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "apply", noted(Model.apply))
        cuda = torch.device("cuda")
        for precision in ("tf32", "float32"):
            learner = Learner(kind.model, cuda, LOOP, precision)
            cohort = Cohort.gather(data(), range(2), cuda)
            learner.score(learner.tensors(draw_hypotheses(kind.model, 1)), cohort)
    assert seen == ["high"] * 2 + ["highest"] * 2
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("umbel_home")
def test_a_run_computes_as_its_config_says() -> None:
    ended = [umbel.run(rounds=2, precision=one, baselines=False, seed=1) for one in ("float32", "bf16")]
    first, second = (run.history["loss"].to_numpy() for run in ended)
    assert (first != second).any()
    np.testing.assert_allclose(first, second, rtol=0.1)
