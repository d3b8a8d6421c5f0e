"""Alarms: each goes off when it should, and only then."""

from __future__ import annotations

import math
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


def the_alarm(entries: list[Round], k: int = 2) -> tuple[str, str]:
    """Return title and text of the only alarm."""
    (alarm,) = alarms(entries, k, 1, 5)
    return alarm.title, alarm.text


def titles(entries: list[Round], k: int = 2, every: int = 1, validators: int | None = 5) -> list[str]:
    return [alarm.title for alarm in alarms(entries, k, every, validators)]


@pytest.mark.parametrize(
    ("entries", "k"),
    [
        (history(1), 2),
        (history(20), 2),
        (history(300), 2),
        (history(20, groups=[10], nearest=[]), 1),  # a single hypothesis cannot collapse
        (history(4, groups=[10, 0]), 2),  # a short run is not judged
        (history(1, loss=1.0, final=False), 2),  # a single validation cannot improve
    ],
)
def test_a_run_in_which_all_is_well_gives_no_alarm(entries: list[Round], k: int) -> None:
    assert titles(entries, k) == []


# --- who gets releases at the end


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


def test_all_releases_in_one_hypothesis_are_a_collapse() -> None:
    entries = history(20, groups=lambda t: [10, 0] if t > 15 else [5, 5], best_round=3)
    title, text = the_alarm(entries)
    assert title == "Clusters collapsed into one"
    assert "all 50 releases went to hypothesis 0" in text
    assert text.endswith("before that: after round 3.")
    assert "before that" not in the_alarm(history(20, groups=[10, 0]))[1], "these are from the end"


def test_a_release_that_strays_now_and_then_changes_nothing() -> None:
    _, text = the_alarm(history(20, groups=lambda t: [9, 1] if t > 18 else [10, 0]))
    assert "48 of 50 releases went to hypothesis 0" in text, "96 %, and 95 are as good as all"
    assert titles(history(20, groups=lambda t: [9, 1] if t > 17 else [10, 0])) == []


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        ([0.2, 0.0], "typically 0.2 of the distance"),
        ([1.5, 0.0], "typically 1.5 times the distance"),
        ([], "Another seed"),
    ],
)
def test_a_collapse_is_explained_by_eq_9(ratio: list[float], words: str) -> None:
    assert words in the_alarm(history(20, groups=[10, 0], ratio=ratio))[1]


def test_hypotheses_without_releases_are_named() -> None:
    entries = history(20, groups=[5, 0, 5, 0], nearest=[1.0] * 4)
    title, text = the_alarm(entries, 4)
    assert title == "2 hypotheses without releases"
    assert "no release went to hypotheses 1 and 3. That is right if" in text
    assert "of at most 2 kinds" in text
    assert titles(history(20, groups=[5, 0, 5], nearest=[1.0] * 3), k=3) == ["1 hypothesis without releases"]


# --- distances


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_hypotheses_that_are_not_finite_have_diverged(bad: float) -> None:
    entries = history(20, nearest=lambda t: [bad, bad] if t > 7 else [5.0, 5.0])
    title, text = the_alarm(entries)
    assert title == "Hypotheses diverged"
    assert "undefined after round 8" in text


# --- validation


@pytest.mark.parametrize("bad", [math.inf, math.nan, None])
def test_a_validation_without_a_finite_loss_is_told(bad: float | None) -> None:
    entries = history(20, loss=lambda t: bad if t in (4, 5) else 1 / (t + 1))
    title, text = the_alarm(entries)
    assert title == "Validation loss not finite"
    assert text.startswith("In 2 validations of 21 (the first after round 4)")


def test_a_round_that_was_not_to_validate_lacks_no_loss() -> None:
    def validated(t: int) -> float | None:
        return 1 / (t + 1) if t % 6 == 0 or t == 20 else None

    assert titles(history(20, loss=validated), every=6) == []
    assert titles(history(20, loss=validated), every=1) == ["Validation loss not finite"]


