"""The systemd units of a site, a server and its metrics: what they run, and what they may write."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import commands
from umbel.protocol.project import PACKAGE

PYTHON = "/opt/umbel/bin/python"


@pytest.fixture(params=["umbel-site", "umbel-server", "umbel-metrics"])
def unit(request: pytest.FixtureRequest) -> Path:
    return PACKAGE / "deploy" / f"{request.param}.service"


def settings(unit: Path, name: str) -> list[str]:
    lines = unit.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]


def test_umbel_takes_its_command_and_it_has_a_user_of_its_own_and_writes_its_state_alone(unit: Path) -> None:
    [line] = settings(unit, "ExecStart")
    program, path_alone, *words = shlex.split(line)
    assert (program, path_alone) == (PYTHON, "-P")
    commands.check(["python", *words])
    metrics = unit.stem == "umbel-metrics"
    user = "umbel-server" if metrics else unit.stem
    assert settings(unit, "User") == [user]
    assert settings(unit, "StateDirectory") == ([] if metrics else [user])
    assert f"UMBEL_HOME=/var/lib/{user}" in settings(unit, "Environment")
    assert settings(unit, "ReadWritePaths") == []
    for line in (
        "NoNewPrivileges=yes", "CapabilityBoundingSet=", "ProtectSystem=strict", "ProtectHome=yes", "PrivateTmp=yes",
        "PrivateDevices=yes", "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX", "SystemCallFilter=@system-service",
        "Restart=always", "RestartPreventExitStatus=2",
    ):  # fmt: skip
        assert line in unit.read_text(encoding="utf-8").splitlines()


def test_systemd_finds_no_fault(unit: Path, tmp_path: Path) -> None:
    if not (analyze := shutil.which("systemd-analyze")):
        pytest.skip("there is no systemd-analyze")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text(encoding="utf-8").replace(PYTHON, sys.executable), encoding="utf-8")
    done = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, check=False)
    # It also looks at this machine's own units.
    assert not [line for line in done.stderr.splitlines() if unit.stem in line]
