"""What a run was worth, as it is kept, read again and told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.errors import raises
from tests.helpers.reports import WORTH, report
from umbel.protocol.errors import ConfigError
from umbel.server.run_folder import RunFolder
from umbel.server.worth import FILE, LABELS, Arm, Score, Worth


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_worth() is None
    folder.write_worth(WORTH)
    assert folder.read_worth() == WORTH
    folder.write_worth(None)
    folder.write_worth(None)
    assert not (tmp_path / FILE).exists()
    old = json.loads(WORTH.content)  # before there were scores
    del old["advice"]
    for arm in old["arms"]:
        del arm["scores"]
    assert Worth.read(json.dumps(old)) == WORTH
    (tmp_path / FILE).mkdir()
    with raises(ConfigError, "config.worth", FILE):
        folder.read_worth()


def test_the_table_has_the_unit_of_the_target_and_says_what_was_left_out_and_tried() -> None:
    lines = replace(WORTH, advice="Tried, and better: nothing").lines()
    assert [line.split()[-2:] for line in lines[3:5]] == [["1,392", "3,934"], ["not", "finite"]]
    assert ("Diverged." in lines[0], "each client alone" in lines[5], "Tried" in lines[7]) == (True, True, True)
    assert replace(WORTH, arms=[]).lines() == lines[:1]


def test_scores_of_classes_are_further_columns_that_fit_the_screen_and_words_are_shown_as_words() -> None:
    scores = [Score("balanced accuracy", 0.5, 0.0), Score("AUC", 0.7, 0.0312), Score("log loss", 0.2, None)]
    bold = "<script>alert(1)</script>"
    arms = [Arm(way, LABELS[way], 0.9512, 0.9512, bold, scores) for way in LABELS]
    worth = replace(WORTH, arms=arms, metric="accuracy", unit="", left_out=[], verdict=bold)
    table = worth.lines()[1:-2]
    assert table[2].endswith("0.500 ± 0.000  0.700 ± 0.031     0.200")
    assert max(map(len, table)) <= 100
    page = report(worth=worth)
    assert "<script>" not in page.html
    assert page.text.count("0.700 ± 0.031") == page.text.count(bold) - 1 == len(arms)
    assert Worth.read(worth.content) == worth


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\x00\xff",
        "{" * 5000,
        WORTH.content.replace('"version": 1', '"version": 2'),
        WORTH.content.replace("1391.9", "NaN"),
        WORTH.content.replace("Diverged.", "\\u001b[2JDiverged."),
        WORTH.content.replace("Diverged.", "x" * 5001),
        json.dumps(json.loads(WORTH.content) | {"arms": json.loads(WORTH.content)["arms"] * 26}),
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_is_not_as_umbel_writes_it_is_told_and_nothing_of_it_is_used(content: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / FILE).write_bytes(content.encode("latin-1"))
    with raises(ConfigError, "config.worth", FILE):
        folder.read_worth()
