"""A site's books: what each client spent, what requests cost, and for each run who allowed it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.cli.commands.test_requests import AS_SAID, Site
from tests.console.conftest import EPSILON, PUBLIC, RUN, books
from tests.helpers.cli import refused as refused_with
from tests.helpers.cli import said
from tests.helpers.errors import raises
from tests.helpers.ledgers import forget, proven_rows
from tests.helpers.messages import asked, refused
from tests.helpers.nodes import ask
from umbel.client.checks import entries_of
from umbel.console.books import Books, plan, prices
from umbel.console.page import render
from umbel.privacy.accounting.guarantee import guarantee
from umbel.privacy.site.charges import Charge
from umbel.privacy.site.config import Site as GateSite
from umbel.privacy.site.entry import Entry
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.runs import Request, Runs, Status
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import Refused
from umbel.protocol.release import Clipping, Kind, Release, RowPrivacy
from umbel.protocol.run_config import RunConfig

pytestmark = pytest.mark.rest


def test_clients_are_shown_with_what_they_spent_and_runs_with_who_allowed_them(site: Site) -> None:
    first, second = books(site).clients
    assert (first.number, first.releases, first.epsilon) == (0, 2, f"{2 * EPSILON:g}")
    assert (second.number, second.releases, second.epsilon) == (1, 1, f"{EPSILON:g}")
    assert first.used == pytest.approx(2 * EPSILON / 8, abs=1e-5)
    assert Books(site.ledger).clients[0].used is None, "nothing is known about limits"
    one, other = books(site).runs
    [request, _] = books(site).requests
    assert (one.run, one.releases, one.clients) == ("1", 3, 2)
    assert one.messages == {"refused": 1, "answered": 2}
    assert one.requests == (request.digest[:32],)
    assert (other.run, other.releases, other.clients, other.requests) == ("2", 0, 0, ())
    assert f"<td>Dr. Day ({request.digest[:8]})" in render(books(site))
    site.run("refuse", request.digest, "--by", "Dr. Night")
    assert f"<td>then approved, since refused by Dr. Night ({request.digest[:8]})" in render(books(site))


def test_the_part_of_a_budget_that_is_used_is_what_the_gate_counts(tmp_path: Path) -> None:
    """At a delta the gate counts the least noise that the site accepts, of which the releases had more."""
    ledger = Journal.create(tmp_path / "ledger.jsonl")
    release = Release(Kind.TRAIN, 1000, 2000.0, Clipping.PUBLIC, hypotheses=2, choice_epsilon=0.1)
    config = f'data-path="{tmp_path}" ledger-path="{ledger.path}" role="split" budget="8 delta=1e-5"'
    own = GateSite.of(entries_of(config))
    used: list[float] = []
    while all(ledger.charge(Charge("7", 1, release), [ClientInDataset(0)], own.limits)):
        [client] = Books(ledger.path, own).clients
        used.append(client.used or 0)
    assert len(used) == 7
    assert used == sorted(used)
    assert used[-1] > 0.85, "no other release is within the budget"
    assert used[0] == pytest.approx(1.1 / 8, rel=1e-4), "the first is covered by its pure epsilon"


def test_of_many_clients_those_near_their_budget_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 the first 50 have three releases of 1.8 each, the next 100 two, and the others one."""
    ledger = Journal.create(tmp_path / "crowd.jsonl")
    charge = Charge("7", 1, Release(Kind.TRAIN, 2, 5.0, Clipping.PUBLIC, hypotheses=2, choice_epsilon=1.0))
    for clients in (300, 150, 50):
        assert all(ledger.charge(charge, [ClientInDataset(number) for number in range(clients)]))
    asked: list[Any] = []
    monkeypatch.setattr("umbel.console.books.guarantee", lambda *given: asked.append(given) or guarantee(*given))
    # Of a budget of 8 they have used .675, .45 and .225.
    found = Books(ledger.path, GateSite.of({"data-path": "/data", "ledger-path": str(ledger.path), "budget": 8.0}))
    assert [(one.number, one.releases) for one in found.clients[:51:25]] == [(0, 3), (25, 3), (50, 2)]
    assert len(asked) == 3, "alike clients are looked at once"
    html = render(found)
    assert html.count("% of the budget") == 100
    for words in ("300 clients took part", "200 other clients have used no more"):
        assert words in html
    assert len(found.as_json()["clients"]) == 300


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"noise-multiplier": 1000.0}, {}),
        ({"choice-epsilon": 0.1}, {}),
        ({"mechanism": "gaussian"}, {}),
        ({"hypotheses": 1}, {}),
        ({"hypotheses": 100}, {}),
        ({"mechanism": "gaussian", "hypotheses": 100}, {"mechanism": "gaussian"}),
        ({"choice-epsilon": 2.0}, {"noise_multiplier": 8.0, "choice_epsilon": 0.5}),
    ],
)
def test_what_a_message_costs_is_the_price_that_people_saw(
    tmp_path: Path, run_config: dict[str, Any], config: dict[str, Any], changes: dict[str, Any]
) -> None:
    """A server's message may ask for less noise than its run's settings say, and for fewer hypotheses."""
    Journal.create(tmp_path / "ledger.jsonl")
    limits = {"budget": "100 delta=1e-5", "max-choice-epsilon": 2.0, "mechanisms": "laplace gaussian"}
    own = Site(tmp_path, run_config | RUN | config, clipping="public", **limits)
    asked = PUBLIC | changes
    assert refused(own.train(clients=(0,), **asked))
    [request] = books(own).requests
    [price] = [text for name, text in prices(request) if "run, at most" in name]
    own.run("approve", request.digest)
    for _ in range(3):
        assert not refused(own.train(clients=(0,), **asked))
    assert refused(own.train(clients=(0,), **asked))
    [client] = books(own).clients
    spent = f"{client.epsilon}; at delta 1e-05: {client.epsilon_at_delta};"
    assert spent in price


