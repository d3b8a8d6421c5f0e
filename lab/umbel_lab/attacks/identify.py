"""The identification audit: a malicious server's knowledge of clients' local parameters, and its price.

It attacks the clients of a dataset of preferences through the app's own ClientApp and gate (PAC identifiability in
federated personalization, Protocol 2), in three ways, without defences and behind each defence that a site can switch
on. The target is the direction of a client's vector. Its sign is one more bit, which one known preference reveals; the
table also shows how often the attack finds it by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from umbel.data import Dataset, find_dataset, open_dataset
from umbel.protocol.errors import DatasetError
from umbel.protocol.logs import quiet
from umbel.protocol.plugins import parse_options
from umbel.simulation.in_process import play, run_config
from umbel_lab.attacks.pac_attack import AttackOptions, PacAttack, lean_of, needed, theorem_1
from umbel_lab.output import Page, Section

DELTA = 0.1
"""Failure probability of the bounds."""

NOISE_MULTIPLIERS = (0.0, 1.0, 3.0)

NO_DEFENCE = "none"
PAPER = "Protocol 2"
ATTACKS: dict[str, dict[str, str]] = {
    PAPER: {"attack": "zero", "reading": "sum"},
    "spectral": {"attack": "jitter", "reading": "spectral"},
    "spectral, honest items": {"attack": "spectral", "reading": "spectral"},
}
"""Attacks: the paper's, and two that read replies better; no client notices one of these."""

_MAX_A_ROUND = 100
_VALIDATE_EVERY = 100
# Settings of defences, and the noise multiplier with them.
_CAP, _CLIP_NORM, _SIGMA, _DEFENDED = 8, 1.0, 0.1, 1.0


@dataclass(frozen=True)
class Defence:
    """A measure that keeps a server from stealing local parameters, or is said to.

    `policy` holds the entries of the site's policy that switch it on (`umbel.privacy.gate.policy.Policy`), `run` the
    entries of the run config.
    """

    name: str
    policy: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def noise_multiplier(self) -> float:
        """The gate's noise multiplier, unless other noise replaces it."""
        return 0.0 if "message_noise" in self.run else _DEFENDED


def defences(after: int) -> list[Defence]:
    """Return every defence with its comparisons, for `after` rounds of honest training."""
    noisy = {"message_noise": _SIGMA}
    public = {"clipping": "public", "clip_norm": _CLIP_NORM, "clip_norm_floor": _CLIP_NORM, "noise_per": "vector"}
    return [
        Defence(NO_DEFENCE),
        Defence(f"budget: {_CAP} participations left for the attack", {"max-participations": after + _CAP}),
        Defence(f"public clip norm {_CLIP_NORM:g}", {"clipping": "public"}, public),
        Defence(f"Eq. 3, sigma = {_SIGMA:g}, noise on changed items", run=noisy),
    ]


@dataclass(frozen=True)
class Stolen:
    """The result of an attack on one client; errors and `spent` as in the findings of `pac_attack.PacAttack`.

    `likes` is p, the share of liked items among the client's own; `enough` the number of interactions after which the
    error stayed low, None if it never did; `bound` the number that suffices without noise by Theorem 1, None if the
    theorem does not apply.
    """

    client: int
    interactions: int
    likes: float
    error: float | None
    by_rate: float | None
    by_items: float | None
    enough: int | None
    spent: float | None
    bound: int | None


@dataclass(frozen=True)
class Attacked:
    """The result of one attack, a key of `ATTACKS`; a vector counts as stolen at an error of `limit`."""

    defence: str
    nu: float
    attack: str
    stolen: list[Stolen]
    limit: float

    @property
    def row(self) -> dict[str, Any]:
        """The result over all clients, as a row of a table."""
        stolen, enough = self.stolen, self._enough
        done = [one for one in stolen if one.enough is not None]
        errors = [one.error for one in stolen if one.error is not None]
        spent = [one.spent / one.interactions * (one.enough or 0) for one in done if one.spent is not None]
        return {
            "nu": self.nu,
            "attack": self.attack,
            "stolen": f"{len(enough)} of {len(stolen)}",
            "sign by rate": self._signed([one.by_rate for one in done]),
            "by items": self._signed([one.by_items for one in done]),
            "enough": float(np.median(enough)) if enough else None,
            "maximum": max(enough, default=None),
            "asked": max((one.interactions for one in stolen), default=0),
            "error": float(np.median(errors)) if errors else None,
            "spent": float(np.median(spent)) if spent else None,
        }

    @property
    def _enough(self) -> list[int]:
        return [one.enough for one in self.stolen if one.enough is not None]

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
    """The results of attacks, without a defence and behind each; `lean` is that of `pac_attack.lean_of`."""

    dataset: str
    lean: str
    plain: list[Attacked]
    defended: list[Attacked]

    def page(self) -> Page:
        """Return the tables and their explanation, with a row for each client and attack."""
        tables = {"all clients": [one.row for one in self.plain]}
        tables["the strongest attack"] = [one.row for one in strongest(self.plain)]
        if self.defended:
            papers = {one.defence: one.row["stolen"] for one in self.defended if one.attack == PAPER}
            rows = [{"defence": one.defence, **one.row, PAPER: papers[one.defence]} for one in strongest(self.defended)]
            tables["behind defences of the site, the strongest attack"] = rows
        sections = [
            Section.of(f"{self.dataset}: {name}", "", {key: key for key in rows[0]}, rows)
            for name, rows in tables.items()
        ]
        clients = [
            {"defence": one.defence, "nu": one.nu, "attack": one.attack, **vars(stolen)}
            for one in (*self.plain, *self.defended)
            for stolen in one.stolen
        ]
        notes = Section("", "\n\n".join(self.notes()))
        return Page("What a server can steal", [*sections, notes], clients, file="clients.csv")

    def notes(self) -> list[str]:
        """Return the explanation of the tables."""
        victims = self.plain[0].stolen
        against = sum(one.likes >= 0.5 for one in victims)
        sign = {
            "dislikes": "most labels are dislikes, as Assumption 1 says of each client",
            "likes": "most labels are likes, against Assumption 1, so the other sign is taken",
            "unknown": "likes and dislikes are as many, so that no sign is settled",
        }[self.lean]
        return [
            f"Assumption 1 of the paper, p < 1/2, does not hold for {against} of {len(victims)} victims. Over the "
            f"whole population {sign}.",
            "error is the share of items on which the stolen vector errs under the better of both signs: near 0 the "
            "server knows what the client knows, but for one bit that one known preference tells; one half is the "
            "most there can be. stolen counts the vectors with a low error, and beside it those whose sign the server "
            "finds as well: by the population's rate, each client by itself, and by the items, on which people agree, "
            "all victims together. Items' biases tell the sign of each. enough is the number of interactions from "
            "which on the error stayed low; over all clients, the median of those stolen, beside the maximum. asked "
            "is how often the server asked. spent is what these cost the client by the paper's budget, n/nu each: a "
            "heuristic that guarantees nothing, and counts nothing that is released without noise. bound (in "
            f"clients.csv) is what suffices for Protocol 2 without noise by Theorem 1 at delta = {DELTA:g}.",
            f"Attacks: {PAPER} is the paper's, items of zeros and the sum of what comes back from a minibatch. The "
            "others ask for one step on all rows at once, as long or short as suits the noise, and read the direction "
            "in which updates are longest: of items that are almost zeros, and of the honest "
            "ones, which look like training. The strongest is the one that steals most, and of these the "
            "fastest. A defence that stops these may not stop the next.",
        ]


