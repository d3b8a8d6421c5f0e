"""Keys, masks, boxes and packed numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.errors import raises
from umbel.privacy.channels.secure import seeds
from umbel.protocol.errors import Refused


@given(st.integers(1, 62), st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=40))
def test_numbers_survive_packing(bits: int, values: list[int]) -> None:
    numbers = np.array(values, np.uint64) & np.uint64((1 << bits) - 1)
    text = seeds.packed(numbers, bits)
    assert len(text) == seeds.packed_size(len(numbers), bits)
    assert (seeds.unpacked(text, len(numbers), bits) == numbers).all()


def test_many_numbers_are_packed_in_blocks() -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << 13, 200_001).astype(np.uint64)
    assert (seeds.unpacked(seeds.packed(numbers, 13), len(numbers), 13) == numbers).all()


def test_four_numbers_of_six_bits_take_three_bytes() -> None:
    assert seeds.packed(np.array([1, 2, 3, 63], np.uint64), 6) == bytes([0b00000100, 0b00100000, 0b11111111])


@pytest.mark.parametrize("text", [b"", b"12", b"1234"])
def test_packed_numbers_of_another_length_are_refused(text: bytes) -> None:
    with raises(Refused, "refused.secure-terms"):
        seeds.unpacked(text, 4, 6)


def test_keys_for_different_purposes_differ() -> None:
    found = {
        seeds.derived(bytes(32), *what)
        for what in (("a", 1), ("a", "1"), ("a1",), ("a", [1]), ("a", 1, ""), (), ("b", 1))
    }
    assert len(found) == 7


@pytest.mark.parametrize("public", [bytes(32), b"\1" + bytes(31), b"\xec" + b"\xff" * 30 + b"\x7f", b"short", b""])
def test_a_key_with_which_everybody_shares_the_same_secret_is_refused(public: bytes) -> None:
    with raises(Refused, "refused.secure-parties"):
        seeds.shared(seeds.private_key(bytes(32)), public)


def test_a_box_opens_with_its_key_for_its_purpose_only() -> None:
    box = seeds.seal(bytes(32), b"text", b"about")
    assert seeds.unseal(bytes(32), box, b"about") == b"text"
    for key, text, about in ((b"k" * 32, box, b"about"), (bytes(32), box, b"else"), (bytes(32), box[:-1], b"about")):
        with raises(Refused, "refused.secure-shares"):
            seeds.unseal(key, text, about)


def test_shares_give_a_seed_and_one_less_does_not() -> None:
    shares = seeds.shares_of(b"0123456789abcdef", 3, 5)
    for places in ((0, 1, 2), (4, 2, 0)):
        assert seeds.seed_in({place: shares[place] for place in places}) == b"0123456789abcdef"
    assert seeds.seed_in({place: shares[place] for place in (0, 1)}) != b"0123456789abcdef"
    assert seeds.shares_of(b"0123456789abcdef", 3, 5) != shares, "drawn each time"
