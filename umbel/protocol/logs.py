"""The form of Flower's log: JSON lines if ``UMBEL_LOG=json``, and where no terminal is, times in place of colours."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from datetime import UTC, datetime
from functools import partial
from numbers import Real
from types import TracebackType
from typing import Any, NamedTuple

from umbel.protocol.words import one_line

FORM = "UMBEL_LOG"
"""Environment variable with the form, for a process and those that it starts."""
JSON = "json"

_about: dict[str, Any] = {}


def configure(strangers: bool = False) -> None:
    """Set the form of this process's log.

    With `strangers`, as at a site, lines quote what a server sent: in a record that is not JSON, quoted text stays in
    one line, and the lines after the first are indented. So no text passes for another record, or steers a terminal.
    """
    import flwr.app  # noqa: F401 - which sets up its log

    handlers = logging.getLogger("flwr").handlers
    if os.environ.get(FORM) == JSON:
        others = logging.StreamHandler()
        logging.lastResort = others  # of other libraries
        logging.getLogger("py.warnings").handlers = [others]
        logging.captureWarnings(True)
        for handler in (*handlers, others):
            handler.format = line  # type: ignore[method-assign]
        sys.excepthook = _uncaught
        threading.excepthook = sys.unraisablehook = _unraised
        _configure_uvicorn()
        return
    if strangers:
        for handler in handlers:
            handler.format = partial(_plain, handler.format)  # type: ignore[method-assign]
    if not sys.stderr.isatty():
        for handler in handlers:  # of Flower's log
            vars(handler).update(timestamps=True, colored=False)


@contextmanager
def quiet(level: int = logging.WARNING) -> Iterator[None]:
    """Keep lines below a level out of Flower's log."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(max(before, level))
    try:
        yield
    finally:
        logger.setLevel(before)


def about(**what: Any) -> None:
    """Say what the next lines are about, such as a run and its round."""
    _about.update(what)


def line(record: logging.LogRecord) -> str:
    """Return a record as one line of JSON: time, level, host, message; and run and round where they are known."""
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    said = {
        "time": at,
        "level": record.levelname,
        "host": os.uname().nodename,
        **_about,
        "message": _text(record.getMessage()),
    }
    if record.exc_info:
        said["trace"] = _text(logging.Formatter().formatException(record.exc_info))
    return json.dumps(said, default=str)


def error(reason: str) -> str:
    """Return the last error of a command as one line: of JSON, where the log is."""
    if os.environ.get(FORM) != JSON:
        return f"Error: {reason}"
    return line(logging.LogRecord("umbel", logging.ERROR, "", 0, reason, None, None))


def _uncaught(kind: type[BaseException], fault: BaseException | None, trace: TracebackType | None) -> None:
    if issubclass(kind, SystemExit):
        return  # as where a thread ends so
    found = fault or kind()
    record = logging.LogRecord("umbel", logging.CRITICAL, "", 0, "%s", (kind.__name__,), (kind, found, trace))
    print(line(record), file=sys.stderr)


def _unraised(fault: Any) -> None:
    _uncaught(fault.exc_type, fault.exc_value, fault.exc_traceback)


def _plain(form: Callable[[logging.LogRecord], str], record: logging.LogRecord) -> str:
    own = copy(record)
    if isinstance(own.args, tuple) and own.args:
        own.args = tuple(one if isinstance(one, Real) else one_line(str(one)) for one in own.args)
    else:
        own.msg = _indented(str(own.msg))
    if own.exc_info:
        own.exc_text = "    " + _indented(logging.Formatter().formatException(own.exc_info))
    return form(own)


def _indented(text: str) -> str:
    return "\n    ".join(map(one_line, text.split("\n")))


def _text(said: str) -> str:
    """Return text without halves of surrogate pairs, which many readers of JSON refuse."""
    return said.encode(errors="replace").decode()


def _configure_uvicorn() -> None:
    """Make uvicorn's lines JSON too; it sets up its log when it begins to serve."""
    from uvicorn.config import Config  # here, since it takes long

    set_up = Config.configure_logging

    def configure_logging(self: Config) -> None:
        set_up(self)
        for name in ("uvicorn", "uvicorn.access"):
            for handler in logging.getLogger(name).handlers:
                handler.format = line  # type: ignore[method-assign]

    Config.configure_logging = configure_logging  # type: ignore[method-assign]


_REFUSAL = "umbel refused to answer"


class Progress(NamedTuple):
    """How far a run is: the extra `progress` of a record, by which a terminal shows it in place of the record."""

    text: str
    done: int = 0  # rounds
    rounds: int | None = None  # None if no further round follows


@contextmanager
def printed(say: Callable[[str], None], show: Callable[[Progress], None] | None = None) -> Iterator[None]:
    """Inside, say each text of the log, instead of what Flower's handlers write.

    With `show`, show the progress in place of its lines, and until the rounds are over say only warnings and errors.
    """
    logger = logging.getLogger("flwr")
    before, logger.handlers = logger.handlers, [_Lines(say, show)]
    try:
        yield
    finally:
        logger.handlers = before


class _Lines(logging.Handler):
    """Says texts without Flower's form, and a refusal once: each node may have the same in each round."""

    def __init__(self, say: Callable[[str], None], show: Callable[[Progress], None] | None) -> None:
        super().__init__()
        self._say, self._show, self._over = say, show, show is None
        self._refusals: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        progress = getattr(record, "progress", None)
        if self._show and progress:
            self._show(progress)
            self._over = not progress.rounds
            return
        if not self._over and record.levelno < logging.WARNING:
            return
        if not text.strip() or text in self._refusals:
            return
        if text.startswith(_REFUSAL):
            self._refusals.add(text)
        self._say(text if record.levelno == logging.INFO else f"{record.levelname.capitalize()}: {text}")
        if record.exc_info:
            self._say(logging.Formatter().formatException(record.exc_info))
