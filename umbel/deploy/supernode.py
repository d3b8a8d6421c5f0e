"""A site's SuperNode: Flower's, which looks for messages more often while there are any.

    umbel site supernode --superlink HOST:PORT --isolation=process ...

takes the options of Flower's ``flower-supernode``. That looks every three seconds, which is most of a round of a small
model; this looks as seldom only where no message has come for a minute. Where the server is slow to answer it looks
more seldom still: the looks of many sites that have nothing to do would hold up those that have.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import typer

from umbel.protocol.cli import PASSES_ON, command_line
from umbel.protocol.flower import run_supernode
from umbel.protocol.polling import Pace


def run(arguments: Sequence[str]) -> NoReturn:
    """Run a SuperNode with the options of ``flower-supernode`` until it ends."""
    pace = Pace()
    run_supernode(arguments, lambda seconds: time.sleep(pace.seconds(seconds)))
    sys.exit()


def main(context: typer.Context) -> None:
    """Start the SuperNode alone, with the options of flower-supernode: the executor is in another container."""
    run(context.args)


app = command_line(main, **PASSES_ON)
