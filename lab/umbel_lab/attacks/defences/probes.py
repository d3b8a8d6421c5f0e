"""One probe for each kind of fault. A probe runs the target with updates that show the fault, if it is there.

Each test that rests on chance has a false-alarm rate of at most `LEVEL`. An audit has at most sixteen: four of
clipping, one each of the global generator, low bits, integers, weights, the promised deviation and a pure claim, and
three of the noise for each of two numbers of rounds. So six right targets all pass with a probability of at least
1 - 6 x 16 x LEVEL = 99.0 % (Bonferroni), where 95 % is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from umbel.protocol.errors import NotApplicableError
from umbel_lab.attacks.defences import laws
from umbel_lab.attacks.defences.claims import BEYOND, Claim, Line, draw
from umbel_lab.attacks.defences.process import LAYOUT, Layout, Seen, Worker
from umbel_lab.attacks.defences.worker import DELTAS, EPSILONS

Matrix = NDArray[np.float64]

MENDS = {
    "too-little-noise": "Calibrate for the distance of any two clipped updates, which is two clip norms.",
    "no-pure-epsilon": "Claim a delta above 0, or add noise with a pure epsilon, such as Laplace noise.",
    "other-deviation": "Draw the noise that the attributes promise.",
    "no-noise": "Add noise, or claim nothing.",
    "no-composition": "Count releases: multiply noise by the root of the rounds, or refuse once a budget is spent.",
    "delta-too-large": "Take a delta far below one over the number of clients.",
    "clip-per-array": "Take one norm over all arrays together, then scale all of them by the same factor.",
    "unclipped": "Scale each update to at most the clip norm before the noise is added.",
    "clip-follows-data": "Fix the clip norm and the deviation in public, before any client's data is seen.",
    "seeded-noise": "Draw noise from the operating system's entropy: numpy.random.default_rng() without a seed.",
    "shared-noise": "Draw separate noise for each value.",
    "global-generator": "Draw from a generator that the target makes for itself, without a seed.",
    "bare-arrays": "Add noise to each array.",
    "integers-pass": "Refuse integer arrays, or return those that the server sent.",
    "records-pass": "Drop other records, or add noise to their numbers and count it.",
    "weights-from-data": "Give all clients the same weight.",
    "low-bits": "Round releases to a fixed public grid, such as a power of two below the deviation over 1000.",
    "scalars-pass": "Treat 0-d arrays as arrays of one value: numpy.atleast_1d.",
    "nan-opens": "Refuse, or replace the update by 0, unless all its values are finite.",
    "nan-passes": "Refuse, or replace the update by 0, unless all its values are finite.",
    "zero-update": "Divide by the larger of norm and clip norm: update / max(1, norm / clip_norm).",
    "zero-epsilon": "Refuse an epsilon of 0 when the target is made.",
    "zero-delta": "Refuse a delta of 0 when the target is made, or use noise with a pure epsilon.",
}
"""How to mend each fault, by code."""

LEVEL, TESTS = 1e-4, 16
"""False-alarm rate of each test that rests on chance, and how many there are at most."""
Z = float(-special.ndtri(LEVEL))
"""The quantile of the normal law at `LEVEL`."""

N = 8
"""Values of an update with the usual layout."""

OPENING: Matrix = np.eye(N)[2]
"""The direction of the first update that both processes run."""

_FEW = 8  # canaries where one would show it
_SOME = 32  # canaries where noise could hide it
_MANY = 500  # canaries of each mean
_FAR = 1e4  # an update that clipping cannot leave so far out


@dataclass(frozen=True)
class Fault:
    """A fault that a probe found: its kind, a key of `MENDS`, and the observation."""

    code: str
    text: str

    @property
    def mend(self) -> str:
        """How to mend it."""
        return MENDS[self.code]


@dataclass(frozen=True)
class Subject:
    """A target under audit, with what is known of it so far.

    Two processes run it, `worker` and `again`; `opening` and `reopening` are their first releases, of one update.
    `facts` are what its attributes tell, and `lines` the canaries along one value and along all values. There are
    `clients` clients in all, or 0 if that is not given; `canaries` is their number where a rate is wanted.
    """

    worker: Worker
    again: Worker
    claim: Claim
    facts: Mapping[str, Any]
    lines: tuple[Line, Line]
    opening: Seen
    reopening: Seen
    canaries: int
    clients: int
    seed: int

    @property
    def share(self) -> float:
        """Distance of releases for each unit of distance of updates."""
        return float(self.facts["share"])

    @property
    def longest(self) -> float:
        """Length of the canaries' updates."""
        return longest_update(self.claim, self.facts)

    @property
    def claims(self) -> bool:
        """Whether it claims an epsilon, or at least adds noise."""
        return self.noisy or self.claim.epsilon is not None

    @property
    def alike(self) -> Matrix:
        """The releases (m, n) of one update, in all rounds."""
        seen = self.lines[0].seen
        alike: Matrix = seen.left[(self.lines[0].coins > 0)[:, None] & ~seen.gone]
        return alike

    @property
    def deviations(self) -> Matrix:
        """The deviation of each value (n,), for canaries with the same update."""
        left = self.alike
        deviations: Matrix = np.where(np.ptp(left, axis=0) > 0, left.std(axis=0), 0.0)
        return deviations

    @property
    def deviation(self) -> float:
        """The largest deviation of a value."""
        return float(self.deviations.max())

    @property
    def offset(self) -> Matrix:
        """The difference (n,) of the first release and its update."""
        expected = self.facts["baseline"] + self.share * self.claim.unit * OPENING
        offset: Matrix = self.opening.left[0, 0] - expected
        return offset

    @property
    def noisy(self) -> bool:
        """Whether any value has noise, if only the same noise each time."""
        others = np.delete(self.offset, OPENING.argmax())
        return bool((self.deviations > 0).any() or (np.abs(others) > 1e-3 * self.share * self.claim.unit).any())

    @property
    def changes(self) -> bool:
        """Whether it changes updates at all."""
        return self.lines[0].length(self.share)[0] < 0.99 * self.longest

    @property
    def longest_step(self) -> float:
        """The most by which a canary's update can have moved a value, or its release along all values."""
        return max(length + Z * error for length, error in (line.length(1.0) for line in self.lines))

    @property
    def far(self) -> float:
        """A length at which an update can leave only unclipped."""
        return _FAR * (self.claim.unit + self.deviation / self.share)

    def released(self, rounds: int) -> int:
        """Return the most releases that a canary made in so many rounds: a budget may have ended."""
        return max(int((~line.seen.gone[:, :rounds]).sum(axis=1).max()) for line in self.lines)

    def law(self, level: float) -> laws.Fit | None:
        """Return the law of the noise of one value, if it passed a test and bounded updates make it a mechanism."""
        single, joint = (laws.fit(*line.first, level) for line in self.lines)
        if not (self.claim.bounded and single):
            return None
        # Gaussian noise is so along each line; Laplace noise of each value is so along one value alone.
        return single if single.law == laws.LAPLACE or (joint and not self.vector) else None

    @property
    def vector(self) -> bool:
        """Whether the noise of all values together passed a test for a Laplace law of their norm."""
        if self.claim.clip_norm is None or not self.noisy:
            return False
        # The norm of separate Laplace noise in each value is much alike.
        separate = laws.p_value(*self.lines[0].first, laws.LAPLACE) > laws.FIT_LEVEL
        return not separate and laws.joint(self.alike) == laws.VECTOR

    def same(self, update: Matrix, canaries: int, layout: Layout = LAYOUT, **options: Any) -> Seen:
        """Return what leaves for canaries that all have the same update."""
        return self.worker.run(update[None], np.zeros(canaries, np.int64), layout=layout, **options)


