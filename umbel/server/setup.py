"""The parts of a run, from its configuration and from an interrupted run, checked before any work starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from flwr.serverapp import Grid

from umbel import models, strategies
from umbel.data import Dataset, Manifest, digest_of, find_dataset, open_dataset
from umbel.models.fit import misfit
from umbel.models.model import Model
from umbel.models.optimizers import descent_of
from umbel.nodes.fleet import Fleet
from umbel.privacy import mechanisms
from umbel.privacy.accounting.guarantee import released_by
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.clients import ClientInRun
from umbel.protocol.errors import ConfigError, Refused
from umbel.protocol.release import Protect, Release, ReleaseBy
from umbel.protocol.run_config import RunConfig, Validation
from umbel.protocol.tasks import Hosting, TrainingSpec
from umbel.server.history import State
from umbel.server.run_folder import RunFolder, hypotheses_in, number_of
from umbel.server.runs import opening, reading, run_named
from umbel.strategies import HypothesisStrategy

# Settings that may change when a run resumes.
_FREE = {
    "resume", "rounds", "patience", "observers", "min-releases", "device", "wait", "round-timeout", "quorum",
    "per-node",
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """A run config, and the objects that it names."""

    config: RunConfig
    strategy: HypothesisStrategy
    fleet: Fleet  # the clients, which the strategy knows too
    model: Model
    manifest: Manifest | None  # the dataset's; None if every node serves its own data

    @classmethod
    def parse(cls, run_config: Mapping[str, Any]) -> Setup:
        """Check a run config and return its parts.

        Raises
        ------
        ConfigError, DatasetError, ModelError
            For the first invalid entry, or for what it names.
        """
        run = RunConfig.parse(run_config)
        fleet = Fleet(run)
        strategy = strategies.make(run)
        strategy.nodes = fleet
        # Opening checks it here too: a simulation should fail before its nodes start.
        dataset = _open(run)
        manifest = dataset.manifest if dataset else None
        model = models.load_for(run, manifest)
        strategy.check(run, model)
        fleet.metric_is_share = model.metric.share
        if dataset and (reason := misfit(model, dataset)):
            name = f"dataset {dataset.manifest.name!r}"
            raise ConfigError(
                f"model {model.name!r} {reason} ({name}); name another model, or repair the data",
                code="config.model-misfit",
            )
        if run.message_noise and not model.local_shapes:
            raise ConfigError(
                f"message-noise is for models with local parameters, not {model.name!r}; set it to 0",
                code="config.message-noise",
            )
        if run.protect is Protect.ROWS and strategy.release_by is not ReleaseBy.CLIENT:
            text = f'protect = "rows" is for strategies that read single releases; {run.strategy!r} reads sums'
            raise ConfigError(f'{text}: set protect = "both", or use another strategy', code="config.rows")
        mechanism = mechanisms.load(run.mechanism)
        if strategy.release_by is ReleaseBy.SITE and strategy.hypotheses > 1 and run.noise_multiplier > 0:
            try:
                mechanism(run.noise_multiplier).count_radius(run.choice_epsilon)
            except Refused as error:
                raise ConfigError(error.text, code="config.choice-epsilon") from error
        descent_of(run.optimizer)
        return cls(run, strategy, fleet, model, manifest)

    @classmethod
    def of_run(cls, folder: RunFolder) -> Setup:
        """Return the setup of a run in a folder, with its dataset's manifest of then; errors as of `parse`.

        The dataset may have got other units since.
        """
        setup = cls.parse(folder.read_run_config() | {"resume": ""})
        was = folder.read_manifest()
        return replace(setup, manifest=was) if was else setup

    def open_dataset(self) -> Dataset | None:
        """Return the dataset, to look at its rows; None if every node serves its own data."""
        return _open(self.config)

    @cached_property
    def first(self) -> Arrays:
        r"""The hypotheses of the run to start from, each array (j, \*shape) with j up to k; empty if all are drawn.

        They come from releases with noise, so starting from them costs no client anything.

        Raises
        ------
        ConfigError
            If there is no such run, or its result does not fit this one.
        """
        run, k = self.config, self.strategy.first_hypotheses
        if not run.start_from or run.resume:
            return {}
        path = run_named("start-from", run.start_from)
        with opening(path, "start-from"):
            saved, arrays = RunFolder(path).read_config(), RunFolder(path).read_best()
        shapes = {name: value.shape[1:] for name, value in arrays.items()}
        was = saved.get("config")
        if not isinstance(was, dict) or type(was.get("seed")) is not int:
            raise ConfigError(
                f"start-from: {path}/config.toml does not contain the run's seed; name another run",
                code="config.run-damaged",
            )
        if shapes != self.model.shapes:
            data = was.get("dataset")
            fix = "set model, frozen and local as they were"
            if data and run.dataset and data != run.dataset:
                fix = f"that run was of dataset {data!r}; set dataset={data}, or {fix}"
            raise ConfigError(
                f"start-from: the hypotheses of {path.name} have shapes {shapes}, but model {self.model.name!r} has "
                f"{self.model.shapes}; {fix}",
                code="config.start-from-misfit",
            )
        with reading(path, "start-from"):
            first = hypotheses_in(arrays, self.model.shapes)
            longest, most = (flatten(first) ** 2).sum(axis=1).max(), np.finfo(np.float32).max
            if longest > most:  # training computes with such squares
                text = f"a hypothesis has norm {longest**0.5:.2g}, and computing with norms above"
                raise ValueError(f"{text} {most**0.5:.2g} overflows")
        self.model.check_frozen(saved, path.name)
        if (there := number_of(first)) > k:
            fix = f"set hypotheses={there}" if k == run.most_hypotheses else "name a strategy that begins with as many"
            raise ConfigError(
                f"start-from: {path.name} has {there} hypotheses, but this run begins with {k}; {fix}",
                code="config.start-from-misfit",
            )
        if was["seed"] == run.seed:
            raise ConfigError(
                f"start-from: {path.name} also had seed {run.seed}, so this run would draw the same clients and, in "
                f"simulation, the same noise; set seed={run.seed + 1}",
                code="config.start-from-seed",
            )
        return first

    @property
    def digests(self) -> dict[str, str]:
        """Digests of ``data`` and ``frozen`` parameters; the first is empty if every node serves its own data."""
        name = self.config.dataset
        return {"data": digest_of(find_dataset(name)) if name else "", "frozen": self.model.frozen_digest}

    def has_rows_of(self, saved: Mapping[str, Any]) -> bool:
        """Return whether the dataset is as at the start of a run, if `saved`, its config.toml, tells."""
        return saved.get("data") in (None, self.digests["data"])

    @property
    def release(self) -> Release:
        """A training client's release in each participation; the most telling one, if the strategy changes their
        number of hypotheses: a random choice is among few, an open one among many."""
        strategy, hidden = self.strategy, self.config.choice_epsilon > 0
        k = strategy.fewest_hypotheses if hidden else strategy.hypotheses
        return released_by(strategy.release_by, self.config.release(self.model.num_parameters, k))

    def task(self, name: str = "") -> TrainingSpec:
        """Return the template of the task that the run called `name` gives clients in a round."""
        return replace(self.config.training(), run=name, frozen_digest=self.model.frozen_digest)


def _open(run: RunConfig) -> Dataset | None:
    return open_dataset(find_dataset(run.dataset)) if run.dataset else None


class Saved(NamedTuple):
    """The content of a resumed run, after its last finished round."""

    setup: Setup  # of the run that resumes it
    folder: RunFolder
    state: State
    spent: dict[ClientInRun, int]  # releases of each client that released
    kept: Arrays  # state that the strategy keeps from round to round
    nodes: list[tuple[int, Hosting]]  # in the order in which their clients are numbered

    @classmethod
    def of(cls, setup: Setup) -> Saved:
        """Return the content of the run that a run config resumes; nothing is written.

        Raises
        ------
        ConfigError
            If there is no such run, it is damaged, it has no rounds left, or it was a different one.
        """
        path = run_named("resume", setup.config.resume)
        folder = RunFolder(path)
        with opening(path, "resume"):
            saved = folder.read_config()
            if not isinstance(saved.get("config"), dict):
                raise ValueError("config.toml has no table config")
            _check_the_same(setup, saved, path.name)
            state, spent, kept = folder.read(setup.model.shapes, setup.strategy.hypotheses)
            folder.check_releases(spent, state.history)
            nodes = folder.read_nodes()
            if not nodes:
                raise ValueError("nodes.json names no node")
            clients = sum(Hosting.from_record(hosting.to_record()).train for _, hosting in nodes)
            if spent and (last := max(spent)) >= clients:
                raise ValueError(f"participations.jsonl says that client {last} of {clients} released")
        done, rounds = state.history[-1].number, setup.config.rounds
        if done > rounds or (done == rounds and state.stopped):
            text = f"resume: the run has done its {done} rounds; raise rounds to continue"
            raise ConfigError(text, code="config.resume-done")
        state.stopped = ""
        return cls(setup, folder, state, spent, kept, nodes)

    def restore(self, grid: Grid) -> State:
        """Give nodes and strategy of the setup what they had, and return the state of the run."""
        self.setup.fleet.resume(grid, self.nodes, self.spent)
        self.setup.strategy.state = self.kept
        # Releases of an unfinished round count. If the run is killed again, there may be one more of a client.
        most = int(self.setup.fleet.participations.max())
        self.state.history[-1] = replace(self.state.history[-1], max_participations=most)
        self.folder.write_latest(self.state, self.kept)
        return self.state


def _check_the_same(setup: Setup, saved: Mapping[str, Any], name: str) -> None:
    """Raise unless the run has the same settings, rows and frozen parameters as before."""
    config, data = setup.config.entries(), saved.get("data", "")
    for key, value in RunConfig.current(saved["config"]).items():
        if key == "validation":  # how often may change
            value = str(replace(Validation.read(str(value), key), every=setup.config.validation.every))
        if key not in _FREE and config.get(key) != value:
            raise ConfigError(
                f"resume: {key} was {value!r} and is {config.get(key)!r}; restore the old value",
                code="config.resume-changed",
            )
    if data and (now := setup.digests["data"]) and now != data:
        raise ConfigError(
            f"resume: the rows of dataset {setup.config.dataset!r} differ from those at the start of the run; "
            f"restore them, or start a new run: start-from={name} seed={setup.config.seed + 1}",
            code="config.resume-data",
        )
    setup.model.check_frozen(saved, name)
