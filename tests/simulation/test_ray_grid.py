"""A run on a cluster's machines: what it learns, and what a machine that dies costs.

Here machines are names in this process; `test_on_cluster.py` has a cluster of Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from flwr.serverapp import Grid

import umbel.client.app
from tests.helpers.clusters import FakeHosts, write_part
from tests.helpers.datasets import save_plane
from tests.helpers.errors import raises
from tests.helpers.paper import paper_run
from umbel.protocol.errors import FleetError
from umbel.protocol.messages import query
from umbel.server.app import conduct
from umbel.server.observer import Observer, Run
from umbel.server.run_folder import RunFolder
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.ray_grid import Losses, RayGrid

pytestmark = pytest.mark.usefixtures("blank_figures")


class At(Observer):
    """Does something before a round."""

    def __init__(self, round: int, what: Callable[[], object]) -> None:
        super().__init__()
        self._round, self._what = round, what

    def before_round(self, run: Run, number: int) -> None:
        if number == self._round:
            self._what()


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return save_plane(tmp_path / "whole" / "own", 12, 5)


@pytest.fixture
def config(whole: Path, looped: None) -> dict[str, Any]:
    own = {"dataset": str(whole), "clients-per-round": 6, "rounds": 4, "restarts": 2}
    return paper_run() | own


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> dict[str, Path]:
    return {name: write_part(whole, tmp_path / name / "own", i, 2) for i, name in enumerate(("one", "two"))}


def learnt(config: dict[str, Any], grid: Grid) -> tuple[dict[str, bytes], Path]:
    """Return what a run leaves behind, but for the time that it took and where the data were."""
    folder = conduct(grid, config, 7, [Losses()] if isinstance(grid, RayGrid) else [])
    return {name: (folder / name).read_bytes() for name in ("hypotheses.safetensors", "ledger.csv")}, folder


def rounds(folder: Path) -> list[tuple[int, int]]:
    """Return, of each round that trained, the releases and the nodes that were lost."""
    return [(entry.releases, entry.lost_nodes) for entry in RunFolder(folder).read_history() if entry.asked]


# --- what is learnt


@pytest.mark.parametrize("nodes", [0, 6])
def test_a_part_on_each_machine_gives_what_one_process_gives(
    nodes: int, config: dict[str, Any], parts: dict[str, Path]
) -> None:
    hosts = FakeHosts(config, parts)
    expected, _ = learnt(config, InProcessGrid(umbel.client.app.app, config))
    assert learnt(config, RayGrid(hosts, nodes))[0] == expected
    assert set(hosts.asked) == {"one", "two"}
    assert hosts.started == ["one", "two"], "one host a machine, however many nodes it hosts"


def test_so_do_machines_that_share_the_whole(config: dict[str, Any], whole: Path) -> None:
    grid = RayGrid(FakeHosts(config, {"one": whole, "two": whole, "three": whole}))
    assert list(grid.get_node_ids()) == [100, 101, 102]
    assert learnt(config, grid)[0] == learnt(config, InProcessGrid(umbel.client.app.app, config))[0]


def test_so_does_a_driver_that_has_a_part_alone(config: dict[str, Any], parts: dict[str, Path]) -> None:
    mine = config | {"dataset": str(parts["one"])}
    expected, _ = learnt(config, InProcessGrid(umbel.client.app.app, config))
    assert learnt(mine, RayGrid(FakeHosts(mine, parts)))[0] == expected


def test_a_part_alone_is_not_taken_for_the_whole(
    config: dict[str, Any], parts: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    mine = config | {"dataset": str(parts["one"])}
    with raises(FleetError, "nodes.refused", "1"):
        learnt(mine, InProcessGrid(umbel.client.app.app, mine, nodes=2))
    assert "holds part 0/2 of the clients, but this node hosts part 1/2" in caplog.text


# --- what a machine that dies costs


def test_a_machine_that_dies_costs_a_round_its_clients_which_are_left_out_from_then_on(
    config: dict[str, Any], parts: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    hosts = FakeHosts(config, parts)
    grid = RayGrid(hosts)
    folder = conduct(grid, config | {"rounds": 8}, 7, [Losses(), At(3, lambda: hosts.kill("two"))])
    done = rounds(folder)
    assert done[:2] == [(6, 0)] * 2
    assert done[2][0] < 6
    assert done[2][1] == 1
    assert done[3:] == [(6, 0)] * 5, "the first machine has six training clients"
    told = "In round 3 simulated node 1 was lost on two. Its clients are left out until it returns"
    assert told in caplog.text
    assert told in (folder / "report.html").read_text()
    assert list(grid.get_node_ids()) == [100]


def test_they_take_part_again_when_it_comes_back(config: dict[str, Any], parts: dict[str, Path]) -> None:
    hosts = FakeHosts(config, parts)
    back = At(5, lambda: hosts.alive.append("two"))
    folder = conduct(RayGrid(hosts), config | {"rounds": 6}, 7, [Losses(), At(2, lambda: hosts.kill("two")), back])
    assert [lost for _, lost in rounds(folder)] == [0, 1, 0, 0, 0, 0]
    assert hosts.started == ["one", "two", "two"]
    assert hosts.asked[-1] == "two"


def test_another_machine_that_has_their_data_takes_them_in(
    config: dict[str, Any], whole: Path, parts: dict[str, Path]
) -> None:
    hosts = FakeHosts(config, {"one": parts["one"], "two": parts["two"], "three": whole})
    grid = RayGrid(hosts, nodes=2)
    assert hosts.started == ["one", "two"], "who has all stands by"
    folder = conduct(grid, config, 7, [Losses(), At(2, lambda: hosts.kill("two"))])
    assert [lost for _, lost in rounds(folder)] == [0, 1, 0, 0]
    assert [place.machine.name for place in grid.homes.values()] == ["one", "three"]


@pytest.mark.parametrize("round", [1, 3])
def test_a_host_that_dies_alone_is_started_again(round: int, config: dict[str, Any], whole: Path) -> None:
    hosts = FakeHosts(config, {"one": whole})
    folder = conduct(RayGrid(hosts), config, 7, [Losses(), At(round, lambda: hosts.kill_host("one"))])
    assert [lost for _, lost in rounds(folder)] == [int(number == round) for number in range(1, 5)]
    assert hosts.started == ["one", "one"]


def test_what_is_known_late_of_a_dead_host_does_not_cost_the_one_in_its_place(
    config: dict[str, Any], whole: Path
) -> None:
    hosts = FakeHosts(config, {"one": whole})
    grid = RayGrid(hosts, nodes=2)
    hosts.kill_host("one")
    first, second = grid.push_messages([Message(query(), node, "query") for node in grid.get_node_ids()])
    assert [reply.has_error() for reply in grid.pull_messages([first])] == [True]
    assert list(grid.get_node_ids()) == [100, 101], "both live with a new host"
    assert [reply.has_error() for reply in grid.pull_messages([second])] == [True]
    assert list(grid.get_node_ids()) == [100, 101]
    assert hosts.started == ["one", "one"], "which is not started once more, and forgets nothing"
    assert [node for node, _ in grid.losses] == [0, 1]


def test_what_a_node_says_is_in_the_servers_log(
    config: dict[str, Any], whole: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UMBEL_MIN_NOISE_MULTIPLIER", "100")
    with raises(FleetError, "nodes.refused"):
        conduct(RayGrid(FakeHosts(config, {"one": whole})), config, 7)
    assert "umbel refused to answer" in caplog.text
