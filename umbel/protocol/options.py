"""Options inside a value: ``name=value name=value``, read into a dataclass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BeforeValidator, GetCoreSchemaHandler, TypeAdapter, ValidationError

from umbel.protocol.errors import ConfigError
from umbel.protocol.rules import fault_text, key_of
from umbel.protocol.words import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class NoOptions:
    """The options of code that has none."""


class Options:
    """Base of a setting's dataclass of options, frozen (`AS_TEXT`).

    Of a class with `FIRST` the text begins with the value of that option, without its name: ``public norm=2``.
    """

    FIRST: ClassVar[str] = ""

    def __str__(self) -> str:
        """Return the options as text."""
        values = {
            name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in vars(self).items()
        }
        first = [values.pop(self.FIRST)] if self.FIRST else []
        return " ".join(first + [f"{key_of(name)}={value}" for name, value in values.items()])

    @classmethod
    def read(cls, text: str, key: str) -> Self:
        """Return the options in a text; errors as for `parse_options`."""
        return parse_options(cls, f"{cls.FIRST}={text.strip()}" if cls.FIRST else text, key)


@dataclass(frozen=True)
class _AsText:
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        def read(value: Any) -> Any:
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                return value  # which is the options themselves, or refused
            if value in (math.inf, -math.inf):  # as a number too large for a machine is read: it was meant as a limit
                raise ValueError('write a number that this machine can hold, or the text "inf"')
            try:
                return source.read(str(value), "")
            except ConfigError as error:
                raise ValueError(error.text) from None

        return BeforeValidator(read).__get_pydantic_core_schema__(source, handler)


AS_TEXT = _AsText()
"""Marks a setting that is `Options`: it is read from text."""


def parse_pairs(text: str, key: str) -> dict[str, str]:
    """Return the pairs of ``name=value name=value``; `key` is named in errors."""
    pairs: dict[str, str] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not (name and equals) or name in pairs:
            raise ConfigError(
                f'{_of_key(key)}write "name=value ...", each once, got {text!r}', code="config.option-pairs"
            )
        pairs[name] = value
    return pairs


def parse_options(kind: type[T], text: str, key: str) -> T:
    """Parse ``name=value name=value`` into the dataclass of options that a user's code declares.

    A field's name may have hyphens. A value is read as the field's type.

    Parameters
    ----------
    kind : type
        A dataclass; ``pydantic.Field`` annotations set bounds. A class that only derives from one lacks its own fields.
    key : str
        The setting that `text` belongs to, for errors.

    Raises
    ------
    ConfigError
        If an option is unknown or missing, or a value does not fit; also if `kind` is not a dataclass.
    """
    return options_of(kind, parse_pairs(text, key), key)


def options_of(kind: type[T], given: Mapping[str, str], key: str) -> T:
    """Return the options in pairs of names and texts; see `parse_options`."""
    of_key = _of_key(key)
    if "__dataclass_fields__" not in vars(kind):
        text = f"{of_key}{kind.__module__}.{kind.__qualname__} declares options, but is not a dataclass"
        raise ConfigError(f"{text}; put @dataclass(frozen=True) above it", code="config.options-class")
    pairs = {name.replace("-", "_"): value for name, value in given.items()}
    if len(pairs) < len(given):
        raise ConfigError(f"{of_key}give each option once, got {' '.join(given)!r}", code="config.option-pairs")
    declared: Any = kind
    known = [entry.name for entry in fields(declared)]
    for name in pairs:
        if name not in known:
            options = f"; the options are {', '.join(known)}" if known else "; there are none"
            hint = did_you_mean(name, known) or options
            raise ConfigError(f"{of_key}there is no option {name}{hint}", code="config.unknown-option")
    try:
        parsed: T = _adapter(declared).validate_strings(pairs)
        return parsed
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] == "missing":
            raise ConfigError(f"{of_key}it lacks {name}", code="config.missing-option") from None
        what = "" if name == getattr(kind, "FIRST", "") else f"{name} "
        got = f"{what}{fault_text(first)}, got {pairs.get(name)!r}" if name else fault_text(first)
        raise ConfigError(f"{of_key}{got}", code="config.option-value") from None


def _of_key(key: str) -> str:
    return f"{key}: " if key else ""


@lru_cache(maxsize=64)
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Return what reads options of a kind: to make it takes longer than to read, and rounds read theirs again."""
    return TypeAdapter(kind)
