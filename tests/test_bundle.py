"""The bundle that Flower ships to the nodes."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from simulation.launch import APP


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked bundle."""
    folder = tmp_path_factory.mktemp("bundle")
    with zipfile.ZipFile(BytesIO(build_fab_from_disk(APP))) as archive:
        archive.extractall(folder)
    return folder


def test_it_holds_the_app_and_the_small_federations_and_nothing_else(bundle: Path) -> None:
    top = {path.name for path in bundle.iterdir()}
    assert top == {
        ".info", "pyproject.toml", "LICENSE", "README.md",
        "client", "datasets", "federation", "fleet", "models", "privacy", "protocol", "server", "simulation",
        "strategies",
    }  # fmt: skip
    assert {path.name for path in (bundle / "datasets").iterdir()} == {
        "hospital.py", "preferences.json", "synthetic.json",
    }  # fmt: skip


def test_an_installed_datasets_library_is_not_shadowed(bundle: Path, tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "datasets"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("FAKE = True\n")
    code = "import server.app, client.app, datasets; assert datasets.FAKE; print(server.app.__file__)"
    # As in a Flower process: the bundle comes before what is installed.
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(bundle)!r}, {str(library.parent)!r}]; {code}"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(bundle / "server" / "app.py")
