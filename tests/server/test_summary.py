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
        ("mlp", HOSPITAL, 0.0009, "RMSE 9 dollars"),
        ("mlp", HOSPITAL, 0.00012345, "RMSE 1.23 dollars"),
        ("mlp", HOSPITAL, 2e-7, "RMSE 0.002 dollars"),
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


@pytest.mark.parametrize(
    ("model", "said", "parts"),
    [
        ("mlp", entry(), ["RMSE 900.0 dollars", "round 1", "98/100 (60+38)"]),
        ("mlp", entry(lost_nodes=2), ["900.0", "98/100 (60+38)", "2 nodes lost"]),
        ("mlp", entry(releases=1, groups=[0, 0], moved=False), ["1/100 (0+0)", "TOO FEW RELEASES"]),
        ("mlp", entry(moved=False), ["98/100 (60+38)", "NOT FINITE"]),
        ("mlp", a_round(0, loss=0.09, metric=0.09), ["900.0", "(round 0)"]),
        ("mlp", entry(report_noise=0.02, report_bound=0.25), ["900.0", "± 200,", "at 2,500"]),
        ("linear", entry(loss=0.475, metric=0.475, report_noise=0.2, report_bound=1.0), ["0.475", "± 0.2,", "at 1)"]),
        ("cnn", entry(loss=0.5, metric=0.83), ["cross-entropy 0.5000", "accuracy 0.8300"]),
    ],
)
def test_a_round_is_one_line(model: str, said: Round, parts: list[str]) -> None:
    line = summary(model, HOSPITAL if model == "mlp" else None).round_line(said, rounds=100)
    assert line.startswith(f"round {said.number:3}/100  validation ")
    assert [part for part in parts if part not in line] == []
    assert ("best" in line) == (not said.report_noise), "of noisy losses no round is the best"
    assert "validation" not in summary().round_line(replace(said, loss=None, metric=None), rounds=100)


# --- the end


def test_the_last_validated_round_leads_and_the_best_stands_beside_it() -> None:
    ended, outcome = summary().outcome_lines(state())
    assert "after round 3: all 3 rounds done" in ended
    assert re.search("RMSE 900.0 dollars on all their rows after round 3.*RMSE 800.0 dollars after round 1", outcome)
    stopped = summary().outcome_lines(state(history=[entry(number=1), entry(number=2), entry(loss=None)]))
    assert "rows after round 2." in stopped[1]
    final = [entry(number=1), entry(number=2), entry(loss=0.07, metric=0.07, best_round=3)]
    alone = summary().outcome_lines(state(best_round=3, best_loss=0.07, history=final))[1]
    assert re.findall(r"RMSE [\d.]+ dollars|after round \d", alone) == ["RMSE 700.0 dollars", "after round 3"]


def test_where_the_truth_is_known_its_distance_is_told() -> None:
    lines = summary("linear", SYNTHETIC).outcome_lines(state(linear((4, -4), (5, 7))))
    assert "True parameters (5, 6): hypothesis 1 is 1.000 away." in lines
    assert "True parameters (4, -4.5): hypothesis 0 is 0.500 away." in lines
    # Another model than the true one cannot be compared.
    with_intercept = {"weight": np.ones((2, 1, 2)), "bias": np.ones((2, 1))}
    lines = summary("linear", SYNTHETIC).outcome_lines(state(with_intercept))
    assert not any("True parameters" in line for line in lines)


# --- what it cost


GAUSSIAN: dict[str, Any] = {"mode": Clipping.PUBLIC, "mechanism": "gaussian", "noise_multiplier": 20.0, "hypotheses": 1}
ROWS = {"row_noise_multiplier": 1.0, "row_rate": 0.02, "row_steps": 50}
REPORTS = "If training clients also report losses, which their site must allow, that costs more."
GUARANTEED = "Guarantee, between any two data sets of a client: "
OF_ROW = "Guarantee for a row of a client, added or removed: "
NOISELESS: dict[str, Any] = {"noise_multiplier": 0.0, "mode": Clipping.PUBLIC}


