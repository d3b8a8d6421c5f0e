"""The relay as a service: what it takes over TLS, from whom, and what it says."""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from typer.testing import CliRunner

from tests.helpers.errors import ended, raises
from tests.helpers.relays import Served, served
from tests.privacy.anonymous.conftest import KEYS, LEAST, Server, submission
from umbel.cli.main import app
from umbel.deploy import certs, relay
from umbel.deploy.connections import BoundedConnection
from umbel.deploy.health import healthy
from umbel.privacy.anonymous import link
from umbel.privacy.anonymous.link import CLOSE, SUBMIT, RelayLink, address_of
from umbel.protocol.errors import RelayError
from umbel.protocol.signatures import line_of
from umbel.simulation.superlink import free_port


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("relay"), KEYS, LEAST) as found:
        yield found


def ask(there: Served, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    host, port = address_of(there.url)
    connection = http.client.HTTPSConnection(
        host, port, timeout=60, context=ssl.create_default_context(cafile=there.ca)
    )
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_batch_goes_through(there: Served) -> None:
    server, link = Server(), there.link
    terms = server.terms()
    for site, clients in (("east", 2), ("west", 1)):
        for client in range(clients):
            link.submit(submission(terms, site, client, (client, ord(site[0]))))
    sealed = there.link.close(terms, server.closing.sign(terms.closing_text), 3)
    assert server.read(sealed, terms).tolist() == [[0.0, 101.0], [0.0, 119.0], [1.0, 101.0]]
    assert there.batches.held == (0, 0)


def test_its_refusals_arrive_with_their_codes(there: Served) -> None:
    server, link = Server(), there.link
    terms = server.terms()
    with raises(RelayError, "relay.sites"):
        link.submit(submission(terms, "east", 1, listed="other"))
    link.submit(submission(terms, "east", 1))
    with raises(RelayError, "relay.signature"):
        link.close(terms, bytes(64), 3)
    for _ in range(2):
        with raises(RelayError, "relay.too-few"):
            link.close(terms, server.closing.sign(terms.closing_text), 3)
    with raises(RelayError, "relay.closed"):
        link.submit(submission(terms, "east", 2))


def test_a_server_reads_no_larger_batch_than_it_asked_for(there: Served) -> None:
    server = Server()
    terms = server.terms()
    for client in range(4):
        there.link.submit(submission(terms, "east", client))
    with raises(RelayError, "relay.too-many"):
        there.link.close(terms, server.closing.sign(terms.closing_text), 3)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/"), ("GET", SUBMIT), ("GET", CLOSE), ("PUT", SUBMIT), ("POST", "/v1/submit/"),
                         ("POST", "/ready"), ("GET", "/v1/batches")],
)  # fmt: skip
def test_nothing_else_is_there(there: Served, method: str, path: str) -> None:
    assert ask(there, method, path) == (404, b"not found")


def test_a_health_check_sees_that_it_is_ready(there: Served) -> None:
    there.link.check()
    assert healthy(f"{there.url}/ready", there.ca)


@pytest.mark.parametrize(("path", "size"), [(SUBMIT, (1 << 20) + 1), (CLOSE, 9000)])
def test_a_giant_message_is_not_read(there: Served, path: str, size: int) -> None:
    assert ask(there, "POST", path, bytes(size))[0] == 413
    assert there.batches.held == (0, 0)


def test_a_body_without_a_length_is_refused(there: Served) -> None:
    assert ask(there, "POST", SUBMIT, **{"Transfer-Encoding": "chunked"})[0] in (400, 411)


@pytest.mark.parametrize("body", [b"", b"\0\0\0\2[]", b"{}" * 100, bytes(5000)])
def test_junk_is_refused(there: Served, body: bytes) -> None:
    for path in (SUBMIT, CLOSE):
        status, said = ask(there, "POST", path, body)
        assert status == 409
        assert said.endswith(b"[relay.request]")


