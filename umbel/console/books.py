"""A site's books as people read them: its requests with their prices, its clients with what they spent, its runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

from umbel.client.checks import entries_of
from umbel.privacy.accounting.guarantee import (
    DELTA,
    amount,
    guarantee,
    in_words,
    released_by,
    secure_report,
)
from umbel.privacy.accounting.odometer import clients_to_date
from umbel.privacy.accounting.rows import row_guarantee, rows_to_date
from umbel.privacy.mechanisms import MECHANISMS
from umbel.privacy.site.charges import NO_LIMITS, Account, Limits, paper_spent
from umbel.privacy.site.config import Site
from umbel.privacy.site.journal import Journal, Names
from umbel.privacy.site.runs import Request, Runs
from umbel.privacy.site.totals import Line, from_ranges
from umbel.protocol.errors import ConfigError, ProtocolError, SiteError
from umbel.protocol.ranges import in_words as question_in_words
from umbel.protocol.release import Release, ReleaseBy, report_release
from umbel.protocol.run_config import RunConfig
from umbel.protocol.words import count_of

_MOST_STEPS = 100_000
"""Steps of training that hide rows: more would take hours and any memory, and a server lets any number wait."""

_PRICING = frozenset(
    ("strategy", "model", "hypotheses", "rounds", "noise-multiplier", "mechanism", "choice-epsilon", "clipping",
     "max-participations")
)  # fmt: skip
_HALVINGS = 20  # for the part of a budget that is used


@dataclass(frozen=True)
class Client:
    """A client's spending.

    `used` is the part of its budget, or of its rows' budget if that is more, from 0 to 1; None without a budget.
    `paper` is the paper's budget, a heuristic. Epsilons of each of its rows are empty where no release hid rows, and
    those to date unless they were asked for.
    """

    number: int
    name: str
    releases: int
    epsilon: str
    epsilon_at_delta: str
    epsilon_to_date: str
    row_epsilon_at_delta: str
    row_epsilon_to_date: str
    paper: str
    used: float | None


@dataclass(frozen=True)
class Run:
    """A run's messages, the requests under which it was answered, and its charges."""

    run: str
    first: str
    last: str
    messages: Mapping[str, int]
    requests: tuple[str, ...]
    releases: int
    clients: int


@dataclass(frozen=True)
class Books:
    """The books of a site.

    Parameters
    ----------
    ledger : Path
        An intact journal.
    site : Site, optional
        Its limits decide what part of its budget a client has used.
    delta : float
        Of the epsilons that are shown, if the site's budget has no delta.
    to_date : bool
        Whether to show the epsilons that hold for releases that were not planned in advance.
    """

    ledger: Path
    site: Site | None = None
    delta: float = DELTA
    to_date: bool = False

    @classmethod
    def of(cls, node_config: str) -> Self:
        """Return the books of the site that the text of a node's configuration describes."""
        site = Site.of(entries_of(node_config))
        if site.ledger_path is None:
            raise SiteError("a simulated site has no journal; name the site's data", code="site.no-data")
        return cls(site.ledger_path, site)

    @cached_property
    def limits(self) -> Limits:
        """The limits of a client."""
        return self.site.limits if self.site else NO_LIMITS

    @cached_property
    def requests(self) -> list[Request]:
        """All requests, oldest first."""
        return Runs(self.ledger, witness=self._witness).requests()

    @cached_property
    def lines(self) -> list[Line]:
        """The outcome of each message, oldest first."""
        return [line for line in self._all_lines if line["kind"] == "message"]

    @cached_property
    def clients(self) -> list[Client]:
        """Every client that has released something; those nearest to the end of their budgets come first."""
        names = dict(enumerate(Names(self.ledger, witness=self._witness).read()))
        alike: dict[Any, tuple[Any, ...]] = {}  # many clients have the same account
        found = []
        for number, account in self.opened.accounts().items():
            if (key := tuple(account.items())) not in alike:
                alike[key] = (*self._epsilons(account), amount(paper_spent(account)), self.used(account))
            found.append(Client(number, str(names.get(number, "")), sum(account.values()), *alike[key]))
        return sorted(found, key=lambda one: (-(one.used or 0.0), one.number))

    def _epsilons(self, account: Account) -> Iterator[str]:
        yield from in_words(guarantee(account, self.delta))
        yield amount(clients_to_date(account, self.delta)) if self.to_date else ""
        yield in_words(row_guarantee(account, self.delta))[1] if self.hides_rows else ""
        yield amount(rows_to_date(account, self.delta)) if self.hides_rows and self.to_date else ""

    @cached_property
    def runs(self) -> list[Run]:
        """Every run that asked something, by its first message or charge."""
        by_run: dict[str, list[Line]] = {}
        for line in self._all_lines:
            if line["kind"] == "charges" or (line["kind"] == "message" and line["message"] != "approval"):
                by_run.setdefault(line["run"], []).append(line)
        by_run.pop("", None)
        found = []
        for run, lines in by_run.items():
            messages = dict(Counter(line["decision"] for line in lines if line["kind"] == "message"))
            requests = tuple(dict.fromkeys(line["request"] for line in lines if line.get("request")))
            charged = [client for line in lines for client in from_ranges(line.get("clients", ""))]
            found.append(Run(run, lines[0]["at"], lines[-1]["at"], messages, requests, len(charged), len({*charged})))
        return sorted(found, key=lambda run: run.first)

    @cached_property
    def hides_rows(self) -> bool:
        """Whether a release hid rows by noise in training; else a row's guarantee is its client's."""
        return any(release.by_rows for account in self.opened.accounts().values() for release in account)

    def used(self, account: Account) -> float | None:
        """Return the part of its budget that a client has used, or of its rows' budget if that is more; None without
        one. At a delta, the gate counts some releases with the least noise that the site accepts."""
        limits, parts = self.limits, []
        for budget, covers in ((limits.budget, limits.covers), (limits.row_budget, limits.covers_rows)):
            if 0 < budget < math.inf:
                parts.append(_part(account, Fraction(budget), covers))
        return max(parts, default=None)

    def as_json(self) -> dict[str, Any]:
        """Return clients, runs and requests as plain values."""
        return {
            "ledger": str(self.ledger),
            "policy": self.site.policy.digest if self.site else "",
            "delta": self.delta,
            "clients": [asdict(one) for one in self.clients],
            "runs": [asdict(one) for one in self.runs],
            "requests": [asdict(one) | {"prices": dict(prices(one))} for one in self.requests],
        }

    @cached_property
    def opened(self) -> Journal:
        """The journal."""
        opened = Journal(self.ledger, witness=self._witness)
        return opened.distrust(self.site.policy.mechanisms if self.site else "")

    @cached_property
    def _all_lines(self) -> list[Line]:
        return list(self.opened.lines())

    @property
    def _witness(self) -> Path | None:
        return self.site.witness_folder if self.site else None


