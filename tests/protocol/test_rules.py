"""A setting is defined once; its errors, its row in a table and its rule in words come from that."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

import pytest
from pydantic import Field, ValidationError, model_validator

from tests.helpers.errors import raises
from umbel.protocol.errors import ConfigError, SiteError, UmbelError
from umbel.protocol.release import NoisePer
from umbel.protocol.rules import Settings, rule, shown


class Garden(Settings):
    """Settings of every kind."""

    error = SiteError
    source: ClassVar[str] = "the garden"

    name: str = Field(description="what it is called")
    min_roses: int = Field(3, ge=1, le=9, description="how many roses")
    height: float = Field(1.5, gt=0, allow_inf_nan=False)
    budget: Annotated[float, Field(allow_inf_nan=True)] = Field(math.inf, ge=0)
    share: float = Field(0.5, lt=1, allow_inf_nan=False)
    open: bool = True
    kind: Literal["kitchen", "rose"] = "rose"
    unit: Annotated[NoisePer, Field(strict=False)] = NoisePer.ROW
    paths: list[str] = Field(default_factory=list)
    beds: dict[str, int] = Field(default_factory=dict)
    fence: int | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_roses > 5 and self.kind == "kitchen":
            raise ValueError("min-roses > 5 goes with a rose garden alone")
        return self


# --- what is read


def test_entries_go_by_their_names_outside() -> None:
    garden = Garden.parse({"name": "mine", "min-roses": 4, "unit": "layer"})
    assert (garden.min_roses, garden.height, garden.unit) == (4, 1.5, NoisePer.LAYER)
    assert garden == Garden(name="mine", min_roses=4, unit=NoisePer.LAYER)


def test_underscores_in_a_name_do_as_well_but_not_beside_it() -> None:
    assert Garden.parse({"name": "mine", "min_roses": 4}).min_roses == 4
    assert Garden.current({"min_roses": 4}) == {"min-roses": 4}
    with raises(SiteError, "site.unknown-key", "min_roses", "min-roses"):
        Garden.parse({"name": "mine", "min_roses": 4, "min-roses": 4})


def test_what_is_asked_again_is_not_parsed_again() -> None:
    assert Garden.of({"name": "mine", "min-roses": 4}) is Garden.of({"name": "mine", "min-roses": 4})
    assert Garden.of({"name": "mine", "open": True}).open is True
    for wrong in (1, 1.0):
        with raises(SiteError, "site.wrong-value", "open"):
            Garden.of({"name": "mine", "open": wrong})
    assert Garden.of({"name": "mine", "min-roses": 1}).min_roses == 1
    for wrong in (True, 1.0):
        with raises(SiteError, "site.wrong-value", "min-roses"):
            Garden.of({"name": "mine", "min-roses": wrong})


def test_what_cannot_be_looked_up_is_parsed_each_time() -> None:
    assert Garden.of({"name": "mine", "paths": ["a"]}).paths == ["a"]
    with raises(SiteError, "site.wrong-value", "['mine']"):
        Garden.of({"name": ["mine"]})


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Garden(name="mine").min_roses = 4  # type: ignore[misc]


# --- what is refused


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"min-roses": 0}, "min-roses must be a whole number of at least 1, at most 9, got 0"),
        ({"min-roses": 10}, "min-roses must be a whole number of at least 1, at most 9, got 10"),
        ({"min-roses": 4.0}, "min-roses must be a whole number of at least 1, at most 9, got 4.0"),
        ({"min-roses": True}, "min-roses must be a whole number of at least 1, at most 9, got True"),
        ({"min-roses": "4"}, "min-roses must be a whole number of at least 1, at most 9, got '4'"),
        ({"height": 0.0}, "height must be a finite number above 0, got 0.0"),
        ({"height": math.inf}, "height must be a finite number above 0, got inf"),
        ({"budget": -1.0}, "budget must be a number of at least 0, got -1.0"),
        ({"share": 1.0}, "share must be a finite number below 1, got 1.0"),
        ({"open": "yes"}, "open must be true or false, got 'yes'"),
        ({"open": 1}, "open must be true or false, got 1"),
        ({"kind": "wild"}, "kind must be one of kitchen, rose, got 'wild'"),
        ({"unit": "wild"}, "unit must be one of vector, layer, row, got 'wild'"),
        ({"name": 3}, "name must be text, got 3"),
        ({"paths": "a"}, "paths must be a list, got 'a'"),
        ({"beds": []}, "beds must be an object, got []"),
        ({"beds": {"a": 1, "b": 2.0}}, "beds.b must be a whole number, got 2.0"),
        ({"paths": ["a", 3]}, "paths.1 must be text, got 3"),
        ({"fence": "high"}, "fence must be a whole number, got 'high'"),
        ({"min-roses": 6, "kind": "kitchen"}, "min-roses > 5 goes with a rose garden alone"),
    ],
)
def test_a_value_that_cannot_be_is_told_with_its_rule(entries: dict[str, Any], told: str) -> None:
    code = "wrong-value" if " must be " in told else "conflict"
    with raises(SiteError, f"site.{code}", told):
        Garden.parse({"name": "mine"} | entries)


def test_the_same_holds_when_settings_are_made_in_code() -> None:
    with raises(SiteError, "site.wrong-value", "min-roses"):
        Garden(name="mine", min_roses=0)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"min-rose": 4}, "there is no min-rose; did you mean min-roses?"),
        ({"zzz": 4}, "there is no zzz"),
        ({"zzz": 4, "hight": 2, "min-roses": 0}, "there is no hight; did you mean height?; there is no zzz"),
        ({"self": 4}, "there is no self"),
        ({"min_roses": 4, "min-roses": 4}, "there is no min_roses; did you mean min-roses?"),
        ({"error": 4}, "there is no error"),
    ],
)
def test_an_entry_that_nobody_knows_is_told_before_all_else(entries: dict[str, Any], told: str) -> None:
    with raises(SiteError, "site.unknown-key", f"the garden: {told}"):
        Garden.parse({"name": "mine"} | entries)


def test_what_is_missing_is_named_and_the_file_put_before_the_text() -> None:
    with raises(SiteError, "site.missing-key", "/etc/garden.toml: the garden lacks name"):
        Garden.parse({}, "/etc/garden.toml")


def test_each_class_raises_its_own_error() -> None:
    class Other(Settings):
        error: ClassVar[type[UmbelError]] = ConfigError
        source: ClassVar[str] = "the other"

    with raises(ConfigError, "config.unknown-key", "x"):
        Other.parse({"x": 1})


# --- in words


def test_a_table_has_a_row_for_each_setting_in_order() -> None:
    assert Garden.names() == tuple(row[0] for row in Garden.table())
    assert Garden.names()[:3] == ("name", "min-roses", "height")
    assert Garden.table()[1] == ("min-roses", "3", "a whole number of at least 1, at most 9", "how many roses")
    rules = {name: rule for name, _, rule, _ in Garden.table()}
    assert rules["height"] == "a finite number above 0"
    assert rules["budget"] == "a number of at least 0"
    assert rules["fence"] == rule(Garden.model_fields["fence"]) == "a whole number"


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (3, "3"), (0.1, "0.1"), (math.inf, "inf"), ("a b", '"a b"'), (NoisePer.ROW, '"row"')],
)
def test_values_are_shown_as_in_toml(value: Any, text: str) -> None:
    assert shown(value) == text
