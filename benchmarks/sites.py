"""Compare how a site computes its clients with the loop, which computes one after the other.

    python -m benchmarks.sites [--clients N] [--images N] [--times N] [--out FILE]

A site answers a round's message: policy, ledger on disk, choice among hypotheses, training, noise. Both contestants
have all of PyTorch's threads, as a site has. The loop gives all of them to one client after the other, and draws one
client's noise after the other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import torch
import typer
from flwr.app import Message
from numpy.typing import NDArray

import umbel.client.app
from benchmarks.measure import Out, Ratio, Reading, Times, benchmark, interleave, show
from umbel import models
from umbel.client import learner, trial
from umbel.privacy.channels import client
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.messages import round_request
from umbel.protocol.records import pack
from umbel.protocol.release import Clipping
from umbel.protocol.tasks import TrainingSpec
from umbel.simulation.grid import InProcessGrid

LOOP = "one client after the other"
OPEN = {
    "role": "train", "budget": "inf", "clipping": "any", "max-choice-epsilon": "inf", "min-noise-multiplier": 1.0,
}  # fmt: skip


def main(
    clients: Annotated[int, typer.Option(min=1, help="Clients of the network of 11 parameters.")] = 600,
    images: Annotated[int, typer.Option(min=1, help="Clients of the network of images.")] = 16,
    times: Times = 3,
    out: Out = None,
) -> None:
    """Print a table for each network."""
    with benchmark(out, threads=torch.get_num_threads()):
        measure("mlp", clients, 5, times)
        measure("cnn10", images, 2, times)


def measure(model: str, clients: int, k: int, times: int) -> Ratio:
    """Print how long a site takes to answer a message, and return its ratio to the loop."""
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch) / "data", model, clients)
        answer = partial(answered, Path(scratch), model, clients, k, count(1))
        readings = interleave({"site": answer, LOOP: lambda: in_a_loop(answer)}, times)
    show(f"{model}: {clients} clients train, k = {k}", readings, LOOP)
    return Ratio.of(readings["site"], readings[LOOP])


def write(folder: Path, model: str, clients: int) -> None:
    """Write made-up clients: hospitals with one to four rows of three numbers, or writers of 30 to 60 images."""
    rng = np.random.default_rng(0)
    hospital = model == "mlp"
    lengths = rng.integers(1, 5, clients) if hospital else rng.integers(30, 61, clients)
    rows = int(lengths.sum())
    features = rng.uniform(-1, 1, (rows, 3) if hospital else (rows, 28, 28)).astype(np.float32)
    targets: NDArray[Any] = rng.standard_normal(rows).astype(np.float32) if hospital else rng.integers(0, 10, rows)
    manifest = umbel.Manifest(name="own", clients=clients, split={"train": clients, "validation": 0}, model=model)
    umbel.write_dataset(folder, manifest, features, targets, np.append(0, lengths.cumsum()))


def answered(scratch: Path, model: str, clients: int, k: int, rounds: count[int]) -> Reading:
    """Return what a site takes to answer a message that asks all its clients to train."""
    drawn = [models.load(model).initial(seed) for seed in range(k)]
    hypotheses = pack({name: np.stack([one[name] for one in drawn]) for name in drawn[0]})
    task = TrainingSpec(
        round=next(rounds), clients=tuple(map(ClientOnNode, range(clients))), local_epochs=1, step_size=0.1,
        batch_size=20, noise_multiplier=5.0, clipping=Clipping.UPDATE, clip_norm=0.1, choice_epsilon=0.0,
    )  # fmt: skip
    content = round_request(hypotheses)
    content["training"] = task.to_record()
    site = {"data-path": str(scratch / "data"), "ledger-path": str(scratch / "ledger.jsonl"), **OPEN}
    grid = InProcessGrid(umbel.client.app.app, {}, node_configs=[site])
    (node,) = grid.get_node_ids()
    message = Message(content, node, "train", group_id="1")
    began = time.perf_counter()
    (reply,) = grid.send_and_receive([message])
    seconds = time.perf_counter() - began
    assert not reply.has_error(), reply.error
    return Reading(seconds)


def in_a_loop(answer: Callable[[], Reading]) -> Reading:
    """Return the same of a site that computes one client after the other."""
    one_thread = mock.patch.object(client, "cores", return_value=1)
    with without(learner, "is_exact"), without(learner, "_one_thread_each"), one_thread:
        forget()
        try:
            return answer()
        finally:
            forget()


@contextmanager
def without(owner: Any, name: str) -> Iterator[None]:
    """Have a test say no."""
    with mock.patch.object(owner, name, return_value=False):
        yield


def forget() -> None:
    """Have the next message look for a learner again."""
    learner._made.cache_clear()
    trial._tried.cache_clear()
    umbel.client.node._try_out.cache_clear()


if __name__ == "__main__":
    typer.run(main)
