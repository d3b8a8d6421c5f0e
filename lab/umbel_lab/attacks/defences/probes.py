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
from umbel_lab.attacks.defences.claims import Claim
from umbel_lab.attacks.defences.faults import Fault
from umbel_lab.attacks.defences.process import LAYOUT, Layout, Seen, Target, Worker
from umbel_lab.attacks.defences.trials import BEYOND, Line, draw
from umbel_lab.attacks.defences.worker.kinds import DELTAS, EPSILONS

Matrix = NDArray[np.float64]

LEVEL, TESTS = 1e-4, 16
"""False-alarm rate of each test that rests on chance, and how many there are at most."""

N = 8
"""Values of an update with the usual layout."""

OPENING: Matrix = np.eye(N)[2]
"""The direction of the first update that both processes run."""

_FEW = 8  # canaries where one would show it
_SOME = 32  # canaries where noise could hide it
_MANY = 500  # canaries of each mean
_GENERATORS = 10_000  # seeds that are tried
_FAR = 1e4  # an update that clipping cannot leave so far out


@dataclass(frozen=True)
class Subject:
    """A target under audit, with what is known of it so far.

    Attributes
    ----------
    worker, again : Worker
        Two processes that run it.
    target : Target
        Its name and arguments.
    claim : Claim
        The claim.
    facts : mapping
        The facts that its attributes tell.
    lines : sequence of Line
        The canaries along one value and along all values.
    opening, reopening : Seen
        The first releases of both processes, of one update.
    canaries : int
        Number of canaries where a rate is wanted.
    clients : int
        Number of clients in all; 0 if not given.
    seed : int
        Of the audit's draws.
    """

    worker: Worker
    again: Worker
    target: Target
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
        return self.claim.unit * (BEYOND if self.facts["clips"] else 1.0)

    @property
    def deviations(self) -> Matrix:
        """The deviation of each value (n,), for canaries with the same update."""
        left = self.alike
        found: Matrix = np.where(np.ptp(left, axis=0) > 0, left.std(axis=0), 0.0)
        return found

    @property
    def alike(self) -> Matrix:
        """The releases (m, n) of one update, in all rounds."""
        seen = self.lines[0].seen
        chosen = (self.lines[0].coins > 0)[:, None] & ~seen.gone
        found: Matrix = seen.left[chosen]
        return found

    @property
    def usual(self) -> float:
        """The share of the most frequent first release of one update."""
        line = self.lines[0]
        _, counts = np.unique(line.seen.left[line.coins > 0, 0], axis=0, return_counts=True)
        return float(counts.max() / counts.sum())

    @property
    def offset(self) -> Matrix:
        """The difference (n,) of the first release and its update."""
        expected = self.facts["baseline"] + self.share * self.claim.unit * OPENING
        found: Matrix = self.opening.left[0, 0] - expected
        return found

    @property
    def noisy(self) -> bool:
        """Whether any value has noise, if only the same noise each time."""
        others = np.delete(self.offset, OPENING.argmax())
        return bool((self.deviations > 0).any() or (np.abs(others) > 1e-3 * self.share * self.claim.unit).any())

    @property
    def longest_step(self) -> float:
        """The most by which a canary's update can have moved a value, or its release along all values."""
        return max(length + _z() * error for length, error in (_length(line, 1.0) for line in self.lines))

    def released(self, rounds: int) -> int:
        """Return the most releases that a canary made in so many rounds: a budget may have ended."""
        return max(int((~line.seen.gone[:, :rounds]).sum(axis=1).max()) for line in self.lines)

    def law(self, level: float) -> laws.Fit | None:
        """Return the law of the noise of one value, if it passed a test and bounded updates make it a mechanism."""
        bounded = self.claim.clip_norm is not None or self.claim.box is not None
        one, all_ = (laws.fit(*line.first, level) for line in self.lines)
        # Gaussian noise is so along each line; Laplace noise of each value is so along one value alone.
        return one if bounded and one and (one.law == laws.LAPLACE or (all_ and not self.vector)) else None

    @property
    def vector(self) -> bool:
        """Whether the noise of all values together passed a test for a Laplace law of their norm."""
        if self.claim.clip_norm is None or not self.noisy:
            return False
        # The norm of separate Laplace noise in each value is much alike.
        separate = laws.p_value(*self.lines[0].first, laws.LAPLACE) > laws.FIT_LEVEL
        return not separate and laws.joint(self.alike) == laws.VECTOR

    @property
    def deviation(self) -> float:
        """The largest deviation of a value."""
        return float(self.deviations.max())

    def same(self, update: Matrix, canaries: int, layout: Layout = LAYOUT, **options: Any) -> Seen:
        """Return what leaves for canaries that all have the same update."""
        return self.worker.run(update[None], np.zeros(canaries, np.int64), layout=layout, **options)


