"""Whether, in what words and how long a site answers says nothing about its data: tasks at every extreme, and five
data sets that could hardly differ more.

A server may ask for whatever its policy lets pass, and more. Whatever it asks, all five answer alike: a reply or
"refused", of one length, with the same records, shapes and flags. How long they take is not the same, since training
takes time; what they do is bounded by task and policy, which is counted here and not timed.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message
from numpy.typing import NDArray

from tests.helpers.datasets import manifest
from tests.helpers.messages import asked, refused, released, releases, scores, task_of, wire
from tests.helpers.nodes import ask
from tests.helpers.paper import paper_run
from umbel.client.app import app
from umbel.client.cohort import LocalUpdate, Schedule
from umbel.data import offsets_of, write_dataset
from umbel.privacy.site.journal import Journal
from umbel.protocol.messages import query
from umbel.protocol.tasks import EvaluationSpec
from umbel.simulation.grid import InProcessGrid

CLIENTS = 4
MAX_EXAMPLES = 120
HONEST = task_of((0, 1, 2, 3), noise_multiplier=3.0, clip_norm=0.01)
LENGTHS = {
    "a row each": [1, 1, 1, 1],
    "many rows": [60, 59, 61, 60],
    "constant": [7, 7, 7, 7],
    "huge": [5, 6, 7, 8],
    "one client has nearly all": [1, 2, 1, 350],
}


def data(name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the rows of a data set."""
    rows, rng = sum(LENGTHS[name]), np.random.default_rng(0)
    if name == "constant":
        return np.ones((rows, 2), np.float32), np.zeros(rows, np.float32)
    scale = np.float32(1e30 if name == "huge" else 1)
    features = scale * rng.uniform(-1, 1, (rows, 2)).astype(np.float32)
    return features, features @ np.array([1, 2], np.float32)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, InProcessGrid]:
    """A site for each data set, by its name; their training clients may report with noise."""

    grids = {}
    for name, lengths in LENGTHS.items():
        folder = tmp_path_factory.mktemp("site")
        own = manifest(CLIENTS, 0, model="linear", loss="mse")
        write_dataset(folder / "own", own, *data(name), offsets_of(lengths))
        Journal.create(folder / "ledger.jsonl")
        config = {"data-path": str(folder / "own"), "ledger-path": str(folder / "ledger.jsonl")}
        config |= {"max-work": f"examples={MAX_EXAMPLES}", "reports": "noise=2.0", "rows": "largest=2000"}
        grids[name] = InProcessGrid(app, paper_run(), node_configs=[config])
        # As in any run, and before anything is short: the node tries its model out.
        assert not ask(grids[name], query(), "query").has_error()
    return grids


def hypotheses(k: int = 2, value: float = 5.0) -> dict[str, NDArray[np.float32]]:
    return {"weight": (value * np.linspace(-1, 1, 2 * k).reshape(k, 1, 2)).astype(np.float32)}


def told(reply: Message) -> tuple[Any, ...]:
    """Return all that a reply says but for the numbers that are noised."""
    if reply.has_error():
        assert refused(reply)
        return ("refused", len(wire(reply)))
    shapes = {name: (str(a.dtype), a.shape) for name, a in releases(reply).items()} if "arrays" in reply.content else {}
    flags = released(reply) if "released" in reply.content else []
    reports = np.isfinite(scores(reply)).tolist() if "scores" in reply.content else []
    assert all(np.isfinite(value).all() for value in releases(reply).values()) if shapes else True
    return (sorted(reply.content), shapes, flags, reports, len(wire(reply)))


