"""What a server, and parties that work with it, cannot get from a party: each test is an attack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from tests.helpers.errors import raises
from tests.privacy.channels.secure.conftest import TERMS, Federation, identity, listed
from umbel.privacy.channels.secure.party import OWN, Announcement, Party, parties_in, survivors_text
from umbel.privacy.channels.secure.seeds import seed_in
from umbel.privacy.channels.secure.sums import Sum
from umbel.protocol.errors import Refused

NUMBERS = np.arange(TERMS.length)


@pytest.fixture
def four() -> Federation:
    """Return four parties, of which three have to sign."""
    return Federation(size=4)


# --- who takes part


def _made(name: str, signer: str, secret: bytes = bytes(32)) -> Announcement:
    """Return what a party would announce that somebody else signs."""
    return Party(TERMS, name, listed(name), identity(signer).sign, secret).announce()


Names = dict[str, Announcement | None]
FORGED: dict[str, Callable[[Federation], Names]] = {
    "a party of the server's own, as all others may be": lambda _: {"x": _made("x", "x")},
    "the server's key in place of b's, a man in the middle": lambda _: {"b": _made("b", "server")},
    "c's key as b's": lambda four: {"b": four.announced["c"]},
    "b's and c's keys changed": lambda four: {"b": four.announced["c"], "c": four.announced["b"]},
    "a key of a run that is over": lambda four: {"b": four.party("b", replace(TERMS, run="run 6")).announce()},
    "a key for more noise": lambda four: {"b": four.party("b", replace(TERMS, deviation=1000.0)).announce()},
    "a key for more that collude": lambda four: {"b": four.party("b", replace(TERMS, colluding=1)).announce()},
    "a key for fewer bits": lambda four: {"b": four.party("b", replace(TERMS, bits=8)).announce()},
    "a signature of nothing": lambda four: {"b": Announcement(four.announced["b"].public, bytes(64))},
    "a key of its own that it did not make": lambda four: {"a": four.party("a", secret=b"of another start").announce()},
    "b's key for the run as c's": lambda four: {"c": _made("c", "c", four.parties["b"].secret)},
    "without itself": lambda _: {"a": None},
    "too few": lambda _: {"c": None, "d": None},
}


@pytest.mark.parametrize("attack", FORGED)
def test_a_sum_with_other_parties_than_a_site_lists_is_refused(four: Federation, attack: str) -> None:
    announced = {name: one for name, one in {**four.announced, **FORGED[attack](four)}.items() if one is not None}
    with raises(Refused, "refused.secure-parties"):
        four.parties["a"].mask(1, announced, NUMBERS)


def test_two_names_with_one_identity_are_refused() -> None:
    """A policy that lists a key twice would let one party count as two."""
    keys = {**listed("a", "b"), "c": identity("b").public_key()}
    with raises(Refused, "refused.secure-parties"):
        Party(TERMS, "a", keys, identity("a").sign, bytes(32))


# --- the same numbers again


def test_a_round_is_masked_once(four: Federation) -> None:
    """Two messages with the same masks would tell the difference of their numbers, as of two hypotheses."""
    party = four.parties["a"]
    party.mask(3, four.announced, NUMBERS)
    for round in (3, 2, 0, -1):
        with raises(Refused, "refused.secure-round"):
            party.mask(round, four.announced, NUMBERS)
    party.mask(4, four.announced, NUMBERS)


def test_another_round_or_other_parties_have_other_masks(four: Federation) -> None:
    party, announced = four.parties["a"], four.announced
    three = {name: one for name, one in announced.items() if name != "d"}
    proofs = [party.mask(round, some, NUMBERS).proofs for round, some in ((1, announced), (2, announced), (3, three))]
    assert len({one for some in proofs for one in some.values()}) == 4 + 4 + 3


def test_a_party_that_forgot_its_round_has_another_mask_of_its_own(four: Federation) -> None:
    """A restored backup: shared masks repeat, but its own mask does not, and no party opens the round again."""
    first, again = (four.party("a").mask(1, four.announced, NUMBERS) for _ in range(2))
    assert first.numbers != again.numbers
    assert first.proofs["b"] == again.proofs["b"]
    assert first.proofs[OWN] != again.proofs[OWN]


# --- the set of survivors


def test_two_sets_of_survivors_are_not_signed(four: Federation) -> None:
    four.first()
    party = four.parties["a"]
    party.agree(1, "abc")
    assert party.agree(1, "cba") == party.agree(1, "abc")  # a message that is repeated
    with raises(Refused, "refused.secure-survivors"):
        party.agree(1, "abd")


@pytest.mark.parametrize("survivors", ["", "a", "ab", "bcd", "abx", "abcdx", "aab", "aabb"])
def test_sets_of_survivors_that_are_too_small_or_have_others_are_not_signed(four: Federation, survivors: str) -> None:
    four.first()
    with raises(Refused, "refused.secure-survivors"):
        four.parties["a"].agree(1, survivors)


@pytest.mark.parametrize("round", [0, 2])
def test_survivors_of_another_round_are_not_signed(four: Federation, round: int) -> None:
    four.first()
    with raises(Refused, "refused.secure-round"):
        four.parties["a"].agree(round, "abcd")


# --- what is opened


def test_nothing_is_opened_before_the_set_is_signed(four: Federation) -> None:
    found = four.first()
    found.survivors = ("a", "b", "c", "d")
    with raises(Refused, "refused.secure-round"):
        four.parties["a"].open(1, four.announced, {}, found.boxes("a"))


def _signed(four: Federation) -> Sum:
    return four.second(four.first(gone=["d"]))


@pytest.mark.parametrize(
    "by",
    [
        {},
        {"a": ("a", "abc"), "b": ("b", "abc")},
        {"a": ("a", "abc"), "b": ("a", "abc"), "c": ("a", "abc")},
        {"a": ("a", "abc"), "b": ("b", "abcd"), "c": ("c", "abcd")},
        {"a": ("a", "abc"), "b": ("b", "abc"), "d": ("d", "abc")},
        {"a": ("a", "abc"), "b": ("b", "abc"), "x": ("x", "abc")},
    ],
    ids=["none", "too few", "one for all", "of another set", "of one that is lost", "of a stranger"],
)
def test_without_enough_signatures_of_its_set_a_party_opens_nothing(
    four: Federation, by: dict[str, tuple[str, str]]
) -> None:
    found = _signed(four)
    parties = parties_in(four.announced)
    signatures = {
        name: identity(key).sign(survivors_text(TERMS, 1, parties, survivors)) for name, (key, survivors) in by.items()
    }
    with raises(Refused, "refused.secure-survivors"):
        four.parties["a"].open(1, four.announced, signatures, found.boxes("a"))


def test_signatures_of_another_round_open_nothing(four: Federation) -> None:
    old = _signed(four).signatures
    found = four.second(four.first(round=2, gone=["d"]))
    with raises(Refused, "refused.secure-survivors"):
        four.parties["a"].open(2, four.announced, old, found.boxes("a"))


def test_a_round_is_opened_once(four: Federation) -> None:
    found = _signed(four)
    four.third(found)
    with raises(Refused, "refused.secure-round"):
        four.parties["a"].open(1, four.announced, found.signatures, found.boxes("a"))


def test_never_both_secrets_of_one_party_are_revealed(four: Federation) -> None:
    """Of survivors the own mask and those shared with lost parties; of the lost nothing that they alone know."""
    found = four.third(_signed(four))
    for opened in found._opened.values():
        assert {*opened.seeds} == {OWN, "d"}
        assert {*opened.shares} < {"a", "b", "c"}
        assert all({*own} == {OWN, "d"} for own in opened.shares.values())


@pytest.mark.parametrize("change", ["bit", "sender", "receiver", "round"])
def test_shares_that_were_changed_or_moved_are_not_read(four: Federation, change: str) -> None:
    old = four.first(gone=["d"])
    found = four.second(four.first(round=2, gone=["d"]))
    boxes = found.boxes("a")
    box = boxes["b"]
    boxes["b"] = {
        "bit": box[:-1] + bytes([box[-1] ^ 1]),
        "sender": boxes["c"],
        "receiver": found.boxes("c")["b"],
        "round": old._masked["b"].boxes["a"],
    }[change]
    assert {*four.parties["a"].open(2, four.announced, found.signatures, boxes).shares} == {"c"}


def test_fewer_parties_than_the_threshold_cannot_combine_a_seed() -> None:
    """Two of five open; the server has two shares of a's own mask, and a is silent."""
    federation = Federation(size=5)
    found = federation.third(federation.second(federation.first()), gone=["a", "d", "e"])
    shares = {found.members.index(name): opened.shares["a"][OWN] for name, opened in found._opened.items()}
    assert len(shares) == 2
    assert sha256(seed_in(shares)).digest() != found._masked["a"].proofs[OWN]
