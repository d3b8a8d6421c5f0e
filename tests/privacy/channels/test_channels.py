"""A channel is one file and its name: gate, nodes, journal and planner take one that they have never seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from tests.helpers.ledgers import ledger_of
from tests.helpers.messages import Behind, arrived, asked, of_node, refused, stacked, task_of, through_gate
from tests.privacy.channels import toy
from umbel.privacy import channels
from umbel.privacy.accounting.guarantee import released_by
from umbel.privacy.site.charges import priced
from umbel.protocol.arrays import flatten
from umbel.protocol.errors import ProtocolError
from umbel.protocol.release import CHANNELS, IMPLIED
from umbel.simulation.in_process import play, run_config

TASK: dict[str, Any] = {"release_by": toy.NAME, "clipping": "public", "clip_norm": 1.0, "mechanism": "gaussian"}
START = stacked(np.zeros((1, 2)), {"weight": (2,)})


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the toy channel."""
    monkeypatch.setitem(CHANNELS, toy.NAME, f"{toy.__name__}:Means")


@pytest.mark.parametrize("name", CHANNELS)
def test_each_channel_has_a_file_of_its_own(name: str) -> None:
    channel = channels.load(name)
    assert issubclass(channel, channels.Channel)
    assert channel.__module__.startswith(f"umbel.privacy.channels.{name}")


@pytest.mark.parametrize("name", ["nobody", *sorted(IMPLIED)])
def test_a_server_asks_for_no_channel_that_is_not_registered_or_follows_from_a_task(name: str) -> None:
    with raises(ProtocolError, "protocol.wrong-value"):
        task_of(**TASK | {"release_by": name})


def played(**changes: Any) -> Any:
    settings = {
        "strategy": "site-average", "hypotheses": 1, "clipping": "public", "mechanism": "gaussian", "rounds": 3,
        "clients_per_round": 60, "noise_multiplier": 0.0, "choice_epsilon": 0.0, "restarts": 1,
    }  # fmt: skip
    return play(run_config("synthetic", **settings | changes), nodes=3)


@pytest.mark.usefixtures("registered")
def test_a_run_learns_through_a_channel_that_it_did_not_know() -> None:
    sums, means = played(), played(strategy=f"{toy.__name__}:MeanAverage")
    assert np.allclose(flatten(means.state.hypotheses), flatten(sums.state.hypotheses), atol=1e-5)
    assert means.fleet.participations.sum() == 3 * 60


@pytest.mark.usefixtures("registered")
def test_the_gate_charges_what_the_channel_says_before_anything_leaves() -> None:
    context, task = of_node({"partition-id": 0, "num-partitions": 1}), task_of((0, 1), **TASK | {"noise_multiplier": 3})
    clients = Behind(lambda *_: [np.zeros(2, np.int64), np.array([[1, 1], [np.nan, 1]], np.float32)])
    reply = arrived(through_gate(asked(START, task), context, clients))
    assert {*reply.content} == {toy.NAME, "released"}
    assert np.isfinite(reply.content.metric_records[toy.NAME]["update"]).all(), "nothing tells who diverged"
    assert dict(ledger_of(context).account(0)) == {priced(released_by(toy.NAME, task.release(2, 1, 1.0))): 1}
    alone = asked(START, task_of((0,), **TASK))
    assert refused(through_gate(alone, context, Behind(lambda *_: pytest.fail("it trains"))))


@pytest.mark.usefixtures("registered")
def test_a_channel_that_charges_for_a_hidden_choice_has_it_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(channels.Sanitiser):
        release = task_of(**TASK | {"release_by": "client", "choice_epsilon": 1e-9}).release(2, 3, 1.0)

        def leave(self, clients: Any, results: Any, chosen: Any, paid: Any) -> channels.Outgoing:
            return channels.Outgoing(paid)

    monkeypatch.setattr(Plain, "of", lambda *_: Plain())
    monkeypatch.setattr(toy.Means, "sanitiser", Plain)
    seen: list[int] = []

    def train(task: Any, assigned: Any) -> Any:
        seen.extend(assigned.tolist())
        return [np.maximum(assigned, 0), np.ones((len(assigned), 2), np.float32)]

    start, task = stacked(np.zeros((3, 2)), {"weight": (2,)}), task_of(tuple(range(50)), **TASK)
    through_gate(asked(start, task), of_node({"partition-id": 0, "num-partitions": 1}), train)
    assert {*seen} == {0, 1, 2}, "each is told what to train, almost surely"
