"""Sites' sums: in one order, each heard once, counted for the quorum, and none longer than its clients can make it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Message, MetricRecord
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.grids import PaperGrid, stack
from tests.helpers.messages import stacked
from tests.helpers.paper import paper_task
from tests.helpers.replies import site_reply
from tests.helpers.sites import simulated
from tests.nodes.test_hostile import spoilt
from umbel.nodes.fleet import Fleet
from umbel.privacy.channels import Place
from umbel.privacy.channels.client import furthest, near
from umbel.privacy.channels.site import SiteSanitiser, SiteSums, furthest_sum
from umbel.privacy.mechanisms import Gaussian, Laplace
from umbel.privacy.mechanisms.base import Mechanism
from umbel.protocol.arrays import flatten
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.messages import training_in
from umbel.protocol.records import pack
from umbel.protocol.releases import Sums
from umbel.protocol.run_config import RunConfig

RECORD = Hypotheses(stack([(0, 0, 0), (10, 10, 10)]))
TASK = paper_task(clipping="public", clip_norm=1.0, choice_epsilon=1.0, release_by="site")


class Sites:
    """A round of sites on paper, of which site i hosts the training clients i, i + sites, ..."""

    def __init__(self, sites: int = 2, clients: int = 6, **changes: Any) -> None:
        self.grid, self.fleet = PaperGrid.simulated(train=clients, nodes=sites), Fleet(clients_per_round=clients)
        self.asked = self.fleet.ask_training(1, RECORD, replace(TASK, **changes), self.grid)
        self.messages = self.asked.messages

    def sums(self, replies: Iterable[Message]) -> Sums:
        return self.fleet.read(self.asked, replies)

    def says(
        self, site: int, sums: Any = ((1, 0, 0), (0, 1, 0)), counts: Any = (2.0, 1.0), part: Any = None
    ) -> Message:
        flags = [1] * len(self.grid.asked(self.messages[site])) if part is None else part
        return Message(site_reply(stack(sums), counts, flags), reply_to=self.messages[site])


def heard(found: Sums) -> list[int]:
    return [int(client) for client in found.clients]


# --- reading


def test_sums_are_in_the_order_of_the_sites_whoever_answers_first() -> None:
    one = Sites()
    replies = one.says(0, counts=(3.0, 0.0)), one.says(1, sums=((0, 2, 0), (5, 0, 0)))
    for order in (replies, replies[::-1]):
        found = one.sums(order)
        assert found.sums.tolist() == [[[1, 0, 0], [0, 1, 0]], [[0, 2, 0], [5, 0, 0]]]
        assert found.counts.tolist() == [[3, 0], [2, 1]]
        assert heard(found) == [0, 1, 2, 3, 4, 5]
        assert (found.asked, found.lost_nodes, found.outside.tolist()) == (6, 0, [])
    assert heard(one.sums([one.says(0, part=[1, 0, 1]), one.says(1, part=[0, 0, 1])])) == [0, 4, 5]
    assert one.fleet.participations.tolist() == [3, 2, 2, 2, 3, 3]


def test_a_site_is_heard_once_and_only_if_it_was_asked() -> None:
    one = Sites()
    stranger = one.says(1)
    stranger.metadata.__dict__["_src_node_id"] = 999
    found = one.sums([one.says(0), one.says(0, sums=((9, 9, 9), (9, 9, 9))), stranger])
    assert found.sums.tolist() == [[[1, 0, 0], [0, 1, 0]]]
    assert found.lost_nodes == 1


@pytest.mark.parametrize(
    ("counts", "part", "read"),
    [((-5.0, 9.0), [1, 1, 1], [0, 3]), ((0.0, 3.0), [1, 1, 1], [0, 3]), ((3.0, 3.0), [1, 0, 0], [1, 1])],
)
def test_a_count_is_between_none_and_all_of_a_sites_clients_that_took_part(
    counts: Sequence[float], part: list[int], read: list[int]
) -> None:
    found = (one := Sites()).sums([one.says(1, counts=counts, part=part)])
    assert found.counts.tolist() == [read]
    assert one.sums([]).sums.shape == (0, 2, 3)


# --- replies that are of no use

ODD: dict[str, tuple[str, Any]] = {
    "a client's release": ("released", MetricRecord({"clients": [1, 1, 1]})),
    "counts that are no numbers": ("released", MetricRecord({"clients": [1, 1, 1], "counts": [math.nan, 1.0]})),
    "a flag too many": ("released", MetricRecord({"clients": [1, 1, 1, 1], "counts": [2.0, 1.0]})),
    "flags that are none": ("released", MetricRecord({"clients": [1, 2, 1], "counts": [2.0, 1.0]})),
    "nobody": ("released", MetricRecord({"clients": [0, 0, 0], "counts": [0.0, 0.0]})),
    "a sum too few": ("arrays", pack(stack([(1, 0, 0)]))),
    "a sum that is no number": ("arrays", pack(stack([(1, 0, math.nan), (0, 0, 0)]))),
    "no sums": ("arrays", MetricRecord({"a": 1})),
}


@pytest.mark.parametrize("what", ODD)
def test_a_reply_that_is_none_is_dropped_and_the_round_goes_on(what: str) -> None:
    one = Sites()
    reply, (name, record) = one.says(1), ODD[what]
    reply.content[name] = record
    found = one.sums([one.says(0), reply])
    assert heard(found) == [0, 2, 4]
    assert found.lost_nodes == 1
    assert one.fleet.participations[1::2].sum() == 0


def test_whatever_sites_send_the_round_goes_on() -> None:
    rng = np.random.default_rng(5)
    one = Sites()
    for _ in range(300):
        lie = one.says(1)
        lie.content = spoilt(lie.content, rng)
        found = one.sums([one.says(0), lie])
        assert set(heard(found)) >= {0, 2, 4}
        assert np.isfinite(found.sums).all()
        assert np.isfinite(found.counts).all()


# --- sites that lie


def test_a_sum_that_is_too_long_is_left_out_with_all_of_its_site(caplog: pytest.LogCaptureFixture) -> None:
    """Three clients within a radius of 1 with nu = 5: some 3 + 5 times a bit more, and 1,000 is no such sum."""
    one = Sites()
    found = one.sums([one.says(0), one.says(1, sums=((0, 0, 0), (0, 1e3, 0)))])
    assert heard(found) == [0, 2, 4]
    assert sorted(found.outside.tolist()) == [1, 3, 5]
    assert found.lost_nodes == 0
    assert one.fleet.dropped == 3
    assert one.fleet.participations.tolist() == [1] * 6, "they have paid as well"
    assert "if its floor of clipping explains such long sums, raise the update-norm of per-node" in caplog.text


def test_a_site_cannot_lengthen_its_sums_by_clients_that_did_not_take_part() -> None:
    one = Sites(clients=100, noise_multiplier=0.0)
    sums = ((49, 0, 0), (0, 0, 0))
    assert len(heard(one.sums([one.says(0, sums=sums)]))) == 50
    assert heard(one.sums([one.says(0, sums=sums, part=[1] * 48 + [0, 0])])) == []


def test_a_longer_update_is_allowed_by_the_run_config() -> None:
    one = Sites()
    one.fleet.run = RunConfig(clients_per_round=6, per_node="update-norm=1000")
    assert len(heard(one.sums([one.says(1, sums=((0, 0, 0), (0, 1e3, 0)))]))) == 3


@given(
    st.sampled_from(["laplace", "gaussian"]),
    st.sampled_from([1, 2, 11, 500]),
    st.sampled_from([1, 3]),
    st.sampled_from([0.0, 0.1, 5.0, 100.0]),
    st.sampled_from([0.01, 1.0, 50.0]),
    st.integers(1, 200),
    st.integers(0, 2**32 - 1),
)
def test_no_honest_sum_is_left_out(
    mechanism: str, n: int, k: int, nu: float, radius: float, clients: int, seed: int
) -> None:
    """All updates point in one direction, as far as they may."""
    changes = {"noise_multiplier": nu, "clip_norm": radius, "mechanism": mechanism}
    task = replace(TASK, round=1, clients=tuple(range(clients)), **changes)
    layout = {"weight": (n,)}
    made = SiteSanitiser.of(Place(simulated(clipping="any floor=0")), stacked(np.zeros((k, n)), layout), task)
    rng = np.random.default_rng(seed)
    updates = np.full((clients, n), 1e6)
    sums, _ = made.sanitised(stacked(updates, layout), np.zeros(clients, np.int64), iter([rng] if nu else []))
    longest = np.linalg.norm(flatten(sums), axis=1).max()
    assert longest <= furthest_sum(task, k, n, clients)


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
@pytest.mark.parametrize("n", [2, 1000, 10**6])
def test_the_bound_is_a_few_times_an_honest_sum_at_most(mechanism: str, n: int) -> None:
    task = replace(TASK, mechanism=mechanism)
    noise = {"laplace": Laplace, "gaussian": Gaussian}[mechanism](5.0).deviation(n) * math.sqrt(n)
    ratio = furthest_sum(task, 2, n, 50) / (50 + noise)
    assert 1 < ratio < {2: 4, 1000: 1.4, 10**6: 1.2}[n]


@pytest.mark.parametrize("mechanism", [Laplace(2.0), Gaussian(2.0)], ids=["laplace", "gaussian"])
@pytest.mark.parametrize("n", [1, 50])
def test_noise_is_as_long_as_its_mechanism_says_and_hardly_ever_longer(mechanism: Mechanism, n: int) -> None:
    """50,000 draws: longer than with a chance of 1 in 1,000 are at most 50, and 5 deviations of it."""
    rng = np.random.default_rng(n)
    norms = np.linalg.norm(mechanism.noise([n], np.ones((50_000, 1)), iter([rng] * 50_000)), axis=1)
    assert (norms > mechanism.longest(n, math.log(1000))).sum() <= 50 + 5 * math.sqrt(50)
    assert mechanism.longest(n, math.log(1000)) < 3 * np.quantile(norms, 0.999)


class Quiet(Laplace):
    """A mechanism of one's own that does not say how long its noise is."""

    name: ClassVar[str] = "quiet"

    def longest(self, n: int, rare: float) -> float:
        return Mechanism.longest(self, n, rare)


def test_nothing_is_left_out_under_a_mechanism_that_says_no_bound() -> None:
    task = replace(TASK, mechanism=f"{__name__}:Quiet")
    assert furthest(task, np.zeros((1, 3))) == furthest_sum(task, 1, 3, 5) == math.inf
    assert near(np.full((1, 3), 1e30), np.zeros((1, 3)), math.inf).all()


# --- the quorum


def test_a_sites_clients_count_for_the_quorum() -> None:
    one = Sites()
    replies = zip(one.messages, (one.says(0, part=[1, 0, 1]), one.says(1)), strict=True)
    tasks = [(training_in(message.content), reply.content) for message, reply in replies]
    assert [SiteSums.answered(task, content) for task, content in tasks] == [2, 3]
