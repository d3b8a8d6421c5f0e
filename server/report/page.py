"""The report of a run: one page that needs no other file, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from numpy.typing import NDArray

from server.history import State
from server.observer import Section
from server.report import pictures, tables, words
from server.report.alarms import DRIFTED, MIN_ROUNDS, RELEASES_EACH
from server.report.template import PAGE
from server.report.view import View
from server.snapshots import Snapshots
from server.summary import Summary


def render(
    name: str,
    summary: Summary,
    state: State,
    participations: NDArray[np.int64],
    snapshots: Snapshots,
    config: Mapping[str, Any],
    versions: Mapping[str, str],
    sections: Sequence[Section] = (),
) -> str:
    """Return the report of a run that is over, as one HTML page.

    Parameters
    ----------
    name : str
        Of the run.
    summary : Summary
    state : State
    participations : ndarray of int
        How often each training client released.
    snapshots : Snapshots
    config : mapping
        The run config.
    versions : mapping
        Of what the run ran with.
    sections : sequence of Section
        What observers add.
    """
    view = View(summary, state, participations, snapshots, config)
    return _page().render(
        name=name,
        alarms=words.alarms(view),
        rounds_judged=words.rounds_judged(view),
        lead=words.lead(view),
        tiles=words.tiles(view),
        facts=words.facts(view),
        pictures=pictures.over_rounds(view),
        hypotheses=tables.hypotheses(view),
        truth=summary.found(state.best),
        spending=pictures.spending(view),
        spent_means=words.spent_means(view),
        planes=pictures.planes(view),
        sections=sections,
        rounds=tables.rounds(view),
        config=[(key, _text(config[key])) for key in config],
        versions=list(versions.items()),
        rules={"rounds": MIN_ROUNDS, "each": RELEASES_EACH, "drifted": f"{DRIFTED:.0%}"},
    )


@cache
def _page() -> Template:
    """Return the template; to compile it takes longer than to fill it in."""
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(PAGE)


def _text(value: Any) -> str:
    """Return a value of the run config much as one writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'
