"""Audits of peers: the formula figures by the peers' own code, environments, and the table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.errors import raises
from umbel.privacy.accounting.accountant import compose
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.protocol.errors import ConfigError
from umbel.protocol.project import source
from umbel_lab.experiments import audits

pytestmark = pytest.mark.rest

REPORT = {
    "rows": False, "claim": {"delta": 1e-5}, "law": "gaussian",
    "faults": [{"code": "low-bits", "text": "the last bits tell", "mend": "Round."}],
    "figures": [
        {"rounds": rounds, "claimed": 1.0, "formula": "inf", "fitted": 2.0, "low": 1.5, "high": 2.5,
         "proved": {"shown": 0.5}, "provable": 6.0}
        for rounds in (1, 3)
    ],
}  # fmt: skip

STRATEGY = "DifferentialPrivacy{}Side{}Clipping"


def said(script: str) -> dict[str, float]:
    """Return the figures that a script prints."""
    command = [sys.executable, source(audits.FOLDER) / f"{script}.py"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    lines = [line.split() for line in done.stdout.splitlines() if len(line.split()) == 2]
    return {name: float(figure) for name, figure in lines}


@pytest.mark.slow
def test_flowers_own_code_gives_the_formula_figures() -> None:
    """A noise multiplier of 1 puts two updates two deviations apart. Adaptive clipping counts with a fourth of it."""
    local, fixed, adaptive = (
        compose({GaussianLoss(mu): 1}, 1e-5) for mu in (2 / (2 * 11.736) ** 0.5, 2.0, 2.0 * 0.75**0.5)
    )
    sides = [(side, kind) for side in ("Client", "Server") for kind in ("Fixed", "Adaptive")]
    wanted = {STRATEGY.format(*one): fixed if one[1] == "Fixed" else adaptive for one in sides}
    assert said("flower_figures") == pytest.approx({"LocalDpMod": local, **wanted}, rel=0.02)


@pytest.mark.slow
def test_umbels_own_code_gives_the_formula_figures() -> None:
    """Noise multiplier 8: of 8 values, Laplace noise costs 2 n / nu = 2."""
    wanted = {"gaussian": compose({GaussianLoss(0.25): 1}, 1e-5), "laplace": 2.0}
    assert said("umbel_figures") == pytest.approx(wanted, rel=0.02)


def test_a_script_has_twenty_lines_beside_its_imports_and_its_targets() -> None:
    peers = {one["peer"] for one in audits.TARGETS}
    scripts = {path.stem.removesuffix("_figures"): path for path in source(audits.FOLDER).glob("*.py")}
    assert scripts.keys() <= peers
    for path in scripts.values():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        assert len(lines) <= 45


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that ran; an audit reports `REPORT`, and pip installs all but one package."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        failed = any("fl4health" in word for word in command)
        return subprocess.CompletedProcess(command, int(failed), json.dumps([REPORT]), "")

    monkeypatch.setattr(audits.subprocess, "run", run)  # type: ignore[attr-defined]
    monkeypatch.setattr(audits.venv, "create", lambda home, **_: home.mkdir(parents=True, exist_ok=True))  # type: ignore[attr-defined]
    return commands


def test_each_package_is_installed_once_and_each_target_audited(tmp_path: Path, ran: list[list[str]]) -> None:
    for _ in range(2):
        audits.page(7, tmp_path, canaries=500).write(tmp_path)
    installs = [command[5] for command in ran if "pip" in command]
    assert sorted(set(installs)) == sorted(one["requirement"] for one in audits.PEERS.values() if one["requirement"])
    assert installs.count("flwr==1.42.0") == 1
    audited = [command for command in ran if "audit" in command]
    assert len(audited) == 2 * len([one for one in audits.TARGETS if one["peer"] != "fl4health"])
    assert all(command[command.index("--seed") + 1] == "7" for command in audited)


def test_the_table_has_each_figure_and_what_cannot_be_installed(tmp_path: Path, ran: list[list[str]]) -> None:
    audits.page(7, tmp_path, canaries=500).write(tmp_path)
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "| flower | LocalDpMod | client | 1e-05 | 1 | infinite | 2 (1.5 to 2.5) | 0.50 of 6.00 |" in table
    assert "not on Python" in next(line for line in table.splitlines() if line.startswith("| fl4health"))


def test_a_quick_look_installs_nothing(tmp_path: Path, ran: list[list[str]]) -> None:
    audits.page(7, tmp_path, quick=True).write(tmp_path)
    assert all("audit" in command for command in ran)
    assert not (tmp_path / "environments").exists()


def test_an_audit_that_fails_is_named(tmp_path: Path, ran: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 2, "", "Error: it is broken")

    monkeypatch.setattr(audits.subprocess, "run", run)  # type: ignore[attr-defined]
    with raises(ConfigError, "config.not-done", "it is broken"):
        audits.page(7, tmp_path, quick=True).write(tmp_path)
