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
from typer.testing import CliRunner

from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from tests.helpers.ledgers import spent
from tests.helpers.messages import asked, refused
from tests.helpers.nodes import ask
from tests.helpers.paper import ACCEPTED, paper_task
from tests.helpers.runs import run_app
from umbel.cli.main import app as command
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
        done = CliRunner(env={"COLUMNS": "160"}).invoke(command, ["site", *words, "--ledger", str(self.ledger)])
        assert done.exit_code == 0, done.output
        return str(done.output)

    @property
    def waiting(self) -> list[str]:
        return [one.digest for one in Runs(self.ledger).requests() if one.status is Status.WAITING]


@pytest.fixture
def site(tmp_path: Path, run_config: dict[str, Any]) -> Site:
    return Site(tmp_path, run_config)


def test_a_site_that_does_not_ask_answers_what_its_policy_allows(tmp_path: Path, run_config: dict[str, Any]) -> None:
    site = Site(tmp_path, run_config, approve="policy")
    assert not any(refused(one) for one in (site.query(), site.train(), site.evaluate(), site.keep()))


def test_nothing_is_answered_before_it_is_approved(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    assert all(refused(one) for one in (site.query(), site.train(), site.evaluate(), site.keep()))
    assert Journal(site.ledger).accounts() == {}
    [digest] = site.waiting
    told = f"request {digest[:SHOWN]} of run 1 waits for approval: umbel site requests"
    assert caplog.text.count(told) >= 4

    assert f"{digest[:SHOWN]} is approved" in site.run("approve", digest[:SHOWN])
    assert not any(refused(one) for one in (site.query(), site.train(), site.evaluate(), site.keep()))
    assert [spent(Journal(site.ledger), client) for client in range(2)] == [Fraction(2, 5)] * 2


def test_a_request_that_was_refused_stays_refused(site: Site) -> None:
    site.query()
    site.run("refuse", site.waiting[0])
    assert refused(site.query())
    assert refused(site.train())
    assert site.waiting == []
    assert "no request waits" in site.run("requests")
    assert "refused" in site.run("requests", "--all")


def test_an_approval_can_be_taken_back(site: Site) -> None:
    site.query()
    [digest] = site.waiting
    site.run("approve", digest)
    assert not refused(site.train())
    site.run("refuse", digest)
    assert refused(site.train())


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


def test_an_approval_holds_for_other_runs_of_the_same_config_and_for_no_others(
    site: Site, run_config: dict[str, Any], tmp_path: Path
) -> None:
    site.query()
    site.run("approve", site.waiting[0])
    [context] = site.grid.contexts.values()
    context.run_id = 2
    assert not refused(site.query())
    context.run_config = run_config | {"rounds": 101}
    assert refused(site.query())
    assert len(site.waiting) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("local_steps", 1), ("batch_size", 0), ("noise_multiplier", 1e9), ("clip_norm", 0.02), ("clipping", "public"),
        ("noise_per", "layer"), ("round", 101),
    ],
)  # fmt: skip
def test_a_task_that_differs_from_what_was_approved_waits_again(site: Site, name: str, value: Any) -> None:
    changes = {name: value}
    site.query()
    site.run("approve", site.waiting[0])
    assert refused(site.train(**changes))
    assert not refused(site.train(round=100, clients=(1,), run="another name"))
    [digest] = site.waiting
    assert re.search(rf"otherwise: {name.replace('_', '-')} +│ {value}", site.run("requests"))
    site.run("approve", digest)
    assert not refused(site.train(**changes))


def test_more_hypotheses_and_other_evaluations_than_were_approved_wait_again(site: Site) -> None:
    site.query()
    site.run("approve", site.waiting[0])
    assert refused(ask(site.grid, asked({"weight": np.ones((3, 1, 2), np.float32)}, AS_SAID)))
    assert refused(site.evaluate(step_size=0.5))
    assert refused(site.evaluate(round=102))
    assert len(site.waiting) == 3
    assert not refused(site.evaluate(round=0))
    assert not refused(site.evaluate(round=101)), "after the last round"


def test_approval_of_another_evaluation_is_none_of_another_training(site: Site) -> None:
    site.query()
    site.run("approve", site.waiting[0])
    asks = EvaluationSpec(1, (2,), 0.5)
    assert refused(site.evaluate(step_size=0.5))
    assert re.search(r"otherwise: evaluation-step-size +│ 0.5", site.run("requests"))
    site.run("approve", site.waiting[0])
    assert not refused(site.evaluate(step_size=0.5))
    for step_size in (0.5, 7.0):
        assert refused(ask(site.grid, asked(THETA, replace(AS_SAID, step_size=step_size), asks)))
    assert refused(site.train(step_size=0.5))
    assert not refused(ask(site.grid, asked(THETA, AS_SAID, asks)))


