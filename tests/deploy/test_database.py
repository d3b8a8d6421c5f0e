"""The disk of a server's database."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import HTTPException

from umbel.deploy.server import Database


def test_a_disk_counts_as_full_for_a_minute_after_a_write_that_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A quota does not show in its free space."""
    now = [0.0]
    database = Database(tmp_path / "state.db", lambda: now[0])
    assert database.fault() is None
    failed = SimpleNamespace(original_exception=OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))
    for now[0] in (10.0, 20.0):
        with pytest.raises(HTTPException) as told:
            database._failing(failed)
        assert told.value.status_code == 503
    now[0] = 79.0
    assert database.fault()
    now[0] = 81.0
    assert database.fault() is None
    assert [caplog.text.count(text) for text in ("[disk.full]", "can be written again")] == [1, 1]
    database._failing(SimpleNamespace(original_exception=ValueError("another")))


def test_a_disk_that_becomes_read_only_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with a fault does. Sites then keep their replies, and try again."""
    database = Database(tmp_path / "state.db")
    tmp_path.joinpath("state.db").touch()
    assert database.fault() is None
    monkeypatch.setattr("os.access", lambda *_: False)
    fault = database.fault()
    assert fault
    assert fault.code == "server.database"


def test_a_disk_with_little_room_left_is_full_for_sites_and_not_yet_for_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(tmp_path / "state.db")
    monkeypatch.setattr("umbel.protocol.home.free_space", lambda _: 15 << 20)
    fault = database.fault()
    assert fault
    assert "15.0 MiB free" in fault.text


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], None),
        (["--database", ":flwr-in-memory:"], None),
        (["--database=/state/state.db"], "/state/state.db"),
        (["--database", "sqlite:////state/state.db"], "/state/state.db"),
    ],
)
def test_its_file_is_what_the_options_say(options: list[str], name: str | None) -> None:
    assert Database.of(options).path == (Path(name) if name else None)
