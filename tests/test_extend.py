"""The examples of docs/guides/extend.md, as one module: each runs, and the page lists every hook."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client.test_personal import cohort, own
from tests.helpers.datasets import Numbers
from tests.helpers.models import write_module
from umbel import models
from umbel.data import open_dataset
from umbel.models.hooks import Hooks
from umbel.protocol.plugins import import_by_name
from umbel.simulation.in_process import play

PAGE = (Path(__file__).parents[1] / "docs" / "guides" / "extend.md").read_text(encoding="utf-8")
SCHEMA = """
client = { name = "hospital", type = "text" }
target = { name = "cost", type = "number" }
features = [{ name = "age", type = "number" }]
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module with all examples."""
    return write_module(tmp_path, monkeypatch, "\n".join(blocks("python")))


def settings(module: str) -> dict[str, Any]:
    return tomllib.loads("\n".join(blocks("toml")).replace("mine:", f"{module}:"))


def test_a_run_takes_all_of_them_at_once(mine: str, run_config: dict[str, Any]) -> None:
    own = {key: value for key, value in settings(mine).items() if not key.startswith(("reader", "personalise"))}
    run = play(run_config | own | {"rounds": 2, "restarts": 1, "validation": "every=1"})
    assert type(run.strategy).__name__ == "Halfway"
    assert run.setup.release.mechanism == f"{mine}:Coordinates"
    assert run.state.history[-1].metric is not None
    counter = next(one for one in run.callbacks if type(one).__name__ == "Counter")
    assert counter.seen == sum(entry.releases for entry in run.state.history)  # type: ignore[attr-defined]


def test_a_client_gets_a_predictor_half_of_the_way(mine: str) -> None:
    how = settings(mine)["personalise"]
    here, half, there = (own(one, cohort([3.0, 3.0])) for one in ("no", how, "fine-tune"))
    assert half == [(here[0] + there[0]) / 2] != here


def test_a_head_stays_with_its_client(mine: str) -> None:
    model = models.load(f"{mine}:Headed", "mse")
    assert list(model.local_shapes) == ["head.weight", "head.bias"]


def test_a_site_reads_its_table(mine: str, tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "stays.csv").write_text("hospital,born,cost\nnorth,1996,7\n")
    read = import_by_name(settings(mine)["reader"].partition(" ")[0])
    dataset = read(tmp_path / "stays.csv", Numbers(), schema=str(tmp_path / "schema.toml"))
    assert dataset.features.tolist() == [[30]]


def test_rows_are_dealt_in_turns(mine: str, tmp_path: Path) -> None:
    data = import_by_name(f"{mine}:dealt")(np.zeros((20, 2)), np.zeros(20))
    assert open_dataset(data.write(tmp_path / "own")).lengths.tolist() == [2] * 10


def test_the_page_names_every_hook() -> None:
    assert not [one.name for one in fields(Hooks) if f"`{one.name}`" not in PAGE]
