"""Plans of whole runs, from a dataset's public facts, and settings for the user's own data in simulation.

With a wanted epsilon, schedules of rounds are tried on artificial clients (`umbel.simulation.proxy`), and no row is
read. Without one, a run of the user's own data has no noise, and its steps suit the rows.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.client.cohort import LocalUpdate
from umbel.client.engines import learner_for
from umbel.client.loop import LoopLearner
from umbel.data import Dataset
from umbel.models.model import Model
from umbel.models.optimizers import descent_of
from umbel.privacy.accounting.guarantee import MEANINGFUL, amount, gap, guarantee, pure_spent, released_by, stated
from umbel.privacy.accounting.plan import Task, plan_for
from umbel.privacy.mechanisms import load as load_mechanism
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import LAPLACE, Clipping, NoisePer, Protect, Release, ReleaseBy
from umbel.protocol.run_config import AUTO, RunConfig
from umbel.protocol.words import count_of
from umbel.server.setup import Setup
from umbel.simulation import row_planner
from umbel.simulation.proxy import ROWS, Proxy, Rounds, Span, feature_spans, made_up, target_span
from umbel.simulation.wanted import Wanted

PRIVACY = ("noise-multiplier", "mechanism", "choice-epsilon", "clipping", "clip-norm", "clip-norm-decay")
"""Keys of the noise; a user who sets one decides on the run's privacy."""

_PROVISIONAL: Mapping[str, Any] = {
    "clipping": str(Clipping.PUBLIC),
    "noise-per": str(NoisePer.VECTOR),
    "choice-epsilon": 1.0,
    "mechanism": LAPLACE,
}
_ROUNDS = (1, 3, 10, 20, 40)
_PATHS = (1.0, 1.5, 2.0, 3.0)  # the sum of all clip norms, relative to the way to the result without noise
_LAST = (0.2, 0.05)  # the last clip norm, relative to the first
_PROXIES = 2  # sets of artificial clients, on each of which every schedule is tried
_DRAWS = 4  # of the noise, on each of them
_SITE_CHOICE = 2.0  # choice-epsilon that hardly disturbs a site's counts
_AS_GOOD = 0.01  # of the possible gain: among schedules within it, the one with the least noise is taken
_TELLS = 0.8  # of a constant's error, which a model without noise must stay below
_LEARNT = 0.25  # of the gain without noise; a run with less is refused
_WORK = 5e7  # parameters times rows times passes of a proxy's round, above which none is tried
_FEW_PASSES = 10
_PURE = 1.15  # maximum factor on the noise of the best mechanism at a delta, to get a pure epsilon instead
_LARGE_ROUND, _LARGE_ROUNDS = 400, (10, 120)  # for models that are too large to try: from handwriting
_SMALL_NOISE = 0.5  # of all releases' mean, in clip norms: with more a client does as well alone
_DROWNED = 5.0  # ratio of the noise to the way of a whole run from which such a model learns nothing
_WHO = {
    ReleaseBy.CLIENT: "it adds noise itself",
    ReleaseBy.SITE: "its site adds noise to the sum",
    ReleaseBy.SECURE: "all sites together add noise to one sum (in simulation: umbel run --nodes)",
}
_ROOMY = 3.0  # standard deviations within which a feature's mean should lie, and its scale within as many times 1
_MOST_NAMED = 30  # columns that an error lists
_MOST_UNITS = 200  # features that a model's name may scale
_SAMPLE = 500  # clients, and rows of each, that determine the maximum step


@dataclass(frozen=True)
class PlannedRun:
    """A run config, with lines that describe it.

    Attributes
    ----------
    values : dict
        The run config's entries; others have their defaults.
    words : list of str
        Lines.
    """

    values: dict[str, Any]
    words: list[str]


