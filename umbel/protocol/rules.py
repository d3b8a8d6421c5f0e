"""Settings: each defined once, with default, rule and help, and checked by pydantic.

A subclass of `Settings` is the definition; error texts, the tables in the docs and the comments in pyproject.toml all
come from it.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from umbel.protocol.errors import UmbelError
from umbel.protocol.words import did_you_mean

T = TypeVar("T")

_LONGEST = 200  # characters of a value in an error
# Beginnings of pydantic's error types, in our words.
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
}


class Settings(BaseModel):
    """Base of all settings: immutable, with names in kebab-case outside; unknown entries are refused.

    A subclass says in `error` which class it raises, and in `source` where its entries come from.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=lambda name: key_of(name),
        populate_by_name=True,
        strict=True,
        validate_default=False,
    )
    error: ClassVar[type[UmbelError]]
    source: ClassVar[str]
    listed: ClassVar[str] = ""

    def __init__(self, /, **entries: Any) -> None:
        try:
            super().__init__(**entries)
        except ValidationError as error:
            raise self._explain(error) from None

    @classmethod
    def parse(cls, entries: Mapping[str, Any], source: str = "") -> Self:
        """Check entries with kebab-case names and return the settings.

        The first invalid entry raises `error`, which names the `source`, the entry and the fix.
        """
        entries = cls.current(entries)
        try:
            # Only code uses the fields' own names, with underscores.
            if strange := entries.keys() - cls.names():
                raise cls._unknown(list(strange))
            return cls(**entries)
        except cls.error as error:
            raise cls.error.of(error, f"{source}: " if source else "") from None

    @classmethod
    def current(cls, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return entries with hyphens in their names; a setting that is there both ways stays twice and is refused."""
        found: dict[str, Any] = {}
        for name, value in entries.items():
            kebab = key_of(name)
            if name not in cls.names() and kebab in cls.names() and kebab not in entries:
                name = kebab
            found[name] = value
        return found

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        """Return the result of `parse`, cached: each message of a run has the same entries."""
        return once(cls.parse, entries)

    @classmethod
    def _explain(cls, error: ValidationError) -> UmbelError:
        """Return an error for the first invalid entry; unknown entries come before all others."""
        strange = [str(one["loc"][0]) for one in error.errors() if one["type"] == "extra_forbidden"]
        if strange:
            return cls._unknown(strange)
        return explained(error, cls.error, cls.model_fields, cls.source)

    @classmethod
    def _unknown(cls, names: list[str]) -> UmbelError:
        known = cls.names()
        told = []
        for name in sorted(names):
            other = f"; {cls.listed} lists what there is" if cls.listed else ""
            told.append(f"there is no {name}{did_you_mean(name, known) or other}")
        return cls.error(f"{cls.source}: {'; '.join(told)}", code=f"{cls.error.kind}.unknown-key")

    @classmethod
    @cache
    def names(cls) -> tuple[str, ...]:
        """Return the names of all settings, in order."""
        return tuple(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def table(cls) -> list[tuple[str, str, str, str]]:
        """Return a row for each setting: name, default, rule, help."""
        return [
            (field.alias or name, shown(field.default), rule(field), field.description or "")
            for name, field in cls.model_fields.items()
        ]


def once(check: Callable[[dict[str, Any]], T], entries: Mapping[str, Any]) -> T:
    """Return what `check` makes of some entries, cached."""
    # The key includes types: 1, 1.0 and true are equal in Python but differ as settings.
    key = tuple(zip(entries, map(type, entries.values()), entries.values(), strict=True))
    try:
        made: T = _made(check, key)
    except TypeError:  # an unhashable value, which no setting accepts
        return check(dict(entries))
    return made


@lru_cache(maxsize=32)
def _made(check: Callable[[dict[str, Any]], Any], entries: tuple[tuple[str, type, Any], ...]) -> Any:
    return check({name: value for name, _, value in entries})


def explained(
    error: ValidationError, raises: type[UmbelError], fields: Mapping[str, FieldInfo], source: str = ""
) -> UmbelError:
    """Return an error for the first invalid value of some fields, in our words."""
    kind, first = raises.kind, error.errors(include_url=False)[0]
    if not first["loc"]:
        # The message of the class's own validator is complete.
        return raises(str(first["ctx"]["error"]) if "ctx" in first else first["msg"], code=f"{kind}.conflict")
    # By its place among arguments, its name, or its name with hyphens.
    name = first["loc"][0]
    name = list(fields)[name] if isinstance(name, int) else name.replace("-", "_")
    key = key_of(name)
    if first["type"] == "missing":
        return raises(f"{source} lacks {key}", code=f"{kind}.missing-key")
    if first["type"] == "value_error":
        return raises(f"{key}: {first['ctx']['error']}", code=f"{kind}.wrong-value")
    if name not in fields:
        return raises(f"there is no {key}", code=f"{kind}.unknown-key")
    if len(first["loc"]) > 1:
        text = f"{'.'.join(map(str, (key, *first['loc'][1:])))} {fault_text(first)}"
    else:
        text = f"{key} must be {rule(fields[name])}"
    return raises(f"{text}, got {_shortly(first['input'])}", code=f"{kind}.wrong-value")


def fields_of(kind: Any) -> dict[str, FieldInfo]:
    """Return the fields of one of pydantic's dataclasses."""
    known: dict[str, FieldInfo] = kind.__pydantic_fields__
    return known


def raising(error: type[UmbelError]) -> Callable[[type[T]], type[T]]:
    """Return a decorator of pydantic's dataclasses: one with an invalid field raises `error`, in our words."""

    def decorate(kind: Any) -> Any:
        make = kind.__init__

        def init(self: Any, *values: Any, **named: Any) -> None:
            try:
                make(self, *values, **named)
            except ValidationError as fault:
                raise explained(fault, error, fields_of(kind)) from None

        kind.__init__ = init
        return kind

    return decorate


def _shortly(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def rule(field: FieldInfo) -> str:
    """Return the values that a setting accepts, in words, as in "a whole number of at least 1"."""
    kind = field.annotation
    options = _options(kind)
    if options:
        return f"one of {', '.join(options)}"
    inner = _inner(kind)
    if is_dataclass(inner):
        parts = get_type_hints(inner, include_extras=True)
        rules = {entry.name: rule(FieldInfo.from_annotation(parts[entry.name])) for entry in fields(inner)}
        return "; ".join(f"{key_of(name)}: {text}" for name, text in rules.items())
    if inner is bool:
        return "true or false"
    if inner in (int, float):
        infinite = field.metadata and any(getattr(one, "allow_inf_nan", None) for one in field.metadata)
        noun = "a whole number" if inner is int else "a number" if infinite else "a finite number"
        low, high = "", ""
        for one in field.metadata:
            if isinstance(one, Gt):
                low = f"above {_plain(one.gt)}"
            elif isinstance(one, Ge):
                low = f"of at least {_plain(one.ge)}"
            elif isinstance(one, Le):
                high = f"at most {_plain(one.le)}"
            elif isinstance(one, Lt):
                high = f"below {_plain(one.lt)}"
        return " ".join(filter(None, (noun, low))) + (f", {high}" if low and high else f" {high}" if high else "")
    if get_origin(inner) in (list, tuple, dict):
        return "an object" if get_origin(inner) is dict else "a list"
    longest = [f" of at most {one.max_length} characters" for one in field.metadata if isinstance(one, MaxLen)]
    return "".join(["text", *longest])


def _plain(value: Any) -> str:
    return f"{value}" if isinstance(value, int) else f"{value:g}"


def fault_text(fault: Any) -> str:
    """Return pydantic's fault in our words."""
    bounds = {
        "greater_than": "above {gt:g}",
        "greater_than_equal": "at least {ge:g}",
        "less_than": "below {lt:g}",
        "less_than_equal": "at most {le:g}",
    }
    if fault["type"] in bounds:
        return "must be " + bounds[fault["type"]].format(**fault["ctx"])
    if fault["type"] in ("enum", "literal_error"):
        return f"must be {fault['ctx']['expected']}"
    for kind, words in _KINDS.items():
        if fault["type"].startswith(kind):
            return f"must be {words}"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    return str(fault["msg"])


def key_of(name: str) -> str:
    """Return a field's name as people write it."""
    return name.replace("_", "-")


def shown(value: Any) -> str:
    """Return a value in TOML's notation."""
    if value is None:
        return '""'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) or is_dataclass(value):
        return f'"{value}"'
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return repr(value)


def _inner(kind: Any) -> Any:
    """Return the type in ``T | None``, or the type itself."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(one for one in get_args(kind) if one is not type(None))
    return kind


def _options(kind: Any) -> tuple[str, ...]:
    kind = _inner(kind)
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return tuple(kind) if isinstance(kind, type) and issubclass(kind, StrEnum) else ()