Probe = Callable[[Subject], Iterator[Fault]]


def bare_arrays(subject: Subject) -> Iterator[Fault]:
    """An array whose values all leave without noise, beside others with noise."""
    if not subject.noisy:
        if subject.claim.epsilon is not None:
            yield Fault("no-noise", "equal updates leave as equal releases: there is no noise")
        return
    at, bare = 0, []
    for name, shape, _ in LAYOUT:
        size = math.prod(shape)
        if not subject.deviations[at : at + size].any() and name not in subject.opening.lacking:
            bare.append(name)
        at += size
    if bare:
        yield Fault("bare-arrays", f"no noise on array {', '.join(bare)}")


def clipping(subject: Subject) -> Iterator[Fault]:
    """Updates that leave longer than the clip norm: not clipped, by a norm that grows with them, or array by array."""
    claim = subject.claim
    told = claim.clip_norm is not None or claim.box is not None
    if not (subject.noisy or claim.epsilon is not None):
        return
    lengths = [_length(line, subject.share) for line in subject.lines]
    excess = [
        length for (length, error), reach in zip(lengths, (claim.unit, claim.reach(N)), strict=True)
        if told and length - _z() * error > reach * (1 + 1e-3)
    ]  # fmt: skip
    if subject.facts["clips"] and lengths[1][0] > subject.longest / 2:
        yield Fault("unclipped", f"an update of norm {subject.longest:g} leaves at full length")
        return
    if subject.facts["clips"] and (seen := _growth(subject)):
        yield Fault("clip-follows-data", seen)
    elif excess:
        arrays = math.sqrt(len(LAYOUT)) * claim.unit
        why = "one clip norm for each array" if abs(excess[-1] / arrays - 1) < 0.05 else "longer than the clip norm"
        yield Fault("clip-per-array", f"an update leaves with norm {excess[-1]:.3g}: {why}")


def _growth(subject: Subject) -> str:
    """Return how a long update leaves other than one of 10 clip norms; empty if it does not."""
    long, near = subject.lines[1], 10 * subject.claim.unit
    short = draw(subject.worker, long.direction, long.name, near, min(2 * _MANY, subject.canaries), 1, subject.seed + 1)
    (far, error), (length, other) = (_length(line, subject.share) for line in (long, short))
    if far - length > _z() * math.hypot(error, other) + 1e-3 * length:
        return f"updates of norm {near:g} and {subject.longest:g} leave with {length:.3g} and {far:.3g}"
    if subject.noisy:
        ours, theirs = (line.first[0] - np.median(line.first[0]) for line in (long, short))
        # Equal values must stay equal, though their sums were rounded.
        grid = 1e-6 * float(np.abs(ours).max()) or 1.0
        far_noise, near_noise = (np.rint(np.abs(one[:_MANY]) / grid) for one in (ours, theirs))
        if stats.ks_2samp(far_noise, near_noise).pvalue < LEVEL:
            spread = (float(np.sqrt(np.square(one).mean())) for one in (theirs, ours))
            return "the noise of a short update has a deviation of {:.3g}, of a long one {:.3g}".format(*spread)
    return ""


def seeded_noise(subject: Subject) -> Iterator[Fault]:
    """Noise that comes again: for another client, in another round, or in another process."""
    if not subject.noisy:
        return
    left, other, noise = subject.opening.left, subject.reopening.left, subject.offset
    if len(np.unique(left[0, 0])) < N // 2:
        return  # so few values come again by chance
    again = []
    if np.array_equal(left[0], left[1]):
        again.append("for another client")
    if np.array_equal(left[0, 0], left[0, 1]):
        again.append("in the next round")
    if np.array_equal(left, other):
        again.append("in another process")
    if again:
        found = _generator(noise)
        text = f"the same noise comes again {' and '.join(again)}, so the difference of two releases has none"
        yield Fault("seeded-noise", f"{text}; it is that of {found}" if found else text)
        return
    parts = np.split(noise, np.cumsum([math.prod(shape) for _, shape, _ in LAYOUT])[:-1])
    shortest = min(map(len, parts))
    if all(part[:shortest].any() and np.allclose(part[:shortest], parts[0][:shortest], rtol=1e-4) for part in parts):
        yield Fault("shared-noise", "all arrays get the same noise, so the difference of two values has none")


