"""The app in `examples/flower_app`: Algorithm 1 by a strategy and two Mods, as docs/guides/flower-app.md says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from tests.deploy.processes import Deployment
from tests.helpers.flower_app import EXAMPLE, flwr_run, modules, superlink
from tests.helpers.sources import ROOT
from umbel.mods import choose, laplace
from umbel.privacy.mechanisms import randomness
from umbel.simulation.grid import InProcessGrid

CLIENTS = 100
CLIENT_APPS = ("client_app", "sklearn_client", "torch_client")
GUIDE = (ROOT / "docs" / "guides" / "flower-app.md").read_text(encoding="utf-8")


@pytest.fixture
def example() -> Iterator[Any]:
    with modules(EXAMPLE) as found:
        yield found


def distance(example: Any, output: str) -> float:
    """Return how far the farther optimum is from the nearest of the models that a run printed."""
    (text,) = re.findall(r"found (\[\[.*\]\])", output)
    found = np.array(json.loads(text))
    return float(np.linalg.norm(example.data.OPTIMA[:, None] - found, axis=2).min(1).max())


@pytest.mark.parametrize("name", CLIENT_APPS)
def test_clients_of_any_framework_find_both_models(
    example: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With draws that a seed repeats, in place of the operating system's."""
    caplog.set_level("INFO", "flwr")
    laplace._say.cache_clear()
    draws = np.random.default_rng(0)
    for module in (choose, randomness):
        monkeypatch.setattr(module, "SecureGenerator", lambda: draws)
    config: dict[str, Any] = {"num-server-rounds": 15, "fraction-train": 0.2}
    grid = InProcessGrid(getattr(example, name).app, config, CLIENTS)
    example.server_app.app(grid, Context(1, 1, {}, RecordDict(), config))
    assert distance(example, capsys.readouterr().out) < 2.5, "of two models that are 10.5 apart"
    assert caplog.text.count("a pure epsilon of 4 a participation") == 1


@pytest.mark.slow
def test_it_runs_by_flwr_run(example: Any, tmp_path: Path) -> None:
    with superlink(tmp_path) as environment:
        log = flwr_run(EXAMPLE, environment, 4, "num-server-rounds=3 fraction-train=1.0")
    assert distance(example, log) < 12
    assert log.count("'asked': 4, 'releases': 4, 'lost-nodes': 0") == 3


@pytest.mark.rest(twin="tests/examples/test_flower_app.py::test_it_runs_by_flwr_run")
def test_it_runs_over_a_superlink_with_two_supernodes(example: Any, tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        for number in range(2):
            deployment.start_node(f"site-{number}", flowers_own=True, **{"partition-id": number})
        deployment.wait_until_online()
        run = deployment.submit(app=EXAMPLE, num_server_rounds=2, fraction_train=1.0)
        assert deployment.wait(run) == "finished:completed"
        deployment.runs.remove(run)
        assert deployment.server_log(run).count("'asked': 2, 'releases': 2, 'lost-nodes': 0") == 2


def test_the_guide_shows_the_app_as_it_is() -> None:
    shown = [block.split("```")[0] for block in GUIDE.split("```python\n")[1:3]]
    for block, name in zip(shown, ("server_app", "client_app"), strict=True):
        assert block in (EXAMPLE / "flower_app" / f"{name}.py").read_text(encoding="utf-8")
