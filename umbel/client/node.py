"""The clients of a node: the dataset that it serves, and its part of it."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from umbel import models
from umbel.client.cohort import LocalUpdate
from umbel.client.learner import SITE, Learner, engine_asked
from umbel.client.personal import method
from umbel.client.row_gradients import check_rows
from umbel.client.trial import try_out, try_training
from umbel.data import Dataset, Manifest, check, find_dataset, open_dataset
from umbel.data.find import stats_of
from umbel.models.fit import one_line
from umbel.models.model import Model
from umbel.models.optimizers import Descent, descent_of
from umbel.privacy.mechanisms.sampled_gaussian import most_drawn
from umbel.privacy.site.config import Site
from umbel.privacy.site.journal import Names, NamesOnTrial
from umbel.privacy.site.policy import Personal, Role
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientInDataset, ClientOnNode, counted
from umbel.protocol.errors import DatasetError, ModelError, ProtocolError, Refused, SiteError, UmbelError
from umbel.protocol.options import parse_pairs
from umbel.protocol.plugins import import_by_name
from umbel.protocol.ranges import columns_in
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import Hosting, TrainingSpec

if TYPE_CHECKING:
    from umbel.data.table import Register  # it imports pandas, which takes half a second

_TIMES = 2
"""Times as long as made-up steps take that clients must have: a machine is not always equally busy."""
_TABLES = (".csv", ".csv.gz", ".csv.zip", ".parquet")


@dataclass(frozen=True)
class _Source:
    """The path and version of the data, so that a long-lived node reads them again when they change."""

    path: Path
    reader: str
    options: tuple[tuple[str, str], ...]
    register: Path | None
    witness: Path | None
    version: tuple[tuple[int, int], ...]
    trial: bool

    @classmethod
    def of(cls, site: Site, dataset: str, trial: bool) -> _Source:
        path = site.data_path or find_dataset(dataset)
        reader, _, words = site.policy.reader.partition(" ")
        options = parse_pairs(words, "reader")
        files = [path, *(Path(value) for value in options.values() if Path(value).is_absolute())]
        stats = [stat for file in files for stat in stats_of(file)]
        register = None if site.simulated else site.ledger_path if trial else Names.of(site).path
        version = tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)
        return cls(path, reader, tuple(options.items()), register, site.witness_folder, version, trial)


@dataclass(frozen=True)
class Node:
    """A node's clients, counted from 0: training clients first, then validation clients.

    `training` and `validation` are the dataset's numbers of clients that train and that report. At a site that lets
    training clients report with noise, they are the same.
    """

    site: Site
    dataset: Dataset
    learner: Learner
    training: range
    validation: range
    run: RunConfig
    descent: Descent

    @classmethod
    def of(cls, node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> Node:
        """Return a run's node from a site's configuration; see `at`."""
        return cls.at(Site.of(node_config), RunConfig.of(run_config))

    @classmethod
    def at(cls, site: Site, run: RunConfig, trial: bool = False) -> Node:
        """Return the node of a site in a run.

        Only in simulation does the run config, which is the server's, name the dataset. The node then hosts every
        ``site.step``-th client of it. With `trial`, nothing is written: new clients of a table get no numbers.
        """
        policy, source = site.policy, _Source.of(site, run.dataset, trial)
        if policy.reader and policy.role is Role.SPLIT:
            text = "a table does not say which clients train or report: set role to train or validation"
            raise SiteError(text, code="site.role")
        dataset = _open(source)
        manifest = dataset.manifest
        if not site.simulated:
            if foreign := _foreign(run, manifest):
                raise ProtocolError(f"the server {foreign}", code="protocol.other-model")
            named = manifest.model or columns_in(run.model)
            if not named and min(site.limits.budget, site.limits.row_budget) < math.inf:
                raise SiteError(
                    f"{source.path} names no model, and this site has a budget, which does not count what a model's "
                    'fit reveals about the data; name a model in the manifest, or set budget = "inf"',
                    code="site.no-model",
                )
            # The file is the site's own; the digest shows whether it is the same.
            run = run.model_copy(update={"pretrained": manifest.pretrained})
        # The server does not choose how a site computes its clients.
        engine = engine_asked() if site.simulated else SITE
        learner = _try_out(source, models.load_for(run, manifest), run.device, engine, run.precision)
        if policy.personalise.method != Personal.NO and learner.model.local_shapes:
            raise SiteError(
                f"personalise would do nothing: model {learner.model.name!r} already has local parameters for each "
                "client; leave personalise out",
                code="site.personalise",
            )
        method(policy.personalise.method)  # what cannot be imported is named before the site trains
        hosted = range(site.first, manifest.clients, site.step)
        train = len(range(site.first, manifest.train, site.step))
        trains = {Role.TRAIN: len(hosted), Role.VALIDATION: 0, Role.SPLIT: train}[policy.role]
        training, validation = hosted[:trains], hosted[trains:]
        if policy.trainers_report:
            validation = training
        # Checked here, since a failure that depends only on the run must come before any charge.
        node = cls(site, dataset, learner, training, validation, run, descent_of(run.optimizer))
        if policy.declares_rows and not site.simulated:
            node._check_largest()
        return node

    @property
    def seed(self) -> int | None:
        """The run's seed in simulation, None if the data are the site's own (`Site.seed`)."""
        return self.site.seed(self.run)

    @property
    def model(self) -> Model:
        """The network to train."""
        return self.learner.model

    @property
    def hosting(self) -> Hosting:
        """The node's reply to a query."""
        place = (self.site.first, self.site.step) if self.site.placed else (-1, -1)
        return Hosting(len(self.training), len(self.validation), *place)

    @property
    def room(self) -> str:
        """How many clients are trained at once, and in which memory, in words."""
        update = LocalUpdate(self.run.local_epochs, self.run.step_size, self.run.batch_size)
        rows = update.size(int(self.dataset.lengths.max(initial=1)))
        return self.learner.room(tuple(self.dataset.features.shape[1:]), rows)

    def training_clients(self, asked: tuple[ClientOnNode, ...]) -> list[ClientInDataset]:
        """Return the dataset's numbers of asked clients, all of which must train here."""
        return self._pick(asked, 0, self.training, "training")

    def validation_clients(self, asked: tuple[ClientOnNode, ...]) -> list[ClientInDataset]:
        """Return the dataset's numbers of asked clients, all of which must report here."""
        return self._pick(asked, len(self.training), self.validation, "validation")

    def check_training(self, hypotheses: Arrays, task: TrainingSpec) -> None:
        """Raise if the node cannot carry out a training task, independently of its data."""
        self.check(hypotheses, task.frozen_digest)
        self.training_clients(task.clients)
        if task.row_privacy is not None:
            check_rows(self.model, tuple(self.dataset.features.shape[1:]))
        if task.message_noise and not self.model.local_shapes:
            text = f"noisy messages are for models with local parameters, not {self.model.name!r}"
            raise ProtocolError(text, code="protocol.message-noise")
        if not self.site.simulated:
            self._try_training(len(next(iter(hypotheses.values()))), task)

    def update(self, task: TrainingSpec) -> LocalUpdate:
        """Return how a client trains for a task."""
        policy, rows, most = self.site.policy, task.row_privacy, sys.maxsize
        if rows is not None and not self.site.simulated:
            most = most_drawn(policy.rows.largest, rows.rate)
        steps = task.local_epochs, task.step_size, task.batch_size, task.local_steps
        return LocalUpdate(*steps, policy.max_work.examples, self.descent, rows, most)

    def _try_training(self, hypotheses: int, task: TrainingSpec) -> None:
        """Raise if a training step of a made-up client fails here, or clients that hide rows might lack time.

        Whether time suffices would depend on the number of rows. So it is asked before the charge, for a client as
        large as any may be.
        """
        policy, clients = self.site.policy, len(task.clients)
        seconds = try_training(self.learner, self.dataset, hypotheses, self.update(task), policy.rows.largest)
        needed = _TIMES * clients * seconds
        if needed > policy.max_seconds:
            raise Refused(
                f"{clients} clients of {policy.rows.largest:,} rows might take {needed:,.3g} seconds on this machine, "
                f"and max-seconds is {policy.max_seconds:g}; raise max-seconds, or lower largest of rows as far as the "
                "clients allow, or let the run ask for fewer clients or steps, or a smaller rate of rows",
                code="refused.work",
            )

    def _check_largest(self) -> None:
        """Raise `SiteError` if a training client has more rows than the site declares."""
        part, most = self.training, self.site.policy.rows.largest
        largest = int(self.dataset.lengths[part.start : part.stop : part.step].max(initial=0))
        if largest > most:
            raise SiteError(
                f"a client has {largest:,} rows, and the policy's rows say that none has more than largest={most}; "
                "raise it, or serve fewer rows",
                code="site.max-rows",
            )

    def check(self, hypotheses: Arrays, frozen_digest: str | None = None) -> None:
        """Raise unless the hypotheses, and the server's frozen parameters, fit this node's model."""
        if frozen_digest is not None and frozen_digest != self.model.frozen_digest:
            raise ProtocolError(
                f"the frozen parameters or initial weights of model {self.model.name!r} differ between the server and "
                "this node; give both sides the same files",
                code="protocol.frozen",
            )
        shapes = {name: value.shape[1:] for name, value in hypotheses.items()}
        # The order matters too: effects of it would differ between clients whose training fails and others.
        if list(shapes.items()) != list(self.model.shapes.items()):
            text = f"hypotheses of shapes {shapes} do not fit model {self.model.name!r}: {self.model.shapes}"
            raise ProtocolError(text, code="protocol.shapes")
        if len({len(value) for value in hypotheses.values()}) != 1:
            raise ProtocolError("the hypotheses are not stacked arrays of one length", code="protocol.shapes")

    @staticmethod
    def _pick(asked: tuple[ClientOnNode, ...], first: int, clients: range, role: str) -> list[ClientInDataset]:
        stop = first + len(clients)
        if asked and not first <= min(asked) <= max(asked) < stop:
            strangers = [client for client in asked if not first <= client < stop]
            text = f"clients {strangers} are not {role} clients of this node ({first} to {stop - 1})"
            raise ProtocolError(text, code="protocol.strangers")
        return cast(list[ClientInDataset], counted(asked, clients.start - clients.step * first, clients.step))


