"""A strategy of ten lines in a folder of the user's runs by its name, without a change to the app."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import Context, RecordDict

import client.app
import server.app
import strategies
from protocol.errors import ConfigError
from simulation.grid import InProcessGrid
from strategies.options import ConfigError

FILE = Path(__file__).with_name("ten_lines.py")
MINE: dict[str, Any] = {"strategy": "ten_lines:TrimmedMean", "rounds": 4, "noise-multiplier": 0.0, "restarts": 1}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's on the path, with the strategy in it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(FILE, folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def in_process(config: dict[str, Any], home: Path) -> dict[str, Any]:
    """Run the app and return what the last round left."""
    server.app.app(InProcessGrid(client.app.app, config), Context(1, 1, {}, RecordDict(), config))
    return left_in(home)


def left_in(home: Path) -> dict[str, Any]:
    (folder,) = (home / "runs").iterdir()
    assert (folder / "report.html").exists()
    return safetensors.numpy.load_file(folder / "latest.safetensors")


def test_it_has_ten_lines() -> None:
    statements = [node for node in ast.walk(ast.parse(FILE.read_text())) if isinstance(node, ast.stmt)]
    docstrings = [s for s in statements if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
    assert len({s.lineno for s in statements} - {s.lineno for s in docstrings}) <= 10


def test_it_combines_as_it_says() -> None:
    strategy = strategies.load("ten_lines:TrimmedMean")()
    strategy.trim = 1  # type: ignore[attr-defined]
    group = np.array([[0.0, 9], [100, 1], [2, 2], [4, 3]])
    assert strategy.combine(group, group[0]).tolist() == [3, 2.5]
    assert strategy.combine(group[:2], group[0]).tolist() == [50, 5], "of two, none can be left out"


def test_it_runs_with_an_option_of_its_own(run_config: dict[str, Any], umbel_home: Path) -> None:
    trimmed = in_process(run_config | MINE | {"trim": 2}, umbel_home)
    assert np.isfinite(trimmed["weight"]).all()
    shutil.rmtree(umbel_home)
    mean = in_process(run_config | MINE | {"trim": 0}, umbel_home)
    shutil.rmtree(umbel_home)
    averaged = in_process(run_config | MINE | {"strategy": "fedavg"}, umbel_home)
    np.testing.assert_allclose(mean["weight"], averaged["weight"], rtol=1e-6)
    assert (trimmed["weight"] != mean["weight"]).all()


def test_an_option_that_the_run_config_lacks_is_named(run_config: dict[str, Any], umbel_home: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the run config lacks trim; its default is in pyproject\.toml"):
        in_process(run_config | MINE, umbel_home)
