"""The page of a site's books in one file: for its people, and for a data protection officer."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache

from jinja2 import Environment, StrictUndefined, Template

from umbel.console.books import Books, plan, prices
from umbel.privacy.accounting.guarantee import amount
from umbel.privacy.gate.policy import AcceptedRadius, AcceptedRelease, Approval, Policy, Role
from umbel.privacy.gate.runs import SHOWN, Request, Status
from umbel.privacy.mechanisms import MECHANISMS
from umbel.protocol.cli import printable
from umbel.protocol.project import PACKAGE
from umbel.protocol.release import Protect
from umbel.protocol.words import count_of


def explained(policy: Policy) -> list[tuple[str, str]]:
    """Return what a policy means, as answers to the questions of the people who are responsible for the data."""
    return [
        ("who may ask", " ".join(_who(policy))),
        ("what leaves", " ".join(_what(policy))),
        ("what it costs a client", " ".join(_cost(policy))),
        ("what is not covered", " ".join(_gaps(policy)) or "Nothing that this policy allows."),
    ]


def _who(policy: Policy) -> Iterator[str]:
    named = ", ".join(policy.keys)
    if policy.approve is Approval.ASK:
        yield "Each run waits until the site's people approve it."
        if named:
            yield f"Requests say which of these researchers signed them, if one did: {named}."
    elif named:
        yield f"Runs that one of these researchers signed are answered: {named}. Every other run waits for approval."
    else:
        yield "The server alone decides which runs ask; the site answers all that this policy allows."
    if policy.strategies:
        yield f"The run must name one of these strategies: {policy.strategies}. The server could name a wrong one."
    yield (
        "The code is "
        + ("of these bundles: " + policy.bundle if policy.bundle else "that of the installed umbel")
        + "."
    )


def _what(policy: Policy) -> Iterator[str]:
    if policy.role is not Role.VALIDATION:
        yield {
            AcceptedRelease.CLIENT: "Models of single clients, each with its own noise.",
            AcceptedRelease.SITE: f"Sums over at least {policy.min_clients} clients, with noise added once.",
            AcceptedRelease.SECURE: f"Sums of {policy.least_parties} or more asked sites, each with some of the noise.",
            AcceptedRelease.ANY: f"Models of single clients with noise, or sums over {policy.min_clients} clients.",
        }[policy.release]
        alone = ", unless its training hides rows" if policy.protect is Protect.ROWS else ""
        yield (
            f"The noise multiplier (noise per clip norm) is at least {policy.min_noise_multiplier:g}, by "
            f"{policy.mechanisms}{alone}; the clip norm is at least {policy.clipping.floor:g}."
        )
        if policy.protect.rows:
            must = "must hide" if policy.protect is Protect.BOTH else "may hide just"
            least = f"noise of at least {policy.rows.noise:g} clip norms"
            yield f"Training {must} each row, with {least}. No client has more than {policy.rows.largest:,} rows."
        if math.isfinite(policy.max_choice_epsilon):
            most = f"{policy.max_choice_epsilon:g}"
            yield f"A client's choice of a hypothesis is random, with an epsilon of at most {most}."
    if policy.role is not Role.TRAIN:
        if policy.reports_exactly:
            yield "Exact losses of validation clients."
        else:
            yield f"The mean loss of the validation clients, with noise of {policy.report_noise:g}."
    elif policy.report_noise > 0:
        yield f"Losses of training clients, each with noise of {policy.report_noise:g}."
    yield "The number of clients."


def _cost(policy: Policy) -> Iterator[str]:
    budget, rows = policy.budget, policy.row_budget
    if math.isfinite(budget.epsilon):
        at = f" at delta {budget.delta:g}" if budget.delta else ""
        yield (
            f"At most an epsilon of {amount(budget.epsilon)}{at}, over all runs together: between any two data sets of "
            "the client, so it hides what the client's data are, and not whether the client takes part."
        )
    if math.isfinite(rows.epsilon):
        at = f" at delta {rows.delta:g}" if rows.delta else ""
        yield (
            f"At most an epsilon of {amount(rows.epsilon)}{at} for each row that is added or removed, over all "
            "runs together: it hides one row, and not what the client's rows have in common."
        )
    if math.isfinite(policy.max_participations):
        yield f"At most {count_of(int(policy.max_participations), 'participation')} in all."
    if policy.approve is Approval.ASK or policy.researchers:
        yield "In one run at most as many participations and reports as its approved or signed settings say."


def _gaps(policy: Policy) -> Iterator[str]:
    if math.isinf(policy.budget.epsilon):
        if not policy.has_budget:
            yield "There is no budget: nothing bounds what a client's releases show together."
        else:
            yield "There is no budget for a client: what its rows have in common may show."
    if policy.clipping.mode is AcceptedRadius.ANY:
        yield "The paper's clipping depends on the data: such a release has no epsilon."
    if math.isinf(policy.max_choice_epsilon):
        yield "The choice of a hypothesis may be open: it shows which group a client fits."
    if policy.role is not Role.TRAIN and policy.reports_exactly:
        yield "Validation clients report exact losses, and no budget counts them."
    if policy.insecure_seed:
        yield "The server knows the seed of all noise and can subtract it."
    if policy.parties and policy.release in (AcceptedRelease.SECURE, AcceptedRelease.ANY):
        most = count_of(policy.colluding_parties, "site")
        yield f"The noise of a secure sum is that of all its sites: at most {most} may tell the server everything."
    if others := sorted({*policy.mechanisms.split()} - MECHANISMS.keys()):
        yield f"Other code adds the noise: {', '.join(others)}."
    if policy.app:
        yield f"The site's own app answers: {policy.app}."


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
