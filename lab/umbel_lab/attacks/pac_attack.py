"""A malicious server that steals clients' local parameters (PAC identifiability in federated personalization).

Protocol 2: it trains honestly for some rounds, then repeatedly asks its victims for one update each, and derives their
local parameters from their releases. The gate in between is the clients' own. A run names it by import path:
``strategy = "umbel_lab.attacks.pac_attack:PacAttack"``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray
from pydantic import Field

from umbel.client.local import LocalParameters
from umbel.client.node import Node
from umbel.data import Dataset
from umbel.models.factors import BiasedFactors, Factors
from umbel.models.model import Model
from umbel.nodes.fleet import Fleet
from umbel.nodes.roster import TRAIN, Roster
from umbel.nodes.sampler import sample
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import ConfigError
from umbel.protocol.home import write_atomically
from umbel.protocol.log import log
from umbel.protocol.records import from_array_record, to_array_record
from umbel.protocol.release import Clipping, Kind, Release
from umbel.protocol.releases import Releases
from umbel.protocol.run_config import RunConfig
from umbel.protocol.simulated import in_process
from umbel.protocol.tasks import TrainingSpec
from umbel.server.run import Run
from umbel.simulation.grid import InProcessGrid
from umbel.strategies import Callback
from umbel.strategies.base import Outcome
from umbel.strategies.recommender import Recommender

_SAMPLE_VICTIMS, _JITTER = 4, 5
_JITTERED = 1e-3
_SHORT, _LONG = 1 / 64, 64.0

Matrix = NDArray[np.float64]
Lean = Literal["dislikes", "likes", "unknown"]


class Estimate:
    """A server's estimate of one client's local parameters, a vector of so many factors, from its updates.

    The sign of the result is a guess, that most labels are negative (Assumption 1), unless items have `biases`, which
    end their updates: these move by the residuals of the labels, up for liked items, and so reveal the sign. A
    `spectral` estimate is the direction in which updates are longest (the top singular vector), since the updates of
    all items point along the client's vector, in one direction or the other; their sum reveals only the sign. Otherwise
    their sum is the whole estimate (Protocol 2, line 4), and is mostly noise if a client likes about half of its items.
    """

    def __init__(self, factors: int, spectral: bool, biases: bool = False) -> None:
        self._spectral, self._biases = spectral, biases
        self.messages = 0
        """Number of messages it has learnt from."""
        self._sum = np.zeros(factors + biases)
        self._moment = np.zeros((factors + biases, factors + biases))

    def add(self, updates: Matrix) -> None:
        """Learn from one message: updates (I, d) of the item vectors, or (I, d + 1) with biases."""
        self.messages += 1
        self._sum += updates.sum(axis=0)
        if self._spectral:
            self._moment += updates.T @ updates

    @property
    def vector(self) -> Matrix:
        """The estimate of the client's vector (d,), up to a positive factor."""
        # Every loss falls with the margin, and most labels are negative: on average, items move away from u.
        away = -self._sum
        found: Matrix = np.linalg.eigh(self._moment)[1][:, -1] if self._spectral else away
        if self._biases:
            return found[:-1] * (1.0 if found[-1] >= 0 else -1.0)
        return found if found @ away >= 0 else -found


def signs_by_items(pushes: Matrix) -> Matrix:
    """Return the sign of each client's vector, (m,) of -1 and 1, under which most pushes are upwards.

    A client and its mirror image, with the opposite vector and the opposite taste, release the same. But people like
    much the same items. So these are the signs under which the clients agree most on the items' directions: those of
    the top singular vector of their pushes (m, I), where a push is how far a client moved an item along its vector.
    """
    length = np.linalg.norm(pushes, axis=1, keepdims=True)
    scaled = np.divide(pushes, length, out=np.zeros_like(pushes), where=length > 0)
    found: Matrix = np.linalg.eigh(scaled @ scaled.T)[1][:, -1]
    signs = np.where(found >= 0, 1.0, -1.0)
    return signs if (signs @ scaled).sum() >= 0 else -signs


def error_rate(estimate: Matrix, vector: Matrix, items: Matrix) -> float:
    """Return the share of items (I, d) on which two clients' vectors (d,) disagree (Definition 1)."""
    return float(np.mean(np.sign(items @ estimate) != np.sign(items @ vector)))


def direction_error(estimate: Matrix, vector: Matrix, items: Matrix) -> float:
    """Return `error_rate` under the better of both signs: only one bit is missing, such as one known preference."""
    return min(error_rate(estimate, vector, items), error_rate(-estimate, vector, items))


