"""The input of a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner, best_hypothesis
from umbel.client.personal.own import Floats, Own, hypothesis_outputs, means, row_scores
from umbel.models.prior import Prior
from umbel.protocol.arrays import Arrays

Generators = Callable[[], Sequence[np.random.Generator]]
"""Returns the generator of each client, from its beginning."""


@dataclass(frozen=True)
class Task:
    r"""Hypotheses (k, \*shape) that the clients of a cohort personalise.

    Attributes
    ----------
    update : LocalUpdate
        Settings for clients' further training, if a method trains.
    generators : callable
        Returns the generators that shuffle each client's rows.
    prior : Prior, optional
        The differences of clients around each hypothesis, from the server.
    """

    learner: Learner
    hypotheses: Arrays
    cohort: Cohort
    update: LocalUpdate
    generators: Generators
    prior: Prior | None = None

    @cached_property
    def outputs(self) -> Tensor:
        r"""The output of each hypothesis for each row, (k, rows, \*output shape)."""
        return hypothesis_outputs(self.learner, self.hypotheses, self.cohort)

    @cached_property
    def losses(self) -> Floats:
        """The loss of each hypothesis on each row, (k, rows)."""
        return row_scores(self.learner.model.loss, self.outputs, self.cohort)

    @cached_property
    def best(self) -> NDArray[np.int64]:
        """The hypothesis (clients,) that fits each client's rows best; the first for a client without rows."""
        return best_hypothesis(means(self.losses, self.cohort.lengths))

    @property
    def start(self) -> Arrays:
        r"""The best hypothesis of each client, (clients, \*shape)."""
        return {name: value[self.best] for name, value in self.hypotheses.items()}

    @property
    def best_outputs(self) -> Tensor:
        r"""The outputs of each client's best hypothesis for its rows, (rows, \*output shape)."""
        owner = np.repeat(self.best, self.cohort.lengths)
        return self.outputs[owner, np.arange(len(owner))]

    def networks(self, parameters: Arrays) -> Own:
        r"""Return one network for each client (clients, \*shape) as the clients' predictors."""
        return Own.plain({name: value[:, None] for name, value in parameters.items()}, self.outputs.shape[-1])
