"""Pages, docstrings, comments and messages keep to plain English: see `tests.helpers.words`."""

from __future__ import annotations

import pytest

from tests.helpers import words
from tests.helpers.words import Text


@pytest.mark.rest
def test_clean_paths_have_no_habits() -> None:
    wrong = [str(one) for text in words.texts() if words.is_clean(text.path) for one in words.found(text)]
    assert not wrong, "\n".join(wrong)


def test_paths_that_are_not_yet_clean_are_there() -> None:
    assert not [name for name in words.NOT_YET if not (words.ROOT / name).exists()]


@pytest.mark.parametrize(
    ("said", "habit"),
    [
        ("The run is done Anew here.", "Anew"),
        ("Each has a stream of its own.", "of its own"),
        ("Nobody knows the seed.", "Nobody"),
        ("What the gate made is sent.", "What the gate made is sent"),
        ("It is so. Who cannot pay does not train.", "Who cannot pay does not train"),
        ("The run goes on.", "goes on"),
        ("It works in Y and nowhere else.", "and nowhere else"),
    ],
)
def test_a_habit_is_found(said: str, habit: str) -> None:
    assert habit in [one.said for one in words.found(Text("x.md", 1, said))]


@pytest.mark.parametrize(
    "said", ["What is a release?", "Its own stream.", "What else?", "It renews a shallow goal on Monday.", "All of it."]
)
def test_plain_english_is_no_habit(said: str) -> None:
    assert not [*words.found(Text("x.md", 1, said))]


def test_texts_are_found_where_they_stand() -> None:
    source = '''"""First line.

Second paragraph
goes over lines.

Parameters
----------
rate : float
    What it is.
"""
x = 1  # a comment
# over
# lines
raise ValueError(f"no {x} is like another")
'''
    found = dict(words._of_python(source))
    assert [" ".join(text.split()) for text in found.values()] == [
        "a comment", "over lines", "First line.", "Second paragraph goes over lines.", "Parameters ----------"
        " rate : float", "What it is.", "no … is like another",
    ]  # fmt: skip
    assert [*found] == [11, 12, 1, 3, 6, 9, 14]
    page = "# What it is\n\nA `nobody` of\nits own.\n\n```bash\nshall\n```\n- what\n  else\n- more\n"
    assert [*words._of_page(page)] == [(3, " A … of its own."), (9, " - what else"), (11, " - more")]


def test_a_sentence_of_31_words_is_long() -> None:
    assert not [*words.long_sentences(Text("x.md", 1, "so " * 29 + "so. So it is."))]
    assert [*words.long_sentences(Text("x.md", 1, "so " * 30 + "so. So it is."))]
