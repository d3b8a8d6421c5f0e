"""Runs of experiments: also of clients that train alone or further, of long runs that resume, and on splits by seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from umbel.data import Dataset, find_dataset, offsets_of, open_dataset, write_dataset
from umbel.nodes.differences import prior_of
from umbel.privacy.gate.policy import Personal
from umbel.protocol.arrays import Arrays
from umbel.protocol.home import make_folder, umbel_home
from umbel.server.history import State
from umbel.server.run_folder import RunFolder
from umbel.server.setup import Setup
from umbel.simulation import measured
from umbel.simulation.baselines import local_only, personalised
from umbel.simulation.in_process import play
from umbel.simulation.measured import LOCAL_ONLY, STATES, Finished, dataset_of
from umbel.simulation.sweep import alone, made_by

FINE_TUNE, INTERPOLATE = Personal.FINE_TUNE.value, Personal.INTERPOLATE.value
HELD_OUT_ALONE = (LOCAL_ONLY, FINE_TUNE, INTERPOLATE)
"""Further values of ``strategy``: validation clients train alone, or personalise the hypotheses of `group-privacy`."""


def finish(config: Mapping[str, Any], nodes: int = 1, saved_in: Path | None = None) -> Finished:
    """Do a run and measure it, as `umbel.simulation.measured.finish`.

    For `HELD_OUT_ALONE` there is only ``held_out`` of each state, and for clients that train alone only that of the
    ``last``.
    """
    torch.set_num_threads(1)
    if config["strategy"] == LOCAL_ONLY:
        setup = Setup.parse({**config, "strategy": "fedavg"})
        return Finished({"last": {"held_out": local_only(setup.model, dataset_of(setup), setup.config)}})
    if config["strategy"] in HELD_OUT_ALONE:
        run = play({**config, "strategy": "group-privacy"}, nodes=nodes)
        own = made_own(run.setup, run.state, config["strategy"])
        return Finished({state: {"held_out": found} for state, found in own.items()})
    return measured.finish(config, nodes, saved_in)


def made_own(setup: Setup, state: State, how: str, kept: Arrays | None = None) -> dict[str, dict[str, float]]:
    """Return the held-out metric of validation clients that personalise a run's hypotheses, by `STATES`.

    `kept` is the strategy's state, from which the server estimates how clients differ.
    """
    hypotheses = state.hypotheses, state.best
    prior = prior_of(kept or {}, len(next(iter(state.hypotheses.values()))))
    own = [personalised(setup.model, dataset_of(setup), one, setup.config, how, prior=prior) for one in hypotheses]
    return dict(zip(STATES, own, strict=True))


def resumable(config: Mapping[str, Any]) -> Finished:
    """Do a long run, or the rest of a stopped one; see `finish`. It could resume until its sweep has saved it."""
    what = json.dumps([dict(config), made_by(config, resumable)], sort_keys=True)
    folder = umbel_home() / "experiments" / "unfinished" / hashlib.sha256(what.encode()).hexdigest()[:16]
    make_folder(folder.parent)
    with alone(RunFolder(folder).path):
        return finish(config, saved_in=folder)


def split_by_seed(name: str, folder: Path, seeds: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Write a run config's dataset for each seed to FOLDER/data, with its clients in that order; yield seeds and
    paths."""
    source = open_dataset(find_dataset(name))
    for seed in seeds:
        split = shuffled(source, seed)
        path = folder / "data" / f"{source.manifest.name}-{seed}"
        write_dataset(path, split.manifest, split.features, split.targets, split.offsets, split.names)
        yield seed, str(path)


def drawn(name: str, folder: Path, seeds: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yield seeds and paths of a run config's dataset: split by seed where clients are hospitals, else as it is."""
    return split_by_seed(name, folder, seeds) if name.startswith("hospital") else ((seed, name) for seed in seeds)


def seeds_won(own: Mapping[int, Mapping[str, float]], other: Mapping[int, Mapping[str, float]], sign: int) -> str:
    """Return in how many seeds, which both have, one beats the other in mean and in worst decile; "" for no seeds.

    A `sign` of 1 says that higher is better, and -1 that lower is.
    """
    both = own.keys() & other.keys()
    wins = [sum(sign * (own[seed][what] - other[seed][what]) > 0 for seed in both) for what in ("mean", "worst_decile")]
    return f"{wins[0]}, {wins[1]} of {len(both)}" if both else ""


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
