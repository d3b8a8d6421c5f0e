"""umbel's folder is where the user says, and a file is written whole or not at all."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.helpers.errors import raises
from umbel.protocol.errors import ConfigError, DiskError
from umbel.protocol.home import append, disk_error, make_folder, write_atomically
from umbel.protocol.home import umbel_home as home_of


def test_home_is_where_the_user_says(umbel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home_of() == umbel_home
    monkeypatch.setenv("HOME", str(tmp_path))
    for said, found in (("", "umbel"), ("~/flowers", "flowers")):
        monkeypatch.setenv("UMBEL_HOME", said)
        assert home_of() == tmp_path / found
    monkeypatch.setenv("UMBEL_HOME", "flowers")
    with raises(ConfigError, "config.home", "'flowers'"):
        home_of()  # it would mean another folder in every process
    monkeypatch.delenv("UMBEL_HOME")
    assert home_of() == tmp_path / "umbel"


def test_a_file_is_replaced_or_after_a_failure_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, lines = tmp_path / "file", tmp_path / "lines"
    for content in (b"one", b"another", b""):
        write_atomically(file, content)
        assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file], "no scratch file stays behind"
    append(lines, b"first\n")
    with pytest.raises(FileNotFoundError):
        append(tmp_path / "nowhere" / "file", b"")
    for number, name in ((errno.EIO, ""), (errno.ENOSPC, "disk.full")):
        monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(number, os.strerror(number))))
        for path, write in ((file, write_atomically), (lines, append)):
            with raises(DiskError, name, path, "UMBEL_HOME") if name else pytest.raises(OSError, match="Input/output"):
                write(path, b"new\n")
    assert (file.read_bytes(), lines.read_bytes()) == (b"", b"first\n")
    assert {*tmp_path.iterdir()} == {file, lines}


def test_what_is_appended_is_on_the_disk_behind_what_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], os.fsync

    def look(descriptor: int) -> None:
        synced.append((tmp_path / "file").read_bytes())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    for line in (b"one\n", b"two\n"):
        append(tmp_path / "file", line)
    assert synced == [b"one\n", b"one\ntwo\n"]


def test_other_users_do_not_see_into_the_home_but_maybe_into_other_folders(umbel_home: Path, tmp_path: Path) -> None:
    os.umask(0)
    for below in ("runs/today", "data", "."):
        make_folder(umbel_home / below)
        assert (umbel_home / below).is_dir()
        assert umbel_home.stat().st_mode & 0o777 == 0o700
    os.umask(0o027)
    make_folder(tmp_path / "one" / "two")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")} == {0o750}


def test_a_used_up_quota_and_a_limit_of_a_files_size_are_a_full_disk_too(tmp_path: Path) -> None:
    assert disk_error(OSError(errno.EACCES, "no"), "file") is None
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