def plan_run(
    values: Mapping[str, Any],
    given: Iterable[str],
    own: bool,
    wanted: Wanted,
    sites: int = 1,
    name: str = "",
) -> PlannedRun:
    """Return a run config with the missing entries.

    Parameters
    ----------
    values : mapping
        The entries of a configuration, or only the dataset's name, overridden by `Wanted.settings` and the user's.
    given : iterable of str
        The keys that the user gave. They are not changed.
    own : bool
        Whether there is no configuration. Its entries for training are then chosen too.
    wanted : Wanted
        Without a guarantee, a run of the user's own data has no noise.
    sites : int
        Number of nodes that release sums of their clients' updates, if the strategy has sites release.
    name : str
        The user's name for it, for the hint.

    Raises
    ------
    ConfigError
        If the run would learn nothing with the guarantee, the user's entries break it, or it needs ranges that are
        not declared.
    """
    kept, found = frozenset(given), dict(values)
    epsilon, of_rows = wanted.epsilon, wanted.row_epsilon is not None
    if own and wanted.any:
        found.setdefault("hypotheses", 1)
    if epsilon is not None:
        # A configuration may lack settings that a guarantee needs, and a strategy may refuse that.
        found |= {key: value for key, value in _PROVISIONAL.items() if key not in kept}
    setup = Setup.parse(found)
    dataset = setup.open_dataset()
    if dataset is None:
        raise ConfigError('dataset = "" has nothing to plan from; name a dataset', code="config.no-dataset")
    if own:
        exact = epsilon is None and not _wants_privacy(setup.config, kept)
        found |= {key: one for key, one in _training(setup, dataset, exact).items() if key not in kept}
        if of_rows:
            rounds = {"rounds": row_planner.ROUNDS, "clients-per-round": _usual_clients(dataset.manifest.train)}
            found |= {key: one for key, one in rounds.items() if key not in kept}
        setup = Setup.parse(found)
    if of_rows:
        check_declared(setup.model, dataset)
        planned, words = row_planner.with_noise(found, kept, setup, wanted, dataset.manifest.train)
        return PlannedRun(planned, [*words, *_of_scales(dataset)])
    if epsilon is None:
        return _without_noise(found, kept, own, setup, dataset, name)
    return _Search(found, kept, setup, dataset, epsilon, wanted.at_delta, sites).plan()


def _wants_privacy(run: RunConfig, kept: frozenset[str]) -> bool:
    """Return whether the user's own entries ask for noise, so that nothing may be fitted to rows."""
    return run.protect.rows or (run.noise_multiplier > 0 and bool(kept & set(PRIVACY)))


# --- local training


def _training(setup: Setup, dataset: Dataset, exact: bool) -> dict[str, Any]:
    """Return the entries of local training that suit the data: their rows if `exact`, or their declared ranges."""
    run, model = setup.config, setup.model
    found: dict[str, Any] = {}
    several = setup.strategy.hypotheses > 1 and run.hypotheses != AUTO
    if several and run.strategy_name == "group-privacy" and "respawn" not in run.strategy:
        found["strategy"] = f"{run.strategy} respawn=3"
    shape = dataset.features.shape[1:]
    kind, _, words = model.name.partition(" ")
    if kind not in ("linear", "mlp") or not words or len(shape) != 1 or dataset.manifest.feature_scale != 1:
        return found
    offset, scale = _of_rows(dataset) if exact else _declared(dataset)
    if "offset=" not in words and "scale=" not in words and _far(offset, scale) and len(offset) <= _MOST_UNITS:
        lists = {"offset": map(_written, offset, scale), "scale": (f"{one:.3g}" for one in scale)}
        found["model"] = " ".join([model.name, *(f"{key}={','.join(texts)}" for key, texts in lists.items())])
    else:
        offset, scale = np.zeros_like(offset), np.ones_like(scale)
    if model.linear:
        rows = _sample(dataset) if exact else [np.concatenate(_drawn_rows(model, dataset))]
        found |= {
            "step-size": _step(model, [(one - offset) / scale for one in rows], exact),
            "batch-size": 0,
            "local-epochs": _FEW_PASSES,
        }
    return found


