"""`umbel.LaplaceMod`: whole messages through an ordinary app, its noise, its account, and hostile functions behind it.

With a seed its releases are bit for bit those of umbel's own client, whose law is in tests/privacy/channels, where
also a choice and an update together cost no more than is told here.
"""

from __future__ import annotations

import math
import re
import threading
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

import umbel
from tests.helpers.errors import raises
from tests.helpers.flower_apps import SECRET, Train, arrays, asks, fails, left, replies, returns, tampers, useless
from tests.helpers.messages import wire
from tests.helpers.mods import Handler, answer, moved, node
from tests.helpers.noise import rounding, sanitise
from umbel.privacy.accounting.guarantee import guarantee
from umbel.privacy.mechanisms.randomness import noise_sources
from umbel.privacy.mechanisms.sanitise import resolution, round_to_grid
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Clipping, participation

START = {"w": np.array([[1, 2], [3, 4]], np.float32), "b": np.zeros((), np.float32), "h": np.ones(3, np.float16)}
FAR = 1e4
"""What a function moves each number by: so far that it would be seen behind the noise."""


def vector(values: dict[str, Any]) -> Any:
    return np.concatenate([np.ravel(value).astype(float) for value in values.values()])


# --- what leaves


@pytest.mark.parametrize("kind", ["train", "train.again"])
def test_only_arrays_leave_clipped_and_with_noise(kind: str) -> None:
    reply = left(answer(node([umbel.LaplaceMod(3.0, clip_norm=1.0)], moved(FAR)), asks(START), kind))
    assert {name: (value.shape, value.dtype) for name, value in reply.items()} == {
        name: (value.shape, value.dtype) for name, value in START.items()
    }
    assert 0 < np.abs(vector(reply) - vector(START)).max() < 100


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("by", [0.0, 0.001, 5.0])
def test_with_a_seed_a_release_is_that_of_umbels_own_client(clip_norm: float | None, by: float) -> None:
    start = {"w": np.array([[1, 2], [3, 4]], np.float32), "b": np.zeros((), np.float32)}
    reply = left(answer(node([umbel.LaplaceMod(3.0, clip_norm, seed=7)], moved(by)), asks(start, round=5)))
    mode, radius = (Clipping.UPDATE, 0.01) if clip_norm is None else (Clipping.PUBLIC, clip_norm)
    centre = vector(start)[None]
    update = (centre + np.float32(by)).astype(np.float32) - centre
    expected = centre + sanitise(update, 3.0, radius, mode, noise_sources(7, 5, [3]))
    expected = round_to_grid(expected, rounding(5, 3.0, radius), resolution(centre))
    assert (vector(reply) == expected[0].astype(np.float32)).all()


def test_a_seed_gives_other_noise_to_each_client_and_in_each_round() -> None:
    def release(round: int, client: int, seed: int = 7) -> bytes:
        grid = node([umbel.LaplaceMod(3.0, 1.0, seed=seed)], **{"partition-id": client})
        return left(answer(grid, asks(START, round=round)))["w"].tobytes()

    assert release(1, 0) == release(1, 0)
    assert len({release(1, 0), release(2, 0), release(1, 1), release(1, 0, seed=8)}) == 4


def test_without_a_seed_no_noise_comes_twice() -> None:
    grid = node([umbel.LaplaceMod(3.0, 1.0)], run_config={"seed": 7}, seed=7)
    assert len({left(answer(grid, asks(START)))["w"].tobytes() for _ in range(10)}) == 10


# --- the noise


