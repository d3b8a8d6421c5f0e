"""A site serves a table of charges by a schema, and alone reads what is wrong with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from tests.helpers.errors import raises
from umbel.client.app import app
from umbel.client.node import Node
from umbel.privacy.site.journal import Journal
from umbel.protocol.errors import DatasetError, SiteError
from umbel.protocol.messages import hosting_in, query
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import Hosting
from umbel.simulation.grid import InProcessGrid

CSV = """\
DRG Definition,Provider Id,Average Total Payments
690 - KIDNEY,20002,"$4,500.00"
194 - PNEUMONIA,20002,7000
039 - EXTRACRANIAL,20002,9000
"""
SCHEMA = """
model = "linear inputs=1 outputs=1"
loss = "mse"
[client]
name = "Provider Id"
type = "integer"
[target]
name = "Average Total Payments"
type = "number"
minimum = 500
maximum = 500_000
scale = 10_000
[[features]]
name = "DRG Definition"
type = "category"
pattern = "^(\\\\d+) -"
categories = ["194", "292", "392", "690"]
other = "drop"
encode = "index"
scale = 4
"""

RUN = RunConfig(dataset="", device="cpu").entries()
READER = "umbel.data.table:read"


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """The node configuration of a hospital with one table."""
    (tmp_path / "charges.csv").write_text(CSV)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return {
        "data-path": str(tmp_path / "charges.csv"),
        "reader": f"{READER} schema={tmp_path / 'schema.toml'}",
        "ledger-path": str(Journal.create(tmp_path / "ledger.jsonl").path),
    }


def ask(site: dict[str, str], run_config: dict[str, Any]) -> Message:
    """Ask the site what it hosts."""
    grid = InProcessGrid(app, run_config, node_configs=[site])
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(query(), node, "query", group_id="query")])
    return reply


def test_its_rows_are_numbers_as_its_schema_says(site: dict[str, str]) -> None:
    """The place of the service in its list, by 4, and dollars by 10,000. DRG 39 is none of the four services."""
    dataset = Node.of(site, RUN).dataset
    np.testing.assert_array_equal(dataset.features, np.array([[0], [0.75]], np.float32))
    np.testing.assert_array_equal(dataset.targets, np.array([0.7, 0.45], np.float32))
    assert (dataset.manifest.model, dataset.manifest.loss) == ("linear inputs=1 outputs=1", "mse")


def test_one_hospital_is_one_client_that_trains(site: dict[str, str], run_config: dict[str, Any]) -> None:
    reply = ask(site, run_config | {"model": "", "loss": ""})
    assert hosting_in(reply.content) == Hosting(1, 0, -1, -1)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("Total Payments", "Total Payments (cents)", "lacks the columns ['Average Total Payments']"),
        ("20002", "B", "Provider Id in data row 1 is 'B', not a number"),
        ("7000", "7.0", "Total Payments in data row 2 is '7.0', not from 500 to 500,000; is it in another unit?"),
    ],
)  # fmt: skip
def test_the_site_alone_reads_what_is_wrong_with_its_table(
    site: dict[str, str], run_config: dict[str, Any], old: str, new: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    Path(site["data-path"]).write_text(CSV.replace(old, new))
    reply = ask(site, run_config)
    assert reply.error.reason == "refused"
    assert reason in caplog.text


def providers(*numbers: int) -> str:
    """A table in which provider 20001 is paid 1001 dollars, and so on."""
    rows = [f"194 - PNEUMONIA,{20000 + number},{1000 + number}" for number in numbers]
    return "\n".join([CSV.splitlines()[0], *rows])


def paid(site: dict[str, str]) -> list[int]:
    """Which provider each client is, told by its payment."""
    return np.rint(1e4 * Node.of(site, RUN).dataset.targets - 1000).astype(int).tolist()


def test_a_provider_keeps_its_number_whoever_comes(site: dict[str, str]) -> None:
    """The ledger charges by number: nobody may get another's budget."""
    table = Path(site["data-path"])
    table.write_text(providers(5, 9))
    assert paid(site) == [5, 9]
    table.write_text(providers(9, 7, 5, 1))
    assert paid(site) == [5, 9, 1, 7]
    table.write_text(providers(1, 5, 7))
    with raises(DatasetError, "data.gone-clients", 20009):
        paid(site)


def test_clients_of_a_table_all_train_or_all_report(site: dict[str, str]) -> None:
    assert len(Node.of({**site, "role": "validation"}, RUN).validation) == 1
    with raises(SiteError, "site.role"):
        Node.of({**site, "role": "split"}, RUN)


def test_a_schema_must_be_at_the_site(site: dict[str, str], run_config: dict[str, Any], caplog: Any) -> None:
    assert ask({**site, "reader": READER}, run_config).error.reason == "refused"
    assert "add schema=/path/to/schema.toml to the node's reader" in caplog.text
    with raises(DatasetError, "data.no-file", "/nowhere/schema.toml"):
        Node.of({**site, "reader": f"{READER} schema=/nowhere/schema.toml"}, RUN)


def test_a_table_that_changes_is_read_again(site: dict[str, str]) -> None:
    path = Path(site["data-path"])
    assert len(Node.of(site, RUN).dataset.targets) == 2
    path.write_text("\n".join(CSV.splitlines()[:2]))
    os.utime(path, (0, 0))
    assert len(Node.of(site, RUN).dataset.targets) == 1


@pytest.mark.parametrize("name", ["table.csv", "TABLE.CSV", "table.csv.gz", "table.csv.zip"])
def test_a_table_that_nothing_is_named_to_read_is_known_by_its_name(site: dict[str, str], name: str) -> None:
    path = Path(site["data-path"]).with_name(name)
    with raises(SiteError, "site.table", name):
        Node.of({**site, "reader": "", "data-path": str(path)}, RUN)
    with raises(DatasetError, "data.no-file"):
        Node.of({**site, "data-path": str(path)}, RUN)
