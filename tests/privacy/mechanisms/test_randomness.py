"""Every client has streams of its own: the same for the same key, unrelated for any other.

Noise that nobody can predict comes from a `SecureGenerator`: statistics with a false alarm of 1e-6 each.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from umbel.privacy.mechanisms import randomness
from umbel.privacy.mechanisms.randomness import SecureGenerator, streams


@dataclass(frozen=True)
class Key:
    """What tells a stream from another."""

    seed: int
    purpose: str
    round: int
    client: int


keys = st.builds(
    Key,
    seed=st.integers(0, 2**63 - 1),
    purpose=st.sampled_from(["noise", "shuffle"]),
    round=st.integers(1, 2**63 - 1),
    client=st.integers(0, 2**63 - 1),
)


def draws(key: Key, count: int = 8) -> NDArray[np.uint64]:
    (generator,) = streams(key.seed, key.purpose, key.round, [key.client])
    return generator.integers(2**64, size=count, dtype=np.uint64)


@given(keys)
def test_the_same_key_gives_the_same_stream(key: Key) -> None:
    np.testing.assert_array_equal(draws(key), draws(key))


@given(keys, keys, st.sampled_from(["seed", "purpose", "round", "client"]))
def test_keys_that_differ_in_one_part_give_other_streams(key: Key, other: Key, part: str) -> None:
    changed = replace(key, **{part: getattr(other, part)})
    assume(changed != key)
    # Eight draws of 64 bits: two agree by chance once in 2^58.
    assert not set(draws(key).tolist()) & set(draws(changed).tolist())


def test_round_and_client_do_not_stand_in_for_each_other() -> None:
    swapped = draws(Key(seed=0, purpose="noise", round=7, client=3))
    assert (draws(Key(seed=0, purpose="noise", round=3, client=7)) != swapped).all()


@given(st.permutations(range(5)))
def test_the_order_of_the_clients_is_irrelevant(order: list[int]) -> None:
    together = dict(zip(order, streams(1, "noise", 1, order), strict=True))
    for client, generator in together.items():
        alone = Key(seed=1, purpose="noise", round=1, client=client)
        np.testing.assert_array_equal(generator.integers(2**64, size=8, dtype=np.uint64), draws(alone))


def test_a_stream_never_grows_into_the_next() -> None:
    # The counter's low half counts within a stream; round and client stay where they are.
    (generator,) = streams(0, "noise", 5, [9])
    generator.bit_generator.advance(2**128 - 1)  # type: ignore[attr-defined]
    assert generator.bit_generator.state["state"]["counter"][2:].tolist() == [5, 9]


def test_without_a_seed_every_stream_is_new() -> None:
    key = astuple(Key(seed=0, purpose="noise", round=1, client=0))[1:3]
    np.random.seed(0)  # noqa: NPY002 - whoever seeds the global generator does not reach these
    first = [generator.integers(2**64, size=8, dtype=np.uint64) for generator in streams(None, *key, [0, 1])]
    np.random.seed(0)  # noqa: NPY002
    second = [generator.integers(2**64, size=8, dtype=np.uint64) for generator in streams(None, *key, [0, 1])]
    assert len(np.unique(np.concatenate(first + second))) == 4 * 8


# --- noise that nobody can predict


@pytest.fixture
def fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys from a fixed seed, so that a statistical test says the same every time."""
    keys = np.random.default_rng(11)
    monkeypatch.setattr(randomness.secrets, "token_bytes", keys.bytes)


def test_random_numbers_are_uniform_from_0_up_to_1(fixed_keys: None) -> None:
    """As numpy's are: 0 may come out, 1 never. They decide who hides its choice, and behind what."""
    numbers = SecureGenerator().random(100_001)
    assert numbers.shape == (100_001,)
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    assert stats.kstest(numbers, "uniform").pvalue > 1e-6
    assert stats.kstest(numbers**1.03, "uniform").pvalue < 1e-6, "a law that is a little off is found out"
    assert stats.pearsonr(numbers[:-1], numbers[1:]).pvalue > 1e-6


@pytest.mark.parametrize(("bits", "number"), [(b"\x00", 0.0), (b"\xff", 1 - 2.0**-53)])
def test_the_ends_of_the_range_of_random_numbers(monkeypatch: pytest.MonkeyPatch, bits: bytes, number: float) -> None:
    generator = SecureGenerator()

    class Stream:
        """A key stream of the same bits throughout."""

        def update(self, data: bytes) -> bytes:
            return bits * len(data)

    monkeypatch.setattr(generator, "_stream", Stream())
    assert generator.random(3).tolist() == [number] * 3


def test_the_tails_of_normals_are_as_fine_as_their_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word of zeros is followed by 63 more bits: 13 deviations are reached, and every cell before them."""
    generator = SecureGenerator()
    words = iter([np.zeros(4, np.uint64), np.array([0, 2**20, 2**40, 2**63], np.uint64), np.zeros(4, np.uint64)])
    monkeypatch.setattr(generator, "bytes", lambda length: next(words).tobytes())
    normals = generator.standard_normal(8)[:4]
    expected = [np.sqrt(2 * np.log(2) * bits) for bits in (127, 107 - np.log2(1 + 2.0**-20), 87, 64)]
    assert normals == pytest.approx(expected, rel=1e-9)


def test_normals_are_normal(fixed_keys: None) -> None:
    assert stats.kstest(SecureGenerator().standard_normal(100_001), "norm").pvalue > 1e-6


def test_normals_are_independent_of_their_neighbours(fixed_keys: None) -> None:
    """Box-Muller makes pairs; neither neighbours nor partners, nor their squares, may correlate."""
    normals = SecureGenerator().standard_normal(200_000)
    for lag in (1, 2, 100_000 % (1 << 16), 1 << 16):
        for values in (normals, normals**2):
            assert stats.pearsonr(values[:-lag], values[lag:]).pvalue > 1e-6


@pytest.mark.parametrize("shape", [0.5, 1.0, 1.5, 6.0, 1000.5, 600_000.5])
def test_gammas_are_gamma(fixed_keys: None, shape: float) -> None:
    generator = SecureGenerator()
    draws = [generator.standard_gamma(shape) for _ in range(6000)]
    assert stats.kstest(draws, "gamma", args=(shape,)).pvalue > 1e-6


def test_no_two_generators_agree_and_no_seed_reaches_them() -> None:
    np.random.seed(0)  # noqa: NPY002 - what a server might try
    first = SecureGenerator().standard_normal(4)
    np.random.seed(0)  # noqa: NPY002
    assert not np.array_equal(first, SecureGenerator().standard_normal(4))
