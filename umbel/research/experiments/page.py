"""The page of results, ``docs/reproduce.md``: its text is written by hand, its tables are taken from experiments.

``docs/results/NAME`` keeps an experiment's tables and what made them: command, commit, seeds, and a digest of its
settings. Today's code need not have made them. Tests of saved runs pin the numbers that training gives; the page says
under a table where settings, recipes or these numbers have changed since.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import tomli_w
from jinja2 import Environment, StrictUndefined

from umbel.protocol.errors import ConfigError
from umbel.protocol.home import write_atomically
from umbel.protocol.project import APP, source

DOCS = APP / "docs"
_TEMPLATE, _PAGE, _RESULTS = "reproduce.md.j2", "reproduce.md", "results"
_TABLE, _MADE = "table.md", "made.toml"

_PINNED = "tests/saved_runs/runs.json.gz"  # the numbers that training gives: who changes those changes all results

_HERE, _ATTACKS, _DATA = "umbel/research/experiments", "umbel/research/attacks", "umbel/datasets"

SOURCES: Mapping[str, tuple[str, ...]] = {
    "synthetic": (f"{_HERE}/synthetic.py", "configs/synthetic.toml", f"{_DATA}/synthetic.py"),
    "hospital": (f"{_HERE}/hospital.py", "configs/hospital.toml", f"{_DATA}/hospital.py"),
    "qmnist": (f"{_HERE}/handwriting.py", "configs/qmnist.toml", f"{_DATA}/qmnist.py", f"{_DATA}/writers.py"),
    "femnist": (f"{_HERE}/handwriting.py", "configs/femnist.toml", f"{_DATA}/femnist.py", f"{_DATA}/writers.py"),
    "frontier-hospital": (f"{_HERE}/frontier.py", "configs/hospital-epsilon-*.toml", f"{_DATA}/hospital.py"),
    "frontier-qmnist-features": (
        f"{_HERE}/frontier.py", "configs/qmnist-features-*.toml", f"{_DATA}/qmnist_features.py",
    ),
    "chosen-round": (f"{_HERE}/chosen_round.py", "configs/hospital-epsilon-4.toml", f"{_DATA}/hospital.py"),
    "drift": (f"{_HERE}/drift.py", "configs/synthetic.toml", f"{_DATA}/synthetic.py"),
    "recommender": (f"{_HERE}/recommender.py", "configs/recommender.toml", f"{_DATA}/movielens.py"),
    "attacks": (
        f"{_HERE}/attacks.py", f"{_ATTACKS}/images.py", f"{_ATTACKS}/reconstruct.py", f"{_ATTACKS}/identify.py",
        f"{_ATTACKS}/victims.py", "configs/pac-attack.toml", f"{_DATA}/femnist.py", f"{_DATA}/movielens.py",
        f"{_DATA}/writers.py",
    ),
    "pac": (f"{_HERE}/pac.py",),
}  # fmt: skip
"""By its name: the files that hold an experiment's settings, and the recipes of its data."""


def digest(name: str) -> str:
    """Return a digest of an experiment's settings, of its recipes' settings, and of the numbers that training gives.

    Settings are the entries of run configs, the constants of modules that are no text, and the literal constants of
    recipes. Their own tests pin what recipes make.
    """
    pinned = source(_PINNED)  # which an installed umbel has not
    content = hashlib.sha256(pinned.read_bytes() if pinned.exists() else b"")
    for pattern in SOURCES[name]:
        files = source(pattern)
        for file in sorted(files.parent.glob(files.name)):
            text = file.read_text(encoding="utf-8")
            said = sorted(tomllib.loads(text).items()) if file.suffix == ".toml" else _constants(text, _DATA in pattern)
            content.update(repr((file.stem, said)).encode())
    return content.hexdigest()[:16]


def _constants(text: str, recipe: bool) -> list[str]:
    """Return the constants of a module's source that are no text, as code; of a recipe, literals alone."""
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [one for name in targets for one in (name.elts if isinstance(name, ast.Tuple) else [name])]
            constant = all(isinstance(one, ast.Name) and one.id.isupper() for one in names)
            if constant and not _is_text(node.value) and (not recipe or _is_literal(node.value)):
                found.append(ast.unparse(node))
    return found


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True


def stamp(name: str, folder: Path, command: str, seeds: Iterable[int]) -> None:
    """Write beside an experiment's table what made it: command, commit, seeds, and a digest of the settings."""
    document = {"command": command, "commit": _commit(), "seeds": _ranges(seeds), "settings": digest(name)}
    write_atomically(folder / _MADE, tomli_w.dumps(document).encode())


