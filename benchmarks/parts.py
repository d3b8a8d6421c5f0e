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
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import in_process
from benchmarks.bare import ROUNDS
from benchmarks.measure import Out, benchmark, console, table_of
from benchmarks.peers.tasks import TASKS, named

_COPIES = ("to_array_record", "from_array_record", "pack", "unpack", "flatten", "unflatten")
_COPIED_IN = (
    "client.work", "privacy.site.umbel_app", "privacy.channels.client", "protocol.messages", "nodes.fleet",
    "privacy.channels.reports", "strategies.base", "server.run",
)  # fmt: skip
_RECORDS = ("Message", "RecordDict", "ArrayRecord", "ConfigRecord", "MetricRecord", "Array")

PARTS: dict[str, list[str]] = {
    "the node and its policy": ["umbel.client.node:Node.at", "umbel.privacy.site.config:Site.of"],
    "reading rows": ["umbel.client.cohort:Cohort.gather"],
    "scoring, to choose and to evaluate": ["umbel.client.learner:Learner.score"],
    "training": ["umbel.client.learner:Learner.train"],
    "ledger": ["umbel.privacy.site.totals:Totals.charge"],
    "noise": [f"umbel.privacy.mechanisms.sanitise:{name}" for name in ("sanitise_in_place", "round_to_grid")],
    "updates and releases": [
        "umbel.privacy.channels.client:ClientSanitiser.sanitised",
        "umbel.privacy.channels.on_gpu:ReleasesOnGpu.release",
    ],
    "arrays to records and back": [
        f"umbel.{module}:{name}"
        for module in _COPIED_IN
        for name in _COPIES
        if hasattr(import_module(f"umbel.{module}"), name)
    ],
    "Flower's messages and records": [
        "flwr.app.message.typeddict:TypedDict.__setitem__",
        *(f"flwr.app:{kind}.__init__" for kind in _RECORDS),
    ],
    "sampling clients": ["umbel.nodes.fleet:draw", "umbel.nodes.fleet:draw_in_turn"],
    "k-means": ["umbel.strategies.group_privacy:seeded_kmeans"],
    "averages": [f"umbel.strategies.base:{name}" for name in ("mean_of", "distances")],
}
"""The timed functions, as ``module:attribute``."""
BETWEEN = "the code between: checks, policy, history"


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
    def watch(self, parts: Mapping[str, list[str]]) -> Iterator[None]:
        """Time all parts for as long as the block runs."""
        replaced = []
        for part, places in parts.items():
            for place in places:
                module, _, path = place.partition(":")
                *owners, name = path.split(".")
                owner = reduce(getattr, owners, import_module(module))
                whole = vars(owner)[name]
                timed = self.around(part, getattr(owner, name))
                setattr(owner, name, staticmethod(timed) if isinstance(whole, classmethod) else timed)
                replaced.append((owner, name, whole))
        try:
            yield
        finally:
            for owner, name, whole in replaced:
                setattr(owner, name, whole)


def by_parts(
    config: Mapping[str, Any], parts: Mapping[str, list[str]] = PARTS, watch: Stopwatch | None = None
) -> tuple[float, dict[str, float], float]:
    """Do the rounds of a run config; return their seconds, whole and by part, and the last loss."""
    watch = watch or Stopwatch()
    before = in_process.Laps(lambda _: dict(watch.seconds))
    with watch.watch(parts):
        whole, losses = in_process.rounds(config, before)
    return whole, {part: watch.seconds[part] - before.notes[0].get(part, 0.0) for part in parts}, losses[-1]


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
                in_process.rounds(config)  # to warm up
                whole, parts, _ = by_parts(config)
            show(name, parts, whole, int(config["rounds"]))


def show(task: str, seconds: dict[str, float], whole: float, rounds: int) -> None:
    """Print what the parts take of a round."""
    table = table_of(f"{task}: a round of {1e3 * whole / rounds:.2f} ms", ("", "ms", "%"))
    rest = {BETWEEN: whole - sum(seconds.values())}
    for part, took in sorted((seconds | rest).items(), key=lambda item: -item[1]):
        table.add_row(part, f"{1e3 * took / rounds:.3f}", f"{100 * took / whole:.0f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
