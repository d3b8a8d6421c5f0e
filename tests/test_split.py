"""A dataset dealt to sites: every client is at one site, with its rows and its role."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import umbel
from tests.helpers.errors import raises
from tools.split import main, split
from umbel.data import Manifest, offsets_of, open_dataset, write_dataset
from umbel.protocol.cli import command_line
from umbel.protocol.errors import DatasetError
from umbel.protocol.home import umbel_home

TRAIN, VALIDATION = 7, 4


@pytest.fixture
def source() -> Path:
    """Client ``i`` has ``i + 1`` rows that hold its number."""
    lengths = np.arange(TRAIN + VALIDATION) + 1
    owner = np.repeat(np.arange(len(lengths)), lengths).astype(np.float32)
    manifest = Manifest(
        name="numbers",
        clients=len(lengths),
        split={"train": TRAIN, "validation": VALIDATION},
        model="linear",
        loss="rmse",
        groups=[client % 2 for client in range(len(lengths))],
        provenance="Made up.",
    )
    folder = umbel_home() / "data" / "numbers"
    write_dataset(folder, manifest, owner[:, None], owner, offsets_of(lengths))
    return folder


def test_every_client_is_at_one_site_in_its_role(source: Path, tmp_path: Path) -> None:
    folders = split(source, 3, tmp_path / "sites")
    assert [folder.name for folder in folders] == ["site-1", "site-2", "site-3"]
    again = split(source, 3, tmp_path / "again")
    assert all(
        (one / "targets.npy").read_bytes() == (two / "targets.npy").read_bytes()
        for one, two in zip(folders, again, strict=True)
    )
    manifest = open_dataset(folders[1]).manifest
    assert (manifest.name, manifest.model, manifest.loss) == ("numbers-2", "linear", "rmse")
    seen: dict[str, list[int]] = {"train": [], "validation": []}
    for folder in folders:
        part = open_dataset(folder)
        for place in range(part.manifest.clients):
            features, targets = part.client(place)
            (client,) = {int(number) for number in targets}
            assert len(targets) == client + 1
            np.testing.assert_array_equal(features[:, 0], targets)
            assert part.manifest.groups[place] == client % 2
            seen["train" if place < part.manifest.train else "validation"].append(client)
    assert sorted(seen["train"]) == list(range(TRAIN))
    assert sorted(seen["validation"]) == list(range(TRAIN, TRAIN + VALIDATION))


def test_no_site_of_an_earlier_split_is_left_beside_the_new_ones(source: Path, tmp_path: Path) -> None:
    split(source, 3, tmp_path)
    with raises(DatasetError, "data.exists", tmp_path / "site-3"):
        split(source, 2, tmp_path)
    assert len(split(source, 4, tmp_path)) == 4


def test_a_site_s_part_of_a_table_keeps_the_schema_and_its_own_clients_names(tmp_path: Path) -> None:
    frame = pd.DataFrame({"who": list("abcdefgh"), "x": np.arange(8.0), "ward": list("AB" * 4), "y": np.arange(8.0)})
    whole = umbel.from_dataframe(frame, client="who", target="y", validation=["a", "b"])
    for folder in split(whole.write("own"), 2, tmp_path):
        part = open_dataset(folder)
        assert part.manifest.layout == whole.manifest.layout
        for place, name in enumerate(part.names):
            assert part.client(place)[1].tolist() == ["abcdefgh".index(name)]


@pytest.mark.parametrize("sites", [0, TRAIN + 1])
def test_a_site_needs_a_client_that_trains(source: Path, tmp_path: Path, sites: int) -> None:
    with raises(DatasetError, "data.split", "--sites"):
        split(source, sites, tmp_path / "sites")
    assert not (tmp_path / "sites").exists()


def test_the_command_line(source: Path, tmp_path: Path) -> None:
    app = command_line(main)
    assert CliRunner().invoke(app, ["numbers", "--out", str(tmp_path)]).output.split() == [
        str(tmp_path / f"site-{site}") for site in (1, 2, 3)
    ]
    assert CliRunner().invoke(app, ["nothing", "--out", str(tmp_path)]).exit_code == 3
