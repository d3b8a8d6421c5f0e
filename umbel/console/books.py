"""A site's books as people read them: its requests with their prices, its clients with what remains, its runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

from umbel.client.checks import entries_of
from umbel.privacy.accounting.guarantee import (
    DELTA,
    Guarantee,
    amount,
    gap,
    guarantee,
    in_words,
    pure_spent,
    released_by,
    secure_report,
)
from umbel.privacy.accounting.rows import row_gap, row_guarantee
from umbel.privacy.gate.charges import NO_LIMITS, Account, Limits, paper_spent, priced, read
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.runs import Request, Runs
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.site_log import Line, SiteLog
from umbel.privacy.gate.store import Names, beside
from umbel.privacy.mechanisms import MECHANISMS
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import ConfigError, SiteError
from umbel.protocol.release import Clipping, Release, ReleaseBy, report_release
from umbel.protocol.run_config import RunConfig
from umbel.protocol.words import count_of

_MANY = 10_000
"""Remaining participations beyond this number are not counted."""

_MOST_STEPS = 100_000
"""Steps of training that hide rows: more would take hours and any memory, and a server lets any number wait."""

_HALVINGS = 20  # for the part of a budget that is used


@dataclass(frozen=True)
class Client:
    """A client's spending. `used` is the part of its budget, from 0 to 1; None without a budget or a guarantee.

    `row_epsilon_at_delta` is the guarantee of each of its rows. `left` is how many more releases like its last one are
    within its limits, of which at most 10,000 are counted; None if nothing bounds them.
    """

    number: int
    name: str
    releases: int
    epsilon: str
    epsilon_at_delta: str
    row_epsilon_at_delta: str
    used: float | None
    left: int | None


@dataclass(frozen=True)
class Share:
    """Clients that have used about the same part of their budgets.

    `tenth` is 0 for less than a tenth, and 9 for nine tenths or more; None without a budget or a guarantee.
    """

    tenth: int | None
    clients: int
    fewest: int
    most: int
    """The smallest and the largest number of releases of one of them."""


@dataclass(frozen=True)
class Run:
    """A run's messages to the site, and their cost.

    `cost` is the epsilon of the client that it cost most, `row_cost_at_delta` that of a row of such a client, and
    `requests` are those under which it was answered.
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
    row_cost_at_delta: str


@dataclass(frozen=True)
class _Charged:
    """The charges of a run: the times of the first and the last, and what each client released."""

    times: Sequence[str] = ()
    accounts: Mapping[int, Account] = field(default_factory=dict)


