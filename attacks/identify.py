"""The identification audit: what a malicious server learns of clients' local parameters, and at what price.

It attacks the clients of a federation of preferences through the app's own ClientApp and gate
(PAC identifiability in federated personalization, Protocol 2), as they are and behind each defence
that a site can switch on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track

from attacks.pac_attack import AttackOptions, PacAttack, needed, theorem_1
from federation import Federation, find_federation, open_federation
from protocol.errors import FederationError
from protocol.home import write_atomically
from protocol.plugins import parse_options
from simulation.in_process import play, run_config

DELTA = 0.1
"""Failure probability at which bounds are given."""

NOISE_MULTIPLIERS = (0.0, 1.0, 3.0)

_MAX_A_ROUND = 100
# With defences: what they are set to, and the noise multiplier.
_CAP, _RADIUS, _SIGMA, _DEFENDED = 8, 1.0, 0.1, 1.0


@dataclass(frozen=True)
class Defence:
    """Something that keeps a server from stealing local parameters, or is said to.

    Attributes
    ----------
    name : str
        What it is, for people.
    policy : dict
        The entries of the site's policy that switch it on (`privacy.policy.Policy`).
    run : dict
        What else the run config says.
    options : dict
        What else the attack does (`attacks.pac_attack.AttackOptions`).
    """

    name: str
    policy: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def defences(after: int) -> list[Defence]:
    """Return every defence beside what it is to be compared with, for `after` rounds of honest training."""
    noisy: dict[str, Any] = {"run": {"message_noise": _SIGMA}, "options": {"multipliers": "0"}}
    public = {"radius": "public", "radius_start": _RADIUS, "radius_floor": _RADIUS, "noise_per": "vector"}
    balanced, spectral = {"balanced-batches": "true"}, {"attack": "spectral"}
    return [
        Defence("none"),
        Defence(f"budget: {_CAP} participations left for the attack", {"max-participations": after + _CAP}),
        Defence(f"public radius {_RADIUS:g}", {"radius-mode": "public"}, public),
        Defence(f"Eq. 3, sigma = {_SIGMA:g}, noise on changed items", **noisy),
        Defence(f"Eq. 3, sigma = {_SIGMA:g}, noise on all items", {"noise-all-items": "true"}, **noisy),
        Defence("tripwire", {"tripwire": "true"}),
        Defence("tripwire, and the attack knows of it", {"tripwire": "true"}, options={"attack": "jitter"}),
        Defence("balanced batches", balanced),
        Defence("none; spectral attack", options=spectral),
        Defence("balanced batches; spectral attack", balanced, options=spectral),
    ]


@dataclass(frozen=True)
class Stolen:
    """What an attack on one client came to.

    Attributes
    ----------
    client, interactions : int
    error : float or None
        Share of the items on which the estimate of its local parameters errs (Definition 1); None
        where nothing was released.
    enough : int or None
        Interactions from which on the error was low enough; None when it never was.
    spent : float or None
        What the client's participations in the attack cost it by the paper's budget, n/nu each, a
        heuristic; None when that counts nothing.
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
            "error is the share of items on which the stolen local parameters err: near 0 the server knows what the "
            "client knows, near one half it might as well guess. enough is the number of interactions from which on "
            "the error stayed low; over all clients, the median of those stolen, beside the maximum. asked is how "
            "often the server asked. spent is what these cost the client by the paper's budget, n/nu each: a heuristic "
            "that guarantees nothing, and counts nothing that is released without noise. bound is what suffices "
            f"without noise by Theorem 1 at delta = {DELTA:g}; for the Laplace release nobody has published one.",
            "A defence that stops one attack may not stop the next. The tripwire is no more than that: an attack that "
            "knows of it passes. Noise, and a limit on what a client gives, are what bound an attacker, whatever it "
            "sends.",
        ]


def audit(
    federation: str, multipliers: Sequence[float], defended: bool, options: Mapping[str, Any], **changes: Any
) -> Audit:
    """Attack a federation's clients as they are, and behind each defence.

    Parameters
    ----------
    federation : str
        Name or path.
    multipliers : sequence of float
        nu, one attack each.
    defended : bool
        Whether to try the defences as well.
    options : mapping
        Of all attacks (`attacks.pac_attack.AttackOptions`).
    **changes
        Of ``configs/pac-attack.toml``, for all attacks.
    """
    attacks = [(Defence(f"{nu:g}"), nu) for nu in multipliers]
    if defended:
        attacks += [(defence, _DEFENDED) for defence in defences(int(options["after"]))]
    done = []
    for defence, nu in track(attacks, "attacking", transient=True, disable=not Console().is_terminal):
        own = {"multipliers": f"{nu:g}", **options, **defence.options}
        stolen = attack(federation, defence.policy, own, **{**changes, **defence.run})
        done.append((defence.name, float(own["multipliers"]), stolen))
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


def attack(federation: str, policy: Mapping[str, Any], options: Mapping[str, Any], **changes: Any) -> list[Stolen]:
    """Attack a federation's clients in this process, at one noise multiplier.

    Parameters
    ----------
    federation : str
        Name or path.
    policy : mapping
        Entries of the site's policy.
    options : mapping
        Of the attack (`attacks.pac_attack.AttackOptions`); its ``multipliers`` are one.
    **changes
        Of ``configs/pac-attack.toml``.
    """
    data = _preferences(federation)
    text = " ".join(f"{name}={value}" for name, value in options.items())
    own = parse_options(AttackOptions, text, "strategy-options")
    config = run_config(
        "pac-attack",
        federation=federation,
        strategy_options=text,
        noise_multiplier=own.multipliers[0],
        rounds=own.rounds,
        clients_per_round=min(_MAX_A_ROUND, data.manifest.train),
        **changes,
    )
    with _quiet():
        # A client that has spent its budget refuses, which is no fault of the run.
        run = play(config, node_configs=[{"partition-id": 0, "num-partitions": 1, **policy}], strict=False)
    strategy = run.strategy
    assert isinstance(strategy, PacAttack)
    enough = needed(strategy.findings, own.error)
    last = {row["client"]: row for row in strategy.findings}
    return [
        Stolen(
            client=number,
            interactions=row["interactions"],
            error=row["error"],
            enough=enough[number],
            spent=row["spent"],
            bound=theorem_1(like_rate(data, number), run.setup.config.batch_size, DELTA),
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
        "maximum": max(enough, default=None),
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
