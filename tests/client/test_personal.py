"""A client's local model is trained as the paper says, is its own affair, and stays on its node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.common.serde import message_to_proto
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

import models
from client import personal
from client.app import app
from client.cohort import Cohort, LocalUpdate, minibatches
from client.personal import LocalModels, noisy_messages, score_newcomers
from federation import BUNDLED, Manifest, offsets_of, open_federation, write_federation
from models.factors import SLOPES
from protocol.messages import ARRAYS, LOCAL, Demand, evaluate_request, local_request, train_request
from protocol.records import from_array_record, to_array_record
from simulation.grid import InProcessGrid

FALSE_ALARM = 1e-6
PREFERENCES = open_federation(BUNDLED / "preferences.json")
ITEMS = models.load("factors-100x8").initial(0)["items"]

losses = pytest.mark.parametrize("loss", list(SLOPES))
# float32 has 7 digits, of which a few dozen steps cost one or two.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}

Config = dict[str, Any]
Rows = tuple[list[int], list[int]]
"""A client's rows: items' numbers and their labels."""
Matrix = NDArray[Any]


def cohort_of(*clients: Rows) -> Cohort:
    """Return a cohort of clients."""
    numbers = [[float(item)] for items, _ in clients for item in items]
    labels = [label for _, own in clients for label in own]
    return Cohort(torch.tensor(numbers), torch.tensor(labels), np.array([len(own) for _, own in clients]))


def generators(count: int, seed: int = 0) -> list[np.random.Generator]:
    """Return a generator for each client."""
    return [np.random.default_rng([seed, c]) for c in range(count)]


def steps(count: int, batch_size: int = 0, step_size: float = 0.25) -> LocalUpdate:
    """R minibatches (Protocol 1)."""
    return LocalUpdate(0, step_size, batch_size, local_steps=count)


def epochs(count: int, batch_size: int = 0, step_size: float = 0.25) -> LocalUpdate:
    """E epochs (Protocol 3)."""
    return LocalUpdate(count, step_size, batch_size)


def train(
    items: Any, users: Any, cohort: Cohort, update: LocalUpdate, loss: str = "log", seed: int = 0, **options: Any
) -> tuple[Matrix, Matrix]:
    """Return the items and the local models that clients have trained."""
    items, users = np.asarray(items, np.float32), np.asarray(users, np.float32)
    model = models.load(f"factors-{items.shape[0]}x{items.shape[1]}", loss)
    return personal.train(model, items, users, cohort, update, generators(len(users), seed), **options)


# --- one step, by hand

LIKES_ONE_OF_THREE: Rows = ([0, 2, 3], [-1, 1, -1])


@losses
def test_the_update_of_items_of_zeros_is_the_local_model_and_leaves_it_alone(loss: str) -> None:
    """What the attack lives on: Delta v_i = -alpha l'(0) y_i u, and by Eq. 1 no gradient for u."""
    user = np.array([1.0, -2.0])
    for update in (steps(1), epochs(1)):
        items, users = train(np.zeros((4, 2)), [user], cohort_of(LIKES_ONE_OF_THREE), update, loss)
        labels = np.array([-1, 0, 1, -1])[:, None]
        slope = {"log": -0.5, "hinge": -1.0, "margin": -1.0}[loss]
        np.testing.assert_array_equal(items, [-0.25 * slope * labels * user])
        np.testing.assert_array_equal(users, [user])


def test_with_a_second_step_the_local_model_moves() -> None:
    _, users = train(np.zeros((4, 2)), [[1.0, -2.0]], cohort_of(LIKES_ONE_OF_THREE), steps(2))
    assert (users != [[1.0, -2.0]]).all()


def test_a_step_moves_items_each_and_the_local_model_by_the_mean_both_from_where_they_were() -> None:
    # Loss -y u.v, alpha 1/4: an item moves by y u / 4, u by the mean of y v / 4.
    items, users = train([[4, 0], [0, 8]], [[1, 2]], cohort_of(([0, 1], [1, -1])), steps(1), "margin")
    assert items.tolist() == [[[4.25, 0.5], [-0.25, 7.5]]]
    assert users.tolist() == [[1.5, 1]]


