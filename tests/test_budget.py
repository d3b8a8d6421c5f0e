"""Rooms are counted in lines and statements, and what is above its budget is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import budget


def test_lines_and_statements_are_counted(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "one.py").write_text('"""Says what."""\n\nif True:\n    a = 1; b = 2\n', encoding="utf-8")
    (tmp_path / "room" / "two.py").write_text("c = 3\n", encoding="utf-8")
    assert budget.size_of(tmp_path / "room") == (5, 5), "a docstring, if, two assignments; one more"
    assert budget.size_of(tmp_path / "room" / "two.py") == (1, 1)


def test_what_is_above_its_budget_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(budget, "ROOT", tmp_path)
    monkeypatch.setattr(budget, "settings", lambda: {"policy": 45, "commands": 36})
    (tmp_path / "long.py").write_text("a = 1\n" * 9, encoding="utf-8")
    (tmp_path / "dense.py").write_text("a = 1; b = 2; c = 3\n", encoding="utf-8")
    (tmp_path / "fits.py").write_text("a = 1\n", encoding="utf-8")
    rooms = {"long.py": [8, 9], "dense.py": [1, 2], "fits.py": [1, 1]}
    over = budget.exceeded({"settings": {"policy": 44, "commands": 36}, "rooms": rooms})
    assert over == ["policy", "long.py", "dense.py"]
    assert "9 of 8 lines" in capsys.readouterr().out


def test_two_rooms_are_tied_by_one_arrow_however_much_one_imports() -> None:
    assert budget.arrows(["umbel/protocol", "umbel/nodes", "umbel/sklearn.py"]) == 2, (
        "nodes and sklearn import protocol"
    )
