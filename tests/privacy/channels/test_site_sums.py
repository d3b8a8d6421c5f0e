"""A site's release: sums over clients that trust it, with noise once for a change of any one client's whole data.

The statistical tests have fixed seeds; each says its false-alarm rate, had the seed been drawn at random.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.cli.commands.test_requests import Site
from tests.helpers.errors import raises
from tests.helpers.ledgers import ledger_of, proven
from tests.helpers.messages import (
    SIMULATED,
    Compute,
    arrived,
    asked,
    of_node,
    records,
    refused,
    releases,
    stacked,
    task_of,
    through_gate,
    wire,
)
from tests.helpers.noise import violations
from tests.helpers.sites import own, simulated
from umbel.privacy.accounting.guarantee import gap, pure_cost, site_release, within_budget
from umbel.privacy.channels import Place
from umbel.privacy.channels.site import SiteSanitiser, sums_in
from umbel.privacy.mechanisms import Laplace
from umbel.privacy.mechanisms.base import Mechanism
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.privacy.mechanisms.randomness import noise_sources
from umbel.privacy.site.charges import Charge
from umbel.privacy.site.journal import Journal
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.errors import ProtocolError, Refused
from umbel.protocol.home import umbel_home
from umbel.protocol.release import Clipping, Kind, Release
from umbel.protocol.tasks import TrainingSpec

SECRET = "diagnosis-of-patient-17"
# The smallest k and n at which choices and updates count, to check by hand.
ONE = {"weight": (1,)}
BOTH = np.array([[0.0], [100.0]])
BY_SITE: dict[str, Any] = {"release_by": "site", "clipping": "public", "clip_norm": 1.0, "noise_multiplier": 2.0}
TRUSTED: dict[str, Any] = {"data-path": f"/data/{SECRET}", "release": "site", "mechanisms": "laplace gaussian"}


def layout(n: int) -> dict[str, tuple[int, ...]]:
    return {"weight": (n,)}


def request(hypotheses: Any, clients: int, **changes: Any) -> RecordDict:
    """The content of a round's message that asks a site for the sums of its first clients."""
    matrix = np.asarray(hypotheses, np.float64)
    task = task_of(tuple(range(clients)), **BY_SITE | changes)
    return asked(stacked(matrix, layout(matrix.shape[1])), task)


def hands_over(hypotheses: Any, updates: Any, chosen: Any) -> Compute:
    """Clients that move what they chose by their update."""
    start, moves = np.asarray(hypotheses, np.float64), np.asarray(updates, np.float64)

    def compute(task: TrainingSpec, assigned: NDArray[np.int64]) -> Any:
        there = len(task.clients)
        trained = (start[np.asarray(chosen)] + moves)[:there]
        return [np.asarray(chosen)[:there], *stacked(trained, layout(start.shape[1])).values()]

    return compute


STAY = hands_over(BOTH, np.zeros((12, 1)), [0] * 12)
"""Twelve clients that stay with the first of both."""


@dataclass(frozen=True)
class Left:
    """What left a site that was not refused."""

    sums: NDArray[np.float64]
    counts: NDArray[np.float64]
    part: list[bool]


def what_left(reply: Message, clients: int, k: int, n: int) -> Left:
    """Check that a reply holds sums, counts and flags alone, and return them."""
    assert SECRET.encode() not in wire(reply)
    came = arrived(reply)
    assert not came.has_error()
    assert set(came.content) == {"arrays", "released"}
    record = came.content.metric_records["released"]
    assert set(record) == {"clients", "counts"}
    arrays = releases(came)
    assert list(arrays) == ["weight"]
    assert (arrays["weight"].dtype, arrays["weight"].shape) == (np.dtype(np.float32), (k, n))
    assert np.isfinite(arrays["weight"]).all()
    _, counts, part = sums_in(came.content, clients)
    return Left(flatten(arrays), counts, part.tolist())


def accounts(context: Context, clients: int) -> list[Any]:
    """Return the account of each client, at the site or in the simulated node's memory."""
    return [dict(ledger_of(context).account(client)) for client in range(clients)]


def new_ledger() -> Journal:
    """Return the site's ledger, which a site with a budget does not make by itself."""
    umbel_home().mkdir(parents=True, exist_ok=True)
    return Journal.create(umbel_home() / "ledger.jsonl")


def sanitiser(k: int, n: int, mechanism: str = "laplace", **changes: Any) -> SiteSanitiser:
    """What a simulated site makes of a task, with hypotheses that are all 0."""
    task = task_of((0,), **BY_SITE | {"mechanism": mechanism, "choice_epsilon": 0.5} | changes)
    return SiteSanitiser.of(Place(simulated()), stacked(np.zeros((k, n)), layout(n)), task)


