"""The local parameters of a node's clients, which are kept from round to round and never leave the node.

In simulation they are in the node's own state during the run. If the data are a site's own, they are on its disk beside
the ledger, so that they survive a restart of the node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray
from safetensors import safe_open

from umbel.models.model import Model
from umbel.privacy.mechanisms.randomness import streams
from umbel.privacy.site.config import Site
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.totals import Head
from umbel.protocol.arrays import Arrays, all_finite
from umbel.protocol.home import write_atomically
from umbel.protocol.records import from_array_record, record_in, to_array_record

_RECORD = "umbel.local"
_CLIENTS = "clients"
_HIDDEN = ":hidden"  # no parameter's name has a colon
_HEAD = "journal"  # as it was after the training
_KEPT_RUNS = 20  # a site keeps the local parameters of this many runs


class LocalParameters:
    """The local parameters of a model in a run, which `run` names; `state` is the node's ``context.state``.

    `seed` is that of the initial draw; None uses the operating system's entropy.

    Training that hides each row (`TrainingSpec.hides_rows`) starts only from local parameters of the same kind of
    training, or from fresh ones. After ordinary training they depend on all rows, and so would each row's gradient. If
    the journal lacks the charges of that training, it starts from fresh ones too: no account covers what the others
    reveal about a row.
    """

    def __init__(self, site: Site, state: RecordDict, model: Model, run: str, seed: int | None) -> None:
        self._site, self._model, self._seed, self._state = site, model, seed, state
        self._file = _file(site, site.ledger_path, model, run) if site.ledger_path else None
        self._kept: Arrays = {_CLIENTS: np.zeros(0, np.int64), _HIDDEN: np.zeros(0, np.int64)}
        self._kept |= {name: np.zeros((0, *shape), np.float32) for name, shape in model.local_shapes.items()}
        if model.local_shapes:
            self._kept |= self._load()

    def read(self, clients: Sequence[int], hidden: bool = False) -> Arrays:
        """Return the local parameters, each (clients, \\*shape), of clients counted over the dataset.

        A client without any gets initial ones; with `hidden` also a client whose training did not hide each row.
        """
        if not self._model.local_shapes:
            return {}
        fit = self._kept[_HIDDEN] >= hidden
        where = {client: row for row, client in enumerate(self._kept[_CLIENTS].tolist()) if fit[row]}
        new = [i for i, client in enumerate(clients) if client not in where]
        known = [i for i, client in enumerate(clients) if client in where]
        values, fresh = dict[str, NDArray[np.float32]](), self.fresh([clients[i] for i in new])
        for name, shape in self._model.local_shapes.items():
            values[name] = np.empty((len(clients), *shape), np.float32)
            values[name][new] = fresh[name]
            values[name][known] = self._kept[name][[where[clients[i]] for i in known]]
        return values

    def known(self, clients: Sequence[int]) -> list[int]:
        """Return the clients that have local parameters."""
        there = set(self._kept[_CLIENTS].tolist())
        return [client for client in clients if client in there]

    def fresh(self, clients: Sequence[int]) -> Arrays:
        """Return the initial local parameters of clients."""
        return self._model.initial_local(streams(self._seed, "local", 0, clients))

    def write(self, clients: Sequence[int], values: Arrays, shared: Arrays, hidden: bool = False) -> None:
        """Keep the local parameters of clients, and whether training has hidden each row in them.

        Training that diverged counts as no update, as in `umbel.privacy.site.answer`: a client whose `shared` or
        local parameters are not finite keeps its earlier local parameters.
        """
        if not values:
            return
        flat = [value.reshape(len(clients), -1) for value in (*values.values(), *shared.values())]
        sound = np.all([all_finite(value, axis=1) for value in flat], axis=0)
        if not sound.any():
            return
        which = np.asarray(clients, np.int64)[sound]
        others = ~np.isin(self._kept[_CLIENTS], which)
        new = {_CLIENTS: which, _HIDDEN: np.full(len(which), int(hidden))}
        new |= {name: value[sound] for name, value in values.items()}
        self._kept = {name: np.concatenate([kept[others], new[name]]) for name, kept in self._kept.items()}
        self._save()

    def _load(self) -> Arrays:
        if self._file is None and _RECORD in self._state:
            return dict(from_array_record(record_in(self._state, _RECORD, ArrayRecord)))
        if self._file is None or not self._file.exists():
            return {}
        with safe_open(self._file, "np") as file:
            names, about = file.keys(), file.metadata() or {}
            kept: Arrays = {name: file.get_tensor(name) for name in names}
        if kept[_HIDDEN].any():
            number, size, hash = about.get(_HEAD, "0 0 ").split(" ")
            if not (hash and Journal.of(self._site).holds(Head(int(number), int(size), hash))):
                kept[_HIDDEN] = np.zeros_like(kept[_HIDDEN])
        return kept

    def _save(self) -> None:
        if self._file is None:
            self._state[_RECORD] = to_array_record(self._kept)
            return
        new = not self._file.exists()
        # Only the site may read them, as with the ledger.
        for folder in (self._file.parent.parent, self._file.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        head = {_HEAD: " ".join(map(str, Journal.of(self._site).head))} if self._kept[_HIDDEN].any() else None
        write_atomically(self._file, safetensors.numpy.save(self._kept, head), private=True)
        if new:
            _forget_old_runs(self._file)


def _file(site: Site, ledger: Path, model: Model, run: str) -> Path:
    """Return the path of a site's local parameters for a run.

    The server chose the run's name, so it is not used as a path. Nodes that share a ledger but serve different
    data or clients have separate files.
    """
    where = _digest(site.identity)
    what = f"{run}\n{model.name}\n{sorted(model.local_shapes.items())}\n{model.frozen_digest}"
    return ledger.with_name(f"{ledger.name}.local") / where / f"{_digest(what)}.safetensors"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _forget_old_runs(newest: Path) -> None:
    """Keep only the newest files, because the server decides how many runs there are.

    `newest` is one of them, also if the clock has gone back since the others were written.
    """
    others = [file for file in newest.parent.glob("*.safetensors") if file != newest]
    others.sort(key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in others[_KEPT_RUNS - 1 :]:
        file.unlink(missing_ok=True)
