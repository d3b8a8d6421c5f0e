"""Flower's own programs at the server, whose logs have umbel's form.

    umbel server executor --runtime-api-address HOST:PORT ...

takes the options of ``flower-superexec``, and starts the program of each task, such as ``flwr-serverapp``, by this
module.
"""

from __future__ import annotations

import sys

import typer

from umbel.protocol import logs
from umbel.protocol.cli import PASSES_ON, command_line
from umbel.protocol.flower import run_program

THROUGH = (sys.executable, "-P", "-m", __spec__.name)
"""The beginning of a command that runs a program of Flower's, with its name and options behind it."""


def main(context: typer.Context) -> None:
    """Start only the ServerApps' executor. Takes the options of flower-superexec."""
    _run("flower-superexec", context.args)


def _run(name: str, arguments: list[str]) -> None:
    logs.configure()
    run_program(name, arguments, THROUGH)


app = command_line(main, **PASSES_ON)

if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2:])
