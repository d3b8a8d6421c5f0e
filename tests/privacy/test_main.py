"""``python -m privacy`` as a user types it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from typer.testing import CliRunner

from privacy.__main__ import app
from privacy.ledger import Charge, Ledger
from protocol.release import Kind, RadiusMode, Release

PLAN = "plan --parameters 11 --noise-multiplier 3 --hypotheses 5 --clients 2062 --clients-per-round 100 --rounds 100"


def run(command: str, *more: str) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command.split(), *more])
    return done.exit_code, done.output


def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path)
    for _ in range(11):
        Ledger(path).charge(Charge("7", 1, Release(Kind.TRAIN, 11, 3.0, RadiusMode.PUBLIC, 0.5)), [0])
    Ledger(path).charge(Charge("7", 1, Release(Kind.TRAIN, 11, 3.0, RadiusMode.UPDATE)), [1])
    return path


def test_plan_prints_cost_spend_and_guarantees() -> None:
    code, output = run(PLAN)
    assert code == 0
    for line in ("3.667", "median 5, most 14", "heuristic", "no guarantee", "formal", "step size x curvature"):
        assert line in output


def test_plan_warns_in_words_for_a_large_model() -> None:
    code, output = run(PLAN.replace("--parameters 11", "--parameters 1206590"))
    assert code == 0
    assert "proves nothing" in output


def test_plan_names_a_figure_that_cannot_be() -> None:
    code, output = run(PLAN.replace("--noise-multiplier 3", "--noise-multiplier 0"))
    assert code == 1
    assert "Error: noise-multiplier must be a finite number above 0" in output


def test_show_never_adds_up_heuristic_and_formal(tmp_path: Path) -> None:
    """Client 0 has eleven participations with a public radius, client 1 one without."""
    code, output = run("ledger show", str(ledger(tmp_path)))
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    assert rows[0][:4] == ["0", "11", "0", "40.33"]
    assert abs(float(rows[0][4]) - 19.9) < 0.05
    assert float(rows[0][5]) > float(rows[0][4]), "two radii apart costs more than one"
    assert rows[1] == ["1", "1", "3.667", "0", "0", "0"]


def test_export_writes_every_charge_as_csv(tmp_path: Path) -> None:
    code, output = run("ledger export", str(ledger(tmp_path)))
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(output)))
    assert len(rows) == 12
    assert [rows[0][key] for key in ("n", "noise_multiplier", "radius")] == ["11", "3.0", "0.5"]
    assert rows[-1]["radius"] == ""


def test_check_says_whether_the_file_is_whole(tmp_path: Path) -> None:
    path = ledger(tmp_path)
    assert run("ledger check", str(path)) == (0, f"{path} is a whole ledger with 12 charges\n")
    path.write_bytes(b"not a ledger")
    code, output = run("ledger check", str(path))
    assert code == 1
    assert "is not umbel's ledger" in output


def test_create_makes_an_empty_ledger_once(tmp_path: Path) -> None:
    path = tmp_path / "new.sqlite"
    assert run("ledger create", str(path)) == (0, f"{path} is a new, empty ledger\n")
    assert run("ledger check", str(path)) == (0, f"{path} is a whole ledger with 0 charges\n")
    code, output = run("ledger create", str(path))
    assert code == 1
    assert "is there already" in output


def test_a_ledger_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    code, output = run("ledger check", str(tmp_path / "none.sqlite"))
    assert code == 1
    assert f"there is no ledger {tmp_path / 'none.sqlite'}" in output
    assert list(tmp_path.iterdir()) == [] or not (tmp_path / "none.sqlite").exists()
