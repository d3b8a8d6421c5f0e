"""What is looked up once a message."""

from __future__ import annotations

import gc

import pytest

from umbel.protocol.once import once, one_message

looks: list[object] = []


def look(about: object) -> int:
    looks.append(about)
    return len(looks)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    looks.clear()


def test_within_a_message_it_is_looked_up_once_and_in_the_next_anew() -> None:
    config = {"a": 1}
    for expected in (1, 2):
        with one_message():
            assert [once(look, config) for _ in range(3)] == [expected] * 3


def test_outside_of_a_message_it_is_looked_up_each_time() -> None:
    assert [once(look, "site") for _ in range(3)] == [1, 2, 3]


def test_what_is_alike_is_not_the_same() -> None:
    with one_message():
        assert [once(look, one) for one in ({"a": 1}, {"a": 1})] == [1, 2]


def test_nothing_takes_the_place_of_what_is_gone() -> None:
    """Python gives the address of what is gone to what comes next."""
    with one_message():
        found = set()
        for number in range(20):
            found.add(once(look, {"a": number}))
            gc.collect()
        assert len(found) == 20


def test_a_message_within_a_message_looks_for_itself() -> None:
    config = {"a": 1}
    with one_message():
        assert once(look, config) == 1
        with one_message():
            assert once(look, config) == 2
        assert once(look, config) == 1


def test_what_raises_is_looked_up_again() -> None:
    def fails(about: object) -> int:
        looks.append(about)
        raise ValueError("no")

    with one_message():
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                once(fails, 1)
    assert len(looks) == 2
