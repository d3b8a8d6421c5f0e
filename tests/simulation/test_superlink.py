"""What a launcher starts ends with it, however it ends."""

from __future__ import annotations

import signal
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


def heeds_interrupts() -> None:
    """What is started in the background of a shell's script ignores them, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_a_launcher_that_is_killed_leaves_no_process_and_no_folder(tmp_path: Path, sign: signal.Signals) -> None:
    home = tmp_path / "home"
    home.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(home)], cwd=APP, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        preexec_fn=heeds_interrupts,
    )  # fmt: skip
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"up\n"
    assert reaper.started(str(home))
    launcher.send_signal(sign)
    launcher.wait()
    wait_until("end of all that was started", lambda: not reaper.started(str(home)) or None, 600)
    if sign is not signal.SIGINT:  # which the launcher can act on, and clean up behind itself
        wait_until("end of its folder", lambda: not home.exists() or None, 600)
