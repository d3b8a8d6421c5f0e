"""The result of all importers: rows split into clients, ready to be written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from umbel.data import Dataset, Manifest, offsets_of, write_dataset
from umbel.data.table import plain_client
from umbel.protocol.errors import DatasetError
from umbel.protocol.home import umbel_home
from umbel.protocol.project import CONFIGS

_TRIES = 100  # maximum draws until every client has a row


@runtime_checkable
class Partitioner(Protocol):
    """Assigns rows to clients."""

    def deal(self, rows: int, labels: NDArray[Any]) -> NDArray[np.int64]:
        """Return each row's client (rows,), from 0; `labels` (rows,) are the targets, read-only."""


@dataclass(frozen=True)
class Uniform:
    """Random rows; the clients' numbers of rows differ by at most one."""

    clients: int
    seed: int = 0

    def deal(self, rows: int, labels: NDArray[Any]) -> NDArray[np.int64]:
        """See `Partitioner.deal`."""
        _enough(self.clients, rows)
        return np.random.default_rng(self.seed).permutation(np.arange(rows) % self.clients)


@dataclass(frozen=True)
class Dirichlet:
    """Label skew: clients' shares of each class are drawn from Dir(alpha, ..., alpha).

    After Yurochkin et al., *Bayesian nonparametric federated learning of neural networks* (ICML 2019),
    Sec. 4. Shares are drawn again until every client has a row.

    Attributes
    ----------
    alpha : float
        Above 0; the smaller it is, the fewer classes a client has.
    """

    clients: int
    alpha: float
    seed: int = 0

    def deal(self, rows: int, labels: NDArray[Any]) -> NDArray[np.int64]:
        """See `Partitioner.deal`."""
        _enough(self.clients, rows)
        if labels.ndim != 1 or labels.dtype.kind == "f":
            raise DatasetError(
                "Dirichlet assigns classes; for other targets leave out alpha, or use umbel.Uniform",
                code="data.classes",
            )
        generator = np.random.default_rng(self.seed)
        own: NDArray[np.int64] = np.empty(rows, np.int64)
        for _ in range(_TRIES):
            for label in np.unique(labels):
                of_class = generator.permutation(np.flatnonzero(labels == label))
                shares = self._shares(generator)
                borders = np.rint(np.cumsum(shares) / shares.sum() * len(of_class)).astype(np.int64)
                own[of_class] = np.repeat(np.arange(self.clients), np.diff(borders, prepend=0))
            if len(np.unique(own)) == self.clients:
                return own
        fix = f"ask for fewer than {self.clients} clients, or for an alpha above {self.alpha:g}"
        raise DatasetError(f"{_TRIES} draws left a client without a row; {fix}", code="data.partition")

    def _shares(self, generator: np.random.Generator) -> NDArray[np.float64]:
        if not self.alpha > 0:
            raise DatasetError(f"alpha must be above 0, got {self.alpha!r}", code="data.partition")
        shares = generator.dirichlet(np.full(self.clients, self.alpha))
        if not shares.sum() > 0:  # also where it is no number
            raise DatasetError(f"alpha = {self.alpha:g} leaves the range of numbers", code="data.partition")
        return shares


def names_dealt(partitioner: Partitioner, labels: NDArray[Any]) -> NDArray[Any]:
    """Return the name of each row's client, by a partitioner; raise `DatasetError` if it gives rows no numbers.

    The labels are read-only: a partitioner that sorted them would give rows the targets of others.
    """
    name, shown = type(partitioner).__name__, labels.view()
    shown.flags.writeable = False
    if isinstance(partitioner, type):
        raise DatasetError(f"client is a class: give a partitioner, as {partitioner.__name__}()", code="data.partition")
    dealt = np.asarray(partitioner.deal(len(labels), shown))
    if dealt.shape != labels.shape[:1] or dealt.dtype.kind not in "biu" or dealt.min(initial=0) < 0:
        wanted, found = f"an integer from 0 for each of {len(labels)} rows", f"{dealt.dtype} of shape {dealt.shape}"
        raise DatasetError(f"{name}.deal must return {wanted}, got {found}", code="data.partition")
    return numbered(dealt)


