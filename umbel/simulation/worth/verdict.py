"""The table of a run's worth, and its verdict."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

from umbel.client.prediction import DEFAULT
from umbel.privacy.accounting.guarantee import MEANINGFUL
from umbel.privacy.gate.policy import Personal
from umbel.protocol.words import count_of
from umbel.server.history import Round, State, diverged
from umbel.server.setup import Setup
from umbel.server.summary import Summary, why_stuck
from umbel.server.worth import LABELS, Arm, LeftOut, Level, Way, Worth, figure
from umbel.simulation.baselines import worst_decile
from umbel.simulation.worth.plan import Plan

_CERTAIN = float(ndtr(2.0))  # 97.7 %: two standard errors of a normal distribution
_FALLS = 0.001  # of a loss's whole fall, in the last tenth of the rounds: four times as many gain by that
_SAME = 0.001  # of a gain over a constant, below which two ways are alike
CLOSE = 0.1
"""Share of the gain of pooled rows over a constant that a close run may lack."""


def table(
    setup: Setup,
    state: State,
    found: Mapping[tuple[Way, str], NDArray[np.float64]],
    plan: Plan,
    remarks: Mapping[Way, str],
    left_out: Mapping[Way, str],
    whose: str,
) -> Worth:
    """Return the table of each way's metric (clients,), by the way and its label, with the verdict."""
    summary = Summary.of(setup)
    factor, metric = abs(summary.metric_factor), setup.model.metric
    arms = [
        Arm(way, label, _rounded(values.mean() * factor),
            _rounded(worst_decile(values, metric.higher_is_better) * factor), remarks.get(way, ""))
        for (way, label), values in found.items()
    ]  # fmt: skip
    gains = {way: values if metric.higher_is_better else -values for (way, _), values in found.items()}
    level, verdict = judge(gains, diverged(state.history), why_stuck(state.history))
    verdict += within_chance(level, gains) + as_it_is(level, gains) + by_another(gains, plan.how)
    if level is Level.NOT_BETTER_THAN_ALONE and too_unlike(gains):
        verdict += " Even all rows pooled are behind each client alone: clients differ too much for one model."
    unit = summary.scale[1]
    told = judged(gains), Way.CONSTANT, Way.ALONE, Way.POOLED
    beside = [
        f"{arm.label}: {figure(arm.mean)}{f' {unit}' if unit else ''}" for way in told for arm in arms if arm.way is way
    ]
    return Worth(
        metric="RMSE" if metric.name == "rmse" else metric.name,
        unit=unit,
        higher_is_better=metric.higher_is_better,
        clients=len(next(iter(found.values()))),
        whose=whose,
        arms=arms,
        left_out=[LeftOut(LABELS[way], why) for way, why in left_out.items()],
        level=level,
        verdict=f"{verdict} Means: {'; '.join(beside)}.",
        tries=tries(level, setup, state.history, gains),
        share=round(plan.share, 4),
        rounds=len(state.history),
    )


def not_measured(setup: Setup, state: State) -> Worth:
    """Return the result if no rows are left to measure a run on."""
    if setup.manifest and setup.manifest.split["validation"]:
        verdict = (
            "Not known. Each validation client has a single row, and needs two: one to choose a hypothesis, and one to "
            "measure it. Compare the validation losses of runs instead."
        )
    else:
        trained = "The run from which it starts may have" if setup.config.start_from else "The run"
        verdict = (
            f"Not known. {trained} trained on every client with two rows or more, so no rows are left to measure it. "
            "Give the dataset validation clients."
        )
    name, higher = setup.model.metric.name, setup.model.metric.higher_is_better
    return Worth(name, "", higher, 0, "clients", [], [], Level.NOT_MEASURED, verdict, [], 0.0, len(state.history))


