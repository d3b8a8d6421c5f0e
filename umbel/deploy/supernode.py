"""A site's SuperNode: Flower's, which looks for messages more often while there are any.

    umbel site supernode --superlink HOST:PORT --isolation=process ...

takes the options of Flower's ``flower-supernode``. Flower looks every three seconds, which takes most of a small
model's round. This SuperNode looks as rarely only after a minute without a message. If the server is slow to answer it
looks even more rarely: many idle sites would delay those with work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import typer

from umbel.protocol import logs
from umbel.protocol.cli import PASSES_ON, command_line
from umbel.protocol.flower import run_supernode
from umbel.protocol.polling import Pace


def run(arguments: Sequence[str]) -> NoReturn:
    """Run a SuperNode with the options of ``flower-supernode`` until it ends."""
    logs.configure()
    pace = Pace()
    run_supernode(arguments, lambda seconds: time.sleep(pace.seconds(seconds)))
    sys.exit()


def main(context: typer.Context) -> None:
    """Start only the SuperNode, for an executor in another container. Takes the options of flower-supernode."""
    run(context.args)


app = command_line(main, **PASSES_ON)