@dataclass(frozen=True)
class Books:
    """The books of a site.

    Parameters
    ----------
    ledger : Path
        An intact ledger; the site's log lies beside it.
    site : Site, optional
        Its limits decide what clients have left.
    delta : float
        Of the epsilons that are shown, if the site's budget has no delta.
    node_config : str
        The text that describes the site, if they are to follow it (`now`).
    """

    ledger: Path
    site: Site | None = None
    delta: float = DELTA
    node_config: str = ""

    @classmethod
    def of(cls, node_config: str) -> Self:
        """Return the books of the site that the text of a node's configuration describes."""
        site = Site.of(entries_of(node_config))
        if site.ledger_path is None:
            raise SiteError("a simulated site has no ledger; name the site's data", code="site.no-data")
        return cls(site.ledger_path, site, node_config=node_config)

    def now(self) -> Self:
        """Return the books as they are now: ledger, log, and the policy, whose file a node reads for each message."""
        return type(self).of(self.node_config) if self.node_config else replace(self)

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
        """The lines of the site's log, oldest first; none if it has none yet. The ledger has all their charges."""
        log = SiteLog(beside(self.ledger))
        lines = list(log.lines()) if log.path.exists() else []
        log.check_in_ledger(lines[-1] if lines else None)
        return lines

    @property
    def clients(self) -> list[Client]:
        """Every client that has released something, by number."""
        return self._listed(self.accounts)

    def nearest(self, most: int) -> list[Client]:
        """Return at most so many clients: those nearest to the end of their budgets."""
        return self._listed(self._by_used[:most])

    def shares(self, after: int) -> list[Share]:
        """Return all clients but the `after` nearest to the end of their budgets, put together by tenths of these."""
        releases: dict[int | None, list[int]] = {}
        for number in self._by_used[after:]:
            used, account = self._used[number], self.accounts[number]
            tenth = None if used is None else min(9, int(10 * used))
            releases.setdefault(tenth, []).append(sum(account.values()))
        return [Share(tenth, len(own), min(own), max(own)) for tenth, own in releases.items()]

    @cached_property
    def runs(self) -> list[Run]:
        """Every run that asked something, by its first message or charge."""
        _, charged = self._charged
        by_run: dict[str, list[Line]] = {run: [] for run in charged}
        for line in self.lines:
            if line["run"] and line["message"] != "approval":
                by_run.setdefault(line["run"], []).append(line)
        found = [_run(run, lines, charged.get(run, _Charged()), self.delta) for run, lines in by_run.items()]
        return sorted(found, key=lambda run: run.first)

    def room(self, request: Request) -> str:
        """Return in words how many of a request's participations fit into what the clients have left."""
        found = _release(request)
        if isinstance(found, str) or not self.limits.any:
            return ""
        release, most, _ = found
        fresh = min(self._left({}, release) or 0, most)
        able = sum(many for account, many in self._alike if self.limits.allow(account, release))
        often = f"{_MANY:,} times or more" if fresh == _MANY < most else count_of(fresh, "time")
        said = f"A client that has spent nothing can take part {often} in this run."
        if self.accounts:
            said += f" Of {count_of(len(self.accounts), 'client')} that took part before, {able:,} can do so once more."
        return said

    def used(self, account: Account) -> float | None:
        """Return the part of its budget that a client has used, or of its rows' budget if that is more.

        None without a budget or a guarantee.
        """
        parts = [part for part in (self._used_by_client(account), self._used_by_rows(account)) if part is not None]
        return max(parts, default=None)

    def _used_by_rows(self, account: Account) -> float | None:
        limits = self.limits
        if limits.row_budget == math.inf or not limits.row_budget or any(map(row_gap, account)):
            return None
        budget = Fraction(limits.row_budget)
        return _part(lambda part: limits.covers_rows(account, part * budget))

    def _used_by_client(self, account: Account) -> float | None:
        limits = self.limits
        if limits.budget == math.inf or not limits.budget or any(map(gap, account)):
            return None
        budget = Fraction(limits.budget)
        if not limits.delta:
            pure = pure_spent(account)
            return float(min(Fraction(1), pure / budget)) if isinstance(pure, Fraction) else None
        # At a delta, the gate counts some releases with the least noise that the site accepts.
        return _part(lambda part: limits.covers(account, part * budget))

    @property
    def hides_rows(self) -> bool:
        """Whether a release hid rows by noise in training; else a row's guarantee is its client's."""
        return any(release.by_rows for account, _ in self._alike for release in account)

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

    def _listed(self, numbers: Iterable[ClientInDataset]) -> list[Client]:
        names = dict(enumerate(Names(self.ledger).read()))
        return [self._client(number, str(names.get(number, ""))) for number in numbers]

    def _client(self, number: ClientInDataset, name: str) -> Client:
        account, last = self.accounts[number], self._charged[0][number]
        key = tuple(account.items()), last
        if key not in self._spending:
            self._spending[key] = (*self._spent(account), self._left(account, last))
        pure, at_delta, of_row, left = self._spending[key]
        return Client(number, name, sum(account.values()), pure, at_delta, of_row, self._used[number], left)

    @cached_property
    def _spending(self) -> dict[Any, tuple[str, str, str, int | None]]:
        """The spending of alike clients, and what is left: many have the same account."""
        return {}

    @cached_property
    def _used(self) -> dict[ClientInDataset, float | None]:
        """The part of its budget that each client has used."""
        shared: dict[Any, float | None] = {}
        found = {}
        for number, account in self.accounts.items():
            key = tuple(account.items())
            if key not in shared:
                shared[key] = self.used(account)
            found[number] = shared[key]
        return found

    @cached_property
    def _by_used(self) -> list[ClientInDataset]:
        """The clients; those near the end of their budgets come first."""
        return sorted(self.accounts, key=lambda number: (-(self._used[number] or 0.0), number))

    @cached_property
    def _opened(self) -> Ledger:
        return Ledger(self.ledger, whole=True).distrust(self.site.policy.mechanisms if self.site else "")

    @cached_property
    def _alike(self) -> list[tuple[Account, int]]:
        """The different accounts, and how many clients have each: a server can let many requests wait."""
        many = Counter(tuple(account.items()) for account in self.accounts.values())
        return [(dict(account), clients) for account, clients in many.items()]

    @cached_property
    def _charged(self) -> tuple[dict[int, Release], dict[str, _Charged]]:
        """The last release of each client, and the charges of each run.

        They are the ledger's: a site's log may have been set aside, and names only ranges of many clients.
        """
        _ = self.accounts  # first, so that each of its clients is found below, also while the site answers
        last: dict[int, int] = {}
        numbers: dict[str, dict[int, Counter[int]]] = {}
        times: dict[str, list[str]] = {}
        for row in self._opened.table("charges"):
            run, client, release = row["run"], row["client"], row["release"]
            last[client] = release
            numbers.setdefault(run, {}).setdefault(client, Counter())[release] += 1
            times[run] = [times.get(run, [row["at"]])[0], row["at"]]
        releases = {row["id"]: read(row["what"]) for row in self._opened.table("releases")}
        charged = {run: _Charged(times[run], _accounts(own, releases)) for run, own in numbers.items()}
        return {client: releases[number] for client, number in last.items()}, charged

    def _spent(self, account: Account) -> tuple[str, str, str]:
        return *in_words(guarantee(account, self.delta)), in_words(row_guarantee(account, self.delta))[1]

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
        return min(low, _MANY)


