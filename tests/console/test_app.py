"""The console: on loopback, by an address with a secret, and closed to other pages of the same browser."""

from __future__ import annotations

import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from tests.cli.commands.test_approvals import Site
from tests.console.conftest import books
from umbel.cli.main import app
from umbel.client.readiness import Readiness
from umbel.console.app import console
from umbel.console.books import Books
from umbel.console.metrics import Reading, series
from umbel.privacy.gate.runs import Runs, Status

PORT, TOKEN = 8321, "s" * 43
AT = f"http://127.0.0.1:{PORT}"


@pytest.fixture
def site(tmp_path: Path, run_config: dict[str, Any]) -> Site:
    site = Site(tmp_path, run_config)
    site.query()
    return site


@pytest.fixture
def client(site: Site) -> TestClient:
    return TestClient(console(books(site), PORT, TOKEN), base_url=AT, follow_redirects=False)


def form(site: Site, **changes: str) -> dict[str, str]:
    digest = Runs(site.ledger).requests()[0].digest
    return {"request": digest, "decision": "approve", "person": "Dr. Day", "reason": "trial 7"} | changes


def test_a_person_approves_and_refuses_on_record(client: TestClient, site: Site) -> None:
    for decision, status in (("approve", Status.APPROVED), ("refuse", Status.REFUSED)):
        done = client.post(f"/{TOKEN}/decide", data=form(site, decision=decision))
        assert done.status_code == 303
        assert f"is {status}" in client.get(done.headers["location"]).text
        [request] = Runs(site.ledger).requests()
        assert (request.status, request.person, request.reason) == (status, "Dr. Day", "trial 7")


@pytest.mark.parametrize(
    "how",
    [
        {"token": "x" * 43},
        {"token": TOKEN[:-1]},
        {"headers": {"host": f"evil.example:{PORT}"}},  # a name that its owner points to 127.0.0.1
        {"headers": {"host": "127.0.0.1"}},
        {"headers": {"origin": "http://127.0.0.1:9999"}},  # another port of this machine
        {"headers": {"origin": "https://evil.example"}},
        {"headers": {"origin": "null"}},
    ],
)
def test_nothing_is_shown_or_decided_for_strangers(client: TestClient, site: Site, how: dict[str, Any]) -> None:
    token, headers = how.get("token", TOKEN), how.get("headers", {})
    shown = client.get(f"/{token}/", headers=headers)
    done = client.post(f"/{token}/decide", data=form(site), headers=headers)
    assert (shown.status_code, shown.text) == (done.status_code, done.text) == (404, "not found")
    assert Runs(site.ledger).requests()[0].status is Status.WAITING


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/", "GET"), ("", "GET"), ("/abc", "GET"), (f"/{TOKEN}/decide", "GET"), (f"/{TOKEN}/", "POST"),
        (f"/{TOKEN}/decide/", "POST"),
    ],
)  # fmt: skip
def test_there_are_no_other_doors(client: TestClient, path: str, method: str) -> None:
    done = client.request(method, path)
    assert (done.status_code, done.text) == (404, "not found")


@pytest.mark.parametrize(
    ("changes", "status"),
    [({"person": " "}, 400), ({"decision": "perhaps"}, 400), ({"reason": "x" * 20_000}, 413)],
)
def test_a_form_that_says_too_little_or_too_much_decides_nothing(
    client: TestClient, site: Site, changes: dict[str, str], status: int
) -> None:
    assert client.post(f"/{TOKEN}/decide", data=form(site, **changes)).status_code == status
    assert Runs(site.ledger).requests()[0].status is Status.WAITING


def test_a_request_that_is_not_there_is_told(client: TestClient, site: Site) -> None:
    done = client.post(f"/{TOKEN}/decide", data=form(site, request="f" * 64))
    assert "ledger.no-request" in client.get(done.headers["location"]).text