def _generator(noise: Matrix) -> str:
    """Return the NumPy generator whose first draws are proportional to the noise (n,); empty if none is found."""
    wanted = noise / np.linalg.norm(noise)
    for seed in range(_GENERATORS):
        for name, make in (("default_rng", np.random.default_rng), ("RandomState", np.random.RandomState)):
            for law in ("normal", "laplace"):
                drawn = getattr(make(seed), law)(size=len(noise))
                if drawn @ wanted > (1 - 1e-5) * np.linalg.norm(drawn):
                    return f"numpy.random.{name}({seed}).{law}"
    return ""


def global_generator(subject: Subject) -> Iterator[Fault]:
    """Noise that an app knows if it seeds the global generators, as many do for reproducibility."""
    if not subject.noisy:
        return
    seen = subject.same(OPENING * subject.claim.unit, _SOME, seed=1)
    # If releases come again without a seed, by chance or not, this tells nothing.
    if subject.usual ** (_SOME - 1) < LEVEL and (seen.left == seen.left[0]).all():
        yield Fault("global-generator", "an app that seeds numpy.random, random or torch knows the noise")


def low_bits(subject: Subject) -> Iterator[Fault]:
    """Floats whose lattice depends on the update (Mironov, 2012): among releases of like size, finer for one update.

    If the update told nothing, the finest releases of a size would be those of either update as often as there are
    releases of it. That has the probability of an urn (hypergeometric), times the number of sizes.
    """
    if not subject.noisy or subject.deviations[0] == 0:
        return
    updates = np.zeros((2, N))
    updates[0, 0] = updates[1, 1] = subject.longest
    which = np.arange(2 * subject.canaries) % 2
    first = subject.worker.run(updates, which).left[:, 0, 0]
    there = np.isfinite(first) & (first != 0)
    which, (sizes, zeros) = which[there], _bits(first[there])
    found = []
    for size in np.unique(sizes):
        one, other = (zeros[(sizes == size) & (which == choice)] for choice in (0, 1))
        for ours, theirs in ((one, other), (other, one)):
            if len(ours) and len(theirs) and (finer := int((ours < theirs.min()).sum())):
                total = len(ours) + len(theirs)
                chance = stats.hypergeom.sf(finer - 1, total, len(ours), finer)
                found.append((chance, finer / total))
    # Each size has two tests at most.
    if found and min(found)[0] * 2 * len(np.unique(sizes)) < LEVEL:
        yield Fault(
            "low-bits", f"the last bits tell which update it was, in {min(found)[1]:.0%} of releases of like size"
        )