def numbered(owners: NDArray[Any]) -> NDArray[Any]:
    """Return names for dealt clients that sort like their numbers."""
    width = len(str(int(owners.max(initial=0))))
    return np.array([f"client-{one:0{width}d}" for one in owners], dtype=object)


def _enough(clients: int, rows: int) -> None:
    if not isinstance(clients, (int, np.integer)) or not 1 <= clients <= rows:
        raise DatasetError(f"{rows} rows can make 1 to {rows} clients, not {clients}", code="data.partition")


Share = float | Sequence[str]
"""A share of the clients, drawn at random, or their names."""


@dataclass(frozen=True)
class ClientData:
    """Data split into clients, in memory.

    Attributes
    ----------
    dataset : Dataset
        The clients of a run, training clients first; ``names`` holds their names.
    test : Dataset, optional
        Clients outside all runs.
    notes : tuple of str
        Decisions that the importer made, as sentences.
    """

    dataset: Dataset
    test: Dataset | None = None
    notes: tuple[str, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """The manifest of `dataset`."""
        return self.dataset.manifest

    def write(self, name: str | Path, *, replace: bool = False) -> Path:
        """Write a dataset, completely or not at all, and return its folder.

        Parameters
        ----------
        name : str or Path
            A name, for a folder under ``$UMBEL_HOME/data`` that a run finds by ``dataset = "NAME"``,
            or a path. Test clients are then ``dataset = "NAME/test"``.
        replace : bool
            Whether to replace a dataset that is there.

        Raises
        ------
        DatasetError
            If the folder has a dataset and `replace` is not set, or is not a dataset. Its content stays as it was.
        DiskError
            If the disk is full. The content stays as it was.
        """
        folder = folder_of(name)
        if (folder / "manifest.json").exists() and not replace:
            text = f"{folder} exists already; give another name, or replace=True"
            raise DatasetError(text, code="data.exists")
        whole = _renamed(self.dataset, folder.name)
        test = _renamed(self.test, f"{folder.name}-test") if self.test else None
        write_dataset(folder, whole.manifest, whole.features, whole.targets, whole.offsets, whole.names, test)
        return folder

    def __repr__(self) -> str:
        """Return the numbers of clients and rows, and their kinds."""
        own, split = self.dataset, self.manifest.split
        test = f", {self.test.manifest.clients} test" if self.test else ""
        return (
            f"<ClientData {self.manifest.name!r}: {split['train']} training, {split['validation']} validation{test} "
            f"clients; features {own.features.dtype} {own.features.shape}, targets {own.targets.dtype} "
            f"{own.targets.shape}; model {self.manifest.model or 'none'!r}, loss {self.manifest.loss or 'none'!r}>"
        )


def folder_of(name: str | Path) -> Path:
    """Return the folder of a dataset: the path itself, or a name's folder under ``$UMBEL_HOME/data``."""
    path = Path(name).expanduser()
    if str(name) in ("", ".", ".."):
        raise DatasetError(f"{str(name)!r} is not a valid name of a dataset; give one, or a path", code="data.name")
    if isinstance(name, Path) or os.sep in str(name) or path.is_absolute():
        return Path(os.path.abspath(path))
    others = {
        "the newest run": name == "last",
        "an option": name.startswith("-"),
        "a setting": "=" in name,
        "a configuration of umbel's": (CONFIGS / f"{name}.toml").is_file(),
    }
    if taken := next((kind for kind, so in others.items() if so), ""):
        raise DatasetError(f"umbel run takes {name!r} as {taken}; give the dataset another name", code="data.name")
    return umbel_home() / "data" / path


def split_into_clients(
    features: NDArray[Any],
    targets: NDArray[Any],
    owners: Sequence[Any] | NDArray[Any],
    *,
    validation: Share = 0.2,
    test: Share = 0.0,
    seed: int = 0,
    notes: Sequence[str] = (),
    **entries: Any,
) -> ClientData:
    """Group rows by client, and decide which clients train, validate and test.

    Features and targets are (rows, ...), and `owners` is the client of each row. For the rest see
    `umbel.from_dataframe`.
    """
    if not len(features) == len(targets) == len(owners):
        found = f"features {features.shape}, targets {targets.shape} and clients of {len(owners)} rows"
        raise DatasetError(f"{found} differ in their number of rows", code="data.lengths")
    if len(lacking := np.flatnonzero(pd.isna(np.asarray(owners, object)))):
        text = f"the client of row {lacking[0]}, counted from 0, is missing; name it, or leave out that row"
        raise DatasetError(text, code="data.missing-value")
    owner, known = pd.factorize(np.array([str(one) for one in owners], dtype=object), sort=True)
    names = known.tolist()
    order = np.random.default_rng(seed).permutation(len(names)).tolist()
    tests = _chosen(test, "test", names, order)
    taken = set(tests)
    rest = [client for client in order if client not in taken]
    validates = _chosen(validation, "validation", names, rest, len(names))
    if clash := taken & set(validates):
        raise DatasetError(f"client {names[min(clash)]!r} would validate and test; choose one", code="data.split")
    taken |= set(validates)
    trains = [client for client in rest if client not in taken]
    if not trains:
        wrong = f"of {len(names)} clients {len(validates)} validate, {len(tests)} test and no client trains"
        if len(names) == 1:
            text = (
                f"all rows are of one client, {names[0]!r}, and a run needs several; choose another column of clients"
            )
            raise DatasetError(text, code="data.split")
        raise DatasetError(f"{wrong}; set smaller shares", code="data.split")
    lengths = np.bincount(owner, minlength=len(names))
    starts = np.cumsum(lengths) - lengths
    by_client = np.argsort(owner, kind="stable")

    def part(clients: Sequence[int], train: int) -> Dataset:
        rows = np.concatenate([by_client[starts[one] : starts[one] + lengths[one]] for one in clients])
        split = {"train": train, "validation": len(clients) - train}
        manifest = Manifest(**{"name": "data", **entries, "clients": len(clients), "split": split})
        offsets = offsets_of(lengths[list(clients)])
        return Dataset(manifest, features[rows], targets[rows], offsets, [names[client] for client in clients])

    whole = part([*trains, *validates], len(trains))
    return ClientData(whole, part(tests, 0) if tests else None, (*notes, *_alike(names)))


def _chosen(share: Share, what: str, names: list[str], among: list[int], of: int = 0) -> list[int]:
    """Return the clients in a share or in a list of names."""
    if isinstance(share, (int, float)):
        if not 0 <= share < 1:
            raise DatasetError(f"{what} must be a share below 1, or names, got {share!r}", code="data.split")
        count = round(share * (of or len(names)))
        return among[: max(count, 1)] if share else []
    if isinstance(share, str):
        share = [share]
    place = {name: index for index, name in enumerate(names)}
    if strange := [name for name in map(str, share) if name not in place]:
        some = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise DatasetError(f"{what} names {strange[0]!r}, which is not a client; there are {some}", code="data.split")
    return [place[name] for name in dict.fromkeys(map(str, share))]


def _alike(clients: Iterable[str]) -> list[str]:
    """Return a note about names that may be of one client: its rows would have two accounts, whose epsilons add up."""
    spelt: dict[str, set[str]] = {}
    for name in clients:
        spelt.setdefault(plain_client(name), set()).add(name)
    twice = sorted(sorted(names) for names in spelt.values() if len(names) > 1)
    if not twice:
        return []
    first, second = twice[0][:2]
    more = f" (and {len(twice) - 1} more)" if len(twice) > 1 else ""
    told = f"The names {first!r} and {second!r}{more} differ only in case, spaces, zeros or encoding"
    fix = "if they are one, write its name in one way, because the epsilons of two add up"
    return [f"{told}, and count as two clients; {fix}."]


def _renamed(dataset: Dataset, name: str) -> Dataset:
    if dataset.manifest.name != "data":
        return dataset
    return replace(dataset, manifest=dataset.manifest.model_copy(update={"name": name}))
