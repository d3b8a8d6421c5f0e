"""``umbel site policy``: a site's policy in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from umbel.console.explained import explained
from umbel.privacy.gate.policy import Policy
from umbel.privacy.gate.policy_file import read_policy
from umbel.privacy.gate.site import Site
from umbel.protocol.cli import command_line, console, errors_in_one_line, printable


def _policy(file: Annotated[Path, typer.Argument(metavar="POLICY", help="The policy file.")]) -> None:
    """Check a policy file; print what it allows, what it promises, and whom it does not cover."""
    with errors_in_one_line():
        policy = Policy.parse(read_policy(file.absolute()), str(file))
        # Where the file names no data, the node's configuration does.
        Site.serving(policy.model_copy(update={"data_path": policy.data_path or "/"}))
    table = Table("", "", title=Text(printable(str(file))), show_header=False, show_lines=True)
    for what, text in [("digest", policy.digest), *explained(policy)]:
        table.add_row(what, Text(printable(text)))
    console().print(table)


app = command_line(_policy)
