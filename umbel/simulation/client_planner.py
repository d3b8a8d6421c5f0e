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
from typing import Any

from umbel.client.trial import first_update
from umbel.data import Dataset
from umbel.models.model import Model
from umbel.privacy.accounting.guarantee import MEANINGFUL, amount, gap, guarantee, pure_spent, released_by, stated
from umbel.privacy.accounting.plan import Task, plan_for
from umbel.privacy.mechanisms import load as load_mechanism
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import LAPLACE, Clipping, NoisePer, Protect, Release, ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.protocol.words import count_of
from umbel.server.setup import Setup
from umbel.simulation.facts import check_declared, estimated_scales, made_up
from umbel.simulation.wanted import Wanted

PRIVACY = ("noise-multiplier", "mechanism", "choice-epsilon", "clipping", "clip-norm", "clip-norm-decay")
"""Keys of the noise; a user who sets one decides on the run's privacy."""

PROVISIONAL: Mapping[str, Any] = {
    "clipping": str(Clipping.PUBLIC),
    "noise-per": str(NoisePer.VECTOR),
    "choice-epsilon": 1.0,
    "mechanism": LAPLACE,
}
"""Entries that a guarantee needs. A configuration may lack them, and a strategy may refuse to do without."""

SMALL, DROWNED = 10_000, (0.5, 5.0)
"""Parameters of a small model, and the noise of a whole run in lengths of its steps from which such a model and a
larger one learn nothing. Most of the larger one's noise is in directions that matter little."""

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
    """All that decides the noise and the rounds of a run.

    Attributes
    ----------
    epsilon, delta : float
        The wanted guarantee of a client.
    run : RunConfig
    kept : frozenset of str
        Keys that the user gave.
    linear : bool
        Whether the model is.
    parameters, hypotheses, fewest : int
        n, k, and the fewest hypotheses among which a client may choose.
    train : int
        Training clients.
    nodes, sites : int
        Number of nodes, and of those that add noise to sums of their clients' updates; 0 if each client adds its own.
    """

    epsilon: float
    delta: float
    run: RunConfig
    kept: frozenset[str]
    linear: bool
    parameters: int
    hypotheses: int
    fewest: int
    train: int
    nodes: int
    sites: int


@dataclass(frozen=True)
class Schedule:
    """The noise of a participation, and the rounds.

    Attributes
    ----------
    mechanism, noise_multiplier, choice_epsilon : str, float, float
    rounds, clients, participations : int
        T, U, and how often a client takes part.
    left : float
        The noise in a hypothesis after a round, in clip norms.
    """

    mechanism: str
    noise_multiplier: float
    choice_epsilon: float
    rounds: int
    clients: int
    participations: int
    left: float

    @property
    def noise(self) -> float:
        """The noise of the whole run, relative to all its steps."""
        return self.left / math.sqrt(self.rounds)


def with_noise(
    found: Mapping[str, Any], kept: frozenset[str], setup: Setup, wanted: Wanted, dataset: Dataset, nodes: int
) -> tuple[dict[str, Any], list[str]]:
    """Return a run config with the noise that a wanted guarantee of clients needs, and lines that describe it.

    Parameters
    ----------
    found : mapping
        Settings, with those of `PROVISIONAL`.
    kept : frozenset of str
        Keys that the user gave.
    setup : Setup
        Of these settings.
    wanted : Wanted
        With a guarantee of clients.
    dataset : Dataset
    nodes : int
        Number of nodes that release sums of their clients' updates, if the strategy has sites release.

    Raises
    ------
    ConfigError
        If the run would learn nothing with the guarantee, or the user's entries break it.
    """
    assert wanted.epsilon is not None, "it is asked for"
    _check_given(setup, kept)
    check_declared(setup.model, dataset)
    by, model = setup.strategy.release_by, setup.model
    # A secure sum has the noise of one site.
    nodes = max(1, nodes)
    sites = 0 if by is ReleaseBy.CLIENT else nodes if by is ReleaseBy.SITE else 1
    k, fewest, train = setup.strategy.hypotheses, setup.strategy.fewest_hypotheses, dataset.manifest.train
    facts = model.linear, model.num_parameters, k, fewest, train, nodes, sites
    goal = Goal(wanted.epsilon, wanted.at_delta, setup.config, kept, *facts)
    planned = schedule(goal)
    entries = _entries(goal, planned, setup, dataset)
    found = {**found, **{key: value for key, value in entries.items() if key not in kept}}
    release, times = _released(setup, found)
    _check_cost(goal, release, times)
    if "delta" not in kept:
        # 0 where its pure epsilon is what was wanted
        found["delta"] = 0.0 if pure_spent({release: times}) <= goal.epsilon * (1 + 1e-9) else goal.delta
    if _in_vain(goal, planned):
        raise _refusal(goal, planned, model, dataset)
    return found, [*_words(goal, planned, setup, found), *estimated_scales(dataset.manifest)]