def test_callers_that_send_nothing_do_not_hold_it(there: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is disconnected, and others are served meanwhile."""
    monkeypatch.setattr(BoundedConnection, "head_seconds", 0.5)
    idle = [socket.create_connection(address_of(there.url)) for _ in range(20)]
    there.link.check()
    for one in idle:
        one.settimeout(60)
        assert one.recv(1) == b""
        one.close()


def test_a_relay_that_another_authority_vouches_for_is_away(there: Served, tmp_path: Path) -> None:
    """Otherwise the server's operator could pass for the relay."""
    certs.make(tmp_path, [], [])
    with raises(RelayError, "relay.away"):
        RelayLink(there.url, str(tmp_path / "ca.crt")).check()


def test_a_relay_that_is_gone_is_away(there: Served) -> None:
    with raises(RelayError, "relay.away"):
        RelayLink(f"https://127.0.0.1:{free_port()}", there.ca).check()


def test_a_relay_that_replies_a_byte_at_a_time_is_away(there: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never silent for long, and would hold up a site or a run for days."""

    async def dribbles(send: Any, status: int, body: bytes) -> None:
        headers = [(b"content-length", b"300")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for place in range(300):
            await asyncio.sleep(0.01)
            await send({"type": "http.response.body", "body": b"x", "more_body": place < 299})

    monkeypatch.setattr(relay, "_reply", dribbles)
    monkeypatch.setattr(link, "_WHOLE_S", 0.1)
    with raises(RelayError, "relay.away"):
        there.link.submit(submission(Server().terms(), "east", 1))


@pytest.mark.parametrize(
    "url", ["http://relay:8443", "relay:8443", "https://", "https://relay/path", "https://a@relay"]
)
def test_only_https_leads_to_a_relay(url: str) -> None:
    with pytest.raises(ValueError, match="https://HOST:PORT"):
        address_of(url)


def test_a_refusal_of_another_kind_than_a_relays_is_not_believed(
    there: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lies(*_: Any) -> Any:
        raise RelayError("a site's ledger is damaged [ledger.damaged]")

    monkeypatch.setattr(relay.Service, "_answer", lies)
    with raises(RelayError, "relay.away"):
        there.link.submit(submission(Server().terms(), "east", 1))


def test_its_log_has_numbers_only(there: Served, caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    terms = server.terms()
    logger = logging.getLogger("uvicorn")  # its records go nowhere else
    logger.addHandler(caplog.handler)
    try:
        for client in range(3):
            there.link.submit(submission(terms, "east", client))
        there.link.close(terms, server.closing.sign(terms.closing_text), 3)
        with raises(RelayError, "relay.closed"):
            there.link.submit(submission(terms, "east", 7))
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records] == [
        "handed on a batch of 3 releases", "refused a request [relay.closed]",
    ]  # fmt: skip


# --- the command


def files(folder: Path) -> dict[str, str]:
    certs.make(folder, [], [])
    lines = [f'{name} = "{line_of(key)}"' for name, key in KEYS.items()]
    (folder / "sites.toml").write_text("\n".join(["[parties]", *lines]), encoding="utf-8")
    return {
        "--sites": str(folder / "sites.toml"), "--least": "3", "--certificate": str(folder / "server.crt"),
        "--key": str(folder / "server.key"),
    }  # fmt: skip


def started(**options: str) -> Any:
    words = [word for name, value in options.items() for word in (name, value)]
    return CliRunner().invoke(app, ["relay", "start", *words])


def test_the_command_serves_the_sites_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(relay.uvicorn.Server, "run", lambda self: ran.append(self.config))
    done = started(**files(tmp_path), **{"--port": str(free_port())})
    assert done.exit_code == 0, done.output
    assert relay.read_sites(tmp_path / "sites.toml").keys() == KEYS.keys()
    assert ran[0].is_ssl


@pytest.mark.parametrize(
    ("content", "code"),
    [("", "relay.sites-file"), ("[parties", "relay.sites-file"), ("[parties]\na = 3\nb = 4", "relay.sites-file"),
     ('[parties]\neast = "ssh-ed25519 AAAA"\nwest = "ssh-ed25519 AAAA"', "site.bad-key"),
     (f'[parties]\neast = "{line_of(KEYS["east"])}"\nwest = "{line_of(KEYS["east"])}"', "relay.sites-file")],
    ids=["empty", "cut", "numbers", "no-keys", "one-site-twice"],
)  # fmt: skip
def test_a_file_that_lists_no_sites_is_refused(tmp_path: Path, content: str, code: str) -> None:
    options = files(tmp_path)
    Path(options["--sites"]).write_text(content, encoding="utf-8")
    done = started(**options)
    ended(done.exit_code, done.output, code)


def test_a_key_that_does_not_fit_the_certificate_is_refused(tmp_path: Path) -> None:
    options = files(tmp_path)
    public = KEYS["east"].public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    Path(options["--key"]).write_bytes(public)
    done = started(**options)
    ended(done.exit_code, done.output, "relay.certificate")


def test_an_expired_certificate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certs, "SERVER_DAYS", -0.01)
    done = started(**files(tmp_path))
    ended(done.exit_code, done.output, "certificate.expired", tmp_path / "server.crt")


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = started(**files(tmp_path), **{"--host": "127.0.0.1", "--port": port})
    ended(done.exit_code, done.output, "relay.port", port)
