"""The attack on rows in each mode of release, the errors of its answers, and their table.

In a mode with noise the server first tries designs (the number, position and clip norm of hypotheses) on hospitals that
it makes up from those it knows. It takes the best, asks the victims once, and answers with the posterior mean under the
mechanism's distribution. Without noise it computes the rows from one release. If it may ask often and the choice is
open, it reads digit after digit from the choices, for any amount of noise.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from umbel.data import find_typed, open_dataset
from umbel.privacy.accounting.guarantee import in_words
from umbel.privacy.mechanisms import choice
from umbel.privacy.mechanisms.laplace import Laplace
from umbel.protocol.arrays import flatten
from umbel.protocol.errors import ConfigError
from umbel.protocol.project import CONFIGS
from umbel.protocol.release import Clipping, ReleaseBy
from umbel_lab.attacks.rows import probes
from umbel_lab.attacks.rows.hospitals import (
    FEATURES,
    PAYMENT,
    PLACE,
    QUANTITIES,
    SERVICE,
    Data,
    Hospitals,
    public_guess,
    victims,
)
from umbel_lab.attacks.rows.posterior import Law, log_likelihood, site_log_likelihood, weights
from umbel_lab.attacks.rows.probes import OPEN, N, Probe, train
from umbel_lab.attacks.victims import SITE, Mode, Victims
from umbel_lab.output import Page, Section

Matrix = NDArray[np.float64]
Generator = np.random.Generator

EPSILONS = (2, 4, 8, 16)
"""Of ``configs/hospital-epsilon-*.toml``."""
MULTIPLIERS = (1.0, 3.0, 10.0)
"""nu of the paper's heuristic."""
ASKED_OFTEN = 24
"""Releases of a client in the 500 rounds of ``configs/hospital.toml``, where 100 of 2062 take part in each."""
_EVERYWHERE = {"max-hypotheses": 10, "max-local-epochs": 100, "clip-norm-floor": 0.01}


def modes() -> list[Mode]:
    """Return all modes."""
    found = [Mode("no noise", 0.0, policy={**_EVERYWHERE, "allow-unsanitised": True})]
    for releases in (1, ASKED_OFTEN):
        found += [
            Mode("paper's heuristic", nu, releases=releases, policy={**_EVERYWHERE, "min-noise-multiplier": nu})
            for nu in MULTIPLIERS
        ]
    found += [formal(epsilon) for epsilon in EPSILONS]
    found += [formal(epsilon, ReleaseBy.SITE) for epsilon in EPSILONS]
    return [*found, *(formal(epsilon, ReleaseBy.SITE, others_known=True) for epsilon in EPSILONS[2:])]


def formal(epsilon: int, by: ReleaseBy = ReleaseBy.CLIENT, others_known: bool = False) -> Mode:
    """Return the mode of ``configs/hospital-epsilon-*.toml``, at a site that accepts it with a budget of `epsilon`."""
    file = CONFIGS / f"hospital-epsilon-{epsilon}.toml"
    config = tomllib.loads(file.read_text(encoding="utf-8"))
    nu, choice = float(config["noise-multiplier"]), float(config["choice-epsilon"])
    policy = {
        **_EVERYWHERE,
        "clipping": "public",
        "min-noise-multiplier": nu,
        "max-choice-epsilon": choice,
        "budget": float(epsilon),
        "max-participations": int(config["max-participations"]),
        "release": str(by),
    }
    name = "formal, a client's release"
    if by is ReleaseBy.SITE:
        policy["min-clients"] = SITE
        name = f"formal, a site's sums of {SITE}" + (", others known" if others_known else "")
    return Mode(name, nu, choice, Clipping.PUBLIC, by, others_known=others_known, policy=policy)


def ask(node: Victims, mode: Mode, probe: Probe, clip_norm: float, clients: Sequence[int]) -> tuple[Matrix, Matrix]:
    """Return the releases of clients (m, n), or a site's sums (k, n) and counts (k,), as `Victims.ask` does."""
    arrays, counts = node.ask(mode, probes.as_arrays(probe.hypotheses), clients, **probe.asked(clip_norm))
    return flatten(arrays), counts


