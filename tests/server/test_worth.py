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
from umbel.server.worth import FILE, LABELS, STAYS, Arm, Score, Worth


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_worth() is None
    folder.write_worth(WORTH)
    assert folder.read_worth() == WORTH
    folder.write_worth(None)
    folder.write_worth(None)
    assert not (tmp_path / FILE).exists()


def test_the_sentence_comes_first_then_the_table_and_what_was_tried() -> None:
    assert replace(WORTH, advice="Tried, and better: nothing").lines() == [
        "Worth it? Diverged.",
        "RMSE (dollars) of 12 validation clients, on held-out rows; lower is better:",
        "                           mean  worst tenth",
        "  the best constant       1,392        3,934",
        "  this run           not finite   not finite",
        "  left out: each client alone, since its network is too large for so many rows",
        "Tried, and better: nothing",
        STAYS,
    ]
    assert replace(WORTH, arms=[]).lines() == ["Worth it? Diverged."]


def test_scores_of_classes_are_further_columns_that_fit_the_screen_and_the_report_shows_remarks() -> None:
    scores = [Score("balanced accuracy", 0.5, 0.0), Score("AUC", 0.7, 0.0312), Score("log loss", 0.2, None)]
    arms = [Arm(way, LABELS[way], 0.9512, 0.9512, "how it was made", scores) for way in LABELS]
    worth = replace(WORTH, arms=arms, metric="accuracy", unit="", left_out=[])
    table = worth.lines()[1:-1]
    assert table[1].split("  ")[-1] == "log loss"
    assert table[2].endswith("0.500 ± 0.000  0.700 ± 0.031     0.200")
    assert max(map(len, table)) <= 100
    page = report(worth=worth)
    assert page.text.count("0.700 ± 0.031") == page.text.count("how it was made") == len(arms)
    assert Worth.read(worth.content) == worth


def test_the_worth_of_a_run_before_scores_is_readable() -> None:
    old = json.loads(WORTH.content)
    del old["advice"]
    for arm in old["arms"]:
        del arm["scores"]
    assert Worth.read(json.dumps(old)) == WORTH


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "\x00\xff",
        "{" * 5000,
        '{"verdict": "wonderful"}',
        WORTH.content.replace('"version": 1', '"version": 2'),
        WORTH.content.replace("1391.9", "NaN"),
        WORTH.content.replace("1391.9", "1e999"),
        WORTH.content.replace('"rounds": 4', '"rounds": "four"'),
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


def test_a_folder_in_its_place_is_no_file(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with raises(ConfigError, "config.worth", FILE):
        RunFolder(tmp_path).read_worth()


def test_words_in_it_are_shown_as_words() -> None:
    bold = "<script>alert(1)</script>"
    page = report(worth=replace(WORTH, verdict=bold, arms=[replace(WORTH.arms[0], label=bold, remark=bold)], unit=bold))
    assert "<script>" not in page.html
    assert page.text.count(bold) == 5
    assert page.text.index("Was it worth it?") < page.text.index("Privacy, between any two data sets"), "it comes first"