def _part(covers: Callable[[Fraction], bool]) -> float:
    """Return the smallest part of a budget, from 0 to 1, that covers what was spent."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if covers(Fraction(middle)) else (middle, high)
    return high


def _run(run: str, lines: list[Line], charged: _Charged, delta: float) -> Run:
    """Return a run with its lines in the log, which may have been set aside, and its charges."""
    times = [line["at"] for line in lines] or charged.times
    different = {frozenset(account.items()): account for account in charged.accounts.values()}.values()
    pure = max((pure_spent(account) for account in different), default=0)
    return Run(
        run,
        times[0],
        times[-1],
        dict(Counter(line["decision"] for line in lines)),
        tuple(dict.fromkeys(line["request"] for line in lines if line.get("request"))),
        sum(sum(account.values()) for account in charged.accounts.values()),
        tuple(sorted(charged.accounts)),
        amount(pure),
        _highest(guarantee(account, delta) for account in different),
        _highest(row_guarantee(account, delta) for account in different),
    )


def _highest(costs: Iterable[Guarantee | None]) -> str:
    """Return the epsilon of the client that a run cost most; none where a release of one has no guarantee."""
    found = [math.inf if one is None else one.epsilon for one in costs]
    return amount(max(found, default=0.0))


def _accounts(numbers: Mapping[int, Counter[int]], releases: Mapping[int, Release]) -> dict[int, Account]:
    """Return the accounts of clients whose releases are given by number."""
    accounts: dict[int, Account] = {}
    for client, own in numbers.items():
        account: Counter[Release] = Counter()
        for number, times in own.items():
            account[releases[number]] += times
        accounts[client] = account
    return accounts


def counted(left: int | None) -> str:
    """Return a client's remaining releases (`Client.left`) in words."""
    return "\N{EN DASH}" if left is None else f"{left:,} or more" if left == _MANY else str(left)


def with_prices(request: Request) -> dict[str, Any]:
    """Return a request and its prices as plain values."""
    return asdict(request) | {"prices": dict(prices(request))}


def prices(request: Request) -> list[tuple[str, str]]:
    """Return what a client pays: for a participation, for as many as the run may ask of it, and for a report."""
    asks = request.asks
    if isinstance(found := _release(request), str):
        return [("price", f"unknown: {found}")]
    release, most, reports = found
    each = [("a participation", 1), (f"the run, at most {count_of(most, 'participation')} of a client", most)]
    rows = [(f"price of {what}", _cost(release, times)) for what, times in each]
    if release.by_rows:
        rows += [(f"price of {what}, for a row", _cost_of_row(release, times)) for what, times in each]
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
    """Yield a request's settings: those that say how clients train, or all."""
    entries: Mapping[str, Any] = request.asks["config"]
    for name in entries if whole else _PLAN:
        off = entries.get(name) == "" or (name in _OFF_AT_0 and entries.get(name) == 0)
        if name in entries and (whole or not off):
            yield name, entries[name]


