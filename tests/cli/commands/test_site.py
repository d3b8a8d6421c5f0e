"""`umbel site check`: a site looks at itself before it goes online."""

from __future__ import annotations

import os
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from tests.helpers.cli import refused, said, umbel
from tests.helpers.datasets import manifest
from tests.helpers.ledgers import forget
from umbel.client.node import Node
from umbel.data import offsets_of, write_dataset
from umbel.deploy import certs
from umbel.privacy.site.charges import Charge
from umbel.privacy.site.config import Site
from umbel.privacy.site.entry import Entry
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.witness import Witness
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.home import umbel_home
from umbel.protocol.project import OWN_PATH
from umbel.protocol.release import Clipping, Kind, Release
from umbel.protocol.run_config import RunConfig

SCHEMA = """
model = "linear inputs=1 outputs=1"
client = { name = "who", type = "text" }
target = { name = "y", type = "number" }
features = [{ name = "x", type = "number" }]
"""


PAID = Charge("7", 1, Release(Kind.TRAIN, 2, 5.0, Clipping.PUBLIC))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    own = manifest(3, 1, model="linear", loss="mse")
    write_dataset(tmp_path / "data", own, np.ones((8, 2), np.float32), np.ones(8, np.float32), offsets_of([2] * 4))
    return tmp_path / "data"


def pairs(**entries: object) -> str:
    return " ".join(f'{key.replace("_", "-")}="{value}"' for key, value in entries.items())


@pytest.fixture
def table(tmp_path: Path) -> dict[str, str]:
    """The configuration of a site with a table of its own."""
    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "t.csv").write_text("who,x,y\nnorth,1,2\nsouth,2,1\n")
    reader = f"umbel.data.table:read schema={tmp_path}/schema.toml"
    return {"data-path": f"{tmp_path}/t.csv", "role": "train", "reader": reader}


def test_it_says_what_the_site_has_and_what_it_accepts(data: Path, tmp_path: Path) -> None:
    Journal.create(tmp_path / "ledger.jsonl")
    told = said("site", "check", pairs(data_path=data, ledger_path=f"{tmp_path}/ledger.jsonl", budget=7.0))
    for text in (
        "4 clients, 8 rows", "4 train, 0 report", "linear, n = 2, loss mse", "intact", "budget = 7.0",
        "maximum epsilon between any two data sets", "The site can go online",
    ):  # fmt: skip
        assert text in told
    assert "min-clients" not in told, "is as it always is"


@pytest.mark.parametrize(
    ("entries", "options", "code", "part"),
    [
        ("", "", "site", "data-path"),
        ('data-path="{data}" bugdet=3.0', "", "site", "did you mean budget?"),
        ('data-path="{data}" budget="inf delta=0.1"', "", "site", "delta"),
        ('data-path="{data}" min-clients=3', "", "site", 'release = "site"'),
        ('data-path="{data}-gone"', "", "data", "gone"),
        ('data-path="{data}"', "--model mlp", "protocol", "'linear'"),
        ("nonsense", "", "site.bad-pairs", "NODE_CONFIG"),
    ],
)
def test_what_would_fail_later_is_told_now_in_one_line(
    data: Path, entries: str, options: str, code: str, part: str
) -> None:
    refused(code, "site", "check", entries.format(data=data), *options.split(), parts=(part,))


def test_a_reader_that_is_installed_is_not_one_of_that_name_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder came with the data, it would be the sender's code."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(OWN_PATH, "")
    for place, text in (("installed", ""), ("sent", "raise RuntimeError('of the sender')")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "umbel_test_reader.py").write_text(text)
    (tmp_path / "sent" / "rows.csv").write_text("who,x\n")
    sys.path.append(str(tmp_path / "installed"))
    monkeypatch.chdir(tmp_path / "sent")
    config = pairs(data_path=tmp_path / "sent" / "rows.csv", reader="umbel_test_reader:read")
    refused("config.import", "site", "check", config, parts=("umbel_test_reader", "'read'"))


def test_a_check_numbers_no_clients(table: dict[str, str]) -> None:
    """With a misspelt name in the table, the ledger would want its rows for ever."""
    file = Path(table["data-path"])
    whole = file.read_text()
    for text in (whole.replace("north", "nroth"), whole):
        file.write_text(text)
        said("site", "check", pairs(**table))
    assert not (umbel_home() / "ledger.jsonl").exists()
    # A message to the site does number them, and a check knows that.
    assert Node.of(table, RunConfig(dataset="").entries()).hosting.train == 2
    said("site", "check", pairs(**table))
    file.write_text("who,x,y\nnorth,1,2\n")
    assert "data.gone-clients" in umbel("site", "check", pairs(**table))[1]


def test_a_table_is_opened_again_after_a_repair_with_a_witness_of_its_own(
    table: dict[str, str], tmp_path: Path
) -> None:
    """No process of the site looks at another witness; commands that do not know the site's may."""
    (witness := tmp_path / "witness").mkdir()
    table["witness-path"] = str(witness)
    site, path = Site.of(table), umbel_home() / "ledger.jsonl"
    Node.of(table, RunConfig(dataset="").entries())
    assert [file.name for file in witness.iterdir()] == [Witness(path).path.name]
    assert not Witness(path).path.exists()
    before = path.read_bytes()
    Journal(path).charge(PAID, [ClientInDataset(0)])
    Journal.of(site)
    path.write_bytes(before)
    forget()
    said("site", "check", pairs(**table), "--repair")
    forget()
    assert Journal(path).accounts() == Journal.of(site).accounts()
    assert len(Journal(path).accounts()) == 2


