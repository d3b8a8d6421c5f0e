"""A federation: a data set already split into clients.

A federation is either a LEAF JSON file (``users``, ``num_samples``, ``user_data``), for small
data, or a folder::

    manifest.json   what the data are: see `Manifest`
    features.npy    (rows, *feature shape), the rows of a client together
    targets.npy     (rows,) or (rows, outputs)
    offsets.npy     (clients + 1,): client i owns rows offsets[i] to offsets[i + 1]

Folders are memory-mapped, so that cost grows with the clients that are read, not with the
clients that there are. Training clients come first, validation clients after them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUNDLED = Path(__file__).parent / "datasets"
_SCAN_ROWS = 1 << 16


class FederationError(ValueError):
    """A federation cannot be used; the text names the file, the client and the fix."""


def umbel_home() -> Path:
    """Return the folder of data and runs: ``$UMBEL_HOME``, or ``~/umbel``."""
    home = Path(os.environ.get("UMBEL_HOME") or Path.home() / "umbel").expanduser()
    if not home.is_absolute():
        # It would mean another folder in every process.
        raise FederationError(f"UMBEL_HOME must be an absolute path, got {str(home)!r}")
    return home


@dataclass(frozen=True)
class Manifest:
    """What a federation says of itself.

    Attributes
    ----------
    name : str
        Name of the data.
    model, loss : str
        The model and the loss it was made for (see `models.load`); empty when it has none.
    clients : int
        Number of clients, training and validation together.
    split : dict
        ``{"train": a, "validation": b}`` with ``a + b == clients``: the first ``a`` clients
        train, the others validate.
    units : dict
        Public constants that map stored numbers to the world's. ``units["target"]`` may hold
        ``name``, ``unit`` and ``scale``: a stored target times ``scale`` is in ``unit``.
    feature_scale : float
        A model sees the stored features times this constant (1/255 for images kept as bytes).
    truth : list of list of float
        Parameter vectors the data were made from, for synthetic data only.
    groups : list of int
        For made data: the distribution that each client's rows come from, training clients
        first; empty when unknown. Training does not use it: it is there to compare with what
        was found.
    provenance, licence : str
        Where the data come from and what may be done with them.
    """

    name: str
    clients: int
    split: dict[str, int]
    model: str = ""
    loss: str = ""
    units: dict[str, Any] = field(default_factory=dict)
    feature_scale: float = 1.0
    truth: list[list[float]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    provenance: str = ""
    licence: str = ""

    @property
    def train(self) -> int:
        """Number of training clients."""
        return self.split["train"]

    @classmethod
    def parse(cls, raw: Any, source: Path) -> Manifest:
        """Check a decoded manifest and return it; `source` is named in errors."""
        if not isinstance(raw, dict):
            raise FederationError(f"{source}: the manifest must be a JSON object")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(raw) - known):
            raise FederationError(f"{source}: unknown manifest entries {unknown}; allowed: {sorted(known)}")
        if missing := sorted({"name", "clients", "split"} - set(raw)):
            raise FederationError(f"{source}: the manifest lacks {missing}; write it again with the recipe")
        manifest = cls(**raw)
        split = manifest.split
        if not isinstance(split, dict) or set(split) != {"train", "validation"}:
            raise FederationError(f'{source}: "split" must be {{"train": a, "validation": b}}, got {split!r}')
        counts = (manifest.clients, split["train"], split["validation"])
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise FederationError(f"{source}: client counts must be whole numbers, got {counts}")
        if manifest.clients < 1:
            raise FederationError(f"{source}: the federation has no clients; build it from a file that has rows")
        if split["train"] + split["validation"] != manifest.clients:
            raise FederationError(f"{source}: split {split} does not add up to {manifest.clients} clients")
        groups = manifest.groups
        if not isinstance(groups, list) or len(groups) not in (0, manifest.clients):
            count = len(groups) if isinstance(groups, list) else repr(groups)
            raise FederationError(
                f'{source}: "groups" must list a group for each of the {manifest.clients} clients, or none, got {count}'
            )
        # Not isinstance: JSON's true would pass for 1.
        if odd := [group for group in groups if type(group) is not int or group < 0]:
            raise FederationError(f'{source}: "groups" must hold whole numbers from 0 on, got {odd[0]!r}')
        return manifest


@dataclass(frozen=True)
class Federation:
    """An opened federation.

    Attributes
    ----------
    manifest : Manifest
        What the data are.
    features : ndarray, shape (rows, \\*feature shape)
        Inputs, the rows of a client together; memory-mapped for a folder.
    targets : ndarray, shape (rows,) or (rows, outputs)
        Outputs, integers for classes.
    offsets : ndarray of int64, shape (clients + 1,)
        Client ``i`` owns rows ``offsets[i]`` to ``offsets[i + 1]``.
    """

    manifest: Manifest
    features: NDArray[Any]
    targets: NDArray[Any]
    offsets: NDArray[np.int64]

    def client(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the stored features and targets of one client, without a copy."""
        rows = slice(self.offsets[index], self.offsets[index + 1])
        return self.features[rows], self.targets[rows]


