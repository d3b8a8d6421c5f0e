"""umbel's folder is where the user says, and a file is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.errors import raises
from umbel.protocol.errors import ConfigError
from umbel.protocol.home import append, write_atomically
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
