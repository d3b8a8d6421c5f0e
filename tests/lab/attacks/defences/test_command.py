"""umbel audit: a page or JSON, and an exit code for CI."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.helpers.errors import ended
from umbel.cli.main import app
from umbel.protocol.project import OWN_PATH

FUNCTIONS = """
import numpy as np

generator = np.random.default_rng()

def noisy(arrays):
    "Laplace noise for epsilon 16 between any two updates of 8 values up to 1 in size, rounded to a grid."
    clipped = [np.clip(np.nan_to_num(array), -1, 1) for array in arrays]
    return [np.rint(1024 * (array + generator.laplace(0, 1, array.shape))) / 1024 for array in clipped]

noisy.gamma = 1.0

def bare(arrays):
    return arrays
"""


def invoked(*words: str) -> Result:
    return CliRunner().invoke(app, ["audit", *words, "--canaries", "200"], prog_name="umbel")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the user's functions."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(OWN_PATH, str(tmp_path))


def test_a_right_claim_passes() -> None:
    told = invoked("functions:noisy", "--claim-epsilon", "16", "--claim-delta", "0", "--rounds", "1")
    assert told.exit_code == 0, told.output
    assert "No fault found" in told.stdout
    assert "values up to 1" in told.stdout


def test_a_wrong_claim_ends_with_1_and_its_faults() -> None:
    told = invoked("functions:bare", "--claim-epsilon", "1", "--clip-norm", "2", "--json")
    assert told.exit_code == 1
    [report] = json.loads(told.stdout)
    assert report["refuted"]
    assert {"no-noise", "unclipped"} <= {fault["code"] for fault in report["faults"]}
    assert [one["claimed"] for one in report["figures"]] == [1, 1]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("functions",), "config.audit-target"),
        (("functions:bare", "--mod", "none"), "config.audit-target"),
        (("functions:bare", "--claim-epsilon", "-1"), "config.audit-claim"),
        (("functions:missing",), "attack.target-fails"),
        (("missing:function",), "attack.target-not-found"),
        (("functions:bare", "--python", "/missing/python"), "attack.no-interpreter"),
    ],
)
def test_what_cannot_be_audited_is_told_in_one_line(words: tuple[str, ...], code: str) -> None:
    told = invoked(*words)
    ended(told.exit_code, told.stderr, code)


# --- the page in docs


TEXT = (Path(__file__).resolve().parents[4] / "docs" / "guides" / "audit.md").read_text(encoding="utf-8")
FEW = ("--canaries", "800")
"""Fewer canaries than a reader takes. With half as many, Gaussian noise passes for Laplace noise in 1 of 20 tests."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def codes(heading: str) -> list[str]:
    """The codes in the first column of the first table under some words."""
    table = TEXT[TEXT.index(heading) :].partition("\n\n")[2].partition("\n\n")[0]
    return re.findall(r"`([a-z-]+)`", "".join(line.split("|")[1] for line in table.splitlines()))


@pytest.mark.slow
@pytest.mark.rest
def test_the_first_mod_has_the_faults_of_the_page_and_the_second_has_none(tmp_path: Path) -> None:
    """What docs/guides/audit.md says to type is typed, and its two Mods are what it says of them."""
    for name, block in zip(("mine", "mended"), blocks("python"), strict=True):
        (tmp_path / f"{name}.py").write_text(block)
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
