"""What a server cannot bring about at a site that takes part in secure sums: each test is an attack."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.helpers.errors import raises
from tests.helpers.keys import pair
from tests.helpers.ledgers import ledger_of
from tests.helpers.messages import refused, through_gate
from tests.helpers.sites import own, simulated
from tests.privacy.channels.secure.test_channel import (
    CLIENTS,
    TASK,
    TERMS,
    announced,
    answer,
    node,
    refused_for_nothing,
    request,
    sanitiser,
    sent,
    shared_in,
)
from umbel.privacy.channels.secure.channel import SecureSanitiser, party_of, remember
from umbel.privacy.channels.secure.party import Announcement, key_text
from umbel.privacy.channels.secure.terms import LARGEST, Terms
from umbel.privacy.channels.secure.wire import RECORD, Introduction, Request, Stage, masked_in
from umbel.privacy.site.answer import place_of
from umbel.privacy.site.config import Site
from umbel.protocol.errors import Refused, SiteError
from umbel.protocol.signatures import simulated_key

# --- terms


@pytest.mark.parametrize(
    "terms",
    [{"deviation": 1e9}, {"deviation": 1e300}, {"deviation": math.nan}, {"deviation": -512.0}, {"deviation": 1e-300},
     {"length": 2**62}, {"length": -4}, {"length": 3}, {"bits": 63}, {"bits": 0}, {"least": 2**62}, {"least": -1},
     {"colluding": 2**62}, {"colluding": -1}, {"run": "another"}, {"round": 2}, {"round": -(2**63)}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("trains", [True, False], ids=["trains", "joins"])
def test_terms_that_exhaust_a_site_or_hide_nothing_are_refused_before_it_works(
    terms: dict[str, Any], trains: bool
) -> None:
    """Noise whose table fills the memory, numbers beyond any memory, and keys that were made for other terms.

    Whether its clients train or it adds masks alone, the site says no before anybody is charged.
    """
    if not trains and "round" in terms:
        terms = {"round": min(terms["round"], 0)}  # a site that adds masks alone hears of no other round
    context, content = node(), request(trains=trains)
    for name, value in terms.items():
        content[RECORD][name] = value
    refused_for_nothing(content, context)
    assert "umbel.secure" not in context.state


@pytest.mark.parametrize("length", [1, 5, 10**9])
def test_masks_alone_are_as_many_as_the_hypotheses_have_numbers(length: int) -> None:
    """All sites announced keys for a sum of any length that the server names; the memory for it is not taken."""
    context = node()
    refused_for_nothing(request(terms=replace(TERMS, length=length), trains=False), context)
    assert "umbel.secure" not in context.state


def test_numbers_of_one_bit_cost_what_others_cost() -> None:
    """Everything wraps around; the server learns less for the same price."""
    context = node()
    assert len(masked_in(sent(request(terms=replace(TERMS, bits=1)), context)).numbers) == 1
    assert [release.noise_multiplier for release in ledger_of(context).account(0)] == [TASK["noise_multiplier"]]


@given(st.floats(0.01, 1e5), st.floats(256.0, LARGEST), st.floats(1e-300, 1e300))
def test_any_deviation_that_is_accepted_is_the_noise_that_is_charged(
    noise_multiplier: float, deviation: float, clip_norm: float
) -> None:
    """The server's terms and its task differ; the grid follows from both, so the noise is nu clip norms or more."""
    terms, changes = replace(TERMS, deviation=deviation), {"noise_multiplier": noise_multiplier, "clip_norm": clip_norm}
    if deviation < noise_multiplier or clip_norm < 1e-290:
        return
    found = sanitiser(terms=terms, **changes)
    assert found.release.noise_multiplier == noise_multiplier
    assert deviation * found.grid.step >= noise_multiplier * clip_norm * (1 - 1e-12)
    assert 1 <= found.grid.weight <= deviation / noise_multiplier


def test_a_clip_norm_too_small_to_be_computed_is_refused() -> None:
    """Steps of 5e-324 would be rounded by half, and updates be longer than the clip norm."""
    with raises(Refused, "refused.secure-terms"):
        sanitiser(clip_norm=1e-320)


# --- the same numbers again, or two things at once