CLIENTS = 300
"""Maximum number of victims of each kind."""

FEW = 20
"""Victims if each is asked often, with separate hypotheses."""

_EPOCHS = 20
_CANDIDATES = 2000
_FLOOR = 0.01  # the smallest clip norm if it is the norm of the update
_IN_SITES = 1200  # candidates there, where each is weighted with many artificial others
# For the choice of a design: pilots, and candidates.
_PILOTS, _TRIED = 200, 500
_OTHERS = 50  # artificial sets of a site's other clients
# Numbers of hypotheses, and their distances: at quantiles of the known values, or at a share of the way there.
_FORMAL = ((1, 1.0), (2, 1.0), (2, 0.2), (4, 1.0))
_BY_SITE = ((1, 1.0), (2, 1.0))
_RADII = (0.25, 1.0, 2.5)  # of the median norm of an update
_BOOTSTRAPS = 1000
_GATE, _ATTACK = 1, 2  # streams of the seed


@dataclass(frozen=True)
class Finding:
    """How well one quantity of clients of one kind is found in one mode.

    `releases` and `rows` are numbers for each client; for a guess without a release the noise multiplier is None.
    `claimed` is the pure epsilon in the node's ledger, "none" without a guarantee, empty for a guess. `relative` is the
    root mean square error relative to guessing the mean, `low` and `high` its 95 % bootstrap interval over clients.
    `error` is the root mean square error in `unit`, for a place the length of the error; `right` the share of correctly
    guessed services.
    """

    mode: str
    noise_multiplier: float | None
    releases: int
    rows: int
    quantity: str
    claimed: str
    relative: float
    low: float
    high: float
    error: float
    unit: str
    right: float | None
    clients: int


def audit(dataset: str = "hospital", clients: int = CLIENTS, seed: int = 0) -> list[Finding]:
    """Attack up to `clients` hospitals of each kind of a dataset, given by name or path, in all modes.

    One thread computes, so that the digits do not depend on the number of cores. Raises `DatasetError` if the dataset
    is missing or has no such rows, and `FleetError` if the gate refuses, as it does under a stricter policy in the
    environment.
    """
    if clients < SITE:
        text = f"the audit needs at least {SITE} clients, as many as in a site's sums; got {clients}"
        raise ConfigError(text, code="config.too-few-clients")
    data = Data.of(open_dataset(find_typed(dataset)), seed)
    torch.set_num_threads(1)
    found: list[Finding] = []
    kinds = [(mode, rows) for mode in modes() for rows in data.victims]
    for rows in data.victims:
        found += guesses(data, _asked(data, rows, clients), rows)
    for mode, rows in track(kinds, "modes", console=Console(stderr=True), transient=True):
        found += attack(data, mode, rows, _asked(data, rows, clients), seed)
    return found