def judge(gains: Mapping[Way, NDArray[np.float64]], has_diverged: bool, stuck: str = "") -> tuple[Level, str]:
    """Return the level of a run's worth, and its description.

    This judges the predictors that clients would use: the personalised hypotheses, or the plain ones if those were not
    measured. A way is better than another if the mean difference over clients is more than twice its standard error.
    With few clients the factor is larger: Student's t distribution gives it for the same certainty.

    Parameters
    ----------
    gains : mapping from Way to ndarray, shape (clients,)
        The metric of each client, negated if lower is better.
    has_diverged : bool
        Whether the run's rounds moved away from its best hypotheses.
    stuck : str
        Why they changed nothing; empty if they did. Predictors that clients make of such hypotheses are not the run's
        merit.
    """
    run = gains[judged(gains)]
    if stuck:
        return Level.DIVERGED, f"No: {stuck.partition('.')[0]}."
    if has_diverged or not np.isfinite(gains[Way.LAST]).all():
        return Level.DIVERGED, "No: it diverged. The last loss is several times the lowest, or not finite."
    for way, level, what in (
        (Way.CONSTANT, Level.NOT_BETTER_THAN_CONSTANT, "a constant"),
        (Way.ALONE, Level.NOT_BETTER_THAN_ALONE, "each client alone"),
    ):
        if way in gains and not _ahead(run, gains[way]):
            worse, shown = _ahead(gains[way], run), "Not shown" if (run - gains[way]).mean() > 0 else "No"
            return level, f"{shown}: it is {'worse' if worse else 'not clearly better'} than {what}."
    if Way.ALONE not in gains:
        return Level.BETTER_THAN_CONSTANT, "It is better than a constant; clients alone were not measured."
    if Way.POOLED not in gains or not _ahead(gains[Way.POOLED], gains[Way.CONSTANT]):
        return Level.BETTER_THAN_ALONE, "Yes: it is better than each client alone."
    if _ahead(run, gains[Way.POOLED]):
        return Level.CLOSE_TO_POOLED, "Yes: it is better than each client alone, and better than all rows pooled."
    behind = float((gains[Way.POOLED] - run).mean())
    if behind <= CLOSE * float((gains[Way.POOLED] - gains[Way.CONSTANT]).mean()):
        return Level.CLOSE_TO_POOLED, "Yes: it is better than each client alone, and close to all rows pooled."
    return Level.BETTER_THAN_ALONE, "Yes: it is better than each client alone, but behind all rows pooled."


def within_chance(level: Level, gains: Mapping[Way, NDArray[np.float64]]) -> str:
    """Return a sentence about a gain in the mean that so many clients do not show."""
    than = {Level.NOT_BETTER_THAN_CONSTANT: Way.CONSTANT, Level.NOT_BETTER_THAN_ALONE: Way.ALONE}.get(level)
    if than is None or not (gains[judged(gains)] - gains[than]).mean() > 0:
        return ""
    count = len(gains[than])
    few = f"{count_of(count, 'client')} {'is' if count == 1 else 'are'} too few to tell"
    return f" It is ahead in the mean, but {few}: import the data with more validation clients, as by --validation 0.5."


def as_it_is(level: Level, gains: Mapping[Way, NDArray[np.float64]]) -> str:
    """Return a sentence about a model that gains no more than a constant before clients make it their own."""
    if judged(gains) is Way.LAST or level in (Level.DIVERGED, Level.NOT_BETTER_THAN_CONSTANT):
        return ""
    constant, last = gains[Way.CONSTANT], gains[Way.LAST]
    if _ahead(last, constant):
        return ""
    told = "worse" if _ahead(constant, last) else "not clearly better"
    return f" Before clients adjust the model to their rows, it is {told} than a constant."


def by_another(gains: Mapping[Way, NDArray[np.float64]], how: Personal) -> str:
    """Return a sentence about a method that the verdict judges, and that a prediction would not take."""
    if judged(gains) is not Way.OWN or how is DEFAULT:
        return ""
    return f' This was measured with personalise = "{how}": "{DEFAULT}", which predictions use, takes too long.'


