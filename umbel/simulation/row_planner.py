"""Plans of whole runs that hide each row of a client: noise in training for a wanted epsilon. No row is read."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from umbel.privacy.accounting.guarantee import MEANINGFUL, Guarantee, stated
from umbel.privacy.accounting.plan import large_delta, rounded_up, row_noise_for, usual_choice
from umbel.privacy.accounting.rows import needed_budget, row_guarantee
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Protect, Release
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import RowSettings
from umbel.protocol.words import count_of
from umbel.simulation.facts import Draft, check_declared, estimated_scales, filled


def with_row_noise(draft: Draft) -> tuple[dict[str, Any], list[str]]:
    """Return a run config with the noise in training that a wanted guarantee of rows needs, and lines about it.

    Raises
    ------
    ConfigError
        If the user's entries break the guarantee, no noise reaches it, or a column has no declared range.
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

    sigma = row_noise_for(with_noise, times, wanted.epsilon, wanted.delta)
    values |= {"rows": str(replace(settings, noise=sigma)), "delta": values.get("delta", wanted.delta)}
    have = row_guarantee({with_noise(sigma): times}, wanted.delta)
    assert have is not None, "a hidden choice has a guarantee"
    words = _words(RunConfig.parse(values), with_noise(sigma), settings, have, draft)
    return values, [*words, *estimated_scales(draft.dataset.manifest)]


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
    noise = sigma / settings.batch * math.sqrt(release.n * draft.setup.strategy.hypotheses / clients)
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