def _asked(data: Data, rows: int, clients: int) -> Hospitals:
    """Return the victims with so many rows: as many whole sites as there are."""
    there = min(clients, len(data.victims[rows]))
    return data.victims[rows].some(slice(0, max(SITE, there // SITE * SITE)))


def guesses(data: Data, asked: Hospitals, rows: int) -> list[Finding]:
    """Return the errors without any release: of the mean, and of a model that knows services and places."""
    known, mode = data.known[rows], Mode("the mean", 0.0)
    found = [
        _finding(data, mode, asked, quantity, *_prior(known, quantity, len(asked))) for quantity in _quantities(rows)
    ]
    public, mode = public_guess(known, asked), Mode("public model, given service and place", 0.0)
    return [*found, _finding(data, mode, asked, PAYMENT, public, public)]


def attack(data: Data, mode: Mode, rows: int, asked: Hospitals, seed: int) -> list[Finding]:
    """Attack victims in one mode, with a probe for each quantity; return the findings."""
    known = data.known[rows]
    if mode.releases > 1:
        asked = asked.some(slice(0, FEW))
    generator = np.random.default_rng([seed, _ATTACK, rows])
    gate_seed = int(np.random.SeedSequence([seed, _GATE]).generate_state(1)[0])
    read: Hospitals | None = None
    found = []
    with victims(asked, data.manifest) as folder:
        node = Victims(folder, mode.policy, gate_seed)
        if not mode.noise_multiplier:
            read = _without_noise(mode, known, asked, node, generator)
        elif mode.releases > 1:
            read = _digit_by_digit(mode, known, asked, node)
        for quantity in _quantities(rows):
            if read is None:
                # For each quantity a fresh set of clients: each is asked no more than the mode allows.
                node = Victims(folder, mode.policy, gate_seed)
                mean, likeliest = _once(mode, known, asked, node, quantity, generator)
            else:
                mean = likeliest = read.secret(quantity)
                if quantity == SERVICE:
                    services = np.unique(known.features[..., 0])
                    likeliest = services[np.abs(mean - services).argmin(axis=1)][:, None]
            claimed = in_words(node.claimed(0))[0]
            found.append(_finding(data, mode, asked, quantity, mean, likeliest, claimed))
    return found


def _quantities(rows: int) -> tuple[str, ...]:
    """Return the quantities to find: hospitals with all services have no secret service."""
    return QUANTITIES if rows == 1 else (PLACE, PAYMENT)


# --- one release with noise


def _once(
    mode: Mode, known: Hospitals, asked: Hospitals, node: Victims, quantity: str, generator: Generator
) -> tuple[Matrix, Matrix]:
    """Ask once, with the best design for a quantity; return the posterior mean and the most likely value."""
    probe, law = design_for(mode, known, quantity, generator)
    candidates = known.blurred(_IN_SITES if mode.by_site else _CANDIDATES, generator)
    size = SITE if mode.by_site else len(asked)
    groups = [range(at, at + size) for at in range(0, len(asked), size)]
    seen = [ask(node, mode, probe, law.clip_norm, clients) for clients in groups]
    posterior = _posterior(mode, probe, law, seen, asked, candidates, known, generator)
    secret = candidates.secret(quantity)
    return posterior @ secret, _likeliest(posterior, secret[:, 0])


def law_of(mode: Mode, probe: Probe, clip_norm: float) -> Law:
    """Return the distribution of a release in this mode."""
    several = len(probe.hypotheses) > 1
    return Law(mode.noise_multiplier, clip_norm, mode.public, mode.choice_epsilon if several else 0.0)


def design_for(mode: Mode, known: Hospitals, quantity: str, generator: Generator) -> tuple[Probe, Law]:
    """Return the design that finds most of a quantity of hospitals made up from the known ones."""
    pilots, candidates = known.blurred(_PILOTS, generator), known.blurred(_TRIED, generator)
    truth, secret = pilots.secret(quantity), candidates.secret(quantity)

    def off(design: tuple[Probe, Law]) -> float:
        seen = _made_up(mode, *design, pilots, generator)
        posterior = _posterior(mode, *design, seen, pilots, candidates, known, generator)
        return float(np.square(posterior @ secret - truth).sum())

    return min(designs(mode, known, quantity), key=off)


def designs(mode: Mode, known: Hospitals, quantity: str) -> Iterator[tuple[Probe, Law]]:
    """Yield possible designs of a single request for a quantity, with the distributions of the releases."""
    formal = mode.choice_epsilon > 0
    for column in probes.AIMS[quantity]:
        value = probes.aimed_at(known, column)
        for k, spread in _BY_SITE if mode.by_site else _FORMAL if formal else [(OPEN, 1.0)]:
            centres = np.quantile(value, (np.arange(k) + 0.5) / k)
            centres = np.median(value) + spread * (centres - np.median(value))
            apart = np.abs(value[:, None] - centres)
            reach = float(np.quantile(apart if formal else apart.min(axis=1), 0.95))
            probe = probes.probe_for(column, centres, _EPOCHS, max(reach, 1e-3))
            updates, chosen = train(probe, known.some(slice(0, _TRIED)))
            norms = np.linalg.norm(updates, axis=-1)
            for factor in (_RADII[:2] if mode.by_site else _RADII) if mode.public else (None,):
                clip_norm = _FLOOR if factor is None else max(_FLOOR, factor * float(np.median(norms)))
                own = norms[np.arange(len(norms)), chosen]
                longest = clip_norm if factor is not None else float(own.max())
                deviation = Laplace(mode.noise_multiplier).deviation(N) * longest
                marked = probe.marked(deviation)
                yield marked, law_of(mode, marked, clip_norm)


Seen = list[tuple[Matrix, Matrix]]
"""Each site's sums (k, n) and counts (k,); if clients release, one entry with all releases (m, n)."""


def _made_up(mode: Mode, probe: Probe, law: Law, pilots: Hospitals, generator: Generator) -> Seen:
    """Return artificial releases of pilots."""
    updates, chosen = train(probe, pilots)
    k, mechanism = len(probe.hypotheses), Laplace(law.noise_multiplier)
    if not mode.by_site:
        if law.choice_epsilon:
            assigned = choice.draw(law.choice_epsilon, k, [generator] * len(pilots))
            chosen = np.where(assigned == choice.OWN, chosen, assigned)
        own = updates[np.arange(len(pilots)), chosen]
        noise = mechanism.noise([N], law.clip_norms(own)[:, None], repeat(generator))
        return [(probe.hypotheses[chosen] + law.clipped(own) + noise, np.empty(0))]
    seen = []
    for at in range(0, len(pilots), SITE):
        sums, counts = _summed(law, updates[at : at + SITE][None], chosen[at : at + SITE][None])
        noise = mechanism.noise([N] * k, np.full((1, k), law.clip_norm), repeat(generator))
        if k > 1:
            clip_norm = np.full((1, k), mechanism.count_radius(law.choice_epsilon))
            counts = counts + mechanism.noise([1] * k, clip_norm, repeat(generator))
        seen.append((sums[0] + noise.reshape(k, N), counts[0]))
    return seen


def _posterior(
    mode: Mode,
    probe: Probe,
    law: Law,
    seen: Seen,
    asked: Hospitals,
    candidates: Hospitals,
    known: Hospitals,
    generator: Generator,
) -> Matrix:
    """Return the posterior (clients, candidates) of each asked client.

    It averages over the other clients of a site: many sets of them are made up, and the posterior is the same for all
    clients of a site. In a mode where the server knows the others, it subtracts their updates.
    """
    updates, best = train(probe, candidates)
    if not mode.by_site:
        return weights(log_likelihood(law, probe.hypotheses, seen[0][0], updates, best))
    if not mode.others_known:
        made_up, chosen = train(probe, known.blurred(_OTHERS * (SITE - 1), generator))
        made_up = made_up.reshape(_OTHERS, SITE - 1, *made_up.shape[1:])
        others = _summed(law, made_up, chosen.reshape(_OTHERS, SITE - 1))
        logs = [site_log_likelihood(law, *site, updates, best, *others) for site in seen]
        return np.repeat(weights(np.array(logs)), SITE, axis=0)
    theirs, chosen = train(probe, asked)
    logs = []
    for client in range(len(asked)):
        site = client // SITE
        peers = [other for other in range(site * SITE, (site + 1) * SITE) if other != client]
        others = _summed(law, theirs[peers][None], chosen[peers][None])
        logs.append(site_log_likelihood(law, *seen[site], updates, best, *others))
    return weights(np.array(logs))


def _summed(law: Law, updates: Matrix, chosen: NDArray[np.int64]) -> tuple[Matrix, Matrix]:
    """Return sums (s, k, n) and counts (s, k) of sites whose clients have updates (s, clients, k, n)."""
    member = (chosen[..., None] == np.arange(updates.shape[2])).astype(np.float64)
    sums: Matrix = np.einsum("sckn,sck->skn", law.clipped(updates), member)
    return sums, member.sum(axis=1)


def _likeliest(posterior: Matrix, values: Matrix) -> Matrix:
    """Return the most probable of the values (c,) by a posterior (m, c) as (m, 1)."""
    kinds, place = np.unique(values, return_inverse=True)
    if len(kinds) > len(values) // 2:
        return posterior @ values[:, None]
    mass = np.stack([posterior[:, place == i].sum(axis=1) for i in range(len(kinds))], axis=1)
    likeliest: Matrix = kinds[mass.argmax(axis=1)][:, None]
    return likeliest


# --- many releases with an open choice


def _digit_by_digit(mode: Mode, known: Hospitals, asked: Hospitals, node: Victims) -> Hospitals:
    """Ask each client repeatedly, with ever nearer hypotheses: its choice stands out from any noise.

    The update is so short that the clip norm is at its floor, and the hypotheses are far apart.
    """
    rows, services = known.rows, np.unique(known.features[0, :, 0])
    width = float(np.diff(services).min()) if rows > 1 else 1.0
    # From any service on, if there is one row.
    least = services if rows > 1 else np.full(1, known.features[..., 0].min() - width)
    base = float(np.median(known.payments))
    noise = Laplace(mode.noise_multiplier).deviation(N) * _FLOOR
    columns = [column for quantity in _quantities(rows) if quantity != PAYMENT for column in probes.AIMS[quantity]]
    usual = [known.payments[:, i:].mean(axis=1) for i in range(rows)]
    usual += [known.features[:, 0, column] for column in columns]
    found = np.empty((len(asked), len(usual)))
    for client, i in np.ndindex(found.shape):
        slack = 0.1 * float(np.ptp(usual[i]))
        low, high = float(usual[i].min()) - slack, float(usual[i].max()) + slack
        for _ in range(mode.releases // len(usual)):
            centres = low + (high - low) * (np.arange(OPEN) + 0.5) / OPEN
            if i < rows:
                probe = probes.tail_probe(float(least[i]), base, centres, width)
            else:
                probe = probes.feature_probe(columns[i - rows], centres, 1, 1e-6).marked(noise)
            release, _ = ask(node, mode, probe, _FLOOR, [client])
            nearest = int(np.linalg.norm(release - probe.hypotheses, axis=1).argmin())
            half = (high - low) / OPEN / 2
            low, high = float(centres[nearest]) - half, float(centres[nearest]) + half
        found[client, i] = (low + high) / 2
    sums = found[:, :rows] * (rows - np.arange(rows))
    payments = -np.diff(sums, axis=1, append=0.0)
    features = np.zeros((len(asked), rows, FEATURES))
    features[:, 0, columns] = found[:, rows:] + probes.feature_shift(payments.mean(axis=1))[:, None]
    return Hospitals(features, payments)


# --- one release without noise


def _without_noise(mode: Mode, known: Hospitals, asked: Hospitals, node: Victims, generator: Generator) -> Hospitals:
    """Compute the rows from one release without noise."""
    probe = probes.single_row_probe(known) if known.rows == 1 else probes.all_rows_probe(known)
    releases, _ = ask(node, mode, probe, _FLOOR, range(len(asked)))
    if known.rows == 1:
        return probes.read_row(probe, releases)
    return probes.fit_rows(probe, releases - probe.hypotheses[0], known.blurred(_CANDIDATES, generator))


# --- errors


def _prior(known: Hospitals, quantity: str, clients: int) -> tuple[Matrix, Matrix]:
    """Return the guess without a release: the mean, and the most frequent service."""
    secret = known.secret(quantity)
    even = np.full((clients, len(secret)), 1 / len(secret))
    return np.repeat(secret.mean(axis=0)[None], clients, axis=0), _likeliest(even, secret[:, 0])


def _finding(
    data: Data, mode: Mode, asked: Hospitals, quantity: str, mean: Matrix, likeliest: Matrix, claimed: str = ""
) -> Finding:
    """Return the errors of answers: means (m, numbers) and, for a service, the most likely (m, 1); no claim for a
    guess."""
    truth = asked.secret(quantity)
    prior, _ = _prior(data.known[asked.rows], quantity, len(asked))
    off, usual = (np.square(values - truth).sum(axis=1) for values in (mean, prior))
    # Clients of a site are found together, or not at all.
    size = SITE if mode.by_site else 1
    groups = np.stack([off, usual], axis=1).reshape(-1, size, 2).sum(axis=1)
    generator = np.random.default_rng(0)
    drawn = groups[generator.integers(len(groups), size=(_BOOTSTRAPS, len(groups)))].sum(axis=1)
    low, high = np.quantile(np.sqrt(drawn[:, 0] / drawn[:, 1]), (0.025, 0.975))
    scale, unit = data.unit(quantity)
    # For payments the mean over rows; for a place both coordinates together.
    numbers = truth.shape[1] if quantity == PAYMENT else 1
    return Finding(
        mode.name,
        mode.noise_multiplier if claimed else None,
        mode.releases if claimed else 0,
        asked.rows,
        quantity,
        claimed,
        float(np.sqrt(off.sum() / usual.sum())),
        float(low),
        float(high),
        float(np.sqrt(off.mean() / numbers) * scale),
        unit,
        float((np.abs(likeliest - truth) < 1e-6).mean()) if quantity == SERVICE else None,
        len(asked),
    )


def page(dataset: str, seed: int, findings: Sequence[Finding]) -> Page:
    """Return a table for each kind of client, and the text below it."""
    sections = []
    for rows in dict.fromkeys(one.rows for one in findings):
        clients = max(one.clients for one in findings if one.rows == rows)
        own: dict[tuple[str, float | None, int], list[Finding]] = {}
        for one in findings:
            if one.rows == rows:
                own.setdefault((one.mode, one.noise_multiplier, one.releases), []).append(one)
        heading = f"Clients of {rows} row{'s' if rows > 1 else ''} ({clients} attacked)"
        columns = ("mode", "ν", "releases", "pure ε", *QUANTITIES)
        sections.append(Section(heading, "", columns, [_cells(some) for some in own.values()]))
    sections.append(Section("", "\n\n".join(NOTES)))
    title = f"What releases show of a hospital's rows ({Path(dataset).name}, seed {seed})"
    return Page(title, sections, [asdict(one) for one in findings])


NOTES = (
    "Root mean square error relative to guessing the mean of other hospitals (1: nothing learnt), with a 95 % "
    "bootstrap interval over clients; in brackets the same in the data's units, or how many services are guessed "
    f"right. Where clients are asked more than once, {FEW} are attacked. Epsilon is the node's own count, the "
    "largest where the attacks on the quantities cost differently.",
    "Each quantity is attacked by itself, by a server that may ask nothing else. A client of several rows has all "
    "services, which is no secret; its payments are all of its rows'. An attack that fails proves nothing.",
)


def _cells(some: Sequence[Finding]) -> tuple[str, ...]:
    first, by_quantity = some[0], {one.quantity: one for one in some}
    nu = "" if first.noise_multiplier is None else f"{first.noise_multiplier:g}"
    claims = [one.claimed for one in some]
    claimed = claims[0] if claims[0] in ("", "none") else max(claims, key=float)
    texts = (_text(by_quantity[quantity]) if quantity in by_quantity else "" for quantity in QUANTITIES)
    return first.mode, nu, str(first.releases or ""), claimed, *texts


def _text(one: Finding) -> str:
    amount = f"{_short(one.relative)} ({_short(one.low)} to {_short(one.high)})" if one.low < one.high else "1"
    if one.quantity == SERVICE:
        assert one.right is not None
        return f"{amount} [{one.right:.0%}]"
    digits = "< 0.001" if one.error < 0.001 else f"{one.error:,.0f}" if one.error >= 100 else f"{one.error:.3g}"
    return f"{amount} [{digits} {one.unit}]".replace(" ]", "]")


def _short(number: float) -> str:
    return f"{number:.2f}" if number >= 0.095 else f"{number:.1g}" if number >= 1e-4 else "0"