def longest_update(claim: Claim, facts: Mapping[str, Any]) -> float:
    """Return the length of the canaries' updates."""
    return claim.unit * (BEYOND if facts["clips"] else 1.0)


Faults = Iterator[Fault]


def bare_arrays(subject: Subject) -> Faults:
    """An array whose values all leave without noise, beside others with noise."""
    if not subject.noisy:
        yield Fault("no-noise", "equal updates leave as equal releases: there is no noise")
        return
    parts = np.split(subject.deviations, _ends(LAYOUT))
    names = [name for (name, _, _), part in zip(LAYOUT, parts, strict=True) if not part.any()]
    if bare := [name for name in names if name not in subject.opening.lacking]:
        yield Fault("bare-arrays", f"no noise on array {', '.join(bare)}")


def _ends(layout: Layout) -> NDArray[np.int64]:
    """Return the places at which a flat update is cut into its arrays."""
    return np.cumsum([math.prod(shape) for _, shape, _ in layout])[:-1]


def clipping(subject: Subject) -> Faults:
    """Updates that leave longer than the clip norm: not clipped, by a norm that grows with them, or array by array."""
    claim, clips = subject.claim, subject.facts["clips"]
    lengths = [line.length(subject.share) for line in subject.lines]
    reaches = (claim.unit, claim.reach(N))
    excess = [
        length for (length, error), reach in zip(lengths, reaches, strict=True) if length - Z * error > reach * 1.001
    ]
    if clips and lengths[1][0] > subject.longest / 2:
        yield Fault("unclipped", f"an update of norm {subject.longest:g} leaves at full length")
    elif clips and (growth := _growth(subject)):
        yield Fault("clip-follows-data", growth)
    elif claim.bounded and excess:
        per_array = abs(excess[-1] / (math.sqrt(len(LAYOUT)) * claim.unit) - 1) < 0.05
        why = "one clip norm for each array" if per_array else "longer than the clip norm"
        yield Fault("clip-per-array", f"an update leaves with norm {excess[-1]:.3g}: {why}")


