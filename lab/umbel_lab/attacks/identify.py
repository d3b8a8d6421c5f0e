"""The identification audit: a malicious server's knowledge of clients' local parameters, and its price.

It attacks the clients of a dataset of preferences through the app's own ClientApp and gate (PAC identifiability in
federated personalization, Protocol 2), in three ways. The target is the direction of a client's vector. Its sign is one
more bit, which one known preference reveals; the table also shows how often the attack finds it by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from umbel.data import Dataset, find_dataset, open_dataset
from umbel.protocol.errors import DatasetError
from umbel.protocol.logs import quiet
from umbel.protocol.options import parse_options
from umbel.simulation.in_process import play, run_config
from umbel_lab.attacks.pac_attack import ERRORS, AttackOptions, PacAttack, lean_of, needed, theorem_1
from umbel_lab.output import Page, Section

DELTA = 0.1
"""Failure probability of the bounds."""

NOISE_MULTIPLIERS = (0.0, 1.0, 3.0)

PAPER = "Protocol 2"
ATTACKS: dict[str, dict[str, str]] = {
    PAPER: {"attack": "zero", "reading": "sum"},
    "spectral": {"attack": "jitter", "reading": "spectral"},
    "spectral, honest items": {"attack": "spectral", "reading": "spectral"},
}
"""Attacks: the paper's, and two that read replies better; no client notices one of these."""

_MAX_A_ROUND = 100
_VALIDATE_EVERY = 100


@dataclass(frozen=True)
class Attacked:
    """The result of one attack, a key of `ATTACKS`, at a noise multiplier.

    Each row of `stolen` is a client's, with errors and ``spent`` as in the findings of `pac_attack.PacAttack`.
    ``likes`` is p, the share of liked items among the client's own, ``enough`` the number of interactions after which
    the error stayed at most at `limit`, None if it never did, and ``bound`` the number that suffices without noise by
    Theorem 1, None if the theorem does not apply.
    """

    nu: float
    attack: str
    stolen: list[dict[str, Any]]
    limit: float

    @property
    def row(self) -> dict[str, Any]:
        """The result over all clients, as a row of a table."""
        stolen, enough = self.stolen, self._enough
        done = [victim for victim in stolen if victim["enough"] is not None]
        errors = [victim["error"] for victim in stolen if victim["error"] is not None]
        priced = [victim for victim in done if victim["spent"] is not None]
        spent = [victim["spent"] / victim["interactions"] * victim["enough"] for victim in priced]
        return {
            "nu": self.nu,
            "attack": self.attack,
            "stolen": f"{len(enough)} of {len(stolen)}",
            "sign by rate": self._signed([victim["by_rate"] for victim in done]),
            "by items": self._signed([victim["by_items"] for victim in done]),
            "enough": float(np.median(enough)) if enough else None,
            "maximum": max(enough, default=None),
            "asked": max((victim["interactions"] for victim in stolen), default=0),
            "error": float(np.median(errors)) if errors else None,
            "spent": float(np.median(spent)) if spent else None,
        }

    @property
    def _enough(self) -> list[int]:
        return [victim["enough"] for victim in self.stolen if victim["enough"] is not None]

    def _signed(self, errors: Sequence[float | None]) -> int | None:
        """Return how many errors are low; None if no sign is determined."""
        known = [error for error in errors if error is not None]
        return None if errors and not known else sum(error <= self.limit for error in known)

    @property
    def strength(self) -> tuple[int, float, int]:
        """Numbers of stolen vectors, speed, and number of signs: the larger, the stronger."""
        enough = self._enough
        return len(enough), -float(np.median(enough)) if enough else 0.0, self.row["by items"] or 0


