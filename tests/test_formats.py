"""What umbel 0.1 wrote is read by each later version: a site's journal, a run's folder, and a dataset.

The files in `saved_runs/formats` are never written anew. A version that writes otherwise brings a migration, and then
these tests go through it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import umbel
from tests.helpers.errors import raises
from tests.helpers.journal import DIGEST, POLICY, REPORT, RESULT, ROWS, SITE, TRAIN, add_every_kind, keys_of
from umbel.data.find import find_dataset, open_dataset
from umbel.privacy.site.charges import Charge
from umbel.privacy.site.journal import Journal, Names
from umbel.privacy.site.runs import Runs, Status
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import Refused

SAVED = Path(__file__).with_name("saved_runs") / "formats"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """The saved journal, without its index and witness: the lines alone tell everything."""
    return Path(shutil.copy(SAVED / "journal.jsonl", tmp_path / "ledger.jsonl"))


def test_a_journal_tells_charges_clients_decisions_and_signatures(journal: Path) -> None:
    assert Names(journal).read() == ["north", "south", 3]
    assert Journal(journal).accounts() == {0: {TRAIN: 2, ROWS: 1}, 1: {TRAIN: 2, SITE: 1, REPORT: 1}}
    runs = Runs(journal, node="here")
    assert [(one.status, one.person, one.reason) for one in runs.requests()] == [
        (Status.APPROVED, "Dr. Day", ""), (Status.REFUSED, "Dr. Day", "too many"), (Status.WAITING, "", ""),
    ]  # fmt: skip
    for fault, use in (
        ("refused.signature", lambda: runs.use_signature("9", DIGEST)),
        ("refused.evaluations", lambda: runs.count_evaluation("7", POLICY)),
        ("refused.told-before", lambda: runs.end("7", "the run", RESULT, evaluates=True)),
    ):
        with raises(Refused, fault):
            use()


def test_a_journal_goes_on(journal: Path) -> None:
    assert Journal(journal).charge(Charge("9", 1, TRAIN), [ClientInDataset(0)]) == [True]
    assert Journal(journal).account(ClientInDataset(0)) == {TRAIN: 3, ROWS: 1}


def test_a_journal_that_is_written_now_has_the_same_kinds_of_lines_with_the_same_keys(
    journal: Path, tmp_path: Path
) -> None:
    """If this fails and the change is wanted, `journal.VERSION` rises, and older journals are migrated."""
    add_every_kind(tmp_path / "new.jsonl")
    assert keys_of(tmp_path / "new.jsonl") == keys_of(journal)


def test_a_dataset_has_its_clients_rows_and_units(umbel_home: Path) -> None:
    shutil.copytree(SAVED / "dataset", umbel_home / "data" / "t")
    data = open_dataset(find_dataset("t"))
    age, *sexes = data.manifest.units["features"]
    assert (data.names, data.manifest.split) == (["c2", "c5", "c4", "c0", "c1", "c3"], {"train": 5, "validation": 1})
    assert (age["scale"], [one["name"] for one in sexes]) == (80.0, ["sex = f", "sex = m"])
    assert data.features.shape == (60, 3)


def test_a_run_predicts_and_tells_its_guarantee_and_its_verdict(umbel_home: Path) -> None:
    shutil.copytree(SAVED / "dataset", umbel_home / "data" / "t")
    run = umbel.load(SAVED / "run")
    found = run.predict("t", "c3", personalise="no")
    np.testing.assert_allclose(found.prediction[:3], [2.0461, 1.4398, 1.6508], atol=1e-3)
    assert "epsilon 11.78 at delta 1e-05" in run.guarantee[0]
    assert [*run.worth["mean"][:3]] == [0.309112, 0.278384, 0.157264]
