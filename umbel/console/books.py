"""A site's books as people read them: its requests with their prices, its clients with what remains, its runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from umbel.client.checks import entries_of
from umbel.privacy.accounting.guarantee import DELTA, amount, guarantee, in_words, pure_spent, site_release
from umbel.privacy.gate.charges import NO_LIMITS, Account, Limits, paper_spent, priced, read
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.runs import Request, Runs
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.site_log import Line, SiteLog, from_ranges
from umbel.privacy.gate.store import Names, beside
from umbel.privacy.mechanisms import MECHANISMS
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import SiteError
from umbel.protocol.release import Clipping, Kind, Release, ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.protocol.words import count_of

_MANY = 10_000
"""Remaining participations beyond this number are not counted."""


@dataclass(frozen=True)
class Client:
    """A client's spending. `used` is the part of its budget, from 0 to 1; None without a budget or a guarantee.

    `left` is how many more releases like its last one are within its limits; None if nothing bounds them.
    """

    number: int
    name: str
    releases: int
    epsilon: str
    epsilon_at_delta: str
    used: float | None
    left: int | None

    @property
    def order(self) -> tuple[float, int]:
        """Clients near the end of their budget come first."""
        return -(self.used or 0.0), self.number


@dataclass(frozen=True)
class Run:
    """A run's messages to the site, and their cost.

    `cost` is the epsilon of the client that it cost most, and `requests` are those under which it was answered.
    """

    run: str
    first: str
    last: str
    messages: Mapping[str, int]
    requests: tuple[str, ...]
    releases: int
    clients: tuple[int, ...]
    cost: str
    cost_at_delta: str


@dataclass(frozen=True)
class Books:
    """The books of a site.

    Parameters
    ----------
    ledger : Path
        An intact ledger; the site's log lies beside it.
    site : Site, optional
        Its limits tell what remains.
    delta : float
        Of the epsilons that are shown, if the site's budget has no delta.
    """

    ledger: Path
    site: Site | None = None
    delta: float = DELTA

    @classmethod
    def of(cls, node_config: str) -> Self:
        """Return the books of the site that the text of a node's configuration describes."""
        site = Site.of(entries_of(node_config))
        if site.ledger_path is None:
            raise SiteError("a simulated site has no ledger; name the site's data", code="site.no-data")
        return cls(site.ledger_path, site)

    @cached_property
    def limits(self) -> Limits:
        """The limits of a client."""
        return self.site.limits if self.site else NO_LIMITS

    @cached_property
    def accounts(self) -> Mapping[ClientInDataset, Account]:
        """The releases of each client."""
        return self._opened.accounts()

    @cached_property
    def requests(self) -> list[Request]:
        """All requests, oldest first."""
        return Runs(self.ledger).requests()

    @cached_property
    def lines(self) -> list[Line]:
        """The lines of the site's log, oldest first; none if it has none yet."""
        log = SiteLog(beside(self.ledger))
        return list(log.lines()) if log.path.exists() else []

    @cached_property
    def clients(self) -> list[Client]:
        """Every client that has released something, by number."""
        names = dict(enumerate(Names(self.ledger).read()))
        last = {row["client"]: row["release"] for row in self._opened.table("charges")}
        kinds = {row["id"]: read(row["what"]) for row in self._opened.table("releases")}
        shared: dict[Any, tuple[str, str, float | None, int | None]] = {}
        found = []
        for number, account in self.accounts.items():
            key = tuple(account.items()), last[number]
            if key not in shared:
                shared[key] = (*self._spent(account), self.used(account), self._left(account, kinds[last[number]]))
            found.append(Client(number, str(names.get(number, "")), sum(account.values()), *shared[key]))
        return found

    @cached_property
    def runs(self) -> list[Run]:
        """Every run that asked something, by its first message."""
        charged: dict[str, dict[int, Counter[Release]]] = {}
        for line in self.lines:
            for one in line.get("charged", []):
                for client in from_ranges(one["clients"]):
                    own = charged.setdefault(line["run"], {}).setdefault(client, Counter())
                    own[priced(read(one["release"]))] += 1
        by_run: dict[str, list[Line]] = {}
        for line in self.lines:
            if line["run"] and line["message"] != "approval":
                by_run.setdefault(line["run"], []).append(line)
        return [self._run(run, lines, charged.get(run, {})) for run, lines in by_run.items()]

    def room(self, request: Request) -> str:
        """Return in words how many of a request's participations fit into what the clients have left."""
        releases = _release(request)
        if releases is None or not self.limits.any:
            return ""
        release, most = releases
        fresh = min(self._left({}, release) or 0, most)
        able = sum(self.limits.allow(account, release) for account in self.accounts.values())
        said = f"A client that has spent nothing can take part {count_of(fresh, 'time')} in this run."
        if self.accounts:
            said += f" Of {count_of(len(self.accounts), 'client')} that took part before, {able} can do so once more."
        return said

    def used(self, account: Account) -> float | None:
        """Return the part of its budget that a client has used; None without a budget or a guarantee."""
        budget, found = self.limits.budget, guarantee(account, self.limits.delta or self.delta)
        if budget == math.inf or not budget or found is None:
            return None
        spent = found.epsilon if self.limits.delta else found.pure
        return min(1.0, spent / float(budget)) if math.isfinite(spent) else None

    def as_json(self) -> dict[str, Any]:
        """Return clients, runs and requests as plain values."""
        return {
            "ledger": str(self.ledger),
            "policy": self.site.policy.digest if self.site else "",
            "delta": self.delta,
            "clients": [asdict(one) for one in self.clients],
            "runs": [asdict(one) for one in self.runs],
            "requests": [with_prices(one) for one in self.requests],
        }

    @cached_property
    def _opened(self) -> Ledger:
        return Ledger(self.ledger, whole=True)

    def _run(self, run: str, lines: list[Line], charged: Mapping[int, Counter[Release]]) -> Run:
        costs = [guarantee(account, self.delta) for account in charged.values()]
        # The client that it cost most; none where a release of one has no guarantee.
        worst = None if None in costs else max((one.epsilon for one in costs if one), default=0.0)
        pure = max((pure_spent(account) for account in charged.values()), default=0)
        return Run(
            run,
            lines[0]["at"],
            lines[-1]["at"],
            dict(Counter(line["decision"] for line in lines)),
            tuple(dict.fromkeys(line["request"] for line in lines if line.get("request"))),
            sum(sum(account.values()) for account in charged.values()),
            tuple(sorted(charged)),
            amount(pure),
            "none" if worst is None else amount(worst),
        )

    def _spent(self, account: Account) -> tuple[str, str]:
        return in_words(guarantee(account, self.delta))

    def _left(self, account: Account, release: Release) -> int | None:
        """Return how many more releases like this one are within the limits."""
        if not self.limits.any:
            return None

        def allowed(more: int) -> bool:
            own = priced(release)
            return self.limits.allow({**account, own: account.get(own, 0) + more - 1}, release)

        low, high = 0, 1
        while high <= _MANY and allowed(high):
            low, high = high, 2 * high
        while low + 1 < high <= 2 * _MANY:
            middle = (low + high) // 2
            low, high = (middle, high) if allowed(middle) else (low, middle)
        return low