@pytest.mark.parametrize("place", ["0/2", "1/2"])
def test_a_repair_charges_the_clients_of_all_nodes_that_share_the_data(place: str, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    before = Journal.create(path).path.read_bytes()
    Journal(path).charge(PAID, [ClientInDataset(3)])
    path.write_bytes(before)
    forget()
    said("site", "check", pairs(data_path=data, ledger_path=path, role="split", place=place), "--repair")
    assert [*Journal(path).accounts()] == [0, 1, 2, 3]


# --- what lies beside the data, and the way to the server


def faults(node_config: str, *options: object) -> tuple[int, list[str]]:
    """Return the exit code, and the codes of the errors."""
    code, told = umbel("site", "check", node_config, *options)
    return code, [line.rpartition("[")[2][:-1] for line in told.splitlines() if line.startswith("Error: ")]


def test_each_fault_of_a_site_is_told_at_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = (tmp_path / f"{name}.jsonl" for name in ("ledger", "other"))
    other.write_text("not a ledger")
    other.chmod(0o644)
    with monkeypatch.context() as patch:
        patch.setattr("umbel.client.checks._LEAST_FREE", 1 << 60)
        found = faults(pairs(data_path=data, ledger_path=other, budget=1.0))
    assert found == (2, ["ledger.another-file", "site.permissions", "site.disk"])
    Journal.create(own).record(Entry("7", "train"), True)
    config = pairs(data_path=data, ledger_path=own)
    assert faults(config) == (0, [])
    Journal(own).charge(PAID, [ClientInDataset(0)])
    Journal(own).record(Entry("7", "train"), True)
    own.unlink()
    forget()
    # Before the repair, the index knows what was charged; afterwards the journal does.
    assert faults(config) == (1, ["ledger.behind"])
    assert faults(config, "--repair") == faults(config) == (0, [])
    assert Journal(own).account(ClientInDataset(0)) == {PAID.release: 1}


class Health(BaseHTTPRequestHandler):
    """A healthy server, whose clock a test sets."""

    ahead, status = 0.0, 200

    def do_GET(self) -> None:
        self.send_response_only(self.status if self.path == "/health" else 500)
        self.send_header("Date", formatdate(time.time() - self.ahead, usegmt=True))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    certs.make(tmp_path / "certs", ["localhost"], ["site-1"], os.getuid())
    return tmp_path / "certs"


@pytest.fixture
def server(certificates: Path) -> Iterator[HTTPServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    with HTTPServer(("127.0.0.1", 0), type("Own", (Health,), {})) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


Change = Callable[[HTTPServer, Path, dict[str, str]], Any]


def expire(certificates: Path) -> None:
    """Replace the authority's certificate by one that ended yesterday."""
    key, name = ec.generate_private_key(ec.SECP384R1()), x509.Name([])
    now = datetime.now(UTC)
    built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    built = built.serial_number(1).not_valid_before(now - timedelta(9)).not_valid_after(now - timedelta(1))
    (certificates / "ca.crt").write_bytes(built.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (lambda *_: None, []),
        (lambda server, *_: setattr(server.RequestHandlerClass, "ahead", 60), ["site.clock"]),
        (lambda server, *_: setattr(server.RequestHandlerClass, "ahead", -60), []),
        (lambda server, *_: setattr(server.RequestHandlerClass, "ahead", -600), ["site.clock"]),
        (lambda server, *_: setattr(server.RequestHandlerClass, "status", 503), ["site.no-server"]),
        (lambda *_: _[2].update(superlink="localhost:1"), ["site.no-server"]),
        (lambda *_: _[2].update(superlink="nonsense"), ["site.no-server"]),
        (lambda *_: _[2].update(superlink=_[2]["superlink"].replace("localhost", "0.0.0.0")), ["site.certificate"]),
        (lambda _, certs, __: expire(certs), ["site.certificate"] * 2),
        (lambda _, certs, __: (certs / "ca.crt").write_text("x"), ["site.certificate"]),
        (lambda _, certs, __: (certs / "site-1").chmod(0o644), ["site.permissions"]),
        (lambda _, certs, __: (certs / "site-1").write_text("x"), ["site.key"]),
        (lambda _, certs, __: (certs / "site-1").unlink(), ["site.key"]),
    ],
)  # fmt: skip
def test_the_way_to_the_server_is_checked_before_a_run(
    data: Path, tmp_path: Path, server: HTTPServer, certificates: Path, change: Change, codes: list[str]
) -> None:
    """A clock may be 290 s behind."""
    options = {"superlink": f"localhost:{server.server_port}"}
    Journal.create(tmp_path / "ledger.jsonl")
    change(server, certificates, options)
    found = faults(
        pairs(data_path=data, ledger_path=f"{tmp_path}/ledger.jsonl"), "--superlink", options["superlink"],
        "--root-certificates", certificates / "ca.crt", "--auth-supernode-private-key", certificates / "site-1",
    )  # fmt: skip
    assert found == (2 if codes else 0, codes)
