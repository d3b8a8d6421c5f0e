"""Canary clients of a deployed site, which is asked through its own executor.

The site has data and a ledger on disk, and umbel's own ClientApp trains the canaries. Their noise comes from the
operating system's entropy, the smallest radius applies, and releases are rounded to the public grid and travel as
16-bit steps if these suffice. The site's policy accepts each setting that can be audited, so that no limit interferes.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from flwr.app import Message, RecordDict

from umbel import models
from umbel.client.app import app
from umbel.data import Manifest, offsets_of, write_dataset
from umbel.deploy.executor import load
from umbel.deploy.flower import CLIENT_TASK
from umbel.privacy.site.journal import Journal
from umbel.protocol.logs import quiet
from umbel.protocol.messages import round_request
from umbel.protocol.records import pack
from umbel.protocol.tasks import TrainingSpec
from umbel.simulation.grid import InProcessGrid
from umbel_lab.attacks.audit.canaries import BEYOND, Coins, Herd, Matrix

_BUNDLE = b"canaries"  # the bundle that the site has reviewed
_ANY = {
    "role": "train", "clipping": "public floor=1e-9", "release": "any", "min-clients": 2, "min-noise-multiplier": 1e-6,
    "max-choice-epsilon": "inf", "budget": "inf", "paper-budget": "inf",
    "max-participations": "inf", "max-evaluations": "inf", "max-work": "examples=inf", "max-seconds": "inf",
    "approve": "policy", "app": "", "insecure-seed": False, "bundle": sha256(_BUNDLE).hexdigest(),
}  # fmt: skip
_ROWS = 103  # purpose of draws, as in `canaries`
_ABOVE, _BELOW = 10.0, 1.0  # distance of targets above predictions, and below


class SiteGrid(InProcessGrid):
    """A site with data, whose executor answers in this process."""

    def _answer(self, message: Message) -> Message:
        with quiet():  # each message says where its noise comes from
            reply = load(CLIENT_TASK, _BUNDLE)(message, self.contexts[message.metadata.dst_node_id])
        self.numbered(reply)
        return reply


class SiteHerd(Herd):
    """Canaries that are clients of a deployed site; each has one row, for a linear model.

    A row is the direction of the canary's updates. The coin places the target above or below the prediction of the best
    hypothesis, so that the gradient points one way or the other. When canaries change sides, the site serves other data
    with the same ledger.
    """

    less_shared = True

    def _node(self) -> InProcessGrid:
        self._home = TemporaryDirectory(prefix="umbel-audit-")
        release, home = self._setting.release, Path(self._home.name)
        self._model = models.load(f"linear inputs={release.n} outputs=1", "mse", "1.bias")
        self._rows = self._drawn(release.n)
        for side in (1, -1):
            self._write(self._data(side), side * self.coins)
        (home / "witness").mkdir()
        policy = _ANY | {"max-hypotheses": release.hypotheses, "mechanisms": release.mechanism}
        own = {"data-path": f"{home}/data", "ledger-path": f"{home}/ledger.jsonl", "witness-path": f"{home}/witness"}
        return SiteGrid(app, {"seed": self._seed, "device": "cpu"}, node_configs=[policy | own])

    def _data(self, side: int) -> Path:
        return Path(self._home.name) / ("data" if side > 0 else "other-side")

    def _drawn(self, n: int) -> Matrix:
        """Return the directions (canaries, n), or (1, n) for all: away from all hypotheses but the first."""
        drawn = np.eye(1, n)
        if self._setting.random:
            drawn = np.random.default_rng([self._seed, _ROWS]).standard_normal((len(self.coins), n))
            drawn[:, 0] = np.abs(drawn[:, 0]) + 1
        unit: Matrix = -drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
        return unit

    def _write(self, folder: Path, coins: Coins) -> None:
        """Write the data of the site's clients; those that are not canaries have no update."""
        everybody = np.zeros(len(coins) * self._step, np.int64)
        everybody[:: self._step] = coins
        rows = np.repeat(np.broadcast_to(self._rows, (len(coins), self._rows.shape[1])), self._step, axis=0)
        targets = np.full(len(everybody), float(self._model.frozen_values["1.bias"]))
        targets += (rows * self._training.hypotheses[self._training.best(everybody)]).sum(axis=1)
        if self._training.moves:
            targets += np.select([everybody > 0, everybody < 0], [_ABOVE, -_BELOW], 0.0)
        clients = len(everybody)
        manifest = Manifest(
            name="canaries", clients=clients, split={"train": clients, "validation": 0}, model=self._model.name,
            loss="mse", metric="rmse", frozen="1.bias",
        )  # fmt: skip
        write_dataset(folder, manifest, rows.astype(np.float32), targets.astype(np.float32), offsets_of([1] * clients))

    @property
    def _directions(self) -> Matrix:
        return self._rows[self._asked.start : self._asked.stop] if self._setting.random else self._rows

    def _ledger(self) -> Journal:
        return Journal(Path(self._home.name, "ledger.jsonl"), witness=Path(self._home.name, "witness"))

    def _request(self, task: TrainingSpec) -> RecordDict:
        (context,) = self._grid.contexts.values()
        context.node_config["data-path"] = str(self._data(self._side))
        # The gradient of a squared error is twice the error.
        step_size = BEYOND * task.clip_norm / (2 * _BELOW)
        task = replace(task, step_size=step_size, frozen_digest=self._model.frozen_digest)
        return round_request(pack({"1.weight": self._training.hypotheses[:, None]}), task)
