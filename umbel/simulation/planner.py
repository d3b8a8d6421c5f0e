"""Plans of whole runs, from a dataset's public facts, and settings for the user's own data in simulation.

With a wanted guarantee no row is read. Without one, a run of the user's own data has no noise, and its steps suit the
rows.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from umbel.data import Dataset
from umbel.privacy.accounting.guarantee import DELTA, MEANINGFUL, Guarantee, stated, with_before
from umbel.privacy.accounting.plan import large_delta, rounded_up, row_noise_for, usual_choice
from umbel.privacy.accounting.rows import needed_budget, row_guarantee
from umbel.protocol.errors import ConfigError
from umbel.protocol.ranges import before
from umbel.protocol.release import Clipping, Protect, Release, ReleaseBy
from umbel.protocol.run_config import ClipSchedule, RunConfig
from umbel.protocol.tasks import RowSettings
from umbel.protocol.words import count_of
from umbel.server.setup import Setup
from umbel.simulation.client_planner import FEW_CLIENTS, PRIVACY, PROVISIONAL, check_possible, with_noise
from umbel.simulation.facts import Draft, check_declared, filled, ranges_of, undeclared
from umbel.simulation.local_training import local_training, typical_norm
from umbel.simulation.ranges import ask_first
from umbel.simulation.wanted import PlannedRun, Wanted

_USUAL = 4.0
"""The epsilon that a run without a guarantee proposes."""
_ROW_ROUNDS = 20
"""Rounds of a run that hides rows and has no configuration."""
_ROW_STEPS = 20
"""Steps of a participation in such a run of a linear model, which gets far in many short steps."""
_NOISE_OF_A_STEP = 0.15
"""Length of the noise in a mean gradient up to which a longer row clip norm helps: measured on two tables."""


def plan_run(
    values: Mapping[str, Any],
    given: Iterable[str],
    configured: bool,
    wanted: Wanted | None,
    sites: int,
    name: str,
    ask: bool,
) -> PlannedRun:
    """Return a run config with the missing entries; see `umbel.simulation.start.values_of`.

    The values are those of a configuration, if there is one (`configured`), or only the dataset's name, overridden by
    `Wanted.settings` and by the user's, whose keys are the given ones. Raises `ConfigError` if the run would learn
    nothing with the guarantee, the user's entries break it, or it needs ranges that are not declared. With `ask`, the
    simulated clients are asked for these first.
    """
    kept, by_rows = frozenset(given), wanted is not None and wanted.rows is not None
    planned = dict(values)
    if wanted and not configured:
        planned.setdefault("hypotheses", 1)
    if wanted and not by_rows:
        clipping = ClipSchedule.read(str(planned.get("clipping", Clipping.PUBLIC)), "clipping")
        public = str(replace(clipping, mode=Clipping.PUBLIC))
        planned = filled(planned, {**PROVISIONAL, "clipping": public}, kept)
    setup = Setup.parse(planned)
    dataset = setup.open_dataset()
    assert dataset is not None, "a simulated run names one"
    clients, words = _usual_clients(dataset.manifest.train), list[str]()
    if wanted and (cost := before(dataset.manifest.provenance)):
        planned.setdefault("ranges", cost)
    elif wanted and ask and not (by_rows or configured or {"model", "ranges"} & kept):
        by = ReleaseBy.SECURE if setup.strategy.release_by is ReleaseBy.SECURE else ReleaseBy.SITE
        if bare := undeclared(setup.model, dataset):
            check_possible(Draft(planned, kept, wanted, setup, dataset, sites))
            found = ask_first(bare, dataset, str(planned["dataset"]), wanted, by, sites, setup.config.seed)
            dataset, planned["ranges"], words = found
    setup = Setup.parse(planned)
    if not configured:
        noisy = setup.config.protect.rows or (setup.config.noise_multiplier > 0 and bool(kept & set(PRIVACY)))
        planned = filled(planned, local_training(setup, dataset, exact=not (wanted or noisy)), kept)
        if by_rows:
            steps = {"local-steps": _ROW_STEPS} if setup.model.linear else {}
            planned = filled(planned, {"rounds": _ROW_ROUNDS, "clients-per-round": clients} | steps, kept)
        setup = Setup.parse(planned)
    if wanted:
        draft = Draft(planned, kept, wanted, setup, dataset, sites)
        values, lines = (with_row_noise if by_rows else with_noise)(draft)
        return PlannedRun(values, [*words, *lines])
    if configured or kept & set(PRIVACY):
        return PlannedRun(planned, [])
    entries = _without_noise(setup, clients, bool(dataset.manifest.split["validation"]))
    scaled = (
        "; its steps and units were fitted to its rows, which a guarantee does not allow" if setup.model.linear else ""
    )
    command = f"umbel run {shlex.quote(name or str(planned['dataset']))} {_usual_guarantee(planned, dataset, sites)}"
    line = f"No noise: this run guarantees nothing{scaled}. With a guarantee: {command}"
    return PlannedRun(filled(planned, entries, kept), [line])


def _usual_guarantee(planned: Mapping[str, Any], dataset: Dataset, sites: int) -> str:
    """Return the options of a run with a guarantee of clients, or of rows if there are too few clients for that, and
    what these need first: a few clients cannot be asked for ranges either."""
    values = {**planned, **PROVISIONAL, "clipping": str(ClipSchedule(Clipping.PUBLIC)), "hypotheses": 1}
    setup = Setup.parse(values)
    try:
        check_possible(Draft(values, frozenset(), Wanted(_USUAL, DELTA), setup, dataset, sites))
    except ConfigError:
        if dataset.manifest.train <= FEW_CLIENTS:
            bare = undeclared(setup.model, dataset)
            first = f". Import the table again first, with --replace and the public {ranges_of(bare)}" if bare else ""
            return f"--row-epsilon {_USUAL:g} --rows {np.median(dataset.lengths):.0f}{first}"
    return f"--epsilon {_USUAL:g}"


def _usual_clients(train: int) -> int:
    """Return how many training clients a round asks."""
    return train if train <= 100 else min(max(100, train // 10), 1000)


def _without_noise(setup: Setup, clients: int, validates: bool) -> dict[str, Any]:
    """Return the entries of a run of the user's own data without noise."""
    entries: dict[str, Any] = {
        "noise-multiplier": 0.0,
        "choice-epsilon": 0.0,
        "clipping": str(Clipping.UPDATE),
        "max-participations": 0,
        "rounds": 50,
        "clients-per-round": clients,
    }
    if setup.strategy.release_by is not ReleaseBy.CLIENT:
        entries["clipping"] = str(ClipSchedule(Clipping.PUBLIC, norm=1e6, decay=1.0))
    return {**entries, "patience": 15} if validates else entries


