"""A malicious server that steals local models (PAC identifiability in federated personalization, Protocol 2).

It trains honestly for some rounds, then asks its victims again and again for one update each, and
works out their local models from what they release. What it sends and what it makes of the
releases are the `Attack`; the gate that stands between is the clients' own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fleet.roster import sample
from models.base import Model
from protocol.arrays import flatten
from protocol.errors import ConfigError
from protocol.flower import log
from protocol.messages import price
from protocol.records import from_array_record, to_array_record
from strategies.base import Outcome
from strategies.options import Options
from strategies.recommender import Recommender, local_models

ATTACKS = ("zero", "jitter", "spectral")
_SAMPLE_VICTIMS, _JITTER = 4, 5
_JITTERED = 1e-3

Matrix = NDArray[np.float64]


class Theft:
    """What a server works out of one client's local model from its updates.

    Parameters
    ----------
    factors : int
        k, the length of the local model.
    spectral : bool
        Whether items were as honest ones are, so that updates of liked items and of others point
        in opposite directions by different lengths: then the direction is that in which updates
        are longest (the top singular vector), and their sum tells the sign alone. Otherwise their
        sum tells all (Protocol 2, line 4).
    """

    def __init__(self, factors: int, spectral: bool) -> None:
        self._spectral = spectral
        self.messages = 0
        """How many it has learnt from."""
        self._sum = np.zeros(factors)
        self._moment = np.zeros((factors, factors))

    def add(self, updates: Matrix) -> None:
        """Learn from one message: updates (I, k) of the item vectors."""
        self.messages += 1
        self._sum += updates.sum(axis=0)
        if self._spectral:
            self._moment += updates.T @ updates

    @property
    def local_model(self) -> Matrix:
        """The estimate (k,), up to a positive factor."""
        # Every loss falls with the margin, and most labels are negative (Assumption 1): on the
        # whole, items are pushed away from u.
        away = -self._sum
        if not self._spectral:
            return away
        direction: Matrix = np.linalg.eigh(self._moment)[1][:, -1]
        return direction if direction @ away >= 0 else -direction


def error_rate(estimate: Matrix, local_model: Matrix, items: Matrix) -> float:
    """Return the share of items (I, k) on which two local models (k,) disagree (Definition 1)."""
    return float(np.mean(np.sign(items @ estimate) != np.sign(items @ local_model)))


def theorem_1(p: float, batch_size: int, delta: float) -> int | None:
    """Return how many interactions suffice without noise with probability 1 - delta (Theorem 1).

    Parameters
    ----------
    p : float
        Share of liked items among the client's own.
    batch_size : int
        B.
    delta : float

    Returns
    -------
    int or None
        None for clients who like half of their items or more (Assumption 1).
    """
    if not p < 0.5:
        return None
    return max(1, math.ceil(2 * math.log(1 / delta) / (batch_size * (1 - 2 * p) ** 2)))


def checkpoint(interaction: int) -> bool:
    """Return whether to look how far the attack is: at 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << (interaction.bit_length() - 1)
    return interaction in (power, power + power // 2)


@dataclass
class _Phase:
    """The attack at one noise multiplier."""

    noise_multiplier: float
    thefts: dict[int, Theft]
    asked: int = 0
    looked: dict[int, int] = field(default_factory=dict)


class PacAttack(Recommender):
    """Train honestly, then attack some clients at one noise multiplier after the other.

    Run config: ``attack`` is how. ``zero``, the paper's: all item vectors are sent as zeros, and
    every update is the local model up to sign and size. ``jitter``: almost zeros, never the same,
    which a tripwire does not catch. ``spectral``: the honest item vectors.
    ``attack-after`` is how many rounds it trains honestly first, ``attack-victims`` how many
    clients it attacks, ``attack-interactions`` how often it asks each of them at most,
    ``attack-error`` the error rate at which it is content, ``attack-multipliers`` the noise
    multipliers that it attacks at, apart by spaces.

    In simulation clients tell their local models, by which `findings` judge the theft. Its columns:
    ``attack``, ``noise_multiplier``, ``client``, ``interactions`` in which the client released,
    ``error`` of the stolen local model (nothing where the client does not tell its own), ``spent``
    by the client on these interactions (nothing without noise, when no number bounds it). At the
    end the victims get the honest items back (R = 0).
    """

    def prepare(self, options: Options, model: Model) -> None:
        """Read the attack's entries."""
        super().prepare(options, model)
        self.attack = options.choice("attack", ATTACKS)
        self.victims = options.whole("attack-victims", 1)
        self.after = options.whole("attack-after", 0)
        self.most_interactions = options.whole("attack-interactions", 1)
        self.error = options.number("attack-error", least=0)
        self._multipliers = _multipliers(options.text("attack-multipliers"))
        if min(self._multipliers) < (least := options.number("noise-multiplier", least=0)):
            # The run's own accounts go by it.
            raise ConfigError(
                f"attack-multipliers go below noise-multiplier = {least:g}; lower that to the least of them"
            )
        if options.text("resume"):
            raise ConfigError('an attack cannot be resumed; set resume = "" and attack again')
        if options.whole("patience", 0):
            raise ConfigError(
                "the attack leaves the item vectors as they are, and patience would stop it; set patience = 0"
            )
        if options.whole("rounds", 1) < (most := self.after + len(self._multipliers) * self.most_interactions + 1):
            raise ConfigError(f"the attack may take {most} rounds; raise rounds to that")
        self._n = model.num_parameters
        self._phase: _Phase | None = None
        self._restoring = False

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask for honest training at first, then send the victims what the attack needs."""
        if server_round <= self.after:
            return super().configure_train(server_round, arrays, config, grid)
        self._grid, self._honest = grid, arrays
        items = from_array_record(arrays)
        name, honest = next(iter(items.items()))
        if server_round == self.after + 1:
            population = self.roster(grid).train
            chosen = [self.seed, _SAMPLE_VICTIMS]
            self._victims = sample(chosen, population, min(self.victims, population))
            self._begin(honest.shape[-1])
        assert self._phase is not None
        demand = {**config, "noise_multiplier": self._phase.noise_multiplier}
        if self._restoring:
            return self._demand(
                server_round, arrays, demand | {"local_epochs": 0, "local_steps": 0}, grid, self._victims
            )
        if config["local_steps"]:
            demand["local_steps"] = 1
        else:
            demand["local_epochs"] = 1
        sent = {"zero": np.zeros_like(honest), "spectral": honest}.get(self.attack)
        if sent is None:
            generator = np.random.default_rng([self.seed, _JITTER, server_round])
            sent = _JITTERED * generator.standard_normal(honest.shape, np.float32)
        return self._demand(server_round, to_array_record({name: sent}), demand, grid, self._victims)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Learn from the victims' releases; the item vectors stay as they are."""
        if server_round <= self.after:
            return super().aggregate_train(server_round, replies)
        assert self._phase is not None
        asked = self._asked["train"]
        releases, positions, _, lost = self._collect(replies, asked)
        clients = asked.clients[positions]
        self.participations[clients] += 1
        self.outcome = Outcome(server_round, clients, np.zeros(len(clients), np.int64), None)
        counts = {"asked": len(asked.clients), "releases": len(releases), "lost-nodes": lost, "groups": [len(releases)]}
        if self._restoring:
            self.finished = "the attack is over"
        else:
            factors = next(iter(self._current.values())).shape[-1]
            changes = releases - flatten(self._current)
            for client, update in zip(clients.tolist(), changes, strict=True):
                self._phase.thefts[client].add(update.reshape(-1, factors))
            self._phase.asked += 1
            self._look(factors, exhausted=not len(clients))
        return self._honest, MetricRecord(counts)  # type: ignore[arg-type]

    def _begin(self, factors: int) -> None:
        """Begin the phase of the next noise multiplier, or the end."""
        if not self._multipliers:
            self._restoring = True
            return
        thefts = {client: Theft(factors, self.attack == "spectral") for client in self._victims.tolist()}
        self._phase = _Phase(self._multipliers.pop(0), thefts)

    def _look(self, factors: int, exhausted: bool) -> None:
        """See how far the attack is, note what it cost so far, and go on to the next phase when it is done.

        It is done too when victims are `exhausted`: none releases anything any more.
        """
        phase = self._phase
        assert phase is not None
        last = exhausted or phase.asked == self.most_interactions
        if not (last or checkpoint(phase.asked)):
            return
        items = flatten(from_array_record(self._honest)).reshape(-1, factors)
        truth = local_models(self._grid, self.roster(self._grid), self._victims)
        errors = {
            client: error_rate(theft.local_model, truth[client], items)
            for client, theft in phase.thefts.items()
            if client in truth and theft.messages
        }
        cost = price(self._n, phase.noise_multiplier)
        for client, theft in phase.thefts.items():
            if theft.messages == phase.looked.get(client):
                continue  # nothing new since
            phase.looked[client] = theft.messages
            self.findings.append(
                {
                    "attack": self.attack,
                    "noise_multiplier": phase.noise_multiplier,
                    "client": client,
                    "interactions": theft.messages,
                    "error": errors.get(client),
                    "spent": float(cost * theft.messages) if cost else None,
                }
            )
        done = len(errors) == len(self._victims) and max(errors.values()) <= self.error
        if last or done:
            self._remark(phase, exhausted)
            self._begin(factors)

    def _remark(self, phase: _Phase, exhausted: bool) -> None:
        """Say what the phase came to."""
        own = [row for row in self.findings if row["noise_multiplier"] == phase.noise_multiplier]
        at = f"nu = {phase.noise_multiplier:g}" if phase.noise_multiplier else "no noise"
        if not any(theft.messages for theft in phase.thefts.values()):
            remark = f"Attack {self.attack}, {at}: no client released anything, so nothing was stolen."
        elif all(row["error"] is None for row in own):
            remark = f"Attack {self.attack}, {at}: no client tells its local model, so nobody knows what was stolen."
        else:
            first = needed(own, self.error)
            stolen = [times for times in first.values() if times is not None]
            remark = (
                f"Attack {self.attack}, {at}: {len(stolen)} of {len(first)} local models stolen, but for "
                f"{self.error:.0%} of what they predict"
            )
            if stolen:
                remark += f", in {np.median(stolen):g} interactions (median; at most {max(stolen)})"
            if len(stolen) < len(first):
                held_out = max(phase.thefts[client].messages for client, times in first.items() if times is None)
                remark += f"; the others held out for {held_out}"
            remark += "."
        if exhausted:
            remark += " Then no victim released anything any more."
        log(INFO, remark)
        self.remarks.append(remark)


def needed(findings: Iterable[Mapping[str, Any]], error: float) -> dict[int, int | None]:
    """Return for each client after how many interactions its error was low enough, and stayed so."""
    first: dict[int, int | None] = {}
    for row in findings:
        client = row["client"]
        if row["error"] is None or row["error"] > error:
            first[client] = None
        elif first.get(client) is None:
            first[client] = row["interactions"]
    return first


def _multipliers(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split()]
    except ValueError:
        values = []
    if not values or len(set(values)) < len(values) or not all(np.isfinite(value) and value >= 0 for value in values):
        raise ConfigError(
            f'attack-multipliers must be different numbers of at least 0, apart by spaces, as "0 1 3", got {text!r}'
        )
    return values
