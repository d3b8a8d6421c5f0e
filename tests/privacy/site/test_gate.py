"""What leaves a node of its training clients: sanitised parameters and who released them, or the word "refused".

The tests look at replies as they are sent, after a round trip through Flower's serialisation, and break the clients
behind the gate. `test_gate_reports.py` does the same for clients that report.
"""

from __future__ import annotations

import io
import math
import secrets
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from tests.helpers.examples import examples
from tests.helpers.hostile import NO_MODEL, UNREADABLE, matrix, spoilt_round
from tests.helpers.ledgers import all_spent, spent
from tests.helpers.messages import (
    SIMULATED,
    Behind,
    Compute,
    arrived,
    asked,
    of_node,
    refused,
    releases,
    stacked,
    task_of,
    through_gate,
    to_node,
    wire,
)
from tests.helpers.noise import rounding, sanitise
from umbel.privacy.mechanisms import choice, randomness
from umbel.privacy.mechanisms.randomness import SecureGenerator, streams
from umbel.privacy.mechanisms.sanitise import round_to_grid
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.refusals import guard
from umbel.privacy.site.totals import Totals
from umbel.privacy.site.umbel_app import answer_round
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.errors import ProtocolError
from umbel.protocol.home import umbel_home
from umbel.protocol.messages import query
from umbel.protocol.simulated import in_process
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

SECRET = "diagnosis-of-patient-17"
SECRET_LOSS = 0.123456789
OWN: dict[str, Any] = {"data-path": f"/data/{SECRET}"}  # the gate alone never opens it

# A model of two layers and 9 parameters.
LAYOUT: dict[str, tuple[int, ...]] = {"in.weight": (3, 2), "in.bias": (2,), "out.weight": ()}
LAYERS = (slice(0, 8), slice(8, 9))

# The same, of one layer, to check by hand.
ONE = {"weight": (2,)}


def request(
    hypotheses: Any, clients: tuple[int, ...], layout: dict[str, tuple[int, ...]] = ONE, **changes: Any
) -> RecordDict:
    """The content of a round's message that asks for training; `hypotheses` has a row for each."""
    return asked(stacked(hypotheses, layout), task_of(clients, **changes))


def hands_over(trained: Any, chosen: list[int], layout: dict[str, tuple[int, ...]] = ONE) -> Compute:
    """Clients that do as they should; `trained` has a row for each client."""
    return lambda task, assigned: [np.asarray(chosen), *stacked(trained, layout).values()]


@dataclass(frozen=True)
class Left:
    """What left a node that was not refused."""

    arrays: Arrays
    released: list[int]


def what_left(reply: Message, clients: int, layout: dict[str, tuple[int, ...]] = LAYOUT) -> Left | None:
    """Check that a reply holds allowed fields alone; return them, or None for "refused"."""
    sent = wire(reply)
    for text in (SECRET.encode(), struct.pack("<d", SECRET_LOSS), struct.pack("<f", SECRET_LOSS)):
        assert text not in sent
        assert text not in repr(reply).encode()
    came = arrived(reply)
    assert came.metadata.message_type == "train"
    if came.has_error():
        assert refused(came)
        return None

    assert set(came.content) == {"arrays", "released"}
    assert {"clients"} <= set(came.content.metric_records["released"]) <= {"clients", "step"}
    flags = came.content.metric_records["released"]["clients"]
    assert isinstance(flags, list)
    assert len(flags) == clients
    assert all(type(flag) is int and flag in (0, 1) for flag in flags)

    arrays = releases(came)
    assert list(arrays) == list(layout)
    for name, shape in layout.items():
        assert arrays[name].dtype == np.float32
        assert arrays[name].shape == (sum(flags), *shape)
        assert np.isfinite(arrays[name]).all()
    return Left(arrays, [int(flag) for flag in flags])


def assert_left(reply: Message, clients: int, layout: dict[str, tuple[int, ...]] = LAYOUT) -> Left:
    """Return what left, which must be something."""
    left = what_left(reply, clients, layout)
    assert left is not None
    return left


# --- any task, any data


