"""Whole runs in this process, for experiments and audits: the run config, and a run as it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbel.client.app
from tests.helpers.errors import raises
from tests.helpers.runs import run_app
from tests.helpers.sources import ROOT
from umbel.models import MODELS
from umbel.privacy.accounting.guarantee import guarantee
from umbel.privacy.accounting.rows import row_guarantee
from umbel.protocol.errors import ConfigError, FleetError
from umbel.protocol.run_config import RunConfig
from umbel.server.summary import Summary
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import play, run_config
from umbel.strategies import Callback


class Counting(Callback):
    """Counts rounds."""

    def __init__(self) -> None:
        self.rounds = 0

    def after_exchange(self, round: int, stages: dict[str, float]) -> None:
        self.rounds += 1


# --- the run config


def test_a_config_is_the_defaults_with_a_file_and_changes_over_them() -> None:
    config = run_config("hospital", clients_per_round=9, clipping="public floor=0.5")
    assert set(config) == set(RunConfig.names())
    assert (config["dataset"], config["clients-per-round"], config["clipping"]) == ("hospital", 9, "public floor=0.5")
    assert config["seed"] == RunConfig().seed
    RunConfig.parse(config)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda file: file.stem)
def test_every_config_that_comes_along_is_found_by_its_name(file: Path) -> None:
    assert set(run_config(file.stem)) == set(RunConfig.names())


FORMAL = sorted((ROOT / "configs").glob("*-epsilon-*.toml"))


@pytest.mark.parametrize("file", FORMAL, ids=lambda file: file.stem)
def test_a_config_costs_the_epsilon_of_its_name(file: Path) -> None:
    """Over all participations of a hospital, and pure."""
    run = RunConfig.of(run_config(file.stem))
    found = guarantee({run.release(MODELS["mlp"].num_parameters, run.hypotheses): run.max_participations})
    assert found
    named = int(file.stem.rpartition("-")[2])
    assert 0.99 * named < found.pure <= named


def test_a_change_of_a_key_that_there_is_not_is_named() -> None:
    with raises(ConfigError, "config.unknown-key", "attack-after"):
        run_config("synthetic", stepsize=1, attack_after=2)


# --- a run


def test_a_run_is_returned_as_it_ended_and_leaves_nothing(umbel_home: Path) -> None:
    counting = Counting()
    config = run_config("synthetic", rounds=3, restarts=1)
    run = play(config, observers=[counting])
    assert [entry.number for entry in run.state.history] == [0, 1, 2, 3]
    assert counting.rounds == 4
    assert run.state.stopped == "all 3 rounds done"
    assert run.fleet.participations.sum() == 21
    assert run.folder is None
    assert not umbel_home.exists()


def test_it_is_what_the_app_does(umbel_home: Path) -> None:
    config = run_config("synthetic", rounds=3, restarts=2)
    by_app = run_app(config, InProcessGrid(umbel.client.app.app, config))
    run = play(config, nodes=3)
    np.testing.assert_array_equal(run.state.hypotheses["weight"], by_app.arrays("latest")["weight"])


def test_nodes_may_be_configured_as_sites_configure_them() -> None:
    """A participation costs 2/5, and each client may spend as much: in the second round nobody can."""
    config = run_config("synthetic", rounds=2, restarts=1, clients_per_round=100)
    nodes = [{"partition-id": i, "num-partitions": 2, "paper-budget": 0.4} for i in range(2)]
    run = play(config, node_configs=nodes, strict=False)
    assert [entry.releases for entry in run.state.history] == [0, 100, 0]


@pytest.mark.parametrize("strict", [True, False])
def test_a_node_that_refuses_ends_a_strict_run(strict: bool) -> None:
    config = run_config("synthetic", rounds=2, restarts=1)
    nodes: list[dict[str, Any]] = [{"partition-id": i, "num-partitions": 2} for i in range(2)]
    nodes[1]["min-noise-multiplier"] = 100
    if strict:
        with raises(FleetError, "nodes.refused", "1"):
            play(config, node_configs=nodes)
    else:
        assert [entry.lost_nodes for entry in play(config, node_configs=nodes, strict=False).state.history] == [0, 1, 1]


# --- a guarantee for each row

ROWS = {
    "rows": "clip=1 noise=1.2 rate=0.1 batch=10", "local-epochs": 1,
    "step-size": 0.5, "clipping": "public norm=2.0", "rounds": 12, "delta": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{"protect": "rows", "noise-multiplier": 0.0}, {"protect": "both"}])
def test_a_run_that_hides_rows_learns_and_says_its_guarantee(changes: dict[str, Any]) -> None:
    run = play(run_config("hospital-services") | ROWS | changes)
    losses = [entry.metric for entry in run.state.history if entry.metric is not None]
    assert losses[-1] < 0.5 * losses[0]
    release, [once] = run.setup.release, np.unique(run.fleet.participations[run.fleet.participations > 0])
    found = row_guarantee({release: int(once)})
    assert found is not None
    # Ten steps, each of a tenth of the rows, with noise of 1.2 clip norms.
    assert 1.9 < found.epsilon < 2.0
    said = "\n".join(Summary.of(run.setup).guarantee_lines(1))
    assert f"{found.epsilon:.4g} at delta" in said
    assert ("No guarantee for a client as a whole" in said) is (changes["protect"] == "rows")


def test_a_run_that_hides_rows_does_not_depend_on_the_number_of_nodes() -> None:
    config = run_config("hospital-services") | ROWS | {"protect": "rows", "noise-multiplier": 0.0, "rounds": 2}
    one, three = (play(config, nodes=nodes).state.hypotheses for nodes in (1, 3))
    for name, value in one.items():
        np.testing.assert_allclose(three[name], value, rtol=1e-6)