def test_masks_alone_and_training_are_not_had_in_one_round() -> None:
    """With the same masks on zeros and on the clients' numbers, their difference would have no mask."""
    context, other = node(), node()
    sent(request(trains=False), context)
    refused_for_nothing(request(), context)
    sent(request(), other)
    assert refused(through_gate(request(trains=False), other, CLIENTS))


FIRST = simulated(**{"partition-id": 0, "num-partitions": 3})
NAMES = ("node 0", "node 1", "node 2")


def stage(state: RecordDict, stage: Stage, round: int = 0, **entries: Any) -> RecordDict:
    """Return what the first site replies in a stage."""
    return answer(FIRST, 7, state, Request(stage, TERMS, round, **entries))


def test_a_later_round_ends_the_one_before() -> None:
    """The server asks for two rounds at once: the first is not opened any more."""
    context = node()
    for round in (1, 2):
        sent(request(round), context)
    with raises(Refused, "refused.secure-round"):
        stage(context.state, Stage.AGREE, 1, survivors=NAMES)
    stage(context.state, Stage.AGREE, 2, survivors=NAMES)


def test_asking_again_who_a_site_is_changes_nothing() -> None:
    """An announcement in the middle of a round has the same key. The round continues, and is still masked once."""
    context = node()
    before = stage(context.state, Stage.ANNOUNCE)
    sent(request(), context)
    assert stage(context.state, Stage.ANNOUNCE) == before
    assert refused(through_gate(request(), context, CLIENTS))
    stage(context.state, Stage.AGREE, 1, survivors=NAMES)
    stage(context.state, Stage.ANNOUNCE)
    with raises(Refused, "refused.secure-survivors"):
        stage(context.state, Stage.AGREE, 1, survivors=NAMES[:2])


def test_numbers_are_not_had_from_a_message_without_a_round() -> None:
    with raises(Refused, "refused.secure-round"):
        stage(RecordDict(), Stage.MASK, 1, announced=announced())


def test_a_client_over_budget_is_in_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 0 took part as often as the site allows. It is not charged again, does not train, and is not counted."""
    seen: list[int] = []
    summed = SecureSanitiser.summed

    def watch(self: SecureSanitiser, trained: Any, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        seen.append(len(chosen))
        return summed(self, trained, chosen)

    monkeypatch.setattr(SecureSanitiser, "summed", watch)
    context = node(**{"max-participations": 1})
    assert shared_in(sent(request(1, clients=1), context), 1, 0)[0].tolist() == [True]
    assert shared_in(sent(request(2, clients=2), context), 2, 0)[0].tolist() == [False, True]
    assert seen == [1, 1]
    assert refused(through_gate(request(3, clients=2), context, CLIENTS))


def test_a_sum_with_a_key_that_is_no_key_charges_nobody() -> None:
    """A listed site signs a key of small order. Every round would fail after its clients were charged."""
    public = bytes(32)
    bad = Announcement(public, simulated_key(7, 2).sign(key_text(TERMS, "node 2", public)))
    refused_for_nothing(request(parties={**announced(), "node 2": bad}))


def test_memory_that_was_damaged_fails_closed() -> None:
    context = node()
    context.state["umbel.secure"] = ConfigRecord({"terms": TERMS.digest, "secret": b"x"})
    refused_for_nothing(request(), context)


# --- sites that serve their own data


def listing(folder: Path, **entries: Any) -> Site:
    """Return a site that lists itself and two others."""
    keys = {name: pair(folder / name)[1].split()[1] for name in ("north", "south", "west")}
    listed = " ".join(f"{name}={key}" for name, key in keys.items())
    return own(**{"release": "secure", "parties": listed, "party_key": str(folder / "north")} | entries)


def public_of(site: Site, state: RecordDict, terms: Terms = TERMS, seed: int | None = None) -> Any:
    return answer(site, seed, state, Request(Stage.ANNOUNCE, terms))[RECORD]["public"]


@pytest.mark.parametrize("release", ["client", "site"])
def test_a_site_that_adds_to_no_secure_sums_signs_none(tmp_path: Path, release: str) -> None:
    """A policy that is half set: it lists the sites, but does not accept their sums."""
    with raises(Refused, "refused.release"):
        public_of(listing(tmp_path, release=release), RecordDict())
    assert public_of(listing(tmp_path, release="any"), RecordDict())


@pytest.mark.parametrize("missing", ["parties", "party_key"])
def test_a_site_whose_policy_is_half_set_takes_no_part(tmp_path: Path, missing: str) -> None:
    with raises(Refused, "refused.secure-parties"):
        public_of(listing(tmp_path, release="any", **{missing: ""}), RecordDict())
    with pytest.raises(SiteError):
        listing(tmp_path, **{missing: ""})


def test_a_site_that_does_not_list_itself_takes_no_part(tmp_path: Path) -> None:
    with raises(SiteError, "site.not-a-party"):
        public_of(listing(tmp_path, party_key=str(pair(tmp_path / "stranger")[0])), RecordDict())


def test_each_run_and_each_change_of_terms_has_another_key(tmp_path: Path) -> None:
    """The server uses a run's name again, or goes to other terms and back: nothing is left of the first secret."""
    site, state = listing(tmp_path), RecordDict()
    found = [public_of(site, state), public_of(site, state, replace(TERMS, bits=20)), public_of(site, state)]
    found += [public_of(site, RecordDict()) for _ in range(2)]
    assert len({*found}) == 5