def _foreign(run: RunConfig, manifest: Manifest) -> str:
    """Return the server's requests that do not fit a site's data; empty if all do.

    A name may lead to any installed code, and a loss that does not suit the targets can make a client's reply depend on
    its data.
    """
    if columns_in(run.model):
        return ""  # the policy names the columns
    if run.model and run.model != manifest.model and (manifest.model or run.model not in models.MODELS):
        return f"asks for model {run.model!r}; this site's data are for {manifest.model!r}"
    own = manifest.loss or _loss_of(manifest.model or run.model)
    if run.loss and own and run.loss != own:
        return f"asks for loss {run.loss!r}; this site's data are for {own!r}"
    if run.pretrained and not manifest.pretrained:
        return f"starts from weights {run.pretrained!r}; name the same file as pretrained in the manifest"
    for what in ("loss", "metric", "frozen", "local"):
        asked, own = getattr(run, what), getattr(manifest, what)
        # A loss or metric without a path is one of umbel's.
        if asked and asked != own and (what in ("frozen", "local") or ":" in asked):
            return f"asks for {what} {asked!r}; the manifest of this site's data allows {own!r}"
    return ""


@lru_cache(maxsize=16)
def _loss_of(model: str) -> str:
    """Return a model's default loss; empty if it has none."""
    try:
        return models.load(model).loss.name
    except UmbelError:
        return ""


