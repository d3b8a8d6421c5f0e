"""The ways to serve clients that a run is compared with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner, best_hypothesis
from umbel.data import Dataset
from umbel.models.fit import look
from umbel.models.losses import SLOPES
from umbel.models.optimizers import descent_of
from umbel.models.prior import Prior
from umbel.privacy.gate.policy import Personal
from umbel.privacy.gate.randomness import streams
from umbel.protocol.arrays import Arrays
from umbel.protocol.words import count_of
from umbel.server.history import State
from umbel.server.rounds import draw_hypotheses
from umbel.server.setup import Setup
from umbel.server.worth import LABELS, Way
from umbel.simulation.baselines import own, ridge, serve, train_alone
from umbel.simulation.worth.plan import Plan
from umbel.simulation.worth.pooled import fit_pooled

SMALLER = (1, 4, 16, 64)
"""Divisors of the run's step size for clients that train alone; the table has the best of them."""
_LONGEST = 4  # trainings on end of clients alone, before they count as never settled
_RISES = 0.02  # share of their gain over a constant that one more training may add, if they have settled
_FRESH_SEED = 0  # of measured clients' initial local parameters


@dataclass
class Ways:
    """The ways to serve clients that are compared, each measured on the query rows of the same clients."""

    setup: Setup
    learner: Learner
    dataset: Dataset
    state: State
    training: NDArray[np.int64]
    support: Cohort
    query: Cohort
    prior: Prior | None = None
    remarks: dict[Way, str] = field(default_factory=dict)
    left_out: dict[Way, str] = field(default_factory=dict)

    def measure(self, plan: Plan) -> dict[tuple[Way, str], NDArray[np.float64]]:
        """Return the metric (clients,) of each planned way, by the way and its label."""
        run, last = self.setup.config, self.state.hypotheses
        found = {Way.CONSTANT: self.constant()}
        if plan.sizes:
            alone, doubt = self.alone(plan, found[Way.CONSTANT])
            if doubt:
                self.left_out[Way.ALONE] = doubt
            else:
                found[Way.ALONE] = alone
        if plan.passes:
            pooled = fit_pooled(self.learner, self.rows, run, plan, last)
            if pooled.doubt:
                self.left_out[Way.POOLED] = pooled.doubt
            else:
                found[Way.POOLED], self.remarks[Way.POOLED] = self._of(pooled.model), pooled.remark
        if plan.rounds:
            wanted = sum(1 for entry in self.state.history if entry.asked)
            self.remarks[Way.ONE_MODEL] = f"after {count_of(plan.rounds, 'round')}" + (
                f" of the run's {wanted}" if plan.rounds < wanted else ""
            )
            found[Way.ONE_MODEL] = self._of(self.one_model(plan.rounds))
        found[Way.LAST] = self._of(last)
        if self.state.best_round and not _same(self.state.best, last):
            found[Way.BEST] = self._of(self.state.best)
            exact = any(entry.exact_reports for entry in self.state.history)
            chosen = "exact losses of validation clients" if exact else "validation clients"
            self.remarks[Way.BEST] = f"after {count_of(self.state.best_round - 1, 'round')}, chosen by {chosen}"
        if plan.how is not Personal.NO:
            found[Way.OWN] = own(self.learner, self.support, self.query, last, run, plan.how, prior=self.prior)
            self.remarks[Way.OWN] = f'personalise = "{plan.how}"'
        named = {(way, LABELS[way]): metrics for way, metrics in found.items()}
        rules = {(Way.RULE, f"rule: {name}"): metrics for name, metrics in self.rules().items()}
        return {key: named.get(key, rules.get(key)) for key in [*list(named)[:1], *rules, *list(named)[1:]]}  # type: ignore[misc]

    @cached_property
    def rows(self) -> Cohort:
        """The rows of the training clients, none of which is measured."""
        return Cohort.gather(self.dataset, self.training.tolist(), self.learner.device)

    def constant(self) -> NDArray[np.float64]:
        """Return the metric of a single output for all rows, the best for training clients' rows."""
        everybody = Cohort(self.rows.features, self.rows.targets, self.rows.lengths.sum()[None])
        output, self.remarks[Way.CONSTANT] = self._constants(everybody)
        return self._of_constants(output.expand(len(self.query), *output.shape[1:]))

    def alone(self, plan: Plan, constant: NDArray[np.float64]) -> tuple[NDArray[np.float64], str]:
        """Return the metric of clients outside the run, by the way that serves them best, and the reason to doubt it.

        They predict a constant, train alone with one of some step sizes, fit a ridge regression if the model is linear,
        or personalise an untrained hypothesis as they would personalise the run's. If the best way is a training, it
        goes on until more epochs hardly add to what it gains over the constant of all clients.
        """
        run, model = self.setup.config, self.setup.model
        constants, what = self._constants(self.support)
        found = {f"{what} of the client's rows": self._of_constants(constants)}
        trained = {f"step size {run.step_size / smaller:g}": smaller for smaller in SMALLER[: plan.sizes]}
        found |= {name: next(self._train_alone(smaller, plan)) for name, smaller in trained.items()}
        if (fitted := ridge(self.learner, self.support, self.query)) is not None:
            found["ridge regression, its penalty by leave-one-out"] = fitted
        if plan.how is not Personal.NO:
            first = draw_hypotheses(model, 1, run.seed, 0)
            found[f'personalise = "{plan.how}" of an untrained hypothesis'] = own(
                self.learner, self.support, self.query, first, run, plan.how
            )
        sign = 1 if model.metric.higher_is_better else -1
        gains = {name: float(np.nan_to_num(sign * metrics.mean(), nan=-math.inf)) for name, metrics in found.items()}
        best = max(gains, key=gains.__getitem__)
        metrics, remark, doubt = found[best], best, ""
        if best in trained:
            rest = itertools.islice(self._train_alone(trained[best], plan), 1, _LONGEST)
            for times, longer in enumerate(rest, 1):
                remark = f"{count_of(times * plan.epochs, 'epoch')} of {best}"
                gain, more = (
                    sign * float((after - before).mean()) for after, before in ((metrics, constant), (longer, metrics))
                )
                if not more > _RISES * abs(gain):
                    break
                metrics = longer
            else:
                doubt = f"since they still improved after {count_of(_LONGEST * plan.epochs, 'epoch')}"
        self.remarks[Way.ALONE] = f"{remark}, the best of {len(found)} ways"
        return metrics, doubt

    def _train_alone(self, smaller: float, plan: Plan) -> Iterator[NDArray[np.float64]]:
        return train_alone(self.learner, self.support, self.query, self.setup.config, smaller, plan.epochs)

    def _constants(self, cohort: Cohort) -> tuple[Tensor, str]:
        """Return the best constant outputs for the rows of each client (clients, outputs), and their description."""
        model, targets = self.setup.model, cohort.targets
        shape = look(model, tuple(cohort.features.shape[1:])).outputs
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

    def rules(self) -> dict[str, NDArray[np.float64]]:
        """Return the metric of the model's own baselines."""
        hook = self.setup.model.hooks.baselines
        if hook is None:
            return {}
        parts = [
            (one.features.cpu().numpy(), one.targets.cpu().numpy(), one.lengths)
            for one in (self.rows, self.support, self.query)
        ]
        return hook(parts[0], parts[1], parts[2], self.setup.model.metric.name)

    def _of(self, hypotheses: Arrays) -> NDArray[np.float64]:
        """Return the metric of each client's best hypothesis on its support rows."""
        learner, model = self.learner, self.setup.model
        if not model.local_shapes:
            return serve(learner, hypotheses, self.support, self.query)[1]
        fresh, step = model.initial_local(streams(_FRESH_SEED, "local", 0, range(len(self.support)))), self.setup.config
        chosen = best_hypothesis(learner.score_newcomers(hypotheses, self.support, fresh, step.step_size)[0])
        metrics = []
        for j in range(len(next(iter(hypotheses.values())))):
            one = {name: value[j : j + 1] for name, value in hypotheses.items()}
            local = learner.fit_local(one, self.support, fresh, step.step_size)
            metrics.append(learner.score(one, self.query, local)[1][0])
        return np.stack(metrics)[chosen, np.arange(len(chosen))]

    def one_model(self, rounds: int) -> Arrays:
        """Return the result of federated averaging without noise: with as many clients a round as the run, each
        once."""
        run, learner = self.setup.config, self.learner
        descent = descent_of(run.optimizer)
        update = LocalUpdate(run.local_epochs, run.step_size, run.batch_size, run.local_steps, descent=descent)
        model = draw_hypotheses(self.setup.model, 1, run.seed, 0)
        draw = streams(run.seed, "worth", 0, [1])[0]
        asked = min(run.clients_per_round, len(self.training))
        for number in range(1, rounds + 1):
            clients = np.sort(draw.choice(self.training, asked, replace=False)).tolist()
            cohort = Cohort.gather(self.dataset, clients, learner.device)
            shuffles = streams(run.seed, "shuffle", number, clients)
            trained, _ = learner.train(model, np.zeros(asked, np.int64), cohort, update, shuffles)
            model = {name: value.mean(0, dtype=np.float64, keepdims=True).astype(np.float32)
                     for name, value in trained.items()}  # fmt: skip
        return model


def _same(one: Arrays, other: Arrays) -> bool:
    return all(value.shape == other[name].shape and np.array_equal(value, other[name]) for name, value in one.items())
