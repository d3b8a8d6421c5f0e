"""What of a run's log its user reads."""

from __future__ import annotations

import re

from umbel.simulation.relay import Relay

LOG = """\
Using SuperLink: simulation (127.0.0.1:42009)
Successfully started run 9528162941806341200
\x1b[92mINFO \x1b[0m:      Starting Flower Simulation
\x1b[93mWARNING \x1b[0m:   Since flwr 1.32, default simulated SuperNodes changed from 10 to 2.
/lib/ray/_private/worker.py:2051: FutureWarning: Tip: In future versions of Ray, ...
  warnings.warn(
\x1b[92mINFO \x1b[0m:      Results go to /home/me/umbel/runs/1
\x1b[92mINFO \x1b[0m:      round 1/3  validation RMSE 3.4018
\x1b[92mINFO \x1b[0m:        hypothesis 0: (4.783, 2.939)
\x1b[93mWARNING \x1b[0m:   node 7 did not reply to the message of round 1: refused
\x1b[36m(ClientAppActor pid=32546)\x1b[0m \x1b[93mWARNING \x1b[0m:   Manually terminating ClientAppActor
"""
REFUSED = """\
\x1b[36m(ClientAppActor pid=1)\x1b[0m \x1b[91mERROR \x1b[0m:     umbel refused to answer (train): no such layer
\x1b[36m(ClientAppActor pid=1)\x1b[0m Traceback (most recent call last):
\x1b[36m(ClientAppActor pid=1)\x1b[0m RuntimeError: no such layer
"""
FAILED = """\
\x1b[91mERROR \x1b[0m:     Simulation raised an exception
Traceback (most recent call last):
  File "umbel/server/app.py", line 47, in main
{error}
\x1b[91mERROR \x1b[0m:     Exit Code: 700
An unhandled exception occurred when running the simulation.
"""


def relayed(log: str, whole: bool = False) -> tuple[list[str], Relay]:
    said: list[str] = []
    relay = Relay(said.append, whole)
    relay.pass_on(log.splitlines(keepends=True))
    return said, relay


def test_umbels_lines_and_warnings_are_printed_and_flowers_own_are_not() -> None:
    said, relay = relayed(LOG)
    assert said == [
        "Results go to /home/me/umbel/runs/1",
        "round 1/3  validation RMSE 3.4018",
        "  hypothesis 0: (4.783, 2.939)",
        "Warning: node 7 did not reply to the message of round 1: refused",
    ]
    assert relay.folder == "/home/me/umbel/runs/1"


def test_lines_with_a_time_are_read_like_those_without() -> None:
    """As they are where no terminal is."""
    timed = re.sub(r"\x1b\[9\dm(\w+) *\x1b\[0m:", r"\1 2026-11-26 21:35:01,060:", LOG)
    assert timed != LOG
    said, relay = relayed(timed)
    assert (said, relay.folder) == (relayed(LOG)[0], "/home/me/umbel/runs/1")


def test_everything_is_printed_as_it_is_where_that_is_wanted() -> None:
    assert relayed(LOG + REFUSED, whole=True)[0] == (LOG + REFUSED).splitlines()


def test_a_refusal_is_told_once_with_its_traceback_however_many_nodes_refuse() -> None:
    said, relay = relayed(REFUSED * 3 + REFUSED.replace("such", "other"))
    assert said == [
        "Error: umbel refused to answer (train): no such layer",
        "Traceback (most recent call last):",
        "RuntimeError: no such layer",
        "Error: umbel refused to answer (train): no other layer",
        "Traceback (most recent call last):",
        "RuntimeError: no other layer",
    ]
    assert relay.reasons == ["no such layer", "no other layer"]


def test_of_an_error_that_says_itself_there_is_no_traceback() -> None:
    assert relayed(FAILED.format(error="umbel.protocol.errors.FleetError: the nodes refuse"))[0] == []
    assert relayed(FAILED.format(error="ValueError: of the code"))[0] == [
        "Simulation raised an exception",
        "Traceback (most recent call last):",
        '  File "umbel/server/app.py", line 47, in main',
        "ValueError: of the code",
    ]


def test_the_folder_by_itself_is_the_last_line_of_a_run_that_succeeded() -> None:
    finished = "\x1b[92mINFO \x1b[0m:      /home/me/umbel/runs/1\n"
    assert not relayed(LOG)[1].finished
    said, relay = relayed(LOG + finished)
    assert relay.finished
    assert said[-1] == "/home/me/umbel/runs/1"
    assert not relayed("\x1b[92mINFO \x1b[0m:      \n")[1].finished, "another app's empty line"


ENDS = """\
\x1b[92mINFO \x1b[0m:      Results go to /runs/1
\x1b[92mINFO \x1b[0m:      The run is over after 3 rounds: all 3 rounds done.
\x1b[92mINFO \x1b[0m:      Guarantee: none, because there is no noise.
\x1b[92mINFO \x1b[0m:      The results are in this folder; open report.html first:
\x1b[92mINFO \x1b[0m:      /runs/1
"""


def test_the_last_lines_are_kept_for_who_has_more_to_say_before_them() -> None:
    said: list[str] = []
    relay = Relay(said.append, holds=True)
    relay.pass_on(ENDS.splitlines())
    assert said[-1] == "The run is over after 3 rounds: all 3 rounds done."
    assert relay.closing[0] == "Guarantee: none, because there is no noise."
    assert relay.closing[-1] == "/runs/1"
    assert relay.finished
    assert relayed(ENDS)[0] == said + relay.closing
