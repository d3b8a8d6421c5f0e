"""A site's SuperNode: Flower's, which looks for messages more often while there are any.

    python -m umbel.cli.parts supernode --superlink HOST:PORT --isolation=process ...

takes the options of Flower's ``flower-supernode``. Flower looks every three seconds, which takes most of a small
model's round. This SuperNode looks as rarely only after a minute without a message. If the server is slow to answer it
looks even more rarely: many idle sites would delay those with work.

If the server refuses the site, the SuperNode says why, and tries again if that can help (`umbel.deploy.link`).
``GET /ready`` at the executor's port says whether messages can arrive and be answered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from logging import WARNING
from pathlib import Path
from typing import NoReturn

import typer

from umbel.client.checks import entries_of, file_checks
from umbel.deploy.flower import run_supernode
from umbel.deploy.link import Link
from umbel.deploy.listening import check_port, check_validity, option
from umbel.deploy.ready import Fault
from umbel.privacy.gate.policy_file import POLICY_FILE
from umbel.privacy.gate.site import Site
from umbel.protocol import logs
from umbel.protocol.cli import PASSES_ON, command_line, errors_in_one_line, printable
from umbel.protocol.errors import SiteError
from umbel.protocol.flower import log
from umbel.protocol.polling import Pace

_APART = "process"
HOST, PORT = "127.0.0.1", "9094"
"""Where the executor finds the SuperNode, unless options say otherwise."""


def check(arguments: Sequence[str]) -> None:
    """Raise `SiteError` if the files that options name cannot be used, or the executor's port cannot."""
    named = (option(arguments, name) for name in ("--root-certificates", "--auth-supernode-private-key"))
    ca, key = (Path(name).expanduser() if name else None for name in named)
    for _, checked in file_checks(ca, key):
        try:
            checked()
        except SiteError as fault:
            if fault.code != "site.permissions":  # where others are on the machine; not in a container
                raise
            log(WARNING, "%s", fault)
    if ca:
        check_validity(ca, "get another from the operator")
    check_port(SiteError, option(arguments, "--host", HOST), option(arguments, "--port", PORT))


def run(arguments: Sequence[str], site: Fault = lambda: None) -> NoReturn:
    """Run a SuperNode with the options of ``flower-supernode`` until it ends.

    Parameters
    ----------
    arguments : sequence of str
    site : callable
        Returns why the site could answer nothing, if its ledger is on this machine.
    """
    logs.configure(strangers=True)
    pace, link = Pace(), Link(option(arguments, "--superlink", "the server's address"))

    def wait(seconds: float) -> None:
        time.sleep(pace.seconds(seconds))

    fault = SiteError("the SuperNode has stopped; the lines above say why", code="site.stopped")
    try:
        run_supernode(arguments, wait, link, lambda: link.fault() or site())
    except SystemExit as end:
        if not end.code:
            raise
        fault = end.code if isinstance(end.code, SiteError) else link.lost() or fault
    typer.echo(logs.error(printable(str(fault))), err=True)
    # Flower's application for the executor has a thread, for which the process would wait. The exit code is not that of
    # wrong options: a supervisor has to start the node again, as once its key is registered.
    os._exit(1)


def main(context: typer.Context) -> None:
    """Start only the SuperNode, for an executor in another container. Takes the options of flower-supernode."""
    with errors_in_one_line():
        if option(context.args, "--isolation", _APART) != _APART:
            text = f"Flower's own executor would run the server's code; leave --isolation out, or set {_APART}"
            raise SiteError(text, code="site.own-option")
        check(context.args)
        entries = entries_of(option(context.args, "--node-config"))
        if entries and not entries.get(POLICY_FILE):  # which only the executor sees
            Site.of(entries)
    run([*context.args, f"--isolation={_APART}"])


app = command_line(main, **PASSES_ON)
