"""What a site adds to a secure sum: whole steps of its clients' clipped updates, charged before they leave."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from tests.helpers.errors import raises
from tests.helpers.ledgers import ledger_of, proven
from tests.helpers.messages import Behind, arrived, asked, of_node, refused, stacked, task_of, through_gate
from tests.helpers.sites import simulated
from umbel.privacy.channels import Flags, Place, flags_in
from umbel.privacy.channels.secure.channel import Part, Secure, SecureReports, SecureSanitiser
from umbel.privacy.channels.secure.party import Announcement, Party
from umbel.privacy.channels.secure.terms import LARGEST, Grid, Terms
from umbel.privacy.channels.secure.wire import RECORD, Introduction, Request, Stage, masked_in
from umbel.privacy.mechanisms.discrete_gaussian import ConcentratedLoss
from umbel.privacy.site.answer import place_of
from umbel.privacy.site.config import Site
from umbel.protocol.errors import Refused
from umbel.protocol.release import Clipping, Kind, Release
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

BOTH = np.array([[0.0], [100.0]])
TERMS = Terms("spring", length=4, bits=30, deviation=512.0)
TASK: dict[str, Any] = {
    "release_by": "secure", "clipping": "public", "clip_norm": 1.0, "noise_multiplier": 2.0,
    "mechanism": "discrete-gaussian",
}  # fmt: skip


NUMBERS = Part(np.zeros(0, np.int64))
NODES = 3


def sanitiser(hypotheses: Any = BOTH, terms: Terms = TERMS, **changes: Any) -> SecureSanitiser:
    matrix = np.asarray(hypotheses, np.float64)
    layout = {"weight": (matrix.shape[1],)}
    place, task = Place(simulated(clipping="any floor=0")), task_of((0,), **TASK | changes)
    return SecureSanitiser.of_terms(place, stacked(matrix, layout), task, terms, NUMBERS)


# --- the numbers


def test_the_sums_of_three_clients_by_hand() -> None:
    """A clip norm is 256 steps: updates of .5, -.251 and 9, the last clipped, and counts of one clip norm each."""
    trained = {"weight": np.array([[0.5], [-0.251], [109.0]], np.float32)}
    found = sanitiser().summed(trained, np.array([0, 0, 1]))
    assert sanitiser().grid == Grid(1 / 256, 256)
    assert found.tolist() == [128 - 64, 255, 512, 256]


def test_training_that_diverged_adds_nothing_but_its_count() -> None:
    trained = {"weight": np.array([[np.nan], [np.inf]], np.float32)}
    assert sanitiser().summed(trained, np.array([0, 1])).tolist() == [0, 0, 256, 256]


def of_three(deviation: float, moments: bool, **changes: Any) -> SecureSanitiser:
    """Return the sanitiser of two hypotheses of three parameters."""
    terms = replace(TERMS, deviation=deviation, length=20 if moments else 8)
    return sanitiser(np.zeros((2, 3)), terms, moments=moments, **changes)


WILD = st.sampled_from([0.0, 1.0, -1e-30, 0.1, 3e38, -3e38, np.nan, np.inf, 1e-45, 7.7])
UPDATES = arrays(np.float32, (2, 3), elements=st.one_of(st.floats(-1e6, 1e6, width=32), WILD), fill=st.nothing())
CHOSEN = st.lists(st.integers(0, 1), min_size=2, max_size=2)


@given(UPDATES, CHOSEN, st.floats(0.05, 200), st.floats(512, LARGEST), st.floats(1e-3, 1e3), st.booleans())
def test_two_data_sets_of_a_client_are_at_most_two_clip_norms_apart(
    updates: NDArray[np.float32],
    chosen: list[int],
    noise_multiplier: float,
    deviation: float,
    clip_norm: float,
    moments: bool,
) -> None:
    """As the account assumes: clients that diverge, are huge or nearly nothing, on grids that are no powers of two.

    Whether they choose the same hypothesis or not, counts and moments included; these need a finer grid.
    """
    noise_multiplier = min(noise_multiplier, 10.0) if moments else noise_multiplier
    one = of_three(deviation, moments, noise_multiplier=noise_multiplier, clip_norm=clip_norm)
    first, second = (one.summed({"weight": updates[i : i + 1]}, np.array(chosen[i : i + 1])) for i in range(2))
    assert np.linalg.norm((first - second).astype(float)) <= 2 * (deviation / noise_multiplier) * (1 + 1e-12)


@pytest.mark.parametrize("moments", [False, True])
def test_two_clip_norms_are_reached(moments: bool) -> None:
    """By opposite updates, and by updates of full length from two hypotheses; so no less noise would do."""
    one, update = of_three(8192.0, moments), np.array([[9.0, 0, 0]], np.float32)
    first, turned, moved = (
        one.summed({"weight": sign * update}, np.array([chosen])) for sign, chosen in ((1, 0), (-1, 0), (1, 1))
    )
    for other in (turned, moved):
        assert math.isclose(np.linalg.norm((first - other).astype(float)), 2 * 4096, rel_tol=5e-3)


def test_the_price_is_that_of_one_gaussian_two_clip_norms_away_or_a_diagonal_for_reports() -> None:
    """rho = (2 / nu)^2 / 2, for any k; and for three reports 3 (1 / nu)^2 / 2."""
    release = sanitiser(noise_multiplier=8.0, terms=replace(TERMS, deviation=4096.0)).release
    assert (release.kind, release.hypotheses, release.choice_epsilon) == (Kind.SECURE, 2, 0.0)
    one = Release(Kind.SECURE, 1, 8.0, Clipping.PUBLIC, mechanism="discrete-gaussian")
    assert proven({release: 1}) == proven({one: 1})
    for account, rho in (({release: 1}, (2 / 8.0) ** 2 / 2), ({of_reports().release: 3}, 3 * (1 / 4.0) ** 2 / 2)):
        delta = ConcentratedLoss(rho).delta(np.array([proven(account).epsilon]))[0]
        assert math.isclose(delta, 1e-5, rel_tol=1e-3)


@pytest.mark.parametrize(
    ("terms", "changes"),
    [({"deviation": 0.0}, {}), ({}, {"release_by": "site"}), ({}, {"noise_multiplier": 0.0}),
     ({}, {"mechanism": "laplace"}),
     ({"deviation": 256.0}, {"noise_multiplier": 300.0})],
)  # fmt: skip
def test_terms_that_do_not_fit_the_task_are_refused(terms: dict[str, Any], changes: dict[str, Any]) -> None:
    with raises(Refused, "refused.secure-terms"):
        sanitiser(terms=replace(TERMS, **terms), **changes)


# --- through the gate


def train(task: TrainingSpec, assigned: NDArray[np.int64]) -> Any:
    there = len(task.clients)
    return [np.zeros(there, np.int64), np.full((there, 1), 0.5, np.float32)]


def score(task: EvaluationSpec) -> Any:
    return [np.full((len(task.clients), 2), 0.5)]


CLIENTS = Behind(train, score)


def node(place: int = 0, **entries: Any) -> Context:
    return of_node({"partition-id": place, "num-partitions": NODES} | entries, seed=7)


def sent(content: RecordDict, context: Context, clients: Behind = CLIENTS) -> RecordDict:
    """Return what a site's reply holds, which is no refusal."""
    reply = arrived(through_gate(content, context, clients))
    assert not reply.has_error()
    return reply.content