def find_federation(name: str) -> Path:
    """Return the path of the federation called `name`.

    An absolute path (or one that starts with ``~``) is taken as it is. A name is looked up in
    ``$UMBEL_HOME/data`` and then among the federations that travel with the app. The working
    directory plays no part: in a Flower process it is not the user's.
    """
    if not name:
        raise FederationError('no federation given; set federation = "NAME" or an absolute path in the run config')
    candidates = _candidates(name, os.environ.get("UMBEL_HOME"))
    for candidate in candidates:
        if os.path.exists(candidate):
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates)
    raise FederationError(
        f"no federation {name!r}: looked for {looked}; build it with its recipe (python datasets/RECIPE.py --help)"
    )


@lru_cache(maxsize=16)
def _candidates(name: str, _home: str | None) -> Sequence[Path]:
    """Return where a federation may be; `_home` is what the answer hangs on."""
    path = Path(name).expanduser()
    return [path] if path.is_absolute() else [umbel_home() / "data" / name, BUNDLED / f"{name}.json"]


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the federation at `path`, and no data where there is a folder."""
    if path.is_dir():
        file = path / "manifest.json"
        return Manifest.parse(_read_json(file), file)
    return _open_leaf(path).manifest


def open_federation(path: Path) -> Federation:
    """Open and check the federation at `path`, a folder or a LEAF JSON file.

    Raises
    ------
    FederationError
        When a file is missing or unreadable, shapes or offsets do not fit, a client has no
        rows, or a number is not finite. The text names the file, the client and the fix.
    """
    federation = _open_folder(path) if path.is_dir() else _open_leaf(path)
    check(federation, path)
    return federation


def check(federation: Federation, source: Path) -> None:
    """Raise unless shapes, offsets and values are what the format says; `source` is named in errors."""
    manifest, offsets = federation.manifest, federation.offsets
    features, targets = federation.features, federation.targets
    Manifest.parse(vars(manifest), source)
    if offsets.dtype.kind not in "iu" or offsets.shape != (manifest.clients + 1,):
        raise FederationError(
            f"{source}: offsets must be {manifest.clients + 1} whole numbers (clients + 1), "
            f"got {offsets.dtype} of shape {offsets.shape}"
        )
    if features.ndim < 1 or targets.ndim < 1 or len(features) != len(targets):
        raise FederationError(
            f"{source}: features {features.shape} and targets {targets.shape} must have the same number of rows"
        )
    if offsets[0] != 0 or offsets[-1] != len(features):
        raise FederationError(
            f"{source}: offsets must run from 0 to {len(features)} rows, got {offsets[0]} to {offsets[-1]}"
        )
    if len(bad := np.flatnonzero(offsets[1:] <= offsets[:-1])):
        raise FederationError(
            f"{source}: client {bad[0]} has no rows (offsets {offsets[bad[0]]} to {offsets[bad[0] + 1]}); leave it out"
        )
    for name, array in (("features", features), ("targets", targets)):
        if array.dtype.kind not in "iuf":
            raise FederationError(f"{source}: {name} must be numbers, got {array.dtype}")
        if array.dtype.kind == "f" and (row := _first_bad_row(array)) is not None:
            client = int(np.searchsorted(offsets, row, side="right")) - 1
            raise FederationError(
                f"{source}: {name} of client {client}, row {row}, are not finite; remove or repair that row"
            )


def check_out(folder: Path) -> None:
    """Raise before the work where its result could not be written."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "manifest.json").exists():
        raise FederationError(f"{folder} exists and is not a federation; give another folder with --out")
    # The folder is put in place by a rename, so it is the one above it that must be writable.
    above = next(parent for parent in folder.parents if parent.exists())
    if (folder.exists() and not folder.is_dir()) or not above.is_dir() or not os.access(above, os.W_OK):
        raise FederationError(f"{folder} cannot be written; give a folder that can with --out")


