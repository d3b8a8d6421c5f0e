"""Federated recommendation: one set of item vectors for all clients."""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from models.base import Model
from protocol import ARRAYS, LOCAL, from_array_record, local_request, record_in
from strategies.exchange import Exchange
from strategies.fedavg import FedAvg
from strategies.options import ConfigError, Options
from strategies.roster import TRAIN, Roster

_TELLING = 300.0  # seconds for which local models are waited for


class Recommender(FedAvg):
    """Add up what clients changed (PAC identifiability in federated personalization, Protocol 1).

    A sum, not a mean: each item is moved by the few clients that labelled it, and the mean over all
    would hardly move it.
    """

    def prepare(self, options: Options, model: Model) -> None:
        """Refuse models without a local part."""
        if not model.local_size:
            raise ConfigError(
                f"strategy {options.text('strategy')!r} is for factor models, not {model.name!r}; "
                "name a federation of preferences (python datasets/preferences.py)"
            )

    def combine(self, group: NDArray[np.float64], hypothesis: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the item vectors moved by the sum of all changes."""
        moved: NDArray[np.float64] = hypothesis + (group - hypothesis).sum(axis=0)
        return moved


def local_models(grid: Grid, roster: Roster, clients: NDArray[np.int64]) -> dict[int, NDArray[np.float64]]:
    """Return the local models (k,) that training clients tell; only simulated ones do.

    They are what an attack is judged by.
    """
    placed = roster.place(TRAIN, clients)
    messages = [
        Message(local_request(locals_), node, "query.local", group_id="local") for node, (_, locals_) in placed.items()
    ]
    told: dict[int, NDArray[np.float64]] = {}
    for answer in Exchange().run(grid, messages, _TELLING):
        if not answer.reply.has_error():
            models = from_array_record(record_in(answer.reply.content, ARRAYS, ArrayRecord))[LOCAL]
            asked = clients[placed[answer.node][0]].tolist()
            told |= dict(zip(asked, models.astype(np.float64), strict=True))
    return told
