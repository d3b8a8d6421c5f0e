"""The page of a site's books in one file: for its people, and for a data protection officer."""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime
from functools import cache

from jinja2 import Environment, StrictUndefined, Template

from umbel.console.books import Books, plan, prices
from umbel.console.explained import explained
from umbel.privacy.gate.runs import SHOWN, Request, Status
from umbel.protocol.cli import printable
from umbel.protocol.project import PACKAGE
from umbel.protocol.words import count_of

_MOST_LINES = 500
_MOST_CLIENTS = 100  # those who have used most of their budgets, since a page must stay small
_STOPPING = (
    "To stop a run now, refuse the request that allowed it. If the policy alone allowed it, stop the site's node, or "
    'set approve = "ask" and start the node again.'
)


def render(books: Books) -> str:
    """Return the page."""
    waits = Status.WAITING
    page = _page().render(
        books=books,
        policy=books.site.policy if books.site else None,
        now=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        waiting=[one for one in books.requests if one.status is waits],
        decided=[one for one in reversed(books.requests) if one.status is not waits],
        people={one.digest[:SHOWN]: _allowed(one) for one in books.requests},
        lines=books.lines[: -_MOST_LINES - 1 : -1],
        most=_MOST_CLIENTS,
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
        "count_of": count_of,
        "explained": explained,
        "plan": plan,
        "prices": prices,
    }
    page.globals["time"] = lambda text: text[:19].replace("T", " ")
    page.globals["style"] = shared["style"] + text["style"]
    return page.from_string(text["page"])
