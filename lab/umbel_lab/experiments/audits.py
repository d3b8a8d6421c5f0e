"""Audits of peers: what filters and mechanisms of other projects claim, beside what their noise gives.

Each peer is installed by pip into a fresh virtual environment, with pinned versions, and audited by the command
``umbel audit``, which the table shows. Faults that the audits find stay in the output folder, in ``faults.md``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from umbel.privacy.accounting.guarantee import amount
from umbel.protocol.errors import ConfigError
from umbel.protocol.home import make_folder, write_atomically
from umbel.protocol.project import source
from umbel.server.run_folder import versions
from umbel.simulation.sweep import PACKAGES
from umbel_lab.attacks import defences
from umbel_lab.output import Columns, Page, Section

CANARIES, QUICK_CANARIES, WRAPPED = 2000, 200, 500
"""Canaries of an audit, and of a quick one; of a wrapper's, where each needs a round of all clients."""

FOLDER = "examples/audits"
"""Scripts that reproduce formula figures, some of which also make targets."""


@dataclass(frozen=True)
class Peer:
    """A package as pip installs it.

    Attributes
    ----------
    requirement : str
        Name and version; empty for umbel itself.
    released : str
        Month of the release.
    beside : tuple of str
        Requirements that fix the build of others.
    """

    requirement: str
    released: str
    beside: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """Its name."""
        return self.requirement.partition("==")[0] or "umbel"


@dataclass(frozen=True)
class Audited:
    """A target of a peer.

    Attributes
    ----------
    name : str
        For people.
    peer : str
        The key of `PEERS`.
    target : str
        As ``umbel audit`` takes it.
    options : tuple of str
        More options of the command.
    """

    name: str
    peer: str
    target: str
    options: tuple[str, ...] = ()


_TORCH = ("torch==2.13.0",)

PEERS: Mapping[str, Peer] = {
    "flower": Peer("flwr==1.42.0", "2026-10"),
    "nvflare": Peer("nvflare==2.9.0", "2026-09"),
    "opacus": Peer("opacus==1.6.0", "2026-05", _TORCH),
    "pfl": Peer("pfl==0.6.0", "2026-10", _TORCH),
    "fl4health": Peer("fl4health==0.4.2", "2026-01", _TORCH),
    "umbel": Peer("", ""),
}

_STRATEGY = "flwr.serverapp.strategy:DifferentialPrivacy"
_FIXED = "FixedClipping(noise_multiplier=1.0, clipping_norm=1.0, num_sampled_clients=4)"
_ADAPTIVE = (
    "AdaptiveClipping(noise_multiplier=1.0, num_sampled_clients=4, initial_clipping_norm=1.0, clipped_count_stddev=1.0)"
)
_FILTERS = "nvflare.app_common.filters"

TARGETS = (
    Audited(
        "LocalDpMod", "flower",
        "flwr.clientapp.mod:LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)",
    ),
    Audited(
        "fixed clipping on clients", "flower", f"{_STRATEGY}ClientSide{_FIXED}",
        ("--mod", "flwr.clientapp.mod:fixedclipping_mod"),
    ),
    Audited("fixed clipping on the server", "flower", f"{_STRATEGY}ServerSide{_FIXED}"),
    Audited(
        "adaptive clipping on clients", "flower", f"{_STRATEGY}ClientSide{_ADAPTIVE}",
        ("--mod", "flwr.clientapp.mod:adaptiveclipping_mod"),
    ),
    Audited("adaptive clipping on the server", "flower", f"{_STRATEGY}ServerSide{_ADAPTIVE}"),
    Audited("SVTPrivacy", "nvflare", f"{_FILTERS}.svt_privacy:SVTPrivacy"),
    Audited("PercentilePrivacy", "nvflare", f"{_FILTERS}.percentile_privacy:PercentilePrivacy"),
    Audited("ExcludeVars", "nvflare", f"{_FILTERS}.exclude_vars:ExcludeVars(exclude_vars='b')"),
    Audited(
        "DPOptimizer", "opacus",
        "opacus.optimizers:DPOptimizer(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)",
    ),
    Audited("GaussianMechanism", "pfl", "pfl_figures:gaussian()"),
    Audited("LaplaceMechanism", "pfl", "pfl_figures:laplace()"),
    Audited("client-level mechanisms", "fl4health", ""),
    Audited("gate, gaussian", "umbel", "umbel_figures:gaussian()"),
    Audited("gate, laplace", "umbel", "umbel_figures:laplace()"),
)  # fmt: skip


def tables(seed: int, folder: Path, quick: bool = False, canaries: int = CANARIES) -> None:
    """Audit all targets that have no result in the folder yet, and write the tables.

    The packages' virtual environments are in the folder as well; those that are there are used.

    Raises
    ------
    ConfigError
        If the scripts are missing, as in an installed umbel.
    """
    canaries = QUICK_CANARIES if quick else canaries
    environments, scripts = folder / "environments", source(FOLDER)
    if not scripts.is_dir():
        text = f"there is no {scripts}; run the experiment in a checkout of umbel"
        raise ConfigError(text, code="config.not-done")
    chosen = [one for one in TARGETS if not quick or one.peer == "umbel"]
    found = [
        (one, _audited(one, canaries, seed, folder / "audits", environments, scripts))
        for one in track(chosen, "Audits", transient=True)
    ]
    done = [(one, said) for one, said in found if "report" in said]
    rows = list(_rows(done))
    document = {"versions": versions(PACKAGES), "canaries": canaries, "seed": seed}
    sections = [_section(title, rounds, rows) for title, rounds in (("One round", 1), ("Three rounds", 3))]
    Page("Audits of peers", [*sections, _commands(done), _versions(found)], rows, document).write(folder)
    write_atomically(folder / "faults.md", _faults(done).encode())