# --- what a change of one client's whole data moves


Worlds = list[tuple[Arrays, NDArray[np.int64]]]
"""What the clients of a site trained and chose, and another such world in which one of them has other data."""


@st.composite
def changes_of_a_client(draw: st.DrawFn) -> tuple[int, int, dict[str, float], Worlds]:
    """Draw k, n, what a task says of radius and noise, and two worlds."""
    k, n, m = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    radius = draw(st.sampled_from([1e-3, 1.0, 50.0]))
    updates = rng.standard_normal((m, n)) * radius * 10.0 ** rng.uniform(-3, 3, (m, 1))
    chosen = rng.integers(k, size=m)
    other, otherwise = updates.copy(), chosen.copy()
    who = draw(st.integers(0, m - 1))
    # Any data at all: the same direction and the opposite one, nothing, and what blew up.
    other[who] = draw(
        st.sampled_from(
            [-1e6 * updates[who], updates[who], rng.standard_normal(n) * radius, np.zeros(n), np.full(n, np.nan)]
        )
    )
    otherwise[who] = draw(st.integers(0, k - 1))
    worlds = [(stacked(one, layout(n)), choice) for one, choice in ((updates, chosen), (other, otherwise))]
    noise = {"choice_epsilon": draw(st.floats(0.01, 5.0)), "noise_multiplier": draw(st.floats(0.1, 20.0))}
    return k, n, {"clip_norm": radius} | noise, worlds