def answers(sites: dict[str, InProcessGrid], content: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Return what each site says, without those that say the same as one before."""
    distinct: list[tuple[Any, ...]] = []
    for grid in sites.values():
        if (said := told(ask(grid, content()))) not in distinct:
            distinct.append(said)
    return distinct


BY_ROWS = {"row_clip_norm": 1.0, "row_noise_multiplier": 1.0, "row_rate": 0.5, "row_batch": 3.0, "local_epochs": 1}
ACCEPTED: list[dict[str, Any]] = [
    {}, {"clients": (3,)}, {"local_epochs": 0}, {"local_epochs": 100}, {"local_epochs": 100, "batch_size": 1},
    {"local_steps": 1000}, {"local_steps": 1000, "batch_size": 0}, {"batch_size": 0}, {"batch_size": 2**31},
    {"step_size": 5e-324}, {"step_size": 1e38}, {"step_size": 1e308}, {"noise_multiplier": 1e9}, {"clip_norm": 5e-324},
    {"clipping": "public", "clip_norm": 1e-9}, {"clipping": "public", "clip_norm": 1e9}, {"noise_per": "row"},
    {"noise_per": "layer"}, {"round": 2**31}, {"run": "r" * 200},
    BY_ROWS, BY_ROWS | {"row_rate": 1.0, "local_steps": 20}, BY_ROWS | {"row_rate": 1e-9, "local_steps": 3},
    BY_ROWS | {"row_clip_norm": 1e-6}, BY_ROWS | {"row_batch": 1e308},
]  # fmt: skip
LONG = BY_ROWS | {"row_rate": 1.0, "local_steps": 1000}
"""It takes as long as all others together, and twenty of its steps are among those."""
REFUSED: list[dict[str, Any]] = [
    {"clients": (4,)}, {"local_epochs": 2**31}, {"noise_multiplier": 1e300, "clip_norm": 1e300}, {"message_noise": 1.0},
    {"frozen_digest": "00"}, BY_ROWS | {"row_rate": 9e-4}, BY_ROWS | {"row_batch": np.nan},
    BY_ROWS | {"row_clip_norm": 1e6, "row_noise_multiplier": 1e300}, BY_ROWS | {"step_size": 1e308},
]  # fmt: skip
"""On the task alone, whatever the data are."""
DEMANDS = [*((changes, False) for changes in ACCEPTED), *((changes, True) for changes in REFUSED)]
HYPOTHESES = [
    ((1, 0.0), False), ((2, 0.0), False), ((10, 1e3), False), ((11, 1.0), True), ((2, 3e38), False),
    ((2, 1e-45), False), ((2, np.nan), True),
]  # fmt: skip


def record(changes: dict[str, Any]) -> ConfigRecord:
    """Return a task, which may be one that `TrainingSpec` would not let pass."""
    made = HONEST.to_record()
    for key, value in changes.items():
        made[key] = list(value) if isinstance(value, tuple) else value
    return made


@pytest.mark.parametrize(
    ("changes", "drawn", "refuses"),
    [
        *((changes, (2, 5.0), refuses) for changes, refuses in DEMANDS),
        *(({}, *one) for one in HYPOTHESES),
        pytest.param(LONG, (2, 5.0), False, marks=pytest.mark.rest),
    ],
    ids=str,
)
def test_every_data_set_answers_a_task_alike(
    sites: dict[str, InProcessGrid], changes: dict[str, Any], drawn: tuple[int, float], refuses: bool
) -> None:
    [said] = answers(sites, lambda: asked(hypotheses(*drawn), record(changes)))
    assert (said[0] == "refused") == refuses


@pytest.mark.parametrize("drawn", [(1, 0.0), (10, 1e3), (2, 3e38), (11, 1.0)])
def test_every_data_set_reports_alike(sites: dict[str, InProcessGrid], drawn: tuple[int, float]) -> None:
    clients = tuple(range(CLIENTS, 2 * CLIENTS))
    assert len(answers(sites, lambda: asked(hypotheses(*drawn), None, EvaluationSpec(1, clients)))) == 1


def fails_beyond(rows: int) -> Callable[..., int]:
    """Return what runs out of memory for a client of more rows than there is memory for."""

    def size(self: LocalUpdate, length: int) -> int:
        if length > rows:
            raise MemoryError(f"no memory for {length} rows")
        return min(self.batch_size or length, length)

    return size


@pytest.mark.parametrize("rows", [0, 1, 5, 59, 300])
def test_where_memory_is_enough_for_some_every_data_set_answers_alike(
    sites: dict[str, InProcessGrid], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """By so many free queries the number of rows could be found, were one answer another."""
    monkeypatch.setattr(LocalUpdate, "size", fails_beyond(rows))
    [said] = answers(sites, lambda: asked(hypotheses(), record({})))
    assert said[0] == ["arrays", "released"]


# --- what a message can make a site do


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """The rows of each client, and how many each message computed on."""
    counts: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
    minibatches = Schedule.minibatches

    def count(self: Schedule, device: torch.device, width: int = 0) -> Any:
        examples = np.zeros(len(self.lengths))
        for step in minibatches(self, device, width):
            examples += step.known
            yield step
        counts.append((self.lengths, examples))

    monkeypatch.setattr(Schedule, "minibatches", count)
    return counts


@pytest.mark.parametrize("changes", [{"local_epochs": 100, "batch_size": 1}, {"local_steps": 1000, "batch_size": 0}])
def test_what_is_computed_is_bounded_whatever_the_data(
    sites: dict[str, InProcessGrid],
    counted: list[tuple[NDArray[np.int64], NDArray[np.float64]]],
    changes: dict[str, Any],
) -> None:
    """By ``max-examples``, or once through the client's rows where there are more."""
    for grid in sites.values():
        assert not ask(grid, asked(hypotheses(), record(changes))).has_error()
    clients = sum(np.count_nonzero(lengths) for lengths, _ in counted)
    assert clients == sum(map(len, LENGTHS.values())), "each client once; the other places of a chunk have no rows"
    for lengths, examples in counted:
        assert (examples <= np.where(lengths, np.maximum(lengths, MAX_EXAMPLES), 0)).all()
        assert ((examples > 0) == (lengths > 0)).all()


def test_memory_does_not_grow_with_the_passes(sites: dict[str, InProcessGrid]) -> None:
    """A hundred passes over 350 rows would be orders of 280 kB; an update of one pass takes a tenth of that."""
    grid = sites["one client has nearly all"]
    peaks = []
    for epochs in (1, 1, 100):  # what is made once is there after the first
        context = next(iter(grid.contexts.values()))
        context.node_config["max-work"] = "epochs=inf steps=inf examples=35_000"
        tracemalloc.start()
        assert not ask(grid, asked(hypotheses(), record({"local_epochs": epochs, "batch_size": 250}))).has_error()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    context.node_config["max-work"] = f"examples={MAX_EXAMPLES}"
    assert peaks[2] < peaks[1] + 100_000
