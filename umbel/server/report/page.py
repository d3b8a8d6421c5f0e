"""The report of a run: one self-contained page."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from umbel.privacy.accounting.guarantee import MEANINGFUL, stated
from umbel.protocol.run_config import RunConfig, Validation
from umbel.protocol.words import count_of
from umbel.server.history import MIN_ROUNDS, RELEASES_EACH, last_rounds
from umbel.server.report import pictures, tables
from umbel.server.report.alarms import alarms
from umbel.server.report.figures import number
from umbel.server.report.view import View

_SIGNS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and line feed, and those that change the direction of text."""


def render(view: View, versions: Mapping[str, str]) -> str:
    """Return the report of a finished run as one HTML page.

    Parameters
    ----------
    view : View
        The run.
    versions : mapping
        Versions of umbel and its libraries in the run.
    """
    defaults = RunConfig().entries()
    entries = [(key, _text(value), value == defaults.get(key, None)) for key, value in view.config.items()]
    page = _page().render(
        view=view,
        summary=view.summary,
        release=view.summary.release,
        alarms=alarms(
            view.state.history,
            view.k,
            Validation.read(str(view.config.get("validation", "")), "validation").every,
            view.summary.validators,
        ),
        judged=len(last_rounds(view.history)),
        worth=view.worth,
        worth_table=tables.worth(view.worth) if view.worth else None,
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
    page.globals |= {"meaningful": MEANINGFUL, "pictures": pictures, "tables": tables}
    page.globals["rules"] = {"rounds": MIN_ROUNDS, "each": RELEASES_EACH}
    return page.from_string(text["page"])


def _text(value: Any) -> str:
    """Return a value of the run config in its usual notation."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'
