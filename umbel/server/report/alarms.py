"""Warnings about a run, from its history."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.words import count_of
from umbel.server.history import Round, at_bound, collapsed, diverged, fits, last_rounds, middle_ratio, stuck

_UNDEFINED = (
    "the releases were finite, and the strategy's combine made hypotheses of them that are not, so these stayed "
    "unchanged. Look at the strategy's combine and its options."
)
_STUCK = (
    "no round changed the hypotheses, so training may have diverged at every client. Try a smaller step-size, or "
    "features and targets near 1."
)


@dataclass(frozen=True)
class Alarm:
    """A warning: its title, and its text about the run."""

    title: str
    text: str


def alarms(history: Sequence[Round], hypotheses: int, validate_every: int, validators: int | None) -> list[Alarm]:
    """Return warnings that people need before they use the result, worst first.

    Rounds with another number of hypotheses say nothing about these.

    Parameters
    ----------
    history : sequence of Round
    hypotheses : int
        k.
    validate_every : int
        Rounds from one validation to the next.
    validators : int or None
        Number of validation clients, if it is known.
    """
    history = [entry for entry in history if fits(entry, hypotheses)]
    empty = _empty(history, hypotheses) if hypotheses > 1 else ()
    return [*_not_finite(history), *_validation(history, validate_every, validators), *empty, *_of_rounds(history)]


def _of_rounds(history: Sequence[Round]) -> Iterator[Alarm]:
    """Yield the warnings about rounds that changed nothing, or too little."""
    trained = [entry for entry in history if entry.asked]
    if diverged(history):
        text = (
            "The last loss is several times the lowest; the best hypotheses are kept. Ask more clients a round, or try "
            "fewer hypotheses, less noise or a smaller step-size."
        )
        yield Alarm("The rounds diverged", text)
    if stuck(history) and any(entry.moved for entry in history):
        yield Alarm("The rounds changed nothing", f"{_STUCK[:1].upper()}{_STUCK[1:]}")
    if bad := [entry.number for entry in trained if entry.undefined]:
        text = f"In {count_of(len(bad), 'round')} of {len(trained)} (the first was round {bad[0]}), {_UNDEFINED}"
        yield Alarm("Rounds without a finite result", text)
    if unchanged := [entry.number for entry in trained if not (entry.moved or entry.undefined)]:
        text = (
            f"{count_of(len(unchanged), 'round')} of {len(trained)} (the first was round {unchanged[0]}) had fewer "
            "releases than min-releases, so the hypotheses stayed unchanged. Sites refuse requests that their policy "
            "or budget does not allow; their logs give the reason."
        )
        yield Alarm("Too few releases", text)
    if lost := [entry for entry in history if entry.lost_nodes]:
        text = (
            f"In {count_of(len(lost), 'round')} (the first was round {lost[0].number}) nodes sent no usable reply to "
            f"training: at most {count_of(max(entry.lost_nodes for entry in lost), 'node')} a round. The result lacks "
            "the releases of their clients."
        )
        yield Alarm("Nodes lost", text)


def _not_finite(history: Sequence[Round]) -> Iterator[Alarm]:
    if bad := [entry.number for entry in history if not np.isfinite(entry.nearest).all()]:
        text = f"Some of their numbers were infinite or undefined from round {bad[0]} on. A smaller step-size may help."
        yield Alarm("Hypotheses diverged", text)


def _validation(history: Sequence[Round], validate_every: int, validators: int | None) -> Iterator[Alarm]:
    due = [entry for entry in history if (entry.number - 1) % validate_every == 0 or not entry.asked]
    given = [entry for entry in due if entry.loss is not None and math.isfinite(entry.loss)]
    if not validators and all(entry.loss is None for entry in history):
        return  # no validation clients
    if missing := len(due) - len(given):
        first = next(entry.number for entry in due if entry not in given)
        text = (
            f"In {count_of(missing, 'validation')} of {len(due)} (the first in round {first}) no validation "
            "client replied with a finite loss. Training may have diverged there, or the nodes that hold these "
            "clients may have failed."
        )
        yield Alarm("Validation loss not finite", text)
    if len(given) > 1 and min(given, key=lambda entry: entry.loss or 0.0) is given[0]:
        text = (
            f"The first validation, in round {given[0].number}, had the lowest loss of all {len(given)}: training did "
            "not help."
        )
        yield Alarm("Validation loss never improved", text)
    if bound := at_bound(history):
        text = (
            f"Sites clip each client's loss at {bound:g}, and the mean of the reports lies there. So they do not tell "
            "which round is better. Ask the sites for a larger bound in reports."
        )
        yield Alarm("Validation reports lie at their bound", text)


def _empty(history: Sequence[Round], hypotheses: int) -> Iterator[Alarm]:
    if not (last := last_rounds(history)):
        return
    totals = np.sum([entry.groups for entry in last], axis=0)
    empty, best = np.flatnonzero(totals == 0), history[-1].best_round
    older = 0 < best <= last[0].number
    before = f" The best hypotheses are from before that: the start of round {best}." if older else ""
    if collapsed(history):
        every = "all" if len(empty) == hypotheses - 1 else f"{int(totals.max())} of"
        text = (
            f"In the last {len(last)} rounds of training, {every} {int(totals.sum())} releases went to hypothesis "
            f"{int(totals.argmax())}. One model for all is right if all clients are of one kind; otherwise the run no "
            f"longer personalises. {why_collapsed(last)}{before}"
        )
        yield Alarm("Clusters collapsed into one", text)
    elif len(empty):
        text = (
            f"In the last {len(last)} rounds of training, no release went to {name_hypotheses(empty)}. That is right "
            f"if the clients are of at most {count_of(hypotheses - len(empty), 'kind')}. Otherwise the run may have "
            f"missed a group, and another seed or more restarts may help.{before}"
        )
        yield Alarm(f"{count_of(len(empty), 'hypothesis', 'hypotheses')} without releases", text)


def why_stuck(history: Sequence[Round]) -> str:
    """Return why no round changed the loss, with advice; empty if one did."""
    if not stuck(history):
        return ""
    return _UNDEFINED if any(entry.undefined for entry in history) else _STUCK


def why_collapsed(last: Sequence[Round]) -> str:
    """Return why all releases go to one hypothesis, by Eq. 9's ratio, and what may help."""
    ratio = middle_ratio(last)
    if ratio is None:
        return "Another seed or more restarts may help."
    if ratio < 1:
        return (
            f"Eq. 9's ratio is {ratio:.2g}: releases show which hypothesis they come from, so the clients themselves "
            "choose this one. If the strategy has no option respawn, set respawn=3: the other hypotheses then start "
            "again once these releases are of two kinds. If it is set, all clients look like one kind."
        )
    return (
        f"Eq. 9's ratio is {ratio:.2g}: releases are further from their hypothesis than its nearest neighbour is, so "
        "clustering may have merged them. Less noise, more clients a round or more restarts may help."
    )


def name_hypotheses(numbers: Sequence[int] | NDArray[np.int64]) -> str:
    """Return "hypothesis 3", "hypotheses 1 and 3", or the first few of many."""
    if len(numbers) == 1:
        return f"hypothesis {numbers[0]}"
    if len(numbers) > 8:
        return f"hypotheses {', '.join(map(str, numbers[:7]))} and {len(numbers) - 7} others"
    return f"hypotheses {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
