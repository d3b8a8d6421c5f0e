"""A site that wants to be asked answers no run before its people have looked at it."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from tests.helpers.cli import refused as refuses
from tests.helpers.cli import said
from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from tests.helpers.ledgers import spent
from tests.helpers.messages import asked, refused
from tests.helpers.nodes import ask
from tests.helpers.paper import ACCEPTED, paper_task
from tests.helpers.runs import run_app
from umbel.client.app import app
from umbel.console.books import prices
from umbel.data import offsets_of, write_dataset
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.runs import SHOWN, Runs, Status
from umbel.protocol.errors import FleetError, LedgerError
from umbel.protocol.messages import keep_request, query
from umbel.protocol.records import pack
from umbel.protocol.tasks import EvaluationSpec
from umbel.simulation.grid import InProcessGrid

THETA = {"weight": np.array([[[5.0, 6.0]], [[4.0, -4.5]]], np.float32)}
# What the run config says.
AS_SAID = paper_task(round=1, clients=(0, 1), clip_norm=0.01)


class Site:
    """A site of two training clients and a validation client."""

    def __init__(self, folder: Path, run_config: dict[str, Any], **policy: Any) -> None:
        features = np.random.default_rng(0).uniform(-1, 1, (9, 2)).astype(np.float32)
        targets = features @ np.array([1, 2], np.float32)
        write_dataset(folder / "own", manifest(2, 1, model="linear"), features, targets, offsets_of([3] * 3))
        self.ledger = folder / "ledger.jsonl"
        config = {"data-path": str(folder / "own"), "ledger-path": str(self.ledger), "role": "split", "approve": "ask"}
        self.grid = InProcessGrid(app, run_config, node_configs=[config | ACCEPTED | policy])

    def query(self) -> Message:
        return ask(self.grid, query(), "query")

    def train(self, **changes: Any) -> Message:
        return ask(self.grid, asked(THETA, replace(AS_SAID, **changes)))

    def evaluate(self, **changes: Any) -> Message:
        return ask(self.grid, asked(THETA, None, replace(EvaluationSpec(1, (2,), 0.1), **changes)), "evaluate")

    def keep(self) -> Message:
        return ask(self.grid, keep_request(pack(THETA)), "query.keep")

    def run(self, *words: str) -> str:
        """Do what a person at the site types."""
        return said("site", *words, "--ledger", self.ledger)

    def approve(self) -> None:
        """Approve the one request that waits."""
        [digest] = self.waiting
        self.run("approve", digest)

    def asks(self, **run_config: Any) -> None:
        """Go on as a server whose run config has other entries."""
        [context] = self.grid.contexts.values()
        context.run_config |= run_config

    @property
    def waiting(self) -> list[str]:
        return [one.digest for one in Runs(self.ledger).requests() if one.status is Status.WAITING]


@pytest.fixture
def site(tmp_path: Path, run_config: dict[str, Any]) -> Site:
    return Site(tmp_path, run_config)


@pytest.fixture
def approved(site: Site) -> Site:
    """A site whose people approved what the run config says."""
    site.query()
    site.approve()
    return site


def test_a_site_that_does_not_ask_answers_what_its_policy_allows(tmp_path: Path, run_config: dict[str, Any]) -> None:
    site = Site(tmp_path, run_config, approve="policy")
    assert not any(refused(one) for one in (site.query(), site.train(), site.evaluate(), site.keep()))


def test_nothing_is_answered_before_it_is_approved_or_once_that_is_taken_back(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    def answers() -> list[bool]:
        return [not refused(one) for one in (site.query(), site.train(), site.evaluate(), site.keep())]

    assert answers() == [False] * 4
    assert Journal(site.ledger).accounts() == {}
    [digest] = site.waiting
    assert caplog.text.count(f"request {digest[:SHOWN]} of run 1 waits for approval: umbel site requests") >= 4

    assert f"{digest[:SHOWN]} is approved" in site.run("approve", digest[:SHOWN])
    assert answers() == [True] * 4
    assert [spent(Journal(site.ledger), client) for client in range(2)] == [Fraction(2, 5)] * 2

    site.run("refuse", digest)
    assert answers() == [False] * 4
    assert site.waiting == []
    assert "no request waits" in site.run("requests")
    assert "refused" in site.run("requests", "--all")


def test_a_decision_that_cannot_be_written_is_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.query()
    [digest] = site.waiting

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with raises(LedgerError, "ledger.disk-full"):
            Runs(site.ledger).decide(digest, Status.APPROVED, "Dr. Day")
    [line] = Journal(site.ledger).messages()
    assert (line["message"], site.waiting) == ("query", [digest])
    Runs(site.ledger).decide(digest, Status.APPROVED, "Dr. Day")
    assert not refused(site.train())


def test_a_name_that_is_no_text_decides_nothing_by_half(site: Site) -> None:
    site.query()
    request = Runs(site.ledger).decide(site.waiting[0], Status.APPROVED, "Dr. \udcff")
    *_, last = Journal(site.ledger).messages()
    assert (request.person, last["reason"][-8:]) == ("Dr. ?", "by Dr. ?")
    assert Runs(site.ledger).requests() == [request]


def test_an_approval_holds_for_other_runs_of_the_same_config_and_for_no_others(approved: Site) -> None:
    [context] = approved.grid.contexts.values()
    context.run_id = 2
    assert not refused(approved.query())
    approved.asks(rounds=101)
    assert refused(approved.query())
    assert len(approved.waiting) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("local_steps", 1), ("batch_size", 0), ("noise_multiplier", 1e9), ("clip_norm", 0.02), ("clipping", "public"),
        ("noise_per", "layer"), ("round", 101),
    ],
)  # fmt: skip
def test_a_task_that_differs_from_what_was_approved_waits_again(approved: Site, name: str, value: Any) -> None:
    changes = {name: value}
    assert refused(approved.train(**changes))
    assert not refused(approved.train(round=100, clients=(1,), run="another name"))
    assert re.search(rf"otherwise: {name.replace('_', '-')} +│ {value}", approved.run("requests"))
    approved.approve()
    assert not refused(approved.train(**changes))


def test_more_hypotheses_and_other_evaluations_than_were_approved_wait_again(approved: Site) -> None:
    assert refused(ask(approved.grid, asked({"weight": np.ones((3, 1, 2), np.float32)}, AS_SAID)))
    assert refused(approved.evaluate(step_size=0.5))
    assert refused(approved.evaluate(round=102))
    assert len(approved.waiting) == 3
    assert not refused(approved.evaluate(round=0))
    assert not refused(approved.evaluate(round=101)), "after the last round"


def test_approval_of_another_evaluation_is_none_of_another_training(approved: Site) -> None:
    assert refused(approved.evaluate(step_size=0.5))
    assert re.search(r"otherwise: evaluation-step-size +│ 0.5", approved.run("requests"))
    approved.approve()
    assert not refused(approved.evaluate(step_size=0.5))
    both = {step: asked(THETA, replace(AS_SAID, step_size=step), EvaluationSpec(1, (2,), 0.5)) for step in (0.5, 7.0)}
    assert all(refused(ask(approved.grid, content)) for content in both.values())
    assert refused(approved.train(step_size=0.5))
    assert not refused(ask(approved.grid, asked(THETA, AS_SAID, EvaluationSpec(1, (2,), 0.5))))


def test_what_waits_is_listed_with_its_price_its_plan_and_how_clients_train(
    tmp_path: Path, run_config: dict[str, Any]
) -> None:
    asks = {"optimizer": "adam beta1=0.5 clip-gradient=2.5 proximal=0.125", "metric": "rmse"}
    site = Site(tmp_path, run_config | asks)
    site.query()
    listed = site.run("requests")
    for line in (
        "epsilon between any two data sets: none; at delta 1e-05: none; paper's budget, heuristic: 0.4",
        "paper's budget, heuristic: 40", "group-privacy", "local-epochs", "noise-multiplier", "clipping", "by run 1",
    ):  # fmt: skip
        assert line in listed
    for name, value in asks.items():
        assert re.search(rf"{name} +│ {value}", listed)
    assert ["round-timeout" in site.run("requests", *words) for words in ((), ("--whole",))] == [False, True]


@pytest.mark.parametrize(
    ("changes", "priced"),
    [
        ({}, "heuristic: 0.4"),
        ({"noise_multiplier": 0.5}, "heuristic: 4"),
        ({"noise_multiplier": 4.0, "clipping": "public", "choice_epsilon": 0.5}, "any two data sets: 1.5;"),
        ({"mechanism": "their:Noise", "clipping": "public"}, "mechanism 'their:Noise' is other code"),
    ],
)
def test_a_task_that_differs_has_its_own_price(site: Site, changes: dict[str, Any], priced: str) -> None:
    site.train(**changes)
    [request] = Runs(site.ledger).requests()
    assert priced in prices(request)[0][1]


def test_noise_whose_seed_the_server_knows_has_no_price_and_waits_again(
    tmp_path: Path, run_config: dict[str, Any]
) -> None:
    site = Site(tmp_path, run_config | {"clipping": "public", "choice-epsilon": 1.0}, **{"reports": "noise=5.0"})
    [config] = [context.node_config for context in site.grid.contexts.values()]
    config["role"] = "train"
    site.query()
    assert "none" not in str(prices(Runs(site.ledger).requests()[0]))
    site.approve()
    assert not refused(site.query())
    config["insecure-seed"] = True
    assert refused(site.query()), "people approved what has a price"
    costs = [cost for _, cost in prices(Runs(site.ledger).requests()[1])]
    assert len(costs) == 4
    assert all("any two data sets: none; at delta 1e-05: none" in cost for cost in costs)


@pytest.mark.parametrize(("policy", "listed"), [({}, True), ({"budget": 8.0}, False), ({"role": "train"}, False)])
def test_exact_losses_are_listed_as_outside_the_price(
    tmp_path: Path, run_config: dict[str, Any], policy: dict[str, Any], listed: bool
) -> None:
    site = Site(tmp_path, run_config, **policy)
    Journal.create(site.ledger)
    site.query()
    assert ("validation clients, which report exact losses" in site.run("requests")) is listed


def test_what_a_server_wrote_does_nothing_to_a_terminal_a_nodes_log_or_an_export(
    tmp_path: Path, run_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path, run_config | {"strategy": "\x1b[2J[red]approved[/red]"})
    site.query()
    listed = site.run("requests")
    site.approve()
    assert not refused(site.train(run="\x1b[2J"))
    exported = said("site", "journal", site.ledger, "--csv", "sent")
    for text, told in ((listed, "?[2J[red]approved[/red]"), (exported, "?[2J")):
        assert (told in text, "\x1b" in text) == (True, False)
    site.asks(mechanism="\x1b[2J\nINFO: all is well")
    caplog.clear()
    assert refused(site.train())
    assert "\\x1b[2J\\nINFO: all is well" in caplog.text
    assert all(message.isprintable() for message in caplog.messages)


def test_no_code_that_a_server_names_runs_when_what_waits_is_listed(
    tmp_path: Path, run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what it names hide other requests."""
    (tmp_path / "servers_own.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    site = Site(tmp_path, run_config | {"mechanism": "servers_own:Class", "clipping": "public"})
    site.query()
    site.asks(mechanism=run_config["mechanism"])
    site.query()
    listed = site.run("requests")
    assert "unknown: mechanism 'servers_own:Class'" in listed
    assert all(digest[:SHOWN] in listed for digest in site.waiting)
    assert len(site.waiting) == 2


def test_a_name_must_be_one_requests(site: Site, tmp_path: Path) -> None:
    site.query()
    # Of eight digits a server finds another request with the same ones in minutes.
    for beginning in ("", site.waiting[0][:8], site.waiting[0][: SHOWN - 1]):
        refuses("ledger.short-name", "site", "approve", beginning, "--ledger", site.ledger)
    refuses("ledger.no-request", "site", "approve", "z" * SHOWN, "--ledger", site.ledger)
    refuses("ledger.missing", "site", "requests", "--ledger", tmp_path / "none" / "ledger.jsonl")


def test_more_clients_than_the_run_config_says_wait_by_themselves(tmp_path: Path, run_config: dict[str, Any]) -> None:
    few = {"clients-per-round": 1, "validation": "clients=0", "min-releases": 1}
    site = Site(tmp_path, run_config | few)
    site.query()
    site.approve()
    assert not refused(site.train(clients=(1,)))
    assert not refused(site.evaluate()), "0 stands for all"
    assert refused(site.train(clients=(0, 1)))
    assert "otherwise: clients-per-round" in site.run("requests")
    assert spent(Journal(site.ledger), 0) == 0


def test_a_request_whose_price_is_no_machine_number_hides_no_other(tmp_path: Path, run_config: dict[str, Any]) -> None:
    site = Site(tmp_path, run_config | {"noise-multiplier": 5e-324})
    site.query()
    assert "price of a participation" in site.run("requests")


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize(
    "changes",
    [{"clipping": "public norm=1.5 decay=0.9"}, {"strategy": "fedavg", "local-steps": 2}],
)
def test_a_whole_run_asks_for_no_more_than_its_run_config_says(
    tmp_path: Path, run_config: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Nothing that umbel's own server sends waits again."""
    config = run_config | {"rounds": 3, "clients-per-round": 2, "wait": "seconds=0.1"} | changes
    site = Site(tmp_path, config, **{"keep-model": str(tmp_path / "models")})
    with pytest.raises(FleetError, match="refused"):
        run_app(config, site.grid)
    site.approve()
    run = run_app(config, site.grid)
    assert [entry["releases"] for entry in run.history] == [0, 2, 2, 2]
    assert site.waiting == []
    assert len(list((tmp_path / "models").iterdir())) == 3
