"""Errors by class, code and the parts that matter: sentences may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from umbel.protocol import errors
from umbel.protocol.errors import UmbelError


@contextmanager
def raises(kind: type[UmbelError], code: str, *parts: object) -> Iterator[pytest.ExceptionInfo[UmbelError]]:
    """Expect an error of exactly this class and code, whose text has each part: a key's name, a number, a file."""
    with pytest.raises(UmbelError) as caught:
        yield caught
    error = caught.value
    assert (type(error), error.code) == (kind, code), error
    missing = [part for part in parts if str(part) not in error.text]
    assert not missing, f"{missing} not in: {error.text}"


def ended(status: int, output: str, code: str, *parts: object) -> None:
    """Check that a command ended with one line, of an error of this code or kind, and with that kind's exit code."""
    kind = code.partition(".")[0]
    (expected,) = {one.exit_code for one in vars(errors).values() if getattr(one, "kind", "") == kind}
    assert (status, output[:7], output.count("\n")) == (expected, "Error: ", 1), output
    assert "." not in code or output.endswith(f" [{code}]\n"), output
    assert not [part for part in parts if str(part) not in output], output