def _far(offset: NDArray[np.float64], scale: NDArray[np.float64]) -> bool:
    """Return whether features have unsuitable units: large, small, or far from 0."""
    return bool(((scale > _ROOMY) | (scale < 1 / _ROOMY**3) | (np.abs(offset) > _ROOMY * np.maximum(scale, 1))).any())


def _written(offset: float, scale: float) -> str:
    """Return an offset with as many digits as a hundredth of its scale needs, and at least three."""
    return f"{offset:.{max(3, 2 + math.ceil(math.log10(max(abs(offset) / scale, 1))))}g}"


def _of_rows(dataset: Dataset) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rows = np.concatenate(_sample(dataset))
    deviation, binary = rows.std(axis=0), ((rows == 0) | (rows == 1)).all(axis=0)
    # In units of its deviation a rare 1 would be large, and a client with many of them would keep all steps short.
    unit = np.where(binary, np.maximum(deviation, 1 / _ROOMY), deviation)
    return rows.mean(axis=0), np.where(unit > 1e-9 * np.abs(rows).max(axis=0, initial=1e-30), unit, 1.0)


def _declared(dataset: Dataset) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    spans = feature_spans(dataset.manifest, dataset.features.shape[1]) or [Span("")] * dataset.features.shape[1]
    known = [span if span.low is not None and (span.low, span.high) != (0.0, 1.0) else None for span in spans]
    offset = np.array([span.centre if span else 0.0 for span in known])
    return offset, np.array([(span.spread or 1.0) if span else 1.0 for span in known])


