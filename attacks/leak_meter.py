"""The leak meter: every so often in a simulation, the server attacks one client that consents.

It asks the client for one more update, as any round would, and works out what it can; then it asks
for the truth, which only a simulated client tells, and notes how close it came. The client's
answers do not enter training, and what they cost is not counted among what training costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from attacks.pac_attack import Theft, error_rate
from federation import Federation
from fleet.roster import sample
from models.base import Model
from protocol.arrays import Arrays, flatten
from protocol.records import to_array_record
from strategies import HypothesisStrategy
from strategies.recommender import local_models

_SAMPLE_CONSENTING = 6

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Leak:
    """What one attack gave away; None where the model has nothing of the kind.

    Attributes
    ----------
    round, client : int
    choice : bool or None
        Whether the hypothesis nearest to the release is the one that the client chose.
    norm : float or None
        How far off the server's estimate of the update's norm is, relative to it.
    update : float or None
        Cosine of the angle between the update as released and as it was.
    labels : float or None
        Correlation between the change of the last bias and how often each class occurs.
    predictions : float or None
        Share of items on which the stolen local model agrees with the client's own.
    """

    round: int
    client: int
    choice: bool | None = None
    norm: float | None = None
    update: float | None = None
    labels: float | None = None
    predictions: float | None = None


class LeakMeter:
    """Attacks one training client every `every` rounds.

    Parameters
    ----------
    every : int
    strategy : HypothesisStrategy
    model : Model
    federation : Federation
        Whose labels the labels that were read off are compared with.
    train_config : ConfigRecord
        What the run asks of its clients.
    seed : int
        Draws the client.
    """

    def __init__(
        self,
        every: int,
        strategy: HypothesisStrategy,
        model: Model,
        federation: Federation,
        train_config: ConfigRecord,
        seed: int,
    ) -> None:
        self.every = every
        self.client = int(sample([seed, _SAMPLE_CONSENTING], federation.manifest.train, 1)[0])
        self._strategy, self._model, self._federation = strategy, model, federation
        self._config: dict[str, Any] = dict(train_config)
        self._theft = Theft(model.local_size, spectral=True) if model.local_size else None

    def look(self, number: int, hypotheses: Arrays, grid: Grid) -> Leak | None:
        """Attack in rounds 1, 1 + every, ...; None in others, and where the client does not release."""
        if (number - 1) % self.every:
            return None
        if not self._strategy.roster(grid).simulated:
            raise ValueError("leak-meter is for simulation; at sites with data of their own set it to 0")
        released, _ = self._ask(number, hypotheses, grid, self._config, disclose=False)
        if released is None:
            return None
        start = flatten(hypotheses)
        if self._theft:
            return self._judge_theft(number, released - start[0], start[0], grid)
        # The truth: the same training once more, without noise.
        trained, choice = self._ask(number, hypotheses, grid, {**self._config, "noise_multiplier": 0.0}, disclose=True)
        if trained is None:
            return None
        guess = int(np.square(released - start).sum(axis=1).argmin())
        change, update = released - start[guess], trained - start[choice]
        norm = float(np.linalg.norm(update))
        return Leak(
            number,
            self.client,
            choice=guess == choice if len(start) > 1 else None,
            norm=abs(self._guess_norm(change, number) - norm) / norm if norm else None,
            update=_cosine(change, update),
            labels=self._read_labels(change, hypotheses),
        )

    def _ask(
        self, number: int, hypotheses: Arrays, grid: Grid, config: dict[str, Any], disclose: bool
    ) -> tuple[Vector | None, int]:
        releases, choices = self._strategy.probe(
            number, to_array_record(hypotheses), config, grid, np.array([self.client]), disclose
        )
        if not len(releases):
            return None, -1
        return releases[0], int(choices[0]) if choices is not None else -1

    def _guess_norm(self, change: Vector, number: int) -> float:
        """Return the norm of the update that such a change comes from on average (Lemma 4.3)."""
        nu, n = float(self._config["noise_multiplier"]), len(change)
        spread = nu**2 * (n + 1) / n
        square = float(change @ change)
        radius = self._strategy.radius
        if radius.mode == "public":
            return float(np.sqrt(max(0.0, square - spread * radius.at(number) ** 2)))
        return float(np.sqrt(square / (1 + spread)))

    def _read_labels(self, change: Vector, hypotheses: Arrays) -> float | None:
        last = list(hypotheses.values())[-1]
        if self._model.metric.name != "accuracy" or last.ndim != 2:
            return None
        classes = last.shape[1]
        counts = np.bincount(self._federation.client(self.client)[1], minlength=classes)
        bias = change[-classes:]
        return float(np.corrcoef(bias, counts)[0, 1]) if bias.std() and counts.std() else None

    def _judge_theft(self, number: int, change: Vector, items: Vector, grid: Grid) -> Leak | None:
        assert self._theft is not None
        factors = self._model.local_size
        self._theft.add(change.reshape(-1, factors))
        told = local_models(grid, self._strategy.roster(grid), np.array([self.client]))
        if self.client not in told:
            return None
        error = error_rate(self._theft.local_model, told[self.client], items.reshape(-1, factors))
        return Leak(number, self.client, predictions=1 - error)


def _cosine(one: Vector, other: Vector) -> float | None:
    product = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / product if product else None
