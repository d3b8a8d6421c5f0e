"""Ranges by a private question: the run that asks it, its answers, and a schema that has them.

The question is a training task (`umbel.models.ranges`), and its answer the hypothesis after one round.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from umbel.data import Column, Dataset, Schema
from umbel.data.schema import scaling
from umbel.models.ranges import CELLS, SEEN, UNSEEN, Answer, answers
from umbel.privacy.accounting.plan import Task, plan_for
from umbel.privacy.mechanisms import load
from umbel.protocol.errors import ConfigError
from umbel.protocol.ranges import RangesBefore, columns_in, question_of
from umbel.protocol.release import DISCRETE_GAUSSIAN, LAPLACE, ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.server.result import Result
from umbel.server.run_folder import RunFolder
from umbel.simulation.wanted import Wanted

_SHARES = 1 / 8, 1 / 4
"""Shares of a run's epsilon that a question may take: the first of them that suffices."""
_SEEDS = 5  # separates the draws of a question from those of its run
_STRATEGIES = {ReleaseBy.SITE: "site-average", ReleaseBy.SECURE: "secure-average"}
_NUMBERS = ("number", "integer")


@dataclass(frozen=True)
class Question:
    """A question to so many clients, each of which releases once, in sums of so many sites."""

    columns: Sequence[str]
    clients: int
    release: RangesBefore
    sites: int = 1

    @classmethod
    def planned(
        cls,
        columns: Sequence[str],
        clients: int,
        wanted: Wanted,
        by: ReleaseBy = ReleaseBy.SITE,
        sites: int = 1,
        part: str = "",
    ) -> Self:
        """Return a question with as little noise as a guarantee allows, which may be a part of a run's.

        Raises
        ------
        ConfigError
            If too few clients would answer: none is asked, and nothing is spent.
        """
        mechanism = DISCRETE_GAUSSIAN if by is ReleaseBy.SECURE else "gaussian" if wanted.delta else LAPLACE
        task = Task(len(columns) * CELLS, 1, clients, clients, mechanism, by, sites)
        noise = plan_for(task, wanted.epsilon, wanted.delta, 1, 0.0).noise_multiplier
        asked = cls(columns, clients, RangesBefore(task.parameters, noise, mechanism, by), sites)
        first = shlex.quote(columns[0])
        if clients < (needed := math.ceil(SEEN * asked.spread / UNSEEN)):
            raise ConfigError(
                f"{clients:,} clients are too few to ask for the ranges of {len(columns)} columns at epsilon "
                f"{wanted.epsilon:g}{part}: the noise would hide what a tenth of them hold. That takes {needed:,}, and "
                f"no client was asked; give public ranges of {', '.join(columns)} to umbel data import, each as --set "
                f"{first}.minimum=NUMBER --set {first}.maximum=NUMBER",
                code="config.few-for-ranges",
            )
        return asked

    @property
    def spread(self) -> float:
        """The deviation of the noise on a count, in clients."""
        release, sites = self.release, self.sites if self.release.by is ReleaseBy.SITE else 1
        noise = load(release.mechanism)(release.noise).deviation(release.parameters)
        return noise * math.sqrt(len(self.columns) * sites)

    @cached_property
    def values(self) -> dict[str, Any]:
        """The run config that asks it."""
        return {
            "model": question_of(self.columns), "strategy": _STRATEGIES[self.release.by], "rounds": 1, "hypotheses": 1,
            "clients-per-round": self.clients, "max-participations": 1, "restarts": 1, "choice-epsilon": 0.0,
            "noise-multiplier": self.release.noise, "mechanism": self.release.mechanism,
            "clipping": "public norm=1 decay=1", "local-epochs": 1, "step-size": 1.0, "batch-size": 0,
        }  # fmt: skip

    def answers(self, parameters: Mapping[str, Any]) -> list[Answer]:
        """Return what the hypothesis (1, columns, cells) tells that the clients' releases made."""
        counts = np.asarray(parameters["counts"][0], np.float64) * self.clients * math.sqrt(len(self.columns))
        return answers(self.columns, counts, self.clients, self.spread)

    @classmethod
    def of_run(cls, result: Result) -> Self:
        """Return the question that a run asked, with the clients that released; `ConfigError` if it asked none."""
        run, by = RunConfig.parse(result.config), {name: one for one, name in _STRATEGIES.items()}
        folder, columns = RunFolder(result.path), columns_in(run.model)
        history = folder.read_history()
        clients = max((entry.releases for entry in history), default=0)
        if not columns or run.strategy_name not in by or run.rounds > 1 or not clients:
            raise ConfigError(
                f"run {result.name} asked no question about ranges; see umbel ranges --help", code="config.question"
            )
        released = RangesBefore(len(columns) * CELLS, run.noise_multiplier, run.mechanism, by[run.strategy_name])
        return cls(columns, clients, released, len(folder.read_nodes()))


