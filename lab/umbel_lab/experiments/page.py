"""Pages of results, such as ``docs/papers/group-privacy.md``: handwritten text with tables from experiments.

A template ``NAME.j2`` in docs becomes the file ``NAME`` beside it.

``docs/results/NAME`` keeps an experiment's tables and their origin: command, commit, seeds, and a digest of its
settings. The current code need not have made them. Tests of saved runs pin the numbers of training. If settings,
recipes or these numbers have changed since, the page says so under the table.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import tomli_w
from jinja2 import Environment, StrictUndefined

from umbel.protocol import project
from umbel.protocol.errors import ConfigError
from umbel.protocol.home import write_atomically
from umbel.protocol.project import APP

DOCS = APP / "docs"
_TEMPLATE, _RESULTS = ".j2", "results"
_TABLE, _MADE, _FIGURES = "table.md", "made.toml", "figure-*.svg"  # the figures that are numbered as in the papers
_STATED = {"delta", "text", "columns"}
"""Entries that decide what a run or a page says, and not what is learnt."""

_PINNED = "tests/saved_runs/runs.json.gz"  # the numbers that training gives: who changes those changes all results

_LAB = Path(__file__).resolve().parents[2]  # the folder `lab` of a checkout


@dataclass(frozen=True)
class Experiment:
    """An entry of ``experiments.toml``: its subject, for the command's help, and where its code and settings are."""

    text: str
    module: str
    settings: Sequence[str] = ()
    of: str = ""

    @property
    def sources(self) -> list[str]:
        """Paths of its files, or patterns of them, from the root of a checkout."""
        return [f"lab/umbel_lab/experiments/{self.module}.*", *self.settings]


EXPERIMENTS: Mapping[str, Experiment] = {
    name: Experiment(**{"module": name.replace("-", "_")} | entry)
    for name, entry in tomllib.loads(Path(__file__).with_name("experiments.toml").read_text("utf-8")).items()
}

_RESEARCH = ("attacks-on-sums", "chosen-round", "drift", "own", "public-tables", "r-dpcfl", "secure-digits", "when")
_LAST = ("audits", "centaur", "frontier-qmnist-features", "methods", "secure-sums")
FROZEN = (
    dict.fromkeys(_RESEARCH, "575c2756")
    | dict.fromkeys(("attacks", "fairness", "methods-more", "pac-laplace", "recommender"), "2b1cf5c8")
    | dict.fromkeys(_LAST, "57624d8a")
)
"""Experiments whose tables are kept, but whose code is only in the history: the last commit that has it."""


def source(name: str) -> Path:
    """Return the location of a checkout's file, of the lab or else of umbel, also where they are installed."""
    return _LAB / name.removeprefix("lab/") if name.startswith("lab/") else project.source(name)


def digest(name: str) -> str:
    """Return a digest of an experiment's settings, of its recipes' settings, and of the numbers of training.

    Settings are the entries of TOML files, the constants of modules, and the literal constants of recipes. Recipes' own
    tests pin their results.
    """
    pinned = source(_PINNED)  # missing in an installed umbel
    content = hashlib.sha256(pinned.read_bytes() if pinned.exists() else b"")
    for pattern in EXPERIMENTS[name].sources:
        files = source(pattern)
        for file in sorted(files.parent.glob(files.name)):
            content.update(repr((file.stem, _settings(file))).encode())
    return content.hexdigest()[:16]


def _settings(file: Path) -> list[Any]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".toml":
        return sorted(item for item in tomllib.loads(text).items() if item[0] not in _STATED)
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    values = [node for node in nodes if not isinstance(getattr(node.value, "value", None), str)]
    return [ast.unparse(node) for node in values if file.parent.name != "datasets" or _is_literal(node)]


def _is_literal(node: ast.Assign | ast.AnnAssign) -> bool:
    return not any(isinstance(part, ast.Attribute | ast.Call) for part in ast.walk(node))