@losses
@pytest.mark.parametrize("update", [steps(0, 2), epochs(0, 2), steps(0), epochs(0)])
@pytest.mark.parametrize("balanced", [False, True])
def test_without_steps_and_epochs_nothing_changes(loss: str, update: LocalUpdate, balanced: bool) -> None:
    """R = 0 is how a server gives items to a client without an update."""
    cohort = cohort_of(LIKES_ONE_OF_THREE, ([1], [1]))
    items, users = train(ITEMS[:4], ITEMS[:2], cohort, update, loss, balanced=balanced)
    np.testing.assert_array_equal(items, [ITEMS[:4]] * 2)
    np.testing.assert_array_equal(users, ITEMS[:2])


# --- any steps, against the paper


def hinge_slope(z: float) -> float:
    """Of max(0, 1 - z); near its kink rounding alone would decide."""
    assume(abs(z - 1) > 1e-4)
    return -1.0 if z < 1 else 0.0


def client_update(
    items: Matrix, user: Matrix, rows: Rows, update: LocalUpdate, loss: str, generator: np.random.Generator
) -> tuple[Matrix, Matrix]:
    """CLIENTUPDATE as Protocols 1 and 3 have it, one item after the other, in float64."""
    slope: dict[str, Callable[[float], float]] = {
        "log": lambda z: -1 / (1 + np.exp(z)),
        "hinge": hinge_slope,
        "margin": lambda z: -1.0,
    }
    v, u = items.astype(float), user.astype(float)
    numbers, labels = rows
    size = min(update.batch_size or len(labels), len(labels))
    for _ in range(update.local_steps or update.local_epochs):
        order = np.arange(len(labels))
        if size < len(labels):
            order = generator.permutation(order)
        split = [order[begin : begin + size].tolist() for begin in range(0, len(labels), size)]
        for batch in split[:1] if update.local_steps else split:
            s = {row: slope[loss](labels[row] * u @ v[numbers[row]]) * labels[row] for row in batch}
            g = sum(s[row] * v[numbers[row]] for row in batch) / len(batch)
            for row in batch:
                v[numbers[row]] = v[numbers[row]] - update.step_size * s[row] * u
            u = u - update.step_size * g
    return v, u


