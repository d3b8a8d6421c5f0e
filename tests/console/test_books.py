"""A site's books: what each client spent and has left, and for each run who allowed it and what it cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.commands.test_approvals import Site
from tests.console.conftest import EPSILON, books
from umbel.cli.main import app
from umbel.console.books import Books
from umbel.console.page import Chosen, render
from umbel.privacy.gate.ledger import Ledger


def test_a_client_is_shown_with_what_it_spent_and_what_is_left(site: Site) -> None:
    first, second = books(site).clients
    assert (first.number, first.releases, first.epsilon) == (0, 2, f"{2 * EPSILON:g}")
    assert first.used == pytest.approx(2 * EPSILON / 8)
    # Four participations cost 7.2, a fifth would exceed the budget of 8.
    assert (first.left, second.left) == (2, 3)
    assert Books(site.ledger).clients[0].left is None, "nothing is known about limits"


def test_a_run_is_shown_with_who_allowed_it_and_what_it_cost(site: Site) -> None:
    first, second = books(site).runs
    assert (first.run, first.releases, first.clients, first.cost) == ("1", 3, (0, 1), f"{2 * EPSILON:g}")
    assert first.messages == {"refused": 1, "answered": 2}
    [request, waiting] = books(site).requests
    assert first.requests == (request.digest[:32],)
    assert (second.run, second.releases, second.requests) == ("2", 0, ())
    assert "take part 2 times" in books(site).room(waiting), "as often as there are rounds"
    assert "2 clients that took part before, 2 can" in books(site).room(waiting)


def test_who_refuses_a_request_later_did_not_allow_its_runs(site: Site) -> None:
    [request, _] = books(site).requests
    assert f"<td>Dr. Day ({request.digest[:8]})" in render(books(site))
    site.run("refuse", request.digest, "--by", "Dr. Night")
    assert f"<td>then approved, since refused by Dr. Night ({request.digest[:8]})" in render(books(site))


def test_the_report_answers_on_one_page_without_forms(site: Site, tmp_path: Path) -> None:
    [config] = [context.node_config for context in site.grid.contexts.values()]
    words = " ".join(
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in config.items()
    )
    page = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["ledger", "report", str(site.ledger), "--html", str(page), "--node-config", words])
    assert done.exit_code == 0, done.output
    html = page.read_text()
    for part in ("Dr. Day", "trial 7", "1 request waits", "45 % of the budget", '<h2 id="policy">'):
        assert part in html
    assert "<form" not in html
    assert "http" not in html.replace("http-equiv", ""), "it needs no other file"
    assert page.stat().st_mode & 0o077 == 0


def test_everything_is_there_as_json(site: Site) -> None:
    done = CliRunner().invoke(app, ["ledger", "report", str(site.ledger)])
    told = json.loads(done.output)
    assert [one["releases"] for one in told["clients"]] == [2, 1]
    assert [one["person"] for one in told["requests"]] == ["Dr. Day", ""]
    listed = json.loads(CliRunner().invoke(app, ["approvals", "list", "--json", "--ledger", str(site.ledger)]).output)
    assert [one["run"] for one in listed] == ["2"]
    lines = CliRunner().invoke(app, ["log", "show", str(site.ledger), "--json"]).output.splitlines()
    assert [json.loads(line)["number"] for line in lines] == [1, 2, 3, 4, 5]


def test_the_log_is_filtered(site: Site) -> None:
    assert "5 lines of 5" in render(books(site))
    assert "2 lines of 5" in render(books(site), chosen=Chosen(decision="answered"))
    assert "1 line of 5" in render(books(site), chosen=Chosen(run="2"))


def test_what_a_server_wrote_is_text(tmp_path: Path, run_config: dict[str, Any]) -> None:
    site = Site(
        tmp_path,
        run_config | {"strategy": "<script>alert(1)</script>\x1b[2J", "mechanism": "os:system", "clipping": "public"},
    )
    site.query()
    html = render(Books(site.ledger), "token", "<b>told</b>")
    assert "<script" not in html
    assert "<b>told" not in html
    assert "\x1b" not in html
    assert "unknown: mechanism" in html


def test_a_site_that_was_asked_nothing_has_a_page(tmp_path: Path) -> None:
    Ledger.create(tmp_path / "ledger.sqlite")
    assert "No run waits" in render(Books(tmp_path / "ledger.sqlite"))
