"""Where the commands print their tables."""

from __future__ import annotations

from rich.console import Console


def console() -> Console:
    """Return where tables are printed."""
    # Redirected, a table has no terminal's width to fit, and a cut cell would be a wrong one.
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=200)