def refused_for_nothing(content: RecordDict, context: Context | None = None) -> None:
    """Check that a message is refused, and that nobody is charged for it."""
    context = context or node()
    assert refused(through_gate(content, context, CLIENTS))
    assert not any(ledger_of(context).account(client) for client in range(6))


def answer(site: Site, seed: int | None, state: RecordDict, asked: Request) -> RecordDict:
    """Return a site's reply in a stage besides a round's message."""
    return Secure.answer(place_of(site, seed, state), RecordDict({RECORD: asked.to_record()}))


def shared_in(content: RecordDict, asked: int, reporting: int) -> tuple[Flags, Flags]:
    """Return a flag for each asked training client, and for each validation client."""
    return flags_in(content, asked), flags_in(content, reporting, "reported")


def announced(terms: Terms = TERMS) -> dict[str, Announcement]:
    found = {}
    for place in range(NODES):
        site = simulated(**{"partition-id": place, "num-partitions": NODES})
        one = Introduction.read(answer(site, 7, RecordDict(), Request(Stage.ANNOUNCE, terms)))
        found[one.name] = one.announcement
    return found


def request(
    round: int = 1,
    clients: int = 2,
    terms: Terms = TERMS,
    parties: dict[str, Announcement] | None = None,
    evaluation: EvaluationSpec | None = None,
    trains: bool = True,
) -> RecordDict:
    """Return a message that asks a site's first clients to train in a secure sum, and others to report in it."""
    task = task_of(tuple(range(clients)), round=round, **TASK) if trains else None
    content = asked(stacked(BOTH, {"weight": (1,)}), task, evaluation)
    content[RECORD] = Request(Stage.MASK, terms, round, parties or announced(terms)).to_record()
    return content


