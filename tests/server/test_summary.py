"""What people read of a run: in the units of the data, and with no more promised than holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.history import a_round
from umbel import models
from umbel.data import Manifest
from umbel.privacy.accounting.guarantee import DELTA, Guarantee, amount, guarantee
from umbel.privacy.accounting.odometer import clients_to_date
from umbel.privacy.accounting.rows import row_guarantee
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
REVERSED = HOSPITAL.model_copy(update={"units": {"target": {"unit": "dollars", "scale": -10_000}}})
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
    return a_round(number, **{"best_round": 1} | values | changes)


def linear(*rows: tuple[float, float]) -> Arrays:
    return {"weight": np.array(rows, np.float32)[:, None]}


def state(best: Arrays | None = None, **changes: Any) -> State:
    """A run that ended after three rounds."""
    best = best or linear((0, 0))
    history = [a_round(0, loss=0.09), entry(number=1), entry(number=2), entry(number=3)]
    values: dict[str, Any] = {"best_loss": 0.08, "best_round": 1, "history": history, "stopped": "all 3 rounds done"}
    return State(hypotheses=best, best=best, **values | changes)


# --- a loss


@pytest.mark.parametrize(
    ("model", "manifest", "value", "text"),
    [
        ("mlp", HOSPITAL, 0.09, "RMSE 900.0 dollars"),
        ("mlp", HOSPITAL, 0.123456, "RMSE 1,234.6 dollars"),
        ("mlp", REVERSED, 0.09, "RMSE 900.0 dollars"),
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

HOSPITAL_LINE = "round 3/3  validation RMSE 900.0 dollars  best after round 1  releases 98/100 (60+38)"


@pytest.mark.parametrize(
    ("said", "rounds", "line"),
    [
        (entry(), 100, HOSPITAL_LINE.replace("3/3", "  3/100")),
        (entry(loss=None, metric=None), 3, "round 3/3  releases 98/100 (60+38)"),
        (entry(lost_nodes=1), 3, f"{HOSPITAL_LINE}  1 node lost"),
        (entry(lost_nodes=2), 3, f"{HOSPITAL_LINE}  2 nodes lost"),
        (
            entry(releases=1, groups=[0, 0], moved=False),
            3,
            HOSPITAL_LINE.replace("98/100 (60+38)", "1/100 (0+0)  TOO FEW RELEASES: hypotheses unchanged"),
        ),
        (entry(moved=False), 3, f"{HOSPITAL_LINE}  NOT FINITE: hypotheses unchanged"),
        (
            a_round(0, loss=0.09, metric=0.09),
            3,
            "round 0/3  validation RMSE 900.0 dollars  best at the start (round 0)",
        ),
    ],
)
def test_a_round_is_one_line(said: Round, rounds: int, line: str) -> None:
    assert summary().round_line(said, rounds=rounds) == line


@pytest.mark.parametrize(("value", "told"), [(0.09, "900.0"), (0.0009, "9"), (0.00012345, "1.23"), (2e-7, "0.002")])
def test_a_small_loss_keeps_three_digits(value: float, told: str) -> None:
    assert summary().loss(value) == f"RMSE {told} dollars"


def test_a_metric_that_is_not_the_loss_is_told_as_well() -> None:
    line = summary("cnn", None).round_line(entry(loss=0.5, metric=0.83), rounds=9)
    assert "cross-entropy 0.5000  accuracy 0.8300" in line


# --- the end


def test_the_last_round_leads_and_the_best_stands_beside_it_and_says_who_chose_it() -> None:
    ended, outcome = summary().outcome_lines(state())
    assert "after round 3: all 3 rounds done" in ended
    assert re.search("RMSE 900.0 dollars after round 3.*They chose .*RMSE 800.0 dollars after round 1", outcome)
    exact = [entry(number=2), entry(exact_reports=40)]
    assert "Their exact losses chose" in summary().outcome_lines(state(history=exact))[1]
    stopped = summary().outcome_lines(state(history=[entry(number=1), entry(number=2), entry(loss=None)]))
    assert "dollars after round 2." in stopped[1], "the last that was validated"
    final = [entry(number=1), entry(number=2), entry(loss=0.07, metric=0.07, best_round=3)]
    alone = summary().outcome_lines(state(best_round=3, best_loss=0.07, history=final))[1]
    assert alone.endswith("RMSE 700.0 dollars after round 3, the lowest loss of all rounds.")


def test_where_the_truth_is_known_its_distance_is_told() -> None:
    lines = summary("linear", SYNTHETIC).outcome_lines(state(linear((4, -4), (5, 7))))
    assert "True parameters (5, 6): hypothesis 1 is 1.000 away." in lines
    assert "True parameters (4, -4.5): hypothesis 0 is 0.500 away." in lines
    # Another model than the true one cannot be compared.
    with_intercept = {"weight": np.ones((2, 1, 2)), "bias": np.ones((2, 1))}
    lines = summary("linear", SYNTHETIC).outcome_lines(state(with_intercept))
    assert not any("True parameters" in line for line in lines)


def test_clients_that_no_guarantee_covers_are_named() -> None:
    exact = summary(mode=Clipping.PUBLIC, hypotheses=1).guarantee_lines(1, 40)
    assert exact[-1] == "Outside the guarantee: 40 validation clients, which reported exact losses."
    assert len(summary().guarantee_lines(1, 40)) == 1, "without a guarantee nothing is outside of one"


# --- what it cost


def told(**changes: Any) -> list[str]:
    """Return the lines on privacy."""
    return summary(**changes).privacy_lines(entry().max_participations)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"choice_epsilon": 1.0}, "each update is clipped to its own norm, which proves nothing"),
        ({"mode": Clipping.PUBLIC}, "the choice among 2 hypotheses is open"),
        ({"noise_multiplier": 0.0, "choice_epsilon": 1.0}, "there is no noise"),
        ({"noise_multiplier": 0.0, "mode": Clipping.PUBLIC, "choice_epsilon": 1.0}, "there is no noise"),
    ],
)
def test_where_nothing_is_guaranteed_the_reason_is_told(changes: dict[str, Any], why: str) -> None:
    assert told(**changes) == [f"Guarantee: none, because {why}."]


GAUSSIAN: dict[str, Any] = {"mode": Clipping.PUBLIC, "mechanism": "gaussian", "noise_multiplier": 20.0, "hypotheses": 1}
ROWS = {"row_noise_multiplier": 1.0, "row_rate": 0.02, "row_steps": 50}
REPORTS = "If training clients also report losses, which their site must allow, that costs more."
GUARANTEED = "Guarantee, between any two data sets of a client: "


@pytest.mark.parametrize(("hypotheses", "choice", "pure"), [(2, 1.0, "3.15"), (1, 0.0, "0.15")])
def test_a_guarantee_is_one_number_between_any_two_data_sets_of_a_client(
    hypotheses: int, choice: float, pure: str
) -> None:
    """2 n / nu = .05 a participation at most, and choice-epsilon on top where there is a choice."""
    formal = summary(noise_multiplier=440.0, mode=Clipping.PUBLIC, hypotheses=hypotheses, choice_epsilon=choice)
    first, means, last = replace(formal, delta=0.0).privacy_lines(3)
    assert (first, last) == (f"{GUARANTEED}pure epsilon {pure}.", REPORTS)
    assert f"at most {np.exp(float(pure)):.4g} times as likely." in means
    at_delta = guarantee({formal.release: 3}, 1e-3)
    assert at_delta is not None
    assert at_delta.epsilon < at_delta.pure
    assert replace(formal, delta=1e-3).guarantee_lines(3) == [
        f"{GUARANTEED}epsilon {amount(at_delta.epsilon)} at delta 0.001."
    ]


def test_while_a_run_keeps_its_maximum_its_guarantee_is_the_planned_one() -> None:
    """However often the busiest client took part, and however many rounds were left undone for any reason."""
    planned = replace(summary(**GAUSSIAN), most=12, capped=True)
    known = guarantee({planned.release: 12})
    assert known is not None
    told = f"epsilon {amount(known.epsilon)} at delta 1e-05."
    assert {tuple(planned.guarantee_lines(often, left=left)) for often in (1, 12) for left in (0, 40)} == {
        (f"{GUARANTEED}{told}",)
    }
    rows = replace(summary(noise_multiplier=0.0, mode=Clipping.PUBLIC, hypotheses=1, **ROWS), most=12, capped=True)
    of_row = row_guarantee({rows.release: 12})
    assert of_row is not None
    told = f"epsilon {amount(of_row.epsilon)} at delta 1e-05."
    assert rows.guarantee_lines(2)[0] == f"Guarantee for a row of a client, added or removed: {told}"


def test_a_mechanism_without_a_pure_epsilon_has_none_at_delta_0() -> None:
    first, means, last = told(mode=Clipping.PUBLIC, mechanism="gaussian", choice_epsilon=1.0)
    found = re.fullmatch(rf"{GUARANTEED}epsilon (\S+) at delta 1e-05\.", first)
    assert found, first
    assert 2 < float(found[1]) < 20
    assert means.endswith("times as likely, plus 1e-05.")
    assert last == REPORTS
    assert replace(summary(**GAUSSIAN), delta=0.0).guarantee_lines(1) == [f"{GUARANTEED}no epsilon at delta 0."]


@pytest.mark.parametrize("noise", [0.0, 440.0])
def test_guarantees_for_a_row_and_for_its_client_are_told_apart_and_the_one_that_exists_first(noise: float) -> None:
    lines = summary(noise_multiplier=noise, mode=Clipping.PUBLIC, hypotheses=1, **ROWS).guarantee_lines(3)
    of_row = next(i for i, line in enumerate(lines) if line.startswith("Guarantee for a row of a client"))
    assert lines[of_row + 1].startswith("That guarantee hides each single row, and not")
    if noise:
        assert lines[0].startswith(GUARANTEED)
        assert lines[1] == "That guarantee hides a client's whole data."
        assert of_row == 2
    else:
        assert of_row == 0
        assert lines[2:] == [
            "No guarantee for a client as a whole, because the noise hides single rows, and not the client."
        ]


def test_rows_have_no_guarantee_where_the_choice_is_open() -> None:
    *_, last = summary(noise_multiplier=0.0, mode=Clipping.PUBLIC, **ROWS).guarantee_lines(1)
    assert last == "Guarantee for a row: none, because the choice among 2 hypotheses is open."


@pytest.mark.parametrize(("hypotheses", "told_of"), [(1, True), (2, False)])
def test_reports_come_on_top_of_a_rows_guarantee_too(hypotheses: int, told_of: bool) -> None:
    lines = told(noise_multiplier=0.0, mode=Clipping.PUBLIC, hypotheses=hypotheses, **ROWS)
    assert (REPORTS in lines) is told_of


@pytest.mark.parametrize(("rounds", "left"), [(3, 0), (7, 4), (0, 0)])
def test_rounds_that_a_run_has_not_done_are_counted_without_validations(rounds: int, left: int) -> None:
    assert replace(summary(), rounds=rounds).left(state().history) == left


@pytest.mark.parametrize(("most", "fixed"), [(12, 12), (30, 30), (np.inf, 50)])
def test_without_a_maximum_results_may_have_decided_the_end_and_the_epsilon_does_not_count_on_the_number_of_rounds(
    most: float, fixed: int
) -> None:
    """Composition is for a number of releases that is fixed in advance, and a figure to date for any."""
    early = replace(summary(**GAUSSIAN), most=most)
    first, reason = early.guarantee_lines(10, left=40)
    assert "40 rounds of the run were not done" in reason
    planned = guarantee({early.release: fixed})
    assert planned is not None
    epsilon = min(planned.epsilon, clients_to_date({early.release: 10}, DELTA))
    assert first == f"{GUARANTEED}epsilon {amount(epsilon)} at delta 1e-05."
    counted = guarantee({early.release: 10})
    assert counted is not None
    assert early.guarantee_lines(10) == [f"{GUARANTEED}epsilon {amount(counted.epsilon)} at delta 1e-05."]


@pytest.mark.parametrize("changes", [GAUSSIAN, {}])
def test_an_early_end_is_not_told_where_no_client_could_have_released_more_or_nothing_is_guaranteed(
    changes: dict[str, Any],
) -> None:
    early = replace(summary(**changes), most=10)
    assert early.guarantee_lines(10, left=40) == early.guarantee_lines(10)


def test_a_run_planned_for_a_billion_rounds_has_an_epsilon_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many releases as it could have made have none in a reasonable time."""
    early, asked = summary(**GAUSSIAN | {"mechanism": "laplace", "noise_multiplier": 440.0}), list[int]()

    def counted(releases: Mapping[Release, int], delta: float = DELTA) -> Guarantee | None:
        asked.extend(releases.values())
        return guarantee(releases, delta)

    monkeypatch.setattr("umbel.server.summary.guarantee", counted)
    early.guarantee_lines(10, left=10**9)
    assert max(asked) == 10


