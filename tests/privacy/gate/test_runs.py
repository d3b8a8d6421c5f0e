"""What a site remembers of runs: on disk, bounded, and closed where it cannot be read."""

from __future__ import annotations

import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.errors import raises
from umbel.privacy.gate import runs as module
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.policy import Policy
from umbel.privacy.gate.runs import Runs, Status, digest_of
from umbel.protocol.errors import LedgerError, Refused

LIMITS = Policy.parse({"max-evaluations": 2})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Ledger.create(tmp_path / "ledger.sqlite").path


def test_evaluations_are_counted_by_run(path: Path) -> None:
    for run in ("1", "1", "2", "2", "3"):
        Runs(path).count_evaluation(run, LIMITS)
    with raises(Refused, "refused.evaluations", "max-evaluations is 2"):
        Runs(path).count_evaluation("1", LIMITS)
    Runs(path, "another node").count_evaluation("1", LIMITS)


def test_processes_that_count_together_do_not_go_beyond(path: Path) -> None:
    def count(_: int) -> bool:
        try:
            Runs(path).count_evaluation("1", Policy.parse({"max-evaluations": 7}))
        except Refused:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(count, range(12))) == 7


def test_the_oldest_are_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_SENT", 3)
    sent = [{"weight": np.full((1, 2), number, np.float32)} for number in range(5)]
    runs = Runs(path)
    for hypotheses in sent:
        runs.note_sent("1", "spring", hypotheses)
    with raises(Refused, "refused.unknown-run"):
        runs.end("2", "", sent[2], evaluates=False)
    with raises(Refused, "refused.unknown-result"):
        runs.end("1", "", sent[1], evaluates=True)
    runs.end("1", "", sent[2], evaluates=True)


def test_what_waits_is_not_forgotten_for_what_comes_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server could have what was listed replaced by what is worse."""
    monkeypatch.setattr(module, "_MOST_WAITING", 2)
    runs = Runs(path)
    for number in range(5):
        with raises(Refused, "refused.waits" if number < 2 else "refused.too-many-wait"):
            runs.check_approved(str(number), {"rounds": number}, "")
    assert [request.run for request in runs.requests()] == ["0", "1"]
    runs.decide(runs.requests()[0], Status.APPROVED, "ann", "")
    with raises(Refused, "refused.waits"):
        runs.check_approved("4", {"rounds": 4}, "")
    runs.check_approved("0", {"rounds": 0}, "")
    assert [request.run for request in runs.requests()] == ["0", "1", "4"]


def test_a_long_request_does_not_wait(path: Path) -> None:
    """The JSON around the text has nine characters."""
    runs = Runs(path)
    for number, code in ((module._LONGEST_REQUEST - 9, "waits"), (module._LONGEST_REQUEST - 8, "long-request")):
        with raises(Refused, f"refused.{code}"):
            runs.check_approved("1", {"x": "a" * number}, "")
    assert len(runs.requests()) == 1


def test_hypotheses_of_other_names_shapes_or_types_are_others() -> None:
    arrays = [
        {"a": np.zeros((1, 4), np.float32)},
        {"b": np.zeros((1, 4), np.float32)},
        {"a": np.zeros((2, 2), np.float32)},
        {"a": np.zeros((1, 2), np.float64)},
        {"a": np.zeros((1, 2), np.float32), "b": np.zeros((1, 2), np.float32)},
    ]
    assert len({digest_of(one) for one in arrays}) == len(arrays)


def test_a_damaged_file_closes_the_site(path: Path) -> None:
    runs = Runs(path)
    runs.count_evaluation("1", LIMITS)
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with raises(LedgerError, "ledger.damaged", path):
        runs.count_evaluation("1", LIMITS)


def test_a_file_that_cannot_be_written_closes_the_site(path: Path) -> None:
    runs = Runs(path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("DROP TABLE evaluations")
    holder.close()
    with raises(LedgerError, "ledger.unusable", "evaluations"):
        runs.count_evaluation("1", LIMITS)
    os.unlink(path)
    with raises(LedgerError, "ledger.unusable", path):
        runs.count_evaluation("1", LIMITS)
    assert not path.exists()


def test_text_that_cannot_be_written_is_refused(path: Path) -> None:
    with raises(LedgerError, "ledger.unusable"):
        Runs(path).note_sent("1", "\ud800", {"a": np.zeros((1, 2), np.float32)})