def _growth(subject: Subject) -> str:
    """Return how a long update leaves other than one of 10 clip norms; empty if it does not."""
    long, near = subject.lines[1], 10 * subject.claim.unit
    short = draw(subject.worker, long.direction, near, min(2 * _MANY, subject.canaries), 1, subject.seed + 1)
    (far, error), (length, other) = (line.length(subject.share) for line in (long, short))
    if far - length > Z * math.hypot(error, other) + 1e-3 * length:
        return f"updates of norm {near:g} and {subject.longest:g} leave with {length:.3g} and {far:.3g}"
    if subject.noisy:
        ours, theirs = (line.first[0] - np.median(line.first[0]) for line in (long, short))
        # Equal values must stay equal, though their sums were rounded.
        grid = 1e-6 * float(np.abs(ours).max()) or 1.0
        far_noise, near_noise = (np.rint(np.abs(noise[:_MANY]) / grid) for noise in (ours, theirs))
        if stats.ks_2samp(far_noise, near_noise).pvalue < LEVEL:
            spread = (float(np.sqrt(np.square(noise).mean())) for noise in (theirs, ours))
            return "the noise of a short update has a deviation of {:.3g}, of a long one {:.3g}".format(*spread)
    return ""


def seeded_noise(subject: Subject) -> Faults:
    """Noise that comes again: for another client, in another round, in another process, or for another array."""
    left = subject.opening.left
    if len(np.unique(left[0, 0])) < N // 2:
        return  # so few values come again by chance
    places = {
        "for another client": (left[0], left[1]),
        "in the next round": (left[0, 0], left[0, 1]),
        "in another process": (left, subject.reopening.left),
    }
    if again := [place for place, pair in places.items() if np.array_equal(*pair)]:
        text = f"the same noise comes again {' and '.join(again)}, so the difference of two releases has none"
        yield Fault("seeded-noise", text)
        return
    parts = np.split(subject.offset, _ends(LAYOUT))
    shortest = min(map(len, parts))
    if all(part[:shortest].any() and np.allclose(part[:shortest], parts[0][:shortest], rtol=1e-4) for part in parts):
        yield Fault("shared-noise", "all arrays get the same noise, so the difference of two values has none")


def global_generator(subject: Subject) -> Faults:
    """Noise that an app knows if it seeds the global generators, as many do for reproducibility."""
    seen, line = subject.same(OPENING * subject.claim.unit, _SOME, seed=1), subject.lines[0]
    # If releases come again without a seed, by chance or not, this tells nothing.
    _, counts = np.unique(line.seen.left[line.coins > 0, 0], axis=0, return_counts=True)
    if (counts.max() / counts.sum()) ** (_SOME - 1) < LEVEL and (seen.left == seen.left[0]).all():
        yield Fault("global-generator", "an app that seeds numpy.random, random or torch knows the noise")