def test_a_row_has_an_epsilon_for_an_early_end_too() -> None:
    rows = summary(noise_multiplier=0.0, mode=Clipping.PUBLIC, hypotheses=1, **ROWS)
    planned = row_guarantee({rows.release: 4})
    assert planned is not None
    first, *_ = rows.guarantee_lines(3, left=1)
    assert (
        first == f"Guarantee for a row of a client, added or removed: epsilon {amount(planned.epsilon)} at delta 1e-05."
    )


# --- noisy reports


def noisy(number: int, loss: float, noise: float = 0.02, bound: float = 0.25, **changes: Any) -> Round:
    return entry(number=number, loss=loss, metric=loss, report_noise=noise, report_bound=bound, **changes)


def test_a_noisy_report_has_its_noise_and_bound_beside_it_and_no_round_is_the_best() -> None:
    line = summary().round_line(noisy(3, 0.09), rounds=3)
    assert line == "round 3/3  validation RMSE 900.0 dollars (± 200, clipped at 2,500)  releases 98/100 (60+38)"
    assert (
        summary("linear", None)
        .round_line(noisy(3, 0.475, 0.2, 1.0), rounds=3)
        .startswith("round 3/3  validation RMSE 0.4750 (± 0.2, clipped at 1)  releases")
    )


@pytest.mark.parametrize(("other", "alike"), [(0.09 + 0.056, 1), (0.09 + 0.057, 0)])
def test_a_round_is_the_lowest_only_if_noise_tells(other: float, alike: int) -> None:
    """Noise of .02 in each is .028 in a difference, and two deviations are .0566."""
    ended = state(history=[noisy(0, other), noisy(1, 0.09)], best_round=1, best_loss=0.09)
    (_, told, *_) = summary().outcome_lines(ended)
    assert ("the lowest loss of all rounds" in told) is not bool(alike)
    assert ("does not tell the kept round, after round 1, from 1 other" in told) is bool(alike)
    assert "± 200" in told