@dataclass(frozen=True)
class Audit:
    """The results of attacks; `lean` is that of `pac_attack.lean_of`."""

    dataset: str
    lean: str
    attacked: list[Attacked]

    def page(self) -> Page:
        """Return the tables and their explanation, with a row for each client and attack."""
        tables = {
            "all clients": [result.row for result in self.attacked],
            "the strongest attack": [result.row for result in strongest(self.attacked)],
        }
        sections = [
            Section.of(f"{self.dataset}: {name}", "", {key: key for key in rows[0]}, rows)
            for name, rows in tables.items()
        ]
        clients = [
            {"nu": result.nu, "attack": result.attack, **victim} for result in self.attacked for victim in result.stolen
        ]
        victims = self.attacked[0].stolen
        against = sum(victim["likes"] >= 0.5 for victim in victims)
        notes = [
            f"Assumption 1 of the paper, p < 1/2, does not hold for {against} of {len(victims)} victims. More frequent "
            f"over the whole population: {self.lean}, from which the sign by rate follows.",
            "A vector is stolen if it errs on few items under the better of both signs; one known preference reveals "
            "the right one. Beside it, how many signs the server finds: by the population's rate, each client by "
            "itself, and by the items, on which people agree, all victims together. enough is the number of "
            "interactions after which the error stayed low, the median of those stolen; asked is how often the server "
            "asked. spent is what that cost the client by the paper's budget, n/nu each: a heuristic that guarantees "
            "nothing. bound (in clients.csv) is what suffices for Protocol 2 without noise by Theorem 1 at delta = "
            f"{DELTA:g}.",
            f"{PAPER} is the paper's attack. The others ask for one step on all rows at once, and read the direction "
            "in which updates are longest: of items that are almost zeros, or of the honest ones.",
        ]
        sections.append(Section("", "\n\n".join(notes)))
        return Page("What a server can steal", sections, clients, file="clients.csv")


def strongest(attacked: Sequence[Attacked]) -> list[Attacked]:
    """Return the strongest attack at each noise multiplier."""
    nus = dict.fromkeys(result.nu for result in attacked)
    return [max((one for one in attacked if one.nu == nu), key=lambda one: one.strength) for nu in nus]


def audit(dataset: str, multipliers: Sequence[float], options: Mapping[str, Any], **changes: Any) -> Audit:
    """Attack a dataset's clients at each noise multiplier; `options` and `changes` are those of `attack`."""
    lean = lean_of(preferences(dataset))
    todo = [(nu, name) for nu in multipliers for name in ATTACKS]
    results = []
    for nu, name in track(todo, "attacking", transient=True, disable=not Console().is_terminal):
        given = {"lean": lean, **options, **ATTACKS[name]}
        limit = float(given.get("error", AttackOptions.error))
        results.append(Attacked(nu, name, attack(dataset, nu, given, **changes), limit))
    return Audit(Path(dataset).name, lean, results)


def attack(dataset: str, nu: float, options: Mapping[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """Attack a dataset's clients in this process, and return a row for each, as in `Attacked`.

    `options` are those of the attack (`pac_attack.AttackOptions`). The rest are changes of ``configs/pac-attack.toml``,
    or of ``configs/recommender.toml`` if the model has biases.
    """
    data = preferences(dataset)
    text = " ".join(f"{name}={value}" for name, value in options.items())
    parsed = parse_options(AttackOptions, text, "strategy")
    # A model with biases is attacked with the settings of its training.
    biased = str(changes.get("model", "")).startswith("biased-factors")
    config = run_config(
        "recommender" if biased else "pac-attack",
        dataset=dataset,
        strategy=f"{PacAttack.__module__}:{PacAttack.__name__} {text}",
        validation=f"every={_VALIDATE_EVERY}",
        noise_multiplier=nu,
        rounds=parsed.rounds,
        clients_per_round=min(_MAX_A_ROUND, data.manifest.train),
        **changes,
    )
    with quiet(logging.CRITICAL):  # an attacked client that refuses would fill the log
        # A client over budget refuses, which is not a fault of the run.
        run = play(config, node_configs=[{"partition-id": 0, "num-partitions": 1}], strict=False)
    assert isinstance(run.strategy, PacAttack)
    findings, stolen = run.strategy.findings, []
    enough = needed(findings, parsed.error)
    for client, row in {row["client"]: row for row in findings}.items():
        likes = float(np.mean(data.client(client)[1] > 0))
        bound = theorem_1(likes, run.setup.config.batch_size, DELTA)
        errors = {name: row[name] for name in ERRORS}
        stolen.append({
            "client": client, "interactions": row["interactions"], "likes": likes, **errors, "enough": enough[client],
            "spent": row["spent"], "bound": bound,
        })  # fmt: skip
    return stolen


def preferences(name: str) -> Dataset:
    """Return a dataset; raise where it is not one of preferences."""
    dataset = open_dataset(find_dataset(name))
    if not dataset.manifest.model.startswith("factors "):
        raise DatasetError(
            f"dataset {name!r} is for model {dataset.manifest.model!r}; identify attacks preferences: build some "
            "with umbel data make preferences or umbel data make movielens",
            code="data.no-preferences",
        )
    return dataset
