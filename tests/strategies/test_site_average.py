"""Hypotheses that move by what sites release of their clients together, by hand and in whole runs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from numpy.typing import NDArray

from tests.helpers.errors import raises
from tests.helpers.grids import PaperGrid, stack, vectors
from tests.helpers.paper import ACCEPTED
from tests.helpers.replies import site_reply
from tests.helpers.scripted import on, sends
from tests.helpers.sources import ROOT
from umbel import strategies
from umbel.nodes.fleet import Fleet
from umbel.protocol.arrays import flatten
from umbel.protocol.errors import ConfigError
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.messages import training_in
from umbel.protocol.records import from_array_record, to_array_record
from umbel.protocol.release import Clipping, Kind, ReleaseBy
from umbel.protocol.releases import Sums
from umbel.protocol.run_config import RunConfig
from umbel.server.run import Run
from umbel.server.setup import Setup
from umbel.simulation.in_process import play, run_config
from umbel.strategies.site_average import SiteAverage

SENT = [(0, 0, 0), (10, 10, 10)]
COMMON: dict[str, Any] = {
    "local_epochs": 1, "step_size": 0.1, "batch_size": 10, "noise_multiplier": 0.0, "mechanism": "laplace",
    "choice_epsilon": 1.0,
}  # fmt: skip
PUBLIC: dict[str, Any] = {"clipping": "public norm=100"}


class Rehearsal:
    """A round of sites on paper, of which site i hosts the training clients i, i + sites, ..."""

    def __init__(self, sites: int = 2, clients: int = 6, hypotheses: int = 2, **common: Any) -> None:
        self.grid = PaperGrid.simulated(train=clients, nodes=sites)
        self.strategy = on(Fleet(clients_per_round=clients, **PUBLIC), SiteAverage(hypotheses=hypotheses))
        self.messages = self.strategy.configure_train(
            1, to_array_record(stack(SENT[:hypotheses])), ConfigRecord(COMMON | common), self.grid
        )

    def answer(self, site: int, sums: Any, counts: list[float], part: list[int] | None = None) -> Message:
        task = training_in(self.messages[site].content)
        assert task is not None
        flags = [1] * len(task.clients) if part is None else part
        return Message(site_reply(stack(sums), counts, flags), reply_to=self.messages[site])

    def end(self, *replies: Message) -> tuple[list[list[float]] | None, Any]:
        following, counts = self.strategy.aggregate_train(1, replies)
        return None if following is None else vectors(from_array_record(following)).round(4).tolist(), counts


# --- by hand


def test_sites_are_asked_for_sums_within_a_public_radius() -> None:
    task = training_in(Rehearsal().messages[0].content)
    assert task is not None
    assert (task.release_by, task.clipping, task.clip_norm) == (ReleaseBy.SITE, Clipping.PUBLIC, 100.0)


def test_sums_of_many_sites_are_added_in_64_bits() -> None:
    strategy = on(Fleet(), SiteAverage(hypotheses=1))
    sends(strategy, stack([(0, 0, 0)]))
    sums = np.full((5, 1, 3), 1.0, np.float32)  # as they travelled
    sums[0] = 2.0**25, 0, 1  # in 32 bits, 1 more would be lost
    found = Sums(sums, np.full((5, 1), 1.0), np.arange(5), 5, 0, np.arange(0))
    following = strategy.learn_sums(1, found).following
    assert following is not None
    assert vectors(following).tolist() == [[np.float32((2**25 + 4) / 5), np.float32(0.8), 1]]


@pytest.mark.parametrize("hypotheses", [1, 2])
def test_counts_of_next_to_nothing_end_no_run(hypotheses: int) -> None:
    """A sum of 1e-320 is too small to divide by; one lying site alone could send it."""
    one = Rehearsal(sites=1, hypotheses=hypotheses)
    following, counts = one.end(one.answer(0, [(1, 1, 1)] * hypotheses, [1e-320, 0.0][:hypotheses]))
    assert following is None or np.isfinite(following).all()
    groups: Any = counts["groups"]
    assert sum(groups) == 6


def test_in_the_first_rounds_some_clients_try_another_hypothesis() -> None:
    """Else one that suits nobody best at first is never trained."""

    def explores(round: int, hypotheses: int = 2, options: str = "") -> float:
        entries = {"hypotheses": hypotheses, "clipping": "public"}
        strategy = on(Fleet(), strategies.make(RunConfig(strategy=f"site-average {options}".strip(), **entries)))
        share: float = strategy.decisions(round)["explore"]
        return share

    assert [explores(round) for round in (1, 8, 9)] == [0.3, 0.3, 0.0]
    assert [explores(round, options="explore=0.5 rounds=2") for round in (1, 2, 3)] == [0.5, 0.5, 0.0]
    assert explores(1, hypotheses=1) == 0.0
    with raises(ConfigError, "config.option-value", "explore", "1"):
        explores(1, options="explore=2")


NONE = (0, 0, 0)


@pytest.mark.parametrize(
    ("answers", "following", "groups"),
    [
        # Hypothesis 0 has 2 + 2 clients, hypothesis 1 has 1 + 1, whatever their site.
        ({1: ([(2, 0, 4), (4, 0, 0)], [2, 1]), 0: ([(2, 4, 0), (0, 0, 2)], [2, 1])}, [[1, 1, 1], [12, 10, 11]], [4, 2]),
        # 1 + 2 and 0 + 2, of 6 clients: shares of 3.6 and 2.4, which are about 4 and 2.
        ({0: ([(3.6, 0, 0), NONE], [1, 0]), 1: ([NONE, (2.4, 0, 0)], [2, 2])}, [[1, 0, 0], [11, 10, 10]], [4, 2]),
        # Counts that are all cut away are taken to be equal.
        ({0: ([(3, 0, 0), (6, 0, 0)], [-1, -2])}, [[2, 0, 0], [14, 10, 10]], [2, 1]),
    ],
)
def test_hypotheses_move_by_the_mean_over_their_clients(answers: Any, following: Any, groups: list[int]) -> None:
    one = Rehearsal()
    found, counts = one.end(*(one.answer(site, *answer) for site, answer in answers.items()))
    assert found == following
    released = sum(groups)
    assert dict(counts) == {"asked": 6, "releases": released, "lost-nodes": 2 - len(answers), "groups": groups}


def test_of_one_hypothesis_the_mean_is_over_those_that_took_part() -> None:
    one = Rehearsal(hypotheses=1)
    following, counts = one.end(one.answer(0, [(2, 4, 0)], [3.0]), one.answer(1, [(3, 1, 10)], [2.0], part=[1, 0, 1]))
    assert following == [[1, 1, 2]]
    assert (counts["releases"], counts["groups"]) == (5, [5])
    assert one.strategy.nodes.participations.sum() == 5


def test_a_hypothesis_with_hardly_any_clients_stays_as_it_was() -> None:
    """.5 of 6; what its sums hold is noise."""
    one = Rehearsal()
    following, counts = one.end(
        one.answer(0, [(3, 0, 0), (70, 0, 0)], [3.0, 0.5]), one.answer(1, [(3, 0, 0), (0, 70, 0)], [3.0, 0.0])
    )
    assert following is not None
    assert following[0][0] == pytest.approx(6 / (6 * 6 / 6.5), abs=1e-3)
    assert following[1] == [10, 10, 10]
    assert sum(counts["groups"]) == 6


@pytest.mark.parametrize(
    ("common", "least"),
    [
        ({"noise_multiplier": 0.0}, 1.0),
        ({"noise_multiplier": 5.0, "choice_epsilon": 30.0}, 1.0),
        # Laplace noise of scale 2 / choice-epsilon, a deviation of sqrt 2 times that, at four sites.
        ({"noise_multiplier": 5.0, "choice_epsilon": 0.5}, 8 * 2**0.5),
        ({"noise_multiplier": 5.0, "mechanism": "gaussian", "choice_epsilon": 0.0}, 10.0),
    ],
)
def test_hardly_any_is_what_the_noise_on_counts_may_make_of_none(common: dict[str, Any], least: float) -> None:
    assert Rehearsal(**common).strategy.least(4) == pytest.approx(least)


def test_too_few_clients_leave_the_hypotheses_and_nobody_knows_who_trained_what() -> None:
    one = Rehearsal()
    one.strategy.min_releases = 4
    one.end(one.answer(1, [(3, 0, 0), (6, 0, 0)], [1.0, 2.0]))
    (outcome,) = one.strategy.history
    assert (outcome.following, outcome.releases, outcome.counts.tolist()) == (None, None, [0, 0])
    assert outcome.clients.tolist() == [1, 3, 5]
    assert outcome.groups.tolist() == [-1] * 3


def test_sums_that_make_no_model_leave_the_hypotheses() -> None:
    one = Rehearsal(hypotheses=1)
    one.strategy.nodes.run = RunConfig(clients_per_round=6, per_node="update-norm=1e300")
    assert one.end(one.answer(0, [(3e38, 0, 0)], [3.0]), one.answer(1, [(3e38, 0, 0)], [3.0]))[0] is not None
    asked = one.strategy.asked["train"]
    asked.hypotheses = Hypotheses(asked.hypotheses | {"bias": asked.hypotheses["bias"] + np.float32(3.4e38)})
    assert one.end(one.answer(0, [(0, 0, 3e38)], [3.0], part=[1, 0, 0]))[0] is None


# --- what cannot be run


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"clipping": "update", "choice_epsilon": 1.0}, "config.clipping"),
        ({}, "config.choice-epsilon"),
        *((changes, "") for changes in (
            {"hypotheses": 1}, {"mechanism": "gaussian"}, {"noise_multiplier": 0.0}, {"choice_epsilon": 0.1},
        )),
    ],
)  # fmt: skip
def test_what_no_site_can_answer_is_refused_before_any_work(changes: dict[str, Any], code: str) -> None:
    run = RunConfig(**{"strategy": "site-average", "clipping": "public", "choice_epsilon": 0.0} | changes)
    with raises(ConfigError, code) if code else nullcontext():
        Setup.parse(run.entries())


# --- whole runs

CONFIG: dict[str, Any] = {
    "strategy": "site-average", "clipping": "public norm=1.0 decay=0.95",
    "clients_per_round": 80, "rounds": 30, "restarts": 5, "seed": 1,
}  # fmt: skip
NOISE: dict[str, dict[str, Any]] = {
    "laplace": {"mechanism": "laplace", "noise_multiplier": 4.0, "choice_epsilon": 1.0},
    "gaussian": {"mechanism": "gaussian", "noise_multiplier": 2.0},
}


def away(run: Run) -> NDArray[np.float64]:
    """Return how far the best hypotheses are from each of the true parameters, for k = 2."""
    assert run.setup.manifest is not None
    truth = np.asarray(run.setup.manifest.truth)
    found = flatten(run.state.best)
    nearest: NDArray[np.float64] = np.linalg.norm(truth[:, None] - found, axis=2).min(axis=1)
    return nearest


@pytest.mark.parametrize("mechanism", NOISE)
def test_two_hypotheses_find_the_two_models(mechanism: str, umbel_home: Path) -> None:
    """The synthetic dataset at four sites of 25 training clients; the models lie 10.5 apart."""
    run = play(run_config("synthetic", **CONFIG | NOISE[mechanism], hypotheses=2), nodes=4)
    first, last = run.state.history[0], run.state.history[-1]
    assert first.loss is not None
    assert last.loss is not None
    assert (away(run) < 1.0).all()
    assert last.loss < 0.3 * first.loss
    trained = [entry for entry in run.state.history if entry.asked]
    assert all(sum(entry.groups) == entry.releases == 80 for entry in trained)
    assert run.setup.release.kind is Kind.SITE
    assert run.setup.release.choice_epsilon == (1.0 if mechanism == "laplace" else 0.0)


def test_sites_with_data_of_their_own_take_part(umbel_home: Path) -> None:
    """Three sites of one dataset, each with a ledger; one has too few clients for its own rule, and refuses."""
    config = run_config(
        "synthetic", **CONFIG | NOISE["laplace"] | {"dataset": "", "rounds": 12, "wait": "nodes=3"}, model="linear"
    )
    common = {"data-path": str(ROOT / "datasets" / "synthetic.json"), "role": "split", "release": "site", **ACCEPTED}
    own = ({"place": f"{i}/3", "ledger-path": str(umbel_home / f"{i}.jsonl")} for i in range(3))
    nodes = [common | one | {"min-clients": least} for one, least in zip(own, (10, 10, 35), strict=True)]
    umbel_home.mkdir(exist_ok=True)
    run = play(config, node_configs=nodes, strict=False)
    trained = [entry for entry in run.state.history if entry.asked]
    # The third is left out for some rounds after each refusal.
    assert trained[0].lost_nodes == 1
    assert all(entry.moved and entry.releases > 40 for entry in trained)
    losses = [entry.loss for entry in run.state.history if entry.loss is not None]
    assert losses[-1] < 0.7 * losses[0]
    spent = run.fleet.participations
    assert spent[2::3].sum() == 0
    assert spent.sum() == sum(entry.releases for entry in trained)
