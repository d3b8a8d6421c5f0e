"""Was a run worth it? Its results beside those of simpler ways, on held-out rows, and a sentence.

`umbel.simulation.worth` measures them if the rows of all clients are on one machine. These figures are exact: no
epsilon covers them, and they stay with the owner of the data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from umbel.protocol.words import count_of

FILE = "worth.json"
STAYS = "These figures are exact, so no epsilon covers them. They are only for the owner of all these data."


class Way(StrEnum):
    """A way to serve clients, the subject of one row of the table."""

    CONSTANT = "constant"
    RULE = "rule"
    """A baseline that the model defines (`umbel.models.hooks.Hooks.baselines`)."""
    ALONE = "alone"
    POOLED = "pooled"
    ONE = "one-model"
    NEW = "new"
    """Clients without labelled rows, to which a run of several hypotheses gives their mean."""
    LAST = "last-round"
    BEST = "best-round"
    OWN = "made-own"
    USED = "best-round-made-own"
    """What predictions use, if the best round is not the last."""


LABELS = {
    Way.CONSTANT: "the best constant",
    Way.ALONE: "each client alone",
    Way.POOLED: "all rows pooled",
    Way.ONE: "one model",
    Way.NEW: "this run, no labelled rows",
    Way.LAST: "this run, last round",
    Way.BEST: "this run, best round",
    Way.OWN: "this run, fitted per client",
    Way.USED: "best round, fitted per client",
}


OWN_WAYS = (Way.USED, Way.OWN, Way.BEST, Way.LAST)
"""The ways of the run itself. Predictions are made by the first that was measured."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it holds signs that no terminal can print")
    return text


_Text = Annotated[str, Field(max_length=5000), AfterValidator(_printable)]
_Figure = Annotated[float, Field(allow_inf_nan=False)] | None


@dataclass(frozen=True)
class Score:
    """A score of classes on the rows of all clients, and how far it may be off; None if that is not known."""

    name: _Text
    value: _Figure
    margin: _Figure  # two standard errors over clients

    def __str__(self) -> str:
        """Return the figures as text."""
        return (
            "" if self.value is None else f"{self.value:.3f}" + ("" if self.margin is None else f" ± {self.margin:.3f}")
        )


@dataclass(frozen=True)
class Arm:
    """A row of the table: the metric over clients, and over the worst tenth of them; None if it is not finite."""

    way: Way
    label: _Text
    mean: _Figure
    worst_decile: _Figure
    remark: _Text = ""  # how it was made, if the label does not say so
    scores: Annotated[list[Score], Field(max_length=10)] = field(default_factory=list)  # of classes, in all rows alike


@dataclass(frozen=True)
class LeftOut:
    """A row that the table lacks, and the reason."""

    label: _Text
    why: _Text


@dataclass(frozen=True)
class Worth:
    """The measured worth of a run."""

    metric: _Text
    unit: _Text  # of the metric; empty for none
    higher_is_better: bool
    clients: Annotated[int, Field(ge=0)]
    """Measured validation clients, each on the half of its rows that it used neither to train nor to choose."""
    arms: Annotated[list[Arm], Field(max_length=50)]
    left_out: Annotated[list[LeftOut], Field(max_length=50)]
    worth_it: bool  # whether a client is better off with the run than without, as far as was measured
    verdict: _Text  # the same as a sentence
    history: int  # lines of the run's history when this was measured: one more than rounds
    advice: _Text = ""  # a setting that was tried and served clients better; empty if there is none
    version: Literal[1] = 1

    @property
    def content(self) -> str:
        """The text of ``worth.json``."""
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"

    @classmethod
    def read(cls, content: str | bytes) -> Worth:
        """Return the worth in ``worth.json``; `ValueError` if umbel did not write it."""
        return _KIND.validate_json(content)  # Python's own JSON reader would accept NaN

    @property
    def heading(self) -> str:
        """The title of the figures, with the clients."""
        unit = f" ({self.unit})" if self.unit else ""
        better = "higher" if self.higher_is_better else "lower"
        whose = count_of(self.clients, "validation client")
        known = any(score.margin is not None for arm in self.arms for score in arm.scores)
        interval = "; ± two standard errors" if known else ""
        return f"{self.metric}{unit} of {whose}, on held-out rows; {better} is better{interval}"

    def arm(self, way: Way) -> Arm:
        """Return a row of the table; `KeyError` if it was left out."""
        return {arm.way: arm for arm in self.arms}[way]

    def lines(self) -> list[str]:
        """Return the verdict and the table, for the end of a run; how each row was made is in the report."""
        lines = [f"Worth it? {self.verdict}"]
        if self.arms:
            lines += [f"{self.heading}:", *rows_of([(arm.label, arm) for arm in self.arms])]
            lines += [f"  left out: {one.label}, {one.why}" for one in self.left_out]
            lines.append(f"Predictions are made as in the row {self.arms[-1].label!r}.")
            lines += [self.advice] if self.advice else []
            lines.append(STAYS)
        return lines


_KIND = TypeAdapter(Worth)


def rows_of(arms: Sequence[tuple[str, Arm]]) -> list[str]:
    """Return the lines of a table whose rows have these labels."""
    rows = [["", "mean", "worst tenth", *(score.name for score in arms[0][1].scores)]]
    rows += [[label, figure(arm.mean), figure(arm.worst_decile), *map(str, arm.scores)] for label, arm in arms]
    wide = [max(map(len, column)) for column in zip(*rows, strict=False)]
    return ["  ".join(["", row[0].ljust(wide[0]), *map(str.rjust, row[1:], wide[1:])]).rstrip() for row in rows]


def figure(value: float | None) -> str:
    """Return a figure as text; "not finite" for None."""
    if value is None:
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
