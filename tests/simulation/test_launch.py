"""Real Flower simulations: Ray workers, a SuperLink, and ``flwr run``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.examples.test_quickstart import EXAMPLE, ROUNDS, accuracies
from tests.helpers.apps import PROJECT, write_app
from tests.helpers.errors import raises
from tests.helpers.paper import PAPER
from tests.helpers.runs import run_app
from tests.simulation.test_private import started
from umbel.client.app import app as client_app
from umbel.protocol.errors import LaunchError
from umbel.protocol.flower import build_bundle
from umbel.protocol.project import ENGINE
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.launch import APP, federation_config, submit, unpacked
from umbel.simulation.superlink import superlink

SHORT = {"rounds": 4, "restarts": 2, "seed": 3}


def newest_run(home: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the hypotheses that the newest run left for its next round."""
    folder = max((home / "runs").iterdir(), key=lambda run: run.stat().st_mtime_ns)
    return safetensors.numpy.load_file(folder / "latest.safetensors")


def in_process(run_config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return run_app(run_config, InProcessGrid(client_app, run_config)).arrays("latest")


OWN = APP / "tests" / "helpers" / "own"
"""A folder of the user's, with a strategy in a package of its own in it."""
PICKY = """
from umbel.protocol.errors import ConfigError
from umbel.server.observer import Observer


class Picky(Observer):
    def at_end(self, run):
        nodes, hypotheses = len(run.fleet.roster(run.grid)), len(run.state.hypotheses["weight"])
        raise ConfigError(f"this run was not worth watching ({nodes} nodes, {hypotheses} hypotheses)")
"""


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of one SuperLink for all tests here; it ends with everything it started."""
    home, more = tmp_path_factory.mktemp("flwr-home"), tmp_path_factory.mktemp("more")
    (more / "picky.py").write_text(PICKY)
    path = os.pathsep.join([str(OWN), str(more), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UMBEL_HOME", str(home / "umbel"))
        patch.setenv("PYTHONPATH", path)
        with superlink(home) as environment:
            yield environment
    assert not started(home / "umbel"), "the launcher stops what it started"


def as_bytes(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in arrays.items()}


@pytest.mark.rest
def test_a_run_of_a_strategy_in_a_package_of_its_own_goes_on_in_ray_as_in_one_process_and_says_why_it_fails(
    simulation: dict[str, str], run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with seven nodes for one; other numbers of nodes `tests/server/test_app.py` compares.

    Its two options come by the run config, its state comes back, and no file of umbel's knows of it. It begins in
    this process, because every start of Ray is dear; so it fails at its end, by an observer of one's own.
    """
    monkeypatch.syspath_prepend(OWN)
    monkeypatch.setenv(ENGINE, "loop")
    values = PAPER | SHORT | {"strategy": "momentum:Momentum momentum=0.5 rate=0.8"}
    expected = in_process(run_config | values)
    home = Path(simulation["UMBEL_HOME"])
    monkeypatch.setenv("UMBEL_HOME", str(home))
    begun = in_process(run_config | values | {"rounds": 2})
    assert {name for name in begun if name.startswith("strategy/")} == {"strategy/step-0", "strategy/step-1"}
    (folder,) = (home / "runs").iterdir()
    with pytest.raises(LaunchError, match=r"finished:failed: .*not worth watching \(7 nodes, 2 hypotheses\)"):
        submit(APP, values | {"resume": folder.name, "observers": "picky:Picky"}, simulation, 7)
    assert as_bytes(newest_run(home)) == as_bytes(expected) != as_bytes(begun)
    assert len((folder / "history.jsonl").read_text().splitlines()) == SHORT["rounds"] + 1


@pytest.mark.slow
def test_the_quickstart_runs_as_a_flower_app(simulation: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """With five clients, which remember there too what they have spent; that they learn its own test shows."""
    submit(EXAMPLE, {"num-server-rounds": ROUNDS + 1}, simulation, 5)
    log = capsys.readouterr().out
    assert log.count("aggregate_train: Received 5 results and 0 failures") == ROUNDS
    assert log.count("aggregate_train: Received 0 results and 5 failures") == 1
    assert len(accuracies(log)) == 1 + ROUNDS + 1


def test_an_app_lies_among_few_files_where_that_is_the_same_app(tmp_path: Path) -> None:
    own = unpacked(APP, tmp_path)
    assert own.is_relative_to(tmp_path)
    assert build_bundle(own) == build_bundle(APP)
    other = tmp_path / "other"
    other.mkdir()
    write_app(other, PROJECT.replace("fab-include", 'fab-exclude = ["private/b.py"]\nfab-include'))
    assert unpacked(other, tmp_path) == other, "Flower wants to find what is to be left out"
    (other / "pyproject.toml").write_text("no TOML")
    assert unpacked(other, tmp_path) == other, "and says itself what is wrong"
    plain = tmp_path / "plain"
    plain.mkdir()
    write_app(plain)
    assert not (unpacked(plain, tmp_path) / "client").exists(), "nothing of another app is in it"


@pytest.mark.slow
def test_a_key_that_the_app_does_not_have_is_not_submitted(simulation: dict[str, str]) -> None:
    with raises(LaunchError, "launch.not-submitted"):
        submit(APP, {"no-such-key": 1}, simulation)


@pytest.mark.parametrize(
    ("cpus", "gpus", "expected"),
    [
        (1, 0, "num-supernodes=2 client-resources-num-cpus=1"),
        (2, 0, "num-supernodes=2 client-resources-num-cpus=2"),
        (16, 0, "num-supernodes=8 client-resources-num-cpus=2"),
        (16, 1, "num-supernodes=2 client-resources-num-cpus=2 client-resources-num-gpus=0.5"),
        (16, 4, "num-supernodes=4 client-resources-num-cpus=2 client-resources-num-gpus=1"),
    ],
)
def test_nodes_share_out_the_machine(monkeypatch: pytest.MonkeyPatch, cpus: int, gpus: int, expected: str) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cpus)), raising=False)
    monkeypatch.setattr("umbel.simulation.launch._gpus", lambda: gpus)
    assert federation_config() == expected