@settings(derandomize=True, max_examples=examples(40))
@given(st.data())
def test_only_noised_parameters_and_who_released_leave(data: st.DataObject) -> None:
    """Whatever is asked and trained: no coordinate leaves as it was trained, nor as it was clipped."""
    own_data, per = data.draw(st.booleans()), data.draw(st.sampled_from(["vector", "layer", "public"]))
    clients = data.draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=6, unique=True))
    task = task_of(
        tuple(clients),
        round=data.draw(st.integers(1, 500)),
        noise_multiplier=data.draw(st.floats(1.0, 20.0)),
        clipping="public" if per == "public" else "update",
        clip_norm=data.draw(st.floats(0.1, 2.0)),
        noise_per="layer" if per == "layer" else "vector",
    )
    k, m = data.draw(st.integers(1, 4)), len(clients)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    # Parameters near zero, where float32 is so fine that no noise rounds to nothing by chance:
    # less than once in 10^6 runs of this test for all coordinates together.
    hypotheses = stacked(1e-5 * rng.standard_normal((k, 9)), LAYOUT)
    chosen = rng.integers(k, size=m)
    # Noise that comes from a fixed seed, in simulation, may have to hide any update.
    size = 1e-5 if own_data else data.draw(st.sampled_from([0.0, 1e-5, 1.0]))
    start = flatten(hypotheses)[chosen]
    trained = start + size * rng.standard_normal((m, 9))
    well = np.logical_not(data.draw(st.lists(st.booleans(), min_size=m, max_size=m)))
    for row in np.flatnonzero(~well):
        trained[row, data.draw(st.integers(0, 8))] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    results = stacked(trained, LAYOUT)

    context = of_node(OWN if own_data else SIMULATED)
    before = all_spent(context, clients)
    left = assert_left(through_gate(asked(hypotheses, task), context, lambda *_: [chosen, *results.values()]), m)
    assert left.released == [1] * m, "nobody can tell whose training blew up"
    clipped = flatten(results) - start
    for columns in LAYERS if per == "layer" else (slice(None),):
        norms = np.linalg.norm(clipped[:, columns], axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):  # the ill ones
            clipped[:, columns] *= np.minimum(1, task.clip_norm / np.maximum(norms, 1e-300))
    for unsanitised in (flatten(results), start + clipped):
        for name, parameters in stacked(unsanitised, LAYOUT).items():
            assert (left.arrays[name][well] != parameters[well]).all(), f"a coordinate of {name} went without noise"
    cost = Fraction(9) / Fraction(repr(task.noise_multiplier))
    assert all_spent(context, clients) == pytest.approx([earlier + cost for earlier in before])


# --- numbers to check by hand: one hypothesis of zeros, two clients

ZEROS = np.zeros((1, 2))
TRAINED = np.array([[3.0, 4.0], [0.3, 0.4]])
SMALL = request(ZEROS, (4, 7))
STAY = hands_over(TRAINED, [0, 0])


def raising(error: BaseException) -> Compute:
    def fail(*_: Any) -> Any:
        raise error from KeyError(SECRET)

    return fail


def returning(*results: Any) -> Compute:
    return lambda *_: [*results]


ALIKE, HERE = TRAINED.astype(np.float32), np.zeros(2, np.int64)
FATAL: dict[str, Compute] = {
    "an exception": raising(ValueError(f"{SECRET}: loss {SECRET_LOSS}")),
    "an exception with a telling name": raising(type(SECRET, (Exception,), {})()),
    "text": lambda *_: SECRET,
    "an array too many": returning(HERE, ALIKE, ALIKE),
    "double precision": returning(HERE, TRAINED),
    "bytes that are no array": returning(HERE, SECRET.encode()),
    "a row too few": returning(HERE, ALIKE[1:]),
    "choices not whole": returning(np.zeros(2), ALIKE),
    "a choice too high": returning(np.array([0, 1]), ALIKE),
    "a choice below zero": returning(np.array([0, -1]), ALIKE),
}


@pytest.mark.parametrize("node_config", [SIMULATED, OWN], ids=["simulated", "own data"])
@pytest.mark.parametrize("fault", FATAL)
def test_of_clients_that_fail_only_noise_leaves(fault: str, node_config: dict[str, Any]) -> None:
    """At a site; in simulation an error is seen, and nothing leaves. Either way they have been charged."""
    context = of_node(node_config)
    left = what_left(through_gate(SMALL, context, FATAL[fault]), 2, ONE)
    assert (left is None) == (node_config is SIMULATED)
    assert left is None or left.released == [1, 1]
    assert all_spent(context, (4, 7)) == [Fraction(2, 5)] * 2, "they were charged before they trained"


