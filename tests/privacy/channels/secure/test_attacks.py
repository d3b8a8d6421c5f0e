"""Attacks on secure sums that take several parties, several lives of a party, or several rounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from tests.privacy.channels.secure.conftest import TERMS, Federation
from umbel.privacy.channels.secure import seeds
from umbel.privacy.channels.secure.party import OWN, Announcement, Masked, Opened, add_mask
from umbel.privacy.channels.secure.terms import Terms
from umbel.protocol.errors import Refused

NUMBERS = np.arange(TERMS.length)


def unmasked(name: str, masked: Masked, known: dict[str, bytes]) -> list[int]:
    """Return a party's own numbers from its message and the seeds of all its masks."""
    found = seeds.unpacked(masked.numbers, TERMS.length, TERMS.bits)
    for other, seed in known.items():
        add_mask(found, seed, TERMS, plus=not (other == OWN or name < other))
    return (found & np.uint64((1 << TERMS.bits) - 1)).astype(int).tolist()


# --- a party that lives twice


def test_a_party_that_forgot_its_round_signs_no_second_set_for_it() -> None:
    """Two of three parties open a sum without b, which reveals what they share with it.

    Then a forgets the run, which a server brings about with other terms, and signs a set with b in the same round. If b
    believed it, it would reveal all that still hides its numbers.
    """
    federation = Federation()
    announced, parties = federation.announced, federation.parties
    masked = {name: party.mask(1, announced, NUMBERS) for name, party in parties.items()}
    signatures = {name: parties[name].agree(1, "ac") for name in "ac"}
    opened = {name: parties[name].open(1, announced, signatures, {}) for name in "ac"}
    shared = {name: opened[name].seeds["b"] for name in "ac"}

    again = federation.party("a", secret=b"of its second life".ljust(32))
    renewed = {**announced, "a": again.announce()}
    again.mask(1, renewed, NUMBERS)
    second = {"b": parties["b"].agree(1, "abc"), "a": again.agree(1, "abc")}
    for known in (announced, renewed):
        with pytest.raises(Refused):
            parties["b"].open(1, known, second, {})
    # What b would have revealed is all that was missing.
    own = parties["b"]._seeds(tuple("abc"), {})[OWN]
    assert unmasked("b", masked["b"], {**shared, OWN: own}) == NUMBERS.tolist()


def test_a_party_that_forgot_its_round_signs_none_for_its_first_life() -> None:
    """It has no memory of the round, and the server names the parties with its old key."""
    federation = Federation()
    again = federation.party("a", secret=b"of its second life".ljust(32))
    with raises(Refused, "refused.secure-parties"):
        again.mask(1, federation.announced, NUMBERS)
    with raises(Refused, "refused.secure-round"):
        again.agree(1, "abc")


# --- other keys in a later message


SERVERS = Announcement(seeds.private_key(b"server".ljust(32)).public_key().public_bytes_raw(), b"")
"""The server's own key, with which it could compute the box keys."""


@pytest.mark.parametrize("others", [{"d": "b"}, {"d": "a"}, {"b": "d", "d": "b"}, {"d": SERVERS}])
def test_other_keys_than_those_of_the_masks_open_nothing(others: dict[str, Any]) -> None:
    """Masks follow from keys. If d is lost, and the server opens with b's key as that of d, a would reveal the mask
    that it shares with b, which survives: that is all that hides b."""
    federation = Federation(size=4)
    found, announced = federation.second(federation.first(gone=["d"])), federation.announced
    changed = {name: announced.get(other, other) for name, other in others.items()}
    with raises(Refused, "refused.secure-parties"):
        federation.parties["a"].open(1, {**announced, **changed}, found.signatures, {})


# --- sites that are told different things


def test_parties_that_are_told_different_keys_of_one_party_open_nothing() -> None:
    """c works with the server and announces two keys, one to a and one to b. Their masks do not vanish, and no set that
    one of them signs counts for the other."""
    federation = Federation()
    other = federation.party("c", secret=b"another".ljust(32))
    first = federation.announced
    second = {**first, "c": other.announce()}
    a, b = federation.parties["a"], federation.parties["b"]
    assert a.mask(1, first, NUMBERS).proofs["b"] != b.mask(1, second, NUMBERS).proofs["a"]
    signatures = {"a": a.agree(1, "ab"), "b": b.agree(1, "ab")}
    for party, announced in ((a, first), (b, second)):
        with raises(Refused, "refused.secure-survivors"):
            party.open(1, announced, signatures, {})