@st.composite
def clients(draw: st.DrawFn, items: int = 12) -> list[Rows]:
    """Draw clients that have labelled different numbers of items."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = draw(st.lists(st.integers(1, items), min_size=1, max_size=5))
    return [
        (generator.choice(items, n, replace=False).tolist(), generator.choice([-1, 1], n).tolist()) for n in lengths
    ]


updates = st.builds(
    LocalUpdate,
    local_epochs=st.integers(0, 3),
    step_size=st.just(0.3),
    batch_size=st.integers(0, 13),
    local_steps=st.integers(0, 4),
)


@given(clients(), updates, st.sampled_from(list(SLOPES)), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_training_is_the_papers_client_update(
    asked: list[Rows], update: LocalUpdate, loss: str, factors: int, seed: int
) -> None:
    drawn = np.random.default_rng(seed)
    items = drawn.standard_normal((12, factors)).astype(np.float32)
    users = drawn.standard_normal((len(asked), factors)).astype(np.float32)
    moved, local = train(items, users, cohort_of(*asked), update, loss, seed)
    for c, (rows, generator) in enumerate(zip(asked, generators(len(asked), seed), strict=True)):
        v, u = client_update(items, users[c], rows, update, loss, generator)
        np.testing.assert_allclose(moved[c], v, **CLOSE)
        np.testing.assert_allclose(local[c], u, **CLOSE)


@given(clients(), updates, st.booleans())
def test_a_client_gets_the_same_result_alone(asked: list[Rows], update: LocalUpdate, balanced: bool) -> None:
    users = ITEMS[20 : 20 + len(asked)]
    together = train(ITEMS[:12], users, cohort_of(*asked), update, balanced=balanced)
    for c, rows in enumerate(asked):
        model, own = models.load("factors-12x8"), [generators(len(asked))[c]]
        alone = personal.train(model, ITEMS[:12], users[c : c + 1], cohort_of(rows), update, own, balanced)
        for ours, theirs in zip(together, alone, strict=True):
            np.testing.assert_allclose(ours[c], theirs[0], **CLOSE)


@given(clients(), updates)
def test_an_item_that_a_client_has_not_labelled_stays_as_it_was(asked: list[Rows], update: LocalUpdate) -> None:
    moved, _ = train(ITEMS[:12], ITEMS[20 : 20 + len(asked)], cohort_of(*asked), update)
    for (labelled, _), own in zip(asked, moved, strict=True):
        others = np.setdiff1d(np.arange(12), labelled)
        np.testing.assert_array_equal(own[others], ITEMS[:12][others])


def test_the_rows_of_one_client_do_not_reach_another_through_the_padding() -> None:
    """A client of one row beside one whose numbers are beyond all bounds."""
    items = np.concatenate([ITEMS[:2], np.full((4, 8), 1e38, np.float32)])
    few: Rows = ([1], [1])
    many: Rows = ([2, 3, 4, 5], [1, -1, 1, -1])
    alone = train(items, ITEMS[3:4], cohort_of(few), steps(3), "margin")
    with np.errstate(over="ignore", invalid="ignore"):
        together = train(items, ITEMS[[9, 3, 9]], cohort_of(many, few, many), steps(3), "margin")
    for ours, theirs in zip(together, alone, strict=True):
        np.testing.assert_allclose(ours[1], theirs[0], **CLOSE)


@pytest.mark.parametrize("huge", [3e38, np.inf])
def test_a_local_model_outlives_training_that_blew_up(huge: float) -> None:
    """Else a server could destroy it for good, with items or steps beyond all bounds."""
    items = np.full((4, 2), np.float32(huge))
    users = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        _, local = train(items, users, cohort_of(([0, 1], [1, 1]), ([2], [-1])), steps(2, step_size=1e9), "margin")
    np.testing.assert_array_equal(local, users)


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_a_minibatch_takes_different_items(batch_size: int, seed: int) -> None:
    rows: Rows = ([7, 2, 9, 4, 0, 5], [-1, 1, -1, -1, 1, -1])
    moved, _ = train(np.zeros((10, 2)), [[1, 1]], cohort_of(rows), steps(1, batch_size), seed=seed)
    changed = np.flatnonzero(moved[0].any(axis=1))
    assert set(changed) <= set(rows[0])
    assert len(changed) == min(batch_size, 6), "an item taken twice would leave one out"


# --- minibatches of as many liked items as others


@given(clients(), updates, st.integers(0, 2**32 - 1))
def test_labels_of_a_balanced_minibatch_add_up_to_nothing(asked: list[Rows], update: LocalUpdate, seed: int) -> None:
    assume(update.batch_size != 1)  # of which `train` makes 2
    labels = np.concatenate([own for _, own in asked]).astype(np.float32)
    lengths, order = personal._balanced(
        labels, np.array([len(own) for _, own in asked]), update, generators(len(asked), seed)
    )
    even = LocalUpdate(update.local_epochs, 0.1, update.batch_size // 2 * 2, update.local_steps)
    for rows, share, _ in minibatches(lengths, even, order):
        assert np.where(share > 0, labels[rows], 0).sum(axis=1).tolist() == [0] * len(asked)


@losses
@pytest.mark.parametrize(("batch_size", "taken"), [(1, 2), (2, 2), (3, 2), (4, 4), (5, 4), (6, 4), (0, 4)])
def test_what_balanced_minibatches_say_of_items_of_zeros_adds_up_to_nothing(
    loss: str, batch_size: int, taken: int
) -> None:
    """Two of seven items are liked, so that 4 at most take part. The zeroing attack reads the sum."""
    rows: Rows = (list(range(7)), [-1, 1, -1, -1, 1, -1, -1])
    moved, users = train(np.zeros((7, 2)), [[1, -2]], cohort_of(rows), steps(1, batch_size), loss, balanced=True)
    assert np.count_nonzero(moved[0].any(axis=1)) == taken
    np.testing.assert_array_equal(moved.sum(axis=1), [[0, 0]])
    assert users.tolist() == [[1, -2]]


def test_the_rest_waits_for_another_pass() -> None:
    rows: Rows = (list(range(7)), [1, -1, -1, -1, -1, -1, -1])
    moved, _ = train(np.zeros((7, 2)), [[1, -2]], cohort_of(rows), epochs(40, 2), balanced=True)
    assert moved[0].any(axis=1).all()


def test_a_client_that_likes_all_or_nothing_has_no_balanced_update() -> None:
    cohort = cohort_of(([0, 1], [1, 1]), ([0, 1, 2], [1, -1, -1]), ([2], [-1]))
    moved, users = train(ITEMS[:3], ITEMS[5:8], cohort, steps(2, 2), balanced=True)
    np.testing.assert_array_equal(moved[[0, 2]], [ITEMS[:3]] * 2)
    np.testing.assert_array_equal(users[[0, 2]], ITEMS[[5, 7]])
    assert (moved[1] != ITEMS[:3]).any()
    nobody, _ = train(ITEMS[:3], ITEMS[5:6], cohort_of(([0, 1], [1, 1])), steps(2, 2), balanced=True)
    np.testing.assert_array_equal(nobody, [ITEMS[:3]])


# --- noisy messages (Eq. 3)


def messages(everywhere: bool, sigma: float = 0.5, seed: int = 0, items: int = 400) -> Matrix:
    """Return the noise in the messages of two clients; the first changed the even items, the second item 1."""
    before = np.random.default_rng(9).standard_normal((items, 8)).astype(np.float32)
    trained = np.stack([before, before])
    trained[0, ::2, 3] += 1
    trained[1, 1] += 1
    return noisy_messages(trained, before, sigma, generators(2, seed), everywhere) - trained


def test_items_that_did_not_change_get_no_noise() -> None:
    noise = messages(everywhere=False)
    assert np.flatnonzero(noise[0].any(axis=1)).tolist() == list(range(0, 400, 2))
    assert np.flatnonzero(noise[1].any(axis=1)).tolist() == [1]
    assert noise[0, ::2].all(), "every component of an item that changed is noised"


def test_a_site_may_have_noise_on_all_items() -> None:
    assert messages(everywhere=True).all()


@pytest.mark.parametrize("everywhere", [False, True])
def test_noise_is_normal_of_the_asked_deviation(everywhere: bool) -> None:
    """N(0, .5^2) a component. False-alarm rate 1e-6 for each case."""
    noise = messages(everywhere, items=4000)
    noised = noise[noise != 0]
    assert len(noised) >= 16_000
    assert stats.kstest(noised, stats.norm(scale=0.5).cdf).pvalue > FALSE_ALARM


def test_clients_draw_noise_of_their_own() -> None:
    first, second = messages(everywhere=True)
    assert (first != second).all()


def test_messages_leave_what_was_trained_alone() -> None:
    trained = ITEMS[None].copy()
    noisy_messages(trained, ITEMS + 1, 1.0, generators(1), everywhere=True)
    np.testing.assert_array_equal(trained[0], ITEMS)


# --- clients without a local model yet

# Liked items have the vector (1, 0), others (-1, 0): who knows the first four knows the fifth.
FIVE = np.array([[1, 0], [-1, 0], [1, 0], [-1, 0], [1, 0]], np.float32)


def newcomers(items: Any, *asked: Rows, loss: str = "log") -> tuple[list[float], list[float]]:
    """Return loss and metric of clients that have no local model yet."""
    array = np.asarray(items, np.float32)
    model = models.load(f"factors-{len(array)}x{array.shape[1]}", loss)
    measured, metrics = score_newcomers(model, array, cohort_of(*asked))
    return measured.tolist(), metrics.tolist()


@losses
def test_a_newcomer_is_told_what_it_likes_by_what_it_liked(loss: str) -> None:
    labels = [1, -1, 1, -1, 1]
    assert newcomers(FIVE, (list(range(5)), labels), loss=loss)[1] == [1]
    assert newcomers(FIVE, (list(range(5)), [*labels[:4], -1]), loss=loss)[1] == [0]


def test_a_newcomer_is_scored_on_what_it_has_not_seen() -> None:
    """Whatever the fifth label is, the score z of its item is the same: log(1 + e^-z) or log(1 + e^z)."""
    losses_ = [newcomers(FIVE, (list(range(5)), [1, -1, 1, -1, label]))[0][0] for label in (1, -1)]
    z = losses_[1] - losses_[0]
    assert z > 1
    assert losses_ == pytest.approx([np.log1p(np.exp(-z)), np.log1p(np.exp(z))])


def test_a_newcomer_of_few_rows_is_scored_on_its_last() -> None:
    assert newcomers(FIVE, ([0, 1, 2], [1, -1, 1]))[1] == [1]
    # Of a single row nothing is left to learn from: u = 0, and every score is 0.
    assert newcomers(FIVE, ([0], [1])) == ([pytest.approx(np.log(2))], [0])


@given(clients())
def test_newcomers_are_scored_as_if_alone(asked: list[Rows]) -> None:
    together = newcomers(ITEMS[:12], *asked)
    alone = [newcomers(ITEMS[:12], rows) for rows in asked]
    assert together[0] == pytest.approx([own[0][0] for own in alone], rel=1e-6)
    assert together[1] == [own[1][0] for own in alone]


# --- what a node keeps


def test_a_local_model_begins_as_a_draw_of_unit_norm_on_average() -> None:
    """N(0, I/k): k |u|^2 ~ chi^2(k). False-alarm rate 1e-6."""
    models_ = LocalModels(RecordDict(), 8, seed=3).read(range(4000))
    assert stats.kstest(8 * (models_**2).sum(axis=1), stats.chi2(8).cdf).pvalue > FALSE_ALARM


def test_a_seed_gives_a_client_the_same_beginning_wherever_it_is_asked() -> None:
    first, again = (LocalModels(RecordDict(), 4, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first.read([5, 2]), again.read([2, 7, 5])[[2, 0]])
    assert (first.read([5]) != LocalModels(RecordDict(), 4, seed=4).read([5])).all()


def test_without_a_seed_nobody_can_tell_the_beginning() -> None:
    first, again = (LocalModels(RecordDict(), 4, seed=None).read([5]) for _ in range(2))
    assert (first != again).all()


def test_what_is_kept_is_found_again_in_the_state() -> None:
    state = RecordDict()
    LocalModels(state, 2, seed=3).write([4, 9], np.array([[1, 2], [3, 4]], np.float32))
    later = LocalModels(state, 2, seed=3)
    assert later.read([9, 4]).tolist() == [[3, 4], [1, 2]]
    later.write([4], np.array([[5, 6]], np.float32))
    assert LocalModels(state, 2, seed=None).read([4, 9]).tolist() == [[5, 6], [3, 4]]


# --- a node


@pytest.fixture
def factors_config(run_config: Config) -> Config:
    """The run config of the recommender on the preferences that come with the app."""
    return run_config | {"strategy": "recommender", "federation": "preferences", "hypotheses": 1}


def ask(grid: InProcessGrid, kind: str, content: RecordDict, node: int = 0) -> Message:
    """Return the reply of a grid's node to a message."""
    ids = list(grid.get_node_ids())
    (reply,) = grid.send_and_receive([Message(content, ids[node], kind, group_id="1")])
    return reply


