"""The identification audit: what a malicious server learns of clients' local models, and at what price.

It attacks the clients of a federation of preferences through the app's own ClientApp and gate
(PAC identifiability in federated personalization, Protocol 2), as they are and behind each defence
that a site can switch on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track

import client.app
from attacks.pac_attack import PacAttack, needed, theorem_1
from experiments.runs import run_config
from federation import Federation, find_federation, open_federation
from protocol.errors import FederationError
from protocol.home import write_atomically
from server.rounds import State, initial_hypotheses, run_rounds
from server.settings import Settings
from simulation.grid import InProcessGrid

DELTA = 0.1
"""Failure probability at which bounds are given."""

NOISE_MULTIPLIERS = (0.0, 1.0, 3.0)

_MOST_A_ROUND = 100
# With defences: what they are set to, and the noise multiplier.
_CAP, _RADIUS, _SIGMA, _DEFENDED = 8, 1.0, 0.1, 1.0


@dataclass(frozen=True)
class Defence:
    """Something that keeps a server from stealing local models, or is said to.

    Attributes
    ----------
    name : str
        What it is, for people.
    policy : dict
        The site's policy that switches it on (`privacy.policy`).
    run : dict
        What else the run config says.
    """

    name: str
    policy: Mapping[str, Any]
    run: Mapping[str, Any]


def defences(after: int) -> list[Defence]:
    """Return every defence beside what it is to be compared with, for `after` rounds of honest training."""
    noisy = {"message_noise": _SIGMA, "attack_multipliers": "0"}
    balanced = {"balanced-batches": "true"}
    return [
        Defence("none", {}, {}),
        Defence(f"budget: {_CAP} participations left for the attack", {"most-participations": after + _CAP}, {}),
        Defence(
            f"public radius {_RADIUS:g}",
            {"radius-mode": "public"},
            {"radius": "public", "radius_start": _RADIUS, "radius_floor": _RADIUS, "noise_per": "vector"},
        ),
        Defence(f"Eq. 3, sigma = {_SIGMA:g}, noise on changed items", {}, noisy),
        Defence(f"Eq. 3, sigma = {_SIGMA:g}, noise on all items", {"noise-all-items": "true"}, noisy),
        Defence("tripwire", {"tripwire": "true"}, {}),
        Defence("tripwire, and the attack knows of it", {"tripwire": "true"}, {"attack": "jitter"}),
        Defence("balanced batches", balanced, {}),
        Defence("none; spectral attack", {}, {"attack": "spectral"}),
        Defence("balanced batches; spectral attack", balanced, {"attack": "spectral"}),
    ]


@dataclass(frozen=True)
class Stolen:
    """What an attack on one client came to.

    Attributes
    ----------
    client, interactions : int
    error : float or None
        Share of the items on which the stolen local model errs (Definition 1); None where nothing
        was released.
    enough : int or None
        Interactions from which on the error was low enough; None when it never was.
    spent : float or None
        What the client's participations in the attack cost it; None when nothing bounds it.
    bound : int or None
        Interactions that suffice without noise by Theorem 1; None where it says nothing.
    """

    client: int
    interactions: int
    error: float | None
    enough: int | None
    spent: float | None
    bound: int | None


@dataclass(frozen=True)
class Audit:
    """What attacks came to.

    Attributes
    ----------
    federation : str
    stolen : dict from float to list of Stolen
        By noise multiplier, without a defence.
    defended : dict from str to (float, list of Stolen)
        By defence: the noise multiplier, and what was stolen all the same.
    """

    federation: str
    stolen: dict[float, list[Stolen]]
    defended: dict[str, tuple[float, list[Stolen]]]

    def tables(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """Return tables as title and rows."""
        each = [{"nu": nu, **vars(one)} for nu, stolen in self.stolen.items() for one in stolen]
        by_nu = [{"nu": nu, **summary(stolen)} for nu, stolen in self.stolen.items()]
        tables = [(f"{self.federation}: each client", each), (f"{self.federation}: all clients", by_nu)]
        if self.defended:
            rows = [{"defence": name, "nu": nu, **summary(stolen)} for name, (nu, stolen) in self.defended.items()]
            tables.append((f"{self.federation}: behind defences of the site", rows))
        return tables

    def notes(self) -> list[str]:
        """Return how to read the tables."""
        return [
            "error is the share of items on which the stolen local model errs: near 0 the server knows what the client "
            "knows, near one half it might as well guess. enough is the number of interactions from which on the error "
            "stayed low; over all clients, the median of those stolen, beside the most. asked is how often the server "
            "asked. spent is what these cost the client (n/nu each; nothing bounds what is released without noise). "
            f"bound is what suffices without noise by Theorem 1 at delta = {DELTA:g}; for the Laplace release nobody "
            "has published one.",
            "A defence that stops one attack may not stop the next. The tripwire is no more than that: an attack that "
            "knows of it passes. Noise and budget are what bound an attacker, whatever it sends.",
        ]


def audit(federation: str, multipliers: Sequence[float], defended: bool, common: Mapping[str, Any]) -> Audit:
    """Attack a federation's clients as they are, and behind each defence.

    Parameters
    ----------
    federation : str
        Name or path.
    multipliers : sequence of float
        nu, one attack each.
    defended : bool
        Whether to try the defences as well.
    common : mapping
        Entries of the run config for all attacks.
    """
    attacks = [(Defence(f"{nu:g}", {}, {}), nu) for nu in multipliers]
    if defended:
        attacks += [(defence, _DEFENDED) for defence in defences(int(common["attack_after"]))]
    done = []
    for defence, nu in track(attacks, "attacking", transient=True, disable=not Console().is_terminal):
        changes = {"attack_multipliers": f"{nu:g}", **common, **defence.run}
        done.append((defence.name, float(changes["attack_multipliers"]), attack(federation, defence.policy, **changes)))
    plain, behind = done[: len(multipliers)], done[len(multipliers) :]
    return Audit(
        Path(federation).name,
        {nu: stolen for _, nu, stolen in plain},
        {name: (nu, stolen) for name, nu, stolen in behind},
    )


def write(folder: Path, done: Audit) -> None:
    """Write ``table.md`` and, for each client, ``clients.csv``."""
    page = ["# What a server can steal\n"]
    for title, rows in done.tables():
        lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
        page.append(f"## {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    page += [f"{note}\n" for note in done.notes()]
    write_atomically(folder / "table.md", "\n".join(page).encode())
    write_atomically(folder / "clients.csv", pd.DataFrame(done.tables()[0][1]).to_csv(index=False).encode())


def cell(value: Any) -> str:
    """Return a table's value as text."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def attack(federation: str, policy: Mapping[str, Any], **changes: Any) -> list[Stolen]:
    """Attack a federation's clients in this process, at one noise multiplier.

    Parameters
    ----------
    federation : str
        Name or path.
    policy : mapping
        Entries of the site's policy.
    **changes
        Of ``configs/pac-attack.toml``.
    """
    data = _preferences(federation)
    asked = min(_MOST_A_ROUND, data.manifest.train)
    config = run_config("pac-attack", federation=federation, clients_per_round=asked, **changes)
    config["noise-multiplier"] = float(config["attack-multipliers"])
    config["rounds"] = config["attack-after"] + config["attack-interactions"] + 1
    settings = Settings.parse(config)
    node = {"partition-id": 0, "num-partitions": 1, **policy}
    grid = InProcessGrid(client.app.app, config, node_configs=[node])
    start = initial_hypotheses(settings, grid)
    state = State(hypotheses=start, best=start)
    with _quiet():
        run_rounds(settings, grid, state, lambda _: None)
    strategy = settings.strategy
    assert isinstance(strategy, PacAttack)
    enough = needed(strategy.findings, strategy.error)
    last = {row["client"]: row for row in strategy.findings}
    return [
        Stolen(
            client=number,
            interactions=row["interactions"],
            error=row["error"],
            enough=enough[number],
            spent=row["spent"],
            bound=theorem_1(like_rate(data, number), config["batch-size"], DELTA),
        )
        for number, row in last.items()
    ]


