"""PAC identifiability in federated personalization: its theorems as tables, and umbel's gate against them.

A trial is a client with N labelled items of I, whose local parameters u and whose item vectors are drawn from N(0, I),
as in no real data: the theorems hold for any. All trials of a table train together, as the clients of a cohort do, and
the server's estimate is that of `umbel_lab.attacks.pac_attack`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track

from umbel import models
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import learner_for
from umbel.client.work import noisy_messages
from umbel.models.losses import SLOPES
from umbel.privacy.mechanisms import Laplace
from umbel.privacy.mechanisms.sanitise import sanitise
from umbel.protocol.release import Clipping
from umbel.server.run_folder import versions
from umbel.simulation.sweep import PACKAGES
from umbel_lab.attacks.pac_attack import Estimate, checkpoint, theorem_1
from umbel_lab.experiments import scaffold
from umbel_lab.output import Page, Row, Section

ITEMS, FACTORS, LABELLED = 500, 8, 40
LOSS = "log"
SLOPE = abs(float(SLOPES[LOSS](np.zeros(1))[0]))
TRIALS = 2000
BATCH, STEP = 10, 0.1
DELTA, EPSILON = 0.1, 0.1
RATES = (0.1, 0.3, 0.4, 0.45)
SIGMAS = (0.02, 0.05)
MULTIPLIERS = (1.0, 3.0, 5.0)

Floats = NDArray[np.float32]
_RATE, _EPOCHS = 0.3, 50  # of clients whose local parameters are fitted before they are attacked
_ASKED = 16  # interactions for Proposition 1
_FLOOR = 1e-9  # so small that each clip norm is the norm of the update
# A client's training in an interaction.
_ONE_BATCH, _ONE_EPOCH = LocalUpdate(0, STEP, BATCH, 1), LocalUpdate(1, STEP, BATCH)

# Draws for different purposes.
_CLIENTS, _BATCHES, NOISE = range(3)
Matrix = NDArray[np.float64]
_DATA = scaffold.read("pac")
Part = tuple[Section, list[Row]]


# --- trials


@dataclass(frozen=True)
class Trials:
    """Clients to attack: honest item vectors (I, d), local parameters (trials, d), and labels of N items each."""

    items: NDArray[np.float32]
    local: NDArray[np.float32]
    cohort: Cohort

    @classmethod
    def draw(cls, count: int, p: float, seed: int) -> Trials:
        """Draw clients whose likes are the sign of a linear score, each client's another; a share p is positive."""
        rng = np.random.default_rng([seed, _CLIENTS])
        items = rng.standard_normal((ITEMS, FACTORS)).astype(np.float32)
        local = rng.standard_normal((count, FACTORS)).astype(np.float32)
        scores = rng.standard_normal((count, FACTORS)) @ items.T
        liked = round(p * LABELLED)
        labelled = np.empty((count, LABELLED), np.int64)
        for own, score in zip(labelled, scores, strict=True):
            own[:liked] = rng.choice(np.flatnonzero(score > 0), liked, replace=False)
            own[liked:] = rng.choice(np.flatnonzero(score < 0), LABELLED - liked, replace=False)
        labels = torch.from_numpy(np.tile(np.where(np.arange(LABELLED) < liked, 1, -1), count))
        numbers = torch.from_numpy(labelled.reshape(-1, 1).astype(np.float32))
        return cls(items, local, Cohort(numbers, labels, np.full(count, LABELLED, np.int64)))

    def narrowed(self) -> Trials:
        """Return the same clients with their labelled items alone: where zeros are sent, others come back as zeros."""
        numbers = torch.arange(LABELLED, dtype=torch.float32).repeat(len(self.local))[:, None]
        return Trials(self.items[:LABELLED], self.local, Cohort(numbers, self.cohort.targets, self.cohort.lengths))

    def errors(self, estimates: Sequence[Estimate], local: NDArray[np.float32]) -> Matrix:
        """Return for each client the share of items on which the server's estimate errs (Definition 1)."""
        return np.asarray((np.sign(vectors(estimates) @ self.items.T) != np.sign(local @ self.items.T)).mean(1), float)


def vectors(estimates: Sequence[Estimate]) -> Matrix:
    """Return the server's estimate of each client's vector, (m, d)."""
    return np.stack([estimate.vector for estimate in estimates])


def interactions(clients: Trials, update: LocalUpdate, zero: bool, seed: int) -> Iterator[tuple[Floats, Floats]]:
    """Yield without end the items (m, I, d) that clients trained from honest ones or zeros, and their vectors."""
    learner = learner_for(models.load(f"factors items={len(clients.items)} size={FACTORS}", LOSS), "cpu")
    sent = learner.tensors({"items": (np.zeros_like(clients.items) if zero else clients.items)[None]})
    local, chosen = learner.tensors({"user": clients.local}), torch.zeros(len(clients.local), dtype=torch.int64)
    generators = [np.random.default_rng([seed, _BATCHES, c]) for c in range(len(chosen))]
    while True:
        trained, local = learner.train(sent, chosen, clients.cohort, update, generators, local)
        yield trained["items"].numpy(), local["user"].numpy()


