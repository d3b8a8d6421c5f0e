"""The leak meter: at regular intervals in a simulation, the server attacks one client.

It asks the client for one more update, as in any round, and derives all it can. Then it asks for the truth, which only
a simulated client tells, and records its error. The client's replies do not enter training, and their cost is not
counted with that of training. A run has it as an observer:
``observers = "umbel_lab.attacks.leak_meter:LeakMeter every=5"``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from umbel.data import Dataset
from umbel.models.model import Model
from umbel.privacy import mechanisms
from umbel.privacy.mechanisms.base import Mechanism
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.errors import ConfigError
from umbel.protocol.home import write_atomically
from umbel.protocol.messages import answers_training
from umbel.protocol.records import to_array_record
from umbel.protocol.release import Clipping
from umbel.protocol.releases import Releases
from umbel.protocol.tasks import TrainingSpec
from umbel.server.nodes.exchange import Exchange
from umbel.server.nodes.replies import Asked, read_releases
from umbel.server.nodes.roster import TRAIN, sample
from umbel.server.nodes.transport import transport_of
from umbel.server.observer import Observer, Run, Section
from umbel.server.report import figures
from umbel.server.summary import Summary
from umbel_lab.attacks import pac_attack

_SAMPLE_CLIENT = 6
_FILE = "leaks.jsonl"
_SHORT = 2.0**-20
_SERIES = {
    "choice": "chosen hypothesis guessed",
    "norm": "error in the guessed norm of the update",
    "update": "likeness of the released update and the true one",
    "labels": "likeness of the guessed labels",
    "predictions": "stolen predictions, under the better of both signs",
    "signed": "stolen predictions, under the sign that the server takes",
}

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Leak:
    """The result of one attack; None if the model does not permit it.

    `choice` says whether the hypothesis nearest to the release is the one that fits the client best, even if the client
    may have trained another to hide that. `norm` is the relative error of the server's estimate of the update's norm.
    `update` is the cosine between the released and the true update, and `labels` the correlation between the change of
    the last bias and the frequencies of the classes. `predictions` and `signed` are the share of items on which the
    estimate of a recommender's local vector agrees with the client's own: under the better of both signs, which one
    known preference reveals, and under that of `sign_by_rate`; None if it is open.
    """

    round: int
    client: int
    choice: bool | None = None
    norm: float | None = None
    update: float | None = None
    labels: float | None = None
    predictions: float | None = None
    signed: float | None = None


@dataclass(frozen=True)
class LeakMeterOptions:
    """Number of rounds from one attack to the next."""

    every: Annotated[int, Field(ge=1)] = 5


class LeakMeter(Observer):
    """Attacks one training client, drawn by the seed, in rounds 1, 1 + every, ...

    In the run's folder, ``leaks.jsonl`` has a line for each `Leak`; a resumed run appends to it. Its estimate of a
    client's local parameters then starts again, as these themselves do in simulation.

    If a model has local parameters, the client trains them each time that it is asked.
    """

    Options = LeakMeterOptions
    options: LeakMeterOptions

    def begin(self, run: Run) -> None:
        """Draw the client, and read the findings of an earlier part of the run."""
        dataset = run.setup.open_dataset()
        if dataset is None or not run.fleet.roster(run.grid).simulated:
            text = "observers: the leak meter is for simulation; leave it out where sites have their own data"
            raise ConfigError(text, code="config.simulation-only")
        self._dataset: Dataset = dataset
        self.client = int(sample([run.setup.config.seed, _SAMPLE_CLIENT], dataset.manifest.train, 1)[0])
        model = run.setup.model
        self._sign = pac_attack.sign_by_rate(model, pac_attack.lean_of(dataset))
        factors, biases = pac_attack.factors_of(model), pac_attack.has_biases(model)
        attacked = factors and run.strategy.hypotheses == 1
        self._estimate = pac_attack.Estimate(factors, True, biases) if attacked else None
        self._run = run
        self.leaks: list[Leak] = []
        if run.folder is not None and (file := run.folder.path / _FILE).exists():
            found = [Leak(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
            self.leaks = [leak for leak in found if leak.round <= len(run.state.history)]

    def before_round(self, run: Run, number: int) -> None:
        """Attack the client, if it is time and the client releases."""
        if (number - 1) % self.options.every:
            return
        if (leak := self._attack(run, number)) is None:
            return
        self.leaks.append(leak)
        if run.folder is not None:
            lines = "".join(json.dumps(asdict(one)) + "\n" for one in self.leaks)
            write_atomically(run.folder.path / _FILE, lines.encode(), private=True)

    def section(self) -> Section | None:
        """Return the attacks' findings, beside the model's quality and cost."""
        return section_of(self.leaks, self.options.every, self._run)

    def _attack(self, run: Run, number: int) -> Leak | None:
        """Attack the client in round `number`; None if it does not release, or does not tell the truth."""
        hypotheses = run.state.hypotheses
        task = run.strategy.task(number, run.setup.task(run.name))
        if (released := self._ask(run, number, hypotheses, task)) is None:
            return None
        start, release = flatten(hypotheses), released.vectors[0]
        if self._estimate:
            return self._stolen(run, number, hypotheses, release - start[0], task)
        # The truth: the same training once more, without noise, from the client's own choice of hypothesis.
        bare = replace(task, noise_multiplier=0.0, choice_epsilon=0.0, disclose_choice=True)
        truth = self._ask(run, number, hypotheses, bare)
        if truth is None or truth.choices is None:
            return None
        guess, choice = int(np.square(release - start).sum(axis=1).argmin()), int(truth.choices[0])
        change, update = release - start[guess], truth.vectors[0] - start[choice]
        norm = float(np.linalg.norm(update))
        noise = mechanisms.load(task.mechanism)(task.noise_multiplier) if task.noise_multiplier else None
        guessed = guessed_norm(change, noise, task.clipping, task.clip_norm)
        return Leak(
            number,
            self.client,
            choice=guess == choice if len(start) > 1 else None,
            norm=abs(guessed - norm) / norm if norm else None,
            update=_cosine(change, update),
            labels=self._labels(change, hypotheses, run.setup.model),
        )

    def _stolen(self, run: Run, number: int, hypotheses: Arrays, change: Vector, task: TrainingSpec) -> Leak | None:
        """Add to the estimate of the client's local vector, and compare it with its own."""
        assert self._estimate is not None
        ((name, (items,)),) = hypotheses.items()
        self._estimate.add(change.reshape(items.shape))
        # The truth: from items of zeros, and without noise, each of its items moves along the client's vector
        # by as much, towards it or away as the label says, and the vector itself does not move. A separate
        # bias would, but for so short a step.
        short = replace(task, local_epochs=1, local_steps=0, batch_size=0, step_size=task.step_size * _SHORT)
        honest = replace(short, message_noise=0.0, noise_multiplier=0.0)
        truth = self._ask(run, number, {name: np.zeros_like(items)[None]}, honest)
        if truth is None:
            return None
        features, labels = self._dataset.client(self.client)
        moved = truth.vectors[0].reshape(items.shape)[np.asarray(features)[:, 0].astype(np.int64)]
        vector = self._estimate.vector
        own, vectors = (labels @ moved)[: len(vector)], items[:, : len(vector)].astype(np.float64)
        error = pac_attack.direction_error(vector, own, vectors)
        signed = None if np.isnan(self._sign) else 1 - pac_attack.error_rate(self._sign * vector, own, vectors)
        return Leak(number, self.client, predictions=1 - error, signed=signed)

    def _ask(self, run: Run, number: int, hypotheses: Arrays, task: TrainingSpec) -> Releases | None:
        """Return the client's release in a separate exchange; None if it does not release."""
        fleet, clients = run.fleet, np.array([self.client])
        messages = fleet.ask_training(number, to_array_record(hypotheses), task, run.grid, clients)
        placed = fleet.roster(run.grid).place(TRAIN, clients)
        positions = {node: np.array(positions) for node, (positions, _) in placed.items()}
        answers = {
            answer.node: answer.reply
            for answer in Exchange(transport_of(run.grid)).run(messages, run.setup.config.round_timeout)
            if not answer.reply.has_error() and answers_training(answer.reply.content)
        }
        releases = read_releases(answers, Asked(clients, positions, task.disclose_choice), hypotheses)
        return releases if len(releases.clients) else None

    def _labels(self, change: Vector, hypotheses: Arrays, model: Model) -> float | None:
        """Return the correlation between the change of the last bias and the frequencies of the classes."""
        last = list(hypotheses.values())[-1]
        if model.metric.name != "accuracy" or last.ndim != 2:
            return None
        classes = last.shape[1]
        counts = np.bincount(self._dataset.client(self.client)[1], minlength=classes)
        bias = change[-classes:]
        return float(np.corrcoef(bias, counts)[0, 1]) if bias.std() and counts.std() else None


