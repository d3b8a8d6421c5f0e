"""What a site remembers of runs: on disk, bounded, and closed where it cannot be read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.errors import raises
from tests.helpers.ledgers import forget
from umbel.privacy.site import runs as module
from umbel.privacy.site import totals
from umbel.privacy.site.entry import Entry
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.policy import Policy
from umbel.privacy.site.runs import Runs, Status, digest_of
from umbel.protocol.errors import Refused

LIMITS = Policy.parse({"max-evaluations": 2})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Journal.create(tmp_path / "ledger.jsonl").path


def test_evaluations_are_counted_by_run(path: Path) -> None:
    for run in ("1", "1", "2", "2", "3"):
        Runs(path).count_evaluation(run, LIMITS)
    with raises(Refused, "refused.evaluations", "max-evaluations is 2"):
        Runs(path).count_evaluation("1", LIMITS)
    Runs(path, node="another").count_evaluation("1", LIMITS)


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
    monkeypatch.setitem(totals._KEPT, "sent", 3)
    sent = [{"weight": np.full((1, 2), number, np.float32)} for number in range(5)]
    runs = Runs(path)
    for hypotheses in sent:
        runs.record(Entry("1", "train", sent=[("spring", digest_of(hypotheses))]), True)
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
    runs.decide(runs.requests()[0].digest, Status.APPROVED, "ann")
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


def test_text_that_is_none_is_kept_as_it_is(path: Path) -> None:
    """As a name of a run that no disk could take."""
    runs, hypotheses = Runs(path), {"a": np.zeros((1, 2), np.float32)}
    runs.record(Entry("1", "train", sent=[("\ud800", digest_of(hypotheses))]), True)
    forget()
    Runs(path).end("2", "\ud800", hypotheses, evaluates=True)