def test_a_runs_releases_are_its_charges(tmp_path: Path) -> None:
    ledger = Journal.create(tmp_path / "ledger.jsonl")
    charge = Charge("7", 1, Release(Kind.TRAIN, 2, 5.0, Clipping.PUBLIC, 1.0))
    every_other = [ClientInDataset(2 * i) for i in range(2100)]
    ledger.charge(charge, every_other)
    for messages, allowed in (({}, "not in this log"), ({"answered": 1}, "the policy")):
        [run] = (found := Books(ledger.path)).runs
        assert (run.releases, run.clients, run.messages) == (2100, 2100, messages)
        assert run.releases == sum(client.releases for client in found.clients)
        assert f"<td>{allowed}</td>" in render(found)
        ledger.record(Entry("7", "train", charges=1, paid=2100), True)


WAITING = "price of a participation"


@pytest.mark.parametrize("release", ["client", "site"])
@pytest.mark.parametrize("mechanism", ["laplace", "gaussian", "discrete-gaussian"])
def test_no_settings_hide_other_requests(site: Site, run_config: dict[str, Any], release: str, mechanism: str) -> None:
    for noise, choice in product([1e-300, 5.0, 1e300], [1e-300, 30.0]):
        entries = {"mechanism": mechanism, "noise-multiplier": noise, "choice-epsilon": choice, "rounds": 10**18}
        asks = {"config": run_config | RUN | entries, "n": 10**7, "differs": {}, "release": release}
        with raises(Refused, "refused.waits"):
            Runs(site.ledger).check_approved("3", asks, "")
    assert render(books(site)).count(WAITING) == site.run("requests").count(WAITING) == 7


def test_no_request_without_a_price_hides_the_others(site: Site, run_config: dict[str, Any]) -> None:
    """A message without numbers, and a request that another umbel kept."""
    assert refused(ask(site.grid, asked({"weight": np.zeros((2, 0), np.float32)}, replace(AS_SAID, **PUBLIC))))
    entries = {name: value for name, value in run_config.items() if name != "local-steps"} | {"older": 1}
    with raises(Refused, "refused.waits"):
        Runs(site.ledger).check_approved("3", {"config": entries, "n": 2, "differs": {}}, "")
    for told in (render(books(site)), site.run("requests", "--all")):
        assert [text in told for text in ("unknown: the run config: there is no older", WAITING)] == [True, True]


def test_what_a_server_wrote_is_text_in_the_page(tmp_path: Path, run_config: dict[str, Any]) -> None:
    evil = {"strategy": "<script>alert(1)</script>\x1b[2J", "mechanism": "os:system", "clipping": "public"}
    Journal.create(tmp_path / "ledger.jsonl")
    site = Site(tmp_path, run_config | evil)
    assert "No run waits" in render(Books(site.ledger)), "it was asked nothing yet"
    site.query()
    html = render(Books(site.ledger))
    assert not any(text in html for text in ("<script", "\x1b"))
    assert "unknown: mechanism" in html


def request_of(config: RunConfig, n: int, differs: dict[str, str]) -> Request:
    asks = {"config": config.unsigned(), "n": n, "differs": differs}
    return Request("d" * 64, "", "7", Status.WAITING, asks)


