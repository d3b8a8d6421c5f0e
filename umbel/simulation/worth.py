"""Measures the worth of a finished run, if the rows of all clients are here (`umbel.server.worth`); its report.

The run is compared with other ways to serve the same clients. One that would take much longer than the run is left out,
and so is one whose result cannot be trusted.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
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
from umbel.client.personal.predictors import Predictors, hypothesis_outputs, means, row_scores
from umbel.client.prediction import DEFAULT, class_names
from umbel.client.trial import try_out
from umbel.data import Dataset
from umbel.data.leaks import telling
from umbel.models.fit import traits_of
from umbel.models.losses import PROBABLE, SLOPES, of_classes
from umbel.models.prior import Prior
from umbel.privacy.mechanisms.randomness import streams
from umbel.privacy.site.policy import Personal
from umbel.protocol.arrays import Arrays, flatten, unflatten
from umbel.protocol.log import log
from umbel.protocol.logs import Progress
from umbel.protocol.words import after_round, count_of
from umbel.server.history import State, diverged, shares_of
from umbel.server.report import View, render
from umbel.server.report.alarms import why_stuck
from umbel.server.run import Run, draw_hypotheses
from umbel.server.run_folder import RunFolder, number_of
from umbel.server.runs import find_run, opening
from umbel.server.setup import Setup
from umbel.server.summary import Summary
from umbel.server.worth import LABELS, OWN_WAYS, Arm, LeftOut, Score, Way, Worth, figure
from umbel.simulation.baselines import LOCAL_EPOCHS, halves, own, ridge, serve, train_alone, worst_decile
from umbel.simulation.pilots import changes_for, pilot
from umbel.simulation.scores import AUC, chance, jackknifed
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
_RARE = 0.2  # share of rows of the rarer of two classes below which the order of rows is judged, not the accuracy
_PERFECT, _EXACT = 0.999, 0.01  # an accuracy or AUC, and an RMSE relative to a constant's, that are suspiciously good
_LOCAL, _LARGE = "since each client has its own local parameters", "since its network is too large for so many rows"
_BETTER, _ALIKE, _WORSE = "better than", "not shown to differ from", "worse than"
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
        worth = appraise(run.setup, run.state, run.strategy.state, run.folder.path)
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
    if worth is None or worth.history != len(state.history):
        worth = None
        if baselines and _same_data(folder, setup):
            worth = appraise(setup, state, kept, path)
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
class Figures:
    """What clients get by one way to serve them."""

    metrics: NDArray[np.float64]  # (clients,)
    scores: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)  # (1 + clients,), see `jackknifed`
    only: int | None = None  # the class that is predicted for every row, if there is just one


@dataclass(frozen=True)
class Row:
    """The figures of one way, and how it was made, if the way's name does not say so."""

    way: Way
    figures: Figures
    remark: str = ""
    label: str = ""

    @property
    def metrics(self) -> NDArray[np.float64]:
        """The metric of each client, (clients,)."""
        return self.figures.metrics