def strongest(attacked: Sequence[Attacked]) -> list[Attacked]:
    """Return the strongest attack at each noise multiplier, behind each defence."""
    by_plan: dict[tuple[str, float], list[Attacked]] = {}
    for one in attacked:
        by_plan.setdefault((one.defence, one.nu), []).append(one)
    return [max(own, key=lambda one: one.strength) for own in by_plan.values()]


def audit(
    dataset: str, multipliers: Sequence[float], defended: bool, options: Mapping[str, Any], **changes: Any
) -> Audit:
    """Attack a dataset's clients without defences at each noise multiplier, and when `defended` behind each defence.

    `options` and `changes` are those of `attack`.
    """
    data = preferences(dataset)
    plans = [(Defence(NO_DEFENCE), nu) for nu in multipliers]
    if defended:
        plans += [(defence, defence.noise_multiplier) for defence in defences(int(options["after"]))]
    todo = [(defence, nu, name) for defence, nu in plans for name in ATTACKS]
    done = []
    for defence, nu, name in track(todo, "attacking", transient=True, disable=not Console().is_terminal):
        own = {"multipliers": f"{nu:g}", "lean": lean_of(data), **options, **ATTACKS[name]}
        stolen = attack(dataset, defence.policy, own, **{**changes, **defence.run})
        limit = float(own.get("error", AttackOptions.error))
        done.append(Attacked(defence.name, nu, name, stolen, limit))
    first = len(multipliers) * len(ATTACKS)
    return Audit(Path(dataset).name, lean_of(data), done[:first], done[first:])


def attack(dataset: str, policy: Mapping[str, Any], options: Mapping[str, Any], **changes: Any) -> list[Stolen]:
    """Attack a dataset's clients in this process, at one noise multiplier.

    `policy` has entries of the site's policy, and `options` those of the attack (`pac_attack.AttackOptions`), with a
    single value in ``multipliers``. The rest are changes of ``configs/pac-attack.toml``, or of
    ``configs/recommender.toml`` if the model has biases.
    """
    data = preferences(dataset)
    text = " ".join(f"{name}={value}" for name, value in options.items())
    own = parse_options(AttackOptions, text, "strategy")
    # A model with biases is attacked with the settings of its training.
    biased = str(changes.get("model", "")).startswith("biased-factors")
    config = run_config(
        "recommender" if biased else "pac-attack",
        dataset=dataset,
        strategy=f"{PacAttack.__module__}:{PacAttack.__name__} {text}",
        validate_every=_VALIDATE_EVERY,
        noise_multiplier=own.multipliers[0],
        rounds=own.rounds,
        clients_per_round=min(_MAX_A_ROUND, data.manifest.train),
        **changes,
    )
    with quiet(logging.CRITICAL):  # an attacked client that refuses would fill the log
        # A client over budget refuses, which is not a fault of the run.
        run = play(config, node_configs=[{"partition-id": 0, "num-partitions": 1, **policy}], strict=False)
    strategy = run.strategy
    assert isinstance(strategy, PacAttack)
    enough, stolen = needed(strategy.findings, own.error), []
    for client, row in {row["client"]: row for row in strategy.findings}.items():
        likes = float(np.mean(data.client(client)[1] > 0))
        bound = theorem_1(likes, run.setup.config.batch_size, DELTA)
        same = {name: row[name] for name in ("client", "interactions", "error", "by_rate", "by_items", "spent")}
        stolen.append(Stolen(likes=likes, enough=enough[client], bound=bound, **same))
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
