"""The clients of a node: which federation it serves, and which part of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import models
from client.table import is_table, open_table
from federation import Federation, Manifest, find_federation, open_federation
from models.base import Model
from models.factors import SLOPES
from privacy.policy import Policy
from privacy.site import GEONAMES_PATH, Site
from protocol.arrays import Arrays
from protocol.errors import FederationError, ProtocolError, SiteError
from protocol.messages import Hosting


@dataclass(frozen=True)
class _Source:
    """Where the data lie, and which version of them, so that a node that lives on reads them when they change."""

    path: Path
    geonames: Path | None
    register: Path | None
    version: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, site: Site, policy: Policy, run_config: Mapping[str, Any]) -> _Source:
        path = site.data_path or find_federation(str(run_config["federation"]))
        files = [path, *([site.geonames_path] if site.geonames_path else [])]
        stats = [stat for file in files for stat in _stats(file)]
        register = policy.ledger_path and policy.ledger_path.with_name(f"{policy.ledger_path.name}.clients.json")
        return cls(path, site.geonames_path, register, tuple((stat.st_mtime_ns, stat.st_size) for stat in stats))


@dataclass(frozen=True)
class Node:
    """A node's clients, counted from 0: those that train first, then those that report.

    Attributes
    ----------
    site : Site
        Where the node runs.
    federation : Federation
        The data it serves.
    model : Model
        The network the federation is for.
    training, validation : range
        The federation's numbers of the clients that train and that report. At a site that lets
        training clients report with noise, they are the same.
    policy : Policy
        What the site allows.
    """

    site: Site
    federation: Federation
    model: Model
    training: range
    validation: range
    policy: Policy

    @classmethod
    def of(cls, node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> Node:
        """Return the node that the site's configuration describes.

        Only in simulation does the run config, which is the server's, name the federation, and
        the node then hosts every ``site.step``-th client of it.
        """
        site = Site.of(node_config)
        policy = Policy.of(site, node_config)
        source = _Source.of(site, policy, run_config)
        if is_table(source.path) and policy.role == "split":
            raise SiteError("nothing says which clients of a table train and which report: set role to one of them")
        federation = _open(source)
        manifest = federation.manifest
        model_name, loss_name = str(run_config["model"]), str(run_config["loss"])
        if not site.simulated:
            _refuse_foreign(model_name, loss_name, manifest)
        model = models.load_for(model_name, loss_name, manifest.model, manifest.loss)
        _check_fit(source, model)
        hosted = range(site.first, manifest.clients, site.step)
        train = len(range(site.first, manifest.train, site.step))
        trains = {"train": len(hosted), "validation": 0, "split": train}[policy.role]
        training, validation = hosted[:trains], hosted[trains:]
        if policy.report_noise_multiplier > 0 and policy.role == "train":
            validation = training
        return cls(site, federation, model, training, validation, policy)

    @property
    def hosting(self) -> Hosting:
        """What the node says when asked."""
        place = (self.site.first, self.site.step) if self.site.placed else (-1, -1)
        return Hosting(len(self.training), len(self.validation), *place)

    @property
    def training_clients_report(self) -> bool:
        """Whether the clients that report also train, so that their reports need noise."""
        return len(self.validation) > 0 and self.validation == self.training

    def training_clients(self, asked: tuple[int, ...]) -> list[int]:
        """Return the federation's numbers of asked clients, which must all train here."""
        return self._pick(asked, 0, self.training, "training")

    def validation_clients(self, asked: tuple[int, ...]) -> list[int]:
        """Return the federation's numbers of asked clients, which must all report here."""
        return self._pick(asked, len(self.training), self.validation, "validation")

    def check(self, hypotheses: Arrays) -> None:
        """Raise unless the hypotheses fit this node's model."""
        shapes = {name: value.shape[1:] for name, value in hypotheses.items()}
        if shapes != self.model.shapes:
            raise ProtocolError(
                f"hypotheses of shapes {shapes} do not fit model {self.model.name!r}: {self.model.shapes}"
            )
        if len({len(value) for value in hypotheses.values()}) != 1:
            raise ProtocolError("the hypotheses are not stacked arrays of one length")
        if self.model.local_size and len(next(iter(hypotheses.values()))) > 1:
            raise ProtocolError("a model with a local part comes as one hypothesis")

    @staticmethod
    def _pick(asked: tuple[int, ...], first: int, clients: range, role: str) -> list[int]:
        stop = first + len(clients)
        if strangers := [client for client in asked if not first <= client < stop]:
            raise ProtocolError(f"clients {strangers} are no {role} clients of this node ({first} to {stop - 1})")
        return [clients[client - first] for client in asked]


