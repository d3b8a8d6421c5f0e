"""The page of a site's books in one file: for its people, and for a data protection officer."""

from __future__ import annotations

import math
import tomllib
from datetime import UTC, datetime
from functools import cache

from jinja2 import DictLoader, Environment, StrictUndefined

from umbel.console.books import Books, plan, prices
from umbel.privacy.accounting.guarantee import amount
from umbel.privacy.mechanisms import MECHANISMS
from umbel.privacy.site.policy import Policy
from umbel.privacy.site.runs import SHOWN, Request, Status
from umbel.protocol.cli import printable
from umbel.protocol.project import PACKAGE
from umbel.protocol.words import count_of


def explained(policy: Policy) -> list[tuple[str, str]]:
    """Return what a policy means, as answers to the questions of the people who are responsible for the data."""
    others = sorted({*policy.mechanisms.split()} - MECHANISMS.keys())
    texts, questions = _texts()
    answers = (texts.get_template(question).render(policy=policy, others=others) for question in questions)
    return [(question, " ".join(answer.split())) for question, answer in zip(questions, answers, strict=True)]


_MOST_LINES = 500
_MOST_CLIENTS = 100  # those who have used most of their budgets, since a page must stay small
_STOPPING = (
    "To stop a run now, refuse the request that allowed it. If the policy alone allowed it, stop the site's node, or "
    'set approve = "ask" and start the node again.'
)


def render(books: Books) -> str:
    """Return the page."""
    waits = Status.WAITING
    page = (
        _texts()[0]
        .get_template("page")
        .render(
            books=books,
            policy=(policy := books.site.policy if books.site else None),
            explained=explained(policy) if policy else [],
            now=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
            waiting=[one for one in books.requests if one.status is waits],
            decided=[one for one in reversed(books.requests) if one.status is not waits],
            people={one.digest[:SHOWN]: _allowed(one) for one in books.requests},
            lines=books.lines[: -_MOST_LINES - 1 : -1],
            most=_MOST_CLIENTS,
            stopping=_STOPPING,
        )
    )
    return printable(page)


def _allowed(request: Request) -> str:
    """Return who allowed a request under which a run was answered: its record names only who decided last."""
    person = request.person or "an unnamed person"
    said = {Status.APPROVED: person, Status.REFUSED: f"then approved, since refused by {person}"}
    return f"{said.get(request.status, 'then approved, waits again')} ({request.digest[:8]})"


@cache
def _texts() -> tuple[Environment, list[str]]:
    """Return the page and the answers about a policy, as templates, and the questions that name these."""
    # By its path: the report's package imports what draws its figures, which takes longer than all else here.
    text, shared = (
        tomllib.loads((PACKAGE / room / "page.toml").read_text(encoding="utf-8"))
        for room in ("console", "server/report")
    )
    texts = Environment(
        loader=DictLoader({"page": text["page"], **text["policy"]}),
        autoescape=lambda name: name == "page",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    texts.globals |= {"count_of": count_of, "amount": amount, "plan": plan, "prices": prices, "inf": math.inf}
    texts.globals |= {"time": lambda text: text[:19].replace("T", " "), "style": shared["style"] + text["style"]}
    return texts, list(text["policy"])