def moved(made: SiteSanitiser, worlds: Worlds) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return by how many of their radii a change moves the sums, each (k,), and the counts."""
    (sums, counts), (others, other_counts) = (made.summed(*world) for world in worlds)
    by = np.linalg.norm(sums - others, axis=1) / made.radius
    return by, np.abs(counts - other_counts) / (made.count_radius or math.inf)


@given(changes_of_a_client())
def test_no_change_of_a_client_costs_more_than_is_claimed(change: tuple[int, int, dict[str, float], Worlds]) -> None:
    """Under Laplace noise each part costs its dimension over nu times the distance by which it moves.

    Gaussian noise has one deviation, in radii, so that all distances are legs of one, which is 2 at most.
    """
    k, n, task, worlds = change
    made = sanitiser(k, n, "laplace", **task)
    sums, counts = moved(made, worlds)
    cost = (n * sums.sum() + counts.sum()) / task["noise_multiplier"]
    assert cost <= float(pure_cost(made.release)) * (1 + 1e-6)
    sums, counts = moved(sanitiser(k, n, "gaussian", **task), worlds)
    assert math.hypot(*sums, *counts) <= 2 * (1 + 1e-6)


@pytest.mark.parametrize("moves", [False, True], ids=["turns round", "chooses otherwise"])
def test_the_claims_are_no_larger_than_they_must_be(moves: bool) -> None:
    """n = 3, nu = 6 and choice-epsilon 1/2: 2 n / nu = 1, and 1/2 on top where the client moves to another."""
    there = stacked(np.array([[9.0, 0, 0], [0.1, 0, 0]]), layout(3)), np.array([0, 0])
    turned = stacked(np.array([[-9.0, 0, 0], [0.1, 0, 0]]), layout(3)), np.array([int(moves), 0])
    made = sanitiser(2, 3, noise_multiplier=6.0)
    sums, counts = moved(made, [there, turned])
    assert (3 * sums.sum() + counts.sum()) / 6.0 == pytest.approx(1.5 if moves else 1.0)
    assert pure_cost(made.release) == Fraction(3, 2)
    sums, counts = moved(sanitiser(2, 3, "gaussian", noise_multiplier=6.0), [there, turned])
    assert math.hypot(*sums, *counts) == pytest.approx(2.0)


def test_the_radius_of_a_site_is_its_floor_at_least() -> None:
    task = task_of((0,), **BY_SITE | {"clip_norm": 0.1})
    place = Place(own(release="site", clipping="public floor=0.5"))
    made = SiteSanitiser.of(place, stacked(np.zeros((1, 3)), layout(3)), task)
    assert (made.radius, made.release.radius) == (0.5, 0.5)


def test_of_one_hypothesis_the_count_is_public_and_costs_nothing() -> None:
    made = sanitiser(1, 3, noise_multiplier=6.0)
    assert (made.count_radius, made.release.choice_epsilon) == (0.0, 0.0)
    assert pure_cost(made.release) == 1


# --- what is claimed of it


def release(k: int, mechanism: str = "laplace", choice_epsilon: float = 0.5, nu: float = 6.0) -> Release:
    return Release(Kind.SITE, 3, nu, Clipping.PUBLIC, mechanism=mechanism, hypotheses=k, choice_epsilon=choice_epsilon)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_gaussian_release_covers_the_choice_at_no_price(k: int) -> None:
    one = release(k, "gaussian", 0.0, nu=4.0)
    assert one.formal
    assert gap(one) == ""
    found = proven({one: 3}, 1e-5)
    assert found.pure == math.inf
    loss = GaussianLoss(2 / 4 * math.sqrt(3))
    assert loss.delta(np.array([found.epsilon]))[0] == pytest.approx(1e-5, rel=1e-3)
    # Whatever the site accepts of choices, they play no part.
    assert within_budget({one: 3}, Fraction(found.epsilon), 1e-5, 4.0, math.inf)
    assert not within_budget({one: 3}, Fraction(found.epsilon * (1 - 1e-6)), 1e-5, 4.0, math.inf)


def test_server_and_site_have_one_word_for_it() -> None:
    for mechanism, choice in (("laplace", 0.5), ("gaussian", 0.0)):
        made = sanitiser(2, 3, mechanism, noise_multiplier=6.0).release
        assert replace(made, radius=None) == release(2, mechanism, choice)
        train = replace(release(2, mechanism), kind=Kind.TRAIN)
        assert site_release(train) == replace(made, radius=None)
    bare = replace(release(2), kind=Kind.TRAIN, noise_multiplier=0.0)
    assert site_release(bare).kind is Kind.SITE


# --- through the gate, without noise to check by hand


def test_updates_are_clipped_added_up_by_hypothesis_and_counted() -> None:
    updates = [[0.5], [30.0], [-0.25], [np.nan], [0.5]]
    reply = through_gate(
        request(BOTH, 5, noise_multiplier=0.0), of_node(SIMULATED), hands_over(BOTH, updates, [0, 0, 1, 0, 1])
    )
    left = what_left(reply, 5, 2, 1)
    # One update is clipped to 1, and training that blew up is an update of 0.
    assert left.sums.tolist() == [[1.5], [0.25]]
    assert left.counts.tolist() == [3.0, 2.0]
    assert left.part == [True] * 5


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_sums_and_counts_are_on_a_grid_that_everybody_knows(mechanism: str) -> None:
    """Sums of 3 clients within 1: the noise has a deviation of 2 or more, so the step is at most 1/8."""
    content = request(BOTH, 3, mechanism=mechanism, choice_epsilon=1.0)
    reply = through_gate(content, of_node(SIMULATED), hands_over(BOTH, [[1 / 3], [1 / 7], [0.1]], [0, 0, 1]))
    left = what_left(reply, 3, 2, 1)
    made = sanitiser(2, 1, mechanism, choice_epsilon=1.0)
    for values, deviation in (
        (left.sums, made.mechanism.deviation(1)),  # type: ignore[union-attr]
        (left.counts, made.mechanism.deviation(1) * made.count_radius),  # type: ignore[union-attr]
    ):
        step = 2.0 ** math.floor(math.log2(deviation / 16))
        assert (values % step == 0).all()
        assert (values % (step * 64) != 0).any(), "and none that is coarser by far"


@pytest.mark.parametrize("node_config", [SIMULATED, TRUSTED], ids=["simulated", "own data"])
@pytest.mark.parametrize("k", [1, 2])
def test_what_leaves_is_the_same_whatever_goes_wrong_with_a_clients_data(node_config: dict[str, Any], k: int) -> None:
    hypotheses = BOTH[:k]
    for update in (0.5, 1e30, math.nan, math.inf):
        updates = [[0.1]] * 11 + [[update]]
        content = request(hypotheses, 12, choice_epsilon=1.0)
        reply = through_gate(content, of_node(node_config), hands_over(hypotheses, updates, [0] * 12))
        left = what_left(reply, 12, k, 1)
        assert left.part == [True] * 12
        assert np.abs(left.sums).max() < 100


# --- where the noise comes from


def test_a_task_that_is_replayed_gets_other_noise_and_is_paid_for_again() -> None:
    """Noise lies on a grid of an eighth and more, so that one value is the same again in a few of 100 runs.

    That 60 of 64 are the same has a false-alarm rate below 1e-80.
    """
    n = 64
    context, content = of_node(TRUSTED), request(np.repeat(BOTH, n, axis=1), 12, choice_epsilon=1.0)
    compute = hands_over(np.repeat(BOTH, n, axis=1), np.zeros((12, n)), [0] * 12)
    first, second = (what_left(through_gate(content, context, compute), 12, 2, n) for _ in range(2))
    assert ((first.sums == second.sums).mean(axis=1) < 60 / 64).all()
    assert [list(account.values()) for account in accounts(context, 12)] == [[2]] * 12


def test_in_simulation_a_site_has_the_same_noise_again_and_another_site_other_noise() -> None:
    content = request(BOTH, 3, choice_epsilon=1.0)
    compute = hands_over(BOTH, np.zeros((3, 1)), [0] * 3)
    nodes = [{"partition-id": i, "num-partitions": 2} for i in (0, 0, 1)]
    once, again, other = (records(through_gate(content, of_node(dict(node)), compute)) for node in nodes)
    assert once == again
    assert once["released"] != other["released"]


# --- the real gate's outputs, counted


def outputs(world: int, rounds: int, k: int) -> NDArray[np.float64]:
    """Return sums and counts of many rounds of a site of two clients, of which one has other data in world 1.

    What the gate does with trained models is `SiteSanitiser`; `test_the_gate_releases_what_is_counted_here` says so.
    """
    made = sanitiser(k, 1)
    trained = stacked(np.array([[-1.0 if world else 1.0], [0.3]]), ONE)
    chosen = np.array([world if k > 1 else 0, 0])
    rows = []
    for round in range(1, rounds + 1):
        sums, counts = made.sanitised(trained, chosen, noise_sources(world, round, [0], "site"))
        rows.append([*sums["weight"].ravel().tolist(), *(counts if k > 1 else [])])
    return np.array(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "rounds", "epsilon", "bins", "less", "fewer"), [(2, 12_000, 1.5, 7, 1.0, 3), (1, 7_000, 1.0, 100, 0.7, 10)]
)
def test_no_cell_of_the_outputs_is_more_likely_than_epsilon_allows(
    k: int, rounds: int, epsilon: float, bins: int, less: float, fewer: int
) -> None:
    """Of two sums and two counts 2,401 cells, where a client chooses otherwise; of one sum 100, where it turns round.

    False-alarm rates of .2 % and 6e-5 over all cells and both ways. With a claim of two thirds, cells stand out.
    """
    first, second = (outputs(world, rounds, k) for world in (0, 1))
    assert pure_cost(sanitiser(k, 1).release) == Fraction(epsilon)
    assert violations(first, second, epsilon, bins) == (0, bins ** (2 * k if k > 1 else 1))
    assert violations(first, second, less, fewer)[0] > 0


def test_the_gate_releases_what_is_counted_here() -> None:
    made = sanitiser(2, 1)
    trained, chosen = stacked(np.array([[1.0], [0.3]]), ONE), np.array([0, 0])
    for round in (1, 2, 3):
        sums, counts = made.sanitised(trained, chosen, noise_sources(3, round, [0], "site"))
        content = request(np.zeros((2, 1)), 2, round=round, choice_epsilon=0.5)
        reply = through_gate(content, of_node(SIMULATED), hands_over(np.zeros((2, 1)), [[1.0], [0.3]], [0, 0]))
        left = what_left(reply, 2, 2, 1)
        np.testing.assert_array_equal(left.counts, counts)
        np.testing.assert_allclose(left.sums, sums["weight"], atol=1 / 8)  # the grid of two clients, not of one


# --- what a site's people approve


def test_a_site_that_accepts_either_is_asked_for_its_sums_by_themselves(
    tmp_path: Path, run_config: dict[str, Any]
) -> None:
    said = {"clipping": "public norm=1 decay=1", "hypotheses": 2, "mechanism": "gaussian"}
    policy = {"release": "any", "min-clients": 2, "mechanisms": "gaussian"}
    site = Site(tmp_path, run_config | said, **policy)
    sums = {"clipping": "public", "clip_norm": 1.0, "mechanism": "gaussian", "release_by": "site"}
    site.query()
    site.run("approve", site.waiting[0])
    assert refused(site.train(**sums))
    assert "otherwise: release-by" in site.run("requests")
    site.run("approve", site.waiting[0])
    assert not refused(site.train(**sums))


# --- who pays


@pytest.mark.parametrize("able", [9, 10, 11])
def test_where_fewer_than_the_least_can_pay_nobody_does(able: int, node_log: io.StringIO) -> None:
    """12 clients of which some have spent a budget for one release already."""
    config = TRUSTED | {"budget": 2, "max-choice-epsilon": 1.0}
    context = of_node(config)
    ledger = new_ledger()
    spent = Charge("earlier", 1, release(2, nu=6.0))
    ledger.charge(spent, range(able, 12))
    content = request(BOTH, 12, choice_epsilon=0.5)
    reply = through_gate(content, context, STAY)
    paid = [sum(account.values()) for account in accounts(context, 12)]
    if able < 10:
        assert refused(reply)
        assert paid == [0] * able + [1] * (12 - able)
        assert "fewer than 10 asked clients are within budget for this round (min-clients); none is charged" in (
            node_log.getvalue()
        )
    else:
        left = what_left(reply, 12, 2, 1)
        assert left.part == [True] * able + [False] * (12 - able)
        assert paid == [1] * 12


# --- what a site refuses, and charges nobody for


class Silent(Laplace):
    """A mechanism of one's own that says nothing of counts."""

    name: ClassVar[str] = "silent"

    def count_radius(self, choice_epsilon: float) -> float:
        return Mechanism.count_radius(self, choice_epsilon)