def _bits(values: Matrix) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the binary exponent of each value, and the number of zeros at the end of its 53 bits."""
    mantissas, exponents = np.frexp(values)
    whole = np.abs(np.ldexp(mantissas, 53)).astype(np.int64)
    zeros: NDArray[np.int64] = np.log2((whole & -whole).astype(np.float64)).astype(np.int64)
    return exponents.astype(np.int64), zeros


def scalars(subject: Subject) -> Iterator[Fault]:
    """A 0-d array that leaves as it is."""
    if not subject.noisy and not _changes(subject):
        return
    far = _FAR * (subject.claim.unit + subject.deviation / subject.share)
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
        if value == far and _changes(subject) and np.median(scalar) > subject.share * far / 2:
            yield Fault("scalars-pass", "a 0-d array leaves unclipped")
            return


def _changes(subject: Subject) -> bool:
    """Return whether the target changes updates at all."""
    length, _ = _length(subject.lines[0], subject.share)
    return length < 0.99 * subject.longest


def integers(subject: Subject) -> Iterator[Fault]:
    """Integer arrays that pass as they are, or with noise that is cut to 0."""
    if not subject.noisy:
        return
    for whole in (7.0, max(1.0, math.floor(subject.claim.unit))):
        counts = np.array([whole, 0.0])
        seen = subject.same(np.append(np.zeros(N), counts), _SOME, (*LAYOUT, ("count", (2,), "<i8")), rounds=2)
        if seen.gone.all() or "count" in seen.lacking:
            continue
        same = (seen.left[~seen.gone][:, N:] == counts).all(axis=1)
        if same.mean() >= 0.75:
            yield Fault("integers-pass", f"integer arrays leave as they are in {same.sum()} of {len(same)} releases")
            return


def not_finite(subject: Subject) -> Iterator[Fault]:
    """NaN or infinity, which may switch clipping off, or pass."""
    if not (subject.noisy or subject.claim.epsilon is not None):
        return
    far = _FAR * (subject.claim.unit + subject.deviation / subject.share)
    opens, passes = [], []
    for name, value in (("NaN", np.nan), ("infinity", np.inf)):
        update = np.full(N, far / math.sqrt(N))
        update[0] = value
        seen = subject.same(update, _FEW)
        if seen.gone.all():
            continue
        left = seen.left[~seen.gone[:, 0], 0]
        rest = left[:, 1:]
        if (
            subject.facts["clips"]
            and np.isfinite(rest).all()
            and np.median(rest) > subject.share * far / math.sqrt(N) / 2
        ):
            opens.append(name)
        elif not np.isfinite(left).all():
            passes.append(name)
    if opens:
        yield Fault("nan-opens", f"one value of {' or '.join(opens)} lets all others leave unclipped")
    if passes:
        yield Fault("nan-passes", f"the release shows that an update has {' or '.join(passes)}")


def zero_update(subject: Subject) -> Iterator[Fault]:
    """An update of 0, which may divide by its norm."""
    seen = subject.same(np.zeros(N), _FEW)
    if seen.gone.all() and not subject.lines[0].seen.gone[:, 0].any():
        yield Fault("zero-update", f"an update of 0 raises {seen.errors[0]}")
    elif not seen.gone.all() and not np.isfinite(seen.left[~seen.gone[:, 0], 0]).all():
        yield Fault("zero-update", "an update of 0 leaves as NaN")


def records(subject: Subject) -> Iterator[Fault]:
    """Numbers beside the arrays that leave as they are: losses, numbers of rows."""
    if not (subject.noisy or subject.claim.epsilon is not None):
        return
    update = subject.claim.unit * OPENING
    others = subject.same(update, _FEW, losses=(0.25, 0.75), examples=(10, 1000)).others
    told = []
    for key in sorted({key for one in others for key in one}):
        here, there = (np.array([one.get(key, np.nan) for one in others[start::2]]) for start in (0, 1))
        # A mean of several clients is rounded as the order of their replies has it.
        if abs(here[0] - there[0]) > 1e6 * max(np.ptp(here), np.ptp(there)):
            told.append(key)
    if told:
        yield Fault("records-pass", f"exact numbers leave beside the arrays: {', '.join(told)}")


def weights(subject: Subject) -> Iterator[Fault]:
    """A client that moves the mean further the more rows it reports."""
    if subject.share == 1 or subject.facts["rows"] or not subject.noisy:
        return
    line = subject.lines[1]
    update = subject.longest * np.stack([line.direction, -line.direction])
    which = np.arange(min(2 * _MANY, subject.canaries)) % 2
    seen = subject.worker.run(update, which, examples=(1000,))
    if seen.gone.any():
        return
    heavy = Line(line.name, line.direction, 1 - 2 * which, seen)
    length, error = _length(heavy, 1.0)
    reach = subject.share * subject.claim.reach(N)
    if length - _z() * error > 1.01 * reach:
        yield Fault(
            "weights-from-data", f"a client that reports 1000 rows moves the mean by {length:.3g}, not {reach:.3g}"
        )


def nothing_allowed(subject: Subject) -> Iterator[Fault]:
    """An epsilon or delta of 0 that is accepted, and divided by."""
    for names, code in ((EPSILONS, "zero-epsilon"), (DELTAS, "zero-delta")):
        for name in names:
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
            elif not np.isfinite(seen.left[~seen.gone[:, 0], 0]).all():
                yield Fault(code, f"{name} = 0 is accepted, and then NaN or infinity leaves")
            elif np.ptp(seen.left[~seen.gone[:, 0], 0], axis=0).max() < 1e-6 * subject.share * subject.claim.unit:
                yield Fault(code, f"{name} = 0 is accepted, and then there is no noise")


def delta(subject: Subject) -> Iterator[Fault]:
    """A delta so large that some client may be revealed in full."""
    if subject.clients and subject.claim.epsilon is not None and subject.claim.delta > 1 / subject.clients:
        text = f"delta {subject.claim.delta:g} is above 1/{subject.clients}, so one client may be revealed in full"
        yield Fault("delta-too-large", text)


PROBES: tuple[Probe, ...] = (
    bare_arrays, clipping, seeded_noise, global_generator, low_bits, scalars, integers, not_finite,
    zero_update, records, weights, nothing_allowed, delta,
)  # fmt: skip
"""All probes that need no figures."""


def _length(line: Line, share: float) -> tuple[float, float]:
    """Return the length with which updates leave along a line, per unit of `share`, and its standard error."""
    one, other = line.first
    if not (len(one) and len(other)):
        return 0.0, 0.0
    error = math.hypot(one.std() / math.sqrt(len(one)), other.std() / math.sqrt(len(other))) / 2
    return float(one.mean() - other.mean()) / 2 / share, error / share


def _z() -> float:
    """Return the quantile of the normal law at `LEVEL`."""
    return float(-special.ndtri(LEVEL))
