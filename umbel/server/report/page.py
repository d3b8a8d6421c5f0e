"""The report of a run: one page that needs no other file, for people."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from umbel.privacy.accounting.guarantee import DELTA, MEANINGFUL, amount
from umbel.protocol.run_config import RunConfig
from umbel.server.history import MIN_ROUNDS, RELEASES_EACH, last_rounds
from umbel.server.observer import Section
from umbel.server.report import compare, pictures, tables
from umbel.server.report.alarms import DRIFTED, alarms, count_of
from umbel.server.report.figures import number
from umbel.server.report.style import drawing
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
    manifest, defaults = view.summary.manifest, RunConfig().entries()
    entries = [(key, _text(value), value == defaults.get(key, None)) for key, value in view.config.items()]
    return _page().render(
        view=view,
        summary=view.summary,
        release=view.summary.release,
        alarms=alarms(
            view.steady,
            view.k,
            int(view.config.get("validate-every", 1)),
            manifest.split["validation"] if manifest else None,
        ),
        judged=len(last_rounds(view.history)),
        runs=runs,
        comparison=compare.table(runs, local_only) if others or local_only else None,
        sections=sections,
        versions=list(versions.items()),
        changed=[(key, value) for key, value, default in entries if not default],
        defaults=[(key, value) for key, value, default in entries if default],
    )


@cache
def _page() -> Template:
    """Return the template; to compile it takes longer than to fill it in."""
    text = tomllib.loads((files(__package__) / "page.toml").read_text(encoding="utf-8"))
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters["drawing"] = drawing
    page.globals |= {"number": number, "count_of": count_of, "amount": amount, "style": text["style"]}
    page.globals |= {"delta": f"{DELTA:g}", "meaningful": MEANINGFUL, "pictures": pictures, "tables": tables}
    page.globals["rules"] = {"rounds": MIN_ROUNDS, "each": RELEASES_EACH, "drifted": f"{DRIFTED:.0%}"}
    return page.from_string(text["page"])


def _text(value: Any) -> str:
    """Return a value of the run config much as one writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'
