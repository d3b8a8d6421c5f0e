"""Count the words that a person reads in the docs, by section: python tools/words.py

Prose alone counts. Code, rows of numbers, what a build or an experiment writes, and pages that are written whole by
tools are left out.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = {"start": 2000, "guides": 9000, "operate": 5000, "explain": 5000, "papers": 3700, "root files": 1800}
"""By section: the most words. Together at most 27,000, with the page that leads to all of them."""


def prose(text: str) -> str:
    """Return the words of a Markdown page or template that a person wrote to be read."""
    text = re.sub(r"^ *(```|~~~).*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- written by .*?<!-- end .*?-->|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\{%.*?%\}|\{\{.*?\}\}", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("|") or _is_read(line)]
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)|<[^>]+>", r"\1", "\n".join(lines))


def _is_read(row: str) -> bool:
    """Whether a row of a table has a cell that is read as a sentence is, and not looked up as a number is."""
    return any(len(re.findall(r"\b[A-Za-z]{2,}", cell)) > 4 for cell in row.split("|"))


def count(root: Path = ROOT) -> Counter[str]:
    """Return the number of words by section: a folder of docs/, or the files at the root."""
    words: Counter[str] = Counter()
    docs = root / "docs"
    pages = [(file, "root files") for file in root.glob("*.md")]
    for file in [*docs.rglob("*.md"), *docs.rglob("*.md.j2"), *docs.rglob("*.ipynb")]:
        section = file.relative_to(docs).parts[0] if file.parent != docs else "index"
        is_written = section in ("results", "reference", "_build") or file.with_name(f"{file.name}.j2").exists()
        pages += [] if is_written else [(file, section)]
    for file, section in pages:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".ipynb":
            cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
            text = "\n\n".join("".join(cell) for cell in cells)
        words[section] += len(re.findall(r"[^\W\d_][\w'-]*", prose(text)))
    return words


if __name__ == "__main__":
    counted = count()
    for section, number in counted.items():
        print(f"{section:12}{number:7,}{MOST.get(section, 0):7,}")
    print(f"{'together':12}{counted.total():7,}")
