"""Plans: the cost of a run for its clients, or the noise for a wanted guarantee, before the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import tomli_w

from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.accounting.plan import Plan, Task, plan_for, what_helps
from umbel.privacy.accounting.plan import plan as plan_forward
from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import LAPLACE, Protect, ReleaseBy
from umbel.protocol.run_config import RunConfig

if TYPE_CHECKING:
    from umbel.simulation.planner import PlannedRun

ReleaseName = Literal["client", "site", "secure"]
_STRATEGIES: Mapping[ReleaseName, dict[str, Any]] = {
    "client": {},
    "site": {"strategy": "site-average"},
    "secure": {"strategy": "secure-average", "mechanism": DiscreteGaussian.name},
}
_FEWEST = 3  # sites in a secure sum, by default
_LARGE = 0.1
"""Product of delta and the number of clients above which delta protects too few of them."""


def as_toml(planned: PlannedRun) -> str:
    """Return a planned run as a file that ``umbel run`` and ``flwr run . --run-config`` take."""
    return "".join(f"# {line}\n" for line in planned.words) + tomli_w.dumps(planned.values)


@dataclass(frozen=True)
class Planned:
    """A plan, and its basis.

    Attributes
    ----------
    figures : Plan
        Its `release` has nu and choice-epsilon.
    clients : int
        Training clients.
    ways : dict
        Factors by which the noise would be less with more clients, fewer parameters or fewer participations.
    radius : float or None
        Median norm of a client's first update: a first guess of the clip norm. None unless the data are public.
    by : ReleaseBy
        The party that adds the noise.
    """

    figures: Plan
    delta: float
    clients: int
    ways: dict[str, float] = field(default_factory=dict)
    radius: float | None = None
    by: ReleaseBy = ReleaseBy.CLIENT

    @property
    def warnings(self) -> list[str]:
        """Explanations of figures that mean trouble."""
        if self.delta * self.clients <= _LARGE:
            return self.figures.warnings
        text = f"At delta {self.delta:g} a mechanism may publish one of {self.clients:,} clients outright"
        return [*self.figures.warnings, f"{text}: take a delta well below {1 / self.clients:.2g}."]


@overload
def plan(
    config: str | Path | Mapping[str, Any] = "",
    *,
    epsilon: float,
    delta: float = DELTA,
    sites: int = 1,
    release: ReleaseName | None = None,
    **values: Any,
) -> PlannedRun: ...


@overload
def plan(
    config: str | Path | Mapping[str, Any] = "",
    *,
    row_epsilon: float,
    rows: int,
    delta: float = DELTA,
    **values: Any,
) -> PlannedRun: ...


@overload
def plan(
    config: str | Path = "",
    *,
    parameters: int | None = None,
    hypotheses: int | None = None,
    clients: int | None = None,
    clients_per_round: int | None = None,
    mechanism: str | None = None,
    noise_multiplier: float | None = None,
    rounds: int | None = None,
    target_epsilon: float | None = None,
    participations: int = 1,
    choice_epsilon: float | None = None,
    delta: float = DELTA,
    public_data: bool = False,
    release: ReleaseName | None = None,
    sites: int = 1,
) -> Planned: ...


def plan(
    config: str | Path | Mapping[str, Any] = "",
    *,
    epsilon: float | None = None,
    delta: float = DELTA,
    row_epsilon: float | None = None,
    rows: int | None = None,
    sites: int = 1,
    release: ReleaseName | None = None,
    **values: Any,
) -> Planned | PlannedRun:
    """Plan a whole run for a guarantee, or compute a run's cost for its clients.

    With `epsilon` this is ``umbel plan NAME --epsilon``, and with `row_epsilon` ``umbel plan NAME --row-epsilon``: it
    returns the run config that `umbel.run` would use. Without both, this computes costs or noise from numbers.

    Parameters
    ----------
    config : str, Path or mapping
        A configuration by its name in configs/, a TOML file, or a dataset; with `epsilon` run-config values as well.
    epsilon : float, optional
        The guarantee between any two data sets of a client over the whole run.
    delta : float
        Delta of the guarantee; 0 for a pure epsilon of clients.
    row_epsilon, rows : float, int, optional
        In place of `epsilon`: the guarantee between two data sets of a client that differ by one row, and the number of
        rows of a typical client.
    sites : int
        Number of sites, if these release sums.
    release : str, optional
        The party that adds the noise: ``"client"``, ``"site"`` to the sum of its clients, or ``"secure"``, all sites
        together to one sum; by default the strategy decides, or each client. With `epsilon` it names the strategy.
    **values
        With `epsilon`: run-config values that override the plan, with underscores for hyphens. Else the keywords of
        `costs`: ``parameters``, ``hypotheses``, ``clients``, ``clients_per_round``, ``mechanism``,
        ``noise_multiplier``, ``rounds``, ``target_epsilon``, ``participations``, ``choice_epsilon``, ``public_data``.

    Returns
    -------
    PlannedRun or Planned
        With `epsilon` or `row_epsilon` a `PlannedRun`: ``umbel.run(planned.values)`` runs it, and ``planned.words``
        explain it.

    Raises
    ------
    ConfigError
        If a value is missing, given twice or impossible, or the run would learn nothing with the guarantee.
    """
    if epsilon is None and row_epsilon is None and rows is None:
        return costs(config, delta=delta, release=release, sites=sites, **values)  # type: ignore[arg-type]
    from umbel.simulation.start import values_of
    from umbel.simulation.wanted import Wanted

    own = strategy_of(release, sites, {key.replace("_", "-"): one for key, one in values.items()})
    return values_of(config, own, Wanted(epsilon, delta, row_epsilon, rows), sites)


def strategy_of(release: ReleaseName | None, sites: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return run-config values with the strategy of a release; raise `ConfigError` if they name another."""
    _check_sites(release, sites)
    own = _STRATEGIES[release] if release else {}
    if twice := next((name for name in own if name in values), ""):
        text = f'release = "{release}" decides {twice}; leave {twice} or release out'
        raise ConfigError(text, code="config.both-ways")
    return own | dict(values)


