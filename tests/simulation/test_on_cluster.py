"""`umbel run` on a cluster of Ray, whose machines here are processes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from tests.helpers.clusters import cluster
from tests.helpers.sources import ROOT
from umbel.cli.main import app
from umbel.data.split import main as split
from umbel.protocol.cli import command_line
from umbel.server.run_folder import RunFolder

DOCS = (ROOT / "docs" / "guides" / "cluster.md").read_text(encoding="utf-8")

# A model of the user's own goes along to the machines, and an observer stays here.
MINE = """
import torch
from umbel.server.observer import Observer

kill, seen = None, []

def network():
    return torch.nn.Linear(2, 1, bias=False)

class Accident(Observer):
    def before_round(self, run, number):
        if number == 3:
            seen.append({name: value.tobytes() for name, value in run.state.hypotheses.items()})
            kill()
"""


def umbel(*words: str) -> Path:
    """Call the command, which must end well, and return the folder that it names last."""
    told = CliRunner().invoke(app, list(words), prog_name="umbel")
    assert told.exit_code == 0, told.output
    # Ray may say something of a machine that died after the last line.
    return [Path(line) for line in told.output.splitlines() if line.startswith("/") and Path(line).is_dir()][-1]


@pytest.mark.rest
def test_two_machines_with_a_part_each_learn_what_one_process_learns_and_one_alone_goes_on(
    umbel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank_figures: None
) -> None:
    (tmp_path / "umbel_test_cluster.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mine: Any = importlib.import_module("umbel_test_cluster")
    assert "\npython -m umbel.data.split synthetic --shards 2 --out synthetic-shards\n" in DOCS
    shards = CliRunner().invoke(command_line(split), ["synthetic", "--shards", "2", "--out", "synthetic-shards"])
    assert shards.exit_code == 0, shards.output
    assert " umbel run synthetic\n" in DOCS
    asked = ["run", "synthetic", "rounds=4", "model=umbel_test_cluster:network"]
    asked += ["observers=umbel_test_cluster:Accident"]
    mine.kill = lambda: None
    umbel(*asked)

    homes = [tmp_path / "synthetic-shards" / f"part-{i}" for i in range(2)]
    assert all(f"UMBEL_HOME=$PWD/{home.relative_to(tmp_path)} ray start --" in DOCS for home in homes)
    with cluster(tmp_path, homes) as two:
        monkeypatch.setenv("RAY_ADDRESS", two.address)
        mine.kill = lambda: two.kill(1)
        folder = umbel(*asked)
        alone, on_two = mine.seen
        assert alone == on_two
        asked_of = [entry for entry in RunFolder(folder).read_history() if entry.asked]
        assert [entry.lost_nodes for entry in asked_of] == [0, 0, 1, 0]
        assert asked_of[3].releases == 7, "of those that are left"
        assert "In round 3 simulated node 1 was lost" in (folder / "report.html").read_text()
        here = [one for one in psutil.process_iter(["cmdline"]) if "ray::Host" in " ".join(one.info["cmdline"] or [])]
        hosts = [one for one in here if two.machines[0].pid in {parent.pid for parent in one.parents()}]
        assert not psutil.wait_procs(hosts, timeout=600)[1], "they end with the run"
