"""One run of an experiment in this process, its measures, and a split of the clients by seed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from umbel.data import Dataset, find_dataset, offsets_of, open_dataset, write_dataset
from umbel.privacy.accounting.guarantee import guarantee
from umbel.privacy.gate.policy import Personal
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Release
from umbel.server.history import State
from umbel.server.observer import Observer, Run, Section
from umbel.server.setup import Setup
from umbel.simulation.baselines import local_only, measure, personalised
from umbel.simulation.in_process import play
from umbel.strategies.differences import prior_of

# Values for strategy. Validation clients train alone, or personalise the hypotheses of `group-privacy`.
LOCAL_ONLY, FINE_TUNE, INTERPOLATE = "local-only", Personal.FINE_TUNE.value, Personal.INTERPOLATE.value
HELD_OUT_ALONE = (LOCAL_ONLY, FINE_TUNE, INTERPOLATE)
"""Strategies for which only ``held_out`` is measured."""

STATES = ("last", "best")
"""The measured hypotheses: those of the last round, and those of the round of lowest validation loss."""


@dataclass(frozen=True)
class Spec:
    """A run to do, with a complete run config, whose strategy may also be one of `HELD_OUT_ALONE`."""

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
    sections: tuple[Section, ...] = ()  # of the report, from observers
    saved_in: Path | None = None  # the folder from which it would resume


class Trace(Observer):
    """Keeps the releases of each round that trained, for models of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[Arrays] = []

    def after_round(self, run: Run) -> None:
        """Keep the round's releases."""
        if (one := run.outcome) is not None and one.releases is not None:
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
    the result of `umbel.simulation.baselines.measure`. For `HELD_OUT_ALONE` there is only ``held_out`` of each state,
    and for clients that train alone only that of the ``last``.
    """
    torch.set_num_threads(1)
    if config["strategy"] == LOCAL_ONLY:
        setup = Setup.parse({**config, "strategy": "fedavg"})
        return Finished({"last": {"held_out": local_only(setup.model, dataset_of(setup), setup.config)}})
    if config["strategy"] in HELD_OUT_ALONE:
        run = play({**config, "strategy": "group-privacy"}, nodes=nodes)
        own = made_own(run.setup, run.state, config["strategy"])
        return Finished({state: {"held_out": found} for state, found in own.items()})
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
    sections = tuple(section for observer in run.observers if (section := observer.section()) is not None)
    return Finished(measures, state, spent, release, run.strategy.state, trace.arrays, sections, saved_in)


def made_own(setup: Setup, state: State, how: str, kept: Arrays | None = None) -> dict[str, dict[str, float]]:
    """Return the held-out metric of validation clients that personalise a run's hypotheses, by `STATES`.

    `kept` is the strategy's state, from which the server estimates how clients differ.
    """
    hypotheses = state.hypotheses, state.best
    prior = prior_of(kept or {}, len(next(iter(state.hypotheses.values()))))
    own = [personalised(setup.model, dataset_of(setup), one, setup.config, how, prior=prior) for one in hypotheses]
    return dict(zip(STATES, own, strict=True))


def dataset_of(setup: Setup) -> Dataset:
    """Return the dataset whose validation clients measure a run; raise `ConfigError` if there is none."""
    dataset = setup.open_dataset()
    if dataset is None:
        text = "an experiment measures on the validation clients of a dataset; name one in dataset"
        raise ConfigError(text, code="config.no-dataset")
    return dataset


def split_by_seed(name: str, folder: Path, seeds: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Write a run config's dataset for each seed to FOLDER/data, with its clients in that order; yield seeds and
    paths."""
    source = open_dataset(find_dataset(name))
    for seed in seeds:
        split = shuffled(source, seed)
        path = folder / "data" / f"{source.manifest.name}-{seed}"
        write_dataset(path, split.manifest, split.features, split.targets, split.offsets, split.names)
        yield seed, str(path)


def shuffled(dataset: Dataset, seed: int) -> Dataset:
    """Return a dataset with its clients in random order, with as many training clients as before."""
    manifest = dataset.manifest
    order = np.random.default_rng(seed).permutation(manifest.clients)
    lengths = np.diff(dataset.offsets)[order]
    offsets = offsets_of(lengths)
    rows = np.arange(offsets[-1]) + np.repeat(dataset.offsets[order] - offsets[:-1], lengths)
    changes = {
        "groups": [manifest.groups[client] for client in order] if manifest.groups else [],
        "provenance": f"{manifest.provenance} Clients put in random order with seed {seed}.".strip(),
    }
    names = [dataset.names[client] for client in order] if len(dataset.names) else ()
    return Dataset(manifest.model_copy(update=changes), dataset.features[rows], dataset.targets[rows], offsets, names)