def test_the_reason_stays_in_the_nodes_own_log(node_log: io.StringIO) -> None:
    fails = raising(ValueError(SECRET))
    assert what_left(through_gate(SMALL, of_node(SIMULATED), fails), 2) is None
    assert f"umbel refused to answer (train): {SECRET}" in node_log.getvalue()
    assert_left(through_gate(SMALL, of_node(OWN), fails), 2, ONE)
    assert f"answers as if it had no update: {SECRET}" in node_log.getvalue()


def small(node_config: dict[str, Any], clients: tuple[int, ...] = (4, 7), **changes: Any) -> Left:
    """What leaves when the small example is trained."""
    content = request(ZEROS, clients, **changes)
    return assert_left(through_gate(content, of_node(node_config), STAY), 2, ONE)


@pytest.mark.parametrize(("clipping", "first"), [("public", [10.6, 10.8]), ("update", [13.0, 14.0])])
def test_the_update_is_what_is_added_to_the_chosen_hypothesis(clipping: str, first: list[float]) -> None:
    """Clients chose the second and the first hypothesis; their updates have norms 5 and 1.

    In simulation they may leave without noise, which costs everything.
    """
    hypotheses, context = np.array([[0.0, 0.0], [10.0, 10.0]]), of_node(SIMULATED)
    trained = np.array([[13.0, 14.0], [0.6, 0.8]])
    content = request(hypotheses, (0, 1), noise_multiplier=0.0, clipping=clipping, clip_norm=1.0)
    left = assert_left(through_gate(content, context, hands_over(trained, [1, 0])), 2, ONE)
    np.testing.assert_allclose(left.arrays["weight"], [first, [0.6, 0.8]], rtol=1e-6)
    assert [spent(Totals(context.state), client) for client in (0, 1, 5)] == [math.inf, math.inf, 0]


@pytest.mark.parametrize("mode", ["update", "public"])
def test_a_release_is_the_sanitised_update_with_noise_from_the_clients_own_stream(mode: str) -> None:
    # The second of two nodes hosts clients 1, 3, 5, ... of the dataset: its 4 and 7 are 9 and 15.
    left = small({"partition-id": 1, "num-partitions": 2}, clipping=mode, round=6)
    noised = sanitise(stacked(TRAINED, ONE)["weight"].astype(float), 5.0, 0.1, mode, streams(3, "noise", 6, [9, 15]))
    # Hypotheses of zeros have the finest resolution there is.
    expected = round_to_grid(noised, rounding(2, 5.0, 0.1), float(np.spacing(np.float32(0))))
    np.testing.assert_array_equal(left.arrays["weight"], expected.astype(np.float32))


# The rows of in.weight, and in.bias and out.weight as rows of their own.
ROWS = (slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8), slice(8, 9))


@pytest.mark.parametrize(("noise_per", "parts"), [("layer", LAYERS), ("row", ROWS)])
def test_each_layer_or_row_may_be_noised_by_itself(noise_per: str, parts: tuple[slice, ...]) -> None:
    updates, context = np.arange(9.0)[None], of_node(SIMULATED)
    content = request(np.zeros((1, 9)), (0,), LAYOUT, noise_per=noise_per)
    reply = through_gate(content, context, hands_over(updates, [0], LAYOUT))
    noised = sanitise(updates, 5.0, 0.1, "update", streams(3, "noise", 1, [0]), parts)
    expected = round_to_grid(noised, rounding(9, 5.0, 0.1), float(np.spacing(np.float32(0))))
    np.testing.assert_array_equal(flatten(assert_left(reply, 1).arrays), expected.astype(np.float32))
    assert all_spent(context, [0]) == [Fraction(9, 5)], "parts of n_i parameters cost n_i / nu each, n / nu together"


def test_layers_that_are_not_whole_are_refused() -> None:
    split = {"in.weight": (2,), "out.weight": (2,), "in.bias": (1,)}
    content = request(np.zeros((1, 5)), (0,), split, noise_per="layer")
    context = of_node(SIMULATED)
    reply = through_gate(content, context, hands_over(np.ones((1, 5)), [0], split))
    assert what_left(reply, 1, split) is None
    assert all_spent(context, [0]) == [0], "refused before anything is trained or charged"


