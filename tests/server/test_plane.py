"""Which rounds in the plane are kept: the first, and the one that started from the best hypotheses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from server.plane import Album
from server.rounds import Round, State
from strategies.base import Outcome


def entry(number: int, best_round: int) -> Round:
    return Round(number, 0.5, 0.5, 3, 3, 0, [2, 1], [1.0, 1.0], True, best_round, 1.0, 1, 0.1)


def outcome(round: int, releases: Any = ((1, 1), (2, 2), (3, 3)), groups: Any = (0, 0, 1)) -> Outcome:
    """Three clients released, from round to round further out."""
    arrays = None if releases is None else np.array(releases, np.float64).reshape(-1, 2) * round
    return Outcome(round, np.arange(len(releases or ())), np.array(groups, np.int64), arrays)


def play(best_rounds: list[int], last: int | None = None) -> Album:
    """Return the album of a run in which theta(t) is t everywhere; round `last` + 1 only evaluates."""
    state = State(hypotheses=theta(1), best=theta(1))
    album = Album(state)
    for number, best in enumerate(best_rounds, 1):
        state.history.append(entry(number, best))
        state.best_round = best
        if last is None or number <= last:
            state.hypotheses = theta(number + 1)
        album.add(state, outcome(min(number, last or number)))
    return album


def theta(value: float) -> dict[str, Any]:
    return {"weight": np.full((2, 1, 2), value, np.float32)}


def numbers(album: Album) -> tuple[int, int]:
    assert album.first is not None
    assert album.best is not None
    for plane in (album.first, album.best):
        assert (plane.hypotheses == plane.round).all(), "what the round started from"
        assert plane.releases[0].tolist() == [plane.round] * 2
    return album.first.round, album.best.round


@pytest.mark.parametrize(
    ("best_rounds", "kept"),
    [
        ([1, 1, 1], (1, 1)),
        ([1, 2, 2], (1, 2)),
        ([1, 2, 3], (1, 3)),
        ([0, 0, 0], (1, 3)),  # nobody validates: the newest
        ([0, 2, 2], (1, 2)),
    ],
)
def test_the_first_and_the_best_round_are_kept(best_rounds: list[int], kept: tuple[int, int]) -> None:
    assert numbers(play(best_rounds)) == kept


def test_when_the_last_round_left_the_best_hypotheses_it_is_kept() -> None:
    assert numbers(play([1, 1, 3], last=2)) == (1, 2)


def test_the_last_evaluation_does_not_replace_a_better_round() -> None:
    assert numbers(play([1, 2, 2], last=2)) == (1, 2)


def test_it_tells_whether_there_is_something_new_to_save() -> None:
    state = State(hypotheses=theta(1), best=theta(1))
    album = Album(state)
    told = []
    for number, best in enumerate([1, 2, 2, 4], 1):
        state.history.append(entry(number, best))
        state.best_round = best
        told.append(album.add(state, outcome(number)))
    assert told == [True, True, False, True]


def test_other_models_have_no_plane() -> None:
    state = State(hypotheses=theta(1), best=theta(1), history=[entry(1, 1)], best_round=1)
    album = Album(state)
    assert not album.add(state, outcome(1, None, ()))
    assert not album.add(state, None)
    assert album.first is album.best is None


def test_both_rounds_survive_on_disk() -> None:
    read = safetensors.numpy.load(play([1, 2, 2]).to_bytes())
    assert sorted(read) == [
        f"{which}.{part}" for which in ("best", "first") for part in ("groups", "hypotheses", "releases")
    ]
    assert read["first.releases"].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert read["best.releases"].tolist() == [[2, 2], [4, 4], [6, 6]]
    assert read["best.groups"].tolist() == [0, 0, 1]
    assert read["best.hypotheses"].tolist() == [[2, 2], [2, 2]]
