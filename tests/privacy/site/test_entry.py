"""A message as the journal tells of it: what servers asked, and what the site decided."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import DEFAULT_TTL, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

import umbel.privacy.site.refusals
from tests.helpers.codes import made
from tests.helpers.errors import raises
from tests.helpers.messages import SIMULATED, Behind, asked, of_node, refused, stacked, task_of, through_gate, to_node
from umbel.privacy.site.config import Site
from umbel.privacy.site.entry import Entry, outline
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.refusals import PUBLIC, guard, refusal
from umbel.protocol.errors import DatasetError, LedgerError, ProtocolError, Refused, SiteError
from umbel.protocol.messages import PARTS, keep_request, query
from umbel.protocol.records import pack
from umbel.protocol.release import CHANNELS
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

SECRET = "diagnosis-of-patient-17"
ZEROS = stacked(np.zeros((1, 2)), {"weight": (2,)})


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return Journal.create(tmp_path / "ledger.jsonl").path


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


# --- a line


def test_a_line_says_what_was_asked_what_was_decided_and_who_paid(ledger: Path, own: dict[str, Any]) -> None:
    through_gate(asked(ZEROS, task_of((0, 4), round=3)), of_node(own), CLIENTS)
    [line] = Journal(ledger).messages()
    assert datetime.fromisoformat(line.pop("at")).utcoffset() is not None
    training = line["asked"].pop("training")
    expected = {"round": 3, "clients": 2, "noise_multiplier": 5.0, "clipping": "update", "clip_norm": 0.1}
    assert training.items() >= expected.items()
    assert len(line.pop("hash")) == len(line.pop("previous")) == 64
    assert line.pop("policy") == Site.of(own).policy.digest
    [[node, run, name, digest]] = line.pop("sent")
    assert (len(node), run, name, len(digest)) == (16, "1", "", 64)
    assert line == {
        "number": 3, "kind": "message", "run": "1", "message": "train", "asked": {"hypotheses": {"k": 1, "n": 2}},
        "decision": "answered", "reason": "", "paid": 2,
    }  # fmt: skip
    charge = list(Journal(ledger).lines())[1]
    assert (charge["kind"], charge["round"], charge["clients"]) == ("charges", 3, "0,4")


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
    send: Send, decision: str, reason: str, paid: int, ledger: Path, own: dict[str, Any]
) -> None:
    send(own)
    [line] = Journal(ledger).messages()
    assert (line["decision"], line["paid"]) == (decision, paid)
    assert reason in line["reason"]


def test_a_message_that_has_expired_costs_nothing(
    ledger: Path, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a laptop's sleep: the server no longer takes the reply."""
    for beyond, decision, paid in ((-60, "answered", 2), (1, "refused", 0)):
        later = time.time() + DEFAULT_TTL + beyond
        monkeypatch.setattr(umbel.privacy.site.refusals, "time", SimpleNamespace(time=lambda later=later: later))
        round_of(task_of((0, 1)))(own)
        *_, line = Journal(ledger).messages()
        assert (line["decision"], line["paid"]) == (decision, paid)
    assert "[refused.too-late]" in line["reason"]


def test_clients_that_cannot_pay_make_it_a_part(ledger: Path, own: dict[str, Any]) -> None:
    once = own | {"max-participations": 1}
    for clients in ((0,), (0, 1)):
        through_gate(asked(ZEROS, task_of(clients)), of_node(once), CLIENTS)
    _, line = Journal(ledger).messages()
    assert (line["decision"], line["paid"]) == ("partly", 1)
    assert line["reason"] == "train: 1 of 2 clients are over budget [refused.budget]"