@pytest.mark.parametrize(("validators", "told"), [(5, ["Validation loss not finite"]), (0, []), (None, [])])
def test_without_any_loss_it_matters_whether_anybody_validates(validators: int | None, told: list[str]) -> None:
    assert titles(history(20, loss=None, metric=None, final=False), validators=validators) == told


def test_a_loss_that_never_gets_better_is_told() -> None:
    title, text = the_alarm(history(20, loss=lambda t: 1 + t / 100, best_round=0))
    assert title == "Validation loss never improved"
    assert "at the start (round 0), had the lowest loss of all 21" in text


@pytest.mark.parametrize("dip", [1, 20])
def test_one_better_validation_is_an_improvement(dip: int) -> None:
    assert titles(history(20, loss=lambda t: 0.5 if t == dip else 1.0)) == []


# --- releases and nodes


def test_rounds_with_too_few_releases_are_counted() -> None:
    entries = history(20, moved=lambda t: t not in (3, 9), groups=lambda t: [0, 0] if t in (3, 9) else [4, 6])
    title, text = the_alarm(entries)
    assert title == "Too few releases"
    assert text.startswith("2 rounds of 20 (the first was round 3) had fewer releases")


def test_rounds_whose_result_is_not_finite_are_told_apart_from_them() -> None:
    title, text = the_alarm(history(20, moved=lambda t: t not in (3, 9)))
    assert title == "Rounds without a finite result"
    assert "2 rounds of 20 (the first was round 3)" in text


def test_lost_nodes_are_counted() -> None:
    title, text = the_alarm(history(20, lost_nodes=lambda t: {5: 1, 6: 3}.get(t, 0)))
    assert title == "Nodes lost"
    assert text.startswith("In 2 rounds (the first was round 5) nodes sent no usable reply to training: at most 3")


def test_what_is_worst_comes_first() -> None:
    entries = history(
        20, groups=lambda t: [10 * (t > 1), 0], loss=lambda t: 1 + t / 100, lost_nodes=1,
        moved=lambda t: t > 1,
    )  # fmt: skip
    assert titles(entries) == [
        "Validation loss never improved",
        "Clusters collapsed into one",
        "Too few releases",
        "Nodes lost",
    ]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "hypothesis 3"),
        ([0, 2], "hypotheses 0 and 2"),
        ([0, 2, 5], "hypotheses 0, 2 and 5"),
        (range(100), "hypotheses 0, 1, 2, 3, 4, 5, 6 and 93 others"),
    ],
)
def test_hypotheses_are_named_as_long_as_they_are_few(numbers: Any, text: str) -> None:
    assert name_hypotheses(numbers) == text


def test_rounds_that_led_away_from_the_best_are_told() -> None:
    assert titles(history(20, loss=lambda t: 1.0 if t == 3 else 2.9)) == []
    assert titles(history(20, loss=lambda t: 1.0 if t == 3 else 3.1)) == ["The rounds diverged"]


def test_rounds_that_changed_nothing_are_told_apart_from_rounds_of_too_few_releases() -> None:
    assert "The rounds changed nothing" in titles(history(20, loss=1.0))
    assert "The rounds changed nothing" not in titles(history(20, loss=1.0, moved=False, groups=[0, 0]))


@pytest.mark.parametrize(("loss", "told"), [(0.22, True), (0.15, False)])
def test_reports_at_the_bound_to_which_sites_clip_them_are_told(loss: float, told: bool) -> None:
    noisy = history(2, loss=loss, report_noise=0.02, report_bound=0.25)
    assert ("Validation reports lie at their bound" in titles(noisy)) is told


def test_a_strategy_whose_result_is_not_finite_is_named_and_not_the_clients_training() -> None:
    stuck = "The rounds changed nothing"
    assert stuck in titles(history(2, loss=0.5))
    assert stuck not in titles(history(2, loss=0.5, moved=False, final=False))
