"""The report: numbers, honest words, and a picture."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from umbel.research.attacks.reconstruct import DLG, LAST_BIAS, RANK_ONE, Attempt, Audit, Secret, Setting
from umbel.research.attacks.reconstruction_report import COLUMNS, notes, rows_of, write

rng = np.random.default_rng(0)
ORIGINALS = rng.random((2, 28, 28))
# 20 dB or more counts as full; a tenth off everywhere is 20 dB, half of that 26.
CLOSE, GREY = ORIGINALS + 0.05, np.full((2, 28, 28), 0.5)
NEGATIVE = 1 - ORIGINALS


def audit(*attempts: Attempt) -> Audit:
    nus = tuple(dict.fromkeys(one.noise_multiplier for one in attempts))
    return Audit(Setting("made-up", "cnn10", nus), Secret(ORIGINALS, np.array([3, 7]), GREY[0]), attempts)


TYPICAL = audit(
    Attempt(0.0, DLG, CLOSE, (3, 7), 1.25),
    Attempt(0.0, RANK_ONE, CLOSE, (3, 7), 0.5),
    Attempt(0.0, LAST_BIAS, None, (3, 7)),
    Attempt(3.0, DLG, NEGATIVE, (3, 0), 1.0),
    Attempt(3.0, RANK_ONE, CLOSE, (0, 0), 0.5),
    Attempt(3.0, LAST_BIAS, None, (0, 0)),
)


def test_rows_are_the_baseline_and_then_every_attempt() -> None:
    baseline, *rows = rows_of(TYPICAL)
    assert (baseline.attack, baseline.noise_multiplier, baseline.label) == ("mean image", None, None)
    assert baseline.cells()[-3:] == ["0", "0", "2"]
    assert rows[0].cells() == ["0", "DLG", "26.0", rows[0].cells()[3], "1.00", "1.00", "2", "0", "0"]
    assert rows[2].cells() == ["0", "last bias", "", "", "", "1.00", "", "", ""]
    assert rows[3].cells()[4:] == ["-1.00", "0.50", "0", "0", "2"]
    assert all(len(row.cells()) == len(COLUMNS) for row in rows)


def test_the_words_say_where_the_adaptive_attack_goes_further() -> None:
    words = " ".join(notes(rows_of(TYPICAL)))
    assert "further than plain DLG at ν = 3 (2 of 2 images in full or in part against 0, 26.0 dB against" in words
    assert "At ν = 3 DLG shows no more than the mean image does, and the rank-one attack does" in words
    assert "at ν = 3, the attack 'DLG' still reads 1 of 2 labels rightly" in words


def test_the_words_never_take_a_failure_for_safety() -> None:
    failed = audit(Attempt(5.0, DLG, NEGATIVE, (0, 0)), Attempt(5.0, RANK_ONE, NEGATIVE, (0, 0)))
    words = " ".join(notes(rows_of(failed)))
    assert "An attack that fails proves nothing" in words
    assert "The mean image of other clients, which needs no release, is partial for 0 of 2" in words
    assert "further" not in words
    for word in ("safe", "secure", "protect", "private"):
        assert word not in words.lower()


def test_dlg_that_fails_without_noise_is_no_witness() -> None:
    words = " ".join(notes(rows_of(audit(Attempt(0.0, DLG, NEGATIVE, (0, 0))))))
    assert "DLG fails here without any noise" in words
    assert "DLG fails here" not in " ".join(notes(rows_of(TYPICAL)))


def test_an_attack_that_cannot_be_made_is_not_one_that_failed() -> None:
    rows = rows_of(audit(Attempt(1.0, RANK_ONE, obstacle="model 'm' has no fully connected layer")))
    assert rows[1].cells()[:3] == ["1", "rank one", "not applicable"]
    assert rows[1].cells()[-3:] == ["", "", ""]
    assert "rank one: model 'm' has no fully connected layer." in notes(rows)


def test_what_is_written_is_the_same_each_time(tmp_path: Path) -> None:
    written = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, TYPICAL, rows_of(TYPICAL))
        written.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert written[0] == written[1]
    assert set(written[0]) == {"table.csv", "table.md", "reconstructions.svg", "reconstructions.png"}
    assert written[0]["reconstructions.png"].startswith(b"\x89PNG")
    for text in (b"original", b"mean image", b"DLG", b"rank one", "ν = 3".encode()):
        assert text in written[0]["reconstructions.svg"]


def test_the_files_hold_the_table_and_the_words(tmp_path: Path) -> None:
    rows = rows_of(TYPICAL)
    write(tmp_path, TYPICAL, rows)
    page = (tmp_path / "table.md").read_text()
    assert page.startswith("# Reconstruction from one step on one image: made-up, cnn10, 8 images")
    assert all(note in page for note in notes(rows))
    with (tmp_path / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["attack"] for row in table] == ["mean image", *["DLG", "rank one", "last bias"] * 2]
    assert float(table[1]["PSNR"]) == pytest.approx(-20 * np.log10(0.05), rel=1e-5)
    assert (table[4]["noise multiplier"], table[4]["label"], table[4]["none"]) == ("3", "0.5", "2")
