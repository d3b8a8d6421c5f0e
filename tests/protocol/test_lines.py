"""What a node says cannot fill the log, nor steer whoever reads it."""

from __future__ import annotations

import pytest

from umbel.protocol.words import as_line


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain words, with ä and 猫", "plain words, with ä and 猫"),
        ("two\nlines\r", "two\\nlines\\r"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\u202eback", "\\u202eback"),
        (ValueError("a\x00b"), "a\\x00b"),
        (None, "None"),
    ],
)
def test_characters_that_are_not_shown_are_written_out(said: object, shown: str) -> None:
    assert as_line(said) == shown
    assert as_line(said).isprintable()


def test_what_is_long_is_cut() -> None:
    assert as_line("a" * 10**6) == "a" * 300 + "…"
    assert as_line("a" * 300) == "a" * 300
