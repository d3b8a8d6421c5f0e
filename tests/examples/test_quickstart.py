"""The example in `examples/quickstart`: stock FedAvg over clients behind `umbel.Gate`, as the guide says.

`tests/simulation/test_flwr_run.py` runs it in Ray.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from tests.helpers import commands
from tests.helpers.sources import ROOT
from umbel.privacy.accounting.guarantee import guarantee
from umbel.privacy.site.totals import Totals
from umbel.protocol.release import Clipping, Kind, Release
from umbel.simulation.grid import InProcessGrid

EXAMPLE = ROOT / "examples" / "quickstart"
CLIENTS = 100
CONFIG = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
ROUNDS = CONFIG["num-server-rounds"]
PARTICIPATION = Release(Kind.TRAIN, 12, 2.0, Clipping.PUBLIC, mechanism="gaussian")


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ClientApp, ServerApp]]:
    """The example's two apps."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from quickstart import client_app, server_app  # type: ignore[import-not-found]

    yield client_app.app, server_app.app
    for name in [name for name in sys.modules if name.partition(".")[0] == "quickstart"]:
        del sys.modules[name]


def accuracies(log: str) -> list[float]:
    """Return what the server logs of its own evaluations, one before the first round and one after each."""
    return [
        float(line.rpartition("'accuracy': ")[2].split("}")[0]) for line in log.splitlines() if "'accuracy': 0" in line
    ]


def test_stock_fedavg_learns_each_participation_is_charged_and_a_budget_that_is_spent_ends_them(
    apps: tuple[ClientApp, ServerApp], caplog: pytest.LogCaptureFixture
) -> None:
    """Six runs had an accuracy of 0.73 to 0.90, and guessing has 0.25."""
    caplog.set_level("INFO", "flwr")
    config: dict[str, Any] = CONFIG | {"num-server-rounds": ROUNDS + 1}
    grid = InProcessGrid(apps[0], config, nodes=CLIENTS)
    apps[1](grid, Context(1, 1, {}, RecordDict(), config))
    found = accuracies(caplog.text)
    assert len(found) == 1 + ROUNDS + 1
    assert found[0] < 0.3, "the first model knows nothing"
    assert found[ROUNDS] > 0.5
    assert found[ROUNDS + 1] == found[ROUNDS], "the run goes on, with the model that it has"
    assert caplog.text.count(f"aggregate_train: Received 0 results and {CLIENTS} failures") == 1
    for node, context in enumerate(grid.contexts.values()):
        assert Totals(context.state).account(node) == {PARTICIPATION: ROUNDS}
    claimed = guarantee({PARTICIPATION: ROUNDS}, 1e-5)
    assert claimed
    assert claimed.epsilon == pytest.approx(9.997, abs=1e-3), "as the docs say"
    twice = guarantee({replace(PARTICIPATION, noise_multiplier=4.0): ROUNDS}, 1e-5)
    assert twice
    assert twice.epsilon == pytest.approx(4.38, abs=0.005), "as the docs say of twice the noise"


def test_the_docs_show_the_example_as_it_is() -> None:
    shown = (ROOT / "docs" / "guides" / "flower-app.md").read_text(encoding="utf-8")
    source = (EXAMPLE / "quickstart" / "client_app.py").read_text(encoding="utf-8")
    block = next(block for block in commands.blocks(shown, "python") if "umbel.Gate(" in block)
    assert block in source
    assert "mods=[gate]" in block