def appraise(setup: Setup, state: State, kept: Arrays, folder: Path | None = None) -> Worth:
    """Return the worth of a finished run for validation clients, each measured on half of its rows.

    The state that the strategy kept may tell how clients differ. With the run's folder, some other settings are tried,
    and the best that serves clients better is advised.
    """
    dataset, metric, summary = setup.open_dataset(), setup.model.metric, Summary.of(setup)
    assert dataset is not None, "a simulated run names one"
    ways = Ways(setup, dataset, state, prior_of(kept, number_of(state.hypotheses)))
    name, factor = "RMSE" if metric.name == "rmse" else metric.name, abs(summary.metric_factor)
    found, advice = list[Row | LeftOut](), ""
    worth_it, verdict = False, "Not known: no validation client has two rows, one to choose and one to measure."
    if ways.clients:
        found = ways.compare()
        rows = {row.way: row.figures for row in found if isinstance(row, Row) and not row.label}
        fault = why_stuck(state.history).partition(".")[0]
        if diverged(state.history) or not np.isfinite(rows[Way.LAST].metrics).all():
            fault = fault or "it diverged, as the last loss is several times the lowest, or not finite"
        worth_it, verdict = (
            (False, f"No: {fault}.") if fault else judge({way: ways.gains(one) for way, one in rows.items()})
        )
        verdict = " ".join([verdict, *ways.caveats(rows, not fault)])
        if folder and (better := ways.advice(rows, factor)):
            command = f"umbel run {shlex.quote(str(folder / 'config.toml'))}"
            advice = f"Tried, and better: {name if ways.rare is None else AUC} {better.format(command)}"

    def arm(row: Row) -> Arm:
        worst = worst_decile(row.metrics, metric.higher_is_better)
        mean, worst_tenth = (_rounded(value * factor) for value in (row.metrics.mean(), worst))
        scores = [Score(name, _rounded(own[0]), _rounded(chance(own[1:]))) for name, own in row.figures.scores.items()]
        return Arm(row.way, row.label or LABELS[row.way], mean, worst_tenth, row.remark, scores)

    return Worth(
        metric=name,
        unit=summary.scale[1],
        higher_is_better=metric.higher_is_better,
        clients=len(ways.clients),
        arms=[arm(row) for row in found if isinstance(row, Row)],
        left_out=[row for row in found if isinstance(row, LeftOut)],
        worth_it=worth_it,
        verdict=verdict,
        history=len(state.history),
        advice=advice,
    )


