"""Questions about ranges at a site: refused before a row is read, told in words, charged, and hidden by noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from typer.testing import CliRunner

from tests.helpers.datasets import manifest
from tests.helpers.messages import asked, refused, releases
from tests.helpers.nodes import ask
from umbel.cli.main import app as command
from umbel.client import node as client_node
from umbel.client.app import app
from umbel.data import offsets_of, write_dataset
from umbel.models.ranges import CELLS
from umbel.privacy.accounting.guarantee import guarantee
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.policy import Policy
from umbel.privacy.site.runs import SHOWN, Runs
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.ranges import Question
from umbel.simulation.wanted import Wanted

CLIENTS = 12
UNITS = {"target": {"name": "cost", "scale": 1.0}, "features": [{"name": "age"}, {"name": "income"}]}
POLICY: dict[str, Any] = {
    "release": "site", "mechanisms": "gaussian", "budget": "8 delta=1e-5", "ranges": "age,income clients=10 epsilon=1",
}  # fmt: skip


class Site:
    """A site of twelve clients, one of which alone has an income, and a server that asks what it likes."""

    def __init__(self, folder: Path, *columns: str, **policy: Any) -> None:
        features = np.float32([[40, 0]] * 3 * CLIENTS)
        features[0, 1] = 50_000
        self.folder, self.ledger = folder, folder / "ledger.jsonl"
        write_dataset(folder / "own", manifest(CLIENTS, units=UNITS), features, np.ones(36, np.float32),
                      offsets_of([3] * CLIENTS))  # fmt: skip
        Journal.create(self.ledger)
        self.columns = columns or ("age", "income")
        release = Question.planned(self.columns, 10**5, Wanted(0.5)).release
        self.config = RunConfig.parse({**Question(self.columns, CLIENTS, release).values, "dataset": ""})
        own = {"data-path": str(folder / "own"), "ledger-path": str(self.ledger), **POLICY}
        own |= {key.replace("_", "-"): value for key, value in policy.items()}
        self.grid = InProcessGrid(app, self.config.entries(), node_configs=[own])

    @property
    def task(self) -> TrainingSpec:
        return replace(
            self.config.training(),
            round=1,
            clients=tuple(range(CLIENTS)),
            release_by="site",  # type: ignore[arg-type]
        )

    def train(self, evaluation: EvaluationSpec | None = None, start: float = 0.0, **changes: Any) -> Message:
        counts = np.full((1, len(self.columns), CELLS), start, np.float32)
        return ask(self.grid, asked({"counts": counts}, replace(self.task, **changes), evaluation))

    @property
    def codes(self) -> list[str]:
        """The codes in the site's log."""
        return [line["reason"].rpartition("[")[2].rstrip("]") for line in Journal(self.ledger).messages()]

    @property
    def spent(self) -> int:
        """How often clients were charged."""
        return sum(sum(account.values()) for account in Journal(self.ledger).accounts().values())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_question_is_answered_and_charged_like_a_participation(site: Site) -> None:
    reply = site.train()
    assert not refused(reply)
    assert set(reply.content) == {"arrays", "released"}
    accounts = Journal(site.ledger).accounts()
    assert len(accounts) == CLIENTS
    for account in accounts.values():
        [(release, times)] = account.items()
        assert (release.kind, release.n, times) == ("site", 2 * CELLS, 1)
        cost = guarantee(account, 1e-5)
        assert cost is not None
        assert 0.49 < cost.epsilon <= 0.5
    sums = releases(reply)["counts"][0]
    noise = site.config.noise_multiplier
    assert np.abs(sums).max() < CLIENTS + 6 * noise
    assert np.std(sums) == pytest.approx(noise, rel=0.2), "a site's noise, of which the server knows no seed"


@pytest.mark.parametrize(
    ("policy", "columns", "code"),
    [
        ({"ranges": "no"}, ("age",), "refused.ranges"),
        ({"ranges": "age"}, ("age", "income"), "refused.ranges"),
        ({"ranges": "age"}, ("no",), "refused.ranges"),
        ({"ranges": "age"}, ("all",), "refused.ranges"),
        ({"ranges": "all clients=13"}, ("age",), "refused.min-clients"),
        ({"ranges": "all epsilon=0.4"}, ("age",), "refused.ranges"),
        ({"ranges": "all", "mechanisms": "laplace"}, ("age",), "refused.mechanism"),
        ({"ranges": "all", "min-noise-multiplier": 99.0}, ("age",), "refused.noise"),
        ({"ranges": "all", "release": "client"}, ("age",), "refused.release"),
        ({"ranges": "all", "strategies": "secure-average"}, ("age",), "refused.strategy"),
    ],
)
def test_a_question_that_breaks_the_policy_is_refused_before_a_row_is_read_and_nobody_charged(
    tmp_path: Path, policy: dict[str, Any], columns: tuple[str, ...], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, *columns, **policy)
    if code in ("refused.ranges", "refused.min-clients"):
        monkeypatch.setattr(client_node, "_open", lambda _: pytest.fail("a row is read"))
    assert refused(site.train())
    assert site.codes == [code]
    assert site.spent == 0


def test_a_column_that_a_site_lacks_costs_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, "weight", ranges="all")
    assert refused(site.train())
    assert site.spent == 0


def test_a_site_that_says_nothing_answers_no_question() -> None:
    policy = Policy()
    assert policy.ranges.columns == "no"
    assert not policy.ranges.cover(["age"])


def test_people_read_the_question_in_words_and_approve_it(tmp_path: Path) -> None:
    site = Site(tmp_path, approve="ask")
    assert refused(site.train())
    assert site.spent == 0
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(command, ["site", "requests", "--ledger", str(site.ledger)])
    assert "ranges of age, income: for each, how many rows lack it" in shown.output
    assert "at delta 1e-05: 0.4994" in shown.output
    [request] = Runs(site.ledger).requests()
    CliRunner().invoke(command, ["site", "approve", request.digest[:SHOWN], "--ledger", str(site.ledger)])
    assert not refused(site.train())
    assert refused(site.train(noise_multiplier=20.0)), "another price waits for another approval"


# --- a hostile researcher


def test_ten_thousand_questions_end_with_the_budget(tmp_path: Path) -> None:
    """Each costs 0.5 at a delta, and the budget is 1: by mu of normal noise, between 3 and 5 of them."""
    site = Site(tmp_path, budget="1 delta=1e-5")
    answered = 0
    for round in range(1, 10_000):
        if refused(site.train(round=round)):
            break
        answered += 1
    assert 3 <= answered <= 5
    assert site.spent == answered * CLIENTS
    assert refused(site.train(round=10_000, start=1.0))
    assert site.spent == answered * CLIENTS
    for account in Journal(site.ledger).accounts().values():
        cost = guarantee(account, 1e-5)
        assert cost is not None
        assert cost.epsilon <= 1


def test_a_question_is_not_for_validation_clients(site: Site) -> None:
    """Their loss at counts of the server's choice would be any cell's share."""
    assert refused(site.train(EvaluationSpec(1, (0,), 0.1)))
    assert set(site.codes) == {"refused.ranges"}
    assert site.spent == 0
