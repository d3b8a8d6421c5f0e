"""A site's own log: what servers asked, and what the site decided."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import sqlite3
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from flwr.app import DEFAULT_TTL, ConfigRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import umbel.privacy.gate.refusals
from tests.helpers.errors import raises
from tests.helpers.messages import SIMULATED, Behind, asked, of_node, refused, stacked, task_of, through_gate, to_node
from umbel.privacy.gate.charges import Charge
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.refusals import guard
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.site_log import FIRST, Entry, SiteLog, from_ranges, in_ranges, outline
from umbel.privacy.gate.store import beside
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import DatasetError, DiskError, LogError, ProtocolError, Refused
from umbel.protocol.messages import keep_request, query
from umbel.protocol.records import pack
from umbel.protocol.release import Clipping, Kind, Release
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

SECRET = "diagnosis-of-patient-17"
ZEROS = stacked(np.zeros((1, 2)), {"weight": (2,)})


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return Ledger.create(tmp_path / "ledger.sqlite").path


@pytest.fixture
def log(ledger: Path) -> SiteLog:
    return SiteLog(beside(ledger))


@pytest.fixture
def own(ledger: Path) -> dict[str, Any]:
    """The configuration of a site of its own, whose data the gate never opens."""
    return {"data-path": f"/data/{SECRET}", "ledger-path": str(ledger), "role": "split"}


def train(task: TrainingSpec, assigned: NDArray[np.int64]) -> Any:
    clients = len(task.clients)
    return [np.zeros(clients, int), np.full((clients, 2), 0.123456, np.float32)]


CLIENTS = Behind(train, lambda task: [np.full((1, 2), 0.654321)])
"""Clients that train and score as they should."""


def fails(*_: Any) -> Any:
    raise ValueError(f"row 3 of {SECRET} is 0.123456")


BROKEN = Behind(fails, fails)


def add(log: SiteLog, *reasons: str) -> None:
    log.answered(Entry("7", "train", {"training": {"round": 1}}, 2, [*reasons]), not reasons)


# --- a line


def test_a_line_says_what_was_asked_what_was_decided_and_who_paid(log: SiteLog, own: dict[str, Any]) -> None:
    through_gate(asked(ZEROS, task_of((0, 4), round=3)), of_node(own), CLIENTS)
    [line] = log.lines()
    assert datetime.fromisoformat(line.pop("at")).utcoffset() is not None
    training = line["asked"].pop("training")
    expected = {"round": 3, "clients": 2, "noise_multiplier": 5.0, "clipping": "update", "clip_norm": 0.1}
    assert training.items() >= expected.items()
    assert len(line.pop("hash")) == len(line.pop("charge")) == 64
    [charged] = line.pop("charged")
    assert (charged["round"], charged["clients"]) == (3, "0,4")
    assert line.pop("policy") == Site.of(own).policy.digest
    assert line == {
        "number": 1, "run": "1", "message": "train", "asked": {"hypotheses": {"k": 1, "n": 2}},
        "decision": "answered", "reason": "", "paid": 2, "previous": FIRST, "charges": 2,
    }  # fmt: skip


Send = Callable[[dict[str, Any]], Any]


def round_of(*tasks: Any, clients: Any = CLIENTS, **policy: Any) -> Send:
    return lambda own: through_gate(asked(ZEROS, *tasks), of_node(own | policy), clients)


def other(content: RecordDict, message_type: str, handler: Any = lambda msg, _: Message(query(), reply_to=msg)) -> Send:
    return lambda own: guard(to_node(content, message_type), of_node(own), handler)


EVALUATION = EvaluationSpec(1, (4,))
BARE = task_of((0, 1), noise_multiplier=0.0)


@pytest.mark.parametrize(
    ("send", "decision", "reason", "paid"),
    [
        (round_of(task_of((0, 1))), "answered", "", 2),
        (round_of(None, EVALUATION), "answered", "", 0),
        (round_of(task_of((0, 1)), EVALUATION), "answered", "", 2),
        (round_of(BARE), "refused", "train: the server asks for an unsanitised release", 0),
        (round_of(BARE, EVALUATION), "partly", "train: the server asks for an unsanitised release", 0),
        (round_of(task_of((0, 1)), **{"max-participations": 0}), "refused", "no asked client is within budget", 0),
        (round_of(task_of((0, 1)), EVALUATION, clients=BROKEN), "partly", "evaluate: ValueError; see the node's", 2),
        (round_of(), "refused", "", 0),
        (other(query(), "query"), "answered", "", 0),
        (other(query(), "query", fails), "refused", "query: ValueError", 0),
        (other(keep_request(pack(ZEROS), "run-1"), "query.keep"), "answered", "", 0),
    ],
)  # fmt: skip
def test_every_message_is_on_record(
    send: Send, decision: str, reason: str, paid: int, log: SiteLog, own: dict[str, Any]
) -> None:
    send(own)
    [line] = log.lines()
    assert (line["decision"], line["paid"]) == (decision, paid)
    assert reason in line["reason"]


def test_a_message_that_has_expired_costs_nothing(
    log: SiteLog, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a laptop's sleep: the server no longer takes the reply."""
    for beyond, decision, paid in ((-60, "answered", 2), (1, "refused", 0)):
        later = time.time() + DEFAULT_TTL + beyond
        monkeypatch.setattr(umbel.privacy.gate.refusals, "time", SimpleNamespace(time=lambda later=later: later))
        round_of(task_of((0, 1)))(own)
        *_, line = log.lines()
        assert (line["decision"], line["paid"]) == (decision, paid)
    assert "[refused.too-late]" in line["reason"]


