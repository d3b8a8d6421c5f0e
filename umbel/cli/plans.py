"""Plans: the cost of a run for its clients, or the noise for a wanted guarantee, before the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tomli_w
from pydantic import Field

from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.accounting.plan import Plan, Task, plan_for
from umbel.privacy.accounting.plan import plan as plan_forward
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import DISCRETE_GAUSSIAN, LAPLACE, Protect, ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.simulation.start import check, read_values, values_of
from umbel.simulation.wanted import Wanted

if TYPE_CHECKING:
    from umbel.simulation.wanted import PlannedRun

ReleaseName = Literal["client", "site", "secure"]
_STRATEGIES: Mapping[ReleaseName, dict[str, Any]] = {
    "client": {},
    "site": {"strategy": "site-average"},
    "secure": {"strategy": "secure-average", "mechanism": DISCRETE_GAUSSIAN},
}
_FEWEST = 3  # sites in a secure sum, by default


def as_toml(planned: PlannedRun) -> str:
    """Return a planned run as a file that ``umbel run`` and ``flwr run . --run-config`` take."""
    return "".join(f"# {line}\n" for line in planned.words) + tomli_w.dumps(planned.values)


def write_text(file: Path, text: str) -> None:
    """Write a file; raise `ConfigError` if it cannot be written."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", code="config.unwritable") from None


@dataclass(frozen=True)
class Figures:
    """Numbers of a run. Where no configuration tells the first five, they are needed."""

    parameters: int | None = None  # n
    hypotheses: int | None = None  # k
    clients: int | None = None  # training clients
    clients_per_round: int | None = None  # U
    mechanism: str | None = None  # by default laplace
    noise_multiplier: float | None = None  # nu, to compute the cost; by default the configuration's
    rounds: int | None = None
    target_epsilon: float | None = None  # the wanted guarantee, between any two data sets of a client, to compute nu
    participations: Annotated[int, Field(ge=1)] = 1  # at most, with a target
    choice_epsilon: float | None = None  # of the random choice; by default open, or a quarter of the target each time


def plan(
    config: str | Path | Mapping[str, Any] = "",
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    row_epsilon: float | None = None,
    rows: int | None = None,
    sites: int = 1,
    release: ReleaseName | None = None,
    **values: Any,
) -> PlannedRun:
    """Plan a whole run for a guarantee, as ``umbel plan NAME --epsilon`` does.

    Parameters
    ----------
    config, epsilon, delta, row_epsilon, rows
        As for `umbel.run`.
    sites : int
        Number of sites, if these release sums.
    release : str, optional
        The party that adds the noise: ``"client"``, ``"site"`` to the sum of its clients, or ``"secure"``, all sites
        together to one sum; by default the strategy decides. It names the strategy.
    **values
        Run-config values that override the plan, with underscores for hyphens.

    Returns
    -------
    PlannedRun
        ``umbel.run(planned.values)`` runs it, and ``planned.words`` explain it.

    Raises
    ------
    ConfigError
        If a value is missing, given twice or impossible, or the run would learn nothing with the guarantee.
    """
    _check_sites(release, sites)
    decided = _STRATEGIES[release] if release else {}
    given = {key.replace("_", "-"): one for key, one in values.items()}
    if twice := next((name for name in decided if name in given), ""):
        text = f'release = "{release}" decides {twice}; leave {twice} or release out'
        raise ConfigError(text, code="config.both-ways")
    return values_of(config, decided | given, Wanted.of(epsilon, delta, row_epsilon, rows), sites, ask=False)


def _check_sites(release: ReleaseName | None, sites: int) -> None:
    if release == "secure" and sites < _FEWEST:
        text = f"a secure sum is over at least {_FEWEST} sites, not {sites}; give sites"
        raise ConfigError(text, code="config.impossible-figure")


def price(
    config: str | Path = "", *, delta: float = DELTA, release: ReleaseName | None = None, sites: int = 1, **figures: Any
) -> Plan:
    """Compute the cost of a run for its clients, or the noise for a wanted guarantee.

    Parameters
    ----------
    config : str or Path
        A TOML file of run-config values, or the name of one in configs/: its model and its dataset give n, k, the
        clients and U.
    delta : float
        0 for a pure epsilon.
    release, sites : str, int
        As for `plan`; by default the configuration's strategy decides, or each client.
    **figures
        Those of `Figures`.

    Raises
    ------
    ConfigError
        If a figure is missing, given twice or impossible.
    """
    given, limit = Figures(**figures), math.inf
    nu, rounds, target, choice = given.noise_multiplier, given.rounds, given.target_epsilon, given.choice_epsilon
    if target is not None and (nu is not None or rounds is not None):
        raise ConfigError("give target-epsilon, or noise-multiplier and rounds, not both", code="config.both-ways")
    _check_sites(release, sites)
    numbers: tuple[Any, Any, Any, Any] = (given.parameters, given.hypotheses, given.clients, given.clients_per_round)
    if str(config):
        if any(number is not None for number in (*numbers, given.mechanism)):
            text = (
                "the configuration has parameters, hypotheses, clients, clients-per-round and mechanism; leave them out"
            )
            raise ConfigError(text, code="config.given-twice")
        task, run = _task_of(config)
        limit = run.max_participations or math.inf
        if target is None:
            nu = run.noise_multiplier if nu is None else nu
            choice = run.choice_epsilon if choice is None else choice
            rounds = run.rounds if rounds is None else rounds
    elif None in numbers:
        text = "name a configuration or a dataset, or give parameters, hypotheses, clients and clients-per-round"
        raise ConfigError(text, code="config.missing-figure")
    else:
        task = Task(*numbers, mechanism=given.mechanism or LAPLACE)
    if release == "secure":
        if given.mechanism not in (None, DISCRETE_GAUSSIAN):
            text = f'secure sums have mechanism "{DISCRETE_GAUSSIAN}", not "{given.mechanism}"; leave mechanism out'
            raise ConfigError(text, code="config.mechanism")
        task = replace(task, mechanism=DISCRETE_GAUSSIAN)
    task = replace(task, by=ReleaseBy(release or task.by), sites=sites)
    if target is not None:
        return plan_for(task, target, delta, given.participations, choice)
    if nu is None or rounds is None:
        raise ConfigError("give noise-multiplier and rounds, or target-epsilon", code="config.missing-figure")
    return plan_forward(task, nu, choice or 0.0, rounds, delta, limit)


def _task_of(config: str | Path) -> tuple[Task, RunConfig]:
    """Return the task of a configuration, and the configuration."""
    setup = check(read_values(config))
    run, strategy, manifest = setup.config, setup.strategy, setup.manifest
    if run.protect is Protect.ROWS:
        text = 'protect = "rows" hides rows, and not clients; plan it for rows: --row-epsilon and --rows'
        raise ConfigError(text, code="config.hides-rows")
    assert manifest is not None, "it was checked"
    numbers = setup.model.num_parameters, strategy.fewest_hypotheses, manifest.train
    return Task(*numbers, min(run.clients_per_round, manifest.train), run.mechanism, strategy.release_by), run
