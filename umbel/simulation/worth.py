"""Measures the worth of a finished run, if the rows of all clients are here (`umbel.server.worth`); its report.

The run is compared with other ways to serve the same clients. One that would take much longer than the run is left out,
and so is one whose result cannot be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.client.cohort import Cohort
from umbel.client.learner import LOOP, Learner, best_hypothesis
from umbel.client.personal.bayes import closed_form
from umbel.client.prediction import DEFAULT
from umbel.client.trial import try_out
from umbel.data import Dataset
from umbel.models.fit import traits_of
from umbel.models.losses import SLOPES
from umbel.models.prior import Prior
from umbel.privacy.mechanisms.randomness import streams
from umbel.privacy.site.policy import Personal
from umbel.protocol.arrays import Arrays, flatten, unflatten
from umbel.protocol.log import log
from umbel.protocol.words import count_of
from umbel.server.history import State, diverged
from umbel.server.report import View, render
from umbel.server.report.alarms import why_stuck
from umbel.server.run import Run, draw_hypotheses
from umbel.server.run_folder import RunFolder, number_of
from umbel.server.runs import find_run, opening
from umbel.server.setup import Setup
from umbel.server.summary import Summary
from umbel.server.worth import LABELS, Arm, LeftOut, Way, Worth
from umbel.simulation.baselines import LOCAL_EPOCHS, halves, own, ridge, serve, train_alone, worst_decile
from umbel.strategies import Callback
from umbel.strategies.differences import prior_of

MOST_CLIENTS, LEAST_CLIENTS = 1000, 10
"""Maximum number of measured clients, and the least for which a network is not too large to train by each."""
MOST, STEP = 2**25, 2**16
"""The most that one pass of clients over their rows may take, in numbers that their network holds or computes, and what
a step takes at least. A fit to all rows, of which there is one, may take four times as much."""
SMALL = 10_000
"""Numbers of a row up to which clients try all step sizes, and personalise by the method of predictions, if they can
train together."""
SMALLER = (1, 4, 16, 64)
"""Divisors of the run's step size for clients that train alone; the table has the best of them."""
STEPS = 100
"""Maximum number of steps of a fit to all rows."""
_LONGEST = 4  # trainings on end of clients alone, before they count as never settled
_RISES = 0.02  # share of their gain over a constant that one more training may add, if they have settled
_FEWEST, _STARTS = 3, 8  # fits: two may end at the same bad place
_SAME = 0.01  # share of a loss's fall by which two fits that reach the same may differ
_FRESH_SEED = 0  # of measured clients' initial local parameters
_ERRORS = 2.0  # standard errors, as of a normal distribution
_LOCAL, _LARGE = "since each client has its own local parameters", "since its network is too large for so many rows"
_BETTER, _ALIKE, _WORSE = "better than", "about as good as", "worse than"
_OTHERS = {Way.CONSTANT: "a constant", Way.ALONE: "each client alone", Way.POOLED: "all rows pooled"}


class Appraisal(Callback):
    """Measures the worth of a finished run, and logs it."""

    run: Run

    def at_end(self) -> None:
        """Measure it, if the run has a dataset here."""
        run = self.run
        if run.folder is None or run.setup.manifest is None:
            return
        if not run.setup.has_rows_of(run.folder.read_config()):
            log(WARNING, "The dataset has changed since the run began, so the run's worth is not measured.")
            return
        worth = appraise(run.setup, run.state, run.strategy.state)
        run.folder.write_worth(worth)
        for line in worth.lines():
            log(INFO, "%s", line)


