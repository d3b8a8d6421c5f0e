"""Plans of whole runs that hide clients: noise for a wanted epsilon of each client, and rounds by a rule.

Each client takes part once, in small rounds with smaller and smaller clip norms. Together these are twice the norm of a
first update on made-up clients for a linear model, which is not far from its start; for another model the first is that
norm. A run whose noise would drown its steps is refused. No row is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from umbel.client.trial import first_update
from umbel.privacy.accounting.guarantee import (
    MEANINGFUL,
    Guarantee,
    amount,
    gap,
    guarantee,
    released_by,
    stated,
    with_before,
)
from umbel.privacy.accounting.plan import Plan, Task, plan_for
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import LAPLACE, Clipping, NoisePer, Protect, Release, ReleaseBy
from umbel.protocol.run_config import ClipSchedule, RunConfig
from umbel.protocol.words import count_of
from umbel.server.setup import Setup
from umbel.simulation.facts import Draft, check_declared, filled, made_up
from umbel.simulation.wanted import Wanted

PRIVACY = ("noise-multiplier", "mechanism", "choice-epsilon", "clipping")
"""Keys of the noise; a user who sets one decides on the run's privacy."""

PROVISIONAL: Mapping[str, Any] = {
    "noise-per": str(NoisePer.VECTOR),
    "choice-epsilon": 1.0,
    "mechanism": LAPLACE,
}
"""Entries that a guarantee needs. A configuration may lack them, and a strategy may refuse to do without."""

SMALL, DROWNED = 10_000, (0.5, 5.0)
"""Parameters of a small model, and the noise of a whole run in lengths of its steps from which such a model and a
larger one learn nothing. Most of the larger one's noise is in directions that matter little."""

LIKELY_IN_VAIN = 0.6
"""Share of that noise from which a small model rarely beats clients alone. In docs/results/when, clients' releases with
noise of up to 0.26 lengths of the steps were better than clients alone for every seed, one of 0.32 was better on
average only, and those of 0.46 and more were not better."""
FEW_CLIENTS, _TYPICAL_ROWS = 100, 1000
"""Training clients up to which hiding rows is proposed instead, and rows of a client with which that is tried."""

_Rule = tuple[int, int, int, float, float]
"""Clients of a round, the least and the most rounds, the last clip norm relative to the first, and the largest sum of
all clip norms, in norms of a first update."""
_LINEAR: _Rule = (50, 20, 40, 0.2, 2.0)  # one norm more for several hypotheses, which have to part
_SMALL: _Rule = (100, 10, 20, 0.2, math.inf)
_LARGE: _Rule = (400, 10, 120, 0.05, math.inf)  # from handwriting
_HARMLESS, _FEWEST_ROUNDS = 0.1, 3  # noise of a run in lengths of its steps that sums of sites should stay below
_SITE_CHOICE = 2.0  # choice-epsilon that hardly disturbs a site's counts
_PURE = 1.15  # maximum factor on the noise of the best mechanism at a delta, to get a pure epsilon instead
_BEARING = (*PRIVACY, "rounds", "max-participations", "hypotheses", "strategy", "clients-per-round")
_WHO = {
    ReleaseBy.CLIENT: "it adds noise itself",
    ReleaseBy.SITE: "its site adds noise to the sum",
    ReleaseBy.SECURE: "all sites together add noise to one sum (in simulation: umbel run --nodes)",
}


