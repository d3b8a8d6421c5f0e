"""Pilots are the run again but for the change, cost no more, and take a bounded amount of work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.paper import paper_run
from umbel.protocol.run_config import RunConfig
from umbel.server.run import Run
from umbel.server.setup import Setup
from umbel.simulation import pilots
from umbel.simulation.in_process import play
from umbel.simulation.pilots import changes_for, pilot

CONFIG = {"rounds": 3, "restarts": 2, "observers": ""}


def tried(config: dict[str, Any], **changes: Any) -> Run | str:
    setup = Setup.parse(config)
    dataset = setup.open_dataset()
    assert dataset is not None
    return pilot(setup, dataset, 3, 10, {key.replace("_", "-"): value for key, value in changes.items()})


@pytest.mark.rest
def test_a_pilot_without_a_change_ends_where_the_run_ends() -> None:
    """Also if validation clients pick the first hypotheses: they do so for the pilot."""
    config = paper_run() | CONFIG
    done, again = play(config), tried(config)
    assert isinstance(again, Run)
    for name, value in done.state.hypotheses.items():
        np.testing.assert_array_equal(again.state.hypotheses[name], value)
    one = tried(config, hypotheses=1)
    assert isinstance(one, Run)
    assert len(next(iter(one.state.hypotheses.values()))) == 1


def test_what_is_too_large_or_would_cost_more_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    private = paper_run() | CONFIG | {"choice-epsilon": 1.0, "clipping": "public", "hypotheses": 1}
    assert "epsilon" in str(tried(private, hypotheses=2)), "a choice costs epsilon"
    assert "refused" in str(tried(paper_run() | CONFIG, step_size=-1.0))
    assert "sites" in str(tried(private | {"strategy": "site-average", "hypotheses": 2}))
    monkeypatch.setattr(pilots, "MOST", 0)
    assert "large" in str(tried(paper_run() | CONFIG))


@pytest.mark.parametrize(
    ("k", "differ", "improves", "noise", "expected"),
    [
        (1, False, False, 0, [{"step-size": 0.3}, {"step-size": 0.0333}]),
        (1, True, True, 0, [{"hypotheses": 2}, {"rounds": 14}, {"step-size": 0.3}]),
        (1, False, True, 3, [{"step-size": 0.3}, {"step-size": 0.0333}]),
        (2, True, True, 0, [{"rounds": 14}, {"step-size": 0.3}]),
    ],
)
def test_what_is_tried_follows_from_the_result(
    k: int, differ: bool, improves: bool, noise: float, expected: list[Any]
) -> None:
    run = RunConfig(step_size=0.1, noise_multiplier=noise)
    assert changes_for(run, 7, k, differ, improves) == expected
