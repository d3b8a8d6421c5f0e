"""Artificial clients like a dataset's, drawn from its public facts, and the effect of a schedule of rounds on them.

Public are the number of clients, the model, the kind and the declared range of each column. Rows are never read, and
clients' numbers of rows are unknown: every artificial client has the same few.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner, best_hypothesis
from umbel.client.trial import try_out
from umbel.data import Column, Dataset, Manifest, offsets_of
from umbel.models.losses import SLOPES
from umbel.models.model import Model
from umbel.privacy.gate.randomness import streams
from umbel.protocol.arrays import Arrays, flatten, unflatten
from umbel.server.rounds import draw_hypotheses
from umbel.strategies.group_privacy import seeded_kmeans

ROWS = 10
"""Rows of each artificial client."""
_CLIENTS = 64  # training clients, and as many to measure hypotheses on
_NUMBERS = ("number", "integer")
_FEW = 8  # clients whose first updates are measured
_SPREAD = 0.5  # standard deviation of a number without a declared range, which should have units near 1
_FAR = (-3.0, 3.0)  # years and days of a date that counts from the default date: those of 1970 to 2029
_FACTOR, _NOISE = 0.3, 0.1  # of clients' own factors on their targets, and of a row's error, relative to the target
_RIDGE = 0.1  # of the factor that a client fits locally
_SHARPNESS = 3.0  # of a teacher's classes: the spread of their scores relative to unit noise


@dataclass(frozen=True)
class Span:
    """Declared facts about a column's numbers, as a model sees them.

    Attributes
    ----------
    low, high : float or None
        Their range; None if it is not declared.
    declared : bool
        Whether a range or a scale is declared.
    """

    name: str
    low: float | None = None
    high: float | None = None
    declared: bool = True

    @property
    def centre(self) -> float:
        """The middle of the range; 0 if there is none."""
        return 0.0 if self.low is None or self.high is None else (self.low + self.high) / 2

    @property
    def spread(self) -> float:
        """The standard deviation of a number drawn uniformly from the range."""
        whole = None if self.low is None or self.high is None else self.high - self.low
        return whole / math.sqrt(12) if whole else _SPREAD


def feature_spans(manifest: Manifest, width: int) -> list[Span] | None:
    """Return the declared facts of each of `width` features; None if nothing is known about single features."""
    stored = manifest.units.get("features", [])
    if len(stored) != width:
        return None
    columns = manifest.layout.features if manifest.layout else []
    known = {column.name: column for column in columns if column.type in _NUMBERS}
    far = {f"{column.name}: {part}" for column in columns if column.is_far for part in ("year", "days")}
    return [
        _of_numbers(known[one["name"]])
        if one["name"] in known
        else Span(one["name"], *(_FAR if one["name"] in far else (0.0, 1.0) if one.get("unit") == "0 or 1" else ()))
        for one in stored
    ]


def target_span(manifest: Manifest) -> Span:
    """Return the declared facts about a numeric target."""
    if manifest.layout is not None and manifest.layout.target.type in _NUMBERS:
        return _of_numbers(manifest.layout.target)
    return Span(manifest.target.get("name", "target"))


def _of_numbers(column: Column) -> Span:
    """Return the declared facts about numbers: a scale brings them near 1, and a range describes unscaled numbers."""
    if (column.scale, column.offset) != (1, 0):
        return Span(column.name)
    if column.minimum is None or column.maximum is None:
        return Span(column.name, declared=False)
    return Span(column.name, column.minimum, column.maximum)


@dataclass(frozen=True)
class Rounds:
    """A schedule: the work of the clients in each round, and the noise on it.

    Attributes
    ----------
    rounds, clients : int
        T, and U.
    clip_norm, decay : float
        Of round 1, and its factor from one round to the next; infinite for no clipping.
    deviation : float
        Standard deviation of one parameter's noise in a client's (or a site's) release, in clip norms.
    sites : int
        Number of sites that add noise to sums of their clients' updates; 0 if each client adds its own.
    choice_epsilon : float
        Epsilon of the randomised choice; infinite where clients train what fits them, as at a site.
    """

    rounds: int
    clients: int
    clip_norm: float = math.inf
    decay: float = 1.0
    deviation: float = 0.0
    sites: int = 0
    choice_epsilon: float = math.inf

    @property
    def noise(self) -> float:
        """The standard deviation of the total noise of all rounds on a parameter of a hypothesis, for k = 1."""
        clips = math.sqrt(sum((self.clip_norm * self.decay**number) ** 2 for number in range(self.rounds)))
        releases = self.clients / math.sqrt(self.sites) if self.sites else math.sqrt(self.clients)
        return self.deviation * clips / releases


class Proxy:
    """Artificial clients for a model.

    Parameters
    ----------
    model : Model
    dataset : Dataset
        Only its manifest, shapes and types are used, and no rows.
    update : LocalUpdate
        Settings of clients' training.
    hypotheses : int
        k; the clients form as many groups.
    seed : int
    """

    def __init__(self, model: Model, dataset: Dataset, update: LocalUpdate, hypotheses: int, seed: int) -> None:
        self.model, self.update, self.hypotheses, self.seed = model, update, hypotheses, seed
        self._data = made_up(model, dataset, hypotheses, np.random.default_rng([seed, 1]))
        self._learner: Learner = try_out(model, self._data, "cpu")
        self._trains = Cohort.gather(self._data, range(_CLIENTS), self._learner.device)
        self._picks = Cohort.gather(self._data, range(_CLIENTS, 2 * _CLIENTS), self._learner.device)
        self._measured = Cohort.gather(self._data, range(2 * _CLIENTS, 3 * _CLIENTS), self._learner.device)
        self.start = draw_hypotheses(model, hypotheses, seed, 0)

    @cached_property
    def constant(self) -> float:
        """The error of the best constant."""
        targets = self._measured.targets.numpy()
        if self.model.metric.higher_is_better:
            labels = np.unique(targets, return_counts=True)[1]
            return 1.0 - float(labels.max() / len(targets))
        owner = np.repeat(np.arange(_CLIENTS), ROWS)
        if targets.ndim > 1:  # clients fit no factor to several outputs
            squares = np.square(targets - targets.mean(axis=0)).reshape(len(targets), -1).sum(axis=1)
            return float(np.sqrt(np.bincount(owner, squares) / ROWS).mean())
        ones = np.ones(len(targets))
        return float(_rmse(self._measured, ones, self._factor(ones, owner), owner).mean())

    def error(self, hypotheses: Arrays) -> float:
        """Return the mean error over draws and clients, each with its best hypothesis: 1 - accuracy, or an RMSE.

        For a single output, a client fits a factor to its rows first.
        """
        if self._fits_factor:
            owner = np.repeat(np.arange(_CLIENTS), ROWS)
            picked, found = [], []
            for j in range(len(next(iter(hypotheses.values())))):
                one = {name: value[j] for name, value in hypotheses.items()}
                seen, told = (
                    self._learner.outputs(one, cohort.features)[:, 0].double().numpy()
                    for cohort in (self._picks, self._measured)
                )
                factor = self._factor(seen, owner)
                picked.append(_rmse(self._picks, seen, factor, owner))
                found.append(_rmse(self._measured, told, factor, owner))
            losses, metrics = np.array(picked), np.array(found)
        else:
            losses = self._learner.score(hypotheses, self._picks)[0]
            metrics = self._learner.score(hypotheses, self._measured)[1]
        losses, metrics = (one.reshape(-1, self.hypotheses, _CLIENTS) for one in (losses, metrics))
        chosen = [own[best_hypothesis(loss), np.arange(_CLIENTS)] for loss, own in zip(losses, metrics, strict=True)]
        mean = float(np.nan_to_num(chosen, nan=np.inf).mean())
        return 1.0 - mean if self.model.metric.higher_is_better else mean

    @property
    def _fits_factor(self) -> bool:
        return self.model.loss.name in ("mse", "rmse") and self._measured.targets.ndim == 1

    def _factor(self, outputs: NDArray[np.float64], owner: NDArray[np.int64]) -> NDArray[np.float64]:
        targets = self._picks.targets.double().numpy()
        above = np.bincount(owner, targets * outputs) + _RIDGE
        return above / (np.bincount(owner, outputs**2) + _RIDGE)

    def learn(self, schedule: Rounds, draws: int = 1) -> Arrays:
        """Return the hypotheses after the rounds of a schedule, (draws * k, \\*shape): k for each draw of the noise."""
        generator = np.random.default_rng([self.seed, 2])
        k = self.hypotheses
        hypotheses = {name: np.concatenate([value] * draws) for name, value in self.start.items()}
        first = k * np.arange(draws)[:, None]  # hypothesis of each draw
        for number in range(schedule.rounds):
            clip = schedule.clip_norm * schedule.decay**number
            cohort, mine = self._some(generator, min(schedule.clients, _CLIENTS))
            chosen = np.zeros((draws, len(mine)), np.int64)
            if k > 1:
                losses = self._learner.score(hypotheses, cohort)[0].reshape(draws, k, len(mine))
                chosen = np.stack([best_hypothesis(one) for one in losses])
                if math.isfinite(schedule.choice_epsilon):
                    stray = generator.random(chosen.shape) < k / (k - 1 + math.exp(schedule.choice_epsilon))
                    chosen = np.where(stray, generator.integers(k, size=chosen.shape), chosen)
            own = (chosen + first).ravel()
            shuffles = streams(self.seed, "shuffle", number, mine * draws)
            trained, _ = self._learner.train(hypotheses, own, _repeated(cohort, draws), self.update, shuffles)
            sent = flatten(hypotheses)
            moves = flatten(trained, np.float64) - sent[own]
            if math.isfinite(clip):
                moves *= np.minimum(1, clip / np.maximum(np.linalg.norm(moves, axis=1, keepdims=True), 1e-300))
            noise = schedule.deviation * clip if schedule.deviation else 0.0
            each = zip(sent.reshape(draws, k, -1), chosen, moves.reshape(draws, len(mine), -1), strict=True)
            moved = np.concatenate([self._combined(*one, noise, schedule, generator) for one in each])
            if not np.isfinite(moved).all():
                break
            hypotheses = unflatten(moved, hypotheses)
        return hypotheses

    def way(self, hypotheses: Arrays) -> float:
        """Return the mean distance of hypotheses from the start."""
        moved = flatten(hypotheses).reshape(-1, *flatten(self.start).shape) - flatten(self.start)
        return float(np.linalg.norm(moved, axis=2).mean())

    def first_update(self) -> float:
        """Return the median norm of a few clients' first updates."""
        few = self._trains.part(slice(0, _FEW))
        shuffles = streams(self.seed, "shuffle", 0, range(_FEW))
        trained, _ = self._learner.train(self.start, np.zeros(_FEW, np.int64), few, self.update, shuffles)
        moves = flatten(trained, np.float64) - flatten(self.start)
        return float(np.median(np.linalg.norm(moves, axis=1)))

    def _some(self, generator: np.random.Generator, count: int) -> tuple[Cohort, list[int]]:
        """Return so many of the training clients, drawn without replacement."""
        if count == _CLIENTS:
            return self._trains, list(range(_CLIENTS))
        mine = np.sort(generator.choice(_CLIENTS, count, replace=False)).tolist()
        return Cohort.gather(self._data, mine, self._learner.device), mine

    def _combined(
        self,
        sent: NDArray[np.float64],
        chosen: NDArray[np.int64],
        moves: NDArray[np.float64],
        noise: float,
        schedule: Rounds,
        generator: np.random.Generator,
    ) -> NDArray[np.float64]:
        """Return the next hypotheses (k, n): means of updates, with the noise for the real number of clients."""
        k, n = sent.shape
        moved, each = sent.copy(), max(1.0, schedule.clients / k)
        if k == 1 or schedule.sites:
            left = noise * math.sqrt(schedule.sites) / each if schedule.sites else noise / math.sqrt(each)
            for j in np.unique(chosen).tolist():
                moved[j] += moves[chosen == j].mean(axis=0) + left * generator.standard_normal(n)
            return moved
        times = -(-schedule.clients // len(chosen))
        who = np.tile(np.arange(len(chosen)), times)[: schedule.clients]
        releases = sent[chosen[who]] + moves[who] + noise * generator.standard_normal((len(who), n))
        labels = seeded_kmeans(releases.astype(np.float32), sent)
        for j in np.unique(labels).tolist():
            moved[j] = releases[labels == j].mean(axis=0)
        return moved


def _repeated(cohort: Cohort, times: int) -> Cohort:
    features, targets = torch.cat([cohort.features] * times), torch.cat([cohort.targets] * times)
    return Cohort(features, targets, np.tile(cohort.lengths, times))


def _rmse(
    cohort: Cohort, outputs: NDArray[np.float64], factor: NDArray[np.float64], owner: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the RMSE of each client, its outputs times its factor."""
    off = cohort.targets.double().numpy() - outputs * factor[owner]
    found: NDArray[np.float64] = np.sqrt(np.bincount(owner, off**2) / ROWS)
    return found


def made_up(model: Model, dataset: Dataset, groups: int, generator: np.random.Generator) -> Dataset:
    """Return a dataset of artificial clients: training clients, and others with twice the rows, to choose and
    measure."""
    owners = 3 * _CLIENTS
    manifest = dataset.manifest.model_copy(
        update={"clients": owners, "split": {"train": owners, "validation": 0}, "part": "", "groups": [], "truth": []}
    )
    features = _features(dataset, owners * ROWS, generator)
    targets = _targets(model, dataset, features.reshape(len(features), -1), groups, generator)
    return Dataset(manifest, features, targets, offsets_of([ROWS] * owners))


def _features(dataset: Dataset, rows: int, generator: np.random.Generator) -> NDArray[Any]:
    shape, manifest = dataset.features.shape[1:], dataset.manifest
    if manifest.tokens:
        return np.asarray(generator.integers(manifest.tokens, size=(rows, *shape)))
    spans = feature_spans(manifest, shape[0]) if len(shape) == 1 else None
    if spans is None:
        if dataset.features.dtype.kind in "iu" and manifest.feature_scale != 1:
            limits = np.iinfo(dataset.features.dtype)
            drawn = generator.integers(limits.min, limits.max, (rows, *shape), dataset.features.dtype, endpoint=True)
            return np.asarray(drawn)
        return generator.normal(0, _SPREAD / abs(manifest.feature_scale), (rows, *shape)).astype(np.float32)
    parts = []
    for name, columns in groupby(spans, key=lambda span: span.name.rpartition(" = ")[0]):
        if name:  # a category of a column
            many = len(list(columns))
            parts.append(np.eye(many)[generator.integers(many, size=rows)])
            continue
        parts += [_drawn(span, rows, generator)[:, None] for span in columns]
    return np.concatenate(parts, axis=1).astype(np.float32)


def _drawn(span: Span, rows: int, generator: np.random.Generator) -> NDArray[np.float64]:
    if span.low is None or span.high is None:
        return generator.normal(0, _SPREAD, rows)
    if (span.low, span.high) == (0.0, 1.0):
        return generator.integers(2, size=rows).astype(np.float64)
    return generator.uniform(span.low, span.high, rows)


def _targets(
    model: Model, dataset: Dataset, rows: NDArray[Any], groups: int, generator: np.random.Generator
) -> NDArray[Any]:
    """Return targets of a linear teacher, a separate one for each group of clients."""
    # Clients that choose a hypothesis are measured on other rows of the same client.
    owner = np.repeat(np.concatenate([np.arange(2 * _CLIENTS), np.arange(_CLIENTS, 2 * _CLIENTS)]), ROWS)
    group = owner % groups
    seen = rows.astype(np.float64)
    seen = (seen - seen.mean(axis=0)) / np.maximum(seen.std(axis=0), 1e-12)
    shape, kind = dataset.targets.shape[1:], dataset.targets.dtype
    by_class = model.loss.name in ("cross-entropy", *SLOPES) or (kind.kind in "iu" and not shape)
    outputs = int(np.prod(shape)) if shape else 1
    if by_class:
        outputs = 1 if model.loss.name in SLOPES else _classes(model, dataset)
    weights = generator.standard_normal((groups, seen.shape[1], outputs)) / math.sqrt(seen.shape[1])
    scores = np.einsum("rd,rdo->ro", seen, weights[group])
    if by_class:
        own = _FACTOR * generator.standard_normal((2 * _CLIENTS, outputs))[owner]
        scores = _SHARPNESS * (scores + own) + generator.gumbel(size=scores.shape)
        if outputs == 1:
            return np.where(scores[:, 0] > 0, np.int8(1), np.int8(-1))
        return np.asarray(scores.argmax(axis=1), np.int64)
    span = target_span(dataset.manifest)
    level, spread = span.centre, span.spread / 2
    if span.low is None:
        level, spread = generator.uniform(0.3, 1.0), 0.3
    factor = np.exp(_FACTOR * generator.standard_normal(2 * _CLIENTS))[owner][:, None]
    clean = level + spread * scores
    made = factor * clean + _NOISE * spread * generator.standard_normal(clean.shape)
    return np.asarray(made.reshape(len(rows), *shape), np.float32)


def _classes(model: Model, dataset: Dataset) -> int:
    named = dataset.manifest.target.get("categories", [])
    if named:
        return len(named)
    from umbel.models.fit import look

    return look(model, dataset.features.shape[1:]).outputs[-1]