def test_an_old_page_does_not_undo_what_another_person_decided(client: TestClient, site: Site) -> None:
    assert 'name="seen" value="waiting"' in client.get(f"/{TOKEN}/").text
    client.post(f"/{TOKEN}/decide", data=form(site, decision="refuse", seen="waiting"))
    done = client.post(f"/{TOKEN}/decide", data=form(site, person="Dr. Night", seen="waiting"))
    assert "ledger.decided-meanwhile" in client.get(done.headers["location"]).text
    [request] = Runs(site.ledger).requests()
    assert (request.status, request.person) == (Status.REFUSED, "Dr. Day")
    client.post(f"/{TOKEN}/decide", data=form(site, person="Dr. Night", seen="refused"))
    assert Runs(site.ledger).requests()[0].status is Status.APPROVED


def test_a_page_leaves_no_trace_and_runs_no_script(client: TestClient) -> None:
    shown = client.get(f"/{TOKEN}/")
    assert shown.headers["cache-control"] == "no-store"
    assert "default-src 'none'" in shown.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in shown.headers["content-security-policy"]
    assert "set-cookie" not in shown.headers, "another port of this machine would be sent it too"
    assert "<script" not in shown.text
    assert "waits" in client.get(f"/{TOKEN}").text, "as a person may copy it"


def test_a_page_has_the_policy_of_its_time(site: Site) -> None:
    """A node reads the file for each message."""
    file = site.ledger.parent / "policy.toml"
    policy = f'data-path = "{site.ledger.parent / "own"}"\nledger-path = "{site.ledger}"\nrole = "split"\n'
    file.write_text(policy + "budget = 7.5\n# end\n")
    found = Books.of(f'policy-file="{file}"')
    client = TestClient(console(found, PORT, TOKEN), base_url=AT)
    assert "At most an epsilon of 7.5" in client.get(f"/{TOKEN}/").text
    file.write_text(policy + "budget = 2.5\n# end\n")
    assert "At most an epsilon of 2.5" in client.get(f"/{TOKEN}/").text
    file.write_text(policy + "budget = nothing\n")
    shown = client.get(f"/{TOKEN}/")
    assert (shown.status_code, "[site.policy-file]" in shown.text) == (503, True)
    [ready] = [
        one
        for one in series(Reading(found), Readiness(found.ledger, keeps=False), {})
        if one.name == "umbel_site_ready"
    ]
    assert ready.values == {(): 0}


def test_a_damaged_log_is_told_and_not_hidden(client: TestClient, site: Site) -> None:
    log = site.ledger.with_name(f"{site.ledger.name}.log.jsonl")
    log.write_bytes(log.read_bytes().replace(b"refused", b"granted"))
    shown = client.get(f"/{TOKEN}/")
    assert (shown.status_code, "[log.broken-chain]" in shown.text) == (503, True)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE requests SET asks = replace(asks, '\"rounds\": 100', '\"rounds\": 1')",
        "UPDATE requests SET asks = 'nothing'",
        "UPDATE requests SET status = 'perhaps'",
        "INSERT INTO clients VALUES (0, 'no JSON')",
    ],
)
def test_a_damaged_row_is_told_and_not_approved(client: TestClient, site: Site, change: str) -> None:
    """What a person reads of a request is what its digest stands for."""
    filled = form(site)
    with closing(sqlite3.connect(site.ledger)) as connection, connection:
        assert connection.execute(change).rowcount == 1
    shown = client.get(f"/{TOKEN}/")
    assert (shown.status_code, "[ledger.damaged]" in shown.text) == (503, True)
    if "requests" in change:
        done = client.post(f"/{TOKEN}/decide", data=filled)
        assert "ledger.damaged" in done.headers["location"]


def test_a_site_without_data_has_no_console() -> None:
    done = CliRunner().invoke(app, ["site", "console", "budget=3.0"])
    assert (done.exit_code, "[site.no-data]" in done.output) == (2, True)


def test_no_address_is_told_where_another_process_listens(site: Site) -> None:
    words = f'data-path="{site.ledger.parent / "own"}" ledger-path="{site.ledger}" role="split" approve="ask"'
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = CliRunner().invoke(app, ["site", "console", words, "--port", str(other.getsockname()[1])])
    assert (done.exit_code, "[site.port]" in done.output) == (2, True)
    assert "http" not in done.output
