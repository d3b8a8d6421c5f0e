"""The log of a run for its user: umbel's lines and errors, without those of Flower and Ray."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from umbel.protocol.errors import UmbelError
from umbel.protocol.flower import FLOWER_LOGGER

# Lines that do not concern a user of this command, which starts and stops all of this by itself, and whose last line
# says how the run ended.
_CHATTER = re.compile("|".join((
    r"Using SuperLink: ", r"Successfully started run ", r"Starting logstream for run_id ",
    r"Starting Flower Simulation$", r"Since flwr 1\.\d+, default simulated SuperNodes changed ",
    r"Federation `.*simulated SuperNodes\)$", r"To change dataset size, use the following command:$",
    r"flwr federation simulation-config ", r"Successfully installed umbel to ",
    r".*/ray/_private/worker\.py:\d+: FutureWarning: ", r"warnings\.warn\($",
    r"Manually terminating ClientAppActor$", r"Exit Code: 700$",
    r"An unhandled exception occurred when running the simulation\.$",
    r"For more information, visit: <https://flower\.ai/docs/", r"$",
)))  # fmt: skip
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_WORKER = re.compile(r"^\(ClientAppActor pid=\d+\) ?")
# Flower's format, and umbel's with a time: the text after the sixth space is the message itself.
_LEVEL = re.compile(r"^(INFO|WARNING|ERROR|DEBUG) *(?:\d{4}-\d\d-\d\d [\d:,]+)?: {0,6}")
_REFUSED = re.compile(r"umbel refused to answer \((?P<what>[\w.]+)\): (?P<why>.*)")
_FOLDER, _GUARANTEED = "Results go to ", "Guarantee"
_FAILED = "Simulation raised an exception"


@dataclass
class Relay:
    """Passes on the lines that a run writes."""

    say: Callable[[str], None] = print
    whole: bool = False  # whether to print everything unchanged
    folder: str = ""  # the run's folder, once the log has named it
    finished: bool = False  # whether the run has logged its last line, this folder: all results are in it
    holds: bool = (
        False  # whether to keep the last lines, from the guarantee on, for callers with lines to add before them
    )
    closing: list[str] = field(default_factory=list)  # these lines
    reasons: list[str] = field(default_factory=list)  # the reasons of simulated nodes' refusals, each once

    def pass_on(self, lines: Iterable[str], until_finished: bool = False) -> None:
        """Print the user's part of a log's lines as they arrive, until the log ends or the run has finished."""
        skips = False
        held: list[str] | None = None
        for raw in lines:
            plain = _WORKER.sub("", _COLOUR.sub("", raw.rstrip()))
            level = _LEVEL.match(plain)
            text = plain[level.end() :] if level else plain
            if text.startswith(_FOLDER):
                self.folder = text.removeprefix(_FOLDER)
            if level:  # a line without a level belongs to the previous one
                self._let_go(held)
                held = [] if text == _FAILED else None
                skips = self._told(text)
            if self.whole:
                self.say(raw.rstrip())
            elif held is not None:
                held.append(text)
            elif not skips and not _CHATTER.match(text.strip()):
                told = f"{level[1].capitalize()}: {text}" if level and level[1] != "INFO" else text
                if self.closing or (self.holds and text.startswith(_GUARANTEED)):
                    self.closing.append(told)
                else:
                    self.say(told)
            self.finished |= bool(level and text) and text == self.folder
            if until_finished and self.finished:
                break
        self._let_go(held)

    @contextmanager
    def in_this_process(self) -> Iterator[None]:
        """Pass on the log of a run in this process, instead of Flower's handlers; say so if the run is stopped."""
        before, FLOWER_LOGGER.handlers = FLOWER_LOGGER.handlers, [_Handler(self)]
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted()
            raise
        finally:
            FLOWER_LOGGER.handlers = before

    def interrupted(self) -> None:
        """Say what remains of a stopped run, and how to resume it."""
        if self.folder and Path(self.folder, "latest.safetensors").is_file():
            self.say(f"Stopped. The finished rounds are kept in {self.folder}")
            self.say(f"Resume it with: umbel run {Path(self.folder).name} --resume")
        else:
            self.say("Stopped before the first round was over; nothing is kept.")

    def _let_go(self, held: list[str] | None) -> None:
        """Print a traceback of the server's, unless it ends in an error that the command's last line repeats."""
        if held and not held[-1].startswith(f"{UmbelError.__module__}."):
            for line in held:
                self.say(line)

    def _told(self, text: str) -> bool:
        """Return whether a refusal was printed before; each node has the same reason in each round."""
        refusal = _REFUSED.match(text)
        if refusal is None:
            return False
        told = refusal["why"] in self.reasons
        if not told:
            self.reasons.append(refusal["why"])
        return told


class _Handler(logging.Handler):
    """Passes a record on in Flower's format."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    def emit(self, record: logging.LogRecord) -> None:
        lines = [f"{record.levelname} :      {record.getMessage()}"]
        if record.exc_info:
            lines += logging.Formatter().formatException(record.exc_info).splitlines()
        self._relay.pass_on(lines)
