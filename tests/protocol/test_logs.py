"""A log is lines of JSON where that is asked for, and has no codes for colours where no terminal is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

LOGS = """
import sys
from logging import ERROR, INFO
from umbel.protocol import logs
from umbel.protocol.flower import log
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
from umbel.protocol.flower import log
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


def written(form: str, code: str = LOGS) -> str:
    environment = os.environ | {"UMBEL_LOG": form}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stderr + done.stdout


def test_a_line_of_json_says_when_where_and_about_which_run() -> None:
    first, second = map(json.loads, written("json").splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    host = os.uname().nodename
    assert first == {"level": "INFO", "host": host, "run": 7, "round": 3, "message": "round 3 of\nmany"}
    assert "ZeroDivisionError" in second["trace"]


def test_lines_about_requests_are_json_too_and_every_reader_takes_them() -> None:
    text = written("json", UVICORN)
    first, second = [json.loads(line)["message"] for line in text.splitlines()]
    assert (first, second) == ("Started", '1.2.3.4:5 - "GET /\n? HTTP/1.1" 403')
    assert "\\ud" not in text


def test_text_of_a_server_forges_no_line_of_a_site_and_steers_no_terminal() -> None:
    text = written("plain", HOSTILE)
    lines = text.split("\n")[:-1]
    assert "\\nINFO 2026-01-01 00:00:00,000:      forged \\x1b[31m\\x85\\u2028, 0.5" in lines[0]
    assert all(line.startswith(("ERROR 2", "    ")) for line in lines)
    assert {one for one in text if not one.isprintable()} == {"\n"}
    assert all(json.loads(line) for line in written("json", HOSTILE).splitlines())


@pytest.mark.parametrize("form", ["", "plain"])
def test_without_a_terminal_a_line_has_a_time_and_no_colours(form: str) -> None:
    text = written(form)
    assert re.match(r"INFO \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}:", text)
    assert "\x1b" not in text