def _check_sites(release: ReleaseName | None, sites: int) -> None:
    if release == "secure" and sites < _FEWEST:
        text = f"a secure sum is over at least {_FEWEST} sites, not {sites}; give sites"
        raise ConfigError(text, code="config.impossible-figure")


def costs(
    config: str | Path = "",
    *,
    parameters: int | None = None,
    hypotheses: int | None = None,
    clients: int | None = None,
    clients_per_round: int | None = None,
    mechanism: str | None = None,
    noise_multiplier: float | None = None,
    rounds: int | None = None,
    target_epsilon: float | None = None,
    participations: int = 1,
    choice_epsilon: float | None = None,
    delta: float = DELTA,
    public_data: bool = False,
    release: ReleaseName | None = None,
    sites: int = 1,
) -> Planned:
    """Compute the cost of a run for its clients, or the noise for a wanted guarantee.

    Parameters
    ----------
    config : str or Path
        A TOML file of run-config values, or the name of one in configs/: its model and its dataset give n, k, the
        clients and U.
    parameters, hypotheses, clients, clients_per_round : int
        n, k, training clients and U, in place of `config`.
    mechanism : str
        By default "laplace".
    noise_multiplier, rounds : float, int
        nu and the number of rounds, to compute the cost; by default the configuration's.
    target_epsilon : float
        The wanted guarantee, between any two data sets of a client, to compute nu.
    participations : int
        With `target_epsilon`: maximum participations of a client.
    choice_epsilon : float
        Epsilon of the randomised choice; by default open, or a quarter of the target a participation.
    delta : float
        0 for a pure epsilon.
    public_data : bool
        Whether the data of `config` are public or made up, as all that come with umbel are. Only then are clients'
        first updates measured: their norm is a release without noise, which no ledger counts.
    release, sites : str, int
        As for `plan`.

    Raises
    ------
    ConfigError
        If a figure is missing, given twice or impossible.
    """
    if target_epsilon is not None and (noise_multiplier is not None or rounds is not None):
        raise ConfigError("give target-epsilon, or noise-multiplier and rounds, not both", code="config.both-ways")
    _check_sites(release, sites)
    radius, by, limit = None, ReleaseBy.CLIENT, math.inf
    if str(config):
        if any(number is not None for number in (parameters, hypotheses, clients, clients_per_round, mechanism)):
            text = (
                "the configuration has parameters, hypotheses, clients, clients-per-round and mechanism; leave them out"
            )
            raise ConfigError(text, code="config.given-twice")
        task, run, radius, by = _measured(config, public_data)
        limit = run.max_participations or math.inf
        if target_epsilon is None:
            noise_multiplier = run.noise_multiplier if noise_multiplier is None else noise_multiplier
            choice_epsilon = run.choice_epsilon if choice_epsilon is None else choice_epsilon
            rounds = run.rounds if rounds is None else rounds
    elif public_data:
        text = "public-data measures the data of a configuration; name one, or leave public-data out"
        raise ConfigError(text, code="config.missing-figure")
    elif parameters is None or hypotheses is None or clients is None or clients_per_round is None:
        text = "name a configuration or a dataset, or give parameters, hypotheses, clients and clients-per-round"
        raise ConfigError(text, code="config.missing-figure")
    else:
        task = Task(parameters, hypotheses, clients, clients_per_round, mechanism or LAPLACE)
    if release == "secure":
        if mechanism not in (None, DiscreteGaussian.name):
            text = f'secure sums have mechanism "{DiscreteGaussian.name}", not "{mechanism}"; leave mechanism out'
            raise ConfigError(text, code="config.mechanism")
        task = replace(task, mechanism=DiscreteGaussian.name)
    by = ReleaseBy(release or by)
    if by is not ReleaseBy.CLIENT:
        task = replace(task, sites=sites if by is ReleaseBy.SITE else 1)
    if target_epsilon is not None:
        wanted = (task, target_epsilon, delta, participations, choice_epsilon)
        return Planned(plan_for(*wanted), delta, task.clients, what_helps(*wanted), radius, by)
    if noise_multiplier is None or rounds is None:
        raise ConfigError("give noise-multiplier and rounds, or target-epsilon", code="config.missing-figure")
    figures = plan_forward(task, noise_multiplier, choice_epsilon or 0.0, rounds, delta, limit)
    return Planned(figures, delta, task.clients, {}, radius, by)


