"""umbel's folder is where the user says, and a file is written whole or not at all."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.helpers.errors import raises
from umbel.protocol.errors import ConfigError, DiskError
from umbel.protocol.home import append, disk_error, make_folder, write_atomically
from umbel.protocol.home import umbel_home as home_of


def test_home_is_where_umbel_home_says(umbel_home: Path) -> None:
    assert home_of() == umbel_home


@pytest.mark.parametrize(("said", "found"), [(None, "umbel"), ("", "umbel"), ("~/flowers", "flowers")])
def test_home_is_in_the_users_home(
    said: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("UMBEL_HOME", raising=False)
    if said is not None:
        monkeypatch.setenv("UMBEL_HOME", said)
    assert home_of() == tmp_path / found


def test_a_relative_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would mean another folder in every process."""
    monkeypatch.setenv("UMBEL_HOME", "flowers")
    with raises(ConfigError, "config.home", "'flowers'"):
        home_of()


def test_a_file_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content in (b"one", b"another", b""):
        write_atomically(file, content)
        assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file], "no scratch file stays behind"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_what_is_appended_is_on_the_disk_behind_what_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], os.fsync

    def look(descriptor: int) -> None:
        synced.append((tmp_path / "file").read_bytes())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    for line in (b"one\n", b"two\n"):
        append(tmp_path / "file", line)
    assert synced == [b"one\n", b"one\ntwo\n"]


@pytest.mark.parametrize("below", [".", "data", "runs/today"])
def test_other_users_do_not_see_into_the_home(below: str, umbel_home: Path) -> None:
    os.umask(0)
    make_folder(umbel_home / below)
    assert (umbel_home / below).is_dir()
    assert umbel_home.stat().st_mode & 0o777 == 0o700


def test_a_folder_elsewhere_has_the_users_rights(tmp_path: Path) -> None:
    os.umask(0o027)
    make_folder(tmp_path / "one" / "two")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")} == {0o750}


# --- a full disk


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)


@pytest.mark.usefixtures("full")
def test_a_full_disk_is_named_by_the_files_path_and_leaves_no_half_file(tmp_path: Path) -> None:
    file, lines = tmp_path / "file", tmp_path / "lines"
    lines.write_bytes(b"first\n")
    with raises(DiskError, "disk.full", file, "UMBEL_HOME"):
        write_atomically(file, b"content")
    with raises(DiskError, "disk.full", lines):
        append(lines, b"second\n")
    assert lines.read_bytes() == b"first\n"
    assert [one.name for one in tmp_path.iterdir()] == ["lines"]


def test_other_faults_of_a_disk_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        append(tmp_path / "nowhere" / "file", b"")
    assert disk_error(OSError(errno.EACCES, "no"), "file") is None


def test_a_used_up_quota_and_a_limit_of_a_files_size_are_a_full_disk_too(tmp_path: Path) -> None:
    for number in (errno.EDQUOT, errno.EFBIG):
        error = disk_error(OSError(number, os.strerror(number)), tmp_path / "nowhere" / "file")
        assert error
        assert "MiB free" in error.text
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("PRAGMA max_page_count = 1")
        with pytest.raises(sqlite3.OperationalError) as caught:
            connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
        assert disk_error(caught.value, "database")
        with pytest.raises(sqlite3.OperationalError) as caught:
            connection.execute("SELECT * FROM nothing")
        assert disk_error(caught.value, "database") is None