def _check_given(setup: Setup, kept: frozenset[str]) -> None:
    run = setup.config
    wrong = ""
    if run.protect is Protect.ROWS:
        wrong = '--epsilon is for clients, and protect = "rows" hides rows alone; give --row-epsilon and --rows'
        wrong += ', or set protect = "both"'
    elif "noise-multiplier" in kept and not run.noise_multiplier:
        wrong = "noise-multiplier = 0 has no guarantee; leave it out, or leave out --epsilon"
    elif "clipping" in kept and run.clipping is not Clipping.PUBLIC:
        wrong = f'clipping = "{run.clipping}" has no guarantee; leave it out, or leave out --epsilon'
    elif setup.strategy.discloses_choice and setup.strategy.hypotheses > 1:
        wrong = f"strategy {run.strategy!r} discloses choices, so it has no guarantee; name another strategy"
    if wrong:
        raise ConfigError(wrong, code="config.breaks-epsilon")


# --- the rule


def schedule(goal: Goal) -> Schedule:
    """Return the noise and the rounds of a run; raise `ConfigError` if no noise reaches the guarantee."""
    run, kept, participations = goal.run, goal.kept, _participations(goal)
    usual, least, most, *_ = _rule(goal)
    mechanism, multiplier, choice = _noise(goal, participations)
    task, turns = replace(_task(goal, mechanism), hypotheses=goal.hypotheses), goal.train * participations
    rounds = min(max(turns // usual, least), most, turns)
    if goal.sites:
        # Each round adds a site's noise again, however few its clients are.
        together = replace(task, clients_per_round=goal.train).noise_left(multiplier) / participations
        rounds = min(rounds, max(_FEWEST_ROUNDS, int((_HARMLESS / together) ** 2)))
    if "rounds" in kept:
        rounds = run.rounds
    clients = run.clients_per_round if "clients-per-round" in kept else max(1, min(goal.train, turns // rounds))
    if "rounds" not in kept and not goal.sites:
        rounds = max(1, turns // clients)  # so that all take part
    left = replace(task, clients_per_round=min(clients, goal.train)).noise_left(multiplier)
    return Schedule(mechanism, multiplier, choice, rounds, clients, participations, left)


def _rule(goal: Goal) -> _Rule:
    return _LINEAR if goal.linear else _SMALL if goal.parameters <= SMALL else _LARGE


def _participations(goal: Goal) -> int:
    run = goal.run
    if "max-participations" in goal.kept:
        # In a random draw, a client may take part in every round.
        return run.max_participations or run.rounds
    if {"rounds", "clients-per-round"} <= goal.kept:
        return max(1, -(-run.rounds * run.clients_per_round // goal.train))
    return 1


def _task(goal: Goal, mechanism: str) -> Task:
    return Task(goal.parameters, goal.fewest, goal.train, 1, mechanism, goal.sites)


def _noise(goal: Goal, participations: int) -> tuple[str, float, float]:
    """Return mechanism, noise multiplier and choice-epsilon: of the best mechanism, or a pure one that costs little
    more."""
    run, kept = goal.run, goal.kept
    choice = run.choice_epsilon if "choice-epsilon" in kept else None
    if choice is None and goal.sites:
        # A site's counts decide which updates are averaged: they need more of a small epsilon than a client's choice.
        choice = min(_SITE_CHOICE, goal.epsilon / (2 * participations))
    if "noise-multiplier" in kept:
        return run.mechanism, run.noise_multiplier, run.choice_epsilon

    def noise(mechanism: str, delta: float) -> tuple[str, float, float]:
        release = plan_for(_task(goal, mechanism), goal.epsilon, delta, participations, choice).release
        return mechanism, release.noise_multiplier, release.choice_epsilon

    def deviation(found: tuple[str, float, float]) -> float:
        return load_mechanism(found[0])(found[1]).deviation(goal.parameters)

    if "mechanism" in kept or not goal.delta:
        return noise(run.mechanism if "mechanism" in kept else LAPLACE, goal.delta)
    least = min(noise("gaussian", goal.delta), noise(LAPLACE, goal.delta), key=deviation)
    # The choices alone may take a pure epsilon, and not one at delta.
    with suppress(ConfigError):
        pure = noise(LAPLACE, 0.0)
        return pure if deviation(pure) <= _PURE * deviation(least) else least
    return least


# --- the result


def _entries(goal: Goal, planned: Schedule, setup: Setup, dataset: Dataset) -> dict[str, Any]:
    run, kept, rounds, (*_, last, path) = goal.run, goal.kept, planned.rounds, _rule(goal)
    start, decay = run.clip_norm, run.clip_norm_decay
    if "clip-norm-decay" not in kept:
        decay = float(f"{last ** (1 / (rounds - 1)):.3g}") if rounds > 1 else 1.0
    if "clip-norm" not in kept and not setup.model.local_shapes:  # else made-up rows may be none of the model's
        path += goal.hypotheses > 1
        share = min(1.0, path / sum(decay**number for number in range(rounds)))
        start = float(f"{share * first_update(run, setup.model, made_up(setup.model, dataset)):.3g}")
    return {
        "noise-multiplier": planned.noise_multiplier,
        "mechanism": planned.mechanism,
        "choice-epsilon": planned.choice_epsilon,
        "clip-norm": start,
        "clip-norm-decay": decay,
        "clip-norm-floor": min(run.clip_norm_floor, float(f"{start * decay ** (rounds - 1):.1g}") / 2),
        "rounds": rounds,
        "clients-per-round": planned.clients,
        "max-participations": planned.participations,
        "restarts": 1,
    }


def _released(setup: Setup, found: Mapping[str, Any]) -> tuple[Release, int]:
    """Return the release of a participation, and how often a client takes part."""
    run, strategy = RunConfig.parse(found), setup.strategy
    release = run.release(setup.model.num_parameters, strategy.fewest_hypotheses)
    return released_by(strategy.release_by, release), run.most_participations


def _check_cost(goal: Goal, release: Release, times: int) -> None:
    have = guarantee({release: times}, goal.delta)
    if have is not None and have.epsilon <= goal.epsilon * (1 + 1e-9):
        return
    told = gap(release) if have is None else f"{times} participations cost epsilon {amount(have.epsilon)}"
    named = ", ".join(sorted(key for key in goal.kept if key in _BEARING)) or "the configuration"
    raise ConfigError(
        f"{named}: {told}, but epsilon {goal.epsilon:g} was wanted; leave some of them to the plan",
        code="config.breaks-epsilon",
    )


def _words(goal: Goal, planned: Schedule, setup: Setup, found: Mapping[str, Any]) -> list[str]:
    run = RunConfig.parse(found)
    release, times = _released(setup, found)
    have = guarantee({release: times}, run.delta)
    assert have is not None, "it was checked"
    often = "once" if planned.participations == 1 else f"up to {planned.participations} times"
    lines = [
        f"Planned: {stated(have)} for a client over the whole run, with {count_of(run.rounds, 'round')} of "
        f"{count_of(run.clients_per_round, 'client')}. A client takes part {often}, and "
        f"{_WHO[setup.strategy.release_by]}.",
        f"Noise multiplier {run.noise_multiplier:.4g} ({run.mechanism}), clip norm {run.clip_norm:.3g} times "
        f"{run.clip_norm_decay:.3g} a round: noise of {planned.left:.2g} clip norms in a hypothesis.",
    ]
    if goal.hypotheses == 1 and "hypotheses" not in goal.kept:
        kinds = "Where they are of several kinds, try hypotheses=2; each of the two has more noise."
        lines.append(f"One model for all clients. {kinds}")
    whole = f"Over the whole run, the noise is {planned.noise:.2g} times as long as all steps"
    return [*lines, f"{whole}; from {_most(goal):g} on, a client does as well alone. No row was read."]


# --- the refusal


def _most(goal: Goal) -> float:
    """Return the noise of a whole run that drowns it."""
    return DROWNED[goal.parameters > SMALL]


def _in_vain(goal: Goal, planned: Schedule) -> bool:
    return "noise-multiplier" not in goal.kept and planned.noise >= _most(goal)


def _refusal(goal: Goal, planned: Schedule, model: Model, dataset: Dataset) -> ConfigError:
    """Return the error for a run in vain. It proposes a strategy, an epsilon or clients only if that leads to a
    plan."""
    ways = []
    if not goal.sites and _helps(replace(goal, sites=goal.nodes)):
        ways.append("strategy=site-average, if clients trust their site")
    doubled = itertools.takewhile(lambda one: one <= MEANINGFUL, (goal.epsilon * 2**power for power in range(1, 99)))
    if larger := next((one for one in doubled if _helps(replace(goal, epsilon=one))), None):
        ways.append(f"--epsilon {larger:g}")
    more = math.ceil(goal.train * 1.01 * (planned.noise / _most(goal)) ** (1 if goal.sites else 2))
    ways.append(f"about {more:,} clients" if _helps(replace(goal, train=more)) else "more clients")
    ways.append(_fewer_parameters(model, dataset))
    return ConfigError(
        f"epsilon {goal.epsilon:g} for {goal.train:,} clients and {goal.parameters:,} parameters: the noise over the "
        f"whole run would be {planned.noise:.2g} times as long as all steps together. Each client is better off alone, "
        f"unless you change one of these: {'; '.join(ways)}",
        code="config.in-vain",
    )


def _helps(goal: Goal) -> bool:
    with suppress(ConfigError):
        return not _in_vain(goal, schedule(goal))
    return False


def _fewer_parameters(model: Model, dataset: Dataset) -> str:
    """Say which column's categories take most parameters, if these are more than half."""
    layout, n = dataset.manifest.layout, model.num_parameters
    listed = [column for column in layout.features if column.type == "category"] if layout else []
    if model.linear and listed:
        widest = max(listed, key=lambda column: len(column.stored))
        taken = n * len(widest.stored) // (dataset.features.shape[-1] + 1)
        if 2 * taken > n:
            return f"a model of fewer parameters (the categories of {widest.name} take {taken})"
    return "a model of fewer parameters"
