"""Habits of language that a reader stumbles on, and where they stand in pages, docstrings, comments and messages.

    python -m tests.helpers.words

prints each habit in a clean path, and ends with 1 if there is one. It also warns of long sentences on pages, which
``--long`` prints.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.sources import ROOT

NOT_YET: tuple[str, ...] = ()
"""Paths that still have habits: folders, or files. Strike a path as soon as it is clean."""

HABITS: dict[str, str] = {
    r"anew": "again",
    r"of (?:its|their|his|her|our|your|my|one's) own": "its own, separate",
    r"nobody": "no one; or name the subject, in the passive at worst",
    r"whatever": "any, all; or say which",
    r"(?:let|lets|letting) go of": "sends, releases",
    r"(?:go|goes|going|gone) on with": "continue, resume",
    r"go(?:es)? on": "continue",
    r"shall": "must, should, or the present tense",
    r"rules? of thumb": "baseline",
    r"in silence": "silently, without a message",
    r"and nowhere else": "only in",
    r"(?:no|a) way to go": "transport",
    r"to the bit": "bit-identical",
    r"(?:cannot|can|could not) (?:pay|afford)(?: for)?": "is over budget, is within budget",
    r"need not reckon": "may ignore",
}
"""Each habit, as a pattern of whole words, and the words to use in its place."""

HEADLESS = re.compile(r"(?:^|[.!?:;] )(?:What|Who|Whose)(?!'s| else)\b[^.!?;]*(?=[.!;]|$)")
"""A sentence whose subject is a clause without a noun: "What the gate made is sent"."""

ALLOWED = (
    "| rule of thumb | baseline |",
    "drawn anew",  # arms of an experiment whose results are saved
    "What a client gets", "What a server can steal", "What comes out", "What releases show", "What to expect",
    "What the server can learn", "What the server stole",
)  # fmt: skip
"""Texts in which a habit may stand: names in saved results, and titles."""

_PAGES = ("README.md", "docs", "examples", "configs", "pyproject.toml")
_CODE = ("umbel", "lab", "benchmarks", "examples")
_PAPERS = ("docs/papers/reproduce.md", "docs/papers/when.md")
_GENERATED = ("docs/reference/errors.md", *_PAPERS, "docs/results", "docs/_build")
_LONG = 30

_ITEM = re.compile(r" *(?:[-*>] |\||\d+\. ) *")
_PATTERN = re.compile("|".join(rf"(?P<h{at}>\b{habit}\b)" for at, habit in enumerate(HABITS)), re.IGNORECASE)


@dataclass(frozen=True)
class Text:
    """A text for people.

    Attributes
    ----------
    path : str
        The file, from the root of the checkout.
    line : int
        Where the text begins.
    words : str
        The text, with one space in place of each run of whitespace.
    """

    path: str
    line: int
    words: str


@dataclass(frozen=True)
class Found:
    """A habit, in a text."""

    path: str
    line: int
    said: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.said!r}; better: {self.instead}"


def found(text: Text) -> Iterator[Found]:
    """Yield the habits in a text."""
    words = text.words
    for allowed in ALLOWED:
        words = words.replace(allowed, "")
    for match in _PATTERN.finditer(words):
        at = int(str(match.lastgroup)[1:])
        yield Found(text.path, text.line, match[0], [*HABITS.values()][at])
    for match in HEADLESS.finditer(words):
        yield Found(text.path, text.line, match[0].lstrip(".!?:; ")[:60], "begin with a noun")


def long_sentences(text: Text) -> Iterator[str]:
    """Yield the sentences of a text that have more than 30 words."""
    for sentence in re.split(r"(?<=[.!?:]) ", text.words):
        if len(re.findall(r"[A-Za-z]{2,}", sentence)) > _LONG:
            yield sentence


def texts(root: Path = ROOT) -> Iterator[Text]:
    """Yield all texts for people in a checkout: of pages, configs and code; not of pages that a command writes."""
    named = (path for name in (*_PAGES, *_CODE) for path in _files(root / name))
    for file in sorted({*named}):
        path = file.relative_to(root).as_posix()
        if not path.startswith(_GENERATED):
            for line, said in _READERS[file.suffix](file.read_text(encoding="utf-8")):
                yield Text(path, line, " ".join(said.split()))


def is_clean(path: str) -> bool:
    """Return whether a file must be free of habits."""
    return not any(_within(path, name) for name in NOT_YET)


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}/")


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from (file for file in path.rglob("*") if file.suffix in _READERS and file.is_file())


def _of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments, a block of lines as one, and string literals that hold more than one word."""
    blocks: list[tuple[int, int, list[str]]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            (line, column), words = token.start, token.string.lstrip("# ")
            if blocks and (line, column) == (blocks[-1][0] + len(blocks[-1][2]), blocks[-1][1]):
                blocks[-1][2].append(words)
            else:
                blocks.append((line, column, [words]))
    yield from ((line, " ".join(words)) for line, _, words in blocks)
    for node in _strings(ast.parse(source)):
        parts = [node] if isinstance(node, ast.Constant) else node.values
        said = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
        for at, paragraph in _paragraphs(said):
            if " " in paragraph.strip():
                yield node.lineno + at, paragraph


def _strings(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        yield node
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


def _of_page(page: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs and lines of tables, without blocks of code, code in a line, and headings."""
    page = re.sub(r"^( *)(```|~~~).*?^\1\2", lambda block: "\n" * block[0].count("\n"), page, flags=re.M | re.S)
    page = re.sub(r"`[^`\n]*`", "…", page)
    page = re.sub(r"^#.*$|^---.*$|\{[#%].*?[#%]\}", "", page, flags=re.M)
    for at, paragraph in _paragraphs(page):
        yield at + 1, paragraph


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph, item of a list and row of a table, with the number of lines before it.

    A deeper indentation begins a paragraph too, as under the name of a parameter.
    """
    start, block, indent = 0, "", 0
    for at, line in enumerate([*text.splitlines(), ""]):
        deep = len(line) - len(line.lstrip())
        if block and (not line.strip() or _ITEM.match(line) or deep > indent):
            yield start, block
            block = ""
        if not block:
            start = at
        if line.strip():
            item = _ITEM.match(line)
            indent = item.end() if item else deep
            block += f" {line.strip()}"


def _of_toml(text: str) -> Iterator[tuple[int, str]]:
    for at, line in enumerate(text.splitlines(), start=1):
        if match := re.search(r"(?:^|\s)#\s*(.*)", line):
            yield at, match[1]


_READERS = {".py": _of_python, ".md": _of_page, ".j2": _of_page, ".toml": _of_toml}


def main(show_long: bool = False) -> int:
    """Print habits and the number of long sentences; return 1 where a path that must be clean has a habit, else 0."""
    everything = [*texts()]
    habits = [one for text in everything for one in found(text)]
    wrong = [one for one in habits if is_clean(one.path)]
    for one in wrong:
        print(one)
    for name in NOT_YET:
        left = sum(_within(one.path, name) for one in habits)
        print(f"not yet clean: {name}, {left} habits" if left else f"clean now, strike it from NOT_YET: {name}")
    long = [(text, one) for text in everything if not text.path.endswith(".py") for one in long_sentences(text)]
    if show_long:
        for text, sentence in long:
            print(f"{text.path}:{text.line}: {sentence}")
    elif long:
        print(f"warning: {len(long)} sentences on pages have more than {_LONG} words; --long shows them")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main("--long" in sys.argv))
