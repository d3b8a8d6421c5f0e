"""The identification audit: what a malicious server learns of clients' local models, and at what price.

It attacks the clients of a federation of preferences through the app's own ClientApp and gate
(PAC identifiability in federated personalization, Protocol 2), as they are and behind each defence
that a site can switch on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import client.app
from experiments.runs import run_config
from federation import Federation, FederationError, find_federation, open_federation
from server.rounds import State, initial_hypotheses, run_rounds
from server.settings import Settings
from simulation.grid import InProcessGrid
from strategies.pac_attack import PacAttack, needed, theorem_1

DELTA = 0.1
"""Failure probability at which bounds are given."""

_MOST_A_ROUND = 100


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


def defences(after: int, cap: int, radius: float, message_noise: float) -> list[Defence]:
    """Return every defence beside what it is to be compared with.

    Parameters
    ----------
    after : int
        Rounds of honest training before the attack.
    cap : int
        Participations that the budget leaves for the attack, at least.
    radius : float
        The public radius.
    message_noise : float
        sigma of noisy messages (Eq. 3).
    """
    noisy = {"message_noise": message_noise, "attack_multipliers": "0"}
    balanced = {"balanced-batches": "true"}
    return [
        Defence("none", {}, {}),
        Defence(f"budget of {after + cap} participations", {"most-participations": after + cap}, {}),
        Defence(
            f"public radius {radius:g}",
            {"radius-mode": "public"},
            {"radius": "public", "radius_start": radius, "radius_floor": radius},
        ),
        Defence(f"messages with noise {message_noise:g} on changed items", {}, noisy),
        Defence(f"messages with noise {message_noise:g} on all items", {"noise-all-items": "true"}, noisy),
        Defence("tripwire", {"tripwire": "true"}, {}),
        Defence("tripwire, against an attack that knows of it", {"tripwire": "true"}, {"attack": "jitter"}),
        Defence("balanced batches", balanced, {}),
        Defence("none, against the spectral attack", {}, {"attack": "spectral"}),
        Defence("balanced batches, against the spectral attack", balanced, {"attack": "spectral"}),
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
    """What an attack on some clients came to, by noise multiplier."""

    stolen: dict[float, list[Stolen]]
    remarks: list[str]


def attack(federation: str, policy: Mapping[str, Any], **changes: Any) -> Audit:
    """Attack a federation's clients in this process.

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
    multipliers = [float(part) for part in config["attack-multipliers"].split()]
    config["noise-multiplier"] = min(multipliers)
    config["rounds"] = config["attack-after"] + len(multipliers) * config["attack-interactions"] + 1
    settings = Settings.parse(config)
    node = {"partition-id": 0, "num-partitions": 1, **policy}
    grid = InProcessGrid(client.app.app, config, node_configs=[node])
    start = initial_hypotheses(settings, grid)
    state = State(hypotheses=start, best=start)
    with _quiet():
        run_rounds(settings, grid, state, lambda _: None)
    strategy = settings.strategy
    assert isinstance(strategy, PacAttack)
    stolen = {}
    for nu in multipliers:
        own = [row for row in strategy.findings if row["noise_multiplier"] == nu]
        first = needed(own, strategy.error)
        last = {row["client"]: row for row in own}
        stolen[nu] = [
            Stolen(
                client=number,
                interactions=row["interactions"],
                error=row["error"],
                enough=first[number],
                spent=row["spent"],
                bound=theorem_1(like_rate(data, number), config["batch-size"], DELTA),
            )
            for number, row in last.items()
        ]
    return Audit(stolen, strategy.remarks)


def like_rate(federation: Federation, number: int) -> float:
    """Return p_c, the share of liked items among a client's."""
    return float(np.mean(federation.client(number)[1] > 0))


def summary(name: str, nu: float, stolen: Sequence[Stolen]) -> dict[str, Any]:
    """Return what an attack came to over all clients, as a row of a table."""
    done = [one for one in stolen if one.enough is not None]
    enough = [one.enough for one in done if one.enough is not None]
    errors = [one.error for one in stolen if one.error is not None]
    spent = [one.spent / one.interactions * (one.enough or 0) for one in done if one.spent is not None]
    return {
        "defence": name,
        "nu": nu,
        "clients": len(stolen),
        "stolen": len(enough),
        "interactions": float(np.median(enough)) if enough else None,
        "most": max((one.interactions for one in stolen), default=0),
        "error": float(np.median(errors)) if errors else None,
        "spent": float(np.median(spent)) if spent else None,
    }


def per_client(audit: Audit) -> Iterable[dict[str, Any]]:
    """Yield a row a client and noise multiplier."""
    for nu, stolen in audit.stolen.items():
        for one in stolen:
            yield {"nu": nu, **vars(one)}


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