@dataclass(frozen=True)
class Goal:
    """All that decides the noise and the rounds of a run."""

    wanted: Wanted
    run: RunConfig
    kept: frozenset[str]  # keys that the user gave
    linear: bool  # whether the model is
    hypotheses: int  # k
    task: Task  # of rounds of one client, with the fewest hypotheses among which a client may choose

    @property
    def rule(self) -> _Rule:
        """The rule for rounds and clip norms."""
        return _LINEAR if self.linear else _SMALL if self.task.parameters <= SMALL else _LARGE

    @property
    def drowned(self) -> float:
        """The noise of a whole run that drowns it."""
        return DROWNED[self.task.parameters > SMALL]

    @property
    def participations(self) -> int:
        """How often a client takes part."""
        if "max-participations" in self.kept:
            # In a random draw, a client may take part in every round.
            return self.run.max_participations or self.run.rounds
        if {"rounds", "clients-per-round"} <= self.kept:
            return max(1, -(-self.run.rounds * self.run.clients_per_round // self.task.clients))
        return 1


class Schedule(NamedTuple):
    """The noise of a participation, and the rounds."""

    plan: Plan
    rounds: int  # T
    clients: int  # U
    left: float  # the noise in a hypothesis after a round, in clip norms

    @property
    def noise(self) -> float:
        """The noise of the whole run, relative to all its steps."""
        return self.left / math.sqrt(self.rounds)


def with_noise(draft: Draft) -> tuple[dict[str, Any], list[str]]:
    """Return a run config with the noise that a wanted guarantee of clients needs, and lines that describe it.

    The draft's values include those of `PROVISIONAL`.

    Raises
    ------
    ConfigError
        If the run would learn nothing with the guarantee, or the user's entries break it.
    """
    goal, planned = check_possible(draft)
    check_declared(draft.setup.model, draft.dataset)
    values = filled(draft.values, _entries(goal, planned, draft), draft.kept)
    run = RunConfig.parse(values)
    release = released_by(goal.task.by, run.release(goal.task.parameters, goal.task.hypotheses))
    times = run.most_participations
    cost = _check_cost(goal, release, times)
    if "delta" not in draft.kept:
        # 0 where its pure epsilon is what was wanted
        pure = cost.pure <= goal.wanted.epsilon * (1 + 1e-9)
        values["delta"] = 0.0 if pure else goal.wanted.delta
    have = guarantee(with_before({release: times}, goal.task.before), values["delta"])
    assert have is not None, "it was checked"
    return values, _words(goal, planned, run, have)


def check_possible(draft: Draft) -> tuple[Goal, Schedule]:
    """Return what decides the noise and the rounds of a run, and these; errors as for `with_noise`.

    It needs no ranges of columns, so that nobody looks for them in vain.
    """
    _check_given(draft)
    setup = draft.setup
    strategy, model, clients = setup.strategy, setup.model, draft.dataset.manifest.train
    by, sites, before = strategy.release_by, max(1, draft.nodes), setup.config.before
    task = Task(model.num_parameters, strategy.fewest_hypotheses, clients, 1, by=by, sites=sites, before=before)
    goal = Goal(draft.wanted, setup.config, draft.kept, model.linear, strategy.hypotheses, task)
    planned = schedule(goal)
    if "noise-multiplier" not in draft.kept and planned.noise >= goal.drowned:
        raise _refusal(goal, planned, draft)
    return goal, planned


def _check_given(draft: Draft) -> None:
    """Raise `ConfigError` if an entry of the user's leaves no guarantee."""
    run, strategy, reason = draft.setup.config, draft.setup.strategy, ""
    if run.protect is Protect.ROWS:
        reason = '--epsilon is for clients, and protect = "rows" hides rows alone; give --row-epsilon and --rows'
        reason += ', or set protect = "both"'
    elif "noise-multiplier" in draft.kept and not run.noise_multiplier:
        reason = "noise-multiplier = 0 has no guarantee; leave it out, or leave out --epsilon"
    elif "clipping" in draft.kept and run.clipping.mode is not Clipping.PUBLIC:
        reason = f'clipping = "{run.clipping}" has no guarantee; leave it out, or leave out --epsilon'
    elif strategy.discloses_choice and strategy.hypotheses > 1:
        reason = f"strategy {run.strategy!r} discloses choices, so it has no guarantee; name another strategy"
    if reason:
        raise ConfigError(reason, code="config.breaks-epsilon")


# --- the rule


def schedule(goal: Goal) -> Schedule:
    """Return the noise and the rounds of a run; raise `ConfigError` if no noise reaches the guarantee."""
    run, kept, times, (usual, least, most, *_) = goal.run, goal.kept, goal.participations, goal.rule
    plan = _noise(goal)
    task, turns = replace(plan.task, hypotheses=goal.hypotheses), goal.task.clients * times
    rounds = min(max(turns // usual, least), most, turns)
    if task.by is not ReleaseBy.CLIENT:
        # Each round adds a site's noise again, however few its clients are.
        together = replace(task, clients_per_round=task.clients).noise_left(plan.noise_multiplier) / times
        rounds = min(rounds, max(_FEWEST_ROUNDS, int((_HARMLESS / together) ** 2)))
    if "rounds" in kept:
        rounds = run.rounds
    clients = run.clients_per_round if "clients-per-round" in kept else max(1, min(task.clients, turns // rounds))
    if "rounds" not in kept and task.by is ReleaseBy.CLIENT:
        rounds = max(1, turns // clients)  # so that all take part
    left = replace(task, clients_per_round=min(clients, task.clients)).noise_left(plan.noise_multiplier)
    return Schedule(plan, rounds, clients, left)


def _noise(goal: Goal) -> Plan:
    """Return the noise of a participation: of the best mechanism, or of a pure one that needs little more."""
    run, kept, wanted, times = goal.run, goal.kept, goal.wanted, goal.participations
    if "noise-multiplier" in kept:
        task = replace(goal.task, mechanism=run.mechanism)
        return Plan(task, run.noise_multiplier, run.choice_epsilon, wanted.delta, times, times)
    choice = run.choice_epsilon if "choice-epsilon" in kept else None
    if choice is None and goal.task.by is not ReleaseBy.CLIENT:
        # A site's counts decide which updates are averaged: they need more of a small epsilon than a client's choice.
        choice = min(_SITE_CHOICE, wanted.epsilon / (2 * times))

    def least(mechanism: str, delta: float) -> Plan:
        plan = plan_for(replace(goal.task, mechanism=mechanism), wanted.epsilon, delta, times, choice)
        return replace(plan, choice_epsilon=plan.release.choice_epsilon)  # 0 where it costs nothing

    if "mechanism" in kept or not wanted.delta:
        return least(run.mechanism if "mechanism" in kept else LAPLACE, wanted.delta)
    best = min((least(mechanism, wanted.delta) for mechanism in ("gaussian", LAPLACE)), key=lambda one: one.noise_left)
    # The choices alone may take a pure epsilon, and not one at delta.
    with suppress(ConfigError):
        pure = least(LAPLACE, 0.0)
        return pure if pure.noise_left <= _PURE * best.noise_left else best
    return best


# --- the result


def _entries(goal: Goal, planned: Schedule, draft: Draft) -> dict[str, Any]:
    run, kept, model, rounds, (*_, last, path) = goal.run, goal.kept, draft.setup.model, planned.rounds, goal.rule
    start, decay = run.clipping.norm, float(f"{last ** (1 / (rounds - 1)):.3g}") if rounds > 1 else 1.0
    if "clipping" not in kept and not model.local_shapes:  # else made-up rows may be none of the model's
        path += goal.hypotheses > 1
        share = min(1.0, path / sum(decay**number for number in range(rounds)))
        start = float(f"{share * first_update(run, model, made_up(model, draft.dataset)):.3g}")
    floor = min(run.clipping.floor, float(f"{start * decay ** (rounds - 1):.1g}") / 2)
    return {
        "noise-multiplier": planned.plan.noise_multiplier,
        "mechanism": planned.plan.task.mechanism,
        "choice-epsilon": planned.plan.choice_epsilon,
        "clipping": str(ClipSchedule(Clipping.PUBLIC, start, decay, floor)),
        "rounds": rounds,
        "clients-per-round": planned.clients,
        "max-participations": planned.plan.max_participations,
        "restarts": 1,
    }


def _check_cost(goal: Goal, release: Release, times: int) -> Guarantee:
    have = guarantee(with_before({release: times}, goal.task.before), goal.wanted.delta)
    if have is not None and have.epsilon <= goal.wanted.epsilon * (1 + 1e-9):
        return have
    reason = gap(release) if have is None else f"{times} participations cost epsilon {amount(have.epsilon)}"
    named = ", ".join(sorted(key for key in goal.kept if key in _BEARING)) or "the configuration"
    raise ConfigError(
        f"{named}: {reason}, but epsilon {goal.wanted.epsilon:g} was wanted; leave some of them to the plan",
        code="config.breaks-epsilon",
    )


def _words(goal: Goal, planned: Schedule, run: RunConfig, have: Guarantee) -> list[str]:
    times = planned.plan.max_participations
    often = "once" if times == 1 else f"up to {times} times"
    lines = [
        f"Planned: {stated(have)} for a client over the whole run, with {count_of(run.rounds, 'round')} of "
        f"{count_of(run.clients_per_round, 'client')}. A client takes part {often}, and {_WHO[goal.task.by]}.",
        f"Noise multiplier {run.noise_multiplier:.4g} ({run.mechanism}), clip norm {run.clipping.norm:.3g} times "
        f"{run.clipping.decay:.3g} a round: noise of {planned.left:.2g} clip norms in a hypothesis.",
    ]
    if goal.hypotheses == 1 and "hypotheses" not in goal.kept:
        kinds = "Where they are of several kinds, try hypotheses=2; each of the two has more noise."
        lines.append(f"One model for all clients. {kinds}")
    if goal.task.parameters <= SMALL and planned.noise >= LIKELY_IN_VAIN * goal.drowned:
        likely = "Warning: this run is likely to end with no gain over each client alone, because its noise is large"
        lines.append(f"{likely}. A larger epsilon, more clients or fewer parameters help.")
    whole = f"Over the whole run, the noise is {planned.noise:.2g} times as long as all steps"
    read = "Only the question about ranges read rows" if goal.task.before else "No row was read"
    return [*lines, f"{whole}; from {goal.drowned:g} on, a client does as well alone. {read}."]


# --- the refusal


def _refusal(goal: Goal, planned: Schedule, draft: Draft) -> ConfigError:
    """Return the error for a run in vain. It proposes a strategy, an epsilon or clients only if that leads to a
    plan."""
    ways, task, wanted = [], goal.task, goal.wanted
    by_client = task.by is ReleaseBy.CLIENT
    if by_client and _helps(replace(goal, task=replace(task, by=ReleaseBy.SITE))):
        ways.append("strategy=site-average, if clients trust their site")
    doubled = itertools.takewhile(lambda one: one <= MEANINGFUL, (wanted.epsilon * 2**power for power in range(1, 99)))
    larger = (one for one in doubled if _helps(replace(goal, wanted=replace(wanted, epsilon=one))))
    ways += [f"an epsilon of {one:g}" for one in itertools.islice(larger, 1)]
    more = math.ceil(task.clients * 1.01 * (planned.noise / goal.drowned) ** (2 if by_client else 1))
    enough = _helps(replace(goal, task=replace(task, clients=more)))
    ways += [f"about {more:,} clients" if enough else "more clients", _fewer_parameters(draft)]
    if task.clients <= FEW_CLIENTS and _rows_help(draft):
        ways.append(f"umbel run with --row-epsilon {wanted.epsilon:g} --rows N, where clients have about N rows: it "
                    "hides each row, and not a whole client")  # fmt: skip
    return ConfigError(
        f"epsilon {wanted.epsilon:g} is out of reach for {task.clients:,} clients and a model of {task.parameters:,} "
        f"parameters: the noise over the whole run would be {planned.noise:.2g} times as long as all steps together, "
        f"and from {goal.drowned:g} on each client is better off alone. Change one of these: {'; '.join(ways)}",
        code="config.in-vain",
    )


def _helps(goal: Goal) -> bool:
    with suppress(ConfigError):
        return schedule(goal).noise < goal.drowned
    return False


def _rows_help(draft: Draft) -> bool:
    """Return whether there is a plan that hides each row at the same epsilon; it reads no row."""
    from umbel.simulation.planner import with_row_noise  # which imports this module

    try:
        wanted = Wanted(draft.wanted.epsilon, draft.wanted.delta, _TYPICAL_ROWS)
        values = {**draft.values, **wanted.settings}
        with_row_noise(draft._replace(values=values, wanted=wanted, setup=Setup.parse(values)))
    except ConfigError as error:
        return error.code == "config.no-range"  # which may be declared
    return True


def _fewer_parameters(draft: Draft) -> str:
    """Say which column's categories take most parameters, if these are more than half."""
    layout, n = draft.dataset.manifest.layout, draft.setup.model.num_parameters
    listed = [column for column in layout.features if column.type == "category"] if layout else []
    if draft.setup.model.linear and listed:
        widest = max(listed, key=lambda column: len(column.stored))
        taken = n * len(widest.stored) // (draft.dataset.features.shape[-1] + 1)
        if 2 * taken > n:
            return f"a model of fewer parameters (leave out {widest.name}, whose categories take {taken})"
    return "a model of fewer parameters, by leaving out columns"
