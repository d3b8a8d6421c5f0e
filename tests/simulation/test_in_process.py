"""Whole runs in this process, for experiments and audits: the run config, and a run as it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbel.client.app
from tests.helpers.errors import raises
from tests.helpers.ledgers import proven, proven_rows
from tests.helpers.runs import run_app
from tests.helpers.sources import ROOT
from umbel.models import MODELS
from umbel.protocol.errors import ConfigError, FleetError
from umbel.protocol.run_config import RunConfig
from umbel.server.summary import Summary
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import play, run_config

# --- the run config


def test_a_config_is_the_defaults_with_a_file_and_changes_over_them() -> None:
    config = run_config("hospital", clients_per_round=9, clipping="public floor=0.5")
    changed = {"clients-per-round": 9, "clipping": "public floor=0.5", "dataset": "hospital"}
    assert config | changed | {"seed": RunConfig().seed} == config
    with raises(ConfigError, "config.unknown-key", "attack-after"):
        run_config("synthetic", stepsize=1, attack_after=2)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda file: file.stem)
def test_every_config_that_comes_along_is_found_by_its_name_and_costs_the_epsilon_of_it(file: Path) -> None:
    """Over all participations of a hospital, and pure."""
    config = run_config(file.stem)
    assert set(config) == set(RunConfig.names())
    if "-epsilon-" in file.stem:
        run, named = RunConfig.of(config), int(file.stem.rpartition("-")[2])
        found = proven({run.release(MODELS["mlp"].num_parameters, run.hypotheses): run.max_participations})
        assert 0.99 * named < found.pure <= named


# --- a run


def test_a_run_is_that_of_the_app_and_leaves_nothing(umbel_home: Path) -> None:
    config = run_config("synthetic", rounds=3, restarts=1)
    run = play(config, nodes=3)
    assert [entry.number for entry in run.state.history] == [0, 1, 2, 3]
    assert run.state.stopped == "all 3 rounds done"
    assert run.fleet.participations.sum() == 21
    assert run.folder is None
    assert not umbel_home.exists()
    by_app = run_app(config, InProcessGrid(umbel.client.app.app, config))
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
    found = proven_rows({release: int(once)})
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
