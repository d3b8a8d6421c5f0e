"""Write the run config's defaults into an app's pyproject.toml, where Flower reads them.

python tools/defaults.py pyproject.toml
"""

from __future__ import annotations

from pathlib import Path

from umbel.protocol.cli import command_line
from umbel.protocol.home import write_atomically
from umbel.protocol.run_config import RunConfig

_TABLE = "\n[tool.flwr.app.config]\n"


def table() -> str:
    """Return the lines of the table: a comment for each section, and each key with its default and its help."""
    rows = RunConfig.table()
    width = max(len(name) + len(default) for name, default, _, _ in rows)
    lines: list[str] = []
    for name, default, _, description in rows:
        if section := RunConfig.SECTIONS.get(name):
            lines += ["", f"# {section}"]
        lines.append(f"{name} = {default}{' ' * (width - len(name) - len(default))}  # {description}")
    return "\n".join(lines[1:]) + "\n"


def with_table(text: str) -> str:
    """Return a pyproject.toml with the current table; stop for one without a table."""
    before, found, after = text.partition(_TABLE)
    if not found:
        raise SystemExit(f"there is no {_TABLE.strip()} to write to")
    _, following, rest = after.partition("\n[")
    return before + found + table() + following + rest


def main(path: Path) -> None:
    """Write the table to a pyproject.toml."""
    write_atomically(path, with_table(path.read_text(encoding="utf-8")).encode())


if __name__ == "__main__":
    command_line(main)()
