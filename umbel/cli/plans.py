"""Plans: what a run would cost its clients, or what noise a wanted guarantee takes, before anything is run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.accounting.plan import Plan, Task, plan_for, what_helps
from umbel.privacy.accounting.plan import plan as plan_forward
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import LAPLACE
from umbel.protocol.run_config import RunConfig


@dataclass(frozen=True)
class Planned:
    """A plan, and what it rests on.

    Attributes
    ----------
    figures : Plan
        Its `release` has nu and choice-epsilon.
    ways : dict
        How many times less noise would be left with more clients, fewer parameters or fewer participations.
    radius : float or None
        Median norm of a client's first update: a first guess of the clip norm. None unless the data are public.
    """

    figures: Plan
    delta: float
    ways: dict[str, float] = field(default_factory=dict)
    radius: float | None = None


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
) -> Planned:
    """Work out what a run would cost its clients, or what noise a wanted guarantee takes.

    Parameters
    ----------
    config : str or Path
        A TOML file of run-config values, or the name of one in configs/: its model and its dataset give n, k, the
        clients and U.
    parameters, hypotheses, clients, clients_per_round : int
        n, k, training clients and U, in place of `config`.
    mechanism : str
        "laplace", if it is not given.
    noise_multiplier, rounds : float, int
        nu and the rounds of a run, of which the cost is wanted; by default the configuration's.
    target_epsilon : float
        The guarantee that is wanted, between any two data sets of a client; nu is worked out.
    participations : int
        The most participations of a client, with `target_epsilon`.
    choice_epsilon : float
        Of the randomised choice; by default open, or a quarter of the target a participation.
    delta : float
        0 for a pure epsilon.
    public_data : bool
        Whether the data of `config` are public or made up. Only then are clients' first updates measured, since their
        norm is a release without noise that no ledger counts. The datasets that come with umbel are made up.

    Raises
    ------
    ConfigError
        When something is missing, given twice or impossible.
    """
    if target_epsilon is not None and (noise_multiplier is not None or rounds is not None):
        raise ConfigError("give target-epsilon, or noise-multiplier and rounds, not both", code="config.both-ways")
    radius = None
    if str(config):
        if any(number is not None for number in (parameters, hypotheses, clients, clients_per_round, mechanism)):
            raise ConfigError("leave n, k, clients, U and mechanism to the configuration", code="config.given-twice")
        task, run, radius = _measured(config, public_data)
        if target_epsilon is None:
            noise_multiplier = run.noise_multiplier if noise_multiplier is None else noise_multiplier
            choice_epsilon = run.choice_epsilon if choice_epsilon is None else choice_epsilon
            rounds = run.rounds if rounds is None else rounds
    elif public_data:
        text = "public-data is about the data of a configuration: name one, or leave it out"
        raise ConfigError(text, code="config.missing-figure")
    elif parameters is None or hypotheses is None or clients is None or clients_per_round is None:
        text = "name a configuration, or give parameters, hypotheses, clients and clients-per-round"
        raise ConfigError(text, code="config.missing-figure")
    else:
        task = Task(parameters, hypotheses, clients, clients_per_round, mechanism or LAPLACE)
    if target_epsilon is not None:
        wanted = (task, target_epsilon, delta, participations, choice_epsilon)
        return Planned(plan_for(*wanted), delta, what_helps(*wanted), radius)
    if noise_multiplier is None or rounds is None:
        raise ConfigError("give noise-multiplier and rounds, or target-epsilon", code="config.missing-figure")
    return Planned(plan_forward(task, noise_multiplier, choice_epsilon or 0.0, rounds, delta), delta, {}, radius)


def _measured(config: str | Path, public_data: bool) -> tuple[Task, RunConfig, float | None]:
    """Return the task of a configuration, the configuration, and the norm of a client's first update of public data."""
    # They take PyTorch, which a plan from numbers need not wait for.
    from umbel.client.trial import first_update
    from umbel.data import BUNDLED, find_dataset
    from umbel.server.rounds import draw_hypotheses
    from umbel.simulation.start import check, read_values

    values = read_values(config)
    setup = check(values)
    run, model, dataset, count = setup.config, setup.model, setup.open_dataset(), setup.strategy.hypotheses
    assert dataset is not None, "it was checked"
    train = dataset.manifest.train
    task = Task(model.num_parameters, count, train, min(run.clients_per_round, train), run.mechanism)
    if not (public_data or find_dataset(run.dataset).resolve().parent == BUNDLED):
        return task, run, None
    return task, run, first_update(run, model, dataset, draw_hypotheses(model, count, run.seed, 0))