def planned(guaranteed: Guarantee | None) -> str:
    assert guaranteed is not None
    return f"epsilon {amount(guaranteed.epsilon)} at delta 1e-05."


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"choice_epsilon": 1.0}, "clipped to its own norm"),
        ({"mode": Clipping.PUBLIC}, "the choice among 2 hypotheses is open"),
        ({"noise_multiplier": 0.0, "choice_epsilon": 1.0}, "there is no noise"),
        (NOISELESS | {"choice_epsilon": 1.0}, "there is no noise"),
        (NOISELESS | ROWS, "the choice among 2 hypotheses is open"),
    ],
)
def test_where_nothing_is_guaranteed_the_reason_is_told(changes: dict[str, Any], why: str) -> None:
    lines = summary(**changes).privacy_lines(3)
    assert re.match(r"Guarantee.*: none, because|No guarantee|Guarantee: none", lines[-1])
    assert why in lines[-1]
    assert REPORTS not in lines
    assert not any("epsilon" in line or "Outside the guarantee" in line for line in lines)
    assert summary(**changes).guarantee_lines(1, 40) == summary(**changes).guarantee_lines(1)


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
    assert "40 validation clients" in formal.guarantee_lines(3, 40)[-1], "whom no guarantee covers"
    assert replace(summary(**GAUSSIAN), delta=0.0).guarantee_lines(1) == [f"{GUARANTEED}no epsilon at delta 0."]


def test_guarantees_for_a_row_and_for_its_client_are_told_apart_and_the_one_that_exists_first() -> None:
    rows = summary(**NOISELESS, hypotheses=1, **ROWS)
    of_row = OF_ROW + planned(row_guarantee({rows.release: 3}))
    first, _, *of_client = rows.guarantee_lines(3)
    assert first == of_row
    assert [line.startswith("No guarantee for a client as a whole") for line in of_client] == [True]
    assert REPORTS in rows.privacy_lines(3)
    both = summary(noise_multiplier=440.0, mode=Clipping.PUBLIC, hypotheses=1, **ROWS).guarantee_lines(3)
    assert both[0].startswith(GUARANTEED)
    assert both[2].startswith(OF_ROW)


@pytest.mark.parametrize("changes", [GAUSSIAN, NOISELESS | {"hypotheses": 1} | ROWS])
def test_while_a_run_keeps_its_maximum_its_guarantee_is_the_planned_one(changes: dict[str, Any]) -> None:
    """However often the busiest client took part, and however many rounds were left undone for any reason."""
    capped = replace(summary(**changes), most=12, capped=True)
    account = guarantee if changes is GAUSSIAN else row_guarantee
    told = {capped.guarantee_lines(often, left=left)[0] for often in (1, 12) for left in (0, 40)}
    assert told == {(GUARANTEED if changes is GAUSSIAN else OF_ROW) + planned(account({capped.release: 12}))}


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
    known = guarantee({early.release: fixed})
    assert known is not None
    epsilon = min(known.epsilon, clients_to_date({early.release: 10}, DELTA))
    assert first == f"{GUARANTEED}epsilon {amount(epsilon)} at delta 1e-05."
    counted = [GUARANTEED + planned(guarantee({early.release: 10}))]
    assert early.guarantee_lines(10) == counted
    # No client could have released more, or nothing is guaranteed.
    assert replace(early, most=10).guarantee_lines(10, left=40) == counted
    bare = replace(summary(), most=most)
    assert bare.guarantee_lines(10, left=40) == bare.guarantee_lines(10)
    rows = summary(**NOISELESS, hypotheses=1, **ROWS)
    assert rows.guarantee_lines(3, left=1)[0] == OF_ROW + planned(row_guarantee({rows.release: 4}))


def test_a_run_planned_for_a_billion_rounds_has_an_epsilon_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many releases as it could have made have none in a reasonable time."""
    early, asked = summary(**GAUSSIAN | {"mechanism": "laplace", "noise_multiplier": 440.0}), list[int]()

    def counted(releases: Mapping[Release, int], delta: float = DELTA) -> Guarantee | None:
        asked.extend(releases.values())
        return guarantee(releases, delta)

    monkeypatch.setattr("umbel.server.summary.guarantee", counted)
    early.guarantee_lines(10, left=10**9)
    assert max(asked) == 10


# --- noisy reports


@pytest.mark.parametrize(("other", "alike"), [(0.09 + 0.056, 1), (0.09 + 0.057, 0)])
def test_a_round_is_the_lowest_only_if_noise_tells(other: float, alike: int) -> None:
    """Noise of .02 in each is .028 in a difference, and two deviations are .0566."""
    reported = {"report_noise": 0.02, "report_bound": 0.25}
    losses = [entry(number=number, loss=loss, metric=loss, **reported) for number, loss in enumerate([other, 0.09])]
    ended = state(history=losses, best_round=1, best_loss=0.09)
    (_, told, *_) = summary().outcome_lines(ended)
    assert ("the lowest loss of all rounds" in told) is not bool(alike)
    assert ("does not tell the kept round, after round 1, from 1 other" in told) is bool(alike)
    assert "± 200" in told