def guessed_norm(change: Vector, noise: Mechanism | None, mode: Clipping, clip_norm: float) -> float:
    """Return the norm of the update that on average leads to such a change, with noise (Lemma 4.3)."""
    n = len(change)
    spread = 0.0 if noise is None else n * noise.deviation(n) ** 2
    square = float(change @ change)
    if mode is Clipping.PUBLIC:
        return float(np.sqrt(max(0.0, square - spread * clip_norm**2)))
    return float(np.sqrt(square / (1 + spread)))


def section_of(leaks: Sequence[Leak], every: int, run: Run) -> Section | None:
    """Return a picture of the attacks' findings, with a text; None if they found nothing to measure."""
    rounds = [leak.round for leak in leaks]
    series = {
        label: [np.nan if (value := getattr(leak, name)) is None else float(value) for leak in leaks]
        for name, label in _SERIES.items()
    }
    series = {label: values for label, values in series.items() if np.isfinite(values).any()}
    if not series:
        return None
    averages = ", ".join(
        f"{label} {figures.number(round(float(np.nanmean(values)), 3))}" for label, values in series.items()
    )
    setup, beside = run.setup, {}
    metric = setup.model.metric.name
    if metric.lower() != Summary.of(setup).loss_name.lower():
        scored = [(entry.number, entry.metric) for entry in run.state.history if entry.metric is not None]
        beside[f"validation {metric}"] = [number for number, _ in scored], [value for _, value in scored]
    # The paper's budget of a client in every round so far, the maximum.
    spent = [] if setup.release.paper_cost is None else [setup.release.paper_spend(number) for number in rounds]
    often = "round" if every == 1 else f"{every} rounds"
    text = (
        f"Every {often}, the server attacked a usual release of one simulated client (number {leaks[0].client}). On "
        f"average: {averages}. A choice counts 1 if it was guessed right; likenesses are cosines and correlations, 1 "
        "for the same and about 0 for nothing in common. An attack that fails does not show that nothing leaks."
    )
    if spent:
        text += (
            f" By the end, a client that took part in all {rounds[-1]} rounds has spent {figures.number(spent[-1])} of "
            "the paper's budget, n/\N{GREEK SMALL LETTER NU} a participation: a heuristic that guarantees nothing."
        )
    return Section("What the server can learn", (text,), figures.lines("leaks", text, rounds, series, beside, spent))


def _cosine(one: Vector, other: Vector) -> float | None:
    product = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / product if product else None