def ask_first(
    columns: Sequence[str], dataset: Dataset, name: str, wanted: Wanted, by: ReleaseBy, sites: int, seed: int
) -> tuple[Dataset, str, list[str]]:
    """Ask the training clients of a simulation, with a share of a run's epsilon.

    Return the dataset with the answers as ranges, which its rows need not lie in; the run's entry `ranges`; and lines
    about it. Raises `ConfigError` if too few clients would answer, or a column's numbers are too spread to be seen.
    """
    part, more = (replace(wanted, epsilon=share * wanted.epsilon) for share in _SHARES)
    try:
        asked = Question.planned(columns, dataset.manifest.train, part, by, sites)
    except ConfigError:
        of = f", {_SHARES[1]:.0%} of the run's {wanted.epsilon:g}"
        part, asked = more, Question.planned(columns, dataset.manifest.train, more, by, sites, of)
    from umbel.simulation.in_process import play

    apart = int(np.random.SeedSequence([seed, _SEEDS]).generate_state(1)[0])  # else the run would draw the same noise
    run = play({**asked.values, "dataset": name, "seed": apart}, nodes=sites)
    asked = replace(asked, clients=max(entry.releases for entry in run.state.history))
    answered = seen(asked.answers(run.state.hypotheses))
    layout = dataset.manifest.layout
    assert layout is not None, "its columns lack ranges"
    ends = {one.column: {"minimum": one.low, "maximum": one.high} for one in answered}
    manifest = dataset.manifest.model_copy(update={"layout": _changed(layout, ends)})
    ranges = ", ".join(f"{one.column} {one.low:,.6g} to {one.high:,.6g}" for one in answered)
    words = f"Ranges are not declared, so epsilon {part.epsilon:g} of {wanted.epsilon:g} was set aside to ask for them"
    who = "all sites together add" if by is ReleaseBy.SECURE else "a client's site adds"
    return replace(dataset, manifest=manifest), str(asked.release), [f"{words} first, and {who} the noise: {ranges}."]


def seen(answered: Sequence[Answer]) -> Sequence[Answer]:
    """Return answers; raise `ConfigError` if nothing was seen of a column."""
    if unseen := [one.column for one in answered if one.low == one.high]:
        text = f"no cell of {', '.join(unseen)} holds enough clients to be seen in the noise"
        raise ConfigError(f"{text}; give public ranges of these", code="config.few-for-ranges")
    return answered


def with_answers(schema: Schema, answered: Sequence[Answer], release: RangesBefore) -> Schema:
    """Return a schema in which answers are scales and offsets, as constants that refuse no row, with their cost.

    A number from 1 % to 99 % of the clients' becomes one from -1 to 1; a target has no offset. Raises `ConfigError` if
    a column is none of its numbers, or nothing was seen of it.
    """
    known = {column.name: column for column in (*schema.features, schema.target) if column.type in _NUMBERS}
    if strange := [one.column for one in answered if one.column not in known]:
        raise ConfigError(f"the schema has no column of numbers {strange[0]!r}", code="config.question")
    entries = {}
    for one in seen(answered):
        low, high = (0.0 if abs(end) < 2**-15 else end for end in (one.low, one.high))
        entries[one.column] = scaling(low, high, one.column == schema.target.name)
    provenance = f"{schema.provenance} {release.provenance}".strip()
    return _changed(schema, entries).model_copy(update={"provenance": provenance})


def _changed(schema: Schema, entries: Mapping[str, Mapping[str, float]]) -> Schema:
    def changed(column: Column) -> Column:
        return column.model_copy(update=dict(entries.get(column.name, {})))

    return schema.model_copy(
        update={"features": [changed(one) for one in schema.features], "target": changed(schema.target)}
    )
