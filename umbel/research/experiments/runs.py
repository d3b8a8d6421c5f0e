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
from umbel.research.experiments.baselines import local_only, measure, personalised
from umbel.server.history import State
from umbel.server.observer import Observer, Run, Section
from umbel.server.setup import Setup
from umbel.simulation.in_process import play

# In place of a strategy. Validation clients train by themselves, or make the hypotheses of `group-privacy` their own.
LOCAL_ONLY, FINE_TUNE, INTERPOLATE = "local-only", Personal.FINE_TUNE.value, Personal.INTERPOLATE.value
HELD_OUT_ALONE = (LOCAL_ONLY, FINE_TUNE, INTERPOLATE)
"""Of these nothing but ``held_out`` is measured."""


@dataclass(frozen=True)
class Spec:
    """A run to do, of a whole run config, whose strategy may also be one of `HELD_OUT_ALONE`."""

    name: str  # unique in a sweep; the name of its folder
    config: dict[str, Any]
    arm: tuple[Any, ...] = ()  # the same for the runs from other seeds

    @classmethod
    def of(cls, arm: tuple[Any, ...], config: dict[str, Any]) -> Spec:
        """Return a run of an arm, named by it and by the seed."""
        words = f"{' '.join(map(str, arm))} seed{config['seed']}".lower().replace("ν", "nu")
        return cls("-".join(re.sub(r"[^\w.\s-]", "", words).split()), config, arm)


@dataclass(frozen=True)
class Finished:
    """What came out of a run: numbers by name (see `finish`), and what a run of several rounds leaves behind."""

    measures: dict[str, Any]
    state: State | None = None  # None for clients that train by themselves
    participations: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # (training clients,)
    release: Release | None = None  # a client's, each time that it takes part
    kept: Arrays = field(default_factory=dict)  # the strategy's state
    trace: Arrays = field(default_factory=dict)  # see `Trace.arrays`
    sections: tuple[Section, ...] = ()  # of the report, by observers


class Trace(Observer):
    """Keeps the releases of each round that trained, for models of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[Arrays] = []

    def after_round(self, run: Run) -> None:
        """Keep what the round released."""
        if (one := run.outcome) is not None and one.releases is not None:
            rounds = np.full(len(one.clients), one.round)
            self.rounds.append(
                {"rounds": rounds, "clients": one.clients, "groups": one.groups, "releases": one.releases}
            )

    @property
    def arrays(self) -> Arrays:
        """A row a release: ``rounds``, ``clients``, ``groups``, ``releases``; empty without any."""
        names = self.rounds[0] if self.rounds else ()
        return {name: np.concatenate([one[name] for one in self.rounds]) for name in names}


def finish(config: Mapping[str, Any], nodes: int = 1) -> Finished:
    """Do a run of a whole run config, its clients dealt out among simulated nodes, and measure it.

    One thread computes, so that the digits do not depend on the number of cores. `FleetError` when the node of the
    simulation refuses; its reason is in the log.

    The measures are ``rounds``, ``stopped``, ``best_round``, ``best_loss`` (the lowest validation loss),
    ``median_budget`` and ``max_budget`` (the paper's, over training clients; None without noise),
    ``max_participations``; the guarantee of the client that took part most often as ``pure_epsilon`` and ``epsilon``
    (at `umbel.privacy.accounting.guarantee.DELTA`; None without one); and for the ``best`` and the ``last`` hypotheses
    what `umbel.research.experiments.baselines.measure` returns.
    """
    torch.set_num_threads(1)
    if config["strategy"] == LOCAL_ONLY:
        setup = Setup.parse({**config, "strategy": "fedavg"})
        return Finished({"held_out": local_only(setup.model, _dataset(setup), setup.config)})
    if config["strategy"] in HELD_OUT_ALONE:
        run = play({**config, "strategy": "group-privacy"}, nodes=nodes)
        setup, how = run.setup, Personal(config["strategy"])
        return Finished({"held_out": personalised(setup.model, _dataset(setup), run.state.best, setup.config, how)})
    trace = Trace()
    run = play(config, nodes=nodes, observers=[trace])
    setup, state, spent = run.setup, run.state, run.fleet.participations
    model, dataset, release = setup.model, _dataset(setup), setup.release
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
        "best": measure(model, dataset, state.best, setup.config.step_size),
        "last": measure(model, dataset, state.hypotheses, setup.config.step_size),
    }
    sections = tuple(section for observer in run.observers if (section := observer.section()) is not None)
    return Finished(measures, state, spent, release, run.strategy.state, trace.arrays, sections)


def _dataset(setup: Setup) -> Dataset:
    dataset = setup.open_dataset()
    if dataset is None:
        text = "an experiment measures on the validation clients of a dataset; name one in dataset"
        raise ConfigError(text, code="config.no-dataset")
    return dataset


def split_by_seed(name: str, folder: Path, seeds: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Write a run config's dataset once a seed to FOLDER/data, its clients in that order, and yield seeds and paths."""
    source = open_dataset(find_dataset(name))
    for seed in seeds:
        split = shuffled(source, seed)
        path = folder / "data" / f"{source.manifest.name}-{seed}"
        write_dataset(path, split.manifest, split.features, split.targets, split.offsets, split.names)
        yield seed, str(path)


def shuffled(dataset: Dataset, seed: int) -> Dataset:
    """Return a dataset whose clients are in random order, as many of which train as before."""
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