def test_choices_leave_only_if_asked_for() -> None:
    hypotheses = np.array([[0.0, 0.0], [10.0, 10.0]])
    trained = np.array([[11.0, 11.0], [np.nan, 0.0], [1.0, 1.0]])
    for disclose, choices in ((True, {"choices": [1, 1, 0]}), (False, {})):
        content = request(hypotheses, (0, 1, 2), disclose_choice=disclose)
        reply = through_gate(content, of_node(SIMULATED), hands_over(trained, [1, 1, 0]))
        assert dict(reply.content.metric_records["released"]) == {"clients": [1, 1, 1]} | choices


def test_a_client_whose_training_blew_up_releases_its_hypothesis_with_noise_and_pays() -> None:
    """Whether it blows up depends on its data and on the step size the server chose."""
    context = of_node(SIMULATED)
    hypotheses = np.array([[100.0, 200.0]])
    trained = np.array([[np.nan, 1.0], [103.0, 204.0], [np.inf, 1.0]])
    content = request(hypotheses, (4, 7, 2), noise_multiplier=3.0)
    left = assert_left(through_gate(content, context, hands_over(trained, [0, 0, 0])), 3, ONE)
    assert left.released == [1, 1, 1]
    noise = sanitise(np.zeros((2, 2)), 3.0, 0.1, "update", streams(3, "noise", 1, [4, 2]))
    np.testing.assert_allclose(left.arrays["weight"][[0, 2]], hypotheses + noise, atol=0.02)
    assert all_spent(context, (4, 7, 2)) == [Fraction(2, 3)] * 3


def test_a_release_beyond_float32_is_the_largest_number_there_is() -> None:
    # Noise of scale nu r / n = 5e38 where float32 ends at 3.4e38: about half of the clients.
    context = of_node(SIMULATED)
    clients = tuple(range(40))
    layout = {"weight": (1,)}
    content = request(np.zeros((1, 1)), clients, layout, clipping="public", clip_norm=1e38)
    handler = hands_over(np.ones((40, 1)), [0] * 40, layout)
    left = assert_left(through_gate(content, context, handler), 40, layout)
    assert left.released == [1] * 40
    assert 10 < np.sum(np.abs(left.arrays["weight"]) == np.finfo(np.float32).max) < 30
    assert all_spent(context, clients) == [Fraction(1, 5)] * 40


# --- whoever cannot pay does not train


def test_of_the_asked_clients_those_train_that_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    trains: list[Any] = []
    monkeypatch.setattr(Totals, "charge", lambda self, charge, clients, limits, at_least, most: [True, False])

    def compute(task: TrainingSpec, assigned: NDArray[np.int64]) -> Any:
        trains.append(task.clients)
        return hands_over(TRAINED[:1], [0])(task, assigned)

    left = assert_left(through_gate(SMALL, of_node(SIMULATED), compute), 2, ONE)
    assert left.released == [1, 0]
    assert trains == [(4,)]


def test_a_task_that_the_node_cannot_do_is_refused_before_anybody_pays(node_log: io.StringIO) -> None:
    def check(task: TrainingSpec, hypotheses: Arrays) -> None:
        raise ProtocolError("these are another model's")

    refused_unseen(SMALL, OWN, check)
    assert "these are another model's" in node_log.getvalue()


# --- in how many bits releases travel

PUBLIC: dict[str, Any] = {"clipping": "public", "clip_norm": 1.0, "noise_multiplier": 2.0}
MOVED = [[1.0, 1.0], [0.5, 9e9]]
# The start, where the data lie, what the clients trained, and what the task changes.
BITS: list[tuple[int, float, dict[str, Any], Any, dict[str, Any]]] = [
    (16, 0.5, OWN, MOVED, {}),
    (16, 0.5, OWN, [[3e38, -3e38]] * 2, {}),  # it does not depend on the data
    (16, 0.5, OWN, [[np.nan, np.inf]] * 2, {}),
    (32, 1e5, OWN, MOVED, {}),  # too large a number for 16 bits
    (32, 1e5, OWN, [[np.nan, np.inf]] * 2, {}),
    (32, 0.5, OWN, MOVED, {"clipping": "update"}),  # which may be of any length
    (32, 0.5, SIMULATED, MOVED, {}),  # nothing travels far
    (32, 0.5, SIMULATED, MOVED, {"noise_multiplier": 0.0}),  # there is no grid
    (32, 0.5, OWN, MOVED, {"clip_norm": 1e60}),  # the grid's step is no 32-bit number
    (32, 0.5, OWN, MOVED, {"clip_norm": 1e38}),  # what many steps make is none
]


