"""The report of a run: one self-contained page. Its words are in ``page.toml``."""

from __future__ import annotations

import math
import re
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup
from numpy.typing import NDArray

from umbel import strategies
from umbel.privacy.accounting.guarantee import MEANINGFUL, amount, gap, guarantee, stated
from umbel.privacy.accounting.rows import row_gap
from umbel.protocol.arrays import flatten
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Kind
from umbel.protocol.run_config import RunConfig, Validation
from umbel.protocol.words import after_round, count_of
from umbel.server.history import MIN_ROUNDS, RELEASES_EACH, Round, State, fitted, last_rounds, undecided
from umbel.server.report import figures
from umbel.server.report.alarms import alarms
from umbel.server.report.figures import STYLED, key, number
from umbel.server.summary import Summary, decimals
from umbel.server.worth import OWN_WAYS, STAYS, Worth, figure

_SIGNS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and line feed, and those that change the direction of text."""
_NOUN = re.compile("([a-z]*[a-gi-rt-wy])(?:[ _-](?:id|name))?")
"""A name of a column that is one word, to which an s can be added."""
_MAX_ROWS = 1000
_SMALL = 12  # parameters up to which hypotheses are printed


@dataclass(eq=False)
class View:
    """The input of a report, and values derived from it that the page needs more than once."""

    name: str
    summary: Summary
    state: State
    participations: NDArray[np.int64]  # releases of each training client
    config: Mapping[str, Any]  # the run config
    worth: Worth | None = None  # if it was measured

    def __post_init__(self) -> None:
        state, summary, release = self.state, self.summary, self.summary.release
        self.k = k = len(next(iter(state.hypotheses.values())))
        # A strategy may change the number of hypotheses. Rounds with another number say nothing about these.
        self.history = [fitted(entry, k) for entry in state.history]
        self.trained = [entry for entry in self.history if entry.asked]
        self.validated = [entry for entry in self.history if entry.loss is not None]
        self.best = None if state.best_loss == math.inf else self.history[state.best_round]
        """The round after which the loss was lowest; None without validation."""
        self.every = -(-len(self.history) // _MAX_ROWS) or 1
        """One in so many rounds has a row in the table."""
        self.undecided = undecided(self.history, state.best_round)
        """Number of other rounds that noise does not tell from the best."""
        self.metric_differs = summary.model.metric.name.lower() != summary.loss_name.lower()
        self.groups = np.array([entry.groups for entry in self.trained], np.int64).reshape(len(self.trained), k)
        busiest = np.argsort(-self.groups.sum(axis=0), kind="stable")[:STYLED]
        self.shown: list[int] = list(range(k)) if k <= STYLED else sorted(int(j) for j in busiest)
        self.together = release.kind is Kind.SECURE
        self.by_site = release.kind is Kind.SITE or self.together
        self.gap, self.row_gap = gap(release), row_gap(release) if release.by_rows else ""
        """Why there is no guarantee for clients, and for rows though noise in training hides them; empty if there is
        one."""
        self.took_part = int((self.participations > 0).sum())
        median = float(np.median(self.participations)) if len(self.participations) else 0.0
        self.often = median, int(self.participations.max(initial=0))
        """Number of releases of the median client and of the busiest one."""
        ended = self.often[1], summary.left(state.history)
        self.once, self.of_client = guarantee({release: 1}, summary.delta), summary.of_client(*ended)
        """The guarantee to a client of one participation, and of the run; None where there is none."""
        self.of_row, self.why_counted = summary.of_row(*ended), summary.why_counted(*ended)
        self.weak = self.of_client is None or self.of_client.epsilon > MEANINGFUL
        self.paper = [amount(release.paper_spend(times)) for times in self.often]
        self.alarms = alarms(
            state.history,
            k,
            Validation.read(str(self.config.get("validation", "")), "validation").every,
            summary.validators,
        )

    @property
    def client(self) -> tuple[str, str]:
        """The noun for a client, and for several: the name of the data's column of clients, if it has a plural."""
        layout = self.summary.manifest.layout if self.summary.manifest else None
        noun = _NOUN.fullmatch(layout.client.name.lower() if layout and layout.client else "client")
        client = noun[1] if noun else "client"
        return client, re.sub("(?<=[^aeiou])y$", "ie", client) + "s"

    @property
    def began(self) -> str:
        """The start of the run, from its name; empty if the name has no time."""
        start = re.match(r"\d{8}-\d{6}(?=-)", self.name)
        with suppress(ValueError):
            return time.strftime("%d %B %Y, %H:%M:%S", time.strptime(start[0], "%Y%m%d-%H%M%S")) if start else ""
        return ""

    @property
    def disclosed(self) -> bool:
        """Whether training clients disclosed their choices."""
        with suppress(ConfigError):
            return strategies.load(str(self.config.get("strategy"))).discloses_choice
        return False

    @property
    def drawn(self) -> dict[str, Markup]:
        """The figures, by name; those without a value in any round are missing."""
        factor, best, drawn = self.summary.factor, self.best.number if self.best else None, dict[str, Markup]()
        label = f"{self.summary.loss_name}{self.summary.in_unit}"
        if self.validated:
            rounds, losses = _numbers(self.validated), [(entry.loss or 0.0) * factor for entry in self.validated]
            drawn["loss"] = figures.curve("loss", rounds, losses, label, None if self.undecided else best)
            if self.metric_differs:
                values = [math.nan if entry.metric is None else entry.metric for entry in self.validated]
                metric = self.summary.model.metric
                title = f"{metric.name}{' (share of rows)' * metric.share}"
                drawn["metric"] = figures.curve("metric", rounds, values, title, best)
        if spread := [entry for entry in self.history if entry.loss_spread]:
            quantiles = np.array([entry.loss_spread for entry in spread]) * factor
            drawn["spread"] = figures.bands("spread", _numbers(spread), quantiles, label)
        if self.trained:
            drawn["releases"] = figures.releases("releases", _numbers(self.trained), self.groups, self.shown)
        if self.k > 1:
            steady = [entry for entry in self.state.history if len(entry.nearest) == self.k]
            nearest = np.array([entry.nearest for entry in steady])
            drawn["distances"] = figures.distances("distances", _numbers(steady), nearest, self.shown)
        if len(self.participations):
            drawn["spending"] = figures.spending("spending", self.participations, self.often)
        return drawn

    @property
    def hypotheses(self) -> list[list[Any]]:
        """The rows of the table of hypotheses, first its heading; those that are not shown share the last row."""
        last, rest = last_rounds(self.history), [j for j in range(self.k) if j not in self.shown]
        rows: list[list[Any]] = [["Hypothesis"], *([key(place) + f" {j}"] for place, j in enumerate(self.shown))]
        rows += [[key(None) + f" {len(rest)} others"]] if rest else []
        counted = {"Picked in training" if self.disclosed else "Releases": self.groups}
        if last:
            counted[f"In the last {len(last)} rounds"] = np.array([entry.groups for entry in last])
        columns = []
        for head, groups in counted.items():
            totals = groups.sum(axis=0)
            columns.append([head, *(f"{totals[j]:,}" for j in self.shown), f"{totals[rest].sum():,}"])
        return [[*row, *(column[place] for column in columns)] for place, row in enumerate(rows)]

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """The numbers of the last hypotheses that are shown, each a row of a table; none of large ones."""
        shown = self.shown if self.summary.model.num_parameters <= _SMALL else []
        rows = [", ".join(f"{x:.3f}" for x in row) for row in flatten(self.state.hypotheses)[shown]]
        return [
            (f"Hypothesis {j}", f"({row})".replace("-", "\N{MINUS SIGN}")) for j, row in zip(shown, rows, strict=True)
        ]

    @property
    def listed(self) -> list[Round]:
        """The rounds of the table: every n-th, with the best and the last."""
        kept = {*range(0, len(self.history), self.every), len(self.history) - 1}
        return [e for i, e in enumerate(self.history) if i in kept or e is self.best]


