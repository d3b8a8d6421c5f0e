"""The report of a run: one page that needs no other file, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from umbel.protocol.run_config import RunConfig
from umbel.server.history import MIN_ROUNDS, RELEASES_EACH
from umbel.server.observer import Section
from umbel.server.report import compare, pictures, tables, words
from umbel.server.report.alarms import DRIFTED
from umbel.server.report.template import PAGE
from umbel.server.report.view import HeldOut, View


def render(
    view: View,
    versions: Mapping[str, str],
    sections: Sequence[Section] = (),
    others: Sequence[View] = (),
    local_only: HeldOut | None = None,
) -> str:
    """Return the report of a run that is over, as one HTML page.

    Parameters
    ----------
    view : View
        The run.
    versions : mapping
        Of what it ran with.
    sections : sequence of Section
        What observers add.
    others : sequence of View
        Runs to compare it with, which `compare.check` has passed; those that differ in the seed alone go together.
    local_only : HeldOut, optional
        What clients reach that train by themselves.
    """
    runs = compare.runs_of(view, others)
    beside = bool(others or local_only)
    defaults = RunConfig().entries()
    entries = [(key, _text(value), value == defaults.get(key, None)) for key, value in view.config.items()]
    return _page().render(
        title=view.title,
        name=view.name,
        began=view.began,
        verdict=words.verdict(view),
        alarms=words.alarms(view),
        rounds_judged=words.rounds_judged(view),
        lead=words.lead(view),
        tiles=words.tiles(view),
        comparison=compare.table(runs, local_only) if beside else None,
        learning=pictures.learning(view, runs),
        spread=pictures.spread(view),
        spread_table=tables.spread(view),
        pictures=pictures.hypotheses(view),
        hypotheses=tables.hypotheses(view),
        truth=view.summary.found(view.state.best),
        planes=pictures.planes(view),
        sections=sections,
        spending=pictures.spending(view),
        spent_means=words.spent_means(view),
        facts=words.facts(view),
        rounds=tables.rounds(view),
        rules={"rounds": MIN_ROUNDS, "each": RELEASES_EACH, "drifted": f"{DRIFTED:.0%}"},
        versions=list(versions.items()),
        config=[(key, value) for key, value, default in entries if not default],
        defaults=[(key, value) for key, value, default in entries if default],
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
