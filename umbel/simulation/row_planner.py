"""Plans of whole runs that hide rows: noise in training for a wanted epsilon of each row, and rounds by a rule.

No row is read: their number at a typical client is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from umbel.privacy.accounting.guarantee import stated
from umbel.privacy.accounting.plan import rounded_up, usual_choice
from umbel.privacy.accounting.row_plan import RowPlan, RowTask, row_plan_for
from umbel.privacy.accounting.rows import needed_budget, row_guarantee
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Protect
from umbel.protocol.run_config import RunConfig
from umbel.protocol.words import count_of
from umbel.server.setup import Setup
from umbel.simulation.wanted import Wanted

ROUNDS = 20
"""Rounds of a run without a configuration."""


def with_noise(
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