def too_unlike(gains: Mapping[Way, NDArray[np.float64]]) -> bool:
    """Return whether clients differ too much for one model: alone, they are ahead of all rows pooled.

    Where both are nearly exact, the lead is of rounding errors.
    """
    if not ({Way.ALONE, Way.POOLED} <= gains.keys() and _ahead(gains[Way.ALONE], gains[Way.POOLED])):
        return False
    alone = gains[Way.ALONE]
    return float((alone - gains[Way.POOLED]).mean()) > _SAME * float((alone - gains[Way.CONSTANT]).mean())


def judged(ways: Collection[Way]) -> Way:
    """Return the way by which a run is judged."""
    return Way.OWN if Way.OWN in ways else Way.LAST


def _ahead(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    """Return whether one way gains more than another, by twice the standard error over many clients.

    A single client shows nothing.
    """
    difference = one - other
    if len(difference) < 2:
        return False
    error = difference.std(ddof=1) / math.sqrt(len(difference))
    return bool(difference.mean() > stdtrit(len(difference) - 1, _CERTAIN) * error)


def tries(level: Level, setup: Setup, history: Sequence[Round], gains: Mapping[Way, NDArray[np.float64]]) -> list[str]:
    """Return settings that may help, each as on a command line, the most promising first."""
    run, k, train = setup.config, setup.strategy.hypotheses, setup.manifest.train if setup.manifest else 0
    most = min(4 * run.clients_per_round, train)
    # Larger rounds are fewer rounds, where clients have no participation left.
    spent = run.max_participations and run.rounds * run.clients_per_round > train * run.max_participations * 3 // 4
    larger = [f"clients-per-round={most}"] if most > run.clients_per_round and not spent else []
    noisy, smaller = run.noise_multiplier > 0, f"step-size={run.step_size / 4:g}"
    if any(entry.undefined for entry in history):
        return []  # no setting mends a strategy whose result is not finite
    if level is Level.DIVERGED:
        return [smaller, *(larger if noisy else [])]
    if level in (Level.NOT_MEASURED, Level.BETTER_THAN_CONSTANT, Level.CLOSE_TO_POOLED):
        return []
    one_is_better = k > 1 and Way.ONE_MODEL in gains and _ahead(gains[Way.ONE_MODEL], gains[Way.LAST])
    fewer = ["hypotheses=1"] if one_is_better else []
    if noisy:
        # Less noise does not help if one model of all rows, without noise, is behind clients alone.
        if level is Level.NOT_BETTER_THAN_CONSTANT and k == 1 and too_unlike(gains):
            return [*larger, "hypotheses=2"]
        in_vain = level is Level.NOT_BETTER_THAN_ALONE and k == 1 and too_unlike(gains)
        return [] if in_vain else [*larger, *fewer, *_less_noise(setup, history)]
    losses = [entry.loss for entry in history if entry.loss is not None]
    if len(losses) > 1 and min(losses[: -(-len(losses) * 9 // 10)]) - losses[-1] > _FALLS * (losses[0] - losses[-1]):
        return [f"rounds={4 * run.rounds}"]  # the loss is still falling
    if level is Level.NOT_BETTER_THAN_CONSTANT:
        # No setting helps if it is ahead, and only too few clients to show it.
        return [] if within_chance(level, gains) else [smaller]
    return fewer or [f"hypotheses={2 * k}"]


def _less_noise(setup: Setup, history: Sequence[Round]) -> list[str]:
    """Return the setting that doubles a client's spending: the epsilon that the run states, otherwise 1/nu.

    There is none where the doubled epsilon would rule out nothing.
    """
    found = Summary.of(setup).of_client(history[-1].max_participations)
    if found is None:
        return [f"noise-multiplier={setup.config.noise_multiplier / 2:g}"]
    return [f"--epsilon {2 * found.epsilon:.2g}"] if 2 * found.epsilon <= MEANINGFUL else []


def _rounded(value: float) -> float | None:
    """Return six digits: the others depend on the number of nodes."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