def test_clients_that_cannot_pay_make_it_a_part(log: SiteLog, own: dict[str, Any]) -> None:
    once = own | {"max-participations": 1}
    for clients in ((0,), (0, 1)):
        through_gate(asked(ZEROS, task_of(clients)), of_node(once), CLIENTS)
    _, line = log.lines()
    assert (line["decision"], line["paid"]) == ("partly", 1)
    assert line["reason"] == "train: 1 of 2 clients are over budget [refused.budget]"


def test_a_charge_that_led_to_no_release_is_on_record(
    log: SiteLog, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.privacy.mechanisms.sanitise.sanitise_in_place", fails)
    assert refused(through_gate(asked(ZEROS, task_of((0, 1))), of_node(own), CLIENTS))
    [line] = log.lines()
    assert (line["decision"], line["paid"]) == ("refused", 2)


@pytest.mark.parametrize("clients", [CLIENTS, BROKEN])
def test_no_value_of_the_data_is_written_down(clients: Any, log: SiteLog, own: dict[str, Any]) -> None:
    through_gate(asked(ZEROS, task_of((0, 1)), EVALUATION), of_node(own), clients)
    text = log.path.read_text()
    assert not [value for value in (SECRET, "0.123", "0.654") if value in text]


@pytest.mark.parametrize(
    ("error", "told"),
    [(Refused("too much"), True), (ProtocolError("no"), True), (DatasetError("row 3"), False), (OSError("x"), False)],
)
def test_only_reasons_that_come_from_the_message_or_the_set_up_are_told(error: Exception, told: bool) -> None:
    entry = Entry()
    entry.refuse("train", error)
    assert (str(error) in entry.reasons[0]) == told


def test_simulated_nodes_have_no_log(tmp_path: Path) -> None:
    config = SIMULATED | {"ledger-path": str(tmp_path / "ledger.sqlite")}
    through_gate(asked(ZEROS, task_of((0, 1))), of_node(config), CLIENTS)
    assert not list(tmp_path.glob("*.jsonl"))


HUGE = RecordDict({f"training-{i}": ConfigRecord({"run": "x" * 10**5, "round": 2**62}) for i in range(100)})
ODD = RecordDict(
    {"training": ConfigRecord({"clip_norm": math.nan, "round": b"\xff" * 10**5, "x" * 10**5: 1.0, "clients": []})}
)


EMOJI = ConfigRecord(dict.fromkeys(task_of().to_record(), "\U0001f600" * 300))
FULL = RecordDict({name: EMOJI for name in ("training", "evaluation")})


@pytest.mark.parametrize("content", [HUGE, ODD, FULL], ids=["huge", "odd", "full"])
def test_a_server_cannot_make_a_line_long(content: RecordDict, log: SiteLog, own: dict[str, Any]) -> None:
    through_gate(content, of_node(own), CLIENTS)
    [line] = log.lines()
    assert log.path.stat().st_size < 20_000
    assert line["decision"] == "refused"


def test_whatever_else_a_message_holds_what_it_asks_is_in_the_log(log: SiteLog, own: dict[str, Any]) -> None:
    message = asked(ZEROS, task_of((0, 1)))
    blinding = {f"x{i}": ConfigRecord({"run": "x" * 10**5}) for i in range(50)}
    assert not refused(through_gate(RecordDict({**blinding, **message}), of_node(own), CLIENTS))
    [line] = log.lines()
    assert line["asked"] == outline(message) | {"others": 50}
    assert line["asked"]["training"]["clients"] == 2


# --- the chain


def damaged(log: SiteLog, change: Callable[[list[bytes]], list[bytes]]) -> SiteLog:
    log.path.write_bytes(b"".join(change(log.path.read_bytes().splitlines(keepends=True))))
    return log


def test_lines_follow_each_other(log: SiteLog) -> None:
    for _ in range(3):
        add(log)
    lines = list(log.lines())
    assert log.path.stat().st_mode & 0o077 == 0, "only the site may read it"
    assert [line["number"] for line in lines] == [1, 2, 3]
    assert [line["previous"] for line in lines] == [FIRST, lines[0]["hash"], lines[1]["hash"]]
    for text in log.path.read_text().splitlines():
        assert list(json.loads(text))[-2:] == ["previous", "hash"]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0].replace(b'"paid":2', b'"paid":1'), *lines[1:]],
        lambda lines: lines[1:],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [*lines, b"\n"],
        lambda lines: [*lines[:-1], bytes(len(lines[-1]))],
        lambda lines: [*lines, lines[-1][:50]],
        lambda lines: [*lines[:-1], lines[-1][:50] + b"\n"],
        lambda lines: [b"\xff\xfe", *lines],
    ],
)
def test_what_was_changed_moved_or_taken_out_is_found(log: SiteLog, change: Any) -> None:
    for _ in range(4):
        add(log)
    with raises(LogError, "log.broken-chain", log.path, "umbel site log --set-aside PATH"):
        list(damaged(log, change).lines())