def _sample(dataset: Dataset) -> list[NDArray[np.float64]]:
    """Return the features of some rows of some training clients."""
    train = dataset.manifest.train
    rows = (dataset.client(client)[0] for client in range(0, train, -(-train // _SAMPLE)))
    return [np.asarray(own[:: -(-len(own) // _SAMPLE)], np.float64) for own in rows]


def _drawn_rows(model: Model, dataset: Dataset) -> list[NDArray[np.float64]]:
    made = made_up(model, dataset, 1, np.random.default_rng(0))
    return [np.asarray(made.features, np.float64)]


def _step(model: Model, clients: list[NDArray[np.float64]], exact: bool) -> float:
    """Return a step size at which gradient descent on a linear model is stable at each client.

    The curvature of a loss is at most that of its link times the largest eigenvalue of the second moments of a client's
    features and 1. For declared ranges only the mean of their trace is known, which bounds that of most.
    """
    link = {"mse": 2.0, "cross-entropy": 0.5, "log": 0.25}.get(model.loss.name, 1.0)
    largest = 0.0
    for rows in clients:
        wide = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
        moments = wide.T @ wide / len(rows)
        largest = max(largest, float(np.linalg.eigvalsh(moments)[-1] if exact else np.trace(moments)))
    return float(f"{1 / (link * largest):.2g}")


def _usual_clients(train: int) -> int:
    """Return how many training clients a round asks."""
    return train if train <= 100 else min(max(100, train // 10), 1000)


def _without_noise(
    found: dict[str, Any], kept: frozenset[str], own: bool, setup: Setup, dataset: Dataset, name: str
) -> PlannedRun:
    """Return a run config of the user's own data without noise, and the line that says so."""
    if not own or kept & set(PRIVACY):
        return PlannedRun(found, [])
    manifest = dataset.manifest
    train = manifest.train
    entries: dict[str, Any] = {
        "noise-multiplier": 0.0,
        "choice-epsilon": 0.0,
        "clipping": str(Clipping.UPDATE),
        "max-participations": 0,
        "rounds": 50,
        "clients-per-round": _usual_clients(train),
    }
    if setup.strategy.release_by is not ReleaseBy.CLIENT:
        entries |= {"clipping": str(Clipping.PUBLIC), "clip-norm": 1e6, "clip-norm-decay": 1.0}
    if manifest.split["validation"]:
        entries["patience"] = 15
    found |= {key: value for key, value in entries.items() if key not in kept}
    scaled = (
        "; its steps and units were fitted to its rows, which a guarantee does not allow" if setup.model.linear else ""
    )
    command = shlex.join(["umbel", "run", name or str(found["dataset"]), "--epsilon", "4"])
    return PlannedRun(found, [f"No noise: this run guarantees nothing{scaled}. With a guarantee: {command}"])


# --- noise and rounds


def check_declared(model: Model, dataset: Dataset) -> None:
    """Raise `ConfigError` if a model takes the columns of a table as they are, and one has no public range."""
    manifest = dataset.manifest
    if manifest.layout is None or model.name.partition(" ")[0] not in ("linear", "mlp"):
        return
    spans = feature_spans(manifest, dataset.features.shape[-1]) or []
    if not manifest.target.get("categories"):
        spans = [*spans, target_span(manifest)]
    if bare := [span.name for span in spans if not span.declared]:
        more = f" and {len(bare) - _MOST_NAMED} more columns" if len(bare) > _MOST_NAMED else ""
        first = shlex.quote(bare[0])
        raise ConfigError(
            f"a plan with a guarantee needs the public range of {', '.join(bare[:_MOST_NAMED])}{more}, because it "
            f"reads no rows. Import the table again with --replace, and give each its range, as --set "
            f"{first}.minimum=0 --set {first}.maximum=100, or a scale other than 1, as --set {first}.scale=100; in "
            "simulation, --standardise estimates scales",
            code="config.no-range",
        )


def _of_scales(dataset: Dataset) -> list[str]:
    """Return the line about what the epsilon of a plan does not cover, if anything."""
    if not (spent := dataset.manifest.epsilon_of_scales):
        return []
    text = "This epsilon does not cover the scales of the data, which were estimated from rows with epsilon"
    return [f"{text} {spent} a client."]


@dataclass(frozen=True)
class _Noise:
    """The noise of a participation: the mechanism, nu, choice-epsilon, and the delta of the whole guarantee."""

    mechanism: str
    multiplier: float
    choice_epsilon: float

    def deviation(self, n: int) -> float:
        return load_mechanism(self.mechanism)(self.multiplier).deviation(n)


class _Search:
    """Finds the rounds and the noise of a run with a guarantee."""

    def __init__(
        self,
        values: dict[str, Any],
        kept: frozenset[str],
        setup: Setup,
        dataset: Dataset,
        epsilon: float,
        delta: float,
        sites: int,
    ) -> None:
        self.values, self.kept, self.setup, self.dataset = values, kept, setup, dataset
        self.epsilon, self.delta, self.nodes = epsilon, delta, max(1, sites)
        self.run, self.model, self.k = setup.config, setup.model, setup.strategy.hypotheses
        self.fewest = setup.strategy.fewest_hypotheses
        self.n, self.train = self.model.num_parameters, dataset.manifest.train
        # A secure sum has the noise of one site.
        by = setup.strategy.release_by
        self.sites = 0 if by is ReleaseBy.CLIENT else self.nodes if by is ReleaseBy.SITE else 1
        self._noises: dict[int, _Noise] = {}
        self._paths: Sequence[float] = _PATHS
        self._lasts: Sequence[float] = _LAST

    def plan(self) -> PlannedRun:
        """Return the run config, with its description."""
        self._check_given()
        check_declared(self.model, self.dataset)
        best, participations, learnt = self._best
        noise = self._noise(participations)
        entries = self._entries(best, participations, noise)
        found = self.values | {key: value for key, value in entries.items() if key not in self.kept}
        self._check_guarantee(found)
        if "delta" not in self.kept:
            found["delta"] = self._stated_delta(found)
        if "noise-multiplier" not in self.kept and self._in_vain:
            self._refuse()
        return PlannedRun(found, self._words(found, best, participations, self._left, learnt))

    @cached_property
    def _best(self) -> tuple[Rounds, int, float]:
        """The schedule, its participations, and its share of the gain without noise; NaN if that is not known."""
        tried = self._tried() if self._small else None
        return tried or self._by_rule()

    @property
    def _left(self) -> float:
        """The noise in a hypothesis after a round, in clip norms."""
        best, participations, _ = self._best
        noise = self._noise(participations)
        task = replace(self._task(noise.mechanism), hypotheses=self.k, clients_per_round=best.clients)
        return task.noise_left(noise.multiplier)

    @property
    def _drowned(self) -> float:
        """The noise of the whole run, relative to all its steps."""
        return self._left / math.sqrt(self._best[0].rounds)

    @property
    def _in_vain(self) -> bool:
        learnt = self._best[2]
        return learnt < _LEARNT or (math.isnan(learnt) and self._drowned > _DROWNED)

    def _check_given(self) -> None:
        run = self.run
        if run.protect is Protect.ROWS:
            text = '--epsilon is for clients, and protect = "rows" hides rows alone; give --row-epsilon and --rows'
            raise ConfigError(f'{text}, or set protect = "both"', code="config.breaks-epsilon")
        if "noise-multiplier" in self.kept and not run.noise_multiplier:
            text = "noise-multiplier = 0 has no guarantee; leave it out, or leave out --epsilon"
            raise ConfigError(text, code="config.breaks-epsilon")
        if "clipping" in self.kept and run.clipping is not Clipping.PUBLIC:
            text = f'clipping = "{run.clipping}" has no guarantee; leave it out, or leave out --epsilon'
            raise ConfigError(text, code="config.breaks-epsilon")
        if self.setup.strategy.discloses_choice and self.k > 1:
            text = f"strategy {run.strategy!r} discloses choices, so it has no guarantee; name another strategy"
            raise ConfigError(text, code="config.breaks-epsilon")

    # --- the search

    @property
    def _small(self) -> bool:
        """Whether the model can be tried on artificial clients in a few seconds."""
        run = self.run
        passes = run.local_steps or run.local_epochs * (-(-ROWS // run.batch_size) if run.batch_size else 1)
        work = self.n * ROWS * passes * 64
        whole = not (self.model.local_shapes or self.dataset.manifest.tokens)
        batched = not isinstance(learner_for(self.model, "cpu"), LoopLearner)
        return whole and batched and work <= _WORK

    @property
    def _update(self) -> LocalUpdate:
        run = self.run
        steps = run.local_epochs, run.step_size, run.batch_size, run.local_steps
        return LocalUpdate(*steps, descent=descent_of(run.optimizer))

    def _tried(self) -> tuple[Rounds, int, float] | None:
        """Return the best schedule on artificial clients, its participations, and its share of the gain without noise.

        None if they cannot tell.
        """
        proxies = [Proxy(self.model, self.dataset, self._update, self.k, seed) for seed in range(_PROXIES)]
        free = [proxy.learn(Rounds(10, 64)) for proxy in proxies]
        constant = float(np.mean([proxy.constant for proxy in proxies]))
        without = float(np.mean([proxy.error(one) for proxy, one in zip(proxies, free, strict=True)]))
        if not without < _TELLS * constant:
            return None  # the model learns nothing from artificial clients, so they tell nothing about noise
        way = float(np.mean([proxy.way(one) for proxy, one in zip(proxies, free, strict=True)]))

        @lru_cache
        def error(schedule: Rounds) -> float:
            return float(np.mean([proxy.error(proxy.learn(schedule, _DRAWS)) for proxy in proxies]))

        def scheduled(rounds: int, participations: int, path: float, last: float) -> Rounds:
            decay = self.run.clip_norm_decay if "clip-norm-decay" in self.kept else _decay(last, rounds)
            start = path * way / sum(decay**number for number in range(rounds))
            start = self.run.clip_norm if "clip-norm" in self.kept else start
            noise = self._noise(participations)
            clients = self._clients(rounds, participations)
            # At a site it is for the noise on counts.
            choice = noise.choice_epsilon if self.k > 1 and not self.sites else math.inf
            return Rounds(rounds, clients, start, decay, noise.deviation(self.n), self.sites, choice)

        pairs = [(rounds, times) for times in self._participations for rounds in self._rounds(times)]
        first = sorted(pairs, key=lambda pair: error(scheduled(pair[0], pair[1], _PATHS[2], _LAST[-1])))[:2]
        every = [
            (scheduled(pair[0], pair[1], path, last), pair[1])
            for pair in first
            for path in self._paths
            for last in self._lasts
        ]
        least = min(error(schedule) for schedule, _ in every)
        close = [one for one in every if error(one[0]) <= least + _AS_GOOD * abs(constant - least)]
        # Artificial clients are more alike than real ones, so noise harms real runs more.
        best, participations = min(close, key=lambda one: one[0].noise)
        learnt = (constant - error(best)) / max(constant - without, 1e-9)
        return best, participations, learnt

    def _by_rule(self) -> tuple[Rounds, int, float]:
        """Return a schedule for a model that cannot be tried: many small rounds, clipped to a first update."""
        participations = self._participations[0]
        turns = self.train * participations
        usual = int(np.clip(turns // _LARGE_ROUND, *_LARGE_ROUNDS))
        rounds = self.run.rounds if "rounds" in self.kept else min(usual, turns)
        decay = self.run.clip_norm_decay if "clip-norm-decay" in self.kept else _decay(_LAST[-1], rounds)
        start = self.run.clip_norm
        if "clip-norm" not in self.kept and not (self.model.local_shapes or self.dataset.manifest.tokens):
            proxy = Proxy(self.model, self.dataset, self._update, 1, 0)
            start = proxy.first_update()
        noise = self._noise(participations)
        clients = self._clients(rounds, participations)
        return Rounds(rounds, clients, start, decay, noise.deviation(self.n), self.sites), participations, math.nan

    @property
    def _participations(self) -> tuple[int, ...]:
        run = self.run
        if "max-participations" in self.kept:
            # In a random draw, a client may take part in every round.
            return (run.max_participations or run.rounds,)
        if {"rounds", "clients-per-round"} <= self.kept:
            return (max(1, -(-run.rounds * run.clients_per_round // self.train)),)
        return (1, 4) if self.sites and self.delta else (1,)

    def _rounds(self, participations: int) -> list[int]:
        run, turns = self.run, self.train * participations
        if "rounds" in self.kept:
            return [run.rounds]
        if "clients-per-round" in self.kept:
            return [max(1, turns // run.clients_per_round)]
        least = 1 if participations == 1 else participations
        return [one for one in _ROUNDS if least <= one <= turns] or [least]

    def _clients(self, rounds: int, participations: int) -> int:
        if "clients-per-round" in self.kept:
            return self.run.clients_per_round
        return max(1, min(self.train, self.train * participations // rounds))

    # --- the noise

    def _task(self, mechanism: str) -> Task:
        return Task(self.n, self.fewest, self.train, 1, mechanism, self.sites)

    def _noise(self, participations: int) -> _Noise:
        """Return the noise of the best mechanism; of a pure one, if that costs little more."""
        if participations not in self._noises:
            self._noises[participations] = self._worked_out(participations)
        return self._noises[participations]

    def _worked_out(self, participations: int) -> _Noise:
        run = self.run
        choice = run.choice_epsilon if "choice-epsilon" in self.kept else None
        if choice is None and self.sites:
            # A site's counts decide which updates are averaged: they need more of a small epsilon than a client's
            # choice.
            choice = min(_SITE_CHOICE, self.epsilon / (2 * participations))
        if "noise-multiplier" in self.kept:
            return _Noise(run.mechanism, run.noise_multiplier, run.choice_epsilon)

        def noise(mechanism: str, delta: float) -> _Noise:
            release = plan_for(self._task(mechanism), self.epsilon, delta, participations, choice).release
            return _Noise(mechanism, release.noise_multiplier, release.choice_epsilon)

        if "mechanism" in self.kept or not self.delta:
            return noise(run.mechanism if "mechanism" in self.kept else LAPLACE, self.delta)
        least = min(noise("gaussian", self.delta), noise(LAPLACE, self.delta), key=lambda one: one.deviation(self.n))
        # The choices alone may take a pure epsilon, and not one at delta.
        with suppress(ConfigError):
            pure = noise(LAPLACE, 0.0)
            if pure.deviation(self.n) <= _PURE * least.deviation(self.n):
                return pure
        return least

    # --- the result

    def _entries(self, best: Rounds, participations: int, noise: _Noise) -> dict[str, Any]:
        start, decay = float(f"{best.clip_norm:.3g}"), float(f"{best.decay:.3g}")
        last = start * decay ** (best.rounds - 1)
        return {
            "noise-multiplier": noise.multiplier,
            "mechanism": noise.mechanism,
            "choice-epsilon": noise.choice_epsilon,
            "clip-norm": start,
            "clip-norm-decay": decay,
            "clip-norm-floor": min(self.run.clip_norm_floor, float(f"{last:.1g}") / 2),
            "rounds": best.rounds,
            "clients-per-round": best.clients,
            "max-participations": participations,
            "restarts": 1,
        }

    def _released(self, run: RunConfig) -> tuple[Release, int]:
        release = released_by(self.setup.strategy.release_by, run.release(self.n, self.fewest))
        return release, run.most_participations

    def _check_guarantee(self, found: Mapping[str, Any]) -> None:
        release, times = self._released(RunConfig.parse(found))
        have = guarantee({release: times}, self.delta)
        if have is None or have.epsilon > self.epsilon * (1 + 1e-9):
            told = gap(release) if have is None else f"{times} participations cost epsilon {amount(have.epsilon)}"
            named = ", ".join(sorted(key for key in self.kept if key in _BEARING)) or "the configuration"
            raise ConfigError(
                f"{named}: {told}, but epsilon {self.epsilon:g} was wanted; leave some of them to the plan",
                code="config.breaks-epsilon",
            )

    def _stated_delta(self, found: Mapping[str, Any]) -> float:
        """Return the delta at which the run states its guarantee: 0 if its pure epsilon is what was wanted."""
        release, times = self._released(RunConfig.parse(found))
        return 0.0 if pure_spent({release: times}) <= self.epsilon * (1 + 1e-9) else self.delta

    # --- the refusal

    def _refuse(self) -> None:
        """Raise the error for a run in vain. It proposes a strategy or an epsilon only if that leads to a plan."""
        learnt = self._best[2]
        told = (
            f"the noise would leave {max(learnt, 0):.0%} of what a run without noise learns"
            if learnt == learnt
            else (f"the noise over the whole run would be {self._drowned:.2g} times as long as all steps together")
        )
        ways = []
        if not self.sites and self._would_plan(strategy="site-average"):
            ways.append("strategy=site-average, if clients trust their site")
        if larger := next((one for one in self._larger if self._would_plan(epsilon=one)), None):
            ways.append(f"--epsilon {larger:g}")
        more = next((one for one in self._more if self._would_plan(train=one)), None)
        ways += [f"about {more:,} clients" if more else "more clients", self._fewer_parameters()]
        raise ConfigError(
            f"epsilon {self.epsilon:g} for {self.train:,} clients and {self.n:,} parameters: {told}. Each client is "
            f"better off alone, unless you change one of these: {'; '.join(ways)}",
            code="config.in-vain",
        )

    @property
    def _larger(self) -> list[float]:
        """Larger epsilons that still say something."""
        doubled = (self.epsilon * 2**power for power in itertools.count(1))
        return list(itertools.takewhile(lambda one: one <= MEANINGFUL, doubled))

    @property
    def _more(self) -> list[int]:
        """Numbers of clients from that which leaves `_SMALL_NOISE` in the mean of all releases."""
        times = self._noise_of_all / _SMALL_NOISE
        least = math.ceil(float(f"{self.train * (times if self.sites else times**2):.2g}"))
        return [least * 2**power for power in range(4) if least * 2**power > self.train]

    def _would_plan(self, epsilon: float = 0.0, train: int = 0, strategy: str = "") -> bool:
        """Return whether one of these in place of the run's own leads to a plan."""
        values = self.values | ({"strategy": strategy} if strategy else {})
        with suppress(ConfigError):
            setup = Setup.parse(values) if strategy else self.setup
            other = _Search(values, self.kept, setup, self.dataset, epsilon or self.epsilon, self.delta, self.nodes)
            other.train = train or self.train
            # A search takes seconds. Large noise makes it needless, and some of the schedules show what is possible.
            if not strategy:
                other._paths, other._lasts = _PATHS[::2], _LAST[-1:]
            return not (other._small and other._noise_of_all > 1) and not other._in_vain
        return False

    @property
    def _noise_of_all(self) -> float:
        """The noise in the mean of all releases, in clip norms, with each client once."""
        length = self._noise(1).deviation(self.n) * math.sqrt(self.n)
        return length * math.sqrt(self.sites) / self.train if self.sites else length / math.sqrt(self.train)

    def _fewer_parameters(self) -> str:
        """Say which column's categories take most parameters, if these are more than half."""
        layout = self.dataset.manifest.layout
        listed = [column for column in layout.features if column.type == "category"] if layout else []
        if self.model.linear and listed:
            widest = max(listed, key=lambda column: len(column.stored))
            taken = self.n * len(widest.stored) // (self.dataset.features.shape[-1] + 1)
            if 2 * taken > self.n:
                return f"a model of fewer parameters (the categories of {widest.name} take {taken})"
        return "a model of fewer parameters"

    def _words(
        self, found: Mapping[str, Any], best: Rounds, participations: int, left: float, learnt: float
    ) -> list[str]:
        run = RunConfig.parse(found)
        release, times = self._released(run)
        have = guarantee({release: times}, run.delta)
        assert have is not None, "it was checked"
        times_in_words = "once" if participations == 1 else f"up to {participations} times"
        who = _WHO[self.setup.strategy.release_by]
        lines = [
            f"Planned: {stated(have)} for a client over the whole run, with {count_of(run.rounds, 'round')} of "
            f"{count_of(run.clients_per_round, 'client')}. A client takes part {times_in_words}, and {who}.",
            f"Noise multiplier {run.noise_multiplier:.4g} ({run.mechanism}), clip norm {run.clip_norm:.3g} times "
            f"{run.clip_norm_decay:.3g} a round: noise of {left:.2g} clip norms in a hypothesis.",
        ]
        if self.k == 1 and "hypotheses" not in self.kept:
            kinds = "Where they are of several kinds, try hypotheses=2; each of the two has more noise."
            lines.append(f"One model for all clients. {kinds}")
        lines += _of_scales(self.dataset)
        if learnt == learnt:
            lines.append(
                f"On made-up clients, this noise leaves {min(learnt, 1):.0%} of what a run without noise learns. No "
                "row was read."
            )
        else:
            lines.append(
                "Made-up clients cannot show how much this model learns, so a rule sets the rounds. "
                f"Over the whole run, the noise is {left / math.sqrt(best.rounds):.2g} times as long as all steps. "
                "No row was read."
            )
        return lines


_BEARING = (*PRIVACY, "rounds", "max-participations", "hypotheses", "strategy", "clients-per-round")


def _decay(last: float, rounds: int) -> float:
    return last ** (1 / (rounds - 1)) if rounds > 1 else 1.0
