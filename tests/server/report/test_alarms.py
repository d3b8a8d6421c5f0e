"""Alarms: each goes off when it should, and only then."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from tests.helpers.history import a_round
from umbel.server.history import Round, last_rounds
from umbel.server.report.alarms import alarms, name_hypotheses


def history(rounds: int = 20, final: bool = True, **changes: Any) -> list[Round]:
    """A run in which all is well; a change is a value, or a function of the round's number. Without `final` its last
    round is not validated."""
    entries = []
    for number in range(rounds + 1):
        loss = 1 / (number + 1)
        values: dict[str, Any] = {"loss": loss, "metric": loss, "best_round": number, "nearest": [5.0, 5.0]}
        for name, change in changes.items():
            if number or name not in ("groups", "moved", "releases", "lost_nodes"):
                values[name] = change(number) if callable(change) else change
        entries.append(a_round(number, **values | ({} if final or number < rounds else {"loss": None})))
    return entries


def titles(entries: list[Round], k: int = 2, every: int = 1, validators: int | None = 5) -> list[str]:
    return [alarm.title for alarm in alarms(entries, k, every, validators)]


COLLAPSED, NOT_FINITE = "Clusters collapsed into one", "Validation loss not finite"
NEVER, NOTHING, TOO_FEW = "Validation loss never improved", "The rounds changed nothing", "Too few releases"
BOUND = "Validation reports lie at their bound"


def sometimes(loss: float | None) -> list[Round]:
    return history(loss=lambda t: loss if t in (4, 5) else 1 / (t + 1))


def every_sixth(t: int) -> float | None:
    return 1 / (t + 1) if t % 6 == 0 or t == 20 else None


@pytest.mark.parametrize(
    ("entries", "of", "told"),
    [
        (history(1), {}, []),
        (history(20), {}, []),
        (history(300), {}, []),
        # Who gets releases at the end: 96 % are as good as all.
        (history(20, groups=[10], nearest=[]), {"k": 1}, []),
        (history(4, groups=[10, 0]), {}, []),  # a short run is not judged
        (history(groups=lambda t: [10, 0] if t > 15 else [5, 5], best_round=3), {}, [COLLAPSED]),
        *((history(groups=[10, 0], ratio=[ratio, 0.0]), {}, [COLLAPSED]) for ratio in (0.2, 1.5)),
        (history(groups=lambda t: [9, 1] if t > 18 else [10, 0]), {}, [COLLAPSED]),
        (history(groups=lambda t: [9, 1] if t > 17 else [10, 0]), {}, []),
        (history(groups=[5, 0, 5, 0], nearest=[1.0] * 4), {"k": 4}, ["2 hypotheses without releases"]),
        (history(groups=[5, 0, 5], nearest=[1.0] * 3), {"k": 3}, ["1 hypothesis without releases"]),
        # Distances.
        *((history(nearest=lambda t, bad=bad: [bad, bad] if t > 7 else [5.0, 5.0]), {}, ["Hypotheses diverged"])
          for bad in (math.inf, math.nan)),
        # Validation.
        *((sometimes(bad), {}, [NOT_FINITE]) for bad in (math.inf, math.nan, None)),
        (history(loss=every_sixth), {"every": 6}, []),
        (history(loss=every_sixth), {"every": 1}, [NOT_FINITE]),
        (history(loss=None, metric=None, final=False), {"validators": 5}, [NOT_FINITE]),
        (history(loss=None, metric=None, final=False), {"validators": 0}, []),
        (history(loss=None, metric=None, final=False), {"validators": None}, []),
        (history(loss=lambda t: 1 + t / 100, best_round=0), {}, [NEVER]),
        (history(loss=lambda t: 0.5 if t == 1 else 1.0), {}, []),
        (history(loss=lambda t: 0.5 if t == 20 else 1.0), {}, []),
        (history(1, loss=1.0, final=False), {}, []),  # a single validation cannot improve
        (history(loss=lambda t: 1.0 if t == 3 else 2.9), {}, []),
        (history(loss=lambda t: 1.0 if t == 3 else 3.1), {}, ["The rounds diverged"]),
        (history(loss=1.0), {}, [NEVER, NOTHING]),
        (history(loss=1.0, moved=False, groups=[0, 0]), {}, [NEVER, TOO_FEW]),
        (history(2, loss=0.22, report_noise=0.02, report_bound=0.25), {}, [NEVER, BOUND, NOTHING]),
        (history(2, loss=0.15, report_noise=0.02, report_bound=0.25), {}, [NEVER, NOTHING]),
        # A strategy's own result that is not finite is no fault of the clients' training.
        (history(2, loss=0.5, moved=False, final=False), {}, [NEVER, "Rounds without a finite result"]),
        # Releases and nodes.
        (history(moved=lambda t: t not in (3, 9), groups=lambda t: [0, 0] if t in (3, 9) else [4, 6]), {}, [TOO_FEW]),
        (history(moved=lambda t: t not in (3, 9)), {}, ["Rounds without a finite result"]),
        (history(lost_nodes=lambda t: {5: 1, 6: 3}.get(t, 0)), {}, ["Nodes lost"]),
        # What is worst comes first.
        (history(groups=lambda t: [10 * (t > 1), 0], loss=lambda t: 1 + t / 100, lost_nodes=1, moved=lambda t: t > 1),
         {}, [NEVER, COLLAPSED, TOO_FEW, "Nodes lost"]),
    ],
)  # fmt: skip
def test_an_alarm_goes_off_when_it_should_and_only_then(entries: list[Round], of: Any, told: list[str]) -> None:
    assert titles(entries, **of) == told


@pytest.mark.parametrize(("rounds", "groups", "last"), [
    (4, [10, 10], 0),  # fewer than five rounds
    (5, [10, 10], 5),
    (50, [10, 10], 5),
    (51, [10, 10], 6),  # a tenth, rounded up
    (200, [10, 10], 20),
    (200, [1, 0], 20),  # ten releases each are 20
    (50, [1, 0], 20),
    (19, [1, 0], 0),  # there are not so many
])  # fmt: skip
def test_the_end_is_a_tenth_and_at_least_five_rounds_and_ten_releases_each(
    rounds: int, groups: list[int], last: int
) -> None:
    assert len(last_rounds(history(rounds, groups=groups))) == last


def test_rounds_that_did_not_move_anything_are_no_part_of_the_end() -> None:
    entries = history(20, moved=lambda t: t % 2 == 0, groups=lambda t: [4, 6] if t % 2 == 0 else [0, 0])
    assert [entry.number for entry in last_rounds(entries)] == [12, 14, 16, 18, 20]


def test_hypotheses_are_named_as_long_as_they_are_few() -> None:
    assert name_hypotheses([3]) == "hypothesis 3"
    assert name_hypotheses([0, 2, 5]) == "hypotheses 0, 2 and 5"
    assert name_hypotheses(range(100)) == "hypotheses 0, 1, 2, 3, 4, 5, 6 and 93 others"


def test_an_alarm_says_where_and_how_much() -> None:
    (collapse,) = alarms(history(groups=lambda t: [9, 1] if t > 18 else [10, 0], ratio=[1.5, 0.0]), 2, 1, 5)
    assert "48 of 50 releases went to hypothesis 0" in collapse.text
    assert "1.5 times the distance" in collapse.text, "Eq. 9 of the paper"
    (lost,) = alarms(history(lost_nodes=lambda t: {5: 1, 6: 3}.get(t, 0)), 2, 1, 5)
    assert re.match(r"In 2 rounds .*round 5\).*at most 3", lost.text)
