"""The ways to serve clients that a run is compared with.

Each takes the same work in each run: what is too large for it is left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.client.cohort import Cohort
from umbel.client.learner import LOOP, Learner, best_hypothesis
from umbel.client.personal.bayes import closed_form
from umbel.client.prediction import DEFAULT
from umbel.data import Dataset
from umbel.models.fit import traits_of
from umbel.models.losses import SLOPES
from umbel.models.model import Model
from umbel.models.prior import Prior
from umbel.privacy.gate.policy import Personal
from umbel.privacy.gate.randomness import streams
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.words import count_of
from umbel.server.history import State
from umbel.server.rounds import draw_hypotheses
from umbel.server.setup import Setup
from umbel.server.worth import LABELS, LeftOut, Way
from umbel.simulation.baselines import LOCAL_EPOCHS, own, ridge, serve, train_alone

SMALLER = (1, 4, 16, 64)
"""Divisors of the run's step size for clients that train alone; the table has the best of them."""
MOST_POOLED, MOST_ALONE = 2**27, 2**25
"""Maximum size of a fit to all rows, and of clients' own trainings, of which there are more: rows, times the numbers
of a row."""
MOST_STEPS = 20_000
"""Maximum number of steps of a client's own training."""
SMALL = 10_000
"""Numbers of a row up to which clients try all step sizes, and personalise by the method of predictions, if they can
train together."""
_LONGEST = 4  # trainings on end of clients alone, before they count as never settled
_RISES = 0.02  # share of their gain over a constant that one more training may add, if they have settled
_FRESH_SEED = 0  # of measured clients' initial local parameters
STEPS = 100
"""Maximum number of steps of a fit."""
_FEWEST, _STARTS = 3, 8  # fits: two may end at the same bad place
_SAME = 0.01  # share of a loss's fall by which two fits that reach the same may differ
_LOCAL, _LARGE = "since each client has its own local parameters", "since its network is too large for so many rows"


@dataclass(frozen=True)
class Row:
    """The metric of each client (clients,) by one way, and how it was made, if the way's name does not say so."""

    way: Way
    label: str
    metrics: NDArray[np.float64]
    remark: str = ""


