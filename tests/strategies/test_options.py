"""What a strategy reads of the run config is checked; an error names the key and says what it should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import ConfigError
from strategies.options import Options

Read = Callable[[Options], Any]


@pytest.mark.parametrize(
    ("value", "read", "expected"),
    [
        ("a b", lambda options: options.text("key"), "a b"),
        ("b", lambda options: options.choice("key", ("a", "b")), "b"),
        (True, lambda options: options.flag("key"), True),
        (3, lambda options: options.whole("key", 3), 3),
        (7, lambda options: options.whole("key", 3, 7), 7),
        (0, lambda options: options.number("key", least=0), 0.0),
        (0.5, lambda options: options.number("key", above=0), 0.5),
    ],
)
def test_an_entry_is_read(value: Any, read: Read, expected: Any) -> None:
    found = read(Options({"key": value}))
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "read", "reason"),
    [
        (1, lambda options: options.text("key"), "key must be text, got 1"),
        ("c", lambda options: options.choice("key", ("a", "b")), "key must be one of a, b, got 'c'"),
        (2, lambda options: options.choice("key", ("a", "b")), "key must be text, got 2"),
        (1, lambda options: options.flag("key"), "key must be true or false, got 1"),
        ("true", lambda options: options.flag("key"), "key must be true or false, got 'true'"),
        (2, lambda options: options.whole("key", 3), "key must be a whole number of at least 3, got 2"),
        (True, lambda options: options.whole("key", 0), "key must be a whole number of at least 0, got True"),
        (3.0, lambda options: options.whole("key", 0), "key must be a whole number of at least 0, got 3.0"),
        (8, lambda options: options.whole("key", 3, 7), "key must be at most 7, got 8"),
        (0, lambda options: options.number("key", above=0), "key must be a finite number above 0, got 0"),
        (-1, lambda options: options.number("key", least=0), "key must be a finite number of at least 0, got -1"),
        (float("inf"), lambda options: options.number("key", least=0), "key must be a finite number of at least 0"),
        ("1", lambda options: options.number("key", least=0), "key must be a finite number of at least 0, got '1'"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named(value: Any, read: Read, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^{reason}"):
        read(Options({"key": value}))


def test_an_entry_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^the run config lacks key; its default is in pyproject.toml, \[tool"):
        Options({"other": 1}).text("key")