def low_bits(subject: Subject) -> Faults:
    """Floats whose lattice depends on the update (Mironov, 2012): among releases of like size, finer for one update.

    If the update told nothing, the finest releases of a size would be those of either update as often as there are
    releases of it. That has the probability of an urn (hypergeometric), times the number of sizes.
    """
    if subject.deviations[0] == 0:
        return
    updates = np.zeros((2, N))
    updates[0, 0] = updates[1, 1] = subject.longest
    which = np.arange(2 * subject.canaries) % 2
    first = subject.worker.run(updates, which).left[:, 0, 0]
    there = np.isfinite(first) & (first != 0)
    which, (sizes, zeros) = which[there], _bits(first[there])
    chances = []
    for size in np.unique(sizes):
        one, other = (zeros[(sizes == size) & (which == choice)] for choice in (0, 1))
        for ours, theirs in ((one, other), (other, one)):
            if len(ours) and len(theirs) and (finer := int((ours < theirs.min()).sum())):
                total = len(ours) + len(theirs)
                chances.append((stats.hypergeom.sf(finer - 1, total, len(ours), finer), finer / total))
    # Each size has two tests at most.
    if chances and min(chances)[0] * 2 * len(np.unique(sizes)) < LEVEL:
        share = f"{min(chances)[1]:.0%} of releases of like size"
        yield Fault("low-bits", f"the last bits tell which update it was, in {share}")


