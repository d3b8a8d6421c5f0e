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


def test_entries_go_by_their_names_outside_also_with_underscores() -> None:
    garden = Garden.parse({"name": "mine", "min-roses": 4, "unit": "layer"})
    assert (garden.min_roses, garden.height, garden.unit) == (4, 1.5, NoisePer.LAYER)
    assert garden == Garden(name="mine", min_roses=4, unit=NoisePer.LAYER)
    assert Garden.parse({"name": "mine", "min_roses": 4}).min_roses == 4
    assert Garden.current({"min_roses": 4}) == {"min-roses": 4}
    with pytest.raises(ValidationError, match="frozen"):
        garden.min_roses = 5  # type: ignore[misc]


def test_what_is_asked_again_is_not_parsed_again_unless_it_cannot_be_looked_up() -> None:
    assert Garden.of({"name": "mine", "min-roses": 4}) is Garden.of({"name": "mine", "min-roses": 4})
    for key, value, others in (("open", True, (1, 1.0)), ("min-roses", 1, (True, 1.0))):
        assert getattr(Garden.of({"name": "mine", key: value}), key.replace("-", "_")) is value
        for wrong in others:  # to Python these are equal
            with raises(SiteError, "site.wrong-value", key):
                Garden.of({"name": "mine", key: wrong})
    assert Garden.of({"name": "mine", "paths": ["a"]}).paths == ["a"]
    with raises(SiteError, "site.wrong-value", "['mine']"):
        Garden.of({"name": ["mine"]})


# --- what is refused


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("min-roses", (0, 10, 4.0, True, "4")), ("height", (0.0, math.inf)), ("budget", (-1.0,)), ("share", (1.0,)),
        ("open", ("yes", 1)), ("kind", ("wild",)), ("unit", ("wild",)), ("name", (3,)), ("paths", ("a",)),
        ("paths.1", (["a", 3],)), ("beds", ([],)), ("beds.b", ({"a": 1, "b": 2.0},)), ("fence", ("high",)),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_told_with_its_rule(key: str, values: tuple[Any, ...]) -> None:
    name = key.partition(".")[0]
    told = rule(Garden.model_fields[name.replace("-", "_")]) if name == key else ""
    for value in values:
        with raises(SiteError, "site.wrong-value", f"{key} must be {told}"):
            Garden.parse({"name": "mine", name: value})


def test_what_does_not_fit_together_is_a_conflict_and_a_name_that_nobody_knows_is_told_before_all_else() -> None:
    with raises(SiteError, "site.conflict"):
        Garden.parse({"name": "mine", "min-roses": 6, "kind": "kitchen"})
    for entries, told in (
        ({"min-rose": 4}, ["min-roses?"]), ({"zzz": 4, "hight": 2, "min-roses": 0}, ["hight", "height?", "zzz"]),
        ({"self": 4}, ["self"]), ({"error": 4}, ["error"]), ({"min_roses": 4, "min-roses": 4}, ["min_roses"]),
    ):  # fmt: skip
        with raises(SiteError, "site.unknown-key", *told):
            Garden.parse({"name": "mine"} | entries)


def test_what_is_missing_is_named_and_each_class_raises_its_own_error() -> None:
    """The file is put before the text, and rules hold also where settings are made in code."""
    with raises(SiteError, "site.missing-key", "/etc/garden.toml: the garden lacks name"):
        Garden.parse({}, "/etc/garden.toml")
    with raises(SiteError, "site.wrong-value", "min-roses"):
        Garden(name="mine", min_roses=0)

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
    values: list[Any] = [True, 3, 0.1, math.inf, "a b", NoisePer.ROW]
    assert [shown(value) for value in values] == ["true", "3", "0.1", "inf", '"a b"', '"row"'], "as in TOML"
