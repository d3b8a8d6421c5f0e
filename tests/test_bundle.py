"""The bundle that Flower ships to the nodes, and the editable install that shadows nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from io import BytesIO
from pathlib import Path

import pytest

from protocol.flower import build_bundle
from simulation.launch import APP as CHECKOUT
from tests.helpers.sources import APP, ROOT, files, imported, packages_imported

# What stays out: what attacks the app, measures it, draws its papers' figures, or tests it.
OUTSIDE = ("attacks", "benchmarks", "experiments", "tests")
INSIDE = tuple(package for package in APP if package not in OUTSIDE)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked bundle."""
    folder = tmp_path_factory.mktemp("bundle")
    with zipfile.ZipFile(BytesIO(build_bundle(CHECKOUT))) as archive:
        archive.extractall(folder)
    return folder


def test_it_holds_the_app_and_the_small_federations_and_nothing_else(bundle: Path) -> None:
    top = {path.name for path in bundle.iterdir()}
    assert top == {
        ".info", "pyproject.toml", "LICENSE", "README.md", "datasets", "deployment",
        "client", "federation", "fleet", "mechanisms", "models", "privacy", "protocol", "server", "simulation",
        "strategies",
    }  # fmt: skip
    assert {path.name for path in (bundle / "datasets").iterdir()} == {
        "hospital.py", "preferences.json", "synthetic.json",
    }  # fmt: skip
    assert {path.name for path in (bundle / "deployment").iterdir()} == {
        "__init__.py", "hospital.toml", "hospital_table.py",
    }  # fmt: skip


@pytest.mark.parametrize("package", INSIDE)
def test_every_module_of_the_app_is_in_it(package: str, bundle: Path) -> None:
    ours = {str(path.relative_to(ROOT)) for path in files([package])}
    assert {str(path.relative_to(bundle)) for path in files([package], bundle)} == ours


def test_it_holds_no_code_that_attacks(bundle: Path) -> None:
    for path in bundle.rglob("*"):
        assert not {*path.relative_to(bundle).parts} & {*OUTSIDE}, path
    for file in bundle.rglob("*.py"):
        assert not packages_imported(file) & {*OUTSIDE, "datasets", "."}, file


def test_it_needs_no_module_of_the_checkout_that_is_not_in_it(bundle: Path) -> None:
    def there(root: Path, name: str) -> bool:
        path = root.joinpath(*name.split("."))
        return path.with_suffix(".py").exists() or (path / "__init__.py").exists()

    own = {*INSIDE, "deployment"}
    for file in bundle.rglob("*.py"):
        # A recipe is a script, which finds the modules next to it in the checkout.
        if file.parent.name != "datasets":
            needed = {name for name in imported(file) if name.partition(".")[0] in own and there(ROOT, name)}
            assert needed == {name for name in needed if there(bundle, name)}, file


@pytest.mark.slow
def test_an_installed_datasets_library_is_not_shadowed_and_the_bundle_is_enough(bundle: Path, tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "datasets"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("FAKE = True\n")
    code = f"""
import sys
# As in a Flower process: the bundle comes before what is installed. Of the checkout nothing is there.
rest = [path for path in sys.path if path not in ("", {str(ROOT)!r})]
sys.path[:] = [{str(bundle)!r}, {str(library.parent)!r}, *rest]
import server.app, client.app, deployment.hospital_table, datasets
assert datasets.FAKE
ours = {(*INSIDE, "deployment", *OUTSIDE)!r}
for name, module in sys.modules.items():
    if name.partition(".")[0] in ours:
        assert module.__file__.startswith({str(bundle)!r}), module
print(server.app.__file__)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(bundle / "server" / "app.py")


@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("protocol", {"annotated_types", "flwr", "numpy", "pydantic", "typer"}),
        ("federation", {"numpy", "pandas", "protocol", "pydantic"}),
        ("mechanisms", {"dp_accounting", "numpy", "protocol", "scipy"}),
    ],
)
def test_what_both_sides_share_depends_on_little(package: str, others: set[str]) -> None:
    outside = {name for file in files([package]) for name in packages_imported(file)} - sys.stdlib_module_names
    assert outside == others | {package}, "a module of the app, or a new dependency"


def test_an_editable_install_copies_nothing() -> None:
    """A copy would come before the checkout, and stay as it was when that is edited."""
    try:
        installed = distribution("umbel")
    except PackageNotFoundError:
        pytest.skip("umbel is not installed")
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        pytest.skip("umbel is installed as a copy, and not from a checkout")
    kinds = (".pth", "/bin/umbel", ".dist-info")
    copied = [str(file) for file in installed.files or () if not any(kind in str(file) for kind in kinds)]
    assert not copied
    site_packages = Path(sysconfig.get_path("purelib"))
    for package in (*APP, "benchmarks", "deployment", "experiments"):
        assert not (site_packages / package).exists()
        assert not (site_packages / f"{package}.py").exists()
    recipes = {path.name for path in (ROOT / "datasets").iterdir() if path.is_file()}
    assert not [name for name in recipes if (site_packages / "datasets" / name).exists()]