def test_parties_that_are_told_different_members_open_nothing() -> None:
    """a adds with b, c and d, but b with a and c alone: a set of the one sum is none of the other."""
    federation = Federation(size=4)
    four = federation.announced
    three = {name: one for name, one in four.items() if name != "d"}
    a, b, c = (federation.parties[name] for name in "abc")
    a.mask(1, four, NUMBERS)
    for party in (b, c):
        party.mask(1, three, NUMBERS)
    signatures = {party.name: party.agree(1, "abc") for party in (a, b, c)}
    with raises(Refused, "refused.secure-survivors"):
        a.open(1, four, signatures, {})


# --- parties that work with the server


def test_a_colluding_party_that_signs_two_sets_opens_one() -> None:
    """Three of four parties have to sign. d works with the server and signs both sets, and a and b open theirs.

    c does not open: its set has two signatures, and the three of the other set do not count.
    """
    federation = Federation(replace(TERMS, colluding=1), 4)
    federation.first()
    announced, parties = federation.announced, federation.parties
    one = {name: parties[name].agree(1, "abd") for name in "abd"}
    parties["d"].turn.survivors = ()
    other = {name: parties[name].agree(1, "abcd") for name in "cd"}
    for signatures in (other, one, {**one, **other}):
        with raises(Refused, "refused.secure-survivors"):
            parties["c"].open(1, announced, signatures, {})
    assert {*parties["a"].open(1, announced, one, {}).seeds} == {OWN, "c"}


def test_a_box_that_is_none_keeps_nobody_from_opening() -> None:
    """One bad party sends boxes that no party can open. The others skip them and open the sum."""
    federation = Federation(size=4)
    found = federation.first()
    found._masked["d"] = replace(found._masked["d"], boxes=dict.fromkeys("abc", b"nothing"))
    found = federation.third(federation.second(found))
    assert "d" not in found._opened["a"].shares
    assert found.result()[0].tolist() == sum(federation.values().values()).tolist()


def test_a_party_that_lies_about_its_shares_is_passed_over_among_many() -> None:
    """Twelve of thirteen open, a with wrong shares; all of the first thousands of sets in order have a in them."""
    federation = Federation(size=16)
    found = federation.third(federation.second(federation.first()), gone=["p"])
    opened = found._opened["a"]
    wrong = {other: dict.fromkeys(own, bytes(16)) for other, own in opened.shares.items()}
    found.opens("a", Opened(opened.seeds, opened.layers, wrong))
    assert found.result()[0].tolist() == sum(federation.values().values()).tolist()


# --- all that a server can learn, for every set of survivors and of parties that work with it

CASES = [
    (size, colluding, gone)
    for size, colluding in ((3, 0), (4, 1), (5, 0), (5, 1), (6, 2))
    for lost in range(size - replace(TERMS, colluding=colluding, least=size).threshold(size) + 1)
    for gone in combinations("abcdef"[:size], lost)
]


@pytest.mark.parametrize(("size", "colluding", "gone"), CASES, ids=str)
def test_whatever_is_opened_hides_every_honest_party(size: int, colluding: int, gone: tuple[str, ...]) -> None:
    """The server knows all that was revealed, and all that any `colluding` parties know, survivors or lost.

    An honest survivor still shares a mask with another one, and no other party can compute it. The server may have kept
    a lost party's numbers, but their own mask stays. The layers that honest survivors did not reveal have the whole
    variance.
    """
    federation = Federation(Terms("run 7", 1, 40, 300.0, colluding, least=size), size)
    found = federation.third(federation.second(federation.first(gone=gone)))
    opened, layers = found._opened, found.terms.layers(size)
    for bad in combinations(found.members, colluding):
        kept = [layers[: len(layers) - len(opened[name].layers)] for name in found.survivors if name not in bad]
        assert sum(one**2 for own in kept for one in own) >= 300.0**2 * (1 - 1e-12)
        honest = {*found.members} - {*bad}

        def known(one: str, other: str, bad: tuple[str, ...] = bad) -> bool:
            """Return whether the server can compute a mask of an honest party."""
            if other in bad or (one in opened and other in opened[one].seeds):
                return True
            if other in opened and one in opened[other].seeds:
                return True
            shares = {*bad} | {who for who, said in opened.items() if other in said.shares.get(one, {})}
            back = {*bad} | {who for who, said in opened.items() if one in said.shares.get(other, {})}
            return max(len(shares), len(back)) >= found.threshold

        for one in honest & {*found.survivors}:
            assert any(not known(one, other) for other in (honest & {*found.survivors}) - {one})
        for one in honest - {*found.survivors}:
            assert not known(one, OWN)