def _part(account: Account, budget: Fraction, covers: Callable[[Account, Fraction], bool]) -> float:
    """Return the smallest part of a budget, from 0 to 1, that covers an account."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if covers(account, Fraction(middle) * budget) else (middle, high)
    return high


def prices(request: Request) -> list[tuple[str, str]]:
    """Return what a client pays: for a participation, for as many as the run may ask of it, and for a report."""
    asks = request.asks
    if isinstance(found := _release(request), str):
        return [("price", f"unknown: {found}")]
    release, most, reports = found
    each = [("a participation", 1), (f"the run, at most {count_of(most, 'participation')} of a client", most)]
    rows = [(f"price of {what}", _cost(release, times)) for what, times in each]
    if release.by_rows:
        rows += [(f"price of {what}, for a row", _cost(release, times, of_row=True)) for what, times in each]
    if noise := asks.get("report-noise"):
        noise = 0.0 if "insecure-seed" in asks else noise
        kinds = {"": report_release(noise)}
        if asks.get("release") == ReleaseBy.SECURE:
            kinds = {" alone": kinds[""], " in secure sums": secure_report(noise)}
        for how, report in kinds.items():
            all_of_them = f"the run's reports{how}, at most {count_of(reports, 'report')} of a client"
            each = [(f"a report{how}", 1), (all_of_them, reports)]
            rows += [(f"price of {what}", _cost(report, times)) for what, times in each]
    return rows


def plan(request: Request, whole: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield a request's settings: those that decide the price, and others that are not defaults; or all."""
    defaults, model = RunConfig().entries(), str(request.asks["config"].get("model"))
    with suppress(ConfigError):  # of a question that no site answers
        if question := question_in_words(model):
            yield "question", question
    for name, value in request.asks["config"].items():
        if whole or name in _PRICING or defaults.get(name) != value:
            yield name, value


def _release(request: Request) -> tuple[Release, int, int] | str:
    """Return the release of a participation, and a client's maximum numbers of participations and reports in the run.

    It is the release that costs most among those that the request allows. If the message differs from the run's
    settings, the message counts. A choice counts as one between two hypotheses, because a message may send fewer than
    the run config says. If the cost cannot be told, return the reason: one such request must not hide the others.
    """
    asks, differs = request.asks, request.asks["differs"]
    try:
        run = RunConfig(**{name.replace("-", "_"): value for name, value in asks["config"].items()})
    except ConfigError as error:  # such as for code that is not installed
        return str(error)
    if (mechanism := differs.get("mechanism", run.mechanism)) not in MECHANISMS:
        # A name may lead to any installed code, and the site has not approved it.
        return f"mechanism {mechanism!r} is other code, which this command does not run"
    try:
        task = run.training().with_texts(differs)
    except ProtocolError as error:
        return str(error)
    release = task.release(int(asks["n"]), min(2, int(differs.get("hypotheses", run.most_hypotheses))))
    if (steps := release.row_steps * run.most_participations) > _MOST_STEPS:
        return f"a client's training may take {count_of(steps, 'step')}, too many to compute their cost to a row"
    if "insecure-seed" in asks:
        release = release.without_noise()
    asked = asks.get("release"), differs.get("release_by")
    by = next((one for one in (ReleaseBy.SITE, ReleaseBy.SECURE) if one in asked), ReleaseBy.CLIENT)
    return released_by(by, release), run.most_participations, run.most_reports


@lru_cache(maxsize=1024)  # some take seconds, and requests may ask the same
def _cost(release: Release, times: int, of_row: bool = False) -> str:
    account = {release: times}
    pure, at_delta = in_words((row_guarantee if of_row else guarantee)(account))
    between = "for one row added or removed" if of_row else "between any two data sets"
    paper = "" if of_row else f"; paper's budget, heuristic: {amount(paper_spent(account))}"
    return f"epsilon {between}: {pure}; at delta {DELTA:g}: {at_delta}{paper}"
