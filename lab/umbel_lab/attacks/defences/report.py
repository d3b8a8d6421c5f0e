"""The audit of one target: its figures and faults, as one report."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from umbel.protocol.errors import NotApplicableError
from umbel_lab.attacks.audit.bounds import CONFIDENCE, Bound, Verdict, most
from umbel_lab.attacks.defences import laws
from umbel_lab.attacks.defences.claims import Claim, bound, claim_of, directions, draw, formula, judged
from umbel_lab.attacks.defences.probes import LEVEL, OPENING, Fault, N, Subject, longest_update, probe
from umbel_lab.attacks.defences.process import LAYOUT, TIMEOUT, Target, Worker

CANARIES, ROUNDS = 2000, 3
"""Canaries along each line; rounds of Flower's own template of an app."""


@dataclass(frozen=True)
class Options:
    """How a target is audited; `umbel_lab.attacks.defences.command` says what each option is."""

    rounds: int = ROUNDS
    canaries: int = CANARIES
    clients: int = 0
    epsilon: float | None = None
    delta: float | None = None
    clip_norm: float | None = None
    mod: Target | None = None
    python: str = sys.executable
    confidence: float = CONFIDENCE
    seed: int = 0
    timeout: float = TIMEOUT


@dataclass(frozen=True)
class Figures:
    """The figures for so many releases of each canary, each at the delta of the claim.

    The epsilon is `claimed` by the target, or by its account after so many rounds. The `formula` is for any two
    updates, and None if the target's noise is of no known law, or it tells no clip norm. `fitted`, from `low` to
    `high`, is that of the canaries' two updates, and None if the noise is of no known law. So is `proved`, which is at
    most what so many canaries can prove, `provable`.
    """

    rounds: int
    claimed: float | None
    formula: float | None
    fitted: float | None
    low: float | None
    high: float | None
    proved: Bound
    provable: float