def like_rate(federation: Federation, number: int) -> float:
    """Return p_c, the share of liked items among a client's."""
    return float(np.mean(federation.client(number)[1] > 0))


def summary(stolen: Sequence[Stolen]) -> dict[str, Any]:
    """Return what an attack came to over all clients, as a row of a table."""
    done = [one for one in stolen if one.enough is not None]
    enough = [one.enough for one in done if one.enough is not None]
    errors = [one.error for one in stolen if one.error is not None]
    spent = [one.spent / one.interactions * (one.enough or 0) for one in done if one.spent is not None]
    return {
        "stolen": f"{len(enough)} of {len(stolen)}",
        "enough": float(np.median(enough)) if enough else None,
        "most": max(enough, default=None),
        "asked": max((one.interactions for one in stolen), default=0),
        "error": float(np.median(errors)) if errors else None,
        "spent": float(np.median(spent)) if spent else None,
    }


def _preferences(name: str) -> Federation:
    federation = open_federation(find_federation(name))
    if not federation.manifest.model.startswith("factors-"):
        raise FederationError(
            f"federation {name!r} is for model {federation.manifest.model!r}; identify attacks preferences: build some "
            "with python datasets/preferences.py or python datasets/movielens.py"
        )
    return federation


class _quiet:
    """Silence Flower's log: an attacked client that refuses would fill it."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("flwr")
        self._level = self._logger.level
        self._logger.setLevel(logging.CRITICAL)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)