def attack(
    clients: Trials, update: LocalUpdate, seed: int, release: Callable[[Any], NDArray[Any]] | None = None
) -> Iterator[tuple[int, list[Estimate], NDArray[np.float32]]]:
    """Attack all clients at once by zeros, without end.

    `release` returns the clients' releases of their updates (m, I, d), by default these as they are. Yields the number
    of the interaction, from 1 on; the server's estimate of each client, the same list every time; and each client's
    vector (m, d).
    """
    estimates = [Estimate(FACTORS, spectral=False) for _ in clients.local]
    for t, (updates, local) in enumerate(interactions(clients.narrowed(), update, True, seed), 1):
        for estimate, message in zip(estimates, release(updates) if release else updates, strict=True):
            estimate.add(message)
        yield t, estimates, local


def page(seed: int, _folder: Path, quick: bool = False, trials: int = TRIALS) -> Page:
    """Return all tables; one thread computes. Fewer than `trials` clients are attacked with noise."""
    trials = 100 if quick else trials
    torch.set_num_threads(1)
    # Local parameters that have learnt from honest items: an epoch an interaction, so that items move as well, which
    # within an epoch a client's vector fits.
    drawn = Trials.draw(trials // 20, _RATE, seed)
    *_, (_, local) = islice(interactions(drawn, _ONE_EPOCH, False, seed), _EPOCHS)
    fitted = Trials(drawn.items, local, drawn.cohort)
    parts = [
        _theorem_1(trials, seed),
        _noisy(trials // 10, seed, "theorem 2", _ONE_BATCH, theorem_2),
        _noisy(trials // 10, seed, "theorem 3", _ONE_EPOCH, theorem_3),
        _proposition_1(fitted, seed),
    ]
    sections, rows = [section for section, _ in parts], [row for _, own in parts for row in own]
    document = {"versions": versions(PACKAGES), "trials": trials, "seed": seed}
    return Page("PAC identifiability in federated personalization", sections, rows, document)


# --- the theorems


def _theorem_1(trials: int, seed: int) -> Part:
    """Without noise an attack fails only if most labels of all minibatches were positive."""
    rows: list[Row] = []
    for p in track(RATES, "Theorem 1", transient=True):
        bound = theorem_1(p, BATCH, DELTA)
        assert bound is not None
        clients = Trials.draw(trials, p, seed)
        failures = [
            float((clients.errors(estimates, local) > 0).mean())
            for _, estimates, local in islice(attack(clients, _ONE_BATCH, seed), bound)
        ]
        row: dict[str, Any] = {"table": "theorem 1", "p": p, "bound": bound, "trials": trials, "failures": failures[-1]}
        rows.append(row | {"suffices": suffices(failures)})
    words = {"batch": BATCH, "delta": DELTA, "items": ITEMS}
    return scaffold.section("Theorem 1", _DATA, "theorem_1", rows, **words), rows


def _noisy(trials: int, seed: int, name: str, update: LocalUpdate, bound: Callable[..., NDArray[np.int64]]) -> Part:
    """Noisy messages (Eq. 3): Protocol 1 for Theorem 2, Protocol 3 with E = 1 for Theorem 3."""
    rows: list[Row] = []
    for p in track(RATES[:2], name.capitalize(), transient=True):
        for sigma in SIGMAS:
            clients = Trials.draw(trials, p, seed)
            bounds = bound(clients, p, sigma)
            at_bound, enough = _noisy_errors(clients, update, sigma, bounds, seed)
            median = float(np.median(bounds))
            row: dict[str, Any] = {"table": name, "p": p, "sigma": sigma, "bound": median, "trials": trials}
            failures = float((at_bound > EPSILON).mean())
            rows.append(row | {"failures": failures, "suffices": enough, "ratio": median / enough if enough else None})
    beta = ", with the beta that makes it least" if name == "theorem 2" else ""
    words = {"epsilon": EPSILON, "delta": DELTA, "beta": beta, "moves": STEP * SLOPE}
    return scaffold.section(name.capitalize(), _DATA, "noisy", rows, **words), rows


def _noisy_errors(
    clients: Trials, update: LocalUpdate, sigma: float, bounds: NDArray[np.int64], seed: int
) -> tuple[Matrix, int | None]:
    """Attack each client until its own bound; return its error then, and the T that is enough for all, if any is."""
    noise = np.random.default_rng([seed, NOISE])

    def messages(updates: NDArray[np.float32]) -> NDArray[np.float32]:
        # As one client with all their items: their noise comes from the same source, one after the other.
        items = updates.reshape(1, -1, FACTORS)
        zeros, chosen = np.zeros_like(items), np.zeros(1, np.int64)
        noisy = noisy_messages({"items": items}, {"items": zeros}, chosen, sigma, [noise], everywhere=False)
        return noisy["items"].reshape(updates.shape)

    at_bound, failures = np.full(len(bounds), np.nan), dict[int, float]()
    for t, estimates, local in islice(attack(clients, update, seed, messages), int(bounds.max())):
        due = bounds == t
        if due.any() or checkpoint(t):
            errors = clients.errors(estimates, local)
            at_bound[due] = errors[due]
            if checkpoint(t):
                failures[t] = float((errors > EPSILON).mean())
    place = suffices([*failures.values()])
    return at_bound, [*failures][place - 1] if place else None


def theorem_2(clients: Trials, p: float, sigma: float) -> NDArray[np.int64]:
    """Return each client's bound on T, the minimum over beta (Theorem 2)."""
    longest, tau = geometry(clients)
    beta = np.linspace(0, 1 - 2 * p, 1002)[1:-1, None]
    first = 2 * math.log(2 / DELTA) / (BATCH * (1 - 2 * p - beta) ** 2)
    second = 2 * (sigma * longest) ** 2 * math.log(4 * ITEMS / DELTA) / (BATCH * (STEP * beta * SLOPE * tau) ** 2)
    minimum: NDArray[np.int64] = np.ceil(np.maximum(first, second).min(axis=0)).astype(np.int64)
    return minimum


def theorem_3(clients: Trials, p: float, sigma: float) -> NDArray[np.int64]:
    """Return each client's bound on T (Theorem 3, Eq. 4)."""
    longest, tau = geometry(clients)
    signal = STEP * (1 - 2 * p) * SLOPE * tau
    bound = 2 * (sigma * longest) ** 2 * math.log(2 * ITEMS / DELTA) / (LABELLED * signal**2)
    return np.maximum(np.ceil(bound).astype(np.int64), 1)


def geometry(clients: Trials) -> tuple[float, Matrix]:
    """Return M, the largest norm of an item, and tau_c(epsilon) of each client, an order statistic."""
    scores = np.sort(np.abs(clients.local @ clients.items.T), axis=1)
    # The largest tau below which lie at most a share epsilon of the items.
    return float(np.linalg.norm(clients.items, axis=1).max()), scores[:, int(EPSILON * ITEMS)]


def suffices(failures: Sequence[float]) -> int | None:
    """Return from which place on, counted from 1, failures stay at delta or below; None if the last does not."""
    bad = [0, *(i for i, rate in enumerate(failures, 1) if rate > DELTA)]
    return bad[-1] + 1 if bad[-1] < len(failures) else None


# --- the gate's noise


def sanitise_rows(updates: NDArray[Any], nu: float, noise: np.random.Generator) -> Matrix:
    """Sanitise each changed item by itself; the others stay as they are."""
    rows = updates.reshape(-1, FACTORS).astype(np.float64)
    changed = rows.any(axis=1)
    rows[changed] = sanitise(Laplace(nu), rows[changed], _FLOOR, Clipping.UPDATE, [noise] * int(changed.sum()))
    return rows.reshape(updates.shape)


def _proposition_1(clients: Trials, seed: int) -> Part:
    """The information of a stolen vector that fits its client's labels about these labels."""
    local, trials = clients.local, len(clients.local)
    labelled = clients.cohort.features[:, 0].long().numpy().reshape(trials, LABELLED)
    labels = clients.cohort.targets.numpy().reshape(trials, LABELLED)

    def predict(users: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(np.sign(np.einsum("cnd,cd->cn", clients.items[labelled], users)))

    rows: list[Row] = []
    noise = np.random.default_rng([seed, NOISE])
    for nu in (0.0, *MULTIPLIERS):
        release = partial(sanitise_rows, nu=nu, noise=noise) if nu else None
        *_, (_, estimates, _) = islice(attack(clients, _ONE_BATCH, seed, release), _ASKED)
        own, stolen = predict(local), predict(vectors(estimates))
        eta, epsilon, error = ((one != other).mean(axis=1) for one, other in (
            (own, labels), (stolen, own), (stolen, labels)
        ))  # fmt: skip
        row: dict[str, Any] = {"table": "proposition 1", "nu": nu, "trials": trials, "eta": float(eta.mean())}
        holds = float((error <= epsilon + eta + 1e-12).mean())
        rows.append(row | {"epsilon": float(epsilon.mean()), "error": float(error.mean()), "holds": holds})
    words = {"labelled": LABELLED, "rate": _RATE, "asked": _ASKED}
    return scaffold.section("Proposition 1", _DATA, "proposition_1", rows, **words), rows
