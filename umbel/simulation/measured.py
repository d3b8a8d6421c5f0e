"""One run in this process, and its measures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from umbel.data import Dataset
from umbel.privacy.accounting.guarantee import guarantee
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Release
from umbel.server.history import State
from umbel.server.rounds import Run
from umbel.server.setup import Setup
from umbel.simulation.baselines import measure
from umbel.simulation.in_process import play
from umbel.strategies import Callback

LOCAL_ONLY = "local-only"
"""The name, beside those of strategies, of clients that train alone."""

STATES = ("last", "best")
"""The measured hypotheses: those of the last round, and those of the round of lowest validation loss."""


@dataclass(frozen=True)
class Spec:
    """A run to do, with a complete run config."""

    name: str  # unique in a sweep; also the name of its folder
    config: dict[str, Any]
    arm: tuple[Any, ...] = ()  # the same for the runs from other seeds

    @classmethod
    def of(cls, arm: tuple[Any, ...], config: dict[str, Any]) -> Spec:
        """Return a run of an arm, named after the arm and the seed."""
        words = f"{' '.join(map(str, arm))} seed{config['seed']}".lower().replace("ν", "nu")
        return cls("-".join(re.sub(r"[^\w.\s-]", "", words).split()), config, arm)


@dataclass(frozen=True)
class Finished:
    """The result of a run: numbers by name (see `finish`), and the folder of a run of several rounds."""

    measures: dict[str, Any]
    state: State | None = None  # None for clients that train alone
    participations: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # (training clients,)
    release: Release | None = None  # a client's, in each participation
    kept: Arrays = field(default_factory=dict)  # the strategy's state
    trace: Arrays = field(default_factory=dict)  # see `Trace.arrays`
    saved_in: Path | None = None  # the folder from which it would resume


class Trace(Callback):
    """Keeps the releases of each round that trained, for models of two parameters."""

    run: Run

    def __init__(self) -> None:
        self.rounds: list[Arrays] = []

    def after_exchange(self, round: int, stages: dict[str, float]) -> None:
        """Keep the round's releases."""
        if (one := self.run.outcome) is not None and one.releases is not None:
            rounds = np.full(len(one.clients), one.round)
            self.rounds.append(
                {"rounds": rounds, "clients": one.clients, "groups": one.groups, "releases": one.releases}
            )

    @property
    def arrays(self) -> Arrays:
        """One row for each release: ``rounds``, ``clients``, ``groups``, ``releases``; empty without any."""
        names = self.rounds[0] if self.rounds else ()
        return {name: np.concatenate([one[name] for one in self.rounds]) for name in names}


def finish(config: Mapping[str, Any], nodes: int = 1, saved_in: Path | None = None) -> Finished:
    """Do a run of a complete run config, with its clients on simulated nodes, and measure it.

    With a folder, a stopped run resumes (`umbel.simulation.in_process.play`).

    One thread computes, so that the digits do not depend on the number of cores. `FleetError` if the simulated node
    refuses; the reason is in the log.

    The measures are ``rounds``, ``stopped``, ``best_round``, ``best_loss`` (the lowest validation loss),
    ``median_budget`` and ``max_budget`` (the paper's, over training clients; None without noise),
    ``max_participations``; the guarantee of the client with the most participations as ``pure_epsilon`` and ``epsilon``
    (at `umbel.privacy.accounting.guarantee.DELTA`; None without one); and for the ``last`` and the ``best`` hypotheses
    the result of `umbel.simulation.baselines.measure`.
    """
    torch.set_num_threads(1)
    trace = Trace()
    run = play(config, nodes=nodes, observers=[trace], saved_in=saved_in)
    setup, state, spent = run.setup, run.state, run.fleet.participations
    model, dataset, release = setup.model, dataset_of(setup), setup.release
    bounded = release.paper_cost is not None
    most = guarantee({release: int(spent.max())})
    measures = {
        "rounds": sum(1 for entry in state.history if entry.asked),
        "stopped": state.stopped,
        "best_round": state.best_round,
        "best_loss": state.best_loss,
        "median_budget": release.paper_spend(float(np.median(spent))) if bounded else None,
        "max_budget": release.paper_spend(int(spent.max())) if bounded else None,
        "max_participations": int(spent.max()),
        "pure_epsilon": most.pure if most and math.isfinite(most.pure) else None,
        "epsilon": most.epsilon if most else None,
        "best": measure(model, dataset, state.best, setup.config),
        "last": measure(model, dataset, state.hypotheses, setup.config),
    }
    return Finished(measures, state, spent, release, run.strategy.state, trace.arrays, saved_in)


def dataset_of(setup: Setup) -> Dataset:
    """Return the dataset whose validation clients measure a run; raise `ConfigError` if there is none."""
    dataset = setup.open_dataset()
    if dataset is None:
        text = "an experiment measures on the validation clients of a dataset; name one in dataset"
        raise ConfigError(text, code="config.no-dataset")
    return dataset
