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


def test_the_site_alone_reads_what_is_wrong_with_its_table(
    site: dict[str, str], run_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert hosting_in(ask(site, run_config | {"model": "", "loss": ""}).content) == Hosting(1, 0, -1, -1)
    table = Path(site["data-path"])
    table.write_text(CSV.replace("7000", "7.0"))
    os.utime(table, (0, 0))
    assert ask(site, run_config).error.reason == "refused"
    assert "Total Payments in data row 2 is '7.0'" in caplog.text
    assert ask({**site, "reader": READER}, run_config).error.reason == "refused"
    assert "[site.no-schema]" in caplog.text
    with raises(DatasetError, "data.no-file", "/nowhere/schema.toml"):
        Node.of({**site, "reader": f"{READER} schema=/nowhere/schema.toml"}, RUN)
    with raises(SiteError, "site.role"):  # clients of a table all train or all report
        Node.of({**site, "role": "split"}, RUN)


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


@pytest.mark.parametrize("name", ["table.csv", "TABLE.CSV", "table.csv.gz", "table.csv.zip"])
def test_a_table_that_nothing_is_named_to_read_is_known_by_its_name(site: dict[str, str], name: str) -> None:
    path = Path(site["data-path"]).with_name(name)
    with raises(SiteError, "site.table", name):
        Node.of({**site, "reader": "", "data-path": str(path)}, RUN)
    with raises(DatasetError, "data.no-file"):
        Node.of({**site, "data-path": str(path)}, RUN)