# The training entries of a run config, in the order of a reader's questions.
_PLAN = (
    "strategy", "strategy-options", "model", "loss", "metric", "pretrained", "frozen", "local", "hypotheses", "rounds",
    "clients-per-round", "local-epochs", "local-steps", "batch-size", "step-size", "optimizer", "optimizer-options",
    "clip-gradient", "proximal", "message-noise", "protect", "row-clip-norm", "row-noise-multiplier", "row-rate",
    "row-batch", "noise-multiplier", "mechanism", "choice-epsilon", "max-participations", "noise-per", "clipping",
    "clip-norm", "clip-norm-decay", "clip-norm-floor", "restarts", "start-from", "validate-every",
    "anonymous-least",
)  # fmt: skip
_OFF_AT_0 = frozenset(
    ("row-clip-norm", "row-noise-multiplier", "row-rate", "row-batch", "anonymous-least", "message-noise")
)
"""Settings that say nothing where they are 0."""


def _release(request: Request) -> tuple[Release, int, int] | str:
    """Return the release of a participation, and a client's maximum numbers of participations and reports in the run.

    It is the release that costs most among those that the request allows. If the message differs from the run's
    settings, the message counts. A choice counts as one between two hypotheses, because a message may send fewer than
    the run config says. If the cost cannot be told, return the reason: one such request must not hide the others.
    """
    asks, differs = request.asks, request.asks["differs"]
    try:
        run = RunConfig(**{name.replace("-", "_"): value for name, value in asks["config"].items()})
    except ConfigError as error:  # another version of umbel kept it
        return str(error)
    if (mechanism := differs.get("mechanism", run.mechanism)) not in MECHANISMS:
        # A name may lead to any installed code, and the site has not approved it.
        return f"mechanism {mechanism!r} is other code, which this command does not run"
    release = run.release(int(asks["n"]), min(2, int(differs.get("hypotheses", run.most_hypotheses))))
    release = replace(release, **{name: kind(differs[name]) for name, kind in _PRICED.items() if name in differs})
    said = {name: kind(differs[name]) for name, kind in _OF_ROWS.items() if name in differs}
    release = release.trained_by(replace(run.training(), **said).row_privacy)
    if (steps := release.row_steps * run.most_participations) > _MOST_STEPS:
        return f"a client's training may take {count_of(steps, 'step')}, too many to compute their cost to a row"
    if "insecure-seed" in asks:
        release = release.without_noise()
    if not release.chooses:
        release = replace(release, choice_epsilon=0.0)
    asked = asks.get("release"), differs.get("release_by")
    by = next((one for one in (ReleaseBy.SITE, ReleaseBy.SECURE) if one in asked), ReleaseBy.CLIENT)
    return released_by(by, release), run.most_participations, run.most_reports


# The fields of a message's task that its release has, too. A request keeps those that differ as text.
_PRICED: Mapping[str, Callable[[str], Any]] = {
    "noise_multiplier": float, "clipping": Clipping, "mechanism": str, "choice_epsilon": float,
}  # fmt: skip
_OF_ROWS: Mapping[str, Callable[[str], Any]] = {
    "row_clip_norm": float, "row_noise_multiplier": float, "row_rate": float, "row_batch": float, "local_steps": int,
    "local_epochs": int, "message_noise": float,
}  # fmt: skip


@lru_cache(maxsize=1024)  # some take seconds, and the console shows all of them again after each decision
def _cost_of_row(release: Release, times: int) -> str:
    pure, at_delta = in_words(row_guarantee({release: times}))
    return f"epsilon for one row added or removed: {pure}; at delta {DELTA:g}: {at_delta}"


@lru_cache(maxsize=1024)
def _cost(release: Release, times: int) -> str:
    account = {release: times}
    pure, at_delta = in_words(guarantee(account))
    paper = amount(paper_spent(account))
    return (
        f"epsilon between any two data sets: {pure}; at delta {DELTA:g}: {at_delta}; paper's budget, heuristic: {paper}"
    )