def test_a_charge_that_led_to_no_release_is_on_record(
    ledger: Path, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.privacy.mechanisms.sanitise.sanitise_in_place", fails)
    assert refused(through_gate(asked(ZEROS, task_of((0, 1))), of_node(own), CLIENTS))
    [line] = Journal(ledger).messages()
    assert (line["decision"], line["paid"]) == ("refused", 2)


@pytest.mark.parametrize("clients", [CLIENTS, BROKEN])
def test_no_value_of_the_data_is_written_down(clients: Any, ledger: Path, own: dict[str, Any]) -> None:
    through_gate(asked(ZEROS, task_of((0, 1)), EVALUATION), of_node(own), clients)
    text = ledger.read_text()
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
    config = SIMULATED | {"ledger-path": str(tmp_path / "ledger.jsonl")}
    through_gate(asked(ZEROS, task_of((0, 1))), of_node(config), CLIENTS)
    assert list(tmp_path.iterdir()) == []


HUGE = {f"training-{i}": ConfigRecord({"run": "x" * 10**5, "round": 2**62}) for i in range(100)}
ODD = {"training": ConfigRecord({"clip_norm": math.nan, "round": b"\xff" * 10**5, "x" * 10**5: 1.0, "clients": []})}
CONTROL = ConfigRecord(dict.fromkeys(task_of().to_record(), "\x01" * 300))
ALL = {name: CONTROL for name in (*PARTS, *CHANNELS)}


@pytest.mark.parametrize("content", [HUGE, ODD, ALL], ids=["huge", "odd", "all"])
def test_a_server_cannot_make_a_line_long(content: dict[str, Any], ledger: Path, own: dict[str, Any]) -> None:
    through_gate(RecordDict(content), of_node(own), CLIENTS)
    [line] = Journal(ledger).messages()
    assert sum(map(len, ledger.read_bytes().splitlines()[1:])) < 20_000
    assert line["decision"] == "refused"


def test_whatever_else_a_message_holds_what_it_asks_is_in_the_log(ledger: Path, own: dict[str, Any]) -> None:
    message = asked(ZEROS, task_of((0, 1)))
    blinding = {f"x{i}": ConfigRecord({"run": "x" * 10**5}) for i in range(50)}
    assert not refused(through_gate(RecordDict({**blinding, **message}), of_node(own), CLIENTS))
    [line] = Journal(ledger).messages()
    assert line["asked"] == outline(message) | {"others": 50}
    assert line["asked"]["training"]["clients"] == 2


# --- what is not on record does not leave


def test_where_no_line_can_be_added_nothing_is_trained_paid_or_answered(own: dict[str, Any], ledger: Path) -> None:
    whole = ledger.read_bytes()
    ledger.write_bytes(whole + b"something else\n")
    asked_for: list[Any] = []

    def spy(*what: Any) -> Any:
        asked_for.append(what)

    assert refused(through_gate(asked(ZEROS, task_of((0, 1)), EVALUATION), of_node(own), Behind(spy, spy)))
    assert refused(guard(to_node(query(), "query"), of_node(own), spy))
    assert asked_for == []
    ledger.write_bytes(whole)
    assert Journal(ledger).accounts() == {}


def test_where_the_outcome_cannot_be_added_nothing_leaves(
    own: dict[str, Any], ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Journal, "record", gone)
    assert refused(through_gate(asked(ZEROS, task_of((0, 1))), of_node(own), CLIENTS))
    assert len(list(Journal(ledger).rows())) == 2, "they have paid"


def test_a_site_keeps_its_journal_and_its_witness_apart(own: dict[str, Any], ledger: Path, tmp_path: Path) -> None:
    with raises(SiteError, "site.witness"):
        Site.of(own | {"witness-path": str(ledger.parent)})
    (tmp_path / "elsewhere").mkdir()
    site = Site.of(own | {"witness-path": str(tmp_path / "elsewhere")})
    assert Journal.of(site).witness.path.parent == tmp_path / "elsewhere"
    [witness] = (tmp_path / "elsewhere").iterdir()
    witness.unlink()
    witness.parent.rmdir()
    with raises(LedgerError, "ledger.no-folder", witness):
        Journal.of(site)


# --- what a server reads of a refusal: one word, and the code of a decision that no data took part in


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Refused("nu 1 is below 2", code="refused.noise"), "refused [refused.noise]"),
        (Refused("row 3 is 0.1", code="refused.result"), "refused"),
        (Refused("no code"), "refused"),
        (DatasetError("row 3 is 0.1", code="refused.noise"), "refused"),
        (ValueError("0.1"), "refused"),
        (None, "refused"),
    ],
)
def test_only_a_public_code_leaves(error: Exception | None, reason: str) -> None:
    assert refusal(to_node(query(), "query"), error).error.reason == reason


def test_public_codes_exist_and_those_that_follow_from_data_are_not_among_them() -> None:
    codes = {code for one in made() for code in one.codes if code.startswith("refused.")}
    assert codes > PUBLIC
    assert codes - PUBLIC == {
        f"refused.{reason}" for reason in ("arrays", "handler", "layers", "mechanism-shape", "numpy-client", "result")
    }


def test_a_site_tells_that_its_policy_decided_and_nothing_of_its_data(own: dict[str, object]) -> None:
    said = [
        through_gate(asked(ZEROS, *tasks), of_node(own), does).error.reason
        for tasks, does in (
            ((task_of((0, 1), noise_multiplier=0.0),), CLIENTS),
            ((None, EVALUATION), BROKEN),
            ((task_of((0, 1), noise_multiplier=0.0), EVALUATION), BROKEN),
        )
    ]
    assert said == ["refused [refused.unsanitised]", "refused", "refused [refused.unsanitised]"]
