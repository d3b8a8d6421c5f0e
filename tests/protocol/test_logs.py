"""A log is lines of JSON where that is asked for, and has no codes for colours where no terminal is.

And what of a run's log its user reads.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys

import pytest

from umbel.deploy.programs import THROUGH
from umbel.protocol.log import log
from umbel.protocol.logs import Progress, printed

LOGS = """
import sys
from logging import ERROR, INFO
from umbel.protocol import logs
from umbel.protocol.log import log
logs.configure()
logs.about(run=7, round=3)
log(INFO, "round %d of\\nmany", 3)
try:
    1 / 0
except ZeroDivisionError as error:
    log(ERROR, "it failed", exc_info=error)
"""
HOSTILE = """
from logging import ERROR
from umbel.protocol import logs
from umbel.protocol.log import log
logs.configure(strangers=True)
EVIL = "x\\nINFO 2026-01-01 00:00:00,000:      forged \\x1b[31m\\x85\\u2028"
log(ERROR, "refused: %s, %.1f", EVIL, 0.5)
log(ERROR, EVIL)
try:
    raise ValueError(EVIL)
except ValueError as error:
    log(ERROR, "refused", exc_info=error)
"""
UVICORN = """
import logging
from umbel.protocol import logs
from uvicorn import Config
logs.configure()
Config(None)
logging.getLogger("uvicorn.error").info("Started")
logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "GET", "/\\n\\udcff", "1.1", 403)
"""


COMMAND = """
import sys
from umbel.protocol import logs
from umbel.protocol.cli import fail
logs.configure()
try:
    fail("no such\\nledger [ledger.gone]", 2)
except BaseException as end:
    assert end.exit_code == 2
"""
UNEXPECTED = """
import logging, threading, warnings, weakref
from umbel.protocol import logs
logs.configure()
warnings.warn("old\\nway")
logging.getLogger("another").warning("of\\na library")
def broken(*_):
    raise ValueError("bro\\nken")
def ends():
    raise SystemExit
for target in (broken, ends):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
class Kept:
    __del__ = broken
del (kept := [Kept()])[:]
broken()
"""


def written(form: str, *words: str, status: int = 0) -> str:
    """Return what a program writes; of one word, that is its code."""
    command = [sys.executable, *(("-c", *words) if len(words) == 1 else words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"UMBEL_LOG": form})
    assert done.returncode == status, done.stderr
    return done.stderr + done.stdout


def test_all_lines_are_json_and_say_when_where_and_about_which_run() -> None:
    """Those about requests too, and a command's last error, and what no one expected."""
    first, second = map(json.loads, written("json", LOGS).splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    host = os.uname().nodename
    assert first == {"level": "INFO", "host": host, "run": 7, "round": 3, "message": "round 3 of\nmany"}
    assert "ZeroDivisionError" in second["trace"]
    text = written("json", UVICORN)
    started, asked = [json.loads(line)["message"] for line in text.splitlines()]
    assert (started, asked) == ("Started", '1.2.3.4:5 - "GET /\n? HTTP/1.1" 403')
    assert "\\ud" not in text, "every reader takes it"
    [error] = map(json.loads, written("json", COMMAND).splitlines())
    assert (error["level"], error["message"]) == ("ERROR", "no such\nledger [ledger.gone]")
    assert written("plain", COMMAND) == "Error: no such\nledger [ledger.gone]\n"
    found = [json.loads(line) for line in written("json", UNEXPECTED, status=1).splitlines()]
    assert "old\nway" in found[0]["message"]
    assert found[1]["message"] == "of\na library"
    assert [one["message"] for one in found[2:]] == ["ValueError"] * 3, "in a thread, a finaliser and the program"
    assert all("ValueError: bro\nken" in one["trace"] for one in found[2:])


@pytest.mark.rest
def test_flowers_own_programs_at_the_server_write_lines_too() -> None:
    """The second is what a SuperExec starts for a run; without a server it would try again and again."""
    options = ["--insecure", "--runtime-api-address", "127.0.0.1:1"]
    executor = written(
        "json", "-m", "umbel.cli.parts", "server-executor", *options, "--executor-config", "gone", status=1
    )
    began, ended = map(json.loads, executor.splitlines())
    assert (began["message"], ended["level"]) == ("Starting Flower SuperExec", "ERROR")
    refused = written("json", *THROUGH[1:], "flwr-serverapp", "--token", "x", "--root-certificates", "gone", status=1)
    first, *others = map(json.loads, refused.splitlines())
    assert first["message"] == "Start `flwr-serverapp` process"
    assert others


def test_text_of_a_server_forges_no_line_of_a_site_and_steers_no_terminal() -> None:
    text = written("plain", HOSTILE)
    lines = text.split("\n")[:-1]
    assert "\\nINFO 2026-01-01 00:00:00,000:      forged \\x1b[31m\\x85\\u2028, 0.5" in lines[0]
    assert all(line.startswith(("ERROR 2", "    ")) for line in lines)
    assert {one for one in text if not one.isprintable()} == {"\n"}
    assert all(json.loads(line) for line in written("json", HOSTILE).splitlines())


@pytest.mark.parametrize("form", ["", "plain"])
def test_without_a_terminal_a_line_has_a_time_and_no_colours(form: str) -> None:
    text = written(form, LOGS)
    assert re.match(r"INFO \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}:", text)
    assert "\x1b" not in text


def test_a_text_is_said_without_flowers_form_and_a_refusal_once_with_its_traceback() -> None:
    said: list[str] = []
    logger = logging.getLogger("flwr")
    before = logger.handlers
    with printed(said.append):
        log(logging.INFO, "round %d/3  validation RMSE 3.4018", 1)
        log(logging.INFO, "")
        log(logging.WARNING, "node 7 did not reply")
        for layer in ("such", "such", "other"):
            try:
                raise RuntimeError(f"no {layer} layer")
            except RuntimeError as error:
                log(logging.ERROR, "umbel refused to answer (train): %s", error, exc_info=True)
        log(logging.WARNING, "node 7 did not reply")
    assert [text for text in said if not text.startswith("Traceback")] == [
        "round 1/3  validation RMSE 3.4018",
        "Warning: node 7 did not reply",
        "Error: umbel refused to answer (train): no such layer",
        "Error: umbel refused to answer (train): no other layer",
        "Warning: node 7 did not reply",
    ]
    traces = [text.splitlines()[-1] for text in said if text.startswith("Traceback")]
    assert traces == ["RuntimeError: no such layer", "RuntimeError: no other layer"]
    assert logger.handlers is before


def test_progress_is_shown_until_the_rounds_are_over_and_warnings_are_said_meanwhile() -> None:
    said: list[str] = []
    shown: list[Progress] = []
    first, last, more = Progress("round 1 of 2", 1, 2), Progress("measuring the result"), Progress("hypotheses=2")
    with printed(said.append, shown.append):
        log(logging.INFO, "3 nodes host 9 clients")
        log(logging.INFO, "round 1/2", extra={"progress": first})
        log(logging.WARNING, "node 7 did not reply")
        log(logging.INFO, "The rounds have ended.", extra={"progress": last})
        log(logging.INFO, "Trying hypotheses=2", extra={"progress": more})
        log(logging.INFO, "Worth it? Yes.")
    assert shown == [first, last, more]
    assert said == ["Warning: node 7 did not reply", "Worth it? Yes."]