def write_federation(
    folder: Path,
    manifest: Manifest,
    features: NDArray[Any],
    targets: NDArray[Any],
    offsets: NDArray[np.int64],
) -> None:
    """Check a federation and write it as a folder, whole or not at all.

    Replaces a federation already there; any other non-empty folder is left alone with an error.
    """
    check(Federation(manifest, features, targets, offsets), folder)
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / "manifest.json").exists())):
        raise FederationError(f"{folder} exists and is not a federation; give another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        np.save(new / "features.npy", features)
        np.save(new / "targets.npy", targets)
        np.save(new / "offsets.npy", offsets.astype(np.int64))
        (new / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(old)
        new.rename(folder)


def write_leaf(path: Path, manifest: Manifest, clients: Mapping[str, tuple[Any, Any]]) -> None:
    """Write a federation as LEAF JSON, with umbel's manifest beside LEAF's three keys.

    Parameters
    ----------
    path : Path
        The file.
    manifest : Manifest
        What the data are.
    clients : mapping from user to (x, y)
        Rows of each client as nested lists or arrays; training clients first.
    """
    data = {user: {"x": np.asarray(x).tolist(), "y": np.asarray(y).tolist()} for user, (x, y) in clients.items()}
    document = {
        "manifest": asdict(manifest),
        "users": list(data),
        "num_samples": [len(rows["y"]) for rows in data.values()],
        "user_data": data,
    }
    check(_parse_leaf(document, path), path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(document, separators=(",", ":")) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or the next run, sees the old or the new one, never half."""
    # A name of the process's own, should two write the same file.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def offsets_of(lengths: Iterable[int]) -> NDArray[np.int64]:
    """Return the offsets of clients with the given numbers of rows."""
    return np.concatenate([[0], np.cumsum(list(lengths), dtype=np.int64)]).astype(np.int64)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FederationError(
            f"{file} is missing; a federation is a LEAF JSON file or a folder with a manifest.json"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FederationError(f"{file} cannot be read as JSON: {error}") from None


def _open_folder(folder: Path) -> Federation:
    manifest = read_manifest(folder)
    arrays = {}
    for name in ("features", "targets", "offsets"):
        file = folder / f"{name}.npy"
        try:
            # As a plain array: numpy's subclass takes longer over each access than a small cohort's rows.
            arrays[name] = np.lib.format.open_memmap(file, mode="r").view(np.ndarray)
        except FileNotFoundError:
            raise FederationError(f"{file} is missing; write the federation again with its recipe") from None
        except (OSError, ValueError) as error:
            raise FederationError(f"{file} is not a plain .npy array: {error}") from None
    return Federation(manifest, arrays["features"], arrays["targets"], arrays["offsets"])


def _open_leaf(file: Path) -> Federation:
    return _parse_leaf(_read_json(file), file)


def _parse_leaf(raw: Any, file: Path) -> Federation:
    """Return the federation of a decoded LEAF document; `file` is named in errors."""
    if not isinstance(raw, dict) or not {"users", "num_samples", "user_data"} <= set(raw):
        raise FederationError(f"{file}: LEAF JSON needs the keys users, num_samples and user_data")
    users, counts, data = raw["users"], raw["num_samples"], raw["user_data"]
    lists = isinstance(users, list) and isinstance(counts, list) and isinstance(data, dict)
    if not lists or len(counts) != len(users):
        raise FederationError(f"{file}: users and num_samples must be lists of one length, user_data an object")
    if len(set(map(str, users))) != len(users):
        raise FederationError(f"{file}: users names a client twice; give each client a name of its own")
    clients: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for user, count in zip(users, counts, strict=True):
        try:
            x, y = np.asarray(data[user]["x"]), np.asarray(data[user]["y"])
            lengths = len(x), len(y)
        except (KeyError, TypeError, ValueError):
            raise FederationError(f"{file}: client {user!r} needs rectangular lists x and y in user_data") from None
        if lengths != (count, count):
            raise FederationError(
                f"{file}: client {user!r} has {lengths[0]} x, {lengths[1]} y and num_samples {count}; make them equal"
            )
        if count == 0:
            raise FederationError(f"{file}: client {user!r} has no rows; leave it out")
        if x.dtype.kind not in "iuf" or y.dtype.kind not in "iuf":
            raise FederationError(f"{file}: client {user!r} holds values that are not numbers")
        clients.append((x.astype(np.float32), y if y.dtype.kind in "iu" else y.astype(np.float32)))
    if "manifest" in raw:
        manifest = Manifest.parse(raw["manifest"], file)
    else:
        if not users:
            raise FederationError(f"{file}: the federation has no clients")
        # LEAF itself keeps training and test users in files of their own: all of these train.
        manifest = Manifest(name=file.stem, clients=len(users), split={"train": len(users), "validation": 0})
    if len(clients) != manifest.clients:
        raise FederationError(f"{file}: {len(clients)} users but the manifest says {manifest.clients} clients")
    for part in ("x", "y"):
        shapes = {rows[part == "y"].shape[1:] for rows in clients}
        if len(shapes) > 1:
            raise FederationError(f"{file}: clients differ in the shape of a row of {part}: {sorted(map(str, shapes))}")
    targets = np.concatenate([y for _, y in clients])
    return Federation(
        manifest,
        np.concatenate([x for x, _ in clients]),
        # One client's targets may happen to be whole numbers: they are classes only if everybody's are.
        targets.astype(np.float32) if targets.dtype.kind == "f" else targets,
        offsets_of(len(y) for _, y in clients),
    )


def _first_bad_row(array: NDArray[Any]) -> int | None:
    """Return the first row with a NaN or an infinity, reading a bounded part at a time."""
    for start in range(0, len(array), _SCAN_ROWS):
        finite: NDArray[np.bool_] = np.isfinite(array[start : start + _SCAN_ROWS])
        if not finite.all():
            rows = finite.reshape(len(finite), -1).all(axis=1)
            return start + int(rows.argmin())
    return None