def _numbers(entries: list[Round]) -> list[int]:
    return [entry.number for entry in entries]


def render(view: View, versions: Mapping[str, str]) -> str:
    """Return the report of a finished run as one HTML page, with the versions of umbel and its libraries in the run."""
    defaults = RunConfig().entries()
    entries = [(key, _text(value), value == defaults.get(key, None)) for key, value in view.config.items()]
    page = _page().render(
        view=view,
        summary=view.summary,
        release=view.summary.release,
        alarms=view.alarms,
        judged=len(last_rounds(view.history)),
        worth=view.worth,
        drawn=view.drawn,
        versions=list(versions.items()),
        changed=[(key, value) for key, value, default in entries if not default],
        defaults=[(key, value) for key, value, default in entries if default],
    )
    return _SIGNS.sub("\ufffd", page)


@cache
def _page() -> Template:
    """Return the template; compiling it takes longer than filling it in."""
    text = tomllib.loads((files(__package__) / "page.toml").read_text(encoding="utf-8"))
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.globals |= {"number": number, "count_of": count_of, "stated": stated, "style": text["style"]}
    page.globals |= {"after": after_round, "decimals": decimals, "figure": figure, "own_ways": OWN_WAYS, "stays": STAYS}
    page.globals |= {"meaningful": MEANINGFUL, "min_rounds": MIN_ROUNDS, "releases_each": RELEASES_EACH}
    return page.from_string(text["page"])


def _text(value: Any) -> str:
    """Return a value of the run config in its usual notation."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'