@pytest.mark.parametrize(("bits", "start", "node_config", "trained", "changes"), BITS)
def test_within_a_public_radius_a_release_travels_in_16_bits_whatever_the_data(
    bits: int, start: float, node_config: dict[str, Any], trained: Any, changes: dict[str, Any]
) -> None:
    content = request([[start, -0.5]], (4, 7), **PUBLIC | changes)
    reply = through_gate(content, of_node(node_config), hands_over(trained, [0, 0]))
    (matrix,) = reply.content.array_records["arrays"].values()
    assert releases(reply)["weight"].dtype == np.float32
    assert 8 * np.dtype(matrix.dtype).itemsize == bits


def test_what_travels_in_16_bits_lies_on_the_public_grid() -> None:
    """The noise deviates by nu r sqrt(n + 1) / n = sqrt(3) in each of two numbers; 1/16 of that, as a power of two."""
    reply = through_gate(request([[0.5, -0.5]], (4, 7), **PUBLIC), of_node(OWN), hands_over([[1.0, 1.0]] * 2, [0, 0]))
    assert reply.content.metric_records["released"]["step"] == 1 / 16
    times = releases(reply)["weight"] * 16
    np.testing.assert_array_equal(times, np.rint(times))


# --- a private choice

APART_TWO = np.array([[0.0, 0.0], [100.0, 100.0]])
PRIVATE = {"clipping": "public", "clip_norm": 1.0, "noise_multiplier": 1.0, "choice_epsilon": 1.0}


def obeys(seen: list[Any] | None = None, ignores: bool = False) -> Compute:
    """Clients that all fit hypothesis 1 best, and train what they are told to, which goes into `seen`."""

    def compute(task: TrainingSpec, assigned: NDArray[np.int64]) -> Any:
        if seen is not None:
            seen.append(assigned.tolist())
        chosen = np.where((assigned < 0) | ignores, 1, assigned)
        return hands_over(APART_TWO[chosen], chosen.tolist())(task, assigned)

    return compute


def test_choices_in_simulation_come_from_streams_that_draw_nothing_else() -> None:
    clients, seen = tuple(range(60)), []
    through_gate(request(APART_TWO, clients, **PRIVATE), of_node(SIMULATED), obeys(seen))
    assert seen == [choice.draw(1.0, 2, streams(3, "choice", 1, clients)).tolist()]
    assert seen != [choice.draw(1.0, 2, streams(3, "noise", 1, clients)).tolist()]


