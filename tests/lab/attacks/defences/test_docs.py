"""What docs/guides/audit.md says to type is typed, and its two Mods are what it says of them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from umbel.cli.main import app
from umbel.protocol.project import OWN_PATH

pytestmark = pytest.mark.rest

TEXT = (Path(__file__).resolve().parents[4] / "docs" / "guides" / "audit.md").read_text(encoding="utf-8")
FEW = ("--canaries", "800")
"""Fewer canaries than a reader takes. With half as many, Gaussian noise passes for Laplace noise in 1 of 20 tests."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def codes(heading: str) -> list[str]:
    """The codes in the first column of the first table under some words."""
    table = TEXT[TEXT.index(heading) :].partition("\n\n")[2].partition("\n\n")[0]
    return re.findall(r"`([a-z-]+)`", "".join(line.split("|")[1] for line in table.splitlines()))


@pytest.fixture
def here(tmp_path: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's two modules."""
    for name, block in zip(("mine", "mended"), blocks("python"), strict=True):
        (tmp_path / f"{name}.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(OWN_PATH, str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_the_first_mod_has_the_faults_of_the_page_and_the_second_has_none(here: Path) -> None:
    first, second, both, _ = (shlex.split(block, comments=True) for block in blocks("bash"))
    told = CliRunner().invoke(app, [*first[1:], *FEW, "--json"], prog_name="umbel")
    assert told.exit_code == 1, told.output
    [report] = json.loads(told.stdout)
    assert {fault["code"] for fault in report["faults"]} == {*codes("This Mod has seven")}
    assert len(report["faults"]) == 7
    told = CliRunner().invoke(app, [*second[1:], *FEW], prog_name="umbel")
    assert told.exit_code == 0, told.output
    assert "No fault found, and the claim is not refuted" in told.stdout
    told = CliRunner().invoke(app, [*both[1:-3], "--canaries", "200", "--rounds", "1"], prog_name="umbel")
    assert told.exit_code == 1
    assert "No fault found" in told.stdout
