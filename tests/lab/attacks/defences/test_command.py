"""umbel audit: a page or JSON, and an exit code for CI."""

from __future__ import annotations

import json
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


def test_several_targets_have_a_page_each() -> None:
    shown = invoked("functions:bare", "functions:noisy", "--rounds", "1")
    assert shown.exit_code == 0, "neither claims anything"
    assert shown.stdout.count("Nothing is claimed") == 2


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