@dataclass
class Ways:
    """The ways to serve clients that are compared, each measured on the query rows of the same clients."""

    setup: Setup
    learner: Learner
    dataset: Dataset
    state: State
    support: Cohort
    query: Cohort
    prior: Prior | None = None

    def compare(self) -> list[Row | LeftOut]:
        """Return the result of each way, or the reason why the table lacks it."""
        constant = self.constant()
        last = _row(Way.LAST, self._of(self.state.hypotheses))
        return [constant, *self.rules(), self.alone(constant.metrics), self.pooled(), last, *self.best(), self.own()]

    def _fits(self, rows: Cohort, most: int) -> bool:
        """Return whether the network is small enough to train on so many rows."""
        return len(rows.features) * numbers_of_a_row(self.setup.model, self.dataset) <= most

    @property
    def _how(self) -> Personal:
        """The method to personalise, of which the default trains a model six times."""
        small = numbers_of_a_row(self.setup.model, self.dataset) <= SMALL
        return DEFAULT if small and self.learner.engine != LOOP else Personal.MIXTURE

    @cached_property
    def _trains(self) -> bool:
        """Whether the network is small enough for each client's own training."""
        longest, batch = int(self.support.lengths.max()), self.setup.config.batch_size
        steps = LOCAL_EPOCHS * (-(-longest // batch) if batch else 1)
        return steps <= MOST_STEPS and self._fits(self.support, MOST_ALONE)

    @cached_property
    def rows(self) -> Cohort:
        """The rows of the training clients, none of which is measured."""
        return Cohort.gather(self.dataset, range(self.dataset.manifest.train), self.learner.device)

    def constant(self) -> Row:
        """Measure a single output for all rows, the best for training clients' rows."""
        everybody = Cohort(self.rows.features, self.rows.targets, self.rows.lengths.sum()[None])
        output, what = self._constants(everybody)
        return _row(Way.CONSTANT, self._of_constants(output.expand(len(self.query), *output.shape[1:])), what)

    def alone(self, constant: NDArray[np.float64]) -> Row | LeftOut:
        """Measure clients outside the run by the way that serves them best.

        They predict a constant, train alone with one of some step sizes, fit a ridge regression if the model is linear,
        or personalise an untrained hypothesis as they would personalise the run's. If the best way is a training, it
        continues until more epochs hardly add to what it gains over the constant of all clients.
        """
        run, model = self.setup.config, self.setup.model
        if not self._trains:
            return LeftOut(LABELS[Way.ALONE], _LARGE)
        constants, what = self._constants(self.support)
        found = {f"{what} of the client's rows": self._of_constants(constants)}
        trained = {
            f"step size {run.step_size / smaller:g}": smaller
            for smaller in SMALLER[: None if self._how is DEFAULT else 1]
        }
        found |= {name: next(self._train_alone(smaller)) for name, smaller in trained.items()}
        if (fitted := ridge(self.learner, self.support, self.query)) is not None:
            found["ridge regression, its penalty by leave-one-out"] = fitted
        if not model.local_shapes:
            first = draw_hypotheses(model, 1, run.seed, 0)
            found[f'personalise = "{self._how}" of an untrained hypothesis'] = self._made_own(first)
        sign = 1 if model.metric.higher_is_better else -1
        gains = {name: float(np.nan_to_num(sign * metrics.mean(), nan=-math.inf)) for name, metrics in found.items()}
        best = max(gains, key=gains.__getitem__)
        metrics, remark = found[best], best
        if best in trained:
            rest = itertools.islice(self._train_alone(trained[best]), 1, _LONGEST)
            for times, longer in enumerate(rest, 1):
                remark = f"{count_of(times * LOCAL_EPOCHS, 'epoch')} of {best}"
                gain, more = (
                    sign * float((after - before).mean()) for after, before in ((metrics, constant), (longer, metrics))
                )
                if not more > _RISES * abs(gain):
                    break
                metrics = longer
            else:
                why = f"since they still improved after {count_of(_LONGEST * LOCAL_EPOCHS, 'epoch')}"
                return LeftOut(LABELS[Way.ALONE], why)
        return _row(Way.ALONE, metrics, f"{remark}, the best of {len(found)} ways")

    def _train_alone(self, smaller: float) -> Iterator[NDArray[np.float64]]:
        return train_alone(self.learner, self.support, self.query, self.setup.config, smaller)

    def pooled(self) -> Row | LeftOut:
        """Measure one model of all training clients' rows, if it is likely to be the best."""
        model = self.setup.model
        why = _LOCAL if model.local_shapes else "" if self._fits(self.rows, MOST_POOLED) else _LARGE
        if traits_of(model, self.rows.shape).draws or model.batch_dependent:
            why = why or "since its loss of all rows at once is not that of training"
        if not why:
            fitted, why = fit_pooled(self.learner, self.rows, self.setup.config.seed, self.state.hypotheses)
        return LeftOut(LABELS[Way.POOLED], why) if why else _row(Way.POOLED, self._of(fitted), "fitted by L-BFGS")

    def best(self) -> list[Row]:
        """Measure the best round's hypotheses, if they are others than the last round's."""
        state = self.state
        if not state.best_round or all(np.array_equal(one, state.hypotheses[name]) for name, one in state.best.items()):
            return []
        exact = any(entry.exact_reports for entry in state.history)
        chosen = "exact losses of validation clients" if exact else "validation clients"
        remark = f"after {count_of(state.best_round - 1, 'round')}, chosen by {chosen}"
        return [_row(Way.BEST, self._of(state.best), remark)]

    def own(self) -> Row | LeftOut:
        """Measure the run's hypotheses, personalised by each client."""
        local = self.setup.model.local_shapes
        if local or not self._trains:
            return LeftOut(LABELS[Way.OWN], _LOCAL if local else _LARGE)
        return _row(Way.OWN, self._made_own(self.state.hypotheses, self.prior), f'personalise = "{self._how}"')

    def _made_own(self, hypotheses: Arrays, prior: Prior | None = None) -> NDArray[np.float64]:
        return own(self.learner, self.support, self.query, hypotheses, self.setup.config, self._how, prior=prior)

    def _constants(self, cohort: Cohort) -> tuple[Tensor, str]:
        """Return the best constant outputs for the rows of each client (clients, outputs), and their description."""
        model, targets = self.setup.model, cohort.targets
        shape = traits_of(model, cohort.shape).outputs
        lengths = torch.from_numpy(cohort.lengths).to(targets.device)
        owners = torch.arange(len(cohort), device=targets.device).repeat_interleave(lengths)

        def mean(values: Tensor) -> Tensor:
            sums = torch.zeros(len(cohort), *values.shape[1:], dtype=torch.double, device=values.device)
            return sums.index_add(0, owners, values.double()) / lengths.reshape(-1, *[1] * (values.ndim - 1))

        if not targets.is_floating_point() and shape[-1] > 1:
            classes = torch.nn.functional.one_hot(targets.long(), shape[-1])
            # Of several classes a row, as the next tokens, each counts alike.
            often = mean(classes.double().reshape(len(targets), -1, shape[-1]).mean(1))
            often = often if model.loss.name in ("mse", "rmse") else often.clamp(min=1e-12).log()
            return often.reshape(-1, *[1] * (len(shape) - 1), shape[-1]).expand(-1, *shape), "the most frequent class"
        if model.metric.name == "right-sign" or model.loss.name in SLOPES:
            share = mean(targets.flatten() > 0).clamp(1e-6, 1 - 1e-6)
            odds = (share / (1 - share)).log()
            return odds.where(odds != 0, 1e-6).reshape(-1, *shape), "the most frequent label"
        return mean(targets).reshape(-1, *shape), "the mean"

    def _of_constants(self, outputs: Tensor) -> NDArray[np.float64]:
        """Return the metric (clients,) of constant outputs (clients, outputs) on the clients' query rows."""
        metric, query = self.setup.model.metric, self.query
        lengths = torch.from_numpy(query.lengths).to(outputs.device)
        rows = metric.of_rows(outputs.float().repeat_interleave(lengths, 0), query.targets).double().cpu().numpy()
        means = np.add.reduceat(rows, query.starts) / query.lengths
        return np.asarray(metric.report(torch.from_numpy(means)).numpy())

    def rules(self) -> list[Row]:
        """Measure the model's own baselines."""
        hook = self.setup.model.hooks.baselines
        if hook is None:
            return []
        parts = [
            (one.features.cpu().numpy(), one.targets.cpu().numpy(), one.lengths)
            for one in (self.rows, self.support, self.query)
        ]
        found = hook(parts[0], parts[1], parts[2], self.setup.model.metric.name)
        return [Row(Way.RULE, f"rule: {name}", metrics) for name, metrics in found.items()]

    def _of(self, hypotheses: Arrays) -> NDArray[np.float64]:
        """Return the metric of each client's best hypothesis on its support rows."""
        learner, model = self.learner, self.setup.model
        if not model.local_shapes:
            return serve(learner, hypotheses, self.support, self.query)[1]
        step, shared = self.setup.config.step_size, learner.tensors(hypotheses)
        fresh = learner.tensors(model.initial_local(streams(_FRESH_SEED, "local", 0, range(len(self.support)))))
        chosen = best_hypothesis(learner.score_newcomers(shared, self.support, fresh, step)[0])
        metrics = []
        for j in range(len(next(iter(shared.values())))):
            one = {name: value[j : j + 1] for name, value in shared.items()}
            local = learner.fit_local(one, self.support, fresh, step)
            metrics.append(learner.score(one, self.query, local)[1][0])
        return np.stack(metrics)[chosen, np.arange(len(chosen))]


def numbers_of_a_row(model: Model, dataset: Dataset) -> int:
    """Return how many numbers a network holds, and computes for a row."""
    parameters = sum(one.numel() for one in model.module.parameters())
    return parameters + traits_of(model, dataset.features.shape[1:]).activations


def _row(way: Way, metrics: NDArray[np.float64], remark: str = "") -> Row:
    return Row(way, LABELS[way], metrics, remark)


@dataclass(frozen=True)
class _Fit:
    model: Arrays
    start: float
    loss: float
    converged: bool

    def reaches(self, loss: float) -> bool:
        return self.loss <= loss + _SAME * abs(self.start - self.loss)


def fit_pooled(learner: Learner, rows: Cohort, seed: int, others: Arrays) -> tuple[Arrays, str]:
    """Fit one model to the rows of all clients; return it, and the reason to doubt that it is the best, if any.

    A fit may stop early, or end where no small step helps, such as at a network whose units are all off. So there are
    several, from different starts. The lowest loss is believed if two fits reach it, and if no hypothesis of the run
    fits the same rows better.

    Parameters
    ----------
    others : dict of ndarray, each (k, \\*shape)
        The run's hypotheses, with which it is compared.
    """
    from scipy.optimize import minimize  # the import takes a third of a second

    together = Cohort(rows.features, rows.targets, rows.lengths.sum()[None])
    objective, model_of = _objective(learner, together, others)
    ready = flatten(others)
    losses = [objective(vector)[0] for vector in ready]
    least = min(filter(math.isfinite, losses), default=math.inf)
    drawn = flatten(draw_hypotheses(learner.model, _STARTS, seed, 0))
    starts = [*drawn[:_FEWEST], *([ready[losses.index(least)]] if math.isfinite(least) else []), *drawn[_FEWEST:]]
    one_minimum, fits = learner.model.linear or closed_form(learner.model), list[_Fit]()
    for start in starts:
        end = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": STEPS})
        fits.append(_Fit(model_of(end.x), objective(start)[0], float(end.fun), bool(end.success)))
        best = min(fits, key=lambda fit: fit.loss if math.isfinite(fit.loss) else math.inf)
        agree = len(fits) >= _FEWEST and sum(fit.reaches(best.loss) for fit in fits) > 1
        if (agree or (one_minimum and best.converged)) and best.reaches(least):
            return best.model, ""
    return best.model, f"since {count_of(len(fits), 'fit')} did not show which loss is the lowest"


def _objective(
    learner: Learner, cohort: Cohort, like: Arrays
) -> tuple[Callable[[NDArray[Any]], tuple[float, NDArray[np.float64]]], Callable[[NDArray[Any]], Arrays]]:
    """Return the loss of a vector of parameters with its gradient, and the model of a vector, each (1, \\*shape)."""
    shapes = {name: value.shape[1:] for name, value in like.items()}
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1]

    def model_of(vector: NDArray[Any]) -> Arrays:
        parts = zip(shapes.items(), np.split(vector.astype(np.float32), ends), strict=True)
        return {name: part.reshape(1, *shape) for (name, shape), part in parts}

    def objective(vector: NDArray[Any]) -> tuple[float, NDArray[np.float64]]:
        own: dict[str, Tensor] = {
            name: torch.from_numpy(value[0]).to(learner.device).requires_grad_()
            for name, value in model_of(vector).items()
        }
        loss = learner.objective(own, cohort)
        slopes = torch.autograd.grad(loss, list(own.values()))
        return float(loss.detach()), np.concatenate([one.double().cpu().numpy().ravel() for one in slopes])

    return objective, model_of
