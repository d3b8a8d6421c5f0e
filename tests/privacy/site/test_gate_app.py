"""The gate in the app as it is, on the synthetic dataset: training clients 0 to 99, then as many that report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from tests.helpers.ledgers import forget
from tests.helpers.messages import arrived, asked, records, refused, released, stacked, task_of, wire
from umbel.client.app import app
from umbel.data import BUNDLED
from umbel.privacy.site.journal import Journal
from umbel.protocol.messages import keep_request, query
from umbel.protocol.records import pack
from umbel.protocol.tasks import VERSION, EvaluationSpec
from umbel.simulation.grid import InProcessGrid

SECRET = "diagnosis-of-patient-17"
LINEAR = {"weight": (1, 2)}
TRUTH = np.array([[5.0, 6.0], [4.0, -4.5]])
SYNTHETIC = BUNDLED / "synthetic.json"
OWN = {"data-path": str(SYNTHETIC)}


def ask_app(content: RecordDict, message_type: str, run_config: dict[str, Any], **node: Any) -> Message:
    """Return the reply of the app's only node, after a round trip through bytes."""
    configs = [node] if node else None
    grid = InProcessGrid(app, run_config, node_configs=configs)
    (to,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(content, to, message_type)])
    return arrived(reply)


def training(clients: tuple[int, ...], **changes: Any) -> RecordDict:
    return asked(stacked(TRUTH, LINEAR), task_of(clients, **changes))


def evaluation(clients: tuple[int, ...]) -> RecordDict:
    return asked(stacked(TRUTH, LINEAR), None, EvaluationSpec(1, clients))


def test_the_app_has_no_door_but_these() -> None:
    assert set(app._registered_funcs) == {
        "query.default", "query.keep", "query.channel", "train.default", "evaluate.default",
    }  # fmt: skip


def test_the_app_tells_how_many_clients_a_node_has_and_no_more(run_config: dict[str, Any]) -> None:
    reply = ask_app(query(), "query", run_config, **OWN, role="split")
    hosting = {"version": VERSION, "train": 100, "validation": 100, "first": -1, "step": -1}
    assert records(reply) == {"hosting": hosting}


GOOD: dict[str, RecordDict] = {
    "query": query(),
    "query.keep": keep_request(pack(stacked(TRUTH, LINEAR)), "spring"),
    "train": training((0,)),
    "evaluate": evaluation((100,)),
}


@pytest.mark.parametrize("message_type", GOOD)
def test_the_app_does_not_tell_what_is_wrong_with_a_site(
    message_type: str, run_config: dict[str, Any], tmp_path: Path
) -> None:
    content = GOOD[message_type]
    assert not ask_app(content, message_type, run_config).has_error()
    broken = tmp_path / "broken.json"
    broken.write_text(f'{{"users": ["{SECRET}"], "num_samples": [1], "user_data": {{}}}}')
    for path in (tmp_path / SECRET, broken):
        reply = ask_app(content, message_type, run_config, **{"data-path": str(path)})
        assert refused(reply)
        assert SECRET.encode() not in wire(reply)
        assert str(tmp_path).encode() not in wire(reply)


def cut_off(ledger: Path) -> None:
    """Leave the first line, as in a backup of then."""
    ledger.write_bytes(ledger.read_bytes().splitlines(keepends=True)[0])


@pytest.mark.parametrize(
    ("message_type", "asks"),
    [("query", "query"), ("train", "train"), ("evaluate", "evaluate"), ("train", "evaluate")],
    ids=["query", "train", "evaluate", "evaluate in a message of type train"],
)
@pytest.mark.parametrize("damage", [Path.unlink, cut_off])
def test_without_a_whole_ledger_a_site_with_a_limit_answers_nothing(
    damage: Callable[[Path], None], message_type: str, asks: str, run_config: dict[str, Any], tmp_path: Path
) -> None:
    """Neither what is charged, nor what has no price; a server names the type of a message as it likes."""
    path = Journal.create(tmp_path / "ledger.jsonl").path
    site = {**OWN, "role": "split", "max-participations": 9, "reports": "exact=yes", "ledger-path": str(path)}
    assert not refused(ask_app(GOOD["train"], "train", run_config, **site))
    assert not refused(ask_app(GOOD[asks], message_type, run_config, **site))
    damage(path)
    forget()
    assert refused(ask_app(GOOD[asks], message_type, run_config, **site))


# --- clients whose rows change, who go and come back


SCHEMA = """
model = "linear"
loss = "mse"
[client]
name = "patient"
type = "text"
[target]
name = "y"
type = "number"
[[features]]
name = "x"
type = "number"
[[features]]
name = "z"
type = "number"
"""


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """A site that serves a table, and lets a client take part twice at n/nu = 2/5 each."""
    Journal.create(tmp_path / "ledger.jsonl")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return {
        "data-path": str(tmp_path / "stays.csv"),
        "reader": f"umbel.data.table:read schema={tmp_path / 'schema.toml'}",
        "ledger-path": str(tmp_path / "ledger.jsonl"),
        "paper-budget": "0.8",
    }


def serve(table: dict[str, Any], **rows: str) -> None:
    lines = [f"{client},{row}" for client, row in rows.items()]
    Path(table["data-path"]).write_text("\n".join(["patient,x,z,y", *lines]) + "\n")


def who_pays(table: dict[str, Any], run_config: dict[str, Any], clients: tuple[int, ...]) -> list[int]:
    """Return which of the asked clients release; nobody where the site refuses."""
    reply = ask_app(training(clients), "train", run_config, **table)
    return [] if refused(reply) else released(reply)


def test_rows_that_change_are_paid_for_from_the_same_account(
    table: dict[str, Any], run_config: dict[str, Any], tmp_path: Path
) -> None:
    serve(table, anna="1,2,3", bert="2,0,1")
    assert [who_pays(table, run_config, (0,)) for _ in range(3)] == [[1], [1], []]
    serve(table, anna="-7,5,0", bert="3,3,3")
    assert who_pays(table, run_config, (0, 1)) == [0, 1]
    # The same where the table lies elsewhere: the account hangs on the ledger.
    table["data-path"] = str(tmp_path / "moved.csv")
    serve(table, anna="0,0,1", bert="3,3,3")
    assert who_pays(table, run_config, (0, 1)) == [0, 1]
    assert who_pays(table, run_config, (0, 1)) == []


def test_who_was_away_comes_back_with_what_was_spent_and_who_is_new_has_spent_nothing(
    table: dict[str, Any], run_config: dict[str, Any]
) -> None:
    serve(table, anna="1,2,3", bert="2,0,1")
    assert [who_pays(table, run_config, (0, 1)) for _ in range(2)] == [[1, 1], [1, 1]]
    # A table without anna would have to say who bert is; the register does, and the site closes all the same.
    serve(table, bert="2,0,1", carl="1,1,1")
    assert who_pays(table, run_config, (0, 1)) == []
    serve(table, carl="1,1,1", bert="0,1,2", anna="4,4,4")
    assert who_pays(table, run_config, (0, 1, 2)) == [0, 0, 1]
