"""Which rounds in the plane are kept: the first, and the one that started from the best hypotheses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from umbel.server.history import Round, State
from umbel.server.snapshots import Snapshots
from umbel.strategies.base import Outcome


def entry(number: int, best_round: int) -> Round:
    return Round(number, 0.5, 0.5, 3, 3, 0, [2, 1], [1.0, 1.0], True, best_round, 1.0, 1, 0.1)


def outcome(round: int, releases: Any = ((1, 1), (2, 2), (3, 3)), groups: Any = (0, 0, 1)) -> Outcome:
    """Three clients released, from round to round further out."""
    arrays = None if releases is None else np.array(releases, np.float64).reshape(-1, 2) * round
    labels, m = np.array(groups, np.int64), len(releases or ())
    counts = np.bincount(labels[labels >= 0], minlength=2)
    return Outcome(round, np.arange(m), labels, counts, arrays, asked=m, lost_nodes=0, following=None)


def play(best_rounds: list[int], last: int | None = None) -> Snapshots:
    """Return what is kept of a run in which theta(t) is t everywhere; round `last` + 1 only evaluates."""
    state = State(hypotheses=theta(1), best=theta(1))
    snapshots = Snapshots(state)
    for number, best in enumerate(best_rounds, 1):
        state.history.append(entry(number, best))
        state.best_round = best
        if last is None or number <= last:
            state.hypotheses = theta(number + 1)
        snapshots.add(state, outcome(number) if last is None or number <= last else None)
    return snapshots


def theta(value: float) -> dict[str, Any]:
    return {"weight": np.full((2, 1, 2), value, np.float32)}


def numbers(snapshots: Snapshots) -> tuple[int, int]:
    assert snapshots.first is not None
    assert snapshots.best is not None
    for one in (snapshots.first, snapshots.best):
        assert (one.hypotheses == one.round).all(), "what the round started from"
        assert one.releases[0].tolist() == [one.round] * 2
    return snapshots.first.round, snapshots.best.round


@pytest.mark.parametrize(
    ("best_rounds", "last", "kept"),
    [
        ([1, 1, 1], None, (1, 1)),
        ([1, 2, 3], None, (1, 3)),
        ([0, 0, 0], None, (1, 3)),  # nobody validates: the newest
        ([0, 2, 2], None, (1, 2)),
        ([1, 1, 3], 2, (1, 2)),  # the last round left the best hypotheses
        ([1, 2, 2], 2, (1, 2)),  # the last evaluation found no better ones
    ],
)
def test_the_first_and_the_best_round_are_kept(best_rounds: list[int], last: int | None, kept: tuple[int, int]) -> None:
    assert numbers(play(best_rounds, last)) == kept


def test_other_models_have_no_plane() -> None:
    state = State(hypotheses=theta(1), best=theta(1), history=[entry(1, 1)], best_round=1)
    snapshots = Snapshots(state)
    assert not snapshots.add(state, outcome(1, None, ()))
    assert not snapshots.add(state, None)
    assert snapshots.first is snapshots.best is None


def test_both_rounds_survive_on_disk() -> None:
    read = safetensors.numpy.load(play([1, 2, 2]).to_bytes())
    assert sorted(read) == [
        f"{which}.{part}" for which in ("best", "first") for part in ("groups", "hypotheses", "releases")
    ]
    assert read["first.releases"].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert read["best.releases"].tolist() == [[2, 2], [4, 4], [6, 6]]
    assert read["best.groups"].tolist() == [0, 0, 1]
    assert read["best.hypotheses"].tolist() == [[2, 2], [2, 2]]


def test_a_run_that_goes_on_keeps_what_it_kept() -> None:
    """The best round comes again only where it is bettered."""
    before = play([1, 2, 2])
    state = State(hypotheses=theta(4), best=theta(2), history=[entry(t, min(t, 2)) for t in (1, 2, 3)], best_round=2)
    after = Snapshots.of_bytes(state, before.to_bytes())
    assert numbers(after) == (1, 2)
    for one, other in ((after.first, before.first), (after.best, before.best)):
        assert one is not None
        assert other is not None
        for part in ("releases", "groups", "hypotheses"):
            np.testing.assert_array_equal(getattr(one, part), getattr(other, part), strict=True)
    for number, best, kept in ((4, 2, False), (5, 5, True)):
        state.history.append(entry(number, best))
        state.best_round = best
        state.hypotheses = theta(number + 1)
        assert after.add(state, outcome(number)) is kept
    assert numbers(after) == (1, 5)