def factors_of(model: Model) -> int:
    """Return d for a model of factors, where a client's local parameters are one vector; 0 for any other model."""
    network = model.module
    return len(network.user) - has_biases(model) if isinstance(network, Factors) else 0


def has_biases(model: Model) -> bool:
    """Return whether a model of factors has biases as well."""
    return isinstance(model.module, BiasedFactors)


def lean_of(dataset: Dataset) -> Lean:
    """Return the more frequent label among the training clients of a dataset."""
    labels = np.asarray(dataset.targets)[: dataset.offsets[dataset.manifest.train]]
    balance = int((labels > 0).sum()) - int((labels < 0).sum())
    return "likes" if balance > 0 else "dislikes" if balance < 0 else "unknown"


def theorem_1(p: float, batch_size: int, delta: float) -> int | None:
    """Return the number of interactions that suffice without noise with probability 1 - delta (Theorem 1).

    p is the share of liked items among the client's own; None if it is half or more (Assumption 1).
    """
    if not p < 0.5:
        return None
    return max(1, math.ceil(2 * math.log(1 / delta) / (batch_size * (1 - 2 * p) ** 2)))


def checkpoint(interaction: int) -> bool:
    """Return whether to measure the attack's progress: at 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << (interaction.bit_length() - 1)
    return interaction in (power, power + power // 2)


@dataclass(frozen=True)
class AttackOptions:
    """Settings of the attack.

    Attributes
    ----------
    attack : str
        The items that the server sends: ``zero``, the paper's, items of zeros, from which every update is the local
        vector up to sign and size; ``jitter``, almost zeros, never the same;
        ``spectral``, the honest items.
    reading : str
        How replies are read, and which task is asked for: their ``sum``, over a minibatch, as in the paper; or
        ``spectral`` (`Estimate`), over all rows at once, with a step that suits the noise: short if the noise is
        proportional to it, otherwise long. For honest items the reading is always spectral.
    lean : str
        The more frequent label among all people, as far as the server knows, which decides the sign:
        ``dislikes`` (Assumption 1), ``likes``, or ``unknown``, which leaves it open. Biases reveal it in any case.
    after : int
        Rounds of honest training before the attack.
    victims : int
        Number of clients to attack.
    interactions : int
        Maximum number of requests to each.
    error : float
        The error rate at which it stops, under the better of both signs.
    """

    attack: Literal["zero", "jitter", "spectral"] = "zero"
    reading: Literal["sum", "spectral"] = "sum"
    lean: Lean = "dislikes"
    after: Annotated[int, Field(ge=0)] = 30
    victims: Annotated[int, Field(ge=1)] = 20
    interactions: Annotated[int, Field(ge=1)] = 1000
    error: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05

    @property
    def rounds(self) -> int:
        """Maximum number of rounds of the attack."""
        return self.after + self.interactions + 1


ERRORS = ("error", "by_rate", "by_items")
"""Errors of an estimate: under the better of both signs, and under those that the attack decides on."""
_SIGNS = {"dislikes": 1.0, "likes": -1.0, "unknown": np.nan}


def sign_by_rate(model: Model, lean: Lean) -> float:
    """Return the sign of an `Estimate` from the more frequent label; NaN if that leaves it open."""
    return 1.0 if has_biases(model) else _SIGNS[lean]


class PacAttack(Recommender, Callback):
    """Train honestly, then attack some clients (`AttackOptions`) at the run's noise multiplier.

    In process, clients' own local parameters show the attack's progress (`local_parameters`), and it stops when they
    are known except for their sign. Elsewhere the result is unknown, and it asks as often as allowed. At the end the
    victims get the honest items back (R = 0).

    `findings` are rows of ``findings.csv`` in the run's folder: ``interactions`` in which the client released,
    ``error`` of the estimate under the better of both signs, ``by_rate`` and ``by_items`` under the sign from the
    population's rate, for each victim alone (Assumption 1, both ways), and from all victims together
    (`signs_by_items`); None if they are unknown or no sign is determined; ``spent`` by the client on these interactions
    by the paper's budget, n/nu each, a heuristic (None without noise, or with another mechanism than the paper's).
    """

    nodes: Fleet

    Options = AttackOptions
    options: AttackOptions
    run: Run

    def check(self, run: RunConfig, model: Model) -> None:
        """Refuse other models, and runs that the attack does not fit into."""
        super().check(run, model)
        if not factors_of(model):
            text = f"strategy {run.strategy!r} is for model factors, not {model.name!r}"
            raise ConfigError(text, code="config.strategy-model")
        if run.resume:
            raise ConfigError('an attack cannot be resumed; set resume = ""', code="config.attack-resume")
        if run.patience:
            raise ConfigError("patience would stop the attack; set patience = 0", code="config.attack-patience")
        if run.rounds < (most := self.options.rounds):
            raise ConfigError(f"the attack may take {most} rounds; raise rounds to that", code="config.attack-rounds")
        self.findings: list[dict[str, Any]] = []
        self._model = model
        self._release = Release(
            Kind.TRAIN, model.num_parameters, run.noise_multiplier, run.clipping.mode, mechanism=run.mechanism
        )
        self._honest: Arrays = {}
        (self._shape,) = model.shapes.values()

    def begin(self) -> None:
        """Draw the victims."""
        population = self.nodes.roster(self.run.grid).train
        size = min(self.options.victims, population)
        self._victims = sample([self.nodes.run.seed, _SAMPLE_VICTIMS], population, size)
        factors, biases = factors_of(self._model), has_biases(self._model)
        spectral = "spectral" in (self.options.attack, self.options.reading)
        self._estimates = {client: Estimate(factors, spectral, biases) for client in self._victims.tolist()}
        self._pushed: dict[int, Matrix] = {}  # the sum of each victim's updates
        self._measured: dict[int, int] = {}  # each victim's number of messages at the last measurement
        self._asked, self._exhausted = 0, False  # exhausted: no victim releases anything
        self._restoring = False  # the attack is over, except that the victims get the honest items back

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask for honest training at first, then for the attack's updates."""
        if server_round <= self.options.after:
            return super().configure_train(server_round, arrays, config, grid)
        self._honest = from_array_record(arrays)
        task = self.nodes.task_of(server_round, config, self.decisions(server_round))
        if self._restoring:
            task = replace(task, local_epochs=0, local_steps=0)
        else:
            if self.options.reading == "spectral":
                step_size = task.step_size * self._stride(task)
                task = replace(task, local_epochs=1, local_steps=0, batch_size=0, step_size=step_size)
            else:
                task = replace(task, local_steps=1) if task.local_steps else replace(task, local_epochs=1)
            arrays = to_array_record({name: self._sent(value, server_round) for name, value in self._honest.items()})
        sent = self.read_hypotheses(arrays)
        self.asked["train"] = self.nodes.ask_training(server_round, sent, task, grid, clients=self._victims)
        return self.asked["train"].messages

    def _stride(self, task: TrainingSpec) -> float:
        """Return the factor on the attack's step, chosen to reveal most and to move the victim least."""
        if task.clipping is Clipping.UPDATE and not task.message_noise:
            # Noise is proportional to the update, and a short step hardly moves the victim's vector.
            return _SHORT
        # Noise is constant: a long step exceeds it. From items of almost zeros that does not move the vector either,
        # except for a bias.
        return 1.0 if self.options.attack == "spectral" or has_biases(self._model) else _LONG

    def _sent(self, honest: NDArray[Any], round: int) -> NDArray[Any]:
        """Return the item vectors that the attack sends instead of the honest ones."""
        if self.options.attack == "spectral":
            return honest
        if self.options.attack == "zero":
            return np.zeros_like(honest)
        generator = np.random.default_rng([self.nodes.run.seed, _JITTER, round])
        return _JITTERED * generator.standard_normal(honest.shape, np.float32)

    def learn(self, round: int, releases: Releases) -> Outcome:
        """Learn from the victims' releases; the item vectors do not change."""
        if round <= self.options.after:
            return super().learn(round, releases)
        if not self._restoring:
            updates = releases.vectors - flatten(self.sent)
            for client, update in zip(releases.clients.tolist(), updates, strict=True):
                rows = update.reshape(self._shape)
                self._estimates[client].add(rows)
                self._pushed[client] = self._pushed.get(client, 0.0) + rows
            self._asked += 1
            self._exhausted = not len(releases.clients)
        return replace(super().learn(round, releases), following=self._honest)

    def after_exchange(self, round: int, stages: dict[str, float]) -> str | None:
        """Measure the attack's progress, and end it when all is stolen or no victim releases anything."""
        if self._restoring:
            return "the attack is over"
        last = self._exhausted or self._asked == self.options.interactions
        if round > self.options.after and (last or checkpoint(self._asked)):
            errors = self._errors(self.run)
            self._note(errors)
            worst = max((each["error"] or 0.0 for each in errors.values()), default=0.0)
            self._restoring = last or (len(errors) == len(self._victims) and worst <= self.options.error)
            if self.run.folder is not None:
                table = pd.DataFrame(self.findings).to_csv(index=False)
                write_atomically(self.run.folder.path / "findings.csv", table.encode(), private=True)
        return None

    def at_end(self) -> None:
        """Log the result of the attack."""
        log(INFO, "%s", self.outcome())

    def outcome(self) -> str:
        """Return the result of the attack in words."""
        most = max((estimate.messages for estimate in self._estimates.values()), default=0)
        begin = f"Attack {self.options.attack}: clients released {most} times at most; "
        if all(row["error"] is None for row in self.findings):
            return begin + "their own vectors cannot be read here, so what was stolen is unknown."
        enough = needed(self.findings, self.options.error)
        times = [each for each in enough.values() if each is not None]
        stolen = f"{len(times)} of {len(enough)} vectors stolen to within {self.options.error:.0%} of what they predict"
        return begin + stolen + (f", in {np.median(times):g} interactions (median)." if times else ".")

    def _errors(self, run: Run) -> dict[int, dict[str, float | None]]:
        """Return the errors of each victim's estimate by `ERRORS`; empty if the truth is unknown."""
        factors = factors_of(self._model)
        items = flatten(self._honest).reshape(self._shape)[:, :factors]
        truth = local_parameters(run.grid, self.nodes.roster(run.grid), self._victims, run.name)
        known = {
            client: (estimate.vector, truth[client]["user"].astype(np.float64)[:factors])
            for client, estimate in self._estimates.items()
            if client in truth and estimate.messages
        }
        rate, by_items = sign_by_rate(self._model, self.options.lean), np.ones(len(known))
        if known and not has_biases(self._model):
            pushes = np.stack([self._pushed[client] @ vector for client, (vector, _) in known.items()])
            # On average, items are pushed up if likes are more frequent.
            by_items = -rate * signs_by_items(pushes)
        errors = {}
        for (client, (vector, own)), by_item in zip(known.items(), by_items.tolist(), strict=True):
            signed = [None if np.isnan(sign) else error_rate(sign * vector, own, items) for sign in (rate, by_item)]
            errors[client] = dict(zip(ERRORS, [direction_error(vector, own, items), *signed], strict=True))
        return errors

    def _note(self, errors: Mapping[int, Mapping[str, float | None]]) -> None:
        """Add a row for each victim with news."""
        for client, estimate in self._estimates.items():
            times = estimate.messages
            if times != self._measured.get(client):
                self._measured[client] = times
                row = {"client": client, "interactions": times, **errors.get(client, dict.fromkeys(ERRORS))}
                spent = None if self._release.paper_cost is None else self._release.paper_spend(times)
                self.findings.append({**row, "spent": spent})


