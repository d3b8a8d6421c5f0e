"""What people read of a run: in the units of the data, and with no more promised than holds."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.helpers.history import a_round, a_validation
from umbel import models
from umbel.data import Manifest
from umbel.protocol.arrays import Arrays
from umbel.protocol.release import Clipping, Kind, Release
from umbel.server.history import Round, State
from umbel.server.summary import Summary

HOSPITAL = Manifest(
    name="hospital",
    clients=2,
    split={"train": 1, "validation": 1},
    units={"target": {"name": "average total payment", "unit": "dollars", "scale": 10_000}},
)
SYNTHETIC = Manifest(name="synthetic", clients=2, split={"train": 1, "validation": 1}, truth=[[5.0, 6.0], [4.0, -4.5]])


def release(
    noise_multiplier: float = 3.0, mode: Clipping = Clipping.UPDATE, hypotheses: int = 2, **changes: Any
) -> Release:
    """One of 11 parameters, whose paper's budget is 11 / 3, or what the noise multiplier says."""
    return Release(Kind.TRAIN, 11, noise_multiplier, mode, hypotheses=hypotheses, **changes)


def summary(model: str = "mlp", manifest: Manifest | None = HOSPITAL, loss: str = "", **changes: Any) -> Summary:
    return Summary(models.load(model, loss), manifest, release(**changes))


def entry(number: int = 3, **changes: Any) -> Round:
    """A round in which 98 of 100 clients released."""
    values: dict[str, Any] = {"loss": 0.09, "metric": 0.09, "asked": 100, "releases": 98, "groups": [60, 38]}
    return a_round(number, **{"best_round": 2} | values | changes)


FINAL = a_validation(4, loss=0.09, metric=0.09, best_round=2)


def linear(*rows: tuple[float, float]) -> Arrays:
    return {"weight": np.array(rows, np.float32)[:, None]}


def state(best: Arrays | None = None, **changes: Any) -> State:
    """A run that ended after three rounds."""
    best = best or linear((0, 0))
    history = [entry(number=1), entry(number=2), entry(number=3), FINAL]
    values: dict[str, Any] = {"best_loss": 0.08, "best_round": 2, "history": history, "stopped": "all 3 rounds done"}
    return State(hypotheses=best, best=best, **values | changes)


# --- a loss


@pytest.mark.parametrize(
    ("model", "manifest", "value", "text"),
    [
        ("mlp", HOSPITAL, 0.09, "RMSE 900.0 dollars"),
        ("mlp", HOSPITAL, 0.123456, "RMSE 1,234.6 dollars"),
        ("linear", SYNTHETIC, 0.5766, "RMSE 0.5766"),
        ("linear", None, 0.5766, "RMSE 0.5766"),
        ("cnn", HOSPITAL, 0.5766, "cross-entropy 0.5766"),
    ],
)
def test_a_loss_has_a_name_and_the_unit_of_the_target(
    model: str, manifest: Manifest | None, value: float, text: str
) -> None:
    assert summary(model, manifest).loss(value) == text
    if model != "cnn":
        assert summary(model, manifest, "rmse").loss(value) == text, "whichever was descended"


# --- a round

HOSPITAL_LINE = "round 3/3  validation RMSE 900.0 dollars  best after 1 rounds  releases 98/100 (60+38)"


@pytest.mark.parametrize(
    ("said", "rounds", "line"),
    [
        (entry(), 100, "round   3/100  validation RMSE 900.0 dollars  best after 1 rounds  releases 98/100 (60+38)"),
        (entry(loss=None, metric=None), 3, "round 3/3  releases 98/100 (60+38)"),
        (entry(lost_nodes=2), 3, f"{HOSPITAL_LINE}  2 nodes lost"),
        (
            entry(releases=1, groups=[0, 0], moved=False),
            3,
            HOSPITAL_LINE.replace("98/100 (60+38)", "1/100 (0+0)  TOO FEW RELEASES: hypotheses unchanged"),
        ),
        (FINAL, 3, "after the last round  validation RMSE 900.0 dollars  best after 1 rounds"),
    ],
)
def test_a_round_is_one_line(said: Round, rounds: int, line: str) -> None:
    assert summary().round_line(said, rounds=rounds) == line


def test_a_metric_that_is_not_the_loss_is_told_as_well() -> None:
    line = summary("cnn", None).round_line(entry(loss=0.5, metric=0.83), rounds=9)
    assert "cross-entropy 0.5000  accuracy 0.8300" in line


def test_rounds_and_the_end_count_alike_what_the_best_were_trained_for() -> None:
    """Round t starts from what t - 1 rounds of training left; the evaluation at the end is of all rounds."""
    final = a_validation(4, loss=0.07, metric=0.07, best_round=4)
    assert summary().round_line(final, rounds=3).endswith("best after 3 rounds")
    assert "after 3 rounds of training" in summary().closing_lines(state(best_round=4, best_loss=0.07))[1]


# --- the end


