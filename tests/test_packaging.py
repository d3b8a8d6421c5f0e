"""What is installed with umbel: hints name packages with their versions, and every dependency is pinned."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.sources import APP, LAB, ROOT, files
from umbel.protocol.project import to_install
from umbel.server.tracking import TRACKERS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
LOCKS = [ROOT / "constraints.txt", *sorted((ROOT / "requirements").glob("*.txt"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.ipynb"))]


def test_no_hint_asks_an_index_for_umbel_itself() -> None:
    for file in [*files((*APP, LAB)), *PAGES]:
        assert not re.search(r"umbel\[[\w{]", file.read_text(encoding="utf-8")), file


def test_no_hint_installs_a_library_in_any_version() -> None:
    for_users = [one for extra in EXTRAS.keys() - {"dev", "docs"} for one in EXTRAS[extra]]
    named = {canonicalize_name(Requirement(one).name) for one in for_users} - {"umbel"}
    for file in files():
        words = set(re.findall(r"pip install '?([\w-]+)", file.read_text(encoding="utf-8")))
        assert not {canonicalize_name(word) for word in words} & named, file


@pytest.mark.parametrize("extra", ["parquet", "models", "export", "mlflow", "tensorboard", "hub"])
def test_a_hint_installs_the_packages_of_an_extra_in_its_versions(extra: str) -> None:
    modules = [re.split(r"[^a-z_]", text)[0] for text in EXTRAS[extra]]
    assert shlex.split(to_install(*modules)) == EXTRAS[extra]


def test_a_hint_installs_what_umbel_needs_and_its_lab_and_nothing_else() -> None:
    assert shlex.split(to_install("torch", "umbel_lab", "umbel", "my_models")) == ["torch>=2.6", "umbel-lab"]


def pins(file: Path) -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "# ":
            one = Requirement(line.removesuffix("\\").strip())
            found.setdefault(canonicalize_name(one.name), []).append(one)
    return found


def test_every_requirement_of_every_extra_has_a_pin_that_it_allows() -> None:
    """So each extra can be installed beside all others: `make pins` resolved them together."""
    known = pins(ROOT / "constraints.txt")
    for text in [*PROJECT["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]:
        one = Requirement(text)
        if one.name == "umbel":
            assert one.extras <= EXTRAS.keys()
            continue
        for pin in known[canonicalize_name(one.name)]:
            (exact,) = pin.specifier
            assert exact.operator == "=="
            assert one.specifier.contains(exact.version), f"{text} is pinned as {pin}"


@pytest.mark.parametrize("file", LOCKS, ids=lambda file: file.name)
def test_a_lock_holds_neither_hosts_nor_paths(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"://|^\s*-|/\w+/", text.replace("    --hash=sha256:", ""), re.MULTILINE)


@pytest.mark.parametrize("name", ["site", "cuda"])
def test_image_and_site_have_the_pinned_versions_with_hashes(name: str) -> None:
    file, known = ROOT / "requirements" / f"{name}.txt", pins(ROOT / "constraints.txt")
    for pin, versions in pins(file).items():
        assert name == "cuda" or {str(one.specifier) for one in versions} <= {str(one.specifier) for one in known[pin]}
    for block in re.split(r"\n(?=[a-z])", file.read_text(encoding="utf-8").partition("make pins\n")[2]):
        assert "--hash=sha256:" in block, block.splitlines()[0]


def test_the_sites_lock_has_all_that_umbel_needs_but_for_the_build_of_torch() -> None:
    needed = {canonicalize_name(Requirement(one).name) for one in PROJECT["dependencies"]}
    assert needed - pins(ROOT / "requirements" / "site.txt").keys() == {"torch"}
    assert "torch" in pins(ROOT / "requirements" / "cuda.txt")


def test_a_run_needs_nothing_that_umbel_is_developed_with() -> None:
    tools = {"mypy", "pytest", "ruff", "sphinx", "ipykernel", "transformers", "onnx", "pyarrow", "mlflow-skinny"}
    assert not pins(ROOT / "requirements" / "site.txt").keys() & tools


def test_the_docs_name_every_extra_and_no_other() -> None:
    page = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    rows = page.partition("| extra | installs | for |")[2].partition("\n\n")[0].splitlines()[2:]
    first = {name for row in rows for name in re.findall(r"^\| `([a-z]+)` \|", row)}
    assert first == EXTRAS.keys() - TRACKERS.keys(), "one row each"
    assert TRACKERS.keys() <= {name for row in rows for name in re.findall(r"`([a-z]+)`", row)}