def stamp(name: str, folder: Path, command: str, seeds: Iterable[int], commit: str) -> None:
    """Write beside an experiment's table its origin: command, commit, seeds, and a digest of the settings."""
    document = {"command": command, "commit": commit, "seeds": _ranges(seeds), "settings": digest(name)}
    write_atomically(folder / _MADE, tomli_w.dumps(document).encode())


def mark_as_quick(folder: Path) -> None:
    """Say in an experiment's table that its runs are too few or too short for results."""
    title, _, rest = (folder / _TABLE).read_text(encoding="utf-8").partition("\n")
    said = "**A quick look** (`--quick`): fewer runs, and shorter ones. Its numbers are not results."
    write_atomically(folder / _TABLE, f"{title}\n\n{said}\n{rest}".encode())


def take(name: str, folder: Path, docs: Path = DOCS) -> None:
    """Copy an experiment's tables, their origin and the papers' figures to the place where the page finds them.

    Raises `ConfigError` if the experiment has no place on the page, or has not been done in this folder.
    """
    if name not in EXPERIMENTS:
        text = f"the page has no experiment {name!r}; name some of {', '.join(EXPERIMENTS)}"
        raise ConfigError(text, code="config.unknown-experiment")
    if missing := [file for file in (_TABLE, _MADE) if not (folder / file).is_file()]:
        text = f"{folder} has no {missing[0]}; do the experiment first: umbel experiment {name}"
        raise ConfigError(text, code="config.not-done")
    target = docs / _RESULTS / name
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob(_FIGURES):
        old.unlink()
    for file in (folder / _TABLE, folder / _MADE, *folder.glob(_FIGURES)):
        write_atomically(target / file.name, file.read_bytes())


def write(docs: Path = DOCS) -> list[Path]:
    """Write pages and pictures from their templates and the kept tables, and return the paths; errors as `render`."""
    pages = render(docs)
    for page, text in pages.items():
        write_atomically(page, text.encode())
    return list(pages)


def render(docs: Path = DOCS) -> dict[Path, str]:
    """Return the pages and pictures as they should be; raise `ConfigError` if a template asks for a missing result.

    In a template, ``{{ table(experiment, heading) }}`` is the table under a heading. With more arguments it has only
    the rows that begin with these words, and ``without=(...)`` leaves columns out. ``{{ text(experiment, heading) }}``
    is what else stands there, and ``{{ made(experiment) }}`` says in a line what made them.

    So that no number in a sentence is older than its table, ``{{ cell(experiment, heading, words, column) }}`` is what
    the row that begins with these words has in a column, ``{{ sentence(experiment, heading, words) }}`` is the sentence
    with these words, and ``{{ answers(experiment, heading) }}`` counts the verdicts.
    ``{{ picture(experiment, figure, text) }}`` shows a figure.
    """
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    results = _Results(docs / _RESULTS)
    names = ("table", "text", "made", "cell", "sentence", "answers", "picture")
    given = {name: getattr(results, name) for name in names}
    return {
        template.with_suffix(""): environment.from_string(template.read_text(encoding="utf-8")).render(given)
        for template in sorted(docs.rglob(f"*{_TEMPLATE}"))
    }


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