def with_prices(request: Request) -> dict[str, Any]:
    """Return a request and its prices as plain values."""
    return asdict(request) | {"prices": dict(prices(request))}


def prices(request: Request) -> list[tuple[str, str]]:
    """Return what a client pays: for a participation, for as many as the run may ask of it, and for a report."""
    asks = request.asks
    if (found := _release(request)) is None:
        # A name may lead to any installed code, and the site has not approved it.
        other = asks["config"]["mechanism"]
        return [("price", f"unknown: mechanism {other!r} is other code, which this command does not run")]
    release, most = found
    each = [("a participation", 1), (f"the run, at most {count_of(most, 'participation')} of a client", most)]
    rows = [(f"price of {what}", _cost({release: times})) for what, times in each]
    if noise := asks.get("report-noise"):
        report = Release(Kind.REPORT, 2, noise, Clipping.PUBLIC, math.sqrt(2))
        rows.append(("price of a report", _cost({report: 1})))
    return rows


def plan(request: Request, whole: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield a request's settings: those that say how clients train, or all."""
    entries: Mapping[str, Any] = request.asks["config"]
    for name in entries if whole else _PLAN:
        if name in entries and (whole or entries[name] != ""):
            yield name, entries[name]


# The training entries of a run config, in the order of a reader's questions.
_PLAN = (
    "strategy", "strategy-options", "model", "loss", "metric", "pretrained", "frozen", "local", "hypotheses", "rounds",
    "clients-per-round", "local-epochs", "local-steps", "batch-size", "step-size", "optimizer", "optimizer-options",
    "clip-gradient", "proximal", "message-noise", "noise-multiplier", "mechanism", "choice-epsilon",
    "max-participations", "noise-per", "clipping", "clip-norm", "clip-norm-decay", "clip-norm-floor", "restarts",
    "start-from", "validate-every",
)  # fmt: skip


def _release(request: Request) -> tuple[Release, int] | None:
    """Return the release of a participation, in a site's sums or alone, and how many a client may make in the run.

    None if another mechanism than umbel's would make it.
    """
    asks = request.asks
    run = RunConfig(**{name.replace("-", "_"): value for name, value in asks["config"].items()})
    if run.mechanism not in MECHANISMS:
        return None
    release = run.release(int(asks["n"]), run.most_hypotheses)
    if ReleaseBy.SITE in (asks.get("release"), asks["differs"].get("release_by")):
        release = site_release(release)
    return release, min(run.rounds, run.max_participations or run.rounds)


def _cost(account: dict[Release, int]) -> str:
    pure, at_delta = in_words(guarantee(account))
    paper = amount(paper_spent(account))
    return (
        f"epsilon between any two data sets: {pure}; at delta {DELTA:g}: {at_delta}; paper's budget, heuristic: {paper}"
    )