def together(tmp_path: Path) -> tuple[Site, RecordDict, dict[str, Announcement]]:
    """Return a site, its memory, and the announcements of it and of two others."""
    site, state = listing(tmp_path), RecordDict()
    found = {}
    for name in ("south", "west", "north"):
        own = state if name == "north" else RecordDict()
        site = Site.serving(site.policy.model_copy(update={"party_key": str(tmp_path / name)}))
        found[name] = Introduction.read(answer(site, None, own, Request(Stage.ANNOUNCE, TERMS))).announcement
    return site, state, found


def test_a_memory_that_is_older_than_the_last_message_signs_no_second_set(tmp_path: Path, umbel_home: Path) -> None:
    """Two messages at once, or a process that is killed between reply and memory: both times the set is unsigned."""
    site, state, found = together(tmp_path)
    party = party_of(place_of(site, None, state), TERMS)
    party.mask(1, found, np.zeros(4, np.int64))
    remember(place_of(site, None, state), party)
    before = dict(state["umbel.secure"].items())
    everybody, two = ("north", "south", "west"), ("north", "south")
    answer(site, None, state, Request(Stage.AGREE, TERMS, 1, survivors=everybody))
    state["umbel.secure"] = ConfigRecord(before)
    with raises(Refused, "refused.secure-round"):
        answer(site, None, state, Request(Stage.AGREE, TERMS, 1, survivors=two))
    state["umbel.secure"] = ConfigRecord(before)
    answer(site, None, state, Request(Stage.AGREE, TERMS, 1, survivors=everybody))


def test_a_memory_that_is_older_than_the_last_message_masks_no_round_twice(tmp_path: Path, umbel_home: Path) -> None:
    """Two trainings at once in one round: what is in the other sites' boxes would be shared twice."""
    site, state, found = together(tmp_path)
    before = dict(state["umbel.secure"].items())
    for again in (False, True):
        state["umbel.secure"] = ConfigRecord(before)
        party = party_of(place_of(site, None, state), TERMS)
        party.mask(1, found, np.zeros(4, np.int64))
        if not again:
            remember(place_of(site, None, state), party)
    with raises(Refused, "refused.secure-round"):
        remember(place_of(site, None, state), party)
    party.mask(2, found, np.zeros(4, np.int64))
    remember(place_of(site, None, state), party)


@pytest.mark.parametrize("changes", [{"colluding": 1, "least": 3}, {"colluding": 0, "least": 4}])
def test_terms_below_the_sites_own_are_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    site = listing(tmp_path, colluding_parties=1, least_parties=4)
    with raises(Refused, "refused.secure-terms"):
        public_of(site, RecordDict(), replace(TERMS, **changes))  # type: ignore[arg-type]


def test_a_seed_that_the_server_knows_gives_no_secret_of_a_party(tmp_path: Path) -> None:
    """A test site with insecure-seed among real ones: they count on its share of the noise, and on its masks."""
    site = listing(tmp_path, insecure_seed=True, budget="inf")
    assert len({public_of(site, RecordDict(), seed=3) for _ in range(2)}) == 2
    party = party_of(place_of(site, 3, RecordDict()), TERMS)
    assert party.random(32) != party_of(place_of(site, 3, RecordDict()), TERMS).random(32)
