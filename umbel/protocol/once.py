"""What is looked up once a message, however often it is asked for while the node answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_found: ContextVar[dict[Any, tuple[Any, Any]] | None] = ContextVar("umbel_once_a_message", default=None)


@contextmanager
def one_message() -> Iterator[None]:
    """Have what is asked for inside looked up once; of a message within a message, anew."""
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def once(look: Callable[..., T], *about: Any) -> T:
    """Return what `look` says about some objects, which within a message it is asked once; else each time."""
    found = _found.get()
    if found is None:
        return look(*about)
    key = (look, *map(id, about))
    if key not in found:
        # With the objects, so that no other ever has the address of one of them.
        found[key] = about, look(*about)
    value: T = found[key][1]
    return value
