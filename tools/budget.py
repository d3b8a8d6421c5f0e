"""Compare the size of each room with its budget: python tools/budget.py exits with 1 if one is too large.

`budget.toml` beside it holds the budgets. Statements count as well as lines, so that dense code wins nothing. The table
also shows what is left, since a budget is lowered when a room has become smaller.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import typer

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / "tools" / "budget.toml"
LAB = ("audit", "attack", "experiment")
"""Commands of the lab, whose own subcommands are counted there."""


def size_of(folder: Path) -> tuple[int, int]:
    """Return the number of lines, and of statements, of the Python files in a folder, or of one file."""
    texts = [path.read_text(encoding="utf-8") for path in ([folder] if folder.is_file() else folder.rglob("*.py"))]
    statements = sum(isinstance(node, ast.stmt) for text in texts for node in ast.walk(ast.parse(text)))
    return sum(text.count("\n") for text in texts), statements


def settings() -> dict[str, int]:
    """Return the number of keys of the run config, of entries of a site's policy, of commands, and the most options."""
    from typer.main import get_command

    from umbel.cli.main import app
    from umbel.privacy.site.policy import Policy
    from umbel.protocol.run_config import RunConfig

    commands = list(_leaves(get_command(app)))
    return {
        "run-config": len(RunConfig.model_fields),
        "policy": len(Policy.model_fields),
        "commands": len(commands),
        "options": max(sum(one.param_type_name == "option" for one in command.params) for command in commands),
    }


def arrows(rooms: list[str]) -> int:
    """Return how many pairs of rooms there are, one of which imports something of the other."""
    graph, names = grimp.build_graph("umbel"), [room.removesuffix(".py").replace("/", ".") for room in rooms]
    of = {module: name for module in graph.modules for name in names if f"{module}.".startswith(f"{name}.")}
    pairs = {
        (of[module], of[other])
        for module in of
        for other in graph.find_modules_directly_imported_by(module) & of.keys()
    }
    return sum(one != other for one, other in pairs)


def _leaves(command: Any, depth: int = 2) -> Iterator[Any]:
    """Yield what a user types as `umbel WORD` or `umbel WORD WORD`."""
    if not (depth and hasattr(command, "list_commands")):
        yield command
        return
    context = typer.Context(command)
    for name in command.list_commands(context):
        yield from _leaves(command.resolve_command(context, [name])[1], depth - 1 if name not in LAB else 0)


def exceeded(budget: dict[str, Any]) -> list[str]:
    """Print the table of a budget, and return the names of what exceeds it."""
    rooms = [room for room in budget["rooms"] if room.startswith("umbel/")]
    over, counts = [], settings() | {"rooms": len(rooms), "arrows": arrows(rooms)}
    for name, most in budget["settings"].items():
        count = counts[name]
        print(f"{name:32}{count:8,} of {most:,}")
        over += [name] if count > most else []
    for room, (most_lines, most_statements) in budget["rooms"].items():
        lines, statements = size_of(ROOT / room)
        print(f"{room:32}{lines:8,} of {most_lines:,} lines, {statements:,} of {most_statements:,} statements")
        over += [room] if lines > most_lines or statements > most_statements else []
    return over


if __name__ == "__main__":
    if over := exceeded(tomllib.loads(BUDGET.read_text(encoding="utf-8"))):
        print(f"above its budget: {', '.join(over)}", file=sys.stderr)
        sys.exit(1)