def mark_as_quick(folder: Path) -> None:
    """Say in an experiment's table that its numbers are of too few runs, or too short ones, to be results."""
    title, _, rest = (folder / _TABLE).read_text(encoding="utf-8").partition("\n")
    said = "**A quick look** (`--quick`): fewer runs, and shorter ones. Its numbers are not results."
    write_atomically(folder / _TABLE, f"{title}\n\n{said}\n{rest}".encode())


def take(name: str, folder: Path, docs: Path = DOCS) -> None:
    """Copy an experiment's tables and what made them to where the page finds them.

    Raises `ConfigError` when the experiment has no place on the page, or has not been done in this folder.
    """
    if name not in SOURCES:
        text = f"the page has no experiment {name!r}; name some of {', '.join(SOURCES)}"
        raise ConfigError(text, code="config.unknown-experiment")
    if missing := [file for file in (_TABLE, _MADE) if not (folder / file).is_file()]:
        text = f"{folder} has no {missing[0]}; do the experiment first: umbel experiment {name}"
        raise ConfigError(text, code="config.not-done")
    target = docs / _RESULTS / name
    target.mkdir(parents=True, exist_ok=True)
    for file in (_TABLE, _MADE):
        write_atomically(target / file, (folder / file).read_bytes())


def write(docs: Path = DOCS) -> Path:
    """Write the page from its text and the tables that were taken, and return its path; errors as `render`."""
    page = docs / _PAGE
    write_atomically(page, render(docs).encode())
    return page


def render(docs: Path = DOCS) -> str:
    """Return the page as it should be; raise `ConfigError` when its text asks for what no experiment has made.

    In its text, ``{{ table(experiment, heading) }}`` is the table under a heading, or with more arguments its rows that
    begin with these words; ``{{ text(experiment, heading) }}`` is what else stands there, and ``{{ made(experiment)
    }}`` says in a line what made them.
    """
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    results = _Results(docs / _RESULTS)
    source = (docs / _TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(table=results.table, text=results.text, made=results.made)


class _Results:
    """What the page's text may ask for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def table(self, name: str, heading: str, *only: str) -> str:
        lines = [line for line in self._section(name, heading).splitlines() if line.startswith("|")]
        firsts = {line.split("|")[1].strip(): line for line in lines[2:]}
        if missing := [first for first in only if first not in firsts]:
            text = f"results/{name} has no row {missing[0]!r} under {heading!r}; it has {', '.join(firsts)}"
            raise ConfigError(text, code="config.unknown-table")
        return "\n".join([*lines[:2], *map(firsts.__getitem__, only)] if only else lines)

    def text(self, name: str, heading: str) -> str:
        lines = self._section(name, heading).splitlines()
        return "\n".join(line for line in lines if not line.startswith("|")).strip()

    def made(self, name: str) -> str:
        said: dict[str, Any] = tomllib.loads(self._read(name, _MADE))
        line = f"Made by `{said['command']}` at commit {said['commit']}, seeds {said['seeds']}."
        if said["settings"] != digest(name):
            line += " **Settings, recipes or pinned numbers have changed since.**"
        return line

    def _section(self, name: str, heading: str) -> str:
        sections = re.split(r"^## ", self._read(name, _TABLE), flags=re.MULTILINE)[1:]
        found = {title.strip(): body.strip() for title, _, body in (one.partition("\n") for one in sections)}
        if heading not in found:
            text = f"results/{name} has nothing under {heading!r}; there are {', '.join(found)}"
            raise ConfigError(text, code="config.unknown-table")
        return found[heading]

    def _read(self, name: str, file: str) -> str:
        path = self._folder / name / file
        if name not in SOURCES or not path.is_file():
            text = f"there is no {path}; do the experiment, then: umbel experiment page {name}"
            raise ConfigError(text, code="config.not-done")
        return path.read_text(encoding="utf-8")


def _commit() -> str:
    """Return the commit of this checkout, with a plus if files are not as they were committed."""
    if not (APP / ".git").exists():
        return "unknown"

    def git(*words: str) -> str:
        told = subprocess.run(["git", *words], cwd=APP, check=False, capture_output=True, text=True)
        return told.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


def _ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as text, neighbours as ranges."""
    # Neighbours are as far from their places in the order.
    runs = groupby(enumerate(sorted(set(numbers))), lambda one: one[1] - one[0])
    found = ([number for _, number in run] for _, run in runs)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in found)