def write_report(run: str | Path, baselines: bool = True) -> Path:
    """Write the report of a run, by its name or its folder, and return its path.

    With `baselines`, a missing measurement of the worth of a simulation, whose dataset is on this machine, is made and
    saved. Raises `ConfigError` if the folder holds no run with a finished round.
    """
    path = find_run(str(run))
    folder = RunFolder(path)
    with opening(path):
        config, setup = folder.read_run_config(), Setup.of_run(folder)
        state, spent, kept = folder.read(setup.model.shapes)
        folder.check_releases(spent, state.history)
        participations = np.zeros(setup.manifest.train if setup.manifest else max(spent, default=-1) + 1, np.int64)
        participations[list(spent)] = list(spent.values())
    state.stopped = state.stopped or "it was interrupted"
    worth = folder.read_worth()
    if worth is None or worth.rounds != len(state.history):
        worth = None
        if baselines and _same_data(folder, setup):
            worth = appraise(setup, state, kept)
            folder.write_worth(worth)
    view = View(path.name, Summary.of(setup), state, participations, config, worth)
    folder.write_report(render(view, folder.read_config()["versions"]))
    return path / "report.html"


def _same_data(folder: RunFolder, setup: Setup) -> bool:
    """Return whether a simulation's data are here unchanged: another dataset of the same name may be here."""
    nodes = folder.read_nodes() if (folder.path / "nodes.json").exists() else []
    if setup.manifest is None or not all(hosting.simulated for _, hosting in nodes):
        return False
    return bool(folder.read_config().get("data") == setup.digests["data"])


@dataclass(frozen=True)
class Row:
    """The metric of each client (clients,) by one way, and how it was made, if the way's name does not say so."""

    way: Way
    metrics: NDArray[np.float64]
    remark: str = ""
    label: str = ""


def appraise(setup: Setup, state: State, kept: Arrays) -> Worth:
    """Return the worth of a finished run for validation clients, each measured on half of its rows.

    The state that the strategy kept may tell how clients differ.
    """
    dataset, metric, summary = setup.open_dataset(), setup.model.metric, Summary.of(setup)
    assert dataset is not None, "a simulated run names one"
    ways = Ways(setup, dataset, state, prior_of(kept, number_of(state.hypotheses)))
    factor, found = abs(summary.metric_factor), list[Row | LeftOut]()
    worth_it, verdict = False, "Not known: no validation client has two rows, one to choose and one to measure."
    if ways.clients:
        found = ways.compare()
        gains = {row.way: row.metrics * ways.sign for row in found if isinstance(row, Row)}
        fault = why_stuck(state.history).partition(".")[0]
        if diverged(state.history) or not np.isfinite(gains[Way.LAST]).all():
            fault = fault or "it diverged, as the last loss is several times the lowest, or not finite"
        worth_it, verdict = (False, f"No: {fault}.") if fault else judge(gains)

    def arm(row: Row) -> Arm:
        worst = worst_decile(row.metrics, metric.higher_is_better)
        mean, worst_tenth = (_rounded(value * factor) for value in (row.metrics.mean(), worst))
        return Arm(row.way, row.label or LABELS[row.way], mean, worst_tenth, row.remark)

    return Worth(
        metric="RMSE" if metric.name == "rmse" else metric.name,
        unit=summary.scale[1],
        higher_is_better=metric.higher_is_better,
        clients=len(ways.clients),
        arms=[arm(row) for row in found if isinstance(row, Row)],
        left_out=[row for row in found if isinstance(row, LeftOut)],
        worth_it=worth_it,
        verdict=verdict,
        rounds=len(state.history),
    )


