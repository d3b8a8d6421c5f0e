"""Time DP-SGD's clipped sums of rows' gradients against Opacus, and a cohort against a loop over its clients.

    python -m benchmarks.rows [--steps 20] [--times 7] [--device cpu] [--out FILE]

Opacus runs in its own environment, made the first time. All compute the same sums: the largest difference is shown.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.measure import Device, Out, Ratio, Reading, benchmark, console, interleave, table_of
from benchmarks.peers import play_opacus
from benchmarks.peers.play_opacus import BATCH, CLIP_NORM, CONTESTANTS, NETWORKS
from benchmarks.peers.rivals import Peer, environment
from umbel import models
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner
from umbel.client.row_gradients import SLACK, gradients_of
from umbel.models.losses import LOSSES, METRICS
from umbel.models.model import Model
from umbel.privacy.mechanisms.randomness import row_sources
from umbel.protocol.release import RowPrivacy

PEER = Peer("opacus", ("3.11", "3.12"), {}, "")
OURS = "umbel"
CLIENTS, ROWS, STEPS = 100, 30, 10


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 20,
    times: Annotated[int, typer.Option(min=1, help="Turns of each, after one to warm up.")] = 7,
    device: Device = "cpu",
    out: Out = None,
) -> None:
    """Print what a step takes."""
    where = torch.device(device)
    with benchmark(out):
        if where.type == "cuda":
            console.print(torch.cuda.get_device_name(), highlight=False)
        console.print(f"{PEER.version}, {BATCH} rows a step")
        for name in NETWORKS:
            against_opacus(name, steps, times, where)
        a_cohort(times, where)


def against_opacus(name: str, steps: int, times: int, device: torch.device) -> None:
    """Print what a step takes with umbel, with Opacus, and without clipping."""
    torch.manual_seed(0)
    network = NETWORKS[name]().to(device)
    rows, targets = torch.rand(BATCH, 784).to(device), torch.randint(0, 10, (BATCH,)).to(device)
    with tempfile.TemporaryDirectory(prefix="umbel-benchmark-") as folder:
        file = Path(folder) / "task.pt"
        torch.save({"network": name, "state": network.state_dict(), "rows": rows, "targets": targets}, file)
        command = [str(environment(PEER)), "-W", "ignore", play_opacus.__file__, str(file)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
            assert peer.stdout is not None
            while peer.stdout.readline().strip() != "ready":
                if peer.poll() is not None:
                    raise RuntimeError("Opacus did not start; see above")
            sums, ours = _ours(network, rows, targets)
            found: dict[str, dict[str, torch.Tensor]] = {}
            contestants: dict[str, Callable[[], Reading]] = {
                one: partial(_theirs, peer, one, steps, found) for one in CONTESTANTS
            }
            contestants |= {
                OURS: partial(_timed, ours, steps),
                "no clipping": partial(_timed, _bare(network, rows, targets), steps),
            }
            readings = interleave(contestants, times)
            assert peer.stdin is not None
            peer.stdin.close()
    away = {
        one: max(float((sums[key][0] - (1 - SLACK) * value).abs().max()) for key, value in theirs.items())
        for one, theirs in found.items()
    }
    size = max(float(value.abs().max()) for value in sums.values())
    lines = [
        (
            one,
            f"{1000 * float(np.median([reading.seconds for reading in own])):.2f}",
            "" if one == OURS else str(Ratio.of(own, readings[OURS])),
            f"{away[one] / size:.1e}" if one in away else "",
        )
        for one, own in readings.items()
    ]
    headings = ("", "ms a step", f"times {OURS}", "largest difference of the sums")
    console.print(
        table_of(
            f"{name}: clipped sums of {sum(v.numel() for v in network.parameters() if v.requires_grad):,} numbers",
            headings,
            lines,
        )
    )


def _ours(network: torch.nn.Module, rows: torch.Tensor, targets: torch.Tensor) -> tuple[Any, Callable[[], Any]]:
    state = {name: value.detach().clone() for name, value in network.state_dict().items()}

    def make() -> torch.nn.Module:
        own = type(network)().to(rows.device)
        own.load_state_dict(state)
        return own

    model = Model(type(network).__name__, make, LOSSES["cross-entropy"], METRICS["accuracy"])
    gradients = gradients_of(
        model,
        {name: value.to(rows.device) for name, value in model.frozen_values.items()},
        frozenset(model.shapes),
        (784,),
    )
    parameters = {name: state[name][None].clone() for name in model.shapes}
    drawn = torch.ones(1, len(rows), dtype=torch.bool, device=rows.device)

    def step() -> Any:
        return gradients.clipped(parameters, rows[None], targets[None], drawn, CLIP_NORM)

    return step(), step


def _bare(network: torch.nn.Module, rows: torch.Tensor, targets: torch.Tensor) -> Callable[[], Any]:
    trained = [value for value in network.parameters() if value.requires_grad]

    def step() -> Any:
        return torch.autograd.grad(torch.nn.functional.cross_entropy(network(rows), targets), trained)

    return step


def _theirs(peer: Any, contestant: str, steps: int, found: dict[str, Any]) -> Reading:
    peer.stdin.write(json.dumps({"contestant": contestant, "steps": steps}) + "\n")
    peer.stdin.flush()
    reply = json.loads(peer.stdout.readline())
    found[contestant] = torch.load(reply["sums"])
    return Reading(reply["seconds"] / steps)


def _timed(step: Callable[[], Any], steps: int) -> Reading:
    start = time.perf_counter()
    for _ in range(steps):
        play_opacus.wait(step())
    return Reading((time.perf_counter() - start) / steps)


def a_cohort(times: int, device: torch.device) -> None:
    """Print what training of many small clients takes together and one after the other."""
    model = models.load("mlp inputs=10 hidden=16 outputs=2")
    generator = np.random.default_rng(0)
    features = torch.from_numpy(generator.standard_normal((CLIENTS * ROWS, 10)).astype(np.float32)).to(device)
    targets = torch.from_numpy(generator.integers(0, 2, CLIENTS * ROWS)).to(device)
    cohort = Cohort(features, targets, np.full(CLIENTS, ROWS))
    update = LocalUpdate(1, 0.1, 0, rows=RowPrivacy(1.0, 1.0, 0.3, 9.0, STEPS))
    start = {name: value[None] for name, value in model.initial(0).items()}

    def train(engine: str) -> Reading:
        learner, begin = Learner(model, device, engine), time.perf_counter()
        shared, chosen = learner.tensors(start), torch.zeros(CLIENTS, dtype=torch.int64)
        learner.train(shared, chosen, cohort, update, row_sources(0, 1, range(CLIENTS)))
        return Reading(time.perf_counter() - begin)

    readings = interleave({"together": partial(train, "batched"), "a loop": partial(train, "loop")}, times)
    lines = [
        (
            one,
            f"{1000 * float(np.median([reading.seconds for reading in own])):.1f}",
            "" if one == "together" else str(Ratio.of(own, readings["together"])),
        )
        for one, own in readings.items()
    ]
    title = f"{CLIENTS} clients of {ROWS} rows, {model.num_parameters} parameters, {STEPS} steps"
    console.print(table_of(title, ("", "ms", "times together"), lines))


if __name__ == "__main__":
    typer.run(main)
