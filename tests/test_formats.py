"""What umbel 0.1 wrote is read by each later version: a site's journal, a run's folder, and a dataset.

The files in `saved_runs/formats` are never written anew. A version that writes otherwise brings a migration, and then
these tests go through it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import umbel
from tests.helpers.errors import raises
from umbel.data.find import find_dataset, open_dataset
from umbel.privacy.site.charges import Charge
from umbel.privacy.site.entry import Entry
from umbel.privacy.site.journal import Journal, Names, lines_of
from umbel.privacy.site.policy import Policy
from umbel.privacy.site.runs import Runs, Status, digest_of
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import Refused
from umbel.protocol.release import Clipping, Kind, Release

SAVED = Path(__file__).with_name("saved_runs") / "formats"
TRAIN = Release(Kind.TRAIN, 11, 3.0, Clipping.PUBLIC)
ROWS = Release(
    Kind.TRAIN, 11, 0.0, Clipping.PUBLIC, mechanism="gaussian", row_noise_multiplier=1.5, row_rate=0.25, row_steps=4
)
SITE = Release(Kind.SITE, 11, 2.0, Clipping.UPDATE, hypotheses=2, choice_epsilon=1.0)
REPORT = Release(Kind.REPORT, 2, 20.0, Clipping.PUBLIC)
DIGEST = "d" * 64
RESULT = {"w": np.zeros((1, 2), np.float32)}
POLICY = Policy.parse({"max-evaluations": 1})


def add_every_kind(path: Path) -> None:
    """Make a journal with a line of each kind: charges, outcomes, people's decisions, a repair."""
    Journal.create(path)
    Names(path).extend([], ["north", "south"])
    runs = Runs(path, node="here", policy="p" * 16)

    def answer(release: Release, *clients: int, round: int = 1, limited: bool = False) -> None:
        entry = Entry("7", "train", {"training": {"round": round, "clients": len(clients)}})
        entry.sent = [("the run", digest_of(RESULT))]
        asked, most = [*map(ClientInDataset, clients)], 9 if limited else math.inf
        entry.charge(sum(runs.charge(Charge("7", round, release), asked, most=most)))
        runs.record(entry, True)

    answer(TRAIN, 0, 1)
    answer(TRAIN, 0, 1, round=2, limited=True)
    answer(ROWS, 0)
    answer(SITE, 1)
    runs.count_evaluation("7", POLICY)
    answer(REPORT, 1)
    refused = Entry("8", "train")
    refused.refuse("training", Refused("too little noise", code="refused.noise"))
    runs.record(refused, False)
    for rounds in range(3):
        with pytest.raises(Refused):
            runs.check_approved("7", {"config": {"rounds": rounds}}, "")
    first, second, _ = (request.digest for request in runs.requests())
    runs.decide(first, Status.APPROVED, "Dr. Day")
    runs.decide(second, Status.REFUSED, "Dr. Day", "too many")
    runs.use_signature("7", DIGEST)
    runs.end("7", "the run", RESULT, evaluates=True)
    # The clients' third number is only in the index, and so a fact that the repair adds.
    before = path.read_bytes()
    Names(path).extend(["north", "south"], [3])
    path.write_bytes(before)
    assert Journal(path, opened=False).repair(POLICY, [])


def keys_of(path: Path) -> dict[str, set[str]]:
    """Return the keys of a journal's lines, of their releases and requests, by the kind of the line."""
    keys = defaultdict[str, set[str]](set)
    for line, _ in lines_of(path):
        inner = {"release": json.loads(line.get("release", "{}")), "request": line.get("request", {})}
        keys[line["kind"]] |= {*line} | {f"{name}.{key}" for name in inner for key in dict(inner[name] or {})}
    return keys


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