def test_each_layer_has_noise_of_its_own_norm() -> None:
    """Noise scaled to the whole vector would drown the layer that did not move; its own floor leaves it in place."""

    def train(msg: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": arrays({"a.w": np.full(50, FAR), "b.w": np.zeros(50)})}), reply_to=msg)

    start = {"a.w": np.zeros(50), "b.w": np.zeros(50)}
    reply = left(answer(node([umbel.LaplaceMod(3.0, per="layer")], train), asks(start)))
    assert 0 < np.abs(reply["b.w"]).max() < 1
    assert np.abs(reply["a.w"] - FAR).max() > 10


def test_near_large_numbers_the_noise_spans_steps_of_32_bits() -> None:
    """Of 30 numbers whose noise is 16 steps each, two releases are never equal; of 3, five would be once in 10,000."""
    start = {"w": np.full(30, 1e30, np.float32)}
    grid = node([umbel.LaplaceMod(3.0, 1.0)])
    assert len({left(answer(grid, asks(start)))["w"].tobytes() for _ in range(5)}) == 5


# --- hostile functions


LOST = useless(START, FAR) | {
    "NaN": returns(START, FAR, b=np.array(np.nan, np.float32)),
    "infinity": returns(START, FAR, w=np.full((2, 2), -np.inf)),
    "numbers that 32 bits cannot hold": returns(START, FAR, w=np.full((2, 2), 1e200)),
    "one axis more": returns(START, FAR, b=np.array([FAR])),
}
"""Functions that return nothing usable: they leave as if they had changed nothing."""
KEPT: dict[str, Train] = {
    "whole numbers": returns(START, FAR, w=np.full((2, 2), int(FAR))),
    "64 bits": returns(START, FAR, w=np.full((2, 2), FAR)),
    "another order": returns({name: START[name] for name in reversed(START)}, FAR),
    "more than arrays": replies(
        arrays=arrays({name: value + value.dtype.type(FAR) for name, value in START.items()}),
        metrics=MetricRecord({"loss": 0.123, "num-examples": 61}),
        config=ConfigRecord({"note": SECRET}),
    ),
    "changes to the message": tampers,
}
"""Functions that return a model, and more than that or in another form."""


def behind(train: Train) -> Handler:
    return lambda msg, context: train(msg)


def seeded(train: Handler) -> Message:
    return answer(node([umbel.LaplaceMod(3.0, clip_norm=1.0, seed=1)], train), asks(START))


@pytest.mark.parametrize("function", LOST)
def test_what_cannot_be_used_leaves_as_if_nothing_had_changed(function: str) -> None:
    reply, nothing = seeded(behind(LOST[function])), seeded(moved(0.0))
    assert SECRET.encode() not in wire(reply)
    assert vector(left(reply)).tolist() == vector(left(nothing)).tolist()


@pytest.mark.parametrize("function", KEPT)
def test_of_whatever_a_function_returns_only_a_clipped_model_leaves(function: str) -> None:
    reply, nothing = seeded(behind(KEPT[function])), seeded(moved(0.0))
    assert SECRET.encode() not in wire(reply)
    shift = vector(left(reply)) - vector(left(nothing))
    assert 0.9 < np.linalg.norm(shift) < 1.1, "the clip norm, and the rounding of 16 bits"
    assert reply.metadata.message_type == "train"
    for name, value in START.items():
        assert left(reply)[name].dtype == value.dtype


def test_the_state_of_an_app_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    """Not even where the app puts anything in place of the Mod's own, or of all of it."""

    def fills(msg: Message, context: Context) -> Message:
        context.state["umbel-norms"] = ConfigRecord({"norms": SECRET})
        return moved(0.0)(msg, context)

    def replaces(msg: Message, context: Context) -> Message:
        context.state = None  # type: ignore[assignment]
        return moved(0.0)(msg, context)

    for handler in (fills, replaces):
        grid = node([umbel.LaplaceMod(3.0)], handler)
        for _ in range(2):
            assert np.abs(vector(left(answer(grid, asks(START)))) - vector(START)).max() < 1


def test_what_a_thread_does_later_does_not_leave() -> None:
    """A function that answers, and goes on to change what it was given and what it returned."""
    go_on, threads = threading.Event(), []

    def train(msg: Message, context: Context) -> Message:
        reply = moved(FAR)(msg, context)

        def later() -> None:
            go_on.wait()
            for content in (msg.content, reply.content):
                content["arrays"] = arrays({SECRET: START["w"]})
                content["more"] = ConfigRecord({SECRET: 1})
            reply.metadata.__dict__["_group_id"] = SECRET

        threads.append(threading.Thread(target=later))
        threads[-1].start()
        return reply

    def held(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Hold the reply back until the thread is done, as a slow network would."""
        reply = call_next(msg, context)
        go_on.set()
        threads[-1].join()
        return reply

    app = node([held, umbel.LaplaceMod(3.0, clip_norm=1.0, seed=1)], train)
    reply = answer(app, asks(START))
    assert SECRET.encode() not in wire(reply)
    assert 0.9 < np.linalg.norm(vector(left(reply)) - vector(left(seeded(moved(0.0))))) < 1.1


def test_a_mod_that_calls_the_function_twice_releases_once() -> None:
    def twice(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
        call_next(msg, context)
        return call_next(msg, context)

    mods = [umbel.LaplaceMod(3.0, clip_norm=1.0, seed=1), twice]
    reply = answer(node(mods, moved(FAR)), asks(START))
    assert vector(left(reply)).tolist() == vector(left(seeded(moved(FAR)))).tolist()


def test_who_stops_a_node_stops_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        seeded(fails(KeyboardInterrupt()))


# --- messages


UNFIT: dict[str, tuple[RecordDict, str]] = {
    "nothing": (RecordDict(), "protocol.records"),
    "the parameters of a NumPyClient": (RecordDict({"fitins.parameters": arrays(START)}), "refused.numpy-client"),
    "the keys of SecAgg+": (RecordDict({"secaggplus_configs": ConfigRecord({"stage": "setup"})}), "protocol.records"),
    "two records": (RecordDict({"a": arrays(START), "b": arrays(START)}), "protocol.records"),
    "no arrays": (asks({}), "refused.arrays"),
    "no numbers": (asks({"w": np.zeros((0, 2), np.float32)}), "refused.arrays"),
    "whole numbers": (asks(START | {"num_batches_tracked": np.array(3)}), "refused.arrays"),
    "complex numbers": (asks({"w": np.array([1j])}), "refused.arrays"),
    "numbers of 80 bits": (asks({"w": np.ones(2, np.longdouble)}), "refused.arrays"),
    "NaN": (asks({"w": np.array([np.nan])}), "refused.arrays"),
    "numbers that 32 bits cannot hold": (asks({"w": np.array([1e200])}), "refused.arrays"),
    "layers apart": (asks({"a.w": np.ones(2), "b.w": np.ones(2), "a.b": np.ones(2)}), "refused.layers"),
}


@pytest.mark.parametrize("message", UNFIT)
def test_a_message_without_a_model_is_refused_before_anybody_trains(message: str) -> None:
    asked: list[Message] = []

    def train(msg: Message, context: Context) -> Message:
        asked.append(msg)
        return moved(0.0)(msg, context)

    content, code = UNFIT[message]
    reply = answer(node([umbel.LaplaceMod(3.0, per="layer")], train), content)
    assert f"[{code}]" in reply.error.reason
    assert not asked


@pytest.mark.parametrize("kind", ["evaluate", "query"])
def test_other_messages_are_refused_unless_the_app_lets_them_pass(kind: str) -> None:
    refused = answer(node([umbel.LaplaceMod(3.0, 1.0)], fails(ValueError(SECRET))), asks(START), kind)
    assert "[refused.message-type]" in refused.error.reason
    assert SECRET not in refused.error.reason
    passed = answer(node([umbel.LaplaceMod(3.0, 1.0, others="pass")], moved(FAR)), asks(START), kind)
    assert dict(passed.content.metric_records["metrics"]) == {"num-examples": 61}
    assert passed.content.array_records["arrays"]["w"].numpy()[0, 0] == FAR + 1


def loss(arrays: ArrayRecord, context: Context) -> float:
    return float(np.square(arrays["w"].numpy()).sum())


@pytest.mark.parametrize("k", [1, 2])
def test_mods_in_the_wrong_order_are_told_the_right_one(k: int) -> None:
    wrong = [umbel.LaplaceMod(3.0, 1.0), umbel.ChooseHypothesis(loss)]
    stacked = {"w": np.zeros((k, 2), np.float32)}
    for mods in (wrong, wrong[:1]):
        reply = answer(node(mods, fails(ValueError(SECRET))), asks(stacked, k=k))
        assert "[config.mods-order]" in reply.error.reason
    assert not answer(node(wrong[::-1]), asks(stacked, k=k)).has_error()
    assert not answer(node(wrong), asks(START)).has_error(), "without hypotheses the order does not matter"


# --- arguments


@pytest.mark.parametrize(
    "arguments",
    [
        {"noise_multiplier": 0}, {"noise_multiplier": math.nan}, {"noise_multiplier": True}, {"noise_multiplier": "3"},
        {"clip_norm": 0}, {"clip_norm": math.inf}, {"per": "item"}, {"clip_norm": 1.0, "per": "layer"},
        {"others": "all"},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_cannot_be(arguments: dict[str, Any]) -> None:
    [*_, value] = arguments.values()
    with raises(ConfigError, "config.laplace-mod", repr(value)):
        umbel.LaplaceMod(**{"noise_multiplier": 3.0, **arguments})


def test_the_config_says_what_mods_are_made_without(caplog: pytest.LogCaptureFixture) -> None:
    """The site's word counts, and where it is silent the run's."""
    caplog.set_level("INFO", "flwr")
    mod = umbel.LaplaceMod.of_config(others="pass")
    run = {"noise-multiplier": 10, "clip-norm": 1.0}
    answer(node([mod], run_config=run), asks({"w": np.zeros(5)}))
    assert "pure epsilon of 1 a participation" in caplog.text
    answer(node([mod], run_config=run, **{"noise-multiplier": 20.0}), asks({"w": np.zeros(5)}))
    assert "pure epsilon of 0.5 a participation" in caplog.text
    assert not answer(node([mod], run_config=run), asks(START), "evaluate").has_error()
    assert "config.laplace-mod" in answer(node([mod]), asks(START)).error.reason
    caplog.clear()
    answer(node([mod], run_config={"noise-multiplier": 3.0}, per="row"), asks(START))
    assert "proves no epsilon" in caplog.text


# --- the account


def told(caplog: pytest.LogCaptureFixture) -> list[float]:
    return [float(one) for one in re.findall(r"epsilon of (\S+) a participation", caplog.text)]


def released(k: int, choice_epsilon: float | None, nu: float, n: int, **arguments: Any) -> None:
    mod = umbel.LaplaceMod(nu, **{"clip_norm": 1.0, **arguments})
    mods = [mod] if choice_epsilon is None else [umbel.ChooseHypothesis(loss, choice_epsilon), mod]
    grid = node(mods)
    stacked = np.zeros((k, n), np.float32) if k else np.zeros(n, np.float32)
    for _ in range(3):
        assert not answer(grid, asks({"w": stacked}, k=k or None)).has_error()


@pytest.mark.parametrize(
    ("k", "choice", "nu", "n", "expected"),
    [(0, None, 3.0, 11, 22 / 3), (0, 1.0, 3.0, 11, 22 / 3), (1, 1.0, 3.0, 11, 22 / 3), (2, 1.0, 4.0, 2, 2.0),
     (5, 0.5, 10.0, 7, 1.9)],
)  # fmt: skip
def test_the_epsilon_of_a_participation_is_told_once(
    k: int, choice: float | None, nu: float, n: int, expected: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "flwr")
    released(k, choice, nu, n)
    assert told(caplog) == [pytest.approx(expected, rel=1e-3)]
    account = guarantee({participation(n, max(k, 1), nu, choice_epsilon=choice or 0.0): 1}, 0.0)
    assert account
    assert account.pure == pytest.approx(expected), "as umbel's account has it"


@pytest.mark.parametrize("arguments", [{}, {"clip_norm": None}, {"seed": 1}])
def test_no_epsilon_is_told_where_none_is_proven(arguments: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """After an open choice; with the update's own norm; with a seed."""
    caplog.set_level("INFO", "flwr")
    released(2, 1.0 if arguments else 0.0, 4.0, 2, **arguments)
    assert not told(caplog)
    warning = {"clip_norm": "proves no epsilon", "seed": "no release"}
    expected = "hypothesis is open, so no epsilon is proven" if not arguments else warning[next(iter(arguments))]
    assert caplog.text.count(expected) == 1


def test_a_server_cannot_say_that_there_was_no_choice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flwr")
    content = asks({"w": np.zeros((2, 2), np.float32)}, k=2)
    content["choice"] = ConfigRecord({"k": 1, "epsilon": 1.0})
    content["config"].update({"choice-epsilon": 1.0, "hypotheses": 1})
    answer(node([umbel.ChooseHypothesis(loss), umbel.LaplaceMod(4.0, 1.0)]), content)
    assert not told(caplog)


# --- growth


def test_the_log_warns_when_updates_grow_from_round_to_round(caplog: pytest.LogCaptureFixture) -> None:
    def grows(factor: float) -> None:
        caplog.clear()
        steps = iter([factor**i for i in range(4)])
        grid = node([umbel.LaplaceMod(0.001)], lambda msg, context: moved(next(steps))(msg, context))
        for _ in range(4):
            answer(grid, asks(START))

    grows(3.0)
    assert caplog.text.count("grow from round to round") == 1
    grows(1.5)
    assert "grow from round to round" not in caplog.text
