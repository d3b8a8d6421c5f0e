"""Run the tests, and say how much processor time they took: python tools/suite.py, with pytest's options.

Machines differ threefold, and a busy one counts more for the same work. So a short loop, timed all along beside the
tests, says how fast the machine is at that, and the figure is scaled to the machine on which `BUDGET_S` was set.
"""

from __future__ import annotations

import hashlib
import resource
import statistics
import subprocess
import sys
import time

BUDGET_S = 450.0
"""Processor seconds that `make test` should take at most, on the machine where `loop` takes `LOOP_S`."""
LOOP_S = 0.0049
"""Processor seconds of `loop` on that machine, beside tests on both of its cores."""
_EVERY_S = 3.0


def loop() -> float:
    """Return the processor seconds of a fixed piece of work, like that of tests: objects, numbers and bytes."""
    before = time.thread_time()
    table: dict[str, float] = {}
    for number in range(20_000):
        table[f"{number % 977}"] = table.get(f"{number % 977}", 0.0) + number * 0.5
    digest = hashlib.sha256()
    for key, value in sorted(table.items()):
        digest.update(f"{key}={value}".encode() * 20)
    return time.thread_time() - before


def main(options: list[str]) -> int:
    """Run pytest, and return its status: a machine on which tests disturb each other may take longer, and passes."""
    tests = subprocess.Popen([sys.executable, "-m", "pytest", *options])
    loops = [loop()]
    while tests.poll() is None:
        time.sleep(_EVERY_S)
        loops.append(loop())
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, speed = used.ru_utime + used.ru_stime, LOOP_S / statistics.median(loops)
    print(
        f"processor: {seconds:.0f} s, with {statistics.median(loops) * 1e3:.1f} ms a loop; "
        f"scaled to a loop of {LOOP_S * 1e3:.1f} ms: {seconds * speed:.0f} s, of at most {BUDGET_S:.0f}"
    )
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