def train_message(*asked: int, items: Matrix = ITEMS, **changes: Any) -> RecordDict:
    """Ask clients, counted in their node, for one step of a minibatch of ten without noise, unless changed."""
    asks: Config = {"round": 1, "local_epochs": 0, "local_steps": 1, "step_size": 0.1, "batch_size": 10}
    demand = Demand(clients=asked, **(asks | {"noise_multiplier": 0.0} | changes))
    return train_request(to_array_record({"items": items[None]}), demand)


def released(reply: Message) -> Matrix:
    """Return what clients released, (clients, items, factors)."""
    assert not reply.has_error(), reply
    return from_array_record(reply.content.array_records[ARRAYS])["items"]


def told(reply: Message) -> Matrix:
    """Return the local models that clients told."""
    assert not reply.has_error(), reply
    return from_array_record(reply.content.array_records[ARRAYS])[LOCAL]


def test_a_node_trains_items_and_local_models_on_its_clients_rows(factors_config: Config) -> None:
    """One pass over all rows at once, in which no draw but that of the beginning has a part."""
    grid = InProcessGrid(app, factors_config)
    before = told(ask(grid, "query.local", local_request([3, 17])))
    moved = released(ask(grid, "train", train_message(3, 17, batch_size=0)))
    after = told(ask(grid, "query.local", local_request([3, 17])))
    for position, client in enumerate((3, 17)):
        x, y = PREFERENCES.client(client)
        rows = (x[:, 0].astype(int).tolist(), y.tolist())
        v, u = client_update(ITEMS, before[position], rows, steps(1, 0, 0.1), "log", np.random.default_rng())
        np.testing.assert_allclose(moved[position], v, **CLOSE)
        np.testing.assert_allclose(after[position], u, **CLOSE)