def interpreter(peer: Peer, environments: Path) -> str:
    """Return the interpreter of a peer's environment, which is made unless it is there; empty if pip fails."""
    if not peer.requirement:
        return sys.executable
    home = environments / peer.requirement
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = home / "installed"
    if not ready.exists():
        venv.create(home, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", peer.requirement, *peer.beside]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            return ""
        write_atomically(ready, b"")
    return str(python)


def _audited(one: Audited, canaries: int, seed: int, folder: Path, environments: Path, scripts: Path) -> dict[str, Any]:
    """Return the saved result of an audit, or run it in a process and save it."""
    few = min(WRAPPED, canaries) if "strategy" in one.target else canaries
    words = [one.target, *one.options, "--canaries", f"{few}", "--seed", f"{seed}"]
    saved = folder / f"{one.peer}-{one.name.replace(' ', '-').replace(',', '')}.json"
    requirement, code = PEERS[one.peer].requirement, _code()
    if saved.exists():
        said: dict[str, Any] = json.loads(saved.read_text(encoding="utf-8"))
        if [said[key] for key in ("words", "requirement", "code")] == [words, requirement, code]:
            return said
    python = interpreter(PEERS[one.peer], environments)
    said = {"words": words, "requirement": requirement, "code": code}
    if not python or not one.target:
        return said
    command = [sys.executable, "-m", "umbel", "audit", *words, "--python", python, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=scripts, env=_environment())
    if done.returncode not in (0, 1) or not done.stdout:
        raise ConfigError(f"{one.name} was not audited: {done.stderr.strip()[-400:]}", code="config.not-done")
    (said["report"],) = json.loads(done.stdout)
    make_folder(folder)
    write_atomically(saved, json.dumps(said, indent=1).encode())
    return said


def _code() -> str:
    """Return a digest of the code that audits, and of the scripts that make targets."""
    folders = (Path(defences.__file__).parent, source(FOLDER))
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _environment() -> dict[str, str]:
    """Return the environment of the command: the same umbel, wherever it runs."""
    own = str(source("umbel/__init__.py").parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))}


def _rows(done: list[tuple[Audited, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for one, said in done:
        report = said["report"]
        for figures in report["figures"]:
            yield {
                "peer": one.peer, "target": one.name, "rows": report["rows"], "rounds": figures["rounds"],
                "delta": report["claim"]["delta"], "claimed": figures["claimed"], "formula": figures["formula"],
                "fitted": figures["fitted"], "low": figures["low"], "high": figures["high"],
                "proved": figures["proved"]["shown"], "provable": figures["provable"], "law": report["law"],
            }  # fmt: skip


def _section(title: str, rounds: int, rows: list[dict[str, Any]]) -> Section:
    columns: Columns = {
        "package": "peer",
        "mechanism": "target",
        "protects": lambda row: "row" if row["rows"] else "client",
        "δ": "delta:g",
        "claimed ε": lambda row: _amount(row["claimed"]),
        "formula": lambda row: _amount(row["formula"]),
        "fitted": _fitted,
        "proved": lambda row: f"{row['proved']:.2f} of {row['provable']:.2f}",
    }
    text = (
        "Claimed: by the package's attributes or its account. Formula: an upper bound, from the deviation of the "
        "noise. Fitted: of noise whose law passed a test, with an interval at 95 %. Proved: a lower bound from counted "
        "guesses, at 95 %, and the most that so many canaries can prove."
    )
    return Section.of(title, text, columns, [row for row in rows if row["rounds"] == rounds])


def _amount(epsilon: float | str | None) -> str:
    if epsilon is None:
        return "none"
    return "infinite" if epsilon in ("inf", math.inf) else amount(float(epsilon))


def _fitted(row: Mapping[str, Any]) -> str:
    if row["fitted"] is None:
        return "none"
    return f"{_amount(row['fitted'])} ({_amount(row['low'])} to {_amount(row['high'])})"


def _commands(done: list[tuple[Audited, dict[str, Any]]]) -> Section:
    rows = []
    for one, said in done:
        words = ["umbel", "audit", *said["words"]]
        words += ["--python", f"{PEERS[one.peer].package}/bin/python"] if PEERS[one.peer].requirement else []
        rows.append((one.peer, one.name, f"`{shlex.join(words)}`"))
    text = f"In the folder `{FOLDER}`, with the interpreter of the package's environment."
    return Section("Commands", text, ("package", "mechanism", "command"), rows)


def _versions(found: list[tuple[Audited, dict[str, Any]]]) -> Section:
    failed = {one.peer for one, said in found if "report" not in said}
    rows = []
    for name in dict.fromkeys(one.peer for one, _ in found):
        peer = PEERS[name]
        install = f"`pip install {' '.join((peer.requirement, *peer.beside))}`" if peer.requirement else "this checkout"
        python = ".".join(map(str, sys.version_info[:2]))
        told = f"not on Python {python}" if name in failed else "yes"
        rows.append((name, peer.requirement.partition("==")[2] or "this version", peer.released, install, told))
    columns = ("package", "version", "released", "command", "installed")
    return Section("Versions", "Each package has a fresh virtual environment.", columns, rows)


def _faults(done: list[tuple[Audited, dict[str, Any]]]) -> str:
    """Return the faults that audits found, for whoever runs the experiment."""
    parts = ["# Faults that the audits found\n"]
    for one, said in done:
        lines = [f"- `{fault['code']}`: {fault['text']}. {fault['mend']}\n" for fault in said["report"]["faults"]]
        parts.append(f"## {one.peer}: {one.name}\n\n{''.join(lines) or 'None.' + chr(10)}")
    return "\n".join(parts)