class _Results:
    """The values that a page's text may use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def table(self, name: str, heading: str, *only: str, without: Collection[str] = ()) -> str:
        lines = [line for line in self._section(name, heading).splitlines() if line.startswith("|")]
        head, _, *rows = map(_cells, lines)
        firsts = [row[0] for row in rows]
        for what, wanted, there in (("row", only, firsts), ("column", without, head)):
            if missing := [one for one in wanted if one not in there]:
                raise _unknown(name, f"no {what} {missing[0]!r} under {heading!r}; it has {', '.join(there)}")
        kept = [line for one in only for line in lines[2:] if _cells(line)[0] == one] if only else lines[2:]
        left = [at for at, column in enumerate(head) if column not in without]
        return "\n".join(f"| {' | '.join(_cells(line)[at] for at in left)} |" for line in [*lines[:2], *kept])

    def text(self, name: str, heading: str) -> str:
        lines = self._section(name, heading).splitlines()
        return "\n".join(line for line in lines if not line.startswith("|")).strip()

    def cell(self, name: str, heading: str, words: Sequence[str], column: str) -> str:
        head, _, *rows = map(_cells, self.table(name, heading).splitlines())
        found = [row for row in rows if row[: len(words)] == [*words]]
        if len(found) != 1 or column not in head:
            raise _unknown(name, f"{len(found)} rows {' | '.join(words)} under {heading!r}, and columns {head}")
        return found[0][head.index(column)]

    def sentence(self, name: str, heading: str, words: str) -> str:
        found = [one for one in re.split(r"(?<=\.) (?=[A-Z0-9])", self.text(name, heading)) if words in one]
        if not found:
            raise _unknown(name, f"no sentence with {words!r} under {heading!r}")
        return found[0]

    def answers(self, name: str, heading: str) -> str:
        """Return how many claims hold, by the first column of verdicts."""
        head, _, *rows = map(_cells, self.table(name, heading).splitlines())
        counts = Counter(row[head.index("so here?")] for row in rows)
        return f"{counts['yes']} yes, {counts['no']} no, {counts['open']} open"

    def picture(self, name: str, file: str, text: str) -> str:
        self._read(name, f"{file}.svg")
        return f"![{text}](../{_RESULTS}/{name}/{file}.svg)"

    def made(self, name: str) -> str:
        said: dict[str, Any] = tomllib.loads(self._read(name, _MADE))
        commit = said["commit"].replace("+", ", with changes that were not committed")
        if name in FROZEN:
            made = f"Made at commit {commit}, seeds {said['seeds']}, by the experiment `{said.get('experiment', name)}`"
            return f"{made}. The table is frozen: its code is in the history, up to commit {FROZEN[name]}."
        line = f"Made by `{said['command']}` at commit {commit}, seeds {said['seeds']}."
        if said["settings"] != digest(name):
            line += " **Settings, recipes or pinned numbers have changed since.**"
        return line

    def _section(self, name: str, heading: str) -> str:
        sections = re.split(r"^## ", self._read(name, _TABLE), flags=re.MULTILINE)[1:]
        found = {title.strip(): body.strip() for title, _, body in (one.partition("\n") for one in sections)}
        if heading not in found:
            raise _unknown(name, f"nothing under {heading!r}; there are {', '.join(found)}")
        return found[heading]

    def _read(self, name: str, file: str) -> str:
        path = self._folder / name / file
        if name not in (*EXPERIMENTS, *FROZEN) or not path.is_file():
            text = f"there is no {path}; do the experiment, then: umbel experiment page {name}"
            raise ConfigError(text, code="config.not-done")
        return path.read_text(encoding="utf-8")


def _unknown(name: str, what: str) -> ConfigError:
    return ConfigError(f"results/{name} has {what}", code="config.unknown-table")


def commit_of(tree: Path = APP, quick: bool = False) -> str:
    """Return the commit of a checkout, by which a result names the code that made it; "unknown" outside a checkout.

    Raises `ConfigError` if umbel's files or the settings are not as they were committed. A quick look is no result, and
    then has a plus behind the commit.
    """
    if not (tree / ".git").exists():
        return "unknown"

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=tree, check=False, capture_output=True, text=True)
        return done.stdout.strip()

    commit = git("rev-parse", "--short=10", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=all", "--", "umbel", "lab", "configs").splitlines()
    if changed and not quick:
        text = f"{changed[0].split(maxsplit=1)[1]} differs from commit {commit}, which the result would name"
        text += "; commit all changes in umbel/, lab/ and configs/ first, or take a look with --quick"
        raise ConfigError(text, code="config.modified-tree")
    return commit + "+" * bool(changed)


def _ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as text, neighbours as ranges."""
    # Neighbours are as far from their places in the order.
    runs = groupby(enumerate(sorted(set(numbers))), lambda one: one[1] - one[0])
    found = ([number for _, number in run] for _, run in runs)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in found)
