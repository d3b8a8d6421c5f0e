"""Audits of peers: what filters and mechanisms of other projects claim, beside what their noise gives.

Each peer of ``audits.toml`` is installed by pip into a fresh virtual environment, with pinned versions, and audited by
the command ``umbel audit``, which the table shows.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from umbel.privacy.accounting.guarantee import amount
from umbel.protocol.errors import ConfigError
from umbel.protocol.home import write_atomically
from umbel.protocol.project import source
from umbel.server.run_folder import versions
from umbel.simulation.sweep import PACKAGES
from umbel_lab.experiments import scaffold
from umbel_lab.output import Page, Section

CANARIES, QUICK_CANARIES, WRAPPED = 2000, 200, 500
"""Canaries of an audit, and of a quick one; of a wrapper's, where each needs a round of all clients."""

FOLDER = "examples/audits"
"""Scripts that reproduce formula figures, some of which also make targets."""


_DATA = scaffold.read("audits")
PEERS: Mapping[str, Mapping[str, Any]] = _DATA["peers"]
TARGETS: Sequence[Mapping[str, Any]] = _DATA["targets"]

Audit = Mapping[str, Any]  # a target; with its ``report``, and the command's ``words``, if it could be audited


def page(seed: int, folder: Path, quick: bool = False, canaries: int = CANARIES) -> Page:
    """Audit all targets, and return the tables.

    The packages' virtual environments are in the folder; those that are there are used.

    Raises
    ------
    ConfigError
        If the scripts are missing, as in an installed umbel.
    """
    if not source(FOLDER).is_dir():
        text = f"there is no {source(FOLDER)}; run the experiment in a checkout of umbel"
        raise ConfigError(text, code="config.not-done")
    canaries = QUICK_CANARIES if quick else canaries
    chosen = [one for one in TARGETS if not quick or one["peer"] == "umbel"]
    environments = folder / "environments"
    audits = [_audited(one, canaries, seed, environments) for one in track(chosen, "Audits", transient=True)]
    done = [audit for audit in audits if "report" in audit]
    rows = [row for audit in done for row in _rows(audit)]
    shown = [row | _texts(row) for row in rows]
    sections = [
        scaffold.section(title, _DATA, "figures", [row for row in shown if row["rounds"] == rounds])
        for title, rounds in (("One round", 1), ("Three rounds", 3))
    ]
    document = {"versions": versions(PACKAGES), "canaries": canaries, "seed": seed}
    sections += [_commands(done), _versions(audits)]
    return Page("Audits of peers", sections, rows, document)


def interpreter(peer: Mapping[str, Any], environments: Path) -> str:
    """Return the interpreter of a peer's environment, which is made unless it is there; empty if pip fails."""
    if not (requirement := peer["requirement"]):
        return sys.executable
    home = environments / requirement
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = home / "installed"
    if not ready.exists():
        venv.create(home, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", requirement, *peer.get("beside", ())]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            return ""
        write_atomically(ready, b"")
    return str(python)


def _audited(one: Audit, canaries: int, seed: int, environments: Path) -> Audit:
    """Return an audit with the command's words and, if the package can be installed, its report."""
    few = min(WRAPPED, canaries) if "strategy" in one["target"] else canaries
    words = [one["target"], *one.get("options", ()), "--canaries", f"{few}", "--seed", f"{seed}"]
    python = interpreter(PEERS[one["peer"]], environments)
    if not python or not one["target"]:
        return one
    command = [sys.executable, "-m", "umbel", "audit", *words, "--python", python, "--json"]
    # The same umbel, wherever the command runs.
    paths = str(source("umbel/__init__.py").parents[1]), os.environ.get("PYTHONPATH")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run = subprocess.run(command, check=False, capture_output=True, text=True, cwd=source(FOLDER), env=environment)
    if run.returncode not in (0, 1) or not run.stdout:
        raise ConfigError(f"{one['name']} was not audited: {run.stderr.strip()[-400:]}", code="config.not-done")
    (report,) = json.loads(run.stdout)
    return {**one, "words": words, "report": report}


def _rows(audit: Audit) -> Iterator[dict[str, Any]]:
    report = audit["report"]
    for figures in report["figures"]:
        yield {
            "peer": audit["peer"], "target": audit["name"], "rows": report["rows"], "rounds": figures["rounds"],
            "delta": report["claim"]["delta"], "claimed": figures["claimed"], "formula": figures["formula"],
            "fitted": figures["fitted"], "low": figures["low"], "high": figures["high"],
            "proved": figures["proved"]["shown"], "provable": figures["provable"], "law": report["law"],
        }  # fmt: skip


def _amount(epsilon: float | str | None) -> str:
    if epsilon is None:
        return "none"
    return "infinite" if epsilon in ("inf", math.inf) else amount(float(epsilon))


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row's figures as text."""
    claimed, formula, fitted, low, high = (_amount(row[key]) for key in ("claimed", "formula", "fitted", "low", "high"))
    return {
        "protects": "row" if row["rows"] else "client",
        "claimed_text": claimed,
        "formula_text": formula,
        "fitted_text": fitted if row["fitted"] is None else f"{fitted} ({low} to {high})",
        "proved_text": f"{row['proved']:.2f} of {row['provable']:.2f}",
    }


def _commands(done: list[Audit]) -> Section:
    rows = []
    for audit in done:
        package = PEERS[audit["peer"]]["requirement"].partition("==")[0]
        words = ["umbel", "audit", *audit["words"], *(["--python", f"{package}/bin/python"] if package else [])]
        rows.append((audit["peer"], audit["name"], f"`{shlex.join(words)}`"))
    text = scaffold.say(_DATA, "commands", folder=FOLDER)
    return Section("Commands", text, ("package", "mechanism", "command"), rows)


def _versions(audits: list[Audit]) -> Section:
    failed = {audit["peer"] for audit in audits if "report" not in audit}
    rows = []
    for name in dict.fromkeys(audit["peer"] for audit in audits):
        peer, requirement = PEERS[name], PEERS[name]["requirement"]
        words = " ".join((requirement, *peer.get("beside", ())))
        install = f"`pip install {words}`" if requirement else "this checkout"
        python = ".".join(map(str, sys.version_info[:2]))
        told = f"not on Python {python}" if name in failed else "yes"
        rows.append((name, requirement.partition("==")[2] or "this version", peer["released"], install, told))
    columns = ("package", "version", "released", "command", "installed")
    return Section("Versions", scaffold.say(_DATA, "versions"), columns, rows)