def test_a_site_draws_each_choice_and_each_noise_from_a_key_that_draws_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A release that shows its noise, next to a hypothesis far away, would show the choice as well.

    A server that knew the choices would know which clients are free.
    """
    drawn: list[str] = []
    keys: list[bytes] = []
    token_bytes = secrets.token_bytes

    def noted(length: int) -> bytes:
        keys.append(token_bytes(length))
        return keys[-1]

    class Noted(SecureGenerator):
        """A source that notes which of its draws comes first, and takes no draw of the other sort."""

        sort = ""

        def __getattribute__(self, name: str) -> Any:
            if name in ("random", "standard_gamma", "standard_normal"):
                sort = "choice" if name == "random" else "noise"
                assert self.sort in ("", sort), "choice and noise have one source"
                if not self.sort:
                    self.sort = sort
                    drawn.append(sort)
            return super().__getattribute__(name)

    monkeypatch.setattr(secrets, "token_bytes", noted)
    monkeypatch.setattr(randomness, "SecureGenerator", Noted)
    content = request(APART_TWO, tuple(range(30)), **PRIVATE)
    assert_left(through_gate(content, of_node(OWN | ACCEPTS), obeys()), 30, ONE)
    assert drawn == ["choice"] * 30 + ["noise"] * 30
    assert len({*keys}) == len(keys) == 60
    assert {len(key) for key in keys} == {32}


def test_the_choice_is_charged_before_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> Any:
        raise MemoryError(SECRET)

    monkeypatch.setattr("umbel.privacy.site.answer.choice.at_random", crash)
    context = of_node(OWN)
    assert what_left(through_gate(request(APART_TWO, (4, 7), **PRIVATE), context, obeys()), 2, ONE) is None
    [account] = {tuple(account.items()) for account in Journal(umbel_home() / "ledger.jsonl").accounts().values()}
    [(release, times)] = account
    assert (release.hypotheses, release.choice_epsilon, times) == (2, 1.0, 1)


def test_clients_that_do_not_obey_release_nothing(node_log: io.StringIO) -> None:
    """They all train the hypothesis that fits them best, which the account says they do not."""
    context = of_node(SIMULATED)
    content = request(APART_TWO, tuple(range(50)), **PRIVATE)
    assert what_left(through_gate(content, context, obeys(ignores=True)), 50, ONE) is None
    assert "trained another hypothesis than the gate assigned" in node_log.getvalue()


def test_with_one_hypothesis_there_is_nothing_to_draw_or_to_pay() -> None:
    context = of_node(OWN)
    through_gate(request(ZEROS, (4,), **PRIVATE), context, hands_over(TRAINED[:1], [0]))
    [release] = Journal(umbel_home() / "ledger.jsonl").account(4)
    assert (release.hypotheses, release.choice_epsilon) == (1, 0.0)
    assert release.formal


# --- what is refused before anything is trained


def refused_unseen(content: RecordDict, node_config: dict[str, Any], check: Any = None) -> None:
    """Check that a message is refused, nothing is trained or scored for it and nobody pays."""
    context = of_node(node_config | {"role": "split"} if node_config is OWN else node_config)
    clients = Behind(*[lambda *_: pytest.fail("they compute")] * 2)
    if check is not None:
        clients.check = check  # type: ignore[method-assign]
    assert what_left(through_gate(content, context, clients), 2, ONE) is None
    assert not context.state
    assert all_spent(context, (4, 7)) == [0, 0]


@pytest.mark.parametrize("changes", [{"noise_multiplier": 0.0}, {"disclose_choice": True}], ids=str)
def test_a_site_refuses_what_its_policy_does_not_allow(changes: dict[str, Any]) -> None:
    content = request(ZEROS, (4, 7), **changes)
    refused_unseen(content, OWN)
    assert not through_gate(content, of_node(SIMULATED), STAY).has_error(), "a simulated node follows the experiment"


def test_a_node_that_is_neither_simulated_nor_has_data_refuses() -> None:
    reply = answer_round(to_node(SMALL), of_node(SIMULATED), lambda *_: pytest.fail("the node is looked up"))
    assert what_left(reply, 2, ONE) is None


@pytest.mark.parametrize("record", ["hypotheses", "training"])
def test_a_message_that_lacks_a_record_is_refused(record: str) -> None:
    content = request(ZEROS, (4, 7))
    del content[record]
    refused_unseen(content, SIMULATED)


def test_a_task_that_cannot_be_is_refused() -> None:
    """All others are in `tests/protocol/test_tasks.py`."""
    refused_unseen(spoilt_round("training", "clip_norm", 0.0, stacked(ZEROS, ONE), clients=[4, 7]), OWN)


FLOAT = np.zeros((2, 3), np.float32)
HYPOTHESES: dict[str, ArrayRecord | Arrays] = {
    "bytes that are no array": matrix(UNREADABLE["a pickle"]),
    **{name: matrix(array) for name, array in NO_MODEL.items()},
    "NaN in the second hypothesis alone": {"a": np.array([[0, 0, 0], [0, np.nan, 0]], np.float32)},
    "half precision": {"a": FLOAT.astype(np.float16)},
    "one whole number among floats": {"a": FLOAT, "b": np.array([1, 2])},
    "a scalar": {"a": np.array(1, np.float32)},
    "two lengths": {"a": FLOAT, "b": np.zeros((3, 3), np.float32)},
    "no hypothesis": {"a": np.zeros((0, 3), np.float32)},
    "nothing at all": {},
    "too many": {"a": np.zeros((11, 3), np.float32)},
}


@pytest.mark.parametrize("name", HYPOTHESES)
def test_hypotheses_that_cannot_be_are_refused(name: str) -> None:
    refused_unseen(asked(HYPOTHESES[name], task_of((4, 7)), EvaluationSpec(1, (4, 7))), OWN)


@pytest.mark.parametrize("changes", [{}, {"clipping": "public"}, {"noise_per": "row"}], ids=str)
def test_noise_that_cannot_be_computed_is_refused_before_anybody_pays(changes: dict[str, Any]) -> None:
    """Three such tasks would use up three participations."""
    refused_unseen(request(ZEROS, (4, 7), noise_multiplier=1e200, clip_norm=1e200, **changes), OWN)


# --- who pays


def of_place(place: str, **policy: Any) -> Context:
    return of_node(OWN | {"role": "split", "place": place} | policy)


def test_a_client_out_of_budget_releases_nothing_under_another_nodes_numbers() -> None:
    """Client 6 is client 3 of node 0 of 2, and client 1 of node 1 of 5; the nodes share a ledger."""
    umbel_home().mkdir(exist_ok=True)
    Journal.create(umbel_home() / "ledger.jsonl")
    limits: dict[str, Any] = {"max-participations": 1}
    handler = hands_over(np.ones((1, 2)), [0])
    first, second = of_place("0/2", **limits), of_place("1/5", **limits)
    assert what_left(through_gate(request(ZEROS, (3,)), first, handler), 1, ONE) is not None
    assert what_left(through_gate(request(ZEROS, (1,)), second, handler), 1, ONE) is None
    assert what_left(through_gate(request(ZEROS, (3,)), second, handler), 1, ONE) is not None, "client 16 has not paid"


# --- where the data are the site's own


def test_a_sites_release_is_new_every_time_whatever_the_seed() -> None:
    # A data path makes the data the site's own, in the grid as well as outside.
    first, second = small(OWN | SIMULATED), small(OWN | SIMULATED)
    # Single numbers may coincide, on the grid that they are rounded to.
    assert (first.arrays["weight"] != second.arrays["weight"]).any()
    assert (first.arrays["weight"] != small(SIMULATED).arrays["weight"]).any()


ACCEPTS: dict[str, Any] = {"clipping": "any", "budget": "inf", "max-choice-epsilon": "inf"}
"""Of what a site may accept, all that these tests ask for."""


@pytest.mark.parametrize(
    ("hypothesis", "radius"), [(0.0, 0.01), (2.0**20, 16 * 2.0**-3 / (5 * math.sqrt(3) / 2))], ids=["floor", "least"]
)
@pytest.mark.parametrize("mode", ["update", "public"])
def test_a_site_hides_updates_within_its_own_floor_and_the_least_radius(
    mode: str, hypothesis: float, radius: float
) -> None:
    """Asked for 1e-9, |noise| ~ Gamma(n, nu r / n) at an update of zero. False-alarm rate 1e-6.

    Next to 2^20 numbers of 32 bits are 2^-3 apart. The noise deviates by nu r sqrt(3)/2, and must span 16 of that.
    """
    clients, start = tuple(range(4000)), np.full((1, 2), hypothesis)
    content = request(start, clients, clipping=mode, clip_norm=1e-9)
    handler = hands_over(np.repeat(start, 4000, axis=0), [0] * 4000)
    left = assert_left(through_gate(content, of_node(OWN | ACCEPTS), handler), 4000, ONE)
    norms = np.linalg.norm(left.arrays["weight"].astype(float) - hypothesis, axis=1)
    assert stats.kstest(norms, stats.gamma(2, scale=5 * radius / 2).cdf).pvalue > 1e-6
    [charged] = {row["clip_norm"] for row in Journal(umbel_home() / "ledger.jsonl").rows()}
    assert charged == (pytest.approx(radius, rel=1e-9) if mode == "public" else None)


# --- the guard of the other handlers


@pytest.mark.parametrize(
    "handler",
    [FATAL["an exception"], FATAL["text"], lambda msg, _: Message(Error(code=0, reason=SECRET), reply_to=msg)],
)
def test_the_guard_lets_no_text_of_a_failure_pass(handler: Any) -> None:
    with in_process():
        reply = guard(to_node(query(), "evaluate"), of_node(SIMULATED), handler)
    assert refused(reply)
    assert SECRET.encode() not in wire(reply)