def needed(findings: Iterable[Mapping[str, Any]], error: float) -> dict[int, int | None]:
    """Return for each client the number of interactions after which its error stayed low enough."""
    first: dict[int, int | None] = {}
    for row in findings:
        client = row["client"]
        if row["error"] is None or row["error"] > error:
            first[client] = None
        elif first.get(client) is None:
            first[client] = row["interactions"]
    return first


def local_parameters(grid: Grid, roster: Roster, clients: NDArray[np.int64], run: str = "") -> dict[int, Arrays]:
    """Return training clients' current local parameters, by client: the truth by which attacks are judged.

    No server can read them. Here the nodes live in the attacker's own process, so that the audit reads their state;
    nothing travels, and the app has no message for it. If the nodes are elsewhere, the dict is empty. `roster` assigns
    clients to nodes; `clients` are numbered over the dataset.
    """
    found: dict[int, Arrays] = {}
    if not isinstance(grid, InProcessGrid):
        return found
    for node_id, (positions, locals_) in roster.place(TRAIN, clients).items():
        values = kept_by(grid.contexts[node_id], locals_, run)
        for row, position in enumerate(positions):
            found[int(clients[position])] = {name: value[row] for name, value in values.items()}
    return found


def kept_by(context: Context, clients: Sequence[ClientOnNode], run: str = "") -> Arrays:
    r"""Return the current local parameters, each (clients, \*shape), of clients of a node in this process."""
    with in_process():
        node = Node.of(context.node_config, context.run_config)
    kept = LocalParameters(node.site, context.state, node.model, run, node.seed)
    return kept.read(node.training_clients(tuple(clients)))
