"""How much memory the server takes for a round's releases, with the replies that they came in; and the estimate for a
whole run, which is said before it starts, or refused.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from numpy.typing import NDArray
from torch import nn

from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from tests.helpers.forks import in_own_process
from tests.helpers.grids import PaperGrid
from tests.helpers.paper import paper_task
from umbel import strategies
from umbel.data import write_dataset
from umbel.protocol.errors import ConfigError
from umbel.protocol.messages import training_reply
from umbel.protocol.plugins import trust
from umbel.protocol.records import to_array_record
from umbel.protocol.run_config import RunConfig
from umbel.server import memory as estimates
from umbel.server.memory import check_memory, estimate, machine_memory
from umbel.server.nodes.fleet import Fleet
from umbel.server.setup import Setup
from umbel.simulation import in_process
from umbel.strategies.base import HypothesisStrategy

pytestmark = pytest.mark.rest

# A reply is so long that its memory is the system's again as soon as it is let go.
N, CLIENTS = 400_000, 100
RELEASES = 4 * N * CLIENTS  # bytes
TASK = paper_task(noise_multiplier=1.0, batch_size=0)
_STATUS = Path("/proc/self/status")


def answers(grid: PaperGrid, messages: list[Message], step: float) -> list[Message]:
    """Return what nodes say whose clients are of two kinds."""
    replies, noise = [], np.random.default_rng(0).integers(-4, 5, N).astype(np.float32) / 64
    for message in messages:
        rows = noise + np.array(grid.asked(message), np.float32)[:, None] % 2
        content = training_reply({"weight": rows}, [1] * len(rows), step=step)
        replies.append(Message(content, reply_to=message))
    return replies


def memory(field: str) -> int:
    """Return VmRSS, what this process has of the machine's memory, or VmHWM, the most that it had; in bytes."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="utf-8").splitlines())
    return 1024 * int(lines[field].split()[0])


@pytest.mark.skipif(not _STATUS.exists(), reason="only Linux says what memory a process has")
@pytest.mark.parametrize(
    ("make", "nodes", "step"),
    [(strategies.GroupPrivacy, 3, 0.0), (strategies.GroupPrivacy, 1, 1 / 64), (strategies.FedAvg, 1, 0.0)],
    ids=["group-privacy, 3 nodes", "group-privacy, 16 bits", "fedavg, 1 node"],
)
def test_a_round_takes_less_than_two_copies_of_its_releases(
    make: Callable[..., HypothesisStrategy], nodes: int, step: float
) -> None:
    k = 2 if make is strategies.GroupPrivacy else 1
    came, most, following = in_own_process(_round, make, nodes, step, k)
    assert came > 0.45 * RELEASES, "the replies are a part of it"
    np.testing.assert_allclose(following, [0, 1] if k > 1 else [0.5], atol=0.01)
    assert most < 2 * RELEASES, f"{most / RELEASES:.2f} copies"


def _round(
    make: Callable[..., HypothesisStrategy], nodes: int, step: float, k: int
) -> tuple[int, int, NDArray[np.float64]]:
    """Do a round; return the bytes of its replies, the most that it took, and the mean of each next hypothesis."""
    grid, strategy = (
        PaperGrid.simulated(train=CLIENTS, nodes=nodes),
        make(Fleet(clients_per_round=CLIENTS), hypotheses=k),
    )
    sent = np.linspace(0, 1, k, dtype=np.float32)[:, None] * np.ones(N, np.float32)
    messages = strategy.fleet.ask_training(1, to_array_record({"weight": sent}), TASK, grid)
    gc.collect()
    before = memory("VmRSS")
    replies = answers(grid, messages, step)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # from here on the most is counted
    came = memory("VmRSS") - before
    outcome = strategy.train(1, replies)
    most = memory("VmHWM") - before
    assert outcome.following is not None
    return came, most, outcome.following["weight"].mean(axis=1)


# --- the estimate


PARAMETERS = 500_000


def network() -> nn.Module:
    """Return a large network."""
    width = PARAMETERS // 6
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 3))


