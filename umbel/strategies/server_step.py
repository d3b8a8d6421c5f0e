"""Server optimizers: the average of each cluster is not the next hypothesis but a step towards it (FedOpt).

Clusters are those of group privacy, and each has a separate optimizer; with one hypothesis they are the strategies of
the papers. The optimizers' state is computed from releases, so it costs no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from umbel.protocol.arrays import Matrix
from umbel.strategies.group_privacy import GroupPrivacy

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]


class ServerStep(GroupPrivacy):
    """Clusters as in group privacy, with a step along the mean update of each (Reddi et al., 2021, Algorithm 2)."""

    def _from_mean(self, mean: Matrix, count: int, hypothesis: Matrix, index: int) -> Matrix:
        """Return the hypothesis moved by a step."""
        return hypothesis + self.step(mean - hypothesis, index)

    def step(self, update: Matrix, index: int) -> Matrix:
        """Return the step (n,) of hypothesis `index` for the mean update (n,) of its cluster."""
        raise NotImplementedError

    def kept(self, name: str, update: Matrix, start: float = 0.0) -> NDArray[np.float32]:
        """Return the state of each hypothesis under a name, (k, n), initially filled with `start`."""
        shape = (len(next(iter(self.fleet.sent.values()), ())) or self.hypotheses, len(update))
        if name not in self.state:
            self.state[name] = np.full(shape, start, np.float32)
        return self.state[name]


@dataclass(frozen=True)
class MomentumOptions:
    """Options of `FedAvgM`: the server's step size, and the share of the last step that goes into the next."""

    rate: Rate = 1.0
    momentum: Share = 0.9


class FedAvgM(ServerStep):
    """Averaging with momentum (Hsu, Qi and Brown, 2019)."""

    Options: ClassVar[type] = MomentumOptions

    def step(self, update: Matrix, index: int) -> Matrix:
        """Return the rate times the momentum."""
        momentum = self.kept("momentum", update)
        momentum[index] = self.options.momentum * momentum[index] + update
        step: Matrix = self.options.rate * momentum[index].astype(np.float64)
        return step


@dataclass(frozen=True)
class AdaptiveOptions:
    """Options of `FedAdam` and `FedYogi`.

    Attributes
    ----------
    rate : float
        eta, the server's step size.
    beta1, beta2 : float
        Shares of the first and the second moment that are kept from round to round.
    tau : float
        The larger it is, the less adaptive the step; about the size of a parameter's update.
    """

    rate: Rate = 0.1
    beta1: Share = 0.9
    beta2: Share = 0.99
    tau: Rate = 1e-3


class Adaptive(ServerStep):
    """A separate step for each parameter, longer where its updates were small."""

    Options: ClassVar[type] = AdaptiveOptions

    def step(self, update: Matrix, index: int) -> Matrix:
        """Return the rate times the first moment over the root of the second."""
        options = self.options
        first, second = self.kept("first", update), self.kept("second", update, options.tau**2)
        first[index] = options.beta1 * first[index] + (1 - options.beta1) * update
        second[index] = self.second(second[index].astype(np.float64), update**2)
        scale = np.sqrt(second[index], dtype=np.float64) + options.tau
        step: Matrix = options.rate * first[index] / scale
        return step

    def second(self, kept: Matrix, square: Matrix) -> Matrix:
        """Return the second moment (n,), from the previous one and the square of an update."""
        raise NotImplementedError


class FedAdam(Adaptive):
    """Adam over the rounds (Reddi et al., 2021); as in the paper, without bias correction of the first steps."""

    def second(self, kept: Matrix, square: Matrix) -> Matrix:
        """Return an exponential moving average."""
        beta2: float = self.options.beta2
        return beta2 * kept + (1 - beta2) * square


class FedYogi(Adaptive):
    """Yogi over the rounds (Reddi et al., 2021): the second moment changes by at most an update's square."""

    def second(self, kept: Matrix, square: Matrix) -> Matrix:
        """Return the previous moment, moved towards the square."""
        moved: Matrix = kept - (1 - self.options.beta2) * square * np.sign(kept - square)
        return moved


@dataclass(frozen=True)
class AdagradOptions:
    """Options of `FedAdagrad`, as in `AdaptiveOptions`; the second moment keeps everything."""

    rate: Rate = 0.1
    beta1: Share = 0.0
    tau: Rate = 1e-3


class FedAdagrad(Adaptive):
    """Adagrad over the rounds (Reddi et al., 2021)."""

    Options: ClassVar[type] = AdagradOptions

    def second(self, kept: Matrix, square: Matrix) -> Matrix:
        """Return the sum of all squares."""
        return kept + square
