"""The bundle that Flower ships to the nodes."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT, files, imported, packages_imported
from umbel.protocol.flower import build_bundle
from umbel.protocol.project import APP as CHECKOUT

OUTSIDE = {"umbel_lab", "benchmarks", "tests", "tools", "client", "server", "strategies", "privacy", "datasets", "."}
"""What no module of umbel imports: what measures or tests it, and the links at the root of the checkout."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked bundle."""
    folder = tmp_path_factory.mktemp("bundle")
    with zipfile.ZipFile(BytesIO(build_bundle(CHECKOUT))) as archive:
        archive.extractall(folder)
    return folder


def test_it_holds_all_of_umbel_once_and_nothing_else(bundle: Path) -> None:
    """A part of it would hide the rest that is installed: Flower puts the app's folder before installed packages."""
    assert {path.name for path in bundle.iterdir()} == {".info", "pyproject.toml", "LICENSE", "README.md", "umbel"}
    ours = {str(path.relative_to(ROOT)) for path in files()}
    assert {str(path.relative_to(bundle)) for path in files(root=bundle)} == ours
    data = {path.name for path in (bundle / "umbel" / "datasets").glob("*.json")}
    assert data == {"hospital.json", "hospital-services.json", "preferences.json", "synthetic.json"}


def test_no_module_imports_what_is_not_umbel(bundle: Path) -> None:
    for file in bundle.rglob("*.py"):
        # A recipe is a script that finds the modules next to it; one of them reads Hugging Face's `datasets`.
        if file.parent.name != "datasets":
            assert not packages_imported(file) & OUTSIDE, file
            ours = {name for name in imported(file) if name.startswith("umbel.")}
            missing = {
                name for name in ours if not _there(bundle, name) and not _there(bundle, name.rpartition(".")[0])
            }
            assert not missing, file


def _there(root: Path, name: str) -> bool:
    path = root.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


@pytest.mark.rest
def test_an_installed_datasets_library_is_not_shadowed_and_the_bundle_is_enough(bundle: Path, tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "datasets"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("FAKE = True\n")
    code = f"""
import sys
# As in a Flower process: the bundle comes before what is installed. Of the checkout nothing is there.
rest = [path for path in sys.path if path not in ("", {str(ROOT)!r})]
sys.path[:] = [{str(bundle)!r}, {str(library.parent)!r}, *rest]
from umbel.data import find_dataset
assert str(find_dataset("hospital-services")).startswith({str(bundle)!r})
import umbel.server.app, umbel.client.app, umbel.data.table, datasets
assert datasets.FAKE
for name, module in sys.modules.items():
    if name.partition(".")[0] == "umbel" and getattr(module, "__file__", None):
        assert module.__file__.startswith({str(bundle)!r}), module
print(umbel.server.app.__file__)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(bundle / "umbel" / "server" / "app.py")


def test_an_installed_datasets_library_is_found_from_the_root_of_the_checkout(tmp_path: Path) -> None:
    """The link of that name there is to a folder without ``__init__.py``."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("print('found')\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import datasets"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "found\n"


@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("protocol",
         "annotated_types cryptography flwr numpy prometheus_client psutil pydantic rich typer uvicorn"),
        ("privacy/mechanisms", "cryptography numpy scipy"),
        ("privacy/accounting", "dp_accounting numpy scipy"),
    ],
)  # fmt: skip
def test_what_both_sides_share_depends_on_little(package: str, others: str) -> None:
    outside = {name for file in files([f"umbel/{package}"]) for name in packages_imported(file)}
    assert outside - sys.stdlib_module_names == {*others.split(), "umbel"}, "a new dependency"
