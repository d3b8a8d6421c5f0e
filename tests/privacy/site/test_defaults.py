"""What a site promises that says nothing, and that the default run config is good enough for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from tests.helpers.paper import PAPER
from tests.helpers.runs import run_app
from umbel.client.app import app
from umbel.client.node import Node
from umbel.data import offsets_of, write_dataset
from umbel.privacy.accounting.guarantee import guarantee
from umbel.privacy.site.journal import Journal
from umbel.protocol.errors import SiteError
from umbel.protocol.run_config import RunConfig
from umbel.simulation.grid import InProcessGrid

TRAIN, VALIDATE = 20, 10


@pytest.fixture(autouse=True)
def sites_accept_the_paper() -> None:
    """Leave the policy's own defaults, which these tests are about."""


def write(folder: Path, model: str = "linear", validation: int = VALIDATE) -> Path:
    """Write clients of two rows, and return the folder."""
    clients = TRAIN + validation
    features = np.random.default_rng(0).uniform(-1, 1, (2 * clients, 2)).astype(np.float32)
    targets = features @ np.array([1, 2], np.float32)
    write_dataset(folder, manifest(TRAIN, validation, model=model), features, targets, offsets_of([2] * clients))
    return folder


def run(data: Path, entries: dict[str, Any], **changes: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the rounds of a run at one site, and why it ended."""
    config = RunConfig().entries() | {"dataset": "", "model": "linear", "restarts": 1, "device": "cpu"} | changes
    found = run_app(config, InProcessGrid(app, config, node_configs=[{"data-path": str(data), **entries}]))
    return found.history, found.stopped


def test_the_default_run_passes_a_default_site_within_its_budget(tmp_path: Path, umbel_home: Path) -> None:
    history, stopped = run(write(tmp_path / "data"), {"role": "split"})
    assert [entry["releases"] for entry in history] == [0, TRAIN, TRAIN]
    assert "max-participations" in stopped
    accounts = Journal(umbel_home / "ledger.jsonl").accounts()
    promised = [guarantee(account) for account in accounts.values()]
    assert len(accounts) == TRAIN + VALIDATE, "who reports is charged as well"
    assert all(one is not None and one.pure <= 8 for one in promised)
    assert max(one.pure for one in promised if one) == 8
    assert {entry["exact_reports"] for entry in history} == {0}


def test_which_models_fit_the_data_is_no_free_question(tmp_path: Path) -> None:
    site, config = {"data-path": str(write(tmp_path / "data", model="")), "role": "split"}, {"model": "linear"}
    entries = RunConfig().entries() | {"dataset": ""} | config
    with raises(SiteError, "site.no-model", "data"):
        Node.of(site, entries)
    assert Node.of(site | {"budget": "inf"}, entries).model.name == "linear"


def test_a_site_whose_first_message_is_refused_has_a_ledger_all_the_same(tmp_path: Path, umbel_home: Path) -> None:
    data = write(tmp_path / "data", validation=0)
    run(data, {}, rounds=1, **PAPER)
    history, _ = run(data, {}, rounds=1)
    assert history[1]["releases"] == TRAIN
