"""Ends the processes that a launcher started and could not end itself, because it was killed.

This is a process that waits for its standard input to end, which happens when the launcher ends in any way. Its
argument is the launcher's scratch folder, the FLWR_HOME of all processes that the launcher started.
"""

from __future__ import annotations

import shutil
import signal
import sys
from contextlib import suppress

import psutil


def started(home: str) -> list[psutil.Process]:
    """Return the processes with this FLWR_HOME.

    Some have separate sessions, and some are no longer children of the launcher. They all inherit the variable.
    """
    return [one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get("FLWR_HOME") == home]


def end(home: str) -> None:
    """Kill all processes with this FLWR_HOME, and those that they start meanwhile."""
    while left := started(home):
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=10)


def main(home: str) -> None:
    """Wait for the launcher's end, then clean up after it, if it has not done so itself."""
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    sys.stdin.read()
    end(home)
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
