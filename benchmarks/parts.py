"""Where a round's time goes.

    python -m benchmarks.parts [--task hospital,cnn] [--rounds N] [--out FILE]

Each part is timed where it is called, without the parts inside it; what no part covers is the code between. The
clock itself takes part of a microsecond a call.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message.typeddict import TypedDict

import umbel.client.app
import umbel.privacy.gate.own_app
import umbel.privacy.gate.releases
import umbel.protocol.messages
import umbel.server.nodes.fleet
import umbel.server.nodes.replies
import umbel.server.rounds
import umbel.strategies.base
import umbel.strategies.group_privacy
from benchmarks import in_process
from benchmarks.bare import ROUNDS
from benchmarks.measure import Out, benchmark, console, table_of
from benchmarks.peers.tasks import TASKS, named
from umbel.client.cohort import Cohort
from umbel.client.learner import Learner
from umbel.client.node import Node
from umbel.privacy.gate.memory_ledger import MemoryLedger
from umbel.privacy.gate.site import Site
from umbel.server.nodes.roster import Roster

Place = tuple[ModuleType | type, str]

PARTS: dict[str, list[Place]] = {
    "the node and its policy": [(Node, "at"), (Site, "of")],
    "reading rows": [(Cohort, "gather")],
    "scoring, to choose and to evaluate": [(Learner, "score")],
    "training": [(Learner, "train")],
    "ledger": [(MemoryLedger, "charge")],
    "noise": [(umbel.privacy.gate.releases, "sanitise_in_place"), (umbel.privacy.gate.releases, "round_to_grid")],
    "updates and releases": [(umbel.privacy.gate.releases.Sanitiser, "sanitised")],
    "arrays to records and back": [
        (module, name)
        for module in (
            umbel.client.app,
            umbel.privacy.gate.own_app,
            umbel.privacy.gate.releases,
            umbel.protocol.messages,
            umbel.server.nodes.fleet,
            umbel.server.nodes.replies,
            umbel.strategies.base,
            umbel.server.rounds,
        )
        for name in ("to_array_record", "from_array_record", "pack", "unpack", "flatten", "unflatten")
        if hasattr(module, name)
    ],
    "Flower's messages and records": [
        (TypedDict, "__setitem__"),
        *((kind, "__init__") for kind in (Message, RecordDict, ArrayRecord, ConfigRecord, MetricRecord, Array)),
    ],
    "sampling clients": [(Roster, "draw")],
    "k-means": [(umbel.strategies.group_privacy, "seeded_kmeans")],
    "averages": [(umbel.strategies.base, "mean_of"), (umbel.strategies.base, "distances")],
}


class Stopwatch:
    """Seconds by part, each without the parts that it calls.

    Parameters
    ----------
    clock : callable
        ``time.process_time`` for time of a core, in which others do not count.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = clock
        self._inner = [0.0]

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and is timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = self._clock() - began
                self.seconds[part] += took - self._inner.pop()
                self._inner[-1] += took

        return timed

    @contextmanager
    def watch(self, parts: Mapping[str, list[Place]] = PARTS) -> Iterator[None]:
        """Time all parts for as long as the block runs."""
        replaced = []
        for part, places in parts.items():
            for place, name in places:
                whole = vars(place)[name]
                bound = isinstance(whole, classmethod)
                timed = self.around(part, getattr(place, name))
                setattr(place, name, staticmethod(timed) if bound else timed)
                replaced.append((place, name, whole))
        try:
            yield
        finally:
            for place, name, whole in replaced:
                setattr(place, name, whole)


def main(
    task: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = ",".join(TASKS),
    rounds: Annotated[int, typer.Option(min=0, help="0 for the task's own number.")] = 0,
    out: Out = None,
) -> None:
    """Print a table for each task."""
    with benchmark(out):
        for name in named(task):
            with tempfile.TemporaryDirectory() as scratch:
                config = TASKS[name](Path(scratch)) | {"rounds": rounds or ROUNDS[name]}
                in_process.prepare(config)()  # to warm up
                go = in_process.prepare(config)
                watch = Stopwatch()
                with watch.watch():
                    began = time.perf_counter()
                    go()
                    whole = time.perf_counter() - began
            show(name, watch.seconds, whole, int(config["rounds"]))


def show(task: str, seconds: dict[str, float], whole: float, rounds: int) -> None:
    """Print what the parts take of a round."""
    table = table_of(f"{task}: a round of {1e3 * whole / rounds:.2f} ms", ("", "ms", "%"))
    rest = {"the code between: checks, policy, history": whole - sum(seconds.values())}
    for part, took in sorted((seconds | rest).items(), key=lambda item: -item[1]):
        table.add_row(part, f"{1e3 * took / rounds:.3f}", f"{100 * took / whole:.0f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