def _measured(config: str | Path, public_data: bool) -> tuple[Task, RunConfig, float | None, ReleaseBy]:
    """Return the task of a configuration, the configuration, the norm of a client's first update of public data, and
    the party that adds the noise."""
    # They take PyTorch, which a plan from numbers need not wait for.
    from umbel.client.trial import first_update
    from umbel.data import BUNDLED, find_dataset
    from umbel.server.rounds import draw_hypotheses
    from umbel.simulation.start import check, read_values

    values = read_values(config)
    setup = check(values)
    run, model, dataset, strategy = setup.config, setup.model, setup.open_dataset(), setup.strategy
    if run.protect is Protect.ROWS:
        text = f'protect = "rows" hides rows, and not clients; run: {_plan_of_rows(run, strategy.fewest_hypotheses)}'
        raise ConfigError(text, code="config.hides-rows")
    assert dataset is not None, "it was checked"
    train = dataset.manifest.train
    asked = min(run.clients_per_round, train)
    task = Task(model.num_parameters, strategy.fewest_hypotheses, train, asked, run.mechanism)
    if not (public_data or find_dataset(run.dataset).resolve().parent == BUNDLED):
        return task, run, None, strategy.release_by
    drawn = draw_hypotheses(model, strategy.hypotheses, run.seed, 0)
    return task, run, first_update(run, model, dataset, drawn), strategy.release_by


def _plan_of_rows(run: RunConfig, hypotheses: int) -> str:
    """Return the command that plans the guarantee of a row for a run."""
    rows = run.training().row_privacy
    assert rows is not None, "the run hides rows"
    command = (
        f"umbel plan --rows {max(1, round(rows.batch / rows.rate))} row-noise-multiplier={rows.noise_multiplier:g} "
        f"row-rate={rows.rate:g} local-steps={rows.steps} participations={run.most_participations}"
    )
    return command + (f" hypotheses={hypotheses} choice-epsilon={run.choice_epsilon:g}" if hypotheses > 1 else "")