def _bits(values: Matrix) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the binary exponent of each value, and the number of zeros at the end of its 53 bits."""
    mantissas, exponents = np.frexp(values)
    whole = np.abs(np.ldexp(mantissas, 53)).astype(np.int64)
    zeros: NDArray[np.int64] = np.log2((whole & -whole).astype(np.float64)).astype(np.int64)
    return exponents.astype(np.int64), zeros


def scalars(subject: Subject) -> Faults:
    """A 0-d array that leaves as it is."""
    if not subject.noisy and not subject.changes:
        return
    far = subject.far
    values = [far] * bool(subject.facts["clips"]) + [subject.claim.unit / 2] * bool(subject.deviations.any())
    for value in values:
        update = np.append(subject.claim.unit / 4 * OPENING, value)
        seen = subject.same(update, _FEW, (*LAYOUT, ("s", (), "<f4")), rounds=2)
        if seen.gone.all() or "s" in seen.lacking:
            return
        scalar = seen.left[~seen.gone][:, -1]
        if np.allclose(scalar, subject.share * value, rtol=1e-6):
            yield Fault("scalars-pass", "a 0-d array leaves as it is")
            return
        if value == far and subject.changes and np.median(scalar) > subject.share * far / 2:
            yield Fault("scalars-pass", "a 0-d array leaves unclipped")
            return


def integers(subject: Subject) -> Faults:
    """Integer arrays that pass as they are, or with noise that is cut to 0."""
    for whole in (7.0, max(1.0, math.floor(subject.claim.unit))):
        counts = np.array([whole, 0.0])
        seen = subject.same(np.append(np.zeros(N), counts), _SOME, (*LAYOUT, ("count", (2,), "<i8")), rounds=2)
        if seen.gone.all() or "count" in seen.lacking:
            continue
        same = (seen.left[~seen.gone][:, N:] == counts).all(axis=1)
        if same.mean() >= 0.75:
            yield Fault("integers-pass", f"integer arrays leave as they are in {same.sum()} of {len(same)} releases")
            return


def not_finite(subject: Subject) -> Faults:
    """NaN or infinity, which may switch clipping off, or pass."""
    each = subject.far / math.sqrt(N)
    opens, passes = [], []
    for name, value in (("NaN", np.nan), ("infinity", np.inf)):
        seen = subject.same(np.append(value, np.full(N - 1, each)), _FEW)
        if seen.gone.all():
            continue
        left = _first(seen)
        rest = left[:, 1:]
        if subject.facts["clips"] and np.isfinite(rest).all() and np.median(rest) > subject.share * each / 2:
            opens.append(name)
        elif not np.isfinite(left).all():
            passes.append(name)
    if opens:
        yield Fault("nan-opens", f"one value of {' or '.join(opens)} lets all others leave unclipped")
    if passes:
        yield Fault("nan-passes", f"the release shows that an update has {' or '.join(passes)}")


def _first(seen: Seen) -> Matrix:
    """Return the first releases (m, n) of the canaries that release something."""
    first: Matrix = seen.left[~seen.gone[:, 0], 0]
    return first


def zero_update(subject: Subject) -> Faults:
    """An update of 0, which may divide by its norm."""
    seen = subject.same(np.zeros(N), _FEW)
    if seen.gone.all() and not subject.lines[0].seen.gone[:, 0].any():
        yield Fault("zero-update", f"an update of 0 raises {seen.errors[0]}")
    elif not seen.gone.all() and not np.isfinite(_first(seen)).all():
        yield Fault("zero-update", "an update of 0 leaves as NaN")


def records(subject: Subject) -> Faults:
    """Numbers beside the arrays that leave as they are: losses, numbers of rows."""
    update = subject.claim.unit * OPENING
    others = subject.same(update, _FEW, losses=(0.25, 0.75), examples=(10, 1000)).others
    exact = []
    for key in sorted({key for numbers in others for key in numbers}):
        here, there = (np.array([numbers.get(key, np.nan) for numbers in others[start::2]]) for start in (0, 1))
        # A mean of several clients is rounded as the order of their replies has it.
        if abs(here[0] - there[0]) > 1e6 * max(np.ptp(here), np.ptp(there)):
            exact.append(key)
    if exact:
        yield Fault("records-pass", f"exact numbers leave beside the arrays: {', '.join(exact)}")


def weights(subject: Subject) -> Faults:
    """A client that moves the mean further the more rows it reports."""
    if subject.share == 1 or subject.facts["rows"]:
        return
    direction = subject.lines[1].direction
    update = subject.longest * np.stack([direction, -direction])
    which = np.arange(min(2 * _MANY, subject.canaries)) % 2
    seen = subject.worker.run(update, which, examples=(1000,))
    if seen.gone.any():
        return
    length, error = Line(direction, 1 - 2 * which, seen).length(1.0)
    reach = subject.share * subject.claim.reach(N)
    if length - Z * error > 1.01 * reach:
        text = f"a client that reports 1000 rows moves the mean by {length:.3g}, not {reach:.3g}"
        yield Fault("weights-from-data", text)


def nothing_allowed(subject: Subject) -> Faults:
    """An epsilon or delta of 0 that is accepted, and divided by."""
    codes = dict.fromkeys(EPSILONS, "zero-epsilon") | dict.fromkeys(DELTAS, "zero-delta")
    for name, code in codes.items():
        if name not in subject.facts["given"]:
            continue
        try:
            subject.again.open(**{name: 0})
            seen = subject.again.run(subject.claim.unit * OPENING[None], [0] * _FEW)
        except NotApplicableError:
            continue  # refused, as it should be
        finally:
            subject.again.open()
        if seen.gone.all():
            yield Fault(code, f"{name} = 0 is accepted, and then each release raises {seen.errors[0]}")
        elif not np.isfinite(_first(seen)).all():
            yield Fault(code, f"{name} = 0 is accepted, and then NaN or infinity leaves")
        elif np.ptp(_first(seen), axis=0).max() < 1e-6 * subject.share * subject.claim.unit:
            yield Fault(code, f"{name} = 0 is accepted, and then there is no noise")


def delta(subject: Subject) -> Faults:
    """A delta so large that some client may be revealed in full."""
    if subject.clients and subject.claim.epsilon is not None and subject.claim.delta > 1 / subject.clients:
        text = f"delta {subject.claim.delta:g} is above 1/{subject.clients}, so one client may be revealed in full"
        yield Fault("delta-too-large", text)


_ON_NOISE = (seeded_noise, global_generator, low_bits, integers, weights)
_ON_CLAIMS = (bare_arrays, clipping, not_finite, records)
_PROBES: tuple[Callable[[Subject], Faults], ...] = (
    bare_arrays, clipping, seeded_noise, global_generator, low_bits, scalars, integers, not_finite,
    zero_update, records, weights, nothing_allowed, delta,
)  # fmt: skip
"""All probes that need no figures; some need noise, and some at least a claim."""


def probe(subject: Subject) -> Faults:
    """Yield the faults that need no figures."""
    idle = () if subject.noisy else _ON_NOISE if subject.claims else (*_ON_NOISE, *_ON_CLAIMS)
    for each in _PROBES:
        if each not in idle:
            yield from each(subject)