def test_a_price_is_computed_once_and_of_endless_training_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would take hours, and any memory."""
    endless = RunConfig(
        protect="rows", noise_multiplier=0, rows="clip=1 noise=5 rate=0.01 batch=1", local_steps=1000, hypotheses=1,
        max_participations=2,
    )  # fmt: skip
    for differs, name in (({}, WAITING), ({"local_steps": str(2**31)}, "price")):
        assert name in dict(prices(request_of(endless, 3, differs)))
    request = request_of(RunConfig(noise_multiplier=12.3), 3, {})
    first = prices(request)
    monkeypatch.setattr("umbel.console.books.guarantee", Mock(side_effect=AssertionError))
    assert prices(request) == first


def test_the_report_answers_on_one_page_without_forms_and_as_json(site: Site, tmp_path: Path) -> None:
    """What a damaged journal has, or an older copy that has forgotten what clients spent, is told and no report."""
    [config] = [context.node_config for context in site.grid.contexts.values()]
    words = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
    page, journal = tmp_path / "report.html", ("site", "journal", site.ledger)
    said(*journal, "--html", page, "--node-config", words)
    html = page.read_text()
    for part in ("Dr. Day", "trial 7", "1 request waits", "45 % of the budget", '<h2 id="policy">'):
        assert part in html
    assert not re.search("<(form|input|button|script)", html)
    assert "default-src 'none'" in html
    assert "http" not in html.replace("http-equiv", ""), "it needs no other file"
    assert page.stat().st_mode & 0o077 == 0
    request = books(site).requests[0]
    assert dict(plan(request)).items() >= {"rounds": 5, "clipping": "public norm=1.0 decay=0.85 floor=0.01"}.items()
    assert "quorum" not in dict(plan(request)), "what is a default"
    assert dict(plan(request, whole=True)) == request.asks["config"]
    assert '<th scope="row">quorum</th>' in html
    told = json.loads(said(*journal, "--json"))
    assert [one["releases"] for one in told["clients"]] == [2, 1]
    assert [one["person"] for one in told["requests"]] == ["Dr. Day", ""]
    assert WAITING in told["requests"][1]["prices"]
    page.unlink()
    site.ledger.write_bytes(site.ledger.read_bytes().replace(b"refused", b"granted"))
    refused_with("ledger.damaged", *journal, "--html", page)
    assert not page.exists()
    site.ledger.unlink()
    forget()
    refused_with("ledger.behind", *journal, "--json")


def test_a_row_has_a_guarantee_and_a_budget_of_its_own(tmp_path: Path) -> None:
    ledger = Journal.create(tmp_path / "ledger.jsonl")
    release = Release(Kind.TRAIN, 5, 0.0, Clipping.PUBLIC).trained_by(RowPrivacy(1.0, 1.0, 0.02, 10.0, 100))
    entries = {
        "data-path": "/data", "ledger-path": str(ledger.path), "protect": "rows", "budget": "inf",
        "row-budget": "6 delta=1e-5",
    }  # fmt: skip
    own, used, epsilons = GateSite.of(entries), [0.0], [0.0]
    while all(ledger.charge(Charge("7", 1, release), [ClientInDataset(0)], own.limits)):
        books = Books(ledger.path, own)
        [client] = books.clients
        assert (client.epsilon_at_delta, books.hides_rows) == ("none", True)
        used.append(client.used or 0)
        epsilons.append(float(client.row_epsilon_at_delta))
    assert (used, epsilons) == (sorted(used), sorted(epsilons))
    assert (used[-1] > 0.9, epsilons[-1] < 6) == (True, True)
    assert "ε of a row" in render(books)


@pytest.mark.parametrize("differs", [{}, {"row_rate": "0.5"}])
def test_a_request_names_the_price_for_a_row(differs: dict[str, str]) -> None:
    config = RunConfig(
        protect="rows", noise_multiplier=0, rows="clip=1 noise=1 rate=0.01 batch=5", local_epochs=1, hypotheses=1,
        max_participations=2,
    )  # fmt: skip
    found = dict(prices(request_of(config, 5, differs)))
    assert "none" in found[WAITING]
    rate, steps = (0.5, 2) if differs else (0.01, 100)
    expected = proven_rows({config.release(5, 1).trained_by(RowPrivacy(1, 1, rate, 5, steps)): 1})
    assert f"at delta 1e-05: {expected.epsilon:.4g}" in found["price of a participation, for a row"]