@dataclass(frozen=True)
class Report:
    """The findings of an audit of a target of a kind, in a package with its version.

    The claim is about one round. The law is that of the noise if it passed its test, or else empty. `rows` says that
    the target protects a row of a batch, and `trusted` that clients are taken to keep the clip norm, since it does not
    clip.
    """

    target: str
    package: str
    kind: str
    claim: Claim
    law: str
    noisy: bool
    rows: bool
    trusted: bool
    figures: tuple[Figures, ...]
    faults: tuple[Fault, ...]

    @property
    def refuted(self) -> bool:
        """Whether a proved figure exceeds what is claimed beyond chance."""
        return any(figures.proved.verdict is Verdict.EXCEEDS for figures in self.figures)

    @property
    def failed(self) -> bool:
        """Whether there is a fault, or a claim is refuted."""
        return bool(self.faults) or self.refuted

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON has it; an infinite figure is the text "inf"."""
        document: dict[str, Any] = _finite(asdict(self))
        faults = [{**vars(fault), "mend": fault.mend} for fault in self.faults]
        return {**document, "faults": faults, "refuted": self.refuted, "failed": self.failed}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return "inf" if value == math.inf else value


def audit(target: Target, options: Options | None = None) -> Report:
    """Run a target in its own process, and return what is found.

    Raises
    ------
    ConfigError
        If the claim is out of range.
    NotApplicableError
        If the target cannot be run, or sends nothing.
    """
    options = options or Options()
    with ExitStack() as stack:
        worker, again = (
            stack.enter_context(Worker(target, options.python, options.mod, options.clip_norm, options.timeout))
            for _ in range(2)
        )
        facts = worker.open()
        again.open()
        claim = claim_of(facts, options.epsilon, options.delta, options.clip_norm)
        first = claim.unit * OPENING[None]
        opening, reopening = (each.run(first, [0] * 4, rounds=2) for each in (worker, again))
        if opening.gone[:, 0].all():
            raise NotApplicableError(f"{target} sends nothing: {opening.errors[0]}", code="attack.target-silent")
        if len(opening.lacking) == len(LAYOUT):
            text = f"{target} sends none of the arrays that it received ({', '.join(opening.lacking)})"
            raise NotApplicableError(f"{text}; keep their names", code="attack.target-renames")
        length = longest_update(claim, facts)
        along_one, along_all = (
            draw(worker, direction, length, options.canaries, options.rounds, options.seed + at)
            for at, direction in enumerate(directions(N))
        )
        spent = {rounds: worker.run(first, [0], rounds=rounds).spent for rounds in sorted({1, options.rounds})}
        if options.epsilon is None and (account := spent[1]) is not None:
            claim = replace(claim, epsilon=account[0], delta=account[1])
        subject = Subject(
            worker, again, claim, facts, (along_one, along_all), opening, reopening, options.canaries, options.clients,
            options.seed,
        )  # fmt: skip
        fits = [laws.fit(*line.first, 1 - options.confidence) for line in subject.lines]
        figures = tuple(
            # An account counts, unless the user claims something else.
            _figures(
                subject, fits, rounds, account[0] if account and options.epsilon is None else claim.epsilon, options
            )
            for rounds, account in spent.items()
        )
        faults = (*_of_figures(subject, figures, counted=spent[options.rounds] is not None), *probe(subject))
    law = laws.VECTOR if subject.vector else next((fit.law for fit in fits if fit), "")
    return Report(
        str(target), facts["package"], facts["kind"], claim, law, subject.noisy,
        facts["rows"], not facts["clips"], figures, faults,
    )  # fmt: skip


def _figures(
    subject: Subject, fits: list[laws.Fit | None], rounds: int, claimed: float | None, options: Options
) -> Figures:
    claim, released = subject.claim, subject.released(rounds)
    limit = math.inf if claimed is None else claimed
    # Two lines are looked at: each at half the level.
    confidence = 1 - (1 - options.confidence) / len(subject.lines)
    proved = max(
        (
            bound(line.positions[:, :rounds].sum(axis=1), line.coins, claim.delta, limit, confidence)
            for line in subject.lines
        ),
        key=lambda each: each.shown,
    )
    fitted: tuple[float | None, float | None, float | None] = (None, None, None)
    if fit := _best(fits, claim.delta):
        value, low, high = (fit.epsilon(claim.delta, released, apart) for apart in (fit.apart, fit.low, fit.high))
        fitted = value, low, high
    analytic = _formula(subject, released, 1 - options.confidence)
    return Figures(rounds, claimed, analytic, *fitted, proved, most(judged(options.canaries), confidence))


def _formula(subject: Subject, released: int, level: float) -> float | None:
    """Return the epsilon of so many releases by the accountant; None if the law of the noise is not known."""
    claim, reach = subject.claim, 2 * subject.claim.unit * subject.share
    if not subject.noisy:
        return math.inf
    if fit := subject.law(level):
        promised = subject.facts["deviation"]
        scale = promised if promised and not _disagrees(subject, promised) else fit.least
        return formula(claim, fit.law, scale, reach, N, released)
    if subject.vector:
        return formula(claim, laws.VECTOR, laws.vector_scale(subject.alike, level), reach, N, released)
    return None


def _best(fits: list[laws.Fit | None], delta: float) -> laws.Fit | None:
    """Return the fit with the largest epsilon; a Gaussian law has none at a delta of 0, which only its tails decide."""
    usable = [fit for fit in fits if fit and (delta or fit.law == laws.LAPLACE)]
    return max(usable, key=lambda fit: fit.epsilon(delta), default=None)


def _disagrees(subject: Subject, promised: float) -> bool:
    """Return whether measured noise cannot have the promised deviation."""
    fit = subject.law(LEVEL)
    return fit is not None and fit.law == laws.GAUSSIAN and not fit.least <= promised <= fit.greatest


def _of_figures(subject: Subject, figures: tuple[Figures, ...], counted: bool) -> Iterator[Fault]:
    """Yield the faults that show in figures: too little noise for one round, or for several that are not counted."""
    claim, promised = subject.claim, subject.facts["deviation"]
    if promised is not None and subject.noisy and _disagrees(subject, promised):
        text = f"attributes promise a deviation of {promised:.3g}; measured: {subject.deviation:.3g}"
        yield Fault("other-deviation", text)
    fit, pure = subject.law(LEVEL), claim.epsilon is not None and claim.delta == 0
    # A vector's noise can look Gaussian in each value.
    if pure and fit and fit.law == laws.GAUSSIAN and laws.joint(subject.alike) == laws.GAUSSIAN:
        text = f"epsilon {claim.epsilon:.3g} is claimed at delta 0; the noise is gaussian, which has none there"
        yield Fault("no-pure-epsilon", text)
    little = False
    for each in figures:
        if each.claimed is None or not subject.noisy:
            continue
        least, refuted = _least(subject, each.rounds), each.proved.verdict is Verdict.EXCEEDS
        if least <= each.claimed and not refuted:
            continue
        shown = f"proved {each.proved.shown:.3g}" if refuted else f"it is at least {least:.3g} by its measured noise"
        text = f"epsilon {each.claimed:.3g} is claimed at delta {claim.delta:g}; {shown}, in {rounds_of(each)}"
        if each.rounds > 1 and not counted:
            yield Fault("no-composition", f"{text}, which it does not count")
        elif not little:
            little = True
            yield Fault("too-little-noise", text)


def _least(subject: Subject, rounds: int) -> float:
    """Return what epsilon is at least, with noise of the tested law, but for one in 1/`LEVEL`."""
    claim, released = subject.claim, subject.released(rounds)
    best, fit = _best([laws.fit(*line.first, LEVEL) for line in subject.lines], claim.delta), subject.law(LEVEL)
    least = best.epsilon(claim.delta, released, best.low) if best else 0.0
    # With Laplace noise and a Euclidean clip norm, the formula is not what some two updates reach.
    if fit and (claim.delta if fit.law == laws.GAUSSIAN else claim.clip_norm is None):
        # No further apart than the clip norm has it, nor than releases were.
        reach = 2 * min(claim.unit * subject.share, subject.longest_step)
        least = max(least, formula(claim, fit.law, fit.greatest, reach, N, released))
    return least


def rounds_of(figures: Figures) -> str:
    """Return the number of rounds in words."""
    return "one round" if figures.rounds == 1 else f"{figures.rounds} rounds"
