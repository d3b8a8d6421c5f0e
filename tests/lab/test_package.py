"""The lab is a package of its own: umbel works without it, and a site need not review it."""

from __future__ import annotations

import math
import shutil
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.helpers.errors import ended, raises
from tests.helpers.sources import LAB, ROOT, files, packages_imported
from umbel.cli import main
from umbel.data import find
from umbel.protocol import plugins
from umbel.protocol.errors import ConfigError
from umbel.protocol.flower import build_bundle
from umbel_lab.commands import COMMANDS
from umbel_lab.output import COLOURS, MARKERS, average, cell, difference, figure, plus_minus, rate


def test_nothing_in_umbel_imports_it() -> None:
    assert not [file for file in files() if "umbel_lab" in packages_imported(file)]


def test_a_change_in_it_leaves_the_bundle_as_it_is(tmp_path: Path) -> None:
    for name in ("umbel", "lab"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    before = build_bundle(tmp_path)
    changed = tmp_path / LAB / "output.py"
    changed.write_text(f"{changed.read_text(encoding='utf-8')}# A comment.\n")
    assert build_bundle(tmp_path) == before == build_bundle(ROOT)


@pytest.mark.parametrize("name", COMMANDS)
def test_its_commands_stand_beside_umbels_or_a_hint_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name in main.LAB
    module, _, attribute = COMMANDS[name][0].partition(":")
    assert isinstance(getattr(import_module(module), attribute), typer.Typer)

    def told(*words: str) -> Any:
        return CliRunner().invoke(main.app, [*words, "--help"], prog_name="umbel")

    assert (told(name).exit_code, f"umbel {name}" in told(name).output) == (0, True)
    assert f"│ {name} " in told().output
    monkeypatch.setattr(main, "entry_points", lambda group: [])
    main.installed.cache_clear()
    hint = told(name)
    ended(hint.exit_code, hint.output, "config.not-installed", "pip install umbel-lab")
    assert f"│ {name} " not in told().output
    main.installed.cache_clear()


def test_its_recipes_stand_beside_umbels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find.recipes().keys() == {"qmnist", "femnist", "hospital", "movielens", "preferences", "synthetic"}
    monkeypatch.setattr(find, "entry_points", lambda group: [])
    find.recipes.cache_clear()
    hint = CliRunner().invoke(main.app, ["data", "make", "qmnist", "--help"], prog_name="umbel")
    ended(hint.exit_code, hint.output, "config.not-installed", "data make qmnist", "pip install umbel-lab")
    find.recipes.cache_clear()


@pytest.mark.parametrize("name", plugins.LAB)
def test_a_method_of_it_names_it_where_it_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [one for one in sys.modules if one.partition(".")[0] == "umbel_lab"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    monkeypatch.setattr(sys, "path", [one for one in sys.path if not (Path(one) / "umbel_lab").exists()])
    with raises(ConfigError, "config.import", "pip install umbel-lab"):
        plugins.import_by_name(plugins.LAB[name])


# --- numbers as text, and figures, of which the same is the same bytes


def test_numbers_as_text() -> None:
    assert average([1, 2, 3]) == (2.0, 1.0)
    assert average([5]) == (5.0, 0.0)
    assert all(math.isnan(value) for value in average([]))
    assert [plus_minus(values, 1) for values in ([1000, 1002], [5], [])] == ["1,001.0 ± 1.4", "5.0", "none"]
    assert [difference(*pair) for pair in ((110, 100), (75, 100), (1, 1))] == ["+10 %", "-25 %", "+0 %"]
    # (x + z^2/2 +- z sqrt(x (n - x) / n + z^2 / 4)) / (n + z^2) for x = 96, n = 100, z = 1.96: .9016 and .9843.
    assert rate(96, 100) == "96 of 100 (90 to 98 %)"
    assert [rate(*counts) for counts in ((0, 10), (10, 10), (0, 0))] == [
        "0 of 10 (0 to 28 %)", "10 of 10 (72 to 100 %)", "no runs",
    ]  # fmt: skip
    values: list[Any] = [None, 3, 0.02, 21333.3, "a"]
    assert [cell(value) for value in values] == ["", "3", "0.02", "21,333", "a"]


def test_the_same_figure_is_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        with figure(folder, "line", columns=2) as axes:
            assert axes.shape == (1, 2)
            axes[0, 0].plot([1, 2], [3, 4], color=COLOURS[0], marker=MARKERS[0], label="one")
            axes[0, 0].legend()
        files.append({file.name: file.read_bytes() for file in folder.iterdir()})
    first, second = files
    assert set(first) == {"line.svg", "line.png"}
    assert first == second
    assert first["line.png"].startswith(b"\x89PNG")
    assert b"<svg" in first["line.svg"]
