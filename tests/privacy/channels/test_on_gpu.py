"""What simulated clients release on a GPU is what the host would release, with noise of the same law.

The steps are PyTorch's on any device, so they are tested on the CPU; `tests.client.test_gpu` has whole rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tests.helpers.fake_gpu import fake_gpu
from tests.helpers.messages import Behind, asked, of_node, releases, stacked, task_of, through_gate
from tests.helpers.sites import own, simulated
from tests.privacy.channels.test_client import CLAIMS, DRAWS, EPSILON, FALSE_ALARM
from umbel.privacy.channels import Place
from umbel.privacy.channels.client import ClientSanitiser
from umbel.privacy.channels.on_gpu import release
from umbel.privacy.mechanisms import Gaussian, Laplace, Mechanism
from umbel.privacy.mechanisms.base import Matrix
from umbel.privacy.mechanisms.sanitise import grid_step, release_in_place
from umbel.privacy.site.work import Work
from umbel.protocol.release import Clipping, NoisePer

FINEST = 2.0**-30
LEAST = "umbel.privacy.channels.on_gpu._LEAST"
PARTS = [slice(0, 2), slice(2, 5)]


def released(
    trained: Matrix,
    start: Matrix,
    mechanism: Mechanism | None = None,
    radius: float = 1.0,
    public: bool = True,
    parts: Sequence[slice] | None = None,
    seeds: Sequence[int] = (),
) -> Matrix:
    """Return releases from 32-bit models, in 64 bits."""
    there = [torch.from_numpy(one.astype(np.float32)) for one in (trained, start)]
    seeds = seeds or range(len(trained))
    return release(mechanism, *there, radius, public, seeds, parts, FINEST).double().numpy()


# --- the same steps


@pytest.mark.parametrize("parts", [None, PARTS], ids=["vector", "layers"])
@pytest.mark.parametrize("clipping", list(Clipping))
def test_without_noise_a_release_is_that_of_the_host(clipping: Clipping, parts: Sequence[slice] | None) -> None:
    """Short and long updates, one that diverged, and one beyond what travels."""
    rng = np.random.default_rng(0)
    start = rng.standard_normal((5, 5)).astype(np.float32).astype(float)
    trained = start + rng.standard_normal((5, 5)) * [[0.01], [1.0], [9.0], [1.0], [1.0]]
    trained = trained.astype(np.float32).astype(float)
    trained[3, 2], trained[4] = np.nan, np.finfo(np.float32).max
    expected = np.where(np.isfinite(trained).all(1, keepdims=True), trained, start) - start
    release_in_place(None, expected, start, 1.0, clipping, [], parts, FINEST)
    found = released(trained, start, public=clipping is Clipping.PUBLIC, parts=parts)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(found[3], start[3])


@pytest.mark.parametrize("mechanism", [Laplace(3.0), Gaussian(0.5)], ids=["laplace", "gaussian"])
def test_a_release_is_on_the_public_grid_and_its_noise_hangs_on_the_seed_alone(mechanism: Mechanism) -> None:
    start, update = np.zeros((2, 5)), np.array([[0.0] * 5, [0.3, 0.0, -0.4, 0.0, 0.0]])
    step = grid_step(mechanism.deviation(5), FINEST)
    first, second = released(update, start, mechanism, seeds=[7, 7])
    np.testing.assert_allclose(second - first, update[1], atol=step)
    np.testing.assert_array_equal(np.rint(first / step), first / step)
    assert (released(update, start, mechanism, seeds=[7, 8])[1] != second).all()
    np.testing.assert_array_equal(released(update[1:], start[1:], mechanism, seeds=[7])[0], second)


def test_in_mode_update_noise_grows_with_each_layers_own_norm() -> None:
    mechanism, start = Laplace(1e-3), np.zeros((2, 5))
    update = np.array([[0.0] * 5, [4.0, 0.0, 0.0, 0.0, 3.0]])
    still, moved = released(update, start, mechanism, 0.5, public=False, parts=PARTS, seeds=[7, 7]) - update
    step = grid_step(mechanism.deviation(5) * 0.5, FINEST)
    np.testing.assert_allclose(moved[:2], 8 * still[:2], atol=9 * step)
    np.testing.assert_allclose(moved[2:], 6 * still[2:], atol=7 * step)


# --- the same law; see `tests.privacy.channels.test_client` for claims and their power


@lru_cache
def drawn(n: int, layered: bool = False) -> Matrix:
    """Laplace noise at `EPSILON`, of the vector, or of its second half, drawn after the first."""
    zeros = np.zeros((DRAWS[n], 2 * n if layered else n))
    parts = [slice(0, n), slice(n, 2 * n)] if layered else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("umbel.privacy.mechanisms.sanitise.NOISE_STEPS", 1 << 20)  # so that rounding does not show
        return released(zeros, zeros, Laplace(n / EPSILON), parts=parts)[:, -n:]


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize(("n", "layered"), [(2, False), (11, False), (1000, False), (2, True)])
def test_laplace_noise_has_the_law_of_the_paper(claim: str, n: int, layered: bool) -> None:
    """Lemma 4.3. False-alarm rate 1e-6 for each claim and n."""
    assert CLAIMS[claim](drawn(n, layered)) > FALSE_ALARM


def test_gaussian_noise_is_independent_normals() -> None:
    """False-alarm rate 1e-6 for each claim. The steps of the grid show in more draws."""
    zeros = np.zeros((40, 50))
    noise = released(zeros, zeros, Gaussian(0.5), radius=3.0)
    assert stats.kstest(noise.ravel(), stats.norm(scale=1.5).cdf).pvalue > FALSE_ALARM
    assert stats.kstest((noise**2).sum(1) / 1.5**2, stats.chi2(50).cdf).pvalue > FALSE_ALARM


# --- where it is used

LAYOUT = {"a.weight": (2,), "b.weight": (3,)}
PUBLIC: dict[str, Any] = {"clipping": Clipping.PUBLIC}


@pytest.mark.parametrize(
    ("asked", "there"),
    [
        ({}, True),
        (PUBLIC | {"mechanism": "gaussian"}, True),
        ({"noise_multiplier": 0.0}, True),
        ({"noise_per": NoisePer.LAYER}, True),
        ({"noise_per": NoisePer.ROW}, False),
        (PUBLIC | {"mechanism": "discrete-gaussian"}, False),
        (PUBLIC | {"mechanism": "examples.mechanism:Coordinates"}, False),
    ],
)
def test_a_gpu_releases_simulated_clients_where_it_can_draw_the_noise(
    asked: dict[str, Any], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sanitiser = ClientSanitiser.of(Place(simulated(), 3), stacked(np.zeros((2, 5)), LAYOUT), task_of((4, 9), **asked))
    assert sanitiser.on_gpu([4, 9], LAYOUT) is None, "a small model, for which the host is faster"
    monkeypatch.setattr(LEAST, 5)
    with fake_gpu():
        found = sanitiser.on_gpu([4, 9], LAYOUT)
        assert (found is not None) is there
        alone = replace(sanitiser, task=replace(sanitiser.task, clients=(9,))).on_gpu([9], LAYOUT)
    if found and alone:
        assert found.seeds[1:] == alone.seeds, "whoever else is asked"
        assert len({*found.seeds}) == 2
    assert replace(sanitiser, place=Place(simulated())).on_gpu([4, 9], LAYOUT) is None, "without a seed"


@pytest.mark.parametrize("entries", [{}, {"insecure-seed": True}])
def test_no_site_releases_on_a_gpu(entries: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its noise is not PyTorch's, also if its clients offer to; nor is that of a site that trusts a run's seed."""
    monkeypatch.setattr(LEAST, 1)

    def fail(_: object) -> Any:
        raise AssertionError("asked to release on a GPU")

    class Offering(Behind):
        def train(self, *asked: Any) -> Work:
            return replace(super().train(*asked), on_gpu=fail)

    clients = Offering(lambda task, assigned: [np.zeros(1, np.int64), np.ones((1, 3), np.float32)])
    where = {"data-path": str(tmp_path), "ledger-path": str(tmp_path / "ledger"), **entries}
    reply = through_gate(asked({"w": np.zeros((1, 3), np.float32)}, task_of()), of_node(where), clients)
    assert releases(reply)["w"].shape == (1, 3)
    sanitiser = ClientSanitiser.of(Place(own(), 3), stacked(np.zeros((2, 5)), LAYOUT), task_of())
    assert sanitiser.on_gpu([0], LAYOUT) is None
