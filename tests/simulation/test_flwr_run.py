"""Flower's own simulation of umbel's app: Ray workers, a SuperLink, and ``flwr run``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

from benchmarks.flower import Simulation, simulation, started, unpacked
from tests.examples.test_quickstart import EXAMPLE, ROUNDS, accuracies
from tests.helpers.paper import PAPER
from tests.helpers.ports import free_port
from tests.helpers.sources import ROOT
from umbel.cli.main import app
from umbel.protocol.project import ENGINE
from umbel.server.runs import find_run

OWN = ROOT / "tests" / "helpers" / "own"
"""A folder of the user's, with a strategy in a package of its own in it."""
PICKY = """
from umbel.protocol.errors import ConfigError
from umbel import Callback


class Picky(Callback):
    def at_end(self):
        run = self.run
        nodes, hypotheses = len(run.fleet.roster(run.grid)), len(run.state.hypotheses["weight"])
        raise ConfigError(f"this run was not worth watching ({nodes} nodes, {hypotheses} hypotheses)")
"""


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulation]:
    """One SuperLink for all tests here; it ends with everything it started."""
    more = tmp_path_factory.mktemp("more")
    (more / "picky.py").write_text(PICKY)
    path = os.pathsep.join([str(OWN), str(more), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with simulation({"PYTHONPATH": path}, free_port()) as running:
        yield running
    assert not started(str(running.home))


def umbel(*words: str) -> Path:
    """Call the command, and return the folder of its run."""
    done = CliRunner().invoke(app, ["run", *words, "--no-baselines"], prog_name="umbel")
    assert done.exit_code == 0, done.output
    return find_run("last")


def saved(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the hypotheses that a run left for its next round."""
    return safetensors.numpy.load_file(folder / "latest.safetensors")


def as_bytes(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in arrays.items()}


@pytest.mark.slow
def test_a_planned_run_gives_to_the_bit_what_umbel_run_gives_with_as_many_nodes(
    flower: Simulation, umbel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "planned.toml"
    words = ["plan", "synthetic", "--epsilon", "4", "rounds=3", "restarts=2", "seed=3", "--out", str(file)]
    done = CliRunner().invoke(app, words, prog_name="umbel")
    assert done.exit_code == 0, done.output
    here = umbel(str(file), "--nodes", "2")
    flower.flwr(
        "run", str(unpacked(flower.home)), "--stream", "--run-config", str(file), "--federation-config",
        "num-supernodes=2 client-resources-num-cpus=1",
    )  # fmt: skip
    monkeypatch.setenv("UMBEL_HOME", str(flower.home / "umbel"))
    there = find_run("last")
    for name in ("latest.safetensors", "hypotheses.safetensors"):
        assert (there / name).read_bytes() == (here / name).read_bytes()


@pytest.mark.rest
def test_a_run_of_a_strategy_in_a_package_of_its_own_goes_on_in_ray_as_in_one_process_and_says_why_it_fails(
    flower: Simulation, monkeypatch: pytest.MonkeyPatch, umbel_home: Path
) -> None:
    """Bit for bit, with seven nodes for one; other numbers of nodes `tests/server/test_app.py` compares.

    Its two options come by the run config, its state comes back, and no file of umbel's knows of it.
    """
    monkeypatch.syspath_prepend(OWN)
    monkeypatch.setenv(ENGINE, "loop")
    values = PAPER | {"restarts": 2, "seed": 3, "strategy": "momentum:Momentum momentum=0.5 rate=0.8"}
    expected = saved(umbel(*(f"{key}={value}" for key, value in (values | {"rounds": 4}).items())))
    monkeypatch.setenv("UMBEL_HOME", str(flower.home / "umbel"))
    folder = umbel(*(f"{key}={value}" for key, value in (values | {"rounds": 2}).items()))
    begun = saved(folder)
    assert {name for name in begun if name.startswith("strategy/")} == {"strategy/step-0", "strategy/step-1"}
    again = values | {"rounds": 4, "resume": folder.name, "observers": "picky:Picky"}
    with pytest.raises(RuntimeError, match=r"(?s)finished:failed: .*not worth watching \(7 nodes, 2 hypotheses\)"):
        flower.run(unpacked(flower.home), again, 7)
    assert as_bytes(saved(folder)) == as_bytes(expected) != as_bytes(begun)
    assert len((folder / "history.jsonl").read_text().splitlines()) == 4 + 1


@pytest.mark.rest
def test_the_quickstart_runs_as_a_flower_app(flower: Simulation) -> None:
    """With five clients, which remember there too what they have spent; that they learn its own test shows."""
    log = flower.run(EXAMPLE, {"num-server-rounds": ROUNDS + 1}, 5)
    assert log.count("aggregate_train: Received 5 results and 0 failures") == ROUNDS
    assert log.count("aggregate_train: Received 0 results and 5 failures") == 1
    assert len(accuracies(log)) == 1 + ROUNDS + 1
