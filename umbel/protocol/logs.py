"""The form of Flower's log: JSON lines if ``UMBEL_LOG=json``, and where no terminal is, times in place of colours."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from numbers import Real
from typing import Any

from umbel.protocol.flower import plain_console

FORM = "UMBEL_LOG"
"""Environment variable with the form, for a process and those that it starts."""
JSON, PLAIN = "json", "plain"

_about: dict[str, Any] = {}


def configure(strangers: bool = False) -> None:
    """Set the form of this process's log.

    With `strangers`, as at a site, lines quote what a server sent: in a record that is not JSON, quoted text stays in
    one line, and the lines after the first are indented. So no text passes for another record, or steers a terminal.
    """
    form = os.environ.get(FORM, "")
    if strangers and form != JSON:
        logging.getLogger("flwr").addFilter(_one_line)
    if form == JSON:
        for handler in logging.getLogger("flwr").handlers:
            handler.format = line  # type: ignore[method-assign]
        _configure_uvicorn()
    elif form == PLAIN or not sys.stderr.isatty():
        plain_console()


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


def _one_line(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple) and record.args:
        record.args = tuple(one if isinstance(one, Real) else _printable(str(one)) for one in record.args)
    else:
        record.msg = _indented(str(record.msg))
    if record.exc_info:
        record.exc_text = "    " + _indented(logging.Formatter().formatException(record.exc_info))
    return True


def _indented(text: str) -> str:
    return "\n    ".join(map(_printable, text.split("\n")))


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _text(said: str) -> str:
    """Return text without halves of surrogate pairs, which many readers of JSON refuse."""
    return said.encode(errors="replace").decode()


def _configure_uvicorn() -> None:
    """Make uvicorn's lines JSON too; it sets its log up anew when it begins to serve."""
    from uvicorn.config import Config  # here, since it takes long

    set_up = Config.configure_logging

    def configure_logging(self: Config) -> None:
        set_up(self)
        for name in ("uvicorn", "uvicorn.access"):
            for handler in logging.getLogger(name).handlers:
                handler.format = line  # type: ignore[method-assign]

    Config.configure_logging = configure_logging  # type: ignore[method-assign]
