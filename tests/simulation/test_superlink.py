"""What a launcher starts ends with it, however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.processes import wait_until
from umbel.simulation import reaper
from umbel.simulation.launch import APP

LAUNCHER = """
import sys, time
from pathlib import Path
from umbel.simulation.superlink import superlink

with superlink(Path(sys.argv[1])):
    print("up", flush=True)
    time.sleep(100_000)
"""


@pytest.mark.rest
def test_a_launcher_that_is_killed_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    """`tests/simulation/test_private.py` interrupts one."""
    home = tmp_path / "home"
    home.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(home)], cwd=APP, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"up\n"
    assert reaper.started(str(home))
    launcher.kill()
    launcher.wait()
    wait_until("end of all that was started", lambda: not reaper.started(str(home)) or None, 600)
    wait_until("end of its folder", lambda: not home.exists() or None, 600)