def test_what_waits_is_listed_with_its_price_and_its_plan(site: Site) -> None:
    site.query()
    listed = site.run("requests")
    for line in (
        "epsilon between any two data sets: none; at delta 1e-05: none; paper's budget, heuristic: 0.4",
        "paper's budget, heuristic: 40", "group-privacy", "local-epochs", "noise-multiplier", "clipping", "by run 1",
    ):  # fmt: skip
        assert line in listed
    assert "round-timeout" not in listed
    assert "round-timeout" in site.run("requests", "--whole")


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
    site.run("approve", site.waiting[0])
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


def test_what_a_server_wrote_does_nothing_to_a_terminal(tmp_path: Path, run_config: dict[str, Any]) -> None:
    site = Site(tmp_path, run_config | {"strategy": "\x1b[2J[red]approved[/red]"})
    site.query()
    listed = site.run("requests")
    assert "?[2J[red]approved[/red]" in listed
    assert "\x1b" not in listed


def test_what_a_server_wrote_does_nothing_to_a_nodes_log_or_to_an_export(
    tmp_path: Path, run_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path, run_config, approve="policy")
    assert not refused(site.train(run="\x1b[2J"))
    exported = CliRunner().invoke(command, ["site", "journal", str(site.ledger), "--csv", "sent"]).output
    assert "?[2J" in exported
    assert "\x1b" not in exported
    for context in site.grid.contexts.values():
        context.run_config = run_config | {"mechanism": "\x1b[2J\nINFO: all is well"}
    caplog.clear()
    assert refused(site.train())
    assert "\\x1b[2J\\nINFO: all is well" in caplog.messages[-1]
    assert caplog.messages[-1].isprintable()


def test_how_clients_train_is_listed(tmp_path: Path, run_config: dict[str, Any]) -> None:
    asks = {"optimizer": "adam beta1=0.5 clip-gradient=2.5 proximal=0.125"}
    site = Site(tmp_path, run_config | asks | {"metric": "rmse"})
    site.query()
    listed = site.run("requests")
    for name, value in (asks | {"metric": "rmse"}).items():
        assert re.search(rf"{name} +│ {value}", listed)


def test_no_code_that_a_server_names_runs_when_what_waits_is_listed(
    tmp_path: Path, run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what it names hide other requests."""
    (tmp_path / "servers_own.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    site = Site(tmp_path, run_config | {"mechanism": "servers_own:Class", "clipping": "public"})
    site.query()
    site.grid.contexts[site.grid.get_node_ids()[0]].run_config = run_config
    site.query()
    listed = site.run("requests")
    assert "unknown: mechanism 'servers_own:Class'" in listed
    assert all(digest[:SHOWN] in listed for digest in site.waiting)
    assert len(site.waiting) == 2


def test_a_request_takes_little_of_a_sites_disk(tmp_path: Path, run_config: dict[str, Any]) -> None:
    site = Site(tmp_path, run_config | {"strategy": "group-privacy " + "x" * 1_000_000})
    assert refused(site.query())
    assert site.waiting == []


def test_a_name_must_be_one_requests(site: Site, run_config: dict[str, Any]) -> None:
    site.query()
    # Of eight digits a server finds another request with the same ones in minutes.
    for beginning in ("", site.waiting[0][:8], site.waiting[0][: SHOWN - 1]):
        done = CliRunner().invoke(command, ["site", "approve", beginning, "--ledger", str(site.ledger)])
        assert done.exit_code == 1
        assert "[ledger.short-name]" in done.output
    with raises(LedgerError, "ledger.no-request", "z" * SHOWN):
        Runs(site.ledger).request("z" * SHOWN)


def test_more_clients_than_the_run_config_says_wait_by_themselves(tmp_path: Path, run_config: dict[str, Any]) -> None:
    few = {"clients-per-round": 1, "validation": "clients=0", "min-releases": 1}
    site = Site(tmp_path, run_config | few)
    site.query()
    site.run("approve", site.waiting[0])
    assert not refused(site.train(clients=(1,)))
    assert not refused(site.evaluate()), "0 stands for all"
    assert refused(site.train(clients=(0, 1)))
    assert "otherwise: clients-per-round" in site.run("requests")
    assert spent(Journal(site.ledger), 0) == 0


def test_a_request_whose_price_is_no_machine_number_hides_no_other(tmp_path: Path, run_config: dict[str, Any]) -> None:
    site = Site(tmp_path, run_config | {"noise-multiplier": 5e-324})
    site.query()
    assert "price of a participation" in site.run("requests")


def test_a_site_without_requests_is_told_so(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["site", "requests", "--ledger", str(tmp_path / "ledger.jsonl")])
    assert done.exit_code == 1
    assert "[ledger.missing]" in done.output
    assert list(tmp_path.glob("*.sqlite*")) == []


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
    site.run("approve", site.waiting[0])
    run = run_app(config, site.grid)
    assert [entry["releases"] for entry in run.history] == [0, 2, 2, 2]
    assert site.waiting == []
    assert len(list((tmp_path / "models").iterdir())) == 3
