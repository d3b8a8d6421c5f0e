"""Ends what a launcher started and could not end itself, because it was killed.

It is a process that waits for its standard input to end, as it does when the launcher ends in any way. Its argument is
the launcher's scratch folder, the FLWR_HOME of all that the launcher started.
"""

from __future__ import annotations

import shutil
import signal
import sys
from contextlib import suppress

import psutil


def started(home: str) -> list[psutil.Process]:
    """Return the processes with this FLWR_HOME.

    Some have their own sessions, and not all are still children of the launcher. The inherited variable tells.
    """
    return [one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get("FLWR_HOME") == home]


def end(home: str) -> None:
    """Kill all that has this FLWR_HOME, and what it starts meanwhile."""
    while left := started(home):
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=10)


def main(home: str) -> None:
    """Wait for the launcher's end, then clean up behind it; there is nothing to do where it did so itself."""
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    sys.stdin.read()
    end(home)
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
