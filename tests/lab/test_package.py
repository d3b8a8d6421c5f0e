"""The lab is a package of its own: umbel works without it, and a site need not review it."""

from __future__ import annotations

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
