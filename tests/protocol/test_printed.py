"""What of a run's log its user reads."""

from __future__ import annotations

import logging

from umbel.protocol.log import log
from umbel.protocol.logs import Progress, printed


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
    assert [text.splitlines()[-1] for text in said if text.startswith("Traceback")] == [
        "RuntimeError: no such layer",
        "RuntimeError: no other layer",
    ]
    assert logger.handlers is before


def test_progress_is_shown_until_the_rounds_are_over_and_warnings_are_said_meanwhile() -> None:
    said: list[str] = []
    shown: list[Progress] = []
    first, last = Progress("round 1 of 2", 1, 2), Progress("measuring the result")
    with printed(said.append, shown.append):
        log(logging.INFO, "3 nodes host 9 clients")
        log(logging.INFO, "round 1/2", extra={"progress": first})
        log(logging.WARNING, "node 7 did not reply")
        log(logging.INFO, "The rounds have ended.", extra={"progress": last})
        log(logging.INFO, "Worth it? Yes.")
    assert shown == [first, last]
    assert said == ["Warning: node 7 did not reply", "Worth it? Yes."]