def _refuse_foreign(model: str, loss: str, manifest: Manifest) -> None:
    """Raise when the server asks a site for another model or loss than its data are for.

    A name may lead to any code that is installed, and a loss that does not suit the targets can
    make what a client answers depend on its data.
    """
    if model and model != manifest.model and (manifest.model or model not in models.MODELS):
        raise ProtocolError(f"the server asks for model {model!r}; this site's data are for {manifest.model!r}")
    if loss and manifest.loss and loss != manifest.loss:
        raise ProtocolError(f"the server asks for loss {loss!r}; this site's data are for {manifest.loss!r}")


@lru_cache(maxsize=4)
def _check_fit(source: _Source, model: Model) -> None:
    """Raise unless the model takes the features and its loss the targets, for all clients alike.

    Otherwise training would fail at some clients and not at others, which tells about their data.
    """
    federation, path = _open(source), source.path
    if model.local_size:
        if reason := _unfit_preferences(federation, model):
            raise FederationError(f"{path}: model {model.name!r} {reason}; name another model or repair the data")
        return
    targets, shape = federation.targets, federation.features.shape[1:]
    try:
        with torch.inference_mode():
            width = model.module(torch.zeros(1, *shape)).shape[-1]
    except (RuntimeError, TypeError, ValueError) as error:
        reason = f"does not take features of shape {shape}: {error}"
    else:
        if model.loss.name in SLOPES:
            fits = width == 1 and targets.ndim == 1 and bool(np.isin(targets, (-1, 1)).all())
            reason = f"with loss {model.loss.name!r} needs one output, and labels of -1 and 1"
        elif targets.dtype.kind in "iu" and targets.ndim == 1 and width > 1:
            fits, reason = 0 <= targets.min() <= targets.max() < width, f"knows the classes 0 to {width - 1} alone"
        elif model.loss.name == "cross-entropy" or model.metric.name == "accuracy":
            fits, reason = False, "needs classes, whole numbers, as targets"
        else:
            fits = targets.shape[1:] == (width,) or (targets.ndim, width) == (1, 1)
            reason = f"has {width} outputs, a target is of shape {targets.shape[1:]}"
        if fits:
            return
    raise FederationError(f"{path}: model {model.name!r} {reason}; name another model or repair the data")


def _unfit_preferences(federation: Federation, model: Model) -> str:
    """Return what keeps a factor model from the data: items' numbers, and labels of -1 and 1."""
    items = len(next(iter(model.module.parameters())))
    features, targets = np.asarray(federation.features), np.asarray(federation.targets)
    if features.shape[1:] != (1,) or targets.ndim != 1:
        return "needs rows of one feature, an item's number, and one label"
    if not np.isin(targets, (-1, 1)).all():
        return "needs labels of -1 and 1"
    if federation.manifest.feature_scale != 1:
        return "needs items' numbers as they are, and feature_scale = 1"
    numbers = features[:, 0]
    if not ((numbers == np.floor(numbers)) & (numbers >= 0) & (numbers < items)).all():
        return f"knows the items 0 to {items - 1} alone"
    owner = np.repeat(np.arange(len(federation.offsets) - 1), np.diff(federation.offsets))
    if len(np.unique(owner * items + numbers.astype(np.int64))) < len(numbers):
        return "takes an item once at most from each client"
    return ""


def _stats(path: Path) -> list[os.stat_result]:
    """Return the stat of a file, or those of a folder's files by name: asked in every message of a run."""
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            return [entry.stat() for entry in sorted(entries, key=lambda entry: entry.name)]
    return [os.stat(path)] if os.path.exists(path) else []


@lru_cache(maxsize=4)
def _open(source: _Source) -> Federation:
    if not is_table(source.path):
        return open_federation(source.path)
    if source.geonames is None or source.register is None:
        raise SiteError(
            f"{source.path} is a table, whose ZIP codes must be located: unpack US.zip of geonames.org at this site, "
            f"and set {GEONAMES_PATH} to US.txt in its node config"
        )
    return open_table(source.path, source.geonames, source.register)
