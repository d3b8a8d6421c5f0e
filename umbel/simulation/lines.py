"""The log of a run in this process, as its user reads it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_REFUSAL = "umbel refused to answer"


@contextmanager
def printed(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, say each text of the log, instead of what Flower's handlers write."""
    logger = logging.getLogger("flwr")
    before, logger.handlers = logger.handlers, [_Lines(say)]
    try:
        yield
    finally:
        logger.handlers = before


class _Lines(logging.Handler):
    """Says texts without Flower's form, and a refusal once: each node may have the same in each round."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say
        self._refusals: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.strip() or text in self._refusals:
            return
        if text.startswith(_REFUSAL):
            self._refusals.add(text)
        self._say(text if record.levelno == logging.INFO else f"{record.levelname.capitalize()}: {text}")
        if record.exc_info:
            self._say(logging.Formatter().formatException(record.exc_info))
