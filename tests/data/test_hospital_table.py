"""A site serves a table of charges as the recipe would write it, and alone reads what is wrong with it."""

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
from umbel.privacy.gate.ledger import Ledger
from umbel.protocol.errors import DatasetError, SiteError
from umbel.protocol.messages import hosting_in, query
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import Hosting
from umbel.simulation.grid import InProcessGrid

CSV = """\
DRG Definition,Provider Id,Provider Name,Provider Zip Code,Average Total Payments
690 - KIDNEY,20002,B,2115,"$4,500.00"
194 - PNEUMONIA,20002,B,2115,7000
039 - EXTRACRANIAL,20002,B,2115,9000
"""
PLACES = "US\t02115\tBoston\tMassachusetts\tMA\tSuffolk\t25\t\t\t42.5\t-75\t4\n"

RUN = RunConfig(dataset="", device="cpu").entries()
READER = "umbel.data.hospital_table:read"


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """The node configuration of a hospital with one table."""
    (tmp_path / "charges.csv").write_text(CSV)
    (tmp_path / "US.txt").write_text(PLACES)
    return {
        "data-path": str(tmp_path / "charges.csv"),
        "reader": f"{READER} geonames={tmp_path / 'US.txt'}",
        "ledger-path": str(Ledger.create(tmp_path / "ledger.sqlite").path),
    }


def ask(site: dict[str, str], run_config: dict[str, Any]) -> Message:
    """Ask the site what it hosts."""
    grid = InProcessGrid(app, run_config, node_configs=[site])
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(query(), node, "query", group_id="query")])
    return reply


def test_its_rows_are_those_of_the_recipe_in_the_same_units(site: dict[str, str]) -> None:
    dataset = Node.of(site, RUN).dataset
    # By hand: service index / 4, (longitude + 100) / 50, (latitude - 40) / 50; dollars / 10,000. The ZIP code has
    # lost its zero, and DRG 39 is none of the four services.
    np.testing.assert_array_equal(dataset.features, np.array([[0, 0.5, 0.05], [0.75, 0.5, 0.05]], np.float32))
    np.testing.assert_array_equal(dataset.targets, np.array([0.7, 0.45], np.float32))
    assert (dataset.manifest.model, dataset.manifest.loss) == ("mlp", "rmse")


def test_one_hospital_is_one_client_that_trains(site: dict[str, str], run_config: dict[str, Any]) -> None:
    reply = ask(site, run_config | {"model": "", "loss": ""})
    assert hosting_in(reply.content) == Hosting(1, 0, -1, -1)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("Total Payments", "Total Payments (cents)", "lacks the columns ['Average Total Payments']"),
        ("7000", "7.0", "Total Payments in data row 2 is '7.0', not from 500 to 500,000; is it in another unit?"),
        ("2115", "0", "Provider Zip Code in data row 1 is '0', not from 1 to 99,999"),
        ("2115", "96939", "no provider has a ZIP code that GeoNames knows"),
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
    rows = [f"194 - PNEUMONIA,{20000 + number},B,2115,{1000 + number}" for number in numbers]
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


def test_providers_in_no_place_are_left_out_and_the_site_reads_which(
    site: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    table = Path(site["data-path"])
    table.write_text(f"{CSV}194 - PNEUMONIA,20017,B,99999,7000\n")
    assert len(Node.of(site, RUN).training) == 1
    assert "does not know their ZIP codes: [99999]" in caplog.text


def test_clients_of_a_table_all_train_or_all_report(site: dict[str, str]) -> None:
    assert len(Node.of({**site, "role": "validation"}, RUN).validation) == 1
    with raises(SiteError, "site.role"):
        Node.of({**site, "role": "split"}, RUN)


def test_places_must_be_at_the_site(site: dict[str, str], run_config: dict[str, Any], caplog: Any) -> None:
    assert ask({**site, "reader": READER}, run_config).error.reason == "refused"
    assert "add geonames=/path/to/US.txt to reader in its node configuration" in caplog.text
    with raises(DatasetError, "data.unreadable", "/nowhere/US.txt"):
        Node.of({**site, "reader": f"{READER} geonames=/nowhere/US.txt"}, RUN)


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