@pytest.fixture
def wide(umbel_home: Path) -> dict[str, Any]:
    """Return the run config of a round, with a large model and forty clients."""
    name = f"{__name__}:network"
    trust(name)
    rows = np.random.default_rng(0).standard_normal((42 * 3, 2), np.float32)
    targets = np.arange(len(rows)) % 3
    about = manifest(40, 2, model=name, loss="cross-entropy", metric="accuracy")
    write_dataset(umbel_home / "data" / "wide", about, rows, targets, np.arange(43) * 3)
    return {
        **RunConfig().entries(), "dataset": "wide", "clients-per-round": 40, "validation-clients-per-round": 2,
        "hypotheses": 1, "restarts": 1, "rounds": 1, "device": "cpu", "noise-multiplier": 1.0,
        "batch-size": 0,
    }  # fmt: skip


def has(bytes_: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the machine so much memory."""
    monkeypatch.setattr(estimates, "machine_memory", lambda: int(bytes_))


@pytest.mark.skipif(not _STATUS.exists(), reason="only Linux says what memory a process has")
@pytest.mark.slow
def test_a_run_takes_about_as_much_as_is_said(wide: dict[str, Any]) -> None:
    took, said = in_own_process(_run, wide, os.environ["UMBEL_HOME"])
    assert said > 80 * 4 * PARAMETERS
    assert 0.7 < took / said < 1.3, f"{took >> 20} MiB, and {said >> 20} were said"


def _run(wide: dict[str, Any], home: str) -> tuple[int, int]:
    """Return the most that a run took, and what was said, in bytes."""
    os.environ["UMBEL_HOME"] = home
    trust(f"{__name__}:network")
    in_process.run(wide | {"clients-per-round": 1})  # which loads what a run needs
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    in_process.run(wide)
    return memory("VmHWM") - before, estimate(Setup.parse(wide), 40, 1, local=True).whole


def test_a_sizable_part_of_the_machine_is_said_and_a_small_one_is_not(
    wide: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup.parse(wide)
    found = estimate(setup, 40, 1, local=True)
    for times, told in ((5, False), (3, True), (1, True)):
        caplog.clear()
        has(times * found.whole, monkeypatch)
        with caplog.at_level(logging.INFO, "flwr"):
            check_memory(setup, 1, local=True)
        assert (str(found) in caplog.text) is told


def test_a_run_that_cannot_fit_is_refused_with_what_would(
    wide: dict[str, Any], monkeypatch: pytest.MonkeyPatch, umbel_home: Path
) -> None:
    has(150e6, monkeypatch)
    with raises(ConfigError, "config.memory", "clients-per-round=") as caught:
        in_process.run(wide)
    assert not (umbel_home / "runs").exists(), "nothing is left behind"
    fits = int(caught.value.text.rpartition("clients-per-round=")[2])
    assert 0 < fits < 40
    in_process.run(wide | {"clients-per-round": fits})
    with raises(ConfigError, "config.memory", f"clients-per-round={fits}"):
        in_process.run(wide | {"clients-per-round": fits + 1})


def test_hypotheses_that_do_not_fit_alone_are_named(wide: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    has(30 * 4 * PARAMETERS, monkeypatch)
    with raises(ConfigError, "config.memory", "hypotheses=1", "restarts=1", "frozen"):
        in_process.run(wide | {"hypotheses": 4, "restarts": 5})


def test_nodes_elsewhere_train_in_their_own_memory(wide: dict[str, Any]) -> None:
    setup = Setup.parse(wide)
    here, far, one = (estimate(setup, 40, *how) for how in ((4, True), (4, False), (1, False)))
    assert far.training == one.training == 0
    assert here.hypotheses == far.hypotheses == one.hypotheses
    vector = 4 * setup.model.num_parameters
    assert [found.releases // vector for found in (here, far, one)] == [50, 80, 40]
    sums = Setup.parse(wide | {"strategy": "site-average"})
    assert estimate(sums, 40, 4, local=False).releases == 8 * vector, "a site's sums are as long as a hypothesis"


@pytest.mark.parametrize(("said", "there"), [("max", 64), ("32", 32), ("9223372036854771712", 64)])
def test_a_container_has_the_memory_of_its_limit(
    said: str, there: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(f"{said}\n")
    monkeypatch.setattr(estimates, "_LIMITS", (tmp_path / "memory.max", tmp_path / "missing"))
    monkeypatch.setattr(estimates.psutil, "virtual_memory", lambda: SimpleNamespace(total=64))
    assert machine_memory() == there
