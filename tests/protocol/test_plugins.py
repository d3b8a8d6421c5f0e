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


def test_an_object_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert import_by_name("umbel.protocol.tasks:TrainingSpec") is TrainingSpec
    assert import_by_name("os.path:join").__name__ == "join"
    for name, missing in (
        ("garden.roses:Factory", "'garden'"), ("os.roses:Factory", "'os.roses'"), ("umbel.protocol:Roses", "'Roses'"),
        ("umbel.protocol", "''"), (".roses:Factory", "'.roses'"), ("", "''"),
    ):  # fmt: skip
        with raises(ConfigError, "config.import", missing, repr(name)):
            import_by_name(name)
    monkeypatch.setitem(sys.modules, "timm", None)
    with raises(ConfigError, "config.import", "pip install 'timm>=1'"):
        import_by_name("timm:create_model")
    ends_python = write_module(tmp_path, monkeypatch, "raise SystemExit(0)")
    with raises(ConfigError, "config.import", ends_python, "__main__"):
        import_by_name(f"{ends_python}:network")


# --- options


def test_pairs_are_read_in_order_and_what_is_none_is_told_with_its_key() -> None:
    assert parse_pairs("  b=1   a=x=y\tc= ", "key") == {"b": "1", "a": "x=y", "c": ""}
    assert parse_pairs("", "key") == {}
    for text in ("a", "=1", "a=1 b", "a=1 a=2", "a = 1"):
        with raises(ConfigError, "config.option-pairs", "strategy", repr(text)):
            parse_pairs(text, "strategy")


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


def test_values_are_read_as_the_type_of_their_field_and_without_text_are_its_default() -> None:
    assert parse_options(Options, "", "key") == Options(max_height=1.5)
    assert parse_options(Nothing, "", "key") == Nothing()
    assert parse_options(Required, "petals=3", "strategy").petals == 3
    text = "petals=7 max-height=2 thorns=false name=May colour=white kind=wild path=/x/y"
    read = parse_options(Options, text, "key")
    assert read == Options(7, 2.0, False, "May", Colour.WHITE, "wild", Path("/x/y"))
    assert (type(read.max_height), type(read.colour)) == (float, Colour)
    assert parse_options(Options, "max_height=3", "key").max_height == 3, "as the field is written"


class Plain:
    share: float = 0.5


class Derived(Nothing):
    share: float = 0.5


@pytest.mark.parametrize(
    ("kind", "text", "code", "part"),
    [
        *((kind, text, "options-class", kind.__name__)
          for kind in (Plain, Derived, dict) for text in ("", "share=0.3")),
        *((Options, text, "option-value", text.partition("=")[0].replace("-", "_")) for text in (
            "petals=4", "petals=100", "petals=5.5", "petals=", "max-height=0", "max-height=tall", "thorns=some",
            "colour=blue", "kind=climbing",
        )),
        (Options, "petal=7", "unknown-option", "petals?"),
        (Options, "max-heigth=7", "unknown-option", "max_height?"),
        (Options, "zzz=7", "unknown-option", "petals, max_height, thorns"),
        (Nothing, "zzz=7", "unknown-option", ""),
        (Required, "", "missing-option", "petals"),
        (Options, "petals=6 petals=7", "option-pairs", ""),
        (Options, "max-height=1 max_height=2", "option-pairs", ""),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_used_is_named(kind: type, text: str, code: str, part: str) -> None:
    with raises(ConfigError, f"config.{code}", "strategy", part):
        parse_options(kind, text, "strategy")


def test_a_users_module_is_found_before_an_installed_one_of_its_name(
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
