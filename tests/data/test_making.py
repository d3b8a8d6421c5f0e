"""What recipes share is checked before any data are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from tests.helpers.errors import raises
from umbel.data.making import split_of, writing
from umbel.protocol.errors import DatasetError


@pytest.mark.parametrize(("clients", "train"), [(2, 1), (10, 9), (11, 9), (20, 18)])
def test_a_tenth_of_the_clients_rounded_up_validates(clients: int, train: int) -> None:
    assert split_of(clients, 90, "", "") == {"train": train, "validation": clients - train}


@pytest.mark.parametrize("clients", [0, 1])
def test_fewer_than_two_clients_are_refused(clients: int) -> None:
    with raises(DatasetError, "data.too-few-clients", "7 users", "at least 2", "give more"):
        split_of(clients, 90, "7 users", "give more")


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "file").write_text("")
    for out, reason in ((file, "cannot be written"), (file / "below" / "a", "cannot be written"), (tmp_path, "exists")):
        with pytest.raises(typer.Exit) as end, writing(out, "name"):
            pytest.fail("it began")
        assert end.value.exit_code == 3
        assert f"Error: {out} {reason}" in capsys.readouterr().err


def test_without_a_folder_the_name_gives_it(umbel_home: Path) -> None:
    with writing(None, "films") as folder:
        assert folder == umbel_home / "data" / "films"
