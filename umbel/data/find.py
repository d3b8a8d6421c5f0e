"""Datasets by name, and the recipes that make them from public raw data.

Recipes are scripts that are loaded by path: a package ``datasets`` would hide Hugging Face's library of that name.
Other packages may bring more, in a package that they name as an entry point of the group ``umbel.recipes``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from stat import S_ISDIR
from types import ModuleType

from umbel.data.data import Dataset, Manifest, check
from umbel.data.files import open_folder, open_leaf, read_json
from umbel.protocol.errors import DatasetError
from umbel.protocol.home import umbel_home

BUNDLED = Path(__file__).resolve().parent.parent / "datasets"

Version = tuple[str | tuple[int, ...], ...]
_SETTLED_NS = 2 * 10**9  # more than the resolution of a file system's times
_checked: deque[Version] = deque(maxlen=16)  # versions of datasets that this process has checked


def datasets_made() -> list[Path]:
    """Return the folders of the datasets under ``$UMBEL_HOME/data``, without one that is being written."""
    return sorted(path.parent for path in (umbel_home() / "data").glob("[!.]*/manifest.json"))


def find_dataset(name: str) -> Path:
    """Return the path of the dataset called `name`.

    An absolute path (or one that starts with ``~``) stays the same. A name is looked up in
    ``$UMBEL_HOME/data`` and then among the datasets in the app. The working directory is
    ignored: in a Flower process it is not the user's.
    """
    if not name:
        raise DatasetError('no dataset given; set dataset = "NAME", or an absolute path', code="data.none")
    candidates = _candidates(name, os.environ.get("UMBEL_HOME"))
    if found := next(filter(os.path.exists, candidates), None):
        return found
    places = " and ".join(map(str, candidates))
    # A recipe makes datasets of its name, and others whose names begin with it.
    recipe = max((one for one in recipes() if f"{name}-".startswith(f"{one.replace('_', '-')}-")), key=len, default="")
    fix = "list datasets with umbel data show, or make one with umbel data import"
    if recipe:
        fix = f"make it with its recipe: umbel data make {recipe} --help"
    raise DatasetError(f"no dataset {name!r}: looked for {places}; {fix}", code="data.unknown")


def find_typed(name: str | Path) -> Path:
    """Return the path of a dataset for a name, or a path relative to the user's folder."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "manifest.json").exists():  # such as an export, under a dataset's name
        with suppress(DatasetError):
            return find_dataset(str(name))
    return path.absolute() if path.exists() else find_dataset(str(name))


@lru_cache(maxsize=16)
def _candidates(name: str, _home: str | None) -> Sequence[Path]:
    """Return the possible paths of a dataset; `_home` is part of the cache's key."""
    path = Path(name).expanduser()
    return [path] if path.is_absolute() else [umbel_home() / "data" / name, BUNDLED / f"{name}.json"]


def digest_of(path: Path) -> str:
    """Return the beginning of the SHA-256 of a dataset's files."""
    digest = hashlib.sha256()
    for file in sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the dataset at `path`; of a folder no data are read."""
    if path.is_dir():
        file = path / "manifest.json"
        return Manifest.read(read_json(file), file)
    return open_leaf(path).manifest


def open_dataset(path: Path) -> Dataset:
    """Open and check the dataset at `path`, a folder or a LEAF JSON file.

    Raises
    ------
    DatasetError
        If a file is missing or unreadable, shapes or offsets do not fit, a client has no
        rows, or a number is not finite. The text names the file, the client and the fix.
    """
    version = _version(path)
    try:
        dataset = open_folder(path) if path.is_dir() else open_leaf(path)
    except OSError as error:
        text = f"{path} cannot be read: {error.strerror}; let the user of this process read it"
        raise DatasetError(text, code="data.unreadable") from None
    # A run opens its dataset many times, and checking reads all rows, which may not fit into memory.
    if version is None or version not in _checked or version != _version(path):
        check(dataset, path)
        if version is not None and version == _version(path):
            _checked.append(version)
    return dataset


def stats_of(path: Path) -> list[os.stat_result]:
    """Return the stat of a file, or those of a folder's files by name; called for every message of a run.

    A file that cannot be read has none: opening it says why.
    """
    with suppress(OSError):
        whole = os.stat(path)
        if not S_ISDIR(whole.st_mode):
            return [whole]
        with os.scandir(path) as entries:
            return [entry.stat() for entry in sorted(entries, key=lambda entry: entry.name)]
    return []


def _version(path: Path) -> Version | None:
    """Return what changes whenever a dataset's files do; None while a change might leave it the same."""
    stats = stats_of(path)
    recent = time.time_ns() - _SETTLED_NS  # later changes may get the same time
    found = [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in stats]
    return None if any(one.st_mtime_ns >= recent for one in stats) else (str(path), *found)


@cache
def recipes() -> Mapping[str, str]:
    """Return a short description of each recipe by name, without running it."""
    found = {}
    for name, file in sorted(_scripts().items()):
        first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        if first.startswith("Recipe: "):
            found[name] = first.removeprefix("Recipe: ")
    return found


def _scripts() -> dict[str, Path]:
    """Return the scripts of recipes by name, umbel's own before those of other packages."""
    folders = [BUNDLED]
    for point in entry_points(group="umbel.recipes"):
        with suppress(ModuleNotFoundError):  # a package of which only the metadata are left
            folders += map(Path, point.load().__path__)
    return {file.stem: file for folder in reversed(folders) for file in folder.glob("*.py")}


@cache
def load_recipe(name: str) -> ModuleType:
    """Return the module of a recipe; its ``app`` is its command."""
    spec = importlib.util.spec_from_file_location(f"umbel_recipe_{name}", _scripts()[name])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
