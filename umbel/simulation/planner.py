"""Plans of whole runs, from a dataset's public facts, and settings for the user's own data in simulation.

With a wanted guarantee no row is read. Without one, a run of the user's own data has no noise, and its steps suit the
rows.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.data import Dataset
from umbel.models.model import Model
from umbel.privacy.accounting.guarantee import stated
from umbel.privacy.accounting.plan import RowPlan, RowTask, rounded_up, row_plan_for, usual_choice
from umbel.privacy.accounting.rows import needed_budget, row_guarantee
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Clipping, Protect, ReleaseBy
from umbel.protocol.run_config import AUTO, RunConfig
from umbel.protocol.words import count_of
from umbel.server.setup import Setup
from umbel.simulation import client_planner
from umbel.simulation.client_planner import PRIVACY, PROVISIONAL
from umbel.simulation.facts import Span, check_declared, estimated_scales, feature_spans, made_up
from umbel.simulation.wanted import Wanted

_ROW_ROUNDS = 20
"""Rounds of a run that hides rows and has no configuration."""
_PASSES = 10
_ROOMY = 3.0  # standard deviations within which a feature's mean should lie, and its scale within as many times 1
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
    if own and wanted.any:
        found.setdefault("hypotheses", 1)
    if wanted.epsilon is not None:
        found |= {key: value for key, value in PROVISIONAL.items() if key not in kept}
    setup = Setup.parse(found)
    dataset = setup.open_dataset()
    if dataset is None:
        raise ConfigError('dataset = "" has nothing to plan from; name a dataset', code="config.no-dataset")
    if own:
        exact = not wanted.any and not _wants_privacy(setup.config, kept)
        entries = local_training(setup, dataset, exact)
        if wanted.row_epsilon is not None:
            entries |= {"rounds": _ROW_ROUNDS, "clients-per-round": _usual_clients(dataset.manifest.train)}
        found |= {key: value for key, value in entries.items() if key not in kept}
        setup = Setup.parse(found)
    if wanted.row_epsilon is not None:
        check_declared(setup.model, dataset)
        planned, words = _with_row_noise(found, kept, setup, wanted, dataset.manifest.train)
        return PlannedRun(planned, [*words, *estimated_scales(dataset.manifest)])
    if wanted.epsilon is not None:
        return PlannedRun(*client_planner.with_noise(found, kept, setup, wanted, dataset, sites))
    return _without_noise(found, kept, own, setup, dataset, name)


def _wants_privacy(run: RunConfig, kept: frozenset[str]) -> bool:
    """Return whether the user's own entries ask for noise, so that nothing may be fitted to rows."""
    return run.protect.rows or (run.noise_multiplier > 0 and bool(kept & set(PRIVACY)))


