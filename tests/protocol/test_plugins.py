"""Code of one's own is found by its name, and its options are read as it declares them."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from tests.helpers.errors import raises
from tests.helpers.models import write_module
from umbel.protocol.errors import ConfigError
from umbel.protocol.options import parse_options, parse_pairs
from umbel.protocol.plugins import import_by_name, own_path
from umbel.protocol.project import OWN_PATH
from umbel.protocol.tasks import TrainingSpec

# --- by name


def test_an_object_is_found_by_its_name() -> None:
    assert import_by_name("umbel.protocol.tasks:TrainingSpec") is TrainingSpec
    assert import_by_name("os.path:join").__name__ == "join"


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("garden.roses:Factory", "'garden'"),
        ("os.roses:Factory", "'os.roses'"),
        ("umbel.protocol:Roses", "'Roses'"),
        ("umbel.protocol", "''"),
        (".roses:Factory", "'.roses'"),
        ("", "''"),
    ],
)
def test_the_missing_half_of_a_name_is_told(name: str, missing: str) -> None:
    with raises(ConfigError, "config.import", missing, repr(name)):
        import_by_name(name)


def test_a_library_that_umbel_knows_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with raises(ConfigError, "config.import", "pip install 'timm>=1'"):
        import_by_name("timm:create_model")


def test_a_script_that_ends_python_ends_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write_module(tmp_path, monkeypatch, "raise SystemExit(0)")
    with raises(ConfigError, "config.import", name, "__main__"):
        import_by_name(f"{name}:network")


# --- pairs


def test_pairs_are_read_in_order() -> None:
    assert parse_pairs("  b=1   a=x=y\tc= ", "key") == {"b": "1", "a": "x=y", "c": ""}
    assert parse_pairs("", "key") == {}


@pytest.mark.parametrize("text", ["a", "=1", "a=1 b", "a=1 a=2", "a = 1"])
def test_what_is_no_pair_is_told_with_its_key(text: str) -> None:
    with raises(ConfigError, "config.option-pairs", "strategy", repr(text)):
        parse_pairs(text, "strategy")


# --- options


class Colour(StrEnum):
    RED = "red"
    WHITE = "white"


@dataclass(frozen=True)
class Options:
    """What a rose of one's own declares."""

    petals: Annotated[int, Field(ge=5, lt=100)] = 5
    max_height: float = Field(1.5, gt=0)
    thorns: bool = True
    name: str = ""
    colour: Colour = Colour.RED
    kind: Literal["tea", "wild"] = "tea"
    path: Path = Path("/garden")


@dataclass
class Required:
    petals: int
    scent: list[float] = field(default_factory=list)


@dataclass
class Nothing:
    pass


def test_without_text_options_are_their_defaults() -> None:
    assert parse_options(Options, "", "key") == Options(max_height=1.5)
    assert parse_options(Nothing, "", "key") == Nothing()


class Plain:
    share: float = 0.5


class Derived(Nothing):
    share: float = 0.5


@pytest.mark.parametrize("kind", [Plain, Derived, dict])
@pytest.mark.parametrize("text", ["", "share=0.3"])
def test_options_that_are_no_dataclass_are_named(kind: type, text: str) -> None:
    with raises(ConfigError, "config.options-class", "strategy", kind.__name__, "@dataclass"):
        parse_options(kind, text, "strategy")


def test_values_are_read_as_the_type_of_their_field() -> None:
    text = "petals=7 max-height=2 thorns=false name=May colour=white kind=wild path=/x/y"
    read = parse_options(Options, text, "key")
    assert read == Options(7, 2.0, False, "May", Colour.WHITE, "wild", Path("/x/y"))
    assert (type(read.max_height), type(read.colour)) == (float, Colour)


def test_a_name_may_be_written_with_hyphens_or_as_the_field() -> None:
    for name in ("max-height", "max_height"):
        assert parse_options(Options, f"{name}=3", "key").max_height == 3


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("petals=4", "at least 5"),
        ("petals=100", "below 100"),
        ("max-height=0", "above 0"),
        ("petals=5.5", "whole"),
        ("petals=", "whole"),
        ("max-height=tall", "a number"),
        ("thorns=some", "true or false"),
        ("colour=blue", "'red' or 'white'"),
        ("kind=climbing", "'tea' or 'wild'"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(text: str, rule: str) -> None:
    name, _, value = text.partition("=")
    with raises(ConfigError, "config.option-value", "strategy", name.replace("-", "_"), rule, repr(value)):
        parse_options(Options, text, "strategy")


@pytest.mark.parametrize(
    ("text", "near"), [("petal=7", "petals?"), ("max-heigth=7", "max_height?"), ("zzz=7", "petals, max_height, thorns")]
)
def test_an_option_that_there_is_not_is_told_with_the_nearest(text: str, near: str) -> None:
    with raises(ConfigError, "config.unknown-option", "strategy", near):
        parse_options(Options, text, "strategy")
    with raises(ConfigError, "config.unknown-option", "there are none"):
        parse_options(Nothing, text, "key")


def test_an_option_that_is_missing_is_named() -> None:
    with raises(ConfigError, "config.missing-option", "strategy", "petals"):
        parse_options(Required, "", "strategy")
    assert parse_options(Required, "petals=3", "strategy").petals == 3


@pytest.mark.parametrize("text", ["petals=6 petals=7", "max-height=1 max_height=2"])
def test_an_option_is_given_once(text: str) -> None:
    with raises(ConfigError, "config.option-pairs", "strategy"):
        parse_options(Options, text, "strategy")


def test_a_users_module_is_found_before_an_installed_one_of_its_name_and_then_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("own", "installed"):
        (tmp_path / place).mkdir()
        for name in ("umbel_test_models", "umbel_test_library"):
            (tmp_path / place / f"{name}.py").write_text(f"net = {place!r}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), *sys.path])
    monkeypatch.setenv(OWN_PATH, str(tmp_path / "own"))
    assert import_by_name("umbel_test_models:net") == "own"
    assert importlib.import_module("umbel_test_library").net == "installed"
    assert own_path().split(os.pathsep)[:2] == [str(tmp_path / "own"), str(tmp_path / "installed")]


@pytest.mark.parametrize(
    ("where", "name"),
    [("", "umbel_test_garden:net"), ("", "umbel.protocol.tasks:TrainingSpec"), (":", "umbel_test_rose:net")],
)
def test_folders_of_the_user_are_not_searched_unless_the_user_names_a_module_in_them(
    where: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working folder may be one that somebody sent, with modules that libraries would import if they were there."""
    for file, text in (
        ("installed/umbel_test_garden.py", "net = 1"),
        ("installed/umbel_test_rose.py", "net = 1"),
        ("sent/umbel_test_rose.py", "raise RuntimeError('of the sender')"),
    ):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), *sys.path])
    monkeypatch.setenv(OWN_PATH, f"{where}{tmp_path / 'sent'}")
    import_by_name(name)
    assert str(tmp_path / "sent") not in sys.path
