"""The page of a site's books: for its people in the console, and for a data protection officer as one file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache

from jinja2 import Environment, StrictUndefined, Template

from umbel.console.books import Books, counted, plan, prices
from umbel.console.explained import asked, explained
from umbel.privacy.gate.runs import SHOWN, Request, Status
from umbel.privacy.gate.site_log import Decision
from umbel.protocol.cli import printable
from umbel.protocol.project import PACKAGE
from umbel.protocol.words import count_of

_MOST_LINES = 500
_MOST_CLIENTS = 20  # shown at once: those who have used most of their budgets
_LISTED = 100  # clients, with those on request; all others together, since a page must stay small
_STOPPING = (
    "To stop a run now, refuse the request that allowed it. If the policy alone allowed it, stop the site's node, or "
    'set approve = "ask" and start the node again.'
)


@dataclass(frozen=True)
class Chosen:
    """The lines of the log to show: of one run, of one decision, or all."""

    run: str = ""
    decision: str = ""


def render(books: Books, token: str = "", told: str = "", chosen: Chosen = Chosen()) -> str:
    """Return the page; with a console's token, it has forms to decide on requests and to filter the log."""
    lines = [
        line
        for line in reversed(books.lines)
        if chosen.run in ("", line["run"]) and chosen.decision in ("", line["decision"])
    ]
    page = _page().render(
        books=books,
        policy=books.site.policy if books.site else None,
        now=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        token=token,
        told=told,
        chosen=chosen,
        waiting=[one for one in books.requests if one.status is Status.WAITING],
        decided=[one for one in reversed(books.requests) if one.status is not Status.WAITING],
        people={one.digest[:SHOWN]: _allowed(one) for one in books.requests},
        lines=lines[:_MOST_LINES],
        clients=books.nearest(_LISTED),
        most=_MOST_CLIENTS,
        shares=books.shares(_LISTED),
        stopping=_STOPPING,
    )
    return printable(page)


def _allowed(request: Request) -> str:
    """Return who allowed a request under which a run was answered: its record names only who decided last."""
    person = request.person or "an unnamed person"
    said = {Status.APPROVED: person, Status.REFUSED: f"then approved, since refused by {person}"}
    return f"{said.get(request.status, 'then approved, waits again')} ({request.digest[:8]})"


@cache
def _page() -> Template:
    # By its path: the report's package imports what draws its figures, which takes longer than all else here.
    text, shared = (
        tomllib.loads((PACKAGE / room / "page.toml").read_text(encoding="utf-8"))
        for room in ("console", "server/report")
    )
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.globals |= {
        "counted": counted,
        "count_of": count_of,
        "asked": asked,
        "explained": explained,
        "plan": plan,
        "prices": prices,
    }
    page.globals["time"] = lambda text: text[:19].replace("T", " ")
    page.globals |= {"style": shared["style"] + text["style"], "decisions": [str(one) for one in Decision]}
    return page.from_string(text["page"])