def _rounded(value: float) -> float | None:
    """Return six digits: the others depend on the number of nodes."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def judge(gains: Mapping[Way, NDArray[np.float64]]) -> tuple[bool, str]:
    """Return whether a run is better than a constant and than each client alone, and a sentence that compares it.

    This judges the predictors that clients would use: the personalised hypotheses, or the plain ones if those were not
    measured. A gain is the metric of each client (clients,), negated if lower is better.
    """
    run = gains[Way.OWN if Way.OWN in gains else Way.LAST]
    beside = {way: _compared(run, gains[way]) for way in _OTHERS if way in gains}
    needed = {relation for way, relation in beside.items() if way is not Way.POOLED}
    answer = "Yes" if needed == {_BETTER} else "No" if _WORSE in needed else "Not shown"
    *first, last = (f"{relation} {_OTHERS[way]}" for way, relation in beside.items())
    return answer == "Yes", f"{answer}: it is {', '.join(first)}{' and ' if first else ''}{last}."


def _compared(one: NDArray[np.float64], other: NDArray[np.float64]) -> str:
    """Return whether one way gains more or less than another, by twice the standard error over many clients.

    With few clients the factor is larger: Student's t distribution gives it for the same certainty. A single client
    shows nothing.
    """
    from scipy.special import ndtr, stdtrit  # the import takes a moment

    difference = one - other
    if len(difference) < 2:
        return _ALIKE
    chance = stdtrit(len(difference) - 1, ndtr(_ERRORS)) * difference.std(ddof=1) / math.sqrt(len(difference))
    return _BETTER if difference.mean() > chance else _WORSE if difference.mean() < -chance else _ALIKE


class Ways:
    """The ways to serve clients that are compared, each measured on the query rows of the same clients."""

    def __init__(self, setup: Setup, dataset: Dataset, state: State, prior: Prior | None = None) -> None:
        self.run, self.model, self.dataset, self.state, self.prior = setup.config, setup.model, dataset, state, prior
        self.sign = 1 if self.model.metric.higher_is_better else -1
        # How many numbers a network holds, and computes for a row.
        held = sum(parameter.numel() for parameter in self.model.module.parameters())
        self.numbers = held + traits_of(self.model, dataset.features.shape[1:]).activations
        self.clients = measured(dataset, self.run.seed, MOST // self.numbers)
        if self.clients:
            self.learner = try_out(self.model, dataset, self.run.device)
            cohort = Cohort.gather(dataset, self.clients, self.learner.device)
            self.support, self.query = halves(cohort, self.run.seed)

    def compare(self) -> list[Row | LeftOut]:
        """Return the result of each way, or the reason why the table lacks it."""
        constant, last = self.constant(), Row(Way.LAST, self._of(self.state.hypotheses))
        return [constant, *self.rules(), self.alone(constant.metrics), self.pooled(), last, *self.best(), self.own()]

    @cached_property
    def rows(self) -> Cohort:
        """The rows of the training clients, none of which is measured."""
        return Cohort.gather(self.dataset, range(self.dataset.manifest.train), self.learner.device)

    @cached_property
    def trains(self) -> bool:
        """Whether the network is small enough for each client's own training."""
        longest, batch = int(self.support.lengths.max()), self.run.batch_size
        steps = -(-longest // batch) if batch else 1
        return max(len(self.support.features) * self.numbers, steps * STEP) <= MOST

    @property
    def small(self) -> bool:
        """Whether clients try all step sizes, and the method of predictions, which trains a model six times."""
        return self.numbers <= SMALL and self.learner.engine != LOOP

    @property
    def _how(self) -> Personal:
        return DEFAULT if self.small else Personal.MIXTURE

    def constant(self) -> Row:
        """Measure a single output for all rows, the best for training clients' rows."""
        everybody = Cohort(self.rows.features, self.rows.targets, self.rows.lengths.sum()[None])
        output, what = self._constants(everybody)
        return Row(Way.CONSTANT, self._of_constants(output.expand(len(self.query), *output.shape[1:])), what)

    def rules(self) -> list[Row]:
        """Measure the model's own baselines."""
        hook = self.model.hooks.baselines
        if hook is None:
            return []
        train, support, query = (
            (rows.features.cpu().numpy(), rows.targets.cpu().numpy(), rows.lengths)
            for rows in (self.rows, self.support, self.query)
        )
        found = hook(train, support, query, self.model.metric.name)
        return [Row(Way.RULE, metrics, label=f"rule: {name}") for name, metrics in found.items()]

    def alone(self, constant: NDArray[np.float64]) -> Row | LeftOut:
        """Measure clients outside the run by the way that serves them best.

        They predict a constant, train alone with one of some step sizes, fit a ridge regression if the model is linear,
        or personalise an untrained hypothesis as they would personalise the run's. If the best way is a training, it
        continues until more epochs hardly add to what it gains over the constant of all clients.
        """
        if not self.trains:
            return LeftOut(LABELS[Way.ALONE], _LARGE)
        constants, what = self._constants(self.support)
        found = {f"{what} of the client's rows": self._of_constants(constants)}
        trained = {
            f"step size {self.run.step_size / by:g}": train_alone(self.learner, self.support, self.query, self.run, by)
            for by in SMALLER[: None if self.small else 1]
        }
        found |= {name: next(training) for name, training in trained.items()}
        if (fitted := ridge(self.learner, self.support, self.query)) is not None:
            found["ridge regression, its penalty by leave-one-out"] = fitted
        if not self.model.local_shapes:
            first = draw_hypotheses(self.model, 1, self.run.seed, 0)
            found[f'personalise = "{self._how}" of an untrained hypothesis'] = self._made_own(first)
        gains = {name: np.nan_to_num(self.sign * metrics.mean(), nan=-math.inf) for name, metrics in found.items()}
        best = max(gains, key=gains.__getitem__)
        metrics, remark = found[best], best
        if best in trained:
            for times in range(1, _LONGEST):
                remark, longer = f"{count_of(times * LOCAL_EPOCHS, 'epoch')} of {best}", next(trained[best])
                if not self.sign * (longer - metrics).mean() > _RISES * abs((metrics - constant).mean()):
                    break
                metrics = longer
            else:
                why = f"since they still improved after {count_of(_LONGEST * LOCAL_EPOCHS, 'epoch')}"
                return LeftOut(LABELS[Way.ALONE], why)
        return Row(Way.ALONE, metrics, f"{remark}, the best of {len(found)} ways")

    def pooled(self) -> Row | LeftOut:
        """Measure one model of all training clients' rows, if it is likely to be the best."""
        fits = len(self.rows.features) * self.numbers <= 4 * MOST
        why = _LOCAL if self.model.local_shapes else "" if fits else _LARGE
        if traits_of(self.model, self.rows.shape).draws or self.model.batch_dependent:
            why = why or "since its loss of all rows at once is not that of training"
        if not why:
            fitted, why = fit_pooled(self.learner, self.rows, self.run.seed, self.state.hypotheses)
        return LeftOut(LABELS[Way.POOLED], why) if why else Row(Way.POOLED, self._of(fitted), "fitted by L-BFGS")

    def best(self) -> list[Row]:
        """Measure the best round's hypotheses, if they are others than the last round's."""
        state = self.state
        if all(np.array_equal(one, state.hypotheses[name]) for name, one in state.best.items()):
            return []
        exact = any(entry.exact_reports for entry in state.history)
        chosen = "exact losses of validation clients" if exact else "validation clients"
        remark = f"after {count_of(state.best_round, 'round')}, chosen by {chosen}"
        return [Row(Way.BEST, self._of(state.best), remark)]

    def own(self) -> Row | LeftOut:
        """Measure the run's hypotheses, personalised by each client."""
        local = self.model.local_shapes
        if local or not self.trains:
            return LeftOut(LABELS[Way.OWN], _LOCAL if local else _LARGE)
        return Row(Way.OWN, self._made_own(self.state.hypotheses, self.prior), f'personalise = "{self._how}"')

    def _made_own(self, hypotheses: Arrays, prior: Prior | None = None) -> NDArray[np.float64]:
        return own(self.learner, self.support, self.query, hypotheses, self.run, self._how, prior=prior)

    def _constants(self, cohort: Cohort) -> tuple[Tensor, str]:
        """Return the best constant outputs for the rows of each client (clients, outputs), and their description."""
        model, targets = self.model, cohort.targets
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
        metric, query = self.model.metric, self.query
        lengths = torch.from_numpy(query.lengths).to(outputs.device)
        rows = metric.of_rows(outputs.float().repeat_interleave(lengths, 0), query.targets).double().cpu().numpy()
        means = np.add.reduceat(rows, query.starts) / query.lengths
        return np.asarray(metric.report(torch.from_numpy(means)).numpy())

    def _of(self, hypotheses: Arrays) -> NDArray[np.float64]:
        """Return the metric of each client's best hypothesis on its support rows."""
        learner, step_size = self.learner, self.run.step_size
        if not self.model.local_shapes:
            return serve(learner, hypotheses, self.support, self.query)[1]
        shared = learner.tensors(hypotheses)
        fresh = learner.tensors(self.model.initial_local(streams(_FRESH_SEED, "local", 0, range(len(self.support)))))
        chosen = best_hypothesis(learner.score_newcomers(shared, self.support, fresh, step_size)[0])
        metrics = []
        for j in range(number_of(hypotheses)):
            one = {name: value[j : j + 1] for name, value in shared.items()}
            local = learner.fit_local(one, self.support, fresh, step_size)
            metrics.append(learner.score(one, self.query, local)[1][0])
        return np.stack(metrics)[chosen, np.arange(len(chosen))]


def measured(dataset: Dataset, seed: int, rows: int) -> list[int]:
    """Return validation clients that have two rows or more, drawn at random: as many as train on so many rows.

    If these would be too few, clients will not be measured alone, so that all may be drawn.
    """
    several = np.flatnonzero(dataset.lengths > 1)
    drawn = streams(seed, "worth", 0, [0])[0].permutation(several[several >= dataset.manifest.train])
    fitting = int((np.cumsum(-(-dataset.lengths[drawn] // 2)) <= rows).sum())
    most = fitting if fitting >= LEAST_CLIENTS else len(drawn)
    return sorted(drawn[: min(most, MOST_CLIENTS)].tolist())


def fit_pooled(learner: Learner, rows: Cohort, seed: int, others: Arrays) -> tuple[Arrays, str]:
    """Fit one model to the rows of all clients; return it, and the reason to doubt that it is the best, if any.

    A fit may stop early, or end where no small step helps, such as at a network whose units are all off. So there are
    several, from different starts. The lowest loss is believed if two fits reach it, and if no hypothesis of the run
    fits the same rows better: these are the `others`, each (k, \\*shape).
    """
    from scipy.optimize import minimize  # the import takes a third of a second

    together = Cohort(rows.features, rows.targets, rows.lengths.sum()[None])

    def objective(vector: NDArray[Any]) -> tuple[float, NDArray[np.float64]]:
        """Return the loss of a vector of parameters, with its gradient."""
        model: dict[str, Tensor] = {
            name: torch.from_numpy(value[0]).to(learner.device).requires_grad_()
            for name, value in unflatten(vector[None], others).items()
        }
        loss = learner.objective(model, together)
        slopes = torch.autograd.grad(loss, list(model.values()))
        return float(loss.detach()), np.concatenate([slope.double().cpu().numpy().ravel() for slope in slopes])

    ready = flatten(others)
    losses = [objective(vector)[0] for vector in ready]
    least = min(filter(math.isfinite, losses), default=math.inf)
    drawn = flatten(draw_hypotheses(learner.model, _STARTS, seed, 0))
    starts = [*drawn[:_FEWEST], *([ready[losses.index(least)]] if math.isfinite(least) else []), *drawn[_FEWEST:]]
    one_minimum, fits = learner.model.linear or closed_form(learner.model), list[Any]()

    def reaches(start: float, end: float, loss: float) -> bool:
        return end <= loss + _SAME * abs(start - end)

    for start in starts:
        end = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": STEPS})
        fits.append((objective(start)[0], end))
        begun, best = min(fits, key=lambda fit: fit[1].fun if math.isfinite(fit[1].fun) else math.inf)
        agree = len(fits) >= _FEWEST and sum(reaches(before, fit.fun, best.fun) for before, fit in fits) > 1
        if (agree or (one_minimum and best.success)) and reaches(begun, best.fun, least):
            return unflatten(best.x[None], others), ""
    return unflatten(best.x[None], others), f"since {count_of(len(fits), 'fit')} did not show which loss is the lowest"