def test_local_models_survive_the_rounds(factors_config: Config) -> None:
    grid = InProcessGrid(app, factors_config)
    trail = [told(ask(grid, "query.local", local_request([3])))]
    for number in (1, 2):
        ask(grid, "train", train_message(3, round=number))
        trail.append(told(ask(grid, "query.local", local_request([3]))))
    assert (trail[0] != trail[1]).all()
    assert (trail[1] != trail[2]).all()
    ask(grid, "train", train_message(4, round=3))
    np.testing.assert_array_equal(told(ask(grid, "query.local", local_request([3]))), trail[2])


def test_what_a_client_answers_does_not_depend_on_the_number_of_nodes(factors_config: Config) -> None:
    found: list[list[Matrix]] = []
    for nodes in (1, 2, 7):
        grid = InProcessGrid(app, factors_config, nodes)
        mine: list[Matrix] = []
        for client in (3, 17, 20):
            content = train_message(client // nodes, message_noise=0.1, noise_multiplier=2.0)
            mine.append(released(ask(grid, "train", content, client % nodes)))
            mine.append(told(ask(grid, "query.local", local_request([client // nodes]), client % nodes)))
        found.append(mine)
    for others in found[1:]:
        for ours, theirs in zip(others, found[0], strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("noise", [{}, {"noise_multiplier": 3.0}, {"message_noise": 0.1}], ids=str)
def test_no_reply_holds_a_local_model(factors_config: Config, noise: Config) -> None:
    """Not one number of it, in either precision, before training or after."""
    grid = InProcessGrid(app, factors_config)
    clients_ = list(range(20))
    secrets = [told(ask(grid, "query.local", local_request(clients_)))]
    replies = [ask(grid, "train", train_message(*clients_, **noise))]
    secrets.append(told(ask(grid, "query.local", local_request(clients_))))
    replies.append(ask(grid, "evaluate", evaluate_request(to_array_record({"items": ITEMS[None]}), 1, [60, 61])))
    numbers = np.concatenate(secrets).ravel()
    for reply in replies:
        assert not reply.has_error()
        wire = message_to_proto(reply).SerializeToString()
        for number in numbers:
            assert number.tobytes() not in wire
            assert np.float64(number).tobytes() not in wire


def test_the_search_above_finds_a_local_model_where_there_is_one(factors_config: Config) -> None:
    reply = ask(InProcessGrid(app, factors_config), "query.local", local_request([3]))
    wire = message_to_proto(reply).SerializeToString()
    assert all(number.tobytes() in wire for number in told(reply).ravel())


def test_a_server_cannot_destroy_a_local_model(factors_config: Config) -> None:
    grid = InProcessGrid(app, factors_config)
    before = told(ask(grid, "query.local", local_request([3])))
    with np.errstate(over="ignore", invalid="ignore"):
        items = released(ask(grid, "train", train_message(3, items=np.full_like(ITEMS, 3e38), step_size=1e30)))
    assert np.isfinite(items).all()
    np.testing.assert_array_equal(told(ask(grid, "query.local", local_request([3]))), before)


def test_a_site_with_balanced_minibatches_gives_the_zeroing_attack_a_sum_of_nothing(factors_config: Config) -> None:
    sums = []
    for policy in ({}, {"balanced-batches": True}):
        node = {"partition-id": 0, "num-partitions": 1} | policy
        grid = InProcessGrid(app, factors_config, node_configs=[node])
        update = released(ask(grid, "train", train_message(3, items=np.zeros_like(ITEMS))))
        sums.append(np.abs(update.sum(axis=1)).max())
    assert sums[0] > 0.1
    assert sums[1] < 1e-6


def test_a_site_may_have_message_noise_on_items_that_its_clients_have_not_labelled(factors_config: Config) -> None:
    changed = []
    for policy in ({}, {"noise-all-items": True}):
        node = {"partition-id": 0, "num-partitions": 1} | policy
        grid = InProcessGrid(app, factors_config, node_configs=[node])
        items = released(ask(grid, "train", train_message(3, message_noise=0.1)))
        changed.append(int((items[0] != ITEMS).any(axis=1).sum()))
    assert changed == [10, 100]


def test_a_model_without_a_local_part_has_no_noisy_messages(
    run_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a server would count on noise that is not there."""
    theta = to_array_record({"weight": np.zeros((1, 1, 2), np.float32)})
    reply = ask(
        InProcessGrid(app, run_config), "train", train_request(theta, Demand(1, (0,), 1, 0.1, 10, 0.0, message_noise=1))
    )
    assert reply.error.reason == "refused"
    assert "noisy messages of model 'linear', which has no local part" in caplog.text


def test_a_model_with_a_local_part_comes_as_one_hypothesis(
    factors_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    content = train_message(3)
    content["hypotheses"] = to_array_record({"items": np.stack([ITEMS, ITEMS])})
    assert ask(InProcessGrid(app, factors_config), "train", content).error.reason == "refused"
    assert "a model with a local part comes as one hypothesis" in caplog.text


def test_newcomers_report_how_well_the_items_suit_them(factors_config: Config) -> None:
    grid = InProcessGrid(app, factors_config)
    reply = ask(grid, "evaluate", evaluate_request(to_array_record({"items": ITEMS[None]}), 1, [60, 66]))
    scores: Any = reply.content.metric_records["scores"]
    model = models.load("factors-100x8")
    cohort = Cohort.gather(PREFERENCES, [60, 66], torch.device("cpu"))
    expected = score_newcomers(model, ITEMS, cohort)
    assert scores["loss"] == pytest.approx(expected[0].tolist())
    assert scores["metric"] == pytest.approx(expected[1].tolist())


# --- who tells local models


def own_data(path: Path) -> Path:
    """Write the preferences of two clients for three items."""
    manifest = Manifest("own", 2, {"train": 2, "validation": 0}, model="factors-3x2")
    features, labels = np.array([[0], [2], [1]]), np.array([1, -1, -1], np.int8)
    write_federation(path, manifest, features, labels, offsets_of([2, 1]))
    return path


@pytest.mark.parametrize(
    "policy", [{"partition-id": 0, "num-partitions": 1, "allow-unsanitised": False}, {"data-path": ""}], ids=str
)
def test_a_site_that_must_not_or_will_not_tells_no_local_model(
    policy: Config, factors_config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if "data-path" in policy:
        policy = {"data-path": str(own_data(tmp_path / "own"))}
    grid = InProcessGrid(app, factors_config | {"model": ""}, node_configs=[policy])
    reply = ask(grid, "query.local", local_request([0]))
    assert reply.error.reason == "refused"
    assert not reply.has_content()
    assert "this site tells none" in caplog.text


def test_local_models_are_told_of_training_clients_alone(
    factors_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    assert ask(InProcessGrid(app, factors_config), "query.local", local_request([60])).error.reason == "refused"
    assert "clients [60] are no training clients of this node" in caplog.text
