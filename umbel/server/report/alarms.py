"""Warnings about a run, from its history. Their words are in ``page.toml``."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.words import after_round, count_of
from umbel.server.history import Round, at_bound, collapsed, diverged, fitted, last_rounds, middle_ratio, stuck


class Alarm(NamedTuple):
    """A warning: its title, and its text about the run."""

    title: str
    text: str


@cache
def _words() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((files(__package__) / "page.toml").read_text(encoding="utf-8"))["alarms"]
    return found


def _text(name: str, **values: Any) -> str:
    return " ".join(_words()[name].format(**values).split())


def _alarm(title: str, **values: Any) -> Alarm:
    return Alarm(title, _text(title, **values))


def alarms(history: Sequence[Round], hypotheses: int, validate_every: int, validators: int | None) -> list[Alarm]:
    """Return warnings that people need before they use the result, worst first.

    Rounds with another number of hypotheses say nothing about these. The numbers are k, that of rounds from one
    validation to the next, and that of validation clients, if it is known.
    """
    history = [fitted(e, hypotheses) for e in history if len(e.nearest) == (hypotheses if hypotheses > 1 else 0)]
    empty = _empty(history, hypotheses) if hypotheses > 1 else ()
    return [*_validation(history, validate_every, validators), *empty, *_of_rounds(history)]


def _validation(history: Sequence[Round], validate_every: int, validators: int | None) -> Iterator[Alarm]:
    """Yield the warnings about hypotheses and losses that are not finite, and about losses that tell nothing."""
    if bad := [entry.number for entry in history if not np.isfinite(entry.nearest).all()]:
        yield _alarm("Hypotheses diverged", first=bad[0])
    if not validators and all(entry.loss is None for entry in history):
        return  # no validation clients
    # The last round of an interrupted run is not validated yet.
    due = [e for e in history if e.loss is not None or (e.number % validate_every == 0 and e is not history[-1])]
    missing = [entry.number for entry in due if entry.loss is None or not math.isfinite(entry.loss)]
    given = {entry.number: entry.loss or 0.0 for entry in due if entry.number not in missing}
    if missing:
        many = count_of(len(missing), "validation")
        yield _alarm("Validation loss not finite", missing=many, due=len(due), first=missing[0])
    if len(given) > 1 and min(given, key=given.__getitem__) == (first := min(given)):
        yield _alarm("Validation loss never improved", first=after_round(first), given=len(given))
    if bound := at_bound(history):
        yield _alarm("Validation reports lie at their bound", bound=bound)


def _empty(history: Sequence[Round], hypotheses: int) -> Iterator[Alarm]:
    """Yield the warning about hypotheses that get no releases at the end of training."""
    if not (last := last_rounds(history)):
        return
    totals, best = np.sum([entry.groups for entry in last], axis=0), history[-1].best_round
    empty, rounds = np.flatnonzero(totals == 0), len(last)
    before = _text("before", best=after_round(best)) if best < last[0].number else ""
    if collapsed(history):
        every = "all" if len(empty) == hypotheses - 1 else f"{int(totals.max())} of"
        releases, winner = f"{every} {int(totals.sum())} releases", int(totals.argmax())
        why = f"{why_collapsed(last)} {before}"
        yield _alarm("Clusters collapsed into one", rounds=rounds, releases=releases, winner=winner, why=why)
    elif len(empty):
        kinds = count_of(hypotheses - len(empty), "kind")
        text = _text("empty", rounds=rounds, names=name_hypotheses(empty), kinds=kinds, before=before)
        yield Alarm(f"{count_of(len(empty), 'hypothesis', 'hypotheses')} without releases", text)


def _of_rounds(history: Sequence[Round]) -> Iterator[Alarm]:
    """Yield the warnings about rounds that changed nothing, or too little."""
    trained = [entry for entry in history if entry.asked]
    if diverged(history):
        yield _alarm("The rounds diverged")
    if stuck(history) and any(entry.moved for entry in history):
        why = _text("stuck")
        yield Alarm("The rounds changed nothing", f"{why[:1].upper()}{why[1:]}")
    undefined = [entry for entry in trained if entry.undefined]
    too_few = [entry for entry in trained if not (entry.moved or entry.undefined)]
    for title, bad in (("Rounds without a finite result", undefined), ("Too few releases", too_few)):
        if bad:
            rounds = f"{count_of(len(bad), 'round')} of {len(trained)} (the first was round {bad[0].number})"
            yield _alarm(title, rounds=rounds, undefined=_text("undefined"))
    if lost := [entry for entry in history if entry.lost_nodes]:
        most = count_of(max(entry.lost_nodes for entry in lost), "node")
        yield _alarm("Nodes lost", rounds=count_of(len(lost), "round"), first=lost[0].number, most=most)


def why_stuck(history: Sequence[Round]) -> str:
    """Return why no round changed the loss, with advice; empty if one did."""
    if not stuck(history):
        return ""
    return _text("undefined" if any(entry.undefined for entry in history) else "stuck")


def why_collapsed(last: Sequence[Round]) -> str:
    """Return why all releases go to one hypothesis, by Eq. 9's ratio, and what may help."""
    ratio = middle_ratio(last)
    return _text("restart" if ratio is None else "one-kind" if ratio < 1 else "merged", ratio=ratio or 0.0)


def name_hypotheses(numbers: Sequence[int] | NDArray[np.int64]) -> str:
    """Return "hypothesis 3", "hypotheses 1 and 3", or the first few of many."""
    if len(numbers) == 1:
        return f"hypothesis {numbers[0]}"
    if len(numbers) > 8:
        return f"hypotheses {', '.join(map(str, numbers[:7]))} and {len(numbers) - 7} others"
    return f"hypotheses {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
