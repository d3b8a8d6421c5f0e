"""A client process that is killed at any moment: what it released, it has paid for.

``KILLS=500`` kills it so often in place of 30 times.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.datasets import save_plane
from tests.helpers.forks import forks
from tests.helpers.ledgers import participations
from tests.helpers.paper import ACCEPTED
from umbel.privacy.site.journal import Journal

CLIENTS = 3
KILLS = int(os.environ.get("KILLS", "30"))
ANSWER = b"".join(b"%d\n" % client for client in range(CLIENTS))
"""What is noted when all clients have released."""


def _serve(folder: Path, run_config: dict[str, Any]) -> None:
    """Answer one task after the other; note in a file what has left."""
    from flwr.app import Message

    from tests.helpers.messages import asked, released
    from umbel.client.app import app
    from umbel.protocol.tasks import TrainingSpec
    from umbel.simulation.grid import InProcessGrid

    # Processes have the environment of the first test that made one.
    config = ACCEPTED | {"data-path": str(folder / "own"), "ledger-path": str(folder / "ledger.jsonl")}
    grid = InProcessGrid(app, run_config, node_configs=[config])
    [node] = grid.get_node_ids()
    hypotheses = {"weight": np.ones((2, 1, 2), np.float32)}
    task = TrainingSpec(1, tuple(range(CLIENTS)), 1, 0.1, 10, 3.0)
    (folder / "ready").touch()
    sent = os.open(folder / "sent", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        [reply] = grid.send_and_receive([Message(asked(hypotheses, task), node, "train")])
        assert released(reply) == [1] * CLIENTS
        os.write(sent, ANSWER)


def wait_for(process: BaseProcess, condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.is_alive()
        time.sleep(0.001)


@pytest.mark.slow
def test_spent_is_never_less_than_what_was_released(tmp_path: Path, run_config: dict[str, Any]) -> None:
    """A ledger on disk, a process that trains, charges and releases, and kill -9 at a random moment."""
    generator, folder = np.random.default_rng(1), tmp_path
    save_plane(folder / "own", CLIENTS, loss="mse")
    ledger = Journal.create(folder / "ledger.jsonl")
    (folder / "sent").touch()
    cut_off = 0
    for _ in range(KILLS):
        (folder / "ready").unlink(missing_ok=True)
        process = forks().Process(target=_serve, args=(folder, run_config))
        process.start()
        # A few tasks are answered, and a part of one more: how large a part, this machine's own pace says.
        wait_for(process, (folder / "ready").exists)
        began, answers = time.monotonic(), int(generator.integers(1, 4))
        enough = (folder / "sent").stat().st_size + answers * len(ANSWER)
        wait_for(process, lambda enough=enough: (folder / "sent").stat().st_size >= enough)  # type: ignore[misc]
        time.sleep(generator.uniform(0, (time.monotonic() - began) / answers))
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        released = Counter((folder / "sent").read_text().split())
        paid = [participations(ledger, client) for client in range(CLIENTS)]
        assert all(paid[client] >= released[str(client)] for client in range(CLIENTS))
        assert len(set(paid)) == 1, "a charge is made for all or for none"
        cut_off = paid[0] - released["0"]
    assert sum(released.values()) >= CLIENTS * KILLS, "or nothing was tested"
    assert cut_off > 0, "or no kill came between charge and release"
