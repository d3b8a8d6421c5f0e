"""What is noised moves by no more than claimed, and what leaves is as alike as claimed; sites: `test_site_sums`."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from tests.helpers.examples import examples
from tests.helpers.ledgers import proven
from tests.helpers.messages import SIMULATED, asked, of_node, releases, stacked, task_of, through_gate
from tests.helpers.noise import violations
from tests.helpers.sites import simulated
from umbel.privacy.channels import Place
from umbel.privacy.channels.client import ClientSanitiser
from umbel.privacy.mechanisms import choice
from umbel.protocol.arrays import flatten
from umbel.protocol.tasks import TrainingSpec

PAIR = {"weight": (2,)}
RADIUS = 1.0
PUBLIC: dict[str, Any] = {"clipping": "public", "clip_norm": RADIUS}
CLIENTS = 60_000

anything = hnp.arrays(np.float32, (2, 2), elements=st.floats(width=32, allow_nan=True, allow_infinity=True))
places = hnp.arrays(np.float32, (3, 2), elements=st.floats(-1e6, 1e6, width=32))


@settings(derandomize=True, max_examples=examples(100))
@given(places, anything, st.integers(0, 2), st.floats(1e-3, 1e3))
def test_whatever_two_clients_train_from_a_hypothesis_lies_within_two_radii(
    hypotheses: NDArray[Any], trained: NDArray[Any], chosen: int, radius: float
) -> None:
    """Training that blew up counts as no update. 32-bit hypotheses leave no more than they can carry."""
    task = task_of((0, 1), **PUBLIC | {"clip_norm": radius, "noise_multiplier": 0.0})
    sanitiser = ClientSanitiser.of(Place(simulated(clipping="any floor=0")), stacked(hypotheses, PAIR), task)
    with np.errstate(over="ignore", invalid="ignore"):
        left = flatten(sanitiser.sanitised(stacked(trained, PAIR), np.full(2, chosen), iter(())))
    rounding = 4 * float(np.spacing(np.float32(np.abs(hypotheses).max() + radius)))
    assert np.linalg.norm(left - hypotheses[chosen], axis=1).max() <= radius + rounding
    assert np.linalg.norm(left[0] - left[1]) <= 2 * radius + rounding


@cache
def sent(best: int, update: float, seed: int, **changes: Any) -> NDArray[np.float64]:
    """What leaves the real gate of many clients with the same data: hypotheses far apart, so that the choice shows."""
    hypotheses = np.array([[0.0, 0.0], [200.0, 0.0]])

    def compute(task: TrainingSpec, assigned: NDArray[np.int64]) -> Any:
        chosen = np.where(assigned == choice.OWN, best, assigned)
        trained = hypotheses[chosen] + [10 * update, 0.0]  # more than the radius, so that it is clipped
        return [chosen, *stacked(trained, PAIR).values()]

    content = asked(stacked(hypotheses, PAIR), task_of(tuple(range(CLIENTS)), **PUBLIC | changes))
    reply = through_gate(content, of_node(SIMULATED, seed=seed), compute)
    return flatten(releases(reply))


@pytest.mark.slow
@pytest.mark.parametrize("bins", [10, 100])
def test_rounded_releases_of_any_two_data_sets_are_as_alike_as_claimed(bins: int) -> None:
    """n = 2, nu = 4 and choice-epsilon .5: 2 * 2/4 + .5 = 1.5; false alarm 10,000 * 2 * 3e-7 = .006.

    The most different data sets that a client can have: another best hypothesis, and updates two radii apart. Few cells
    catch a claim that forgets the other radius, or the choice.
    """
    first, second = (sent(*which, noise_multiplier=4.0, choice_epsilon=0.5) for which in ((0, 1.0, 1), (1, -1.0, 2)))
    assert violations(first, second, 1.5, bins) == (0, bins**2)
    assert bins == 100 or min(violations(first, second, claim, bins)[0] for claim in (1.0, 0.5)) > 0


def test_gaussian_releases_are_as_alike_as_claimed_at_delta() -> None:
    """The chance of the half plane where they differ most, at 6 standard errors: P <= e^eps Q + delta."""
    found = guarantee_of(2.0)
    first, second = (sent(*which, noise_multiplier=2.0, mechanism="gaussian", choice_epsilon=0.5)[:, 0]
                     for which in ((0, 1.0, 1), (1, -1.0, 2)))  # fmt: skip
    for edge in np.linspace(-10, 210, 45):
        for ours, theirs in ((first > edge, second > edge), (second < edge, first < edge)):
            error = 6 * math.sqrt((ours.mean() + math.exp(2 * found) * theirs.mean()) / CLIENTS)
            assert ours.mean() <= math.exp(found) * theirs.mean() + 0.01 + error


def guarantee_of(nu: float) -> float:
    task = task_of((0,), **PUBLIC, noise_multiplier=nu, mechanism="gaussian", choice_epsilon=0.5)
    hypotheses = stacked(np.zeros((2, 2)), PAIR)
    found = proven({ClientSanitiser.of(Place(simulated()), hypotheses, task).release: 1}, 0.01)
    return found.epsilon
