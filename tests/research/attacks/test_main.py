"""`umbel attack` as a user types it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from umbel.data import Manifest, offsets_of, write_dataset
from umbel.research.attacks import reconstruct
from umbel.research.attacks.__main__ import app


def run(*words: str) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(words))
    return done.exit_code, done.output


@pytest.fixture
def squares(umbel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset "squares" of three clients with a made-up image each, and a small network shed:dense."""
    images = np.zeros((3, 28, 28), np.uint8)
    for i, image in enumerate(images):
        image[4 + 4 * i : 12 + 4 * i, 10:20] = 255
    manifest = Manifest(name="squares", clients=3, split={"train": 2, "validation": 1}, feature_scale=1 / 255)
    write_dataset(umbel_home / "data" / "squares", manifest, images, np.arange(3), offsets_of([1] * 3))
    (tmp_path / "shed.py").write_text(
        "from torch import nn\n"
        "def dense():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), nn.Sigmoid(), nn.Linear(12, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("squares")
def test_it_prints_the_table_and_writes_what_it_says(umbel_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A few steps tell as well that the attacks are made.
    monkeypatch.setattr(reconstruct, "deep_leakage", partial(reconstruct.deep_leakage, iterations=5))
    code, output = run(
        "reconstruct", "--dataset", "squares", "--model", "shed:dense", "--images", "2", "--restarts", "1",
        "--noise-multiplier", "0", "--noise-multiplier", "3", "--whole",
    )  # fmt: skip
    assert code == 0, output
    folder = umbel_home / "audits" / "reconstruct-squares-shed-dense-whole"
    assert output.splitlines()[-1] == str(folder / "table.md")
    names = ["reconstructions.png", "reconstructions.svg", "table.csv", "table.md"]
    assert sorted(file.name for file in folder.iterdir()) == names
    for text in ("squares, shed:dense, 2 images", "mean image", "DLG", "rank one", "last bias", "Seconds an image"):
        assert text in output
    assert "An attack that fails proves nothing" in output
    assert "An attack that fails proves nothing" in (folder / "table.md").read_text()


@pytest.mark.usefixtures("squares")
def test_what_cannot_be_is_an_error() -> None:
    code, output = run("reconstruct", "--dataset", "squares", "--model", "cnn10", "--images", "3")
    assert code == 3
    assert "[data.too-few-clients]" in output
