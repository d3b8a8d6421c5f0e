"""Where the time of a round through ``flwr run`` goes: the hospital's clients, in Ray.

    python -m benchmarks.ray_round [--rounds 60] [--out FILE]

An observer of the run notes when messages are sent and replies read; when a node has answered, its reply says.
The same rounds are done in this process as well, which shows what umbel itself takes of them.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Iterable
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from typing import Annotated, Any

import typer
from flwr.app import Message

import umbel
from benchmarks import in_process
from benchmarks.measure import Out, benchmark, console, table_of
from benchmarks.peers.tasks import hospital
from umbel.protocol.home import write_atomically
from umbel.server.observer import Observer, Run

_FILE = "clock.json"
PARTS = (
    "choosing clients, and their messages",
    "handing the messages to the SuperLink",
    "until all nodes have answered",
    "until the server has read the answers",
    "checking, clustering, averaging",
)
"""The span between two of the recorded moments."""


class Clock(Observer):
    """Notes the moments between which the parts of a round lie, and leaves them in the run's folder."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._rounds: list[list[float]] = []
        self._began = self._sending = self._sent = self._answered = self._read = 0.0

    def begin(self, run: Run) -> None:
        """Listen to what is sent and read."""
        grid: Any = run.grid
        push, pull = grid.push_messages, grid.pull_messages

        def pushed(messages: Iterable[Message]) -> Iterable[str]:
            self._sending = time.time()
            ids = list(push(messages))
            self._sent = time.time()
            return ids

        def pulled(ids: Iterable[str]) -> Iterable[Message]:
            replies = list(pull(ids))
            if replies:
                self._answered = max(self._answered, *(reply.metadata.created_at for reply in replies))
                self._read = time.time()
            return replies

        grid.push_messages, grid.pull_messages = pushed, pulled

    def before_round(self, run: Run, number: int) -> None:
        """Start the clock."""
        self._began, self._answered = time.time(), 0.0

    def after_round(self, run: Run) -> None:
        """Note how long each part took."""
        if run.state.history[-1].asked:
            moments = (self._began, self._sending, self._sent, self._answered, self._read, time.time())
            self._rounds.append([after - before for before, after in pairwise(moments)])

    def at_end(self, run: Run) -> None:
        """Leave what was noted."""
        assert run.folder is not None
        write_atomically(run.folder.path / _FILE, json.dumps(self._rounds).encode())


def main(
    rounds: Annotated[int, typer.Option(min=2, help="Of the run; the first is not counted.")] = 60, out: Out = None
) -> None:
    """Print the median of each part of a round."""
    with benchmark(out, "ray"):
        config = hospital() | {"rounds": rounds}
        in_process.rounds(config)  # to warm up
        alone = in_process.go(config).seconds
        with redirect_stdout(StringIO()):
            folder = umbel.run(config, ray=True, observers="benchmarks.ray_round:Clock").path
        noted = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        shutil.rmtree(folder)
        show(noted[1:], alone)


def show(rounds: list[list[float]], alone: float) -> None:
    """Print the parts of rounds, each a list of seconds, and what a round takes in one process."""
    whole = statistics.median(sum(parts) for parts in rounds)
    table = table_of(f"A round of the hospital in Ray: {1e3 * whole:.0f} ms", ("", "ms", "lowest to highest"))
    for name, seconds in zip(PARTS, zip(*rounds, strict=True), strict=True):
        table.add_row(
            name, f"{1e3 * statistics.median(seconds):.1f}", f"{1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}"
        )
    console.print(table)
    console.print(f"All that umbel does in a round takes {1e3 * alone:.1f} ms in one process.")


if __name__ == "__main__":
    typer.run(main)