def _usual_clients(train: int) -> int:
    """Return how many training clients a round asks."""
    return train if train <= 100 else min(max(100, train // 10), 1000)


def _without_noise(
    found: dict[str, Any], kept: frozenset[str], own: bool, setup: Setup, dataset: Dataset, name: str
) -> PlannedRun:
    """Return a run config of the user's own data without noise, and the line that says so."""
    if not own or kept & set(PRIVACY):
        return PlannedRun(found, [])
    entries: dict[str, Any] = {
        "noise-multiplier": 0.0,
        "choice-epsilon": 0.0,
        "clipping": str(Clipping.UPDATE),
        "max-participations": 0,
        "rounds": 50,
        "clients-per-round": _usual_clients(dataset.manifest.train),
    }
    if setup.strategy.release_by is not ReleaseBy.CLIENT:
        entries |= {"clipping": str(Clipping.PUBLIC), "clip-norm": 1e6, "clip-norm-decay": 1.0}
    if dataset.manifest.split["validation"]:
        entries["patience"] = 15
    found |= {key: value for key, value in entries.items() if key not in kept}
    scaled = (
        "; its steps and units were fitted to its rows, which a guarantee does not allow" if setup.model.linear else ""
    )
    command = shlex.join(["umbel", "run", name or str(found["dataset"]), "--epsilon", "4"])
    return PlannedRun(found, [f"No noise: this run guarantees nothing{scaled}. With a guarantee: {command}"])


def _with_row_noise(
    found: Mapping[str, Any], kept: frozenset[str], setup: Setup, wanted: Wanted, train: int
) -> tuple[dict[str, Any], list[str]]:
    """Return a run config with the noise that a wanted guarantee needs, and lines that describe it.

    Parameters
    ----------
    found : mapping
        Settings, with those of the wanted guarantee.
    kept : frozenset of str
        Keys that the user gave.
    setup : Setup
        Of these settings.
    wanted : Wanted
        With a guarantee of rows.
    train : int
        Training clients.

    Raises
    ------
    ConfigError
        If the user's entries break the guarantee, or no noise reaches it.
    """
    run, k, fewest = setup.config, setup.strategy.hypotheses, setup.strategy.fewest_hypotheses
    epsilon, typical, settings = wanted.row_epsilon, wanted.rows, run.of_rows
    assert settings is not None, "they are those of the wanted guarantee"
    assert epsilon is not None, "it is asked for"
    assert typical is not None, "it comes with the epsilon"
    _check(setup, kept)
    found = dict(found)
    if "restarts" not in kept:
        found["restarts"] = 1
    if "max-participations" not in kept:
        found["max-participations"] = min(run.rounds, max(1, -(-run.rounds * run.clients_per_round // train)))
    times = RunConfig.parse(found).most_participations
    if "choice-epsilon" not in kept:
        found["choice-epsilon"] = usual_choice(epsilon, times) if k > 1 else 0.0
    rows = RunConfig.parse(found).training().row_privacy
    assert rows is not None, "the run hides rows"
    task = RowTask(typical, rows.rate, rows.steps, times, fewest, found["choice-epsilon"])
    planned = row_plan_for(task, epsilon, wanted.at_delta)
    found["rows"] = str(replace(settings, noise=planned.noise_multiplier))
    found.setdefault("delta", wanted.at_delta)
    n = setup.model.num_parameters
    have = row_guarantee({RunConfig.parse(found).release(n, fewest): times}, wanted.at_delta)
    assert have is not None, "the choice is hidden"
    assert have.epsilon <= epsilon * (1 + 1e-9), "the plan is for these settings"
    return found, _words(planned, RunConfig.parse(found), n * k, min(run.clients_per_round, train))


def _check(setup: Setup, kept: frozenset[str]) -> None:
    run = setup.config
    wrong = ""
    if run.protect is not Protect.ROWS:
        wrong = f'protect = "{run.protect}" needs noise on models as well: plan the rows with protect = "rows"'
    elif "rows" in kept:
        wrong = "the noise of rows is planned for row-epsilon: leave one out"
    elif setup.strategy.discloses_choice and setup.strategy.hypotheses > 1:
        wrong = f"strategy {run.strategy!r} discloses choices, so rows have no guarantee: name another strategy"
    if wrong:
        raise ConfigError(f"{wrong}, or leave out row-epsilon", code="config.breaks-epsilon")


def _words(planned: RowPlan, run: RunConfig, numbers: int, clients: int) -> list[str]:
    task, have, sigma = planned.task, planned.guarantee, planned.noise_multiplier
    often = "once" if task.participations == 1 else f"up to {task.participations} times"
    settings = run.of_rows
    assert settings is not None, "the run hides rows"
    noise = sigma / settings.batch * math.sqrt(numbers / clients)
    allowed = rounded_up(needed_budget(task.release(sigma), task.participations, have.delta))
    chosen = f" max-choice-epsilon={task.choice_epsilon:g}" if task.hypotheses > 1 else ""
    return [
        f"Planned: {stated(have)} for each row of a client over the whole run, "
        f"with {count_of(run.rounds, 'round')} of {count_of(clients, 'client')}. A client takes part {often}, with "
        f"{count_of(task.steps, 'training step')} each time.",
        f"Noise multiplier {sigma:.4g} in training, row clip norm {settings.clip:g}: in a round's mean gradient, "
        f"the noise is {noise:.2g} row clip norms long if clients have {count_of(task.rows, 'row')}.",
        "It hides each single row, and not what the rows of a client have in common. No row was read.",
        f'A site\'s policy: protect="rows" budget="inf" row-budget="{allowed:.4g} delta={have.delta:g}" '
        f"min-row-noise-multiplier={sigma} max-row-rate={task.rate} max-local-steps={task.steps} "
        f"max-hypotheses={task.hypotheses}{chosen}",
        *planned.warnings,
    ]


def local_training(setup: Setup, dataset: Dataset, exact: bool) -> dict[str, Any]:
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
        rows = _sample(dataset if exact else made_up(model, dataset))
        rows = rows if exact else [np.concatenate(rows)]
        # A step for declared ranges is short: with many features, it takes as many passes to get anywhere.
        passes = _PASSES if exact else max(_PASSES, len(offset))
        step = step_size(model, [(one - offset) / scale for one in rows], exact)
        found |= {"step-size": step, "batch-size": 0, "local-epochs": passes}
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


def step_size(model: Model, clients: list[NDArray[np.float64]], exact: bool) -> float:
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