def test_the_closing_lines_tell_how_it_ended_and_what_is_best() -> None:
    lines = summary().closing_lines(state())
    assert lines[0] == "The run is over after 3 rounds: all 3 rounds done."
    assert lines[1] == "Best hypotheses: after 1 rounds of training, validation RMSE 800.0 dollars."
    # Small hypotheses are printed, and large ones are not.
    lines = summary().closing_lines(state({"weight": np.ones((2, 3)) * [[0.5], [-1.25]]}))
    assert "  hypothesis 0: (0.500, 0.500, 0.500)" in lines
    assert "  hypothesis 1: (-1.250, -1.250, -1.250)" in lines
    assert not any("hypothesis" in line for line in summary().closing_lines(state({"weight": np.ones((2, 12))})))


def test_where_the_truth_is_known_its_distance_is_told() -> None:
    lines = summary("linear", SYNTHETIC).closing_lines(state(linear((4, -4), (5, 7))))
    assert "  true parameters (5, 6): hypothesis 1 is 1.000 away" in lines
    assert "  true parameters (4, -4.5): hypothesis 0 is 0.500 away" in lines
    # Another model than the true one cannot be compared.
    with_intercept = {"weight": np.ones((2, 1, 2)), "bias": np.ones((2, 1))}
    lines = summary("linear", SYNTHETIC).closing_lines(state(with_intercept))
    assert not any("true parameters" in line for line in lines)


def test_clients_that_no_guarantee_covers_are_named() -> None:
    exact = summary().closing_lines(state(history=[entry(exact_reports=40), entry(exact_reports=0)]))
    assert exact[-2] == "Outside the guarantee: 40 validation clients, which reported exact losses."


# --- what it cost. The median client released 1.5 times, which counts as 2, and the busiest 3 times.


def told(**changes: Any) -> list[str]:
    """Return the lines on privacy."""
    return summary(**changes).closing_lines(state())[-2:]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"choice_epsilon": 1.0}, "the radius is the norm of the client's own update"),
        ({"mode": Clipping.PUBLIC}, "the choice among 2 hypotheses is open"),
    ],
)
def test_where_nothing_is_guaranteed_the_reason_is_told_and_a_heuristic_is_called_one(
    changes: dict[str, Any], why: str
) -> None:
    assert told(**changes) == [
        f"Guaranteed to a client: nothing, since {why}.",
        # 11/3 a participation.
        "Paper's budget, a heuristic: n/nu a participation, 5.5 (median), 11 (maximum).",
    ]


REPORTS = r" What training clients report, where a site lets them, comes on top\."
GUARANTEED = (
    r"Guaranteed to a client, between any two of its data sets: epsilon (\S+) \(median\), (\S+) \(maximum\) "
    r"at delta 1e-05; "
)


@pytest.mark.parametrize(("hypotheses", "choice", "pure"), [(2, 1.0, ("2.1", "3.15")), (1, 0.0, ("0.1", "0.15"))])
def test_a_guarantee_is_between_any_two_data_sets_of_a_client(
    hypotheses: int, choice: float, pure: tuple[str, str]
) -> None:
    """2 n / nu = .05 a participation at most, and choice-epsilon on top where there is a choice."""
    first, second = told(noise_multiplier=440.0, mode=Clipping.PUBLIC, hypotheses=hypotheses, choice_epsilon=choice)
    found = re.fullmatch(GUARANTEED + r"pure epsilon (\S+), (\S+)\." + REPORTS, first)
    assert found, first
    assert found.groups()[2:] == pure
    assert all(0 < float(at_delta) <= float(most) for at_delta, most in zip(found.groups()[:2], pure, strict=True))
    assert second == "Paper's budget, a heuristic: n/nu a participation, 0.0375 (median), 0.075 (maximum)."


def test_a_mechanism_without_a_pure_epsilon_says_so() -> None:
    first, second = told(mode=Clipping.PUBLIC, mechanism="gaussian", choice_epsilon=1.0)
    found = re.fullmatch(GUARANTEED + r"no pure epsilon\." + REPORTS, first)
    assert found, first
    median, maximum = map(float, found.groups())
    assert 2 < median < maximum < 20
    assert second == "Paper's budget, a heuristic: none; it counts vector Laplace noise alone."


@pytest.mark.parametrize("mode", Clipping)
def test_without_noise_nothing_bounds_what_was_given_away(mode: Clipping) -> None:
    assert told(noise_multiplier=0.0, mode=mode, choice_epsilon=1.0) == [
        "Guaranteed to a client: nothing, since there is no noise.",
        "Paper's budget, a heuristic: none; it counts vector Laplace noise alone.",
    ]


def test_rounds_that_led_away_from_the_best_are_told() -> None:
    def ended(loss: float) -> list[str]:
        return summary().closing_lines(state(history=[entry(number=1, loss=0.1), entry(number=2, loss=loss)]))

    assert not any("diverged" in line for line in ended(0.29))
    assert any(line.startswith("Warning: the rounds diverged") for line in ended(0.31))