def accounts(context: Context, *clients: int) -> list[tuple[Kind, int]]:
    return [(release.kind, times) for own in clients for release, times in ledger_of(context).account(own).items()]


def test_masked_numbers_leave_once_their_clients_are_charged() -> None:
    context = node()
    content = sent(request(), context)
    assert {*content} == {"secure", "released"}
    assert shared_in(content, 2, 0)[0].all()
    assert {*masked_in(content).boxes} == {"node 1", "node 2"}
    [release] = ledger_of(context).account(0)
    assert (release.kind, release.noise_multiplier) == (Kind.SECURE, 2.0)
    assert accounts(context, 0) == [(Kind.SECURE, 1)]


def test_the_party_remembers_its_round_in_the_nodes_own_memory() -> None:
    """So the same round is masked once, also if the server changes hypotheses, and whoever restarts has another key."""
    context = node()
    assert [refused(through_gate(request(round), context, CLIENTS)) for round in (1, 1, 2)] == [False, True, False]
    assert accounts(context, 0) == [(Kind.SECURE, 2)]


def test_training_for_a_sum_is_asked_for_with_its_parties() -> None:
    for stage in (Stage.ANNOUNCE, Stage.AGREE, Stage.OPEN):
        content = request()
        content[RECORD] = Request(stage, TERMS, 1, announced()).to_record()
        refused_for_nothing(content)
    content[RECORD] = ConfigRecord({"stage": "mask"})
    refused_for_nothing(content)
    del content[RECORD]
    refused_for_nothing(content)
    others = {name: one for name, one in announced().items() if name != "node 2"}
    refused_for_nothing(request(parties=others))


def test_a_site_without_clients_in_a_round_adds_masks_alone() -> None:
    context = node(1)
    content = sent(request(trains=False), context)
    assert not any(flags.size for flags in shared_in(content, 0, 0))
    assert masked_in(content).numbers
    assert not accounts(context, *range(9))


# --- reports

WITH_REPORTS = replace(TERMS, length=6)
REPORTING = EvaluationSpec(1, (0, 1), report_noise_multiplier=4.0)


def of_reports(terms: Terms = WITH_REPORTS, entries: dict[str, Any] | None = None, **changes: Any) -> SecureReports:
    return SecureReports.of_terms(Place(simulated(**entries or {})), replace(REPORTING, **changes), terms, NUMBERS)


def test_the_sums_of_three_reports_by_hand() -> None:
    """A diagonal is 512 / 4 = 128 steps, so the bound is 90.5, of which 90 count.

    Half a bound is 45 steps. What is above the bound, infinite or no number counts as the bound, and below 0 as 0.
    """
    scores = np.array([[0.5, 7.0, np.nan], [0.5, -1.0, np.inf]])
    assert of_reports().summed(scores).tolist() == [45 + 90 + 90, 45 + 0 + 90]
    assert of_reports(report_bound=3.0).summed(3 * scores).tolist() == [45 + 90 + 90, 45 + 0 + 90]


@given(arrays(np.float64, (2, 2), elements=st.floats(allow_nan=True)), st.floats(0.01, 100), st.floats(0.5, 20))
def test_two_reports_of_a_client_are_at_most_a_diagonal_apart(
    scores: NDArray[np.float64], bound: float, noise_multiplier: float
) -> None:
    """That is the noise's deviation over nu: the distance that the account assumes."""
    sums = of_reports(report_bound=bound, report_noise_multiplier=noise_multiplier)
    one, other = (sums.summed(scores[:, i : i + 1]) for i in range(2))
    assert np.linalg.norm(one - other) <= WITH_REPORTS.deviation / noise_multiplier * (1 + 1e-12)


