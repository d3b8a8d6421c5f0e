"""The task of a contestant, and its answer.

Peers read this module too, in environments without umbel: it needs the standard library and numpy alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

GO = "go\n"
TINY = 1e-12
"""Under the root of a mean square: RMSE has no gradient at zero."""


@dataclass(frozen=True)
class Settings:
    """The numbers of a task.

    `network` is ``mlp`` (3-2-1, RMSE of a client's rows) or ``cnn`` (28x28 images, cross-entropy). `train` and
    `validate` are the clients of each round; after the last round of training, one more validation says what was
    learnt. A release costs a client n / `noise_multiplier`, its number of parameters over umbel's nu.
    """

    network: str
    train: list[list[int]]
    validate: list[list[int]]
    step_size: float
    batch_size: int
    local_epochs: int
    noise_multiplier: float
    cores: int = 1


@dataclass(frozen=True)
class Brief:
    """A task as plain numbers.

    Attributes
    ----------
    settings : Settings
    features, targets : ndarray, shape (rows, \\*feature shape), float32, and (rows,)
    offsets : ndarray of int, shape (clients + 1,)
        Client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.
    hypotheses : dict of ndarray, each (k, \\*shape)
        Initial parameters, under PyTorch's names and in PyTorch's layout.
    """

    settings: Settings
    features: NDArray[np.float32]
    targets: NDArray[Any]
    offsets: NDArray[np.int64]
    hypotheses: Arrays

    @property
    def rounds(self) -> int:
        """Rounds of training."""
        return len(self.settings.train)

    @property
    def k(self) -> int:
        """Number of hypotheses."""
        return len(next(iter(self.hypotheses.values())))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of rows of each client."""
        return np.diff(self.offsets)

    def client(self, index: int) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """Return a client's features and targets."""
        rows = slice(self.offsets[index], self.offsets[index + 1])
        return self.features[rows], self.targets[rows]

    def initial(self, j: int = 0) -> Arrays:
        """Return one of the initial hypotheses."""
        return {name: value[j] for name, value in self.hypotheses.items()}

    def write(self, folder: Path) -> None:
        """Write the task for other processes."""
        (folder / "settings.json").write_text(json.dumps(asdict(self.settings)), encoding="utf-8")
        np.savez(folder / "data.npz", features=self.features, targets=self.targets, offsets=self.offsets)
        np.savez(folder / "hypotheses.npz", allow_pickle=False, **self.hypotheses)

    @classmethod
    def read(cls, folder: Path) -> Brief:
        """Read what `write` wrote."""
        settings = Settings(**json.loads((folder / "settings.json").read_text(encoding="utf-8")))
        data, hypotheses = np.load(folder / "data.npz"), np.load(folder / "hypotheses.npz")
        return cls(settings, data["features"], data["targets"], data["offsets"], dict(hypotheses))


def serve(prepare: Callable[[Brief, str], Callable[[], float]]) -> None:
    """Play a peer's part: ``python -m MODULE FOLDER VARIANT``; one go for each line of standard input.

    `prepare` gets the task and the variant to play; it returns what does a whole run from the initial hypotheses and
    says its last validation loss.
    """
    # The output of libraries is not part of the answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    brief = Brief.read(Path(sys.argv[1]))
    run = prepare(brief, sys.argv[2])
    for line in sys.stdin:
        assert line == GO
        began = time.perf_counter()
        loss = run()
        seconds = (time.perf_counter() - began) / brief.rounds
        print(json.dumps({"seconds": seconds, "loss": loss}), file=answers, flush=True)
