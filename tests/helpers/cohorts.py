"""Cohorts of made-up clients, and what both learners do with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import SITE, Learner, Scores, arrays_of, learner_for
from umbel.models import Model
from umbel.protocol.arrays import Arrays

CPU = torch.device("cpu")
ENGINES = ("loop", "batched")
engines = pytest.mark.parametrize("engine", ENGINES)
all_engines = pytest.mark.parametrize("engine", [*ENGINES, SITE])
# float32 has 7 digits, of which a few dozen steps and sums in another order cost one or two.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

Rows = tuple[Any, Any]
"""A client's features and targets."""


@dataclass(frozen=True)
class Kind:
    """A model, the shape of a row, of numbers or tokens, and its targets.

    These are numbers, labels, as many classes, whole rows again, or the next token of each place. Of items, which have
    no shape, a client labels some.
    """

    model: Model
    inputs: tuple[int, ...]
    targets: int | str = "numbers"
    tokens: int = 0

    def client(self, generator: np.random.Generator, rows: int) -> Rows:
        """Draw a client."""
        shape = (rows, *self.inputs)
        features: Any = generator.integers(0, self.tokens, shape) if self.tokens else generator.standard_normal(shape)
        match self.targets:
            case "numbers":
                return features, generator.standard_normal(rows)
            case "labels":
                return features, generator.choice([-1.0, 1.0], rows)
            case "rows":
                return features, features
            case "next":
                return features, np.roll(features, -1, 1)
            case "items":
                items = generator.choice(self.model.shapes["items"][0], rows, replace=False)
                return items[:, None].astype(float), generator.choice([-1.0, 1.0], rows)
        return features, generator.integers(0, self.targets, rows)


def learner_of(engine: str, model: Model) -> Learner:
    """Return one of the learners of a model, on the CPU."""
    return learner_for(model, "cpu", engine)


class ByArrays:
    """What a learner does, from arrays to arrays."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def choose(self, hypotheses: Arrays, cohort: Cohort, local: Arrays | None = None) -> Any:
        return self._learner.choose(*self._tensors(hypotheses), cohort, *self._tensors(local or {})).numpy()

    def score(self, hypotheses: Arrays, cohort: Cohort, local: Arrays | None = None) -> Scores:
        return self._learner.score(*self._tensors(hypotheses), cohort, *self._tensors(local or {}))

    def score_newcomers(self, hypotheses: Arrays, cohort: Cohort, fresh: Arrays, step_size: float) -> Scores:
        return self._learner.score_newcomers(*self._tensors(hypotheses), cohort, *self._tensors(fresh), step_size)

    def fit_local(self, hypothesis: Arrays, cohort: Cohort, fresh: Arrays, step_size: float) -> Arrays:
        fitted = self._learner.fit_local(*self._tensors(hypothesis), cohort, *self._tensors(fresh), step_size)
        return arrays_of(fitted)

    def train(
        self, hypotheses: Arrays, chosen: Any, cohort: Cohort, update: LocalUpdate, generators: Any,
        local: Arrays | None = None,
    ) -> tuple[Arrays, Arrays]:  # fmt: skip
        shared, own = self._tensors(hypotheses, local or {})
        trained = self._learner.train(shared, torch.as_tensor(chosen), cohort, update, generators, own)
        return arrays_of(trained[0]), arrays_of(trained[1])

    def outputs(self, network: Arrays, features: torch.Tensor) -> torch.Tensor:
        """Return the outputs of one network."""
        rows = Cohort(features.to(self._learner.device), features, np.array([len(features)]))
        return self._learner.outputs({name: value[None, None] for name, value in network.items()}, rows)[0]

    def _tensors(self, *each: Arrays) -> list[dict[str, torch.Tensor]]:
        return [self._learner.tensors(arrays) for arrays in each]


def cohort_of(*clients: Rows) -> Cohort:
    """Return a cohort of clients, each given as its features and targets."""
    features = np.concatenate([np.asarray(x, np.float32) for x, _ in clients])
    targets = np.concatenate([np.asarray(y) for _, y in clients])
    targets = targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64)
    return Cohort(torch.from_numpy(features), torch.from_numpy(targets), np.array([len(y) for _, y in clients]))


def linear(*thetas: Sequence[float]) -> Arrays:
    """Return hypotheses of the linear model."""
    return {"weight": np.array(thetas, np.float32)[:, None, :]}


def thetas(trained: Arrays) -> list[list[float]]:
    """Return what clients of the linear model have learnt."""
    rows: list[list[float]] = trained["weight"][:, 0].tolist()
    return rows


def generators(count: int, seed: int = 0) -> list[np.random.Generator]:
    """Return a generator for each client."""
    return [np.random.default_rng([seed, c]) for c in range(count)]


def draw_client(model: Model, rows: int, generator: np.random.Generator) -> Rows:
    """Draw the rows of a client of the linear model, the mlp, the headed model or the tiny convolution."""
    if model.loss.name == "cross-entropy":
        return generator.standard_normal((rows, 1, 6, 6)), generator.integers(0, 3, rows)
    inputs = 3 if model.name == "mlp" else 2
    return generator.uniform(-1, 1, (rows, inputs)), generator.standard_normal(rows)


def assert_close(ours: Arrays, theirs: Arrays, **tolerance: float) -> None:
    """Check that named arrays are equal to rounding."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, **(CLOSE | tolerance))


def train(
    model: Model,
    hypotheses: Arrays,
    chosen: Any,
    cohort: Cohort,
    update: LocalUpdate,
    generators: Sequence[np.random.Generator],
    engine: str,
) -> Arrays:
    """Return the shared parameters that clients have trained; the model has no local ones."""
    shared, local = ByArrays(learner_of(engine, model)).train(hypotheses, chosen, cohort, update, generators)
    assert local == {}
    return shared


def score(model: Model, hypotheses: Arrays, cohort: Cohort, engine: str) -> Scores:
    """Return loss and metric of every hypothesis on every client."""
    return ByArrays(learner_of(engine, model)).score(hypotheses, cohort)
