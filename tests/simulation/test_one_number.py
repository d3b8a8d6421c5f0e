"""A run that keeps its plan states one epsilon: in its plan, its log, its report and its result."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

import umbel
from tests.simulation.test_planner import save
from umbel.cli.commands.demo import CONFIG, ONE, RUNS, SEVERAL
from umbel.server.setup import Setup
from umbel.server.summary import Summary
from umbel.simulation.start import in_this_process, read_values, values_of
from umbel.simulation.wanted import Wanted

_NUMBER = r"\d+(?:\.\d+)?(?:e-\d+)?"
_STATED = re.compile(rf"(?:pure )?epsilon {_NUMBER}(?: at delta {_NUMBER})?")
_PARTS = re.compile(r"One participation alone has [^.]*\.[^.]*\.|randomised, with epsilon \S+|epsilon \S+ Seed")
"""Texts with an epsilon of a part of the guarantee, which they name."""


def stated(values: dict[str, Any], words: list[str], caplog: pytest.LogCaptureFixture) -> set[str]:
    """Do a run, and return every epsilon that a person reads; its report's settings and heuristics are left out."""
    with caplog.at_level("INFO", "flwr"):
        path = in_this_process(values, 1, baselines=False)
    page = re.sub(
        r"<style.*?</style>|<svg.*?</svg>", "", (path / "report.html").read_text(encoding="utf-8"), flags=re.S
    )
    text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page))).partition("Run config")[0]
    result = umbel.load(path)
    assert "epsilon" in text
    assert "epsilon" in result.guarantee[0], "the guarantee that exists comes first"
    told = "\n".join([*words, *caplog.messages, *result.guarantee, *result.privacy, _PARTS.sub("", text)])
    return set(_STATED.findall(told))


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        (Wanted(epsilon=3.0), {"rounds": 4}),
        (Wanted(epsilon=3.0, delta=1e-6), {"rounds": 8, "max-participations": 6, "mechanism": "gaussian"}),
        (Wanted(3.0, rows=5), {"rounds": 8, "clients-per-round": 30}),
        (Wanted(3.0, rows=5, delta=1e-6), {"rounds": 8, "max-participations": 5, "hypotheses": 2}),
    ],
)
def test_a_planned_run_states_one_epsilon(
    wanted: Wanted, given: dict[str, Any], umbel_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(umbel_home, train=150)
    planned = values_of("mine", given, wanted)
    found = stated(planned.values, planned.words, caplog)
    assert len(found) == 1, found
    [one] = found
    assert float(one.removeprefix("pure ").split()[1]) <= 3


@pytest.mark.parametrize("what", [ONE, SEVERAL])
def test_the_demos_runs_state_the_epsilon_in_their_names(what: str) -> None:
    setup = Setup.parse(read_values(CONFIG, RUNS[what]) | {"dataset": "hospital-services"})
    assert any(one in what for one in _STATED.findall(" ".join(Summary.of(setup).guarantee_lines(1))))