def _rounded(value: float) -> float | None:
    """Return six digits: the others depend on the number of nodes."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def judge(gains: Mapping[Way, NDArray[np.float64]]) -> tuple[bool, str]:
    """Return whether a run is better than a constant and than each client alone, and a sentence that compares it.

    This judges what predictions use. A gain is the metric of each client (clients,), negated if lower is better.
    """
    run = gains[_used(gains)]
    if len(run) == 1:
        more = "with more of them, as by umbel data import --validation 0.5, chance can be told from a difference"
        return False, f"Not shown, because there is one validation client; {more}."
    beside = {way: _compared(run, gains[way]) for way in _OTHERS if way in gains}
    needed = {relation for way, relation in beside.items() if way is not Way.POOLED}
    answer = "Yes" if needed == {_BETTER} else "No" if _WORSE in needed else "Not shown"
    *first, last = (f"{relation} {_OTHERS[way]}" for way, relation in beside.items())
    return answer == "Yes", f"{answer}: it is {', '.join(first)}{' and ' if first else ''}{last}."


def _used(measured: Container[Way]) -> Way:
    """Return the way in which predictions are made, or the one nearest to it that was measured."""
    return next(way for way in OWN_WAYS if way in measured)


def _compared(one: NDArray[np.float64], other: NDArray[np.float64]) -> str:
    """Return whether one way gains more or less than another, beyond chance; a single client shows nothing."""
    difference = one - other
    error = chance(difference)
    return _BETTER if difference.mean() > error else _WORSE if difference.mean() < -error else _ALIKE


class Ways:
    """The ways to serve clients that are compared, each measured on the query rows of the same clients."""

    def __init__(self, setup: Setup, dataset: Dataset, state: State, prior: Prior | None = None) -> None:
        self.setup, self.tried = setup, list[tuple[dict[str, Any], Run]]()
        self.rounds = max((entry.number for entry in state.history if entry.asked), default=0)
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
        _tell("training clients alone")
        alone = self.alone(constant.figures)
        _tell("fitting all rows pooled")
        others = [constant, *self.rules(), alone, self.pooled(), *self.one_model(), *self.newcomers()]
        return [*others, last, *self.best(), *self.own()]

    @cached_property
    def labels(self) -> NDArray[np.int64] | None:
        """The class of each measured row; None for numbers, several classes a row, and a model of local parameters."""
        outputs, targets = traits_of(self.model, self.query.shape).outputs, self.query.targets
        whole = outputs[-1] > 1 and not targets.is_floating_point()
        scored = whole or self.model.loss.name in SLOPES or self.model.metric.name == "accuracy"
        if self.model.local_shapes or len(outputs) > 1 or targets.ndim > 1 or not scored:
            return None
        return np.asarray((targets if whole else targets > 0).cpu().numpy(), np.int64)

    @cached_property
    def rare(self) -> int | None:
        """The rarer of two classes, if a constant has a high accuracy for want of its rows; else None.

        Where a single client has all rows of a class, AUC has no interval, so that it cannot judge.
        """
        if self.labels is None or traits_of(self.model, self.query.shape).outputs[-1] > 2:
            return None
        owner = np.repeat(np.arange(len(self.query)), self.query.lengths)
        counts, least = np.bincount(self.labels, minlength=2), int(self.labels.mean() < 0.5)
        spread = min(len(np.unique(owner[self.labels == one])) for one in (0, 1))
        return least if spread > 1 and counts[least] < _RARE * counts.sum() else None

    def measure(self, outputs: Tensor) -> Figures:
        r"""Return the figures of outputs for the measured rows, (rows, \*output shape)."""
        metric, lengths = self.model.metric, self.query.lengths
        rows = torch.from_numpy(means(row_scores(metric, outputs[None], self.query)[0], lengths))
        metrics = np.asarray(metric.report(rows).numpy())
        if self.labels is None:
            return Figures(metrics)
        values = of_classes(outputs).double().cpu().numpy()
        predicted = values.argmax(1)
        scores = jackknifed(values, self.labels, lengths, self.model.loss.name in PROBABLE)
        return Figures(metrics, scores, int(predicted[0]) if (predicted == predicted[0]).all() else None)

    def gains(self, figures: Figures) -> NDArray[np.float64]:
        """Return what each client gains by a way, (clients,); more is better."""
        return self.sign * figures.metrics if self.rare is None else figures.scores[AUC][1:]

    @cached_property
    def rows(self) -> Cohort:
        """The rows of the training clients, none of which is measured."""
        return Cohort.gather(self.dataset, range(self.dataset.manifest.train), self.learner.device)

    @property
    def ends_best(self) -> bool:
        """Whether the best round's hypotheses, with which clients predict, are the last round's."""
        last = self.state.hypotheses
        return all(np.array_equal(one, last[name]) for name, one in self.state.best.items())

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
        return [Row(Way.RULE, Figures(metrics), label=f"rule: {name}") for name, metrics in found.items()]

    def alone(self, constant: Figures) -> Row | LeftOut:
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
            f"step size {self.run.step_size / by:g}": map(
                self._with, train_alone(self.learner, self.support, self.run, by)
            )
            for by in SMALLER[: None if self.small else 1]
        }
        found |= {name: next(training) for name, training in trained.items()}
        if (fitted := ridge(self.learner, self.support)) is not None:
            found["ridge regression, its penalty by leave-one-out"] = self._with(fitted)
        if not self.model.local_shapes:
            first = draw_hypotheses(self.model, 1, self.run.seed, 0)
            found[f'personalise = "{self._how}" of an untrained hypothesis'] = self._made_own(first)
        gains = {name: np.nan_to_num(self.gains(one).mean(), nan=-math.inf) for name, one in found.items()}
        best = max(gains, key=gains.__getitem__)
        figures, remark = found[best], best
        if best in trained:
            for times in range(1, _LONGEST):
                remark, longer = f"{count_of(times * LOCAL_EPOCHS, 'epoch')} of {best}", next(trained[best])
                gain = self.gains(figures)
                if not (self.gains(longer) - gain).mean() > _RISES * abs((gain - self.gains(constant)).mean()):
                    break
                figures = longer
            else:
                why = f"since they still improved after {count_of(_LONGEST * LOCAL_EPOCHS, 'epoch')}"
                return LeftOut(LABELS[Way.ALONE], why)
        return Row(Way.ALONE, figures, f"{remark}, the best of {len(found)} ways")

    def pooled(self) -> Row | LeftOut:
        """Measure one model of all training clients' rows, if it is likely to be the best."""
        fits = len(self.rows.features) * self.numbers <= 4 * MOST
        why = _LOCAL if self.model.local_shapes else "" if fits else _LARGE
        if traits_of(self.model, self.rows.shape).draws or self.model.batch_dependent:
            why = why or "since its loss of all rows at once is not that of training"
        if not why:
            fitted, why = fit_pooled(self.learner, self.rows, self.run.seed, self.state.hypotheses)
        return LeftOut(LABELS[Way.POOLED], why) if why else Row(Way.POOLED, self._of(fitted), "fitted by L-BFGS")

    def one_model(self) -> list[Row | LeftOut]:
        """Measure a run of a single hypothesis, if this one has several."""
        if number_of(self.state.hypotheses) == 1:
            return []
        found = self._try({"hypotheses": 1})
        if isinstance(found, str):
            return [LeftOut(LABELS[Way.ONE], found)]
        return [Row(Way.ONE, self._of(found.state.hypotheses), "this run with hypotheses = 1")]

    def newcomers(self) -> list[Row]:
        """Measure clients without a labelled row, which predict by the mean of several hypotheses."""
        state, k = self.state, number_of(self.state.best)
        if k == 1 or self.model.local_shapes or not self.trains:
            return []
        outputs = traits_of(self.model, self.query.shape).outputs[-1]
        shares = shares_of(state.history, state.best_round, k)
        mean = Predictors.weighted(len(self.query), state.best, outputs, shares)
        return [Row(Way.NEW, self._with(mean), "the mean of the hypotheses, weighted by their releases")]

    def best(self) -> list[Row]:
        """Measure the best round's hypotheses, if they are others than the last round's."""
        state = self.state
        if self.ends_best:
            return []
        exact = any(entry.exact_reports for entry in state.history)
        chosen = "exact losses of validation clients" if exact else "validation clients"
        remark = f"{after_round(state.best_round)}, chosen by {chosen}"
        return [Row(Way.BEST, self._of(state.best), remark)]

    def own(self) -> list[Row | LeftOut]:
        """Measure the run's hypotheses, personalised by each client: the last round's, and the best round's if they are
        others."""
        local, remark = self.model.local_shapes, f'personalise = "{self._how}"'
        if local or not self.trains:
            return [LeftOut(LABELS[Way.OWN], _LOCAL if local else _LARGE)]
        last = Row(Way.OWN, self._made_own(self.state.hypotheses, self.prior), remark)
        if self.ends_best:
            return [last]
        return [last, Row(Way.USED, self._made_own(self.state.best, self.prior), f"{remark}, as predictions do")]

    def caveats(self, rows: Mapping[Way, Figures], compared: bool) -> list[str]:
        """Return what to know about the run's figures besides how they are `compared` with others, as sentences."""
        run, manifest, found = rows[_used(rows)], self.dataset.manifest, list[str]()
        if self.labels is not None:
            counts = np.bincount(self.labels, minlength=1 + (run.only or 1))
            names = class_names(manifest.target.get("categories", []), len(counts))
            if self.rare is not None and compared:
                share = counts[self.rare] / counts.sum()
                of = f"{share:.1%} of the measured rows are of class {names[self.rare]}"
                found.append(f"AUC decides that, because only {of}.")
            if run.only is not None:
                which = "the majority class" if run.only == counts.argmax() else "the class"
                instead = "; use the probabilities instead" if "log loss" in run.scores else ""
                found.append(f"The run predicts only {which}, {names[run.only]}, for every row{instead}.")
        means, metric = {way: one.metrics.mean() for way, one in rows.items()}, self.model.metric
        bad = means[Way.CONSTANT]
        exact = {way for way in rows if metric.name == "rmse" and means[way] < _EXACT * bad}
        exact |= {way for way in rows if metric.share and means[way] >= _PERFECT > bad}
        exact |= {way for way, one in rows.items() if one.scores.get(AUC, [0.0])[0] >= _PERFECT}
        named = [one["name"] for one in manifest.units.get("features", [])]
        column = telling(self.rows.features.cpu().numpy(), self.rows.targets.cpu().numpy(), named)
        cause = f"column {column}, which alone nearly predicts the target" if column else "the cause"
        if perfect := [LABELS[way] for way in rows if way in exact]:
            found.append(f"Too good to be true, because {perfect[0]} is nearly perfect: look at {cause}.")
        elif column:
            found.append(f"Look at {cause}.")
        if perfect or column:
            found.append("What is known only after the target gives the answer away; import the data without it.")
        return found

    def advice(self, rows: Mapping[Way, Figures], factor: float) -> str:
        """Try some other settings, and say what the best that serves clients better gives; empty if none does.

        Clients are served as for the verdict, and the same clients are measured.
        """
        state, run, fitted = self.state, rows[_used(rows)], Way.OWN in rows
        differ = fitted and _compared(self.gains(rows[Way.OWN]), self.gains(rows[Way.LAST])) == _BETTER
        for changes in changes_for(self.run, self.rounds, number_of(state.hypotheses), differ, self.ends_best):
            self._try(changes)
        found = []
        for changes, other in self.tried:
            ended, kept = other.state.hypotheses, other.strategy.state
            one = self._made_own(ended, prior_of(kept, number_of(ended))) if fitted else self._of(ended)
            if _compared(self.gains(one), self.gains(run)) == _BETTER:
                found.append((self.gains(one).mean(), one, changes))
        if not found:
            return ""
        _, best, changes = max(found, key=lambda one: one[0])
        ((key, value),) = changes.items()
        then, now = (one.metrics.mean() * factor if self.rare is None else one.scores[AUC][0] for one in (best, run))
        return f"{figure(then)} instead of {figure(now)}, with {{}} {key}={value}"

    def _try(self, changes: dict[str, Any]) -> Run | str:
        _tell("trying " + ", ".join(f"{key}={value}" for key, value in changes.items()))
        found = pilot(self.setup, self.dataset, self.rounds, self.numbers, changes)
        if isinstance(found, Run):
            self.tried.append((changes, found))
        return found

    def _with(self, made: Predictors) -> Figures:
        return self.measure(made.outputs(self.learner, self.query))

    def _made_own(self, hypotheses: Arrays, prior: Prior | None = None) -> Figures:
        return self._with(own(self.learner, self.support, hypotheses, self.run, self._how, prior=prior))

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
        if model.metric.name == "accuracy" or model.loss.name in SLOPES:
            share = mean(targets.flatten() > 0).clamp(1e-6, 1 - 1e-6)
            odds = (share / (1 - share)).log()
            return odds.where(odds != 0, 1e-6).reshape(-1, *shape), "the most frequent label"
        return mean(targets).reshape(-1, *shape), "the mean"

    def _of_constants(self, outputs: Tensor) -> Figures:
        """Return the figures of constant outputs (clients, outputs)."""
        lengths = torch.from_numpy(self.query.lengths).to(outputs.device)
        return self.measure(outputs.float().repeat_interleave(lengths, 0))

    def _of(self, hypotheses: Arrays) -> Figures:
        """Return the figures of each client's best hypothesis on its support rows."""
        learner, step_size = self.learner, self.run.step_size
        if self.labels is not None:
            chosen = learner.choose(learner.tensors(hypotheses), self.support).numpy()
            outputs, owner = hypothesis_outputs(learner, hypotheses, self.query), np.repeat(chosen, self.query.lengths)
            return self.measure(outputs[owner, np.arange(len(owner))])
        if not self.model.local_shapes:  # outputs of many numbers, as the next tokens, are measured some at a time
            return Figures(serve(learner, hypotheses, self.support, self.query)[1])
        shared = learner.tensors(hypotheses)
        fresh = learner.tensors(self.model.initial_local(streams(_FRESH_SEED, "local", 0, range(len(self.support)))))
        chosen = best_hypothesis(learner.score_newcomers(shared, self.support, fresh, step_size)[0])
        metrics = []
        for j in range(number_of(hypotheses)):
            one = {name: value[j : j + 1] for name, value in shared.items()}
            local = learner.fit_local(one, self.support, fresh, step_size)
            metrics.append(learner.score(one, self.query, local)[1][0])
        return Figures(np.stack(metrics)[chosen, np.arange(len(chosen))])


def _tell(what: str) -> None:
    """Log what takes its time after the rounds."""
    log(INFO, "Measuring the result: %s", what, extra={"progress": Progress(f"measuring the result: {what}")})


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
