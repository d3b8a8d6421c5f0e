"""A measured run is a run of the app."""

from __future__ import annotations

import numpy as np
import pytest

from umbel.privacy.accounting.guarantee import guarantee
from umbel.protocol.errors import FleetError
from umbel.protocol.release import Clipping, Kind, Release
from umbel.simulation.in_process import play, run_config
from umbel.simulation.sweep import finish

pytestmark = pytest.mark.rest


def test_a_run_gives_what_the_same_run_gives_in_this_process() -> None:
    config = run_config("synthetic", rounds=5, seed=4)
    run, finished = play(config, nodes=3), finish(config)
    assert finished.state is not None
    for ours, theirs in ((finished.state.best, run.state.best), (finished.state.hypotheses, run.state.hypotheses)):
        np.testing.assert_array_equal(ours["weight"], theirs["weight"])
    often = finished.participations
    np.testing.assert_array_equal(often, run.fleet.participations)
    assert finished.release == run.setup.release
    measures = finished.measures
    assert (measures["best_loss"], measures["rounds"]) == (run.state.best_loss, 5)
    # n/nu = 2/5 a participation.
    assert measures["max_budget"] == pytest.approx(0.4 * often.max())
    assert measures["median_budget"] == pytest.approx(0.4 * np.median(often))
    assert measures["max_participations"] == often.max()
    # The radius is the norm of a client's own update, and the choice is open.
    assert (measures["pure_epsilon"], measures["epsilon"]) == (None, None)


def test_nothing_bounds_what_unsanitised_releases_cost() -> None:
    measures = finish(run_config("synthetic", rounds=1, strategy="fedavg", noise_multiplier=0.0)).measures
    assert [measures[name] for name in ("median_budget", "max_budget", "pure_epsilon", "epsilon")] == [None] * 4


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_a_formal_run_says_what_it_guarantees_to_who_took_part_most_often(mechanism: str) -> None:
    config = run_config("synthetic", rounds=8, clipping="public", choice_epsilon=0.5, mechanism=mechanism)
    measures = finish(config).measures
    release = Release(Kind.TRAIN, 2, 5.0, Clipping.PUBLIC, mechanism=mechanism, hypotheses=2, choice_epsilon=0.5)
    assert measures["epsilon"] == guarantee({release: measures["max_participations"]}).epsilon
    if mechanism == "laplace":
        # 2 n / nu + choice-epsilon = 2 * 2/5 + 1/2 a participation.
        assert measures["pure_epsilon"] == pytest.approx(1.3 * measures["max_participations"])
    else:
        assert measures["pure_epsilon"] is None, "it has an epsilon at a delta alone"
        assert measures["max_budget"] is None, "the paper counts Laplace noise"


def test_a_refusing_node_is_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_MIN_NOISE_MULTIPLIER", "9")
    with pytest.raises(FleetError):
        finish(run_config("synthetic", rounds=1))
