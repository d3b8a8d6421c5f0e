"""The bundle that Flower ships to the nodes.

It passes the checks of `flwr app publish` and `flwr app review`, as far as they need no account.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from flwr.cli.config_utils import load_and_validate
from flwr.supercore.constant import MAX_FILE_BYTES
from typer.testing import CliRunner

from tests.helpers.sources import ROOT, files, imported, packages_imported
from umbel.cli.commands.init import app as init
from umbel.client.bundle import app as command
from umbel.protocol.flower import build_bundle
from umbel.protocol.project import APP as CHECKOUT

# Flower exports a function of each module's name beside it.
build = importlib.import_module("flwr.cli.build")
publish = importlib.import_module("flwr.cli.app_cmd.publish")


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


# --- published


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that an operator would publish: umbel bundle --out umbel."""
    done = CliRunner().invoke(command, ["--out", str(tmp_path / "umbel")])
    assert done.exit_code == 0, done.output
    return tmp_path / "umbel"


def check(folder: Path) -> dict[str, Path]:
    """Make the checks of publishing, in its order, and return the files that would go."""
    config, warnings = load_and_validate(folder / "pyproject.toml", check_module=False)
    assert not warnings, warnings
    publish._validate_app_name(folder.name, "folder")
    description = config["project"]["description"]
    publish._validate_description(description)
    assert len(description) <= 200, "it would be asked about"
    files = publish._collect_file_paths(folder)
    publish._validate_files(files)
    return {str(file.relative_to(folder.resolve())): file for file in files}


def test_what_is_published_is_all_that_the_bundle_holds(folder: Path) -> None:
    with zipfile.ZipFile(BytesIO(build_bundle(ROOT))) as archive:
        held = {name for name in archive.namelist() if not name.startswith(".info/")}
    assert check(folder).keys() == held
    assert max(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= MAX_FILE_BYTES


def test_flower_builds_the_same_bundle_of_it(folder: Path) -> None:
    assert build.build_fab_from_disk(folder) == build_bundle(ROOT)


def test_a_project_of_umbel_init_passes_too(tmp_path: Path) -> None:
    project = tmp_path / "my-study"
    assert CliRunner().invoke(init, [str(project)]).exit_code == 0
    assert {"pyproject.toml", "my_study/model.py"} <= check(project).keys()
    assert build.build_fab_from_disk(project) == build_bundle(project)