@pytest.mark.parametrize(
    ("deviation", "entries", "noise_multiplier", "code"),
    [
        (0.0, {}, 4.0, "secure-terms"),
        (512.0, {"role": "train", "reports": "noise=5.0"}, 4.0, "noise"),
        (256.0, {}, 300.0, "secure-terms"),
    ],
)
def test_reports_with_less_noise_than_a_site_accepts_are_refused(
    deviation: float, entries: dict[str, Any], noise_multiplier: float, code: str
) -> None:
    with raises(Refused, f"refused.{code}"):
        of_reports(replace(WITH_REPORTS, deviation=deviation), entries, report_noise_multiplier=noise_multiplier)


def reporting(evaluation: EvaluationSpec = REPORTING, round: int = 1, trains: bool = True) -> RecordDict:
    """Return a message that asks clients to train, and others to report, in one sum."""
    return request(round, terms=WITH_REPORTS, evaluation=evaluation, trains=trains)


def fails(*_: Any) -> Any:
    raise RuntimeError("boom")


def test_updates_and_reports_leave_in_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients 0 and 1 train and report, which is 45 steps for each number; each is charged for both."""
    seen: list[Any] = []
    mask = Party.mask
    monkeypatch.setattr(Party, "mask", lambda *args: seen.append(args[3].tolist()) or mask(*args))
    context = node()
    content = sent(reporting(), context)
    assert {*content} == {"secure", "released"}
    assert [flags.tolist() for flags in shared_in(content, 2, 2)] == [[True, True], [True, True]]
    assert seen == [[256, 0, 512, 0, 90, 90]]
    assert accounts(context, 0, 3) == 2 * [(Kind.SECURE, 1), (Kind.REPORT, 1)]


def test_reports_alone_are_a_sum_as_well() -> None:
    context = node()
    assert [len(flags) for flags in shared_in(sent(reporting(trains=False), context), 0, 2)] == [0, 2]
    assert accounts(context, 0) == [(Kind.REPORT, 1)]


@pytest.mark.parametrize("part", ["training", "evaluation"])
def test_a_part_that_fails_does_not_keep_the_other_from_the_sum(part: str) -> None:
    content = sent(reporting(), node(), Behind(fails, score) if part == "training" else Behind(train, fails))
    there = [len(content["released"][name]) for name in ("clients", "reported")]
    assert there == ([0, 2] if part == "training" else [2, 0])
    assert {*content} == {"secure", "released"}


def test_nothing_leaves_where_both_parts_fail() -> None:
    context = node()
    assert refused(through_gate(reporting(), context, Behind(fails, fails)))
    assert "umbel.secure" not in context.state


@pytest.mark.parametrize("changes", [{"round": 2}, {"report_noise_multiplier": 0.0}], ids=["another round", "no noise"])
def test_reports_that_a_sum_would_not_hide_stay_at_the_site(changes: dict[str, Any]) -> None:
    """Where no noise is asked for, they are no part of the sum, and leave as the site's policy says."""
    content = sent(reporting(replace(REPORTING, **changes)), node())
    assert shared_in(content, 2, 0)[0].all()
    assert ("scores" in content) is ("round" not in changes)


def test_reports_for_a_sum_without_room_for_them_or_without_one_never_leave() -> None:
    refused_for_nothing(request(evaluation=REPORTING))
    content = reporting(trains=False)
    del content[RECORD]
    refused_for_nothing(content)


def test_training_clients_report_only_where_the_site_lets_them() -> None:
    for entries, reported in (({}, 0), ({"reports": "noise=2.0"}, 2)):
        content = sent(reporting(), node(role="train", **entries))
        assert len(content["released"]["reported"]) == reported


def test_a_client_over_budget_reports_no_more() -> None:
    """Three reports cost more than a budget of 1.5 at delta 1e-5, and two do not."""
    context = node(budget="1.5 delta=1e-5")
    contents = [reporting(replace(REPORTING, round=round), round, trains=False) for round in (1, 2, 3)]
    flags = [shared_in(sent(content, context), 0, 2)[1].tolist() for content in contents]
    assert flags == [[True, True], [True, True], [False, False]]
    assert accounts(context, 0, 3) == 2 * [(Kind.REPORT, 2)]
