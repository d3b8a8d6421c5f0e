"""A site's store: made in one step, or not at all, and the clients' names in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.errors import raises
from umbel.privacy.gate.runs import Runs
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.store import Names, Store, beside
from umbel.protocol.errors import LedgerError

# --- making one


@pytest.fixture
def no_store(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def test_a_site_without_limits_gets_one_and_a_site_with_limits_does_not(no_store: Path) -> None:
    site = {"data-path": "/data/own", "ledger-path": str(no_store)}
    with raises(LedgerError, "ledger.missing", no_store):
        Runs.of(Site.of(site | {"budget": 8.0}))
    assert not no_store.exists()
    Runs.of(Site.of(site))
    assert no_store.stat().st_mode & 0o077 == 0, "it is the site's alone"
    Names.of(Site.of(site | {"budget": 8.0}))


@pytest.mark.parametrize(
    ("entries", "answered_before", "made"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"budget": "8"}, False, False),
        ({"max-participations": "3"}, False, False),
        ({"max-evaluations": "9"}, False, True),  # of one run, which begins with the ledger
    ],
    ids=str,
)
@pytest.mark.parametrize("named", [False, True], ids=["default place", "named place"])
def test_a_site_that_may_have_lost_its_store_gets_no_empty_one(
    entries: dict[str, str], answered_before: bool, made: bool, named: bool, tmp_path: Path, umbel_home: Path
) -> None:
    """These sites have no budget unless they set one. A store in a named place may lie on a volume that is missing."""
    path = tmp_path / "ledger.sqlite" if named else umbel_home / "ledger.sqlite"
    umbel_home.mkdir()
    if answered_before:
        beside(path).touch()
    site = Site.of({"data-path": "/data/own"} | entries | ({"ledger-path": str(path)} if named else {}))
    assert Store.begin(site) == path
    assert path.exists() is made


def test_a_new_store_is_on_the_disk_by_its_name_and_so_is_its_folder(
    umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut that took it away would take the log too, and an empty store would forget what was spent."""
    home, synced, fsync = umbel_home / "made" / "now", [], os.fsync
    monkeypatch.setenv("UMBEL_HOME", str(home))

    def look(descriptor: int) -> None:
        folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((folder, [file.name for file in folder.iterdir() if not file.name.startswith(".")]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    assert Store.begin(Site.of({"data-path": "/data/own"})) == home / "ledger.sqlite"
    assert (home, ["ledger.sqlite"]) in synced
    for folder, name in ((home.parent, "now"), (umbel_home, "made")):
        assert (folder, [name]) in synced
    assert umbel_home.parent in [folder for folder, _ in synced]


# --- clients' names


def test_names_keep_their_type_and_their_order(no_store: Path) -> None:
    names = Names.create(no_store)
    names.extend([], [7, "7"])
    names.extend([7, "7"], ["a\u0000b"])
    assert Names(no_store).read() == [7, "7", "a\u0000b"]


def test_processes_that_number_clients_at_once_do_not_give_a_number_twice(no_store: Path) -> None:
    names = Names.create(no_store)
    names.extend([], ["anna"])
    with raises(LedgerError, "ledger.clients-changed", no_store):
        names.extend([], ["bert"])
    assert names.read() == ["anna"]
