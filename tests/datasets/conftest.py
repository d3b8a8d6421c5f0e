"""What the tests of the recipes share: a recipe loaded by its path, and its command line."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner, Result

from umbel.data import Dataset, open_dataset

PROJECT = Path(__file__).resolve().parents[2]
RECIPES = PROJECT / "umbel" / "datasets"
"""Where recipes are; the lab's are in `LAB`."""
LAB = PROJECT / "lab" / "umbel_lab" / "datasets"
DATA = PROJECT.parent / "shared" / "data"


def needs(*files: Path) -> pytest.MarkDecorator:
    """Skip a test where files of real data are missing."""
    return pytest.mark.skipif(not all(map(Path.exists, files)), reason=f"needs {', '.join(map(str, files))}")


class Recipe:
    """A recipe and its command line.

    Attributes
    ----------
    module : module
        The recipe, loaded by its path, the way experiments do: `datasets` is a folder of scripts, no package.
    """

    def __init__(self, name: str, folder: Path = RECIPES) -> None:
        self.name, self._file = name, folder / f"{name}.py"
        self.module: ModuleType = self._load()

    def run(self, out: Path, *options: str | Path) -> Result:
        """Run the command line."""
        return CliRunner().invoke(self.module.app, ["--out", str(out), *map(str, options)])

    def made(self, out: Path, *options: str | Path) -> Dataset:
        """Run the command line and open what it wrote."""
        result = self.run(out, *options)
        assert result.exit_code == 0, result.stderr
        return open_dataset(out)

    def made_as_a_script(self, folder: Path, *options: str | Path) -> Dataset:
        """Run the script in `folder`, with $UMBEL_HOME below it, and open what it wrote there."""
        home = folder / "home"
        done = subprocess.run(
            [sys.executable, str(self._file), *map(str, options)],
            cwd=folder, env=os.environ | {"UMBEL_HOME": str(home)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(home / "data" / self.name)
        return open_dataset(home / "data" / self.name)

    def assert_refused(self, result: Result, out: Path, *texts: str) -> None:
        """Check for status 3 and a code (1 for a system error), the texts in the last line, and nothing written."""
        message = result.stderr.splitlines()[-1]
        code = re.search(r" \[data\.[a-z-]+\]$", message)
        assert result.exit_code == (3 if code else 1), message
        assert code or "[Errno" in message, message
        assert isinstance(result.exception, SystemExit)
        assert message.startswith("Error: ")
        for text in texts:
            assert text in message
        assert result.stdout == ""
        assert not (out / "manifest.json").exists()

    def _load(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"recipe_{self.name}", self._file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def assert_same(one: Dataset, other: Dataset) -> None:
    """Check that two datasets are equal, types of numbers included."""
    assert one.manifest == other.manifest
    assert_same_rows(one, other)


def assert_same_rows(one: Dataset, other: Dataset) -> None:
    """Check that two datasets have the same clients of the same groups, whatever else they say of themselves."""
    assert one.manifest.groups == other.manifest.groups
    for name in ("features", "targets", "offsets"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)


def image(row: int, turned: bool = False) -> NDArray[np.uint8]:
    """Row + 1 in the corner at the top right, 99 to the left of it; turned by hand, at the top left and below."""
    picture = np.zeros((28, 28), np.uint8)
    if turned:
        picture[0, 0], picture[1, 0] = row + 1, 99
    else:
        picture[0, 27], picture[0, 26] = row + 1, 99
    return picture


def rows_of(dataset: Dataset, client: int) -> dict[int, tuple[int, bool]]:
    """Return the rows that a client holds, by the number drawn in the image: (class, whether turned)."""
    found = {}
    for picture, label in zip(*dataset.client(client), strict=True):
        row = int(picture.max(where=picture != 99, initial=0)) - 1
        turned = not np.array_equal(picture, image(row))
        np.testing.assert_array_equal(picture, image(row, turned))
        found[row] = int(label), turned
    assert len(found) == len(dataset.client(client)[1])
    return found