# --- noise in training, which hides each row of a client


def with_row_noise(draft: Draft) -> tuple[dict[str, Any], list[str]]:
    """Return a run config with the noise in training that a wanted guarantee of rows needs, and lines about it.

    Raises `ConfigError` if the user's entries break the guarantee, no noise reaches it, or a column has no range.
    """
    setup, wanted, train = draft.setup, draft.wanted, draft.dataset.manifest.train
    run, model, fewest = setup.config, setup.model, setup.strategy.fewest_hypotheses
    check_declared(model, draft.dataset)
    _check(draft)
    turns = min(run.rounds, max(1, -(-run.rounds * run.clients_per_round // train)))
    values = filled(draft.values, {"restarts": 1, "max-participations": turns}, draft.kept)
    times = RunConfig.parse(values).most_participations
    if "choice-epsilon" not in draft.kept:
        values["choice-epsilon"] = usual_choice(wanted.epsilon, times) if setup.strategy.hypotheses > 1 else 0.0
    run = RunConfig.parse(values)
    release, settings = run.release(model.num_parameters, fewest), run.rows
    assert settings is not None, "they are those of the wanted guarantee"

    def with_noise(sigma: float) -> Release:
        return replace(release, row_noise_multiplier=sigma)

    sigma = row_noise_for(with_noise, times, wanted.epsilon, wanted.delta, run.before)
    clients, norm = min(run.clients_per_round, train), settings.clip
    if model.linear:
        noise = _noise_of_a_step(sigma, release, settings, clients, setup.strategy.hypotheses)
        norm = float(f"{max(norm, min(typical_norm(model, run.step_size), _NOISE_OF_A_STEP / noise)):.2g}")
    settings = replace(settings, noise=sigma, clip=norm)
    values |= {"rows": str(settings), "delta": values.get("delta", wanted.delta)}
    have = row_guarantee(with_before({with_noise(sigma): times}, run.before), wanted.delta)
    assert have is not None, "a hidden choice has a guarantee"
    words = _words(RunConfig.parse(values), with_noise(sigma), settings, have, draft)
    return values, words


def _noise_of_a_step(sigma: float, release: Release, settings: RowSettings, clients: int, k: int) -> float:
    """Return the length of the noise in a round's mean gradient, in row clip norms."""
    return sigma / settings.batch * math.sqrt(release.n * k / clients)


def _check(draft: Draft) -> None:
    """Raise `ConfigError` if the user's entries break the guarantee."""
    run, strategy, reason = draft.setup.config, draft.setup.strategy, ""
    if run.protect is not Protect.ROWS:
        reason = f'protect = "{run.protect}" needs noise on models as well: plan the rows with protect = "rows"'
    elif "rows" in draft.kept:
        reason = "the noise of rows is planned for row-epsilon: leave one out"
    elif strategy.discloses_choice and strategy.hypotheses > 1:
        reason = f"strategy {run.strategy!r} discloses choices, so rows have no guarantee: name another strategy"
    if reason:
        raise ConfigError(f"{reason}, or leave out row-epsilon", code="config.breaks-epsilon")


def _words(run: RunConfig, release: Release, settings: RowSettings, have: Guarantee, draft: Draft) -> list[str]:
    rows, times, sigma = draft.wanted.rows, run.most_participations, release.row_noise_multiplier
    assert rows is not None, "the guarantee is of rows"
    clients = min(run.clients_per_round, draft.dataset.manifest.train)
    often = "once" if times == 1 else f"up to {times} times"
    noise = _noise_of_a_step(sigma, release, settings, clients, draft.setup.strategy.hypotheses)
    allowed = rounded_up(needed_budget(release, times, have.delta))
    chosen = f" max-choice-epsilon={run.choice_epsilon:g}" if release.hypotheses > 1 else ""
    lines = [
        f"Planned: {stated(have)} for each row of a client over the whole run, "
        f"with {count_of(run.rounds, 'round')} of {count_of(clients, 'client')}. A client takes part {often}, with "
        f"{count_of(release.row_steps, 'training step')} each time.",
        f"Noise multiplier {sigma:.4g} in training, row clip norm {settings.clip:g}: in a round's mean gradient, "
        f"the noise is {noise:.2g} row clip norms long if clients have {count_of(rows, 'row')}.",
        "It hides each single row, and not what the rows of a client have in common. No row was read.",
        f'A site\'s policy: protect="rows" budget="inf" row-budget="{allowed:.4g} delta={have.delta:g}" '
        f'rows="noise={sigma} rate={release.row_rate}" max-work="steps={release.row_steps}" '
        f"max-hypotheses={release.hypotheses}{chosen}",
    ]
    if have.epsilon > MEANINGFUL:
        lines.append(
            f"A row may spend epsilon {have.epsilon:,.0f}. Above {MEANINGFUL} a guarantee proves next to "
            "nothing. Use more noise, a smaller row-rate, or fewer steps."
        )
    return [*lines, *large_delta(have.delta, rows, "rows")]
