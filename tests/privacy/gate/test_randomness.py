"""Every client has streams of its own: the same for the same key, unrelated for any other."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from umbel.privacy.gate.randomness import streams


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
    """Return the first draws of a stream."""
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


def test_long_streams_of_adjacent_clients_and_rounds_do_not_overlap() -> None:
    """Some 1.2 million draws of 64 bits, as for the noise of a large model: none comes twice.

    By chance one would with probability 4e-8.
    """
    adjacent = [Key(seed=0, purpose="noise", round=round, client=client) for round in (1, 2) for client in (0, 1, 2)]
    long = np.concatenate([draws(key, 200_000) for key in adjacent])
    assert len(np.unique(long)) == len(long)


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


def test_there_is_a_stream_for_each_client() -> None:
    assert len(streams(0, "noise", 1, [3, 1, 2])) == 3
    assert len(streams(None, "noise", 1, [3, 1, 2])) == 3
    assert len(streams(0, "noise", 1, [])) == 0