@pytest.mark.parametrize("length", [1, 9, 50, -1])
def test_a_line_that_a_killed_process_left_unfinished_is_written_over(log: SiteLog, length: int) -> None:
    for _ in range(3):
        add(log)
    damaged(log, lambda lines: [*lines[:-1], lines[-1][:length]])
    assert [line["number"] for line in log.lines()] == [1, 2]
    log.check_end()
    add(log)
    assert [line["number"] for line in log.lines()] == [1, 2, 3]
    damaged(log, lambda lines: [lines[0][:length]])
    assert list(log.lines()) == []
    add(log)
    assert [line["number"] for line in log.lines()] == [1]


def torn(lines: list[bytes]) -> list[bytes]:
    return [*lines[:-1], lines[-1][:50] + b"\n"]


def test_nothing_is_added_to_a_log_whose_end_is_damaged(log: SiteLog) -> None:
    add(log)
    before = damaged(log, torn).path.read_bytes()
    for ask in (log.check_end, lambda: add(log)):
        with raises(LogError, "log.broken-chain", log.path):
            ask()
    assert log.path.read_bytes() == before


def test_a_damaged_log_is_set_aside_and_the_new_one_names_it(log: SiteLog) -> None:
    add(log)
    aside = damaged(log, torn).set_aside()
    assert len(aside.read_bytes()) == 51
    add(log)
    first, second = log.lines()
    assert (first["decision"], second["decision"]) == ("set aside", "answered")
    assert f"the previous log is {aside.name}, SHA-256 " in first["reason"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_log_is_set_aside_in_one_step(step: str, log: SiteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a line, a new log would know neither the previous one nor its charges."""
    add(log)
    before = log.path.read_bytes()
    with monkeypatch.context() as patched:
        full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        patched.setattr(*((os, "fsync") if step == "fsync" else (Path, "replace")), full)
        with raises(DiskError, "disk.full", log.path):
            log.set_aside()
    assert [file.name for file in log.path.parent.glob("*.jsonl")] == [log.path.name]
    assert log.path.read_bytes() == before
    aside = log.set_aside()
    assert aside.read_bytes() == before
    [line] = log.lines()
    assert aside.name in line["reason"]


def test_a_log_that_has_charges_which_the_ledger_lacks_is_not_set_aside(
    ledger: Path, log: SiteLog, own: dict[str, Any]
) -> None:
    """The next log would not know of them, and the clients would have their budgets again."""
    older = ledger.read_bytes()
    round_of(task_of((0, 1)))(own)
    spent = Ledger(ledger).accounts()
    ledger.write_bytes(older)
    with raises(LogError, "log.ledger-behind", "--repair"):
        log.set_aside()
    assert log.restored() == 2
    assert Ledger(ledger).accounts() == spent
    log.set_aside()


def test_where_there_is_no_log_there_is_nothing_to_set_aside_and_without_a_folder_nothing_to_add(log: SiteLog) -> None:
    for ask in (log.set_aside, lambda: add(SiteLog(log.path.parent / "nowhere" / log.path.name))):
        with raises(LogError, "log.missing"):
            ask()
    assert not log.path.exists()


def _add_often(path: Path, times: int) -> None:
    for _ in range(times):
        add(SiteLog(path))


@pytest.mark.slow
def test_processes_share_a_log(log: SiteLog) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add_often, args=(log.path, 25)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [line["number"] for line in log.lines()] == list(range(1, 101))


# --- what is not on record does not leave


def in_the_way(log: SiteLog) -> None:
    log.path.mkdir()


def end_torn(log: SiteLog) -> None:
    add(log)
    damaged(log, torn)


@pytest.mark.parametrize("fault", [in_the_way, end_torn])
def test_where_no_line_can_be_added_nothing_is_trained_paid_or_answered(
    fault: Callable[[SiteLog], None], log: SiteLog, own: dict[str, Any], ledger: Path
) -> None:
    fault(log)
    asked_for: list[Any] = []

    def spy(*what: Any) -> Any:
        asked_for.append(what)

    assert refused(through_gate(asked(ZEROS, task_of((0, 1)), EVALUATION), of_node(own), Behind(spy, spy)))
    assert refused(guard(to_node(query(), "query"), of_node(own), spy))
    assert asked_for == []
    assert Ledger(ledger).accounts() == {}


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_a_line_that_cannot_be_finished_leaves_no_half_of_itself_and_no_answer(
    fails: str, log: SiteLog, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(log)
    before, write = log.path.read_bytes(), os.write

    def half(file: int, text: bytes) -> int:
        return write(file, text[: len(text) // 2])

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(f"umbel.privacy.gate.site_log.os.{fails}", half if fails == "write" else full)
        reply = guard(to_node(query(), "query"), of_node(own), lambda msg, _: Message(query(), reply_to=msg))
    assert refused(reply)
    assert log.path.read_bytes() == before
    add(log)
    assert len(list(log.lines())) == 2


# --- a ledger that is older than its log


def test_a_site_with_an_older_ledger_refuses_until_the_ledger_has_the_logs_charges(
    ledger: Path, log: SiteLog, own: dict[str, Any]
) -> None:
    round_of(task_of((0, 1), round=1))(own)
    copy = ledger.read_bytes()
    round_of(task_of((1, 4), round=2))(own)
    round_of(task_of((4,), round=3, noise_multiplier=7.0))(own)
    before = Ledger(ledger).accounts()

    ledger.write_bytes(copy)
    trained: list[int] = []
    assert refused(round_of(task_of((0,), round=4), clients=lambda *_: trained.append(1))(own))
    assert not trained
    with raises(LogError, "log.ledger-behind", str(ledger)):
        log.check_end()
    assert len(list(log.lines())) == 3, "nothing was answered"

    assert log.restored() == 3
    assert Ledger(ledger).accounts() == before
    assert [row["round"] for row in Ledger(ledger).rows()] == [1, 1, 2, 2, 3]
    *_, line = log.lines()
    assert (line["decision"], line["message"]) == ("restored", "ledger")
    assert not refused(round_of(task_of((0,), round=4))(own))
    assert log.lost() == []


def test_an_empty_ledger_beside_a_log_gets_all_its_charges(ledger: Path, log: SiteLog, own: dict[str, Any]) -> None:
    for number in (1, 2):
        round_of(task_of((0, 4), round=number))(own)
    before = Ledger(ledger).accounts()
    ledger.unlink()
    Ledger.create(ledger)
    assert refused(round_of(task_of((0,), round=3))(own))
    assert log.restored() == 4
    assert Ledger(ledger).accounts() == before


def test_a_ledger_that_is_ahead_of_its_log_is_no_older_one(ledger: Path, log: SiteLog, own: dict[str, Any]) -> None:
    """As after a process that was killed between charge and line."""
    round_of(task_of((0,)))(own)
    Ledger(ledger).charge(Charge("1", 2, Release(Kind.TRAIN, 2, 5.0, Clipping.PUBLIC)), [ClientInDataset(1)])
    log.check_end()
    assert not refused(round_of(task_of((0,), round=3))(own))


def test_the_ledger_of_another_site_is_not_taken_for_this_ones(ledger: Path, log: SiteLog, own: dict[str, Any]) -> None:
    round_of(task_of((0,)))(own)
    ledger.unlink()
    Ledger.create(ledger).charge(Charge("9", 1, Release(Kind.TRAIN, 2, 5.0, Clipping.PUBLIC)), [ClientInDataset(0)])
    with raises(LogError, "log.ledger-behind"):
        log.check_end()


def test_charges_from_before_a_log_began_are_not_forgotten(ledger: Path, log: SiteLog, own: dict[str, Any]) -> None:
    """The log that was set aside has them, and the ledger is older than its end."""
    copies = []
    for number in (1, 2):
        round_of(task_of((0, 1), round=number))(own)
        copies.append(ledger.read_bytes())
    log.set_aside()
    round_of(task_of((4,), round=3))(own)
    ledger.write_bytes(copies[0])
    for _ in range(2):
        with raises(LogError, "log.no-clients", "4 charges"):
            log.restored()
        assert refused(round_of(task_of((0,), round=4))(own))
    ledger.write_bytes(copies[1])
    assert log.restored() == 1
    assert not refused(round_of(task_of((0,), round=4))(own))


def test_a_crash_while_charges_are_restored_charges_too_often_rather_than_too_seldom(
    ledger: Path, log: SiteLog, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        round_of(task_of((0, 4), round=number))(own)
    before = Ledger(ledger).accounts()
    ledger.unlink()
    Ledger.create(ledger)
    later = datetime.now(UTC) + timedelta(hours=1)
    with monkeypatch.context() as patched:
        patched.setattr(log, "_append", Mock(side_effect=KeyboardInterrupt))
        patched.setattr("umbel.privacy.gate.ledger.datetime", Mock(now=lambda _: later))
        with pytest.raises(KeyboardInterrupt):
            log.restored()
    assert refused(round_of(task_of((0,), round=3))(own))
    assert log.restored() == 4
    after = Ledger(ledger).accounts()
    assert all(times <= after[client][release] for client, own in before.items() for release, times in own.items())
    assert not refused(round_of(task_of((0,), round=3))(own))


def test_a_line_that_does_not_tell_of_the_ledger_is_refused(ledger: Path, log: SiteLog) -> None:
    log.answered(Entry("7", "train", {}, 2), True)
    [line] = log.lines()
    without = {name: value for name, value in line.items() if name not in ("charges", "charge", "charged", "hash")}
    body = json.dumps(without, separators=(",", ":")).encode()[:-1]
    log.path.write_bytes(body + b',"hash":"' + sha256(body).hexdigest().encode() + b'"}\n')
    for use in (log.check_end, log.restored):
        with raises(LogError, "log.broken-chain", "charges the ledger had"):
            use()


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=200))
def test_ranges_hold_each_client(clients: list[int]) -> None:
    assert from_ranges(in_ranges(clients)) == sorted(set(clients))


@pytest.mark.parametrize(("clients", "most"), [(2000, 2000), (2001, 2500), (3000, 502_000)])
def test_a_line_holds_few_others_where_clients_are_equally_far_apart(clients: int, most: int) -> None:
    asked = range(0, 500 * clients, 500)
    found = from_ranges(in_ranges(asked))
    assert len(found) <= most
    assert set(found) >= set(asked)


def test_a_line_stays_short_and_charges_too_many_clients_rather_than_too_few() -> None:
    clients = sorted(np.random.default_rng(0).choice(10**6, 10**5, replace=False).tolist())
    text = in_ranges(clients)
    assert len(text) < 32_000
    assert set(from_ranges(text)) >= set(clients)


# --- a full disk


class Disk:
    """A disk on which files beside the ledger find no room, but the log does in the place of the reserve."""

    def __init__(self, log: SiteLog, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self._reserve, self._write = False, log.reserve.path, os.write
        monkeypatch.setattr("umbel.privacy.gate.site_log.os.write", self.write)
        monkeypatch.setattr("umbel.privacy.gate.store.free_space", lambda _: 0 if self.full else 1 << 40)

    def write(self, file: int, text: bytes) -> int:
        if self.full and self._reserve.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(file, text)


def test_a_disk_that_fills_up_after_the_charge_still_takes_the_line_and_then_no_charge(
    log: SiteLog, own: dict[str, Any], ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(log, monkeypatch)

    def filled_up(task: TrainingSpec, assigned: NDArray[np.int64]) -> Any:
        disk.full = True
        return train(task, assigned)

    asks = asked(ZEROS, task_of((0, 1)))
    assert not refused(through_gate(asks, of_node(own), filled_up))
    charged = list(Ledger(ledger).rows())
    [line] = log.lines()
    assert (line["decision"], line["paid"], len(charged)) == ("answered", 2, 2)
    assert not log.reserve.path.exists(), "the line took its place"

    assert refused(through_gate(asks, of_node(own), CLIENTS))
    assert list(Ledger(ledger).rows()) == charged
    disk.full = False
    assert not refused(through_gate(asks, of_node(own), CLIENTS))
    assert len(list(Ledger(ledger).rows())) == 4
    assert [line["paid"] for line in log.lines()] == [2, 2]


def test_a_charge_for_which_there_is_no_room_is_none_and_nothing_is_trained(
    log: SiteLog, own: dict[str, Any], ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[TrainingSpec] = []

    def spy(task: TrainingSpec, assigned: NDArray[np.int64]) -> Any:
        trained.append(task)
        return train(task, assigned)

    connect = sqlite3.connect

    def small(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        connection.execute("PRAGMA max_page_count = 1")  # no more than the pages that are there
        return connection

    with monkeypatch.context() as patched:
        patched.setattr("umbel.privacy.gate.store.sqlite3.connect", small)
        assert refused(through_gate(asked(ZEROS, task_of(tuple(range(1000)))), of_node(own), spy))
    [line] = log.lines()
    assert (line["decision"], line["paid"], trained) == ("refused", 0, [])
    assert "[ledger.disk-full]" in line["reason"]
    assert Ledger(ledger).accounts() == {}