@lru_cache(maxsize=16)
def _try_out(source: _Source, model: Model, device: str, engine: str, precision: str) -> Learner:
    """Return the learner of a model that takes the data of all clients."""
    try:
        return try_out(model, _open(source), device, engine, precision=precision)
    except ModelError as error:
        raise DatasetError.of(error, f"{source.path}: ") from error


@lru_cache(maxsize=4)
def _open(source: _Source) -> Dataset:
    if not source.reader and source.path.name.lower().endswith(_TABLES):
        text = f"{source.path} is a table: name the function that reads it, as reader = package.module:function"
        raise SiteError(text, code="site.table")
    if source.register is None:
        if source.reader:
            text = "only a site can serve a table: name it as data-path in its configuration"
            raise SiteError(text, code="site.table")
        return open_dataset(source.path)
    register = (NamesOnTrial if source.trial else Names)(source.register, witness=source.witness)
    if source.reader:
        dataset = _read(source, register)
        check(dataset, source.path)
    else:
        dataset, known = open_dataset(source.path), list(map(str, register.read()))
        old, new = dataset.names[: len(known)], dataset.names[len(known) :]
        if new and list(old) == known:
            register.extend(known, new)
    # The ledger identifies clients by number: in another order, it would charge others. A folder may have no names.
    named = list(dataset.names)
    if (named or source.reader) and (not named or named != list(map(str, register.read()))):
        raise DatasetError(
            f"{source.path}: the clients of {source.reader or 'this dataset'} are not those of the register, in its "
            "order, so the ledger would charge others; add new clients at the end, as umbel.data.table.read does, and "
            "set another ledger-path for other data",
            code="data.register",
        )
    return dataset


def _read(source: _Source, register: Register) -> Dataset:
    """Return what a site's reader makes of its table; raise `DatasetError` if it fails, or returns something else."""
    read = import_by_name(source.reader)
    try:
        found = read(source.path, register, **dict(source.options))
    except UmbelError:
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        place = f" at {frames[1].filename}:{frames[1].lineno}" if len(frames) > 1 else ""
        wrong = f"reader {source.reader!r} fails{place}: {type(error).__name__}: {one_line(error)}"
        raise DatasetError(
            f"{source.path}: {wrong}; repair it, or the options of reader", code="data.reader"
        ) from error
    if not isinstance(found, Dataset):
        wrong = f"reader {source.reader!r} returns a {type(found).__name__}"
        raise DatasetError(f"{source.path}: {wrong}; return an umbel.data.Dataset", code="data.reader")
    return found