SILENT = f"{__name__}:Silent"

# What a site's configuration changes, what a task changes, and the code of the refusal.
REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a site whose clients release by themselves": ({"release": "client"}, {}, "release"),
    "a site that says nothing": ({"release": None}, {}, "release"),
    "a site of sums alone": ({}, {"release_by": "client"}, "release"),
    "too few clients asked": ({"min-clients": 13}, {}, "min-clients"),
    "counts without a price": ({}, {"choice_epsilon": 0.0}, "open-choice"),
    "counts at too high a price": ({"max-choice-epsilon": 0.3}, {}, "choice"),
    "noise that a sum drowns": (
        {"min-noise-multiplier": 1e-9},
        {"noise_multiplier": 1e-7, "choice_epsilon": 0.1},
        "noise-out-of-range",
    ),
    "a budget that nothing counts": ({"budget": 9}, {"mechanism": "gaussian"}, "unbounded"),
    "noise that is none": ({}, {"choice_epsilon": 1e-300}, "noise-out-of-range"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_site_refuses_and_charges_nobody(what: str, node_log: io.StringIO) -> None:
    entries, changes, code = REFUSALS[what]
    config = {key: value for key, value in (TRUSTED | entries).items() if value is not None}
    new_ledger()
    context = of_node(config)
    content = request(BOTH, 12, **{"choice_epsilon": 0.5} | changes)
    reply = through_gate(content, context, STAY)
    assert refused(reply)
    assert f"[refused.{code}]" in node_log.getvalue()
    assert accounts(context, 12) == [{}] * 12


def test_a_gaussian_choice_needs_no_price_whatever_the_site_accepts_of_one() -> None:
    new_ledger()
    context = of_node(TRUSTED | {"max-choice-epsilon": 0.1, "budget": "20 delta=1e-5"})
    content = request(BOTH, 12, mechanism="gaussian", choice_epsilon=0.0)
    what_left(through_gate(content, context, STAY), 12, 2, 1)


def test_a_mechanism_of_ones_own_sums_one_hypothesis_and_must_say_how_it_hides_several() -> None:
    assert sanitiser(1, 3, SILENT).count_radius == 0
    with raises(Refused, "refused.open-choice", "'Silent'", "count_radius"):
        sanitiser(2, 3, SILENT)


@pytest.mark.parametrize(
    ("changes", "code", "part"),
    [
        ({"clipping": "update"}, "site-sums", "'update'"),
        ({"clipping": "update", "noise_per": "layer"}, "site-sums", '"public"'),
        ({"disclose_choice": True}, "site-sums", "disclose"),
        ({"release_by": "server"}, "wrong-value", "release-by"),
    ],
)
def test_a_task_that_no_site_can_answer_is_none(changes: dict[str, Any], code: str, part: str) -> None:
    with raises(ProtocolError, f"protocol.{code}", part):
        task_of((0, 1), **BY_SITE | changes)


# --- who chooses


@pytest.mark.parametrize(("explore", "clients", "expected"), [(0.0, 12, [12, 0, 0]), (0.5, 6000, [3000, 1500, 1500])])
def test_clients_choose_freely_since_the_counts_hide_it_or_a_share_of_them_is_told(
    explore: float, clients: int, expected: list[int]
) -> None:
    """Half of 6,000 clients draw one of two hypotheses; 5 standard errors each."""
    seen: list[Any] = []

    def compute(task: TrainingSpec, assigned: NDArray[np.int64]) -> Any:
        seen.append(assigned)
        chosen = np.maximum(assigned, 0)
        return [chosen, *stacked(BOTH[chosen], ONE).values()]

    content = request(BOTH, clients, choice_epsilon=1.0, explore=explore)
    assert not through_gate(content, of_node(SIMULATED), compute).has_error()
    [assigned] = seen
    assert np.bincount(assigned + 1, minlength=3) == pytest.approx(expected, abs=10 * explore * math.sqrt(1500))
