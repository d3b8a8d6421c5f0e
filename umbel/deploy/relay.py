"""``umbel relay start``: collects a round's anonymous releases, and hands them on together (`umbel.privacy.anonymous`).

People who do not run the server run it. It keeps everything in memory and writes nothing to disk. Its log has numbers
only: of releases, never of a site, a run or an address.
"""

from __future__ import annotations

import ssl
import tomllib
from collections.abc import Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Annotated

import typer
import uvicorn

from umbel.deploy.connections import LOOP, BoundedConnection
from umbel.deploy.guard import Bodies
from umbel.deploy.listening import check_port
from umbel.deploy.ready import Ready, Receive, Scope, Send
from umbel.deploy.validity import check_validity
from umbel.privacy.anonymous.batches import Batches
from umbel.privacy.anonymous.link import CLOSE, SUBMIT
from umbel.privacy.anonymous.submission import LONGEST_HEAD, Submission, closing_in
from umbel.privacy.anonymous.terms import MOST
from umbel.protocol import logs
from umbel.protocol.cli import command_line, errors_in_one_line
from umbel.protocol.errors import RelayError
from umbel.protocol.flower import log
from umbel.protocol.signatures import PublicKey, public_key, same_key
from umbel.protocol.words import count_of

_MIB = 1 << 20
_HEAD = LONGEST_HEAD + 4


class Service:
    """The relay's ASGI application.

    Parameters
    ----------
    batches : Batches
    largest : int
        Maximum bytes of a submission.
    """

    def __init__(self, batches: Batches, largest: int) -> None:
        self._batches, self._largest = batches, largest
        self._bodies = Bodies(self._read)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        if scope["method"] != "POST" or scope["path"] not in (SUBMIT, CLOSE):
            await _reply(send, 404, b"not found")
            return
        await self._bodies.pass_on(scope, receive, send, self._largest if scope["path"] == SUBMIT else _HEAD)

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = []
        while (message := await receive())["type"] == "http.request":
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        else:
            return
        try:
            found = self._answer(scope["path"], b"".join(parts))
        except RelayError as error:
            log(WARNING, "refused a request [%s]", error.code)
            await _reply(send, 409, str(error).encode())
            return
        await _reply(send, 200, found)

    def _answer(self, path: str, body: bytes) -> bytes:
        if path == SUBMIT:
            self._batches.submit(Submission.read(body))
            return b""
        sealed = self._batches.close(*closing_in(body), MOST)
        log(INFO, "handed on a batch of %s", count_of(len(sealed), "release"))
        return b"".join(sealed)


async def _reply(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def server_of(batches: Batches, largest: int, host: str, port: int, certificate: Path, key: Path) -> uvicorn.Server:
    """Return a relay's server; raise `RelayError` if it cannot have these certificate and key, and `CertificateError`
    if the certificate has expired."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        text = f"{certificate} and {key} are no certificate and its key: {error}; umbel certs makes them"
        raise RelayError(text, code="relay.certificate") from None
    check_validity(certificate)
    config = uvicorn.Config(
        Ready(Service(batches, largest), lambda: None), host, port, http=BoundedConnection, loop=LOOP, ws="none",
        lifespan="off", proxy_headers=False, server_header=False, access_log=False, log_level="warning",
        ssl_certfile=certificate, ssl_keyfile=key,
    )  # fmt: skip
    return uvicorn.Server(config)


def read_sites(file: Path) -> Mapping[str, PublicKey]:
    """Return the sites in a TOML file with the table ``[parties]`` of their policies: a name and a public key each."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8")).get("parties")
    except (OSError, ValueError, RecursionError) as error:
        raise RelayError(f"{file} cannot be read: {error}", code="relay.sites-file") from None
    if not isinstance(found, dict) or len(found) < 2 or not all(isinstance(line, str) for line in found.values()):
        text = f'{file} lists no two sites: give a table [parties] with lines name = "ssh-ed25519 AAAA…"'
        raise RelayError(text, code="relay.sites-file")
    keys = {name: public_key(name, line) for name, line in found.items()}
    if same := same_key(keys):
        text = f"{file} lists {' and '.join(same)} with the same key; list each site once"
        raise RelayError(text, code="relay.sites-file")
    return keys


def main(
    sites: Annotated[Path, typer.Option(help="TOML file with the table parties of the sites' policies.")],
    least: Annotated[int, typer.Option(min=2, help="Fewest releases in a batch; a site may ask for more.")],
    certificate: Annotated[Path, typer.Option(help="The relay's certificate, for TLS.")],
    key: Annotated[Path, typer.Option(help="The private key of the certificate.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8443,
    memory: Annotated[int, typer.Option(min=1, help="Maximum memory for all releases together, in MiB.")] = 1024,
    largest: Annotated[int, typer.Option(min=1, help="Maximum size of a release, in MiB.")] = 64,
) -> None:
    """Start a relay, which hides the sender of each release from the server. It stores nothing on disk."""
    logs.configure()
    with errors_in_one_line():
        keys = read_sites(sites)
        server = server_of(
            Batches(keys, least, memory * _MIB), largest * _MIB + _HEAD, host, port, certificate, key
        )  # fmt: skip
        check_port(RelayError, host, str(port))
    log(INFO, "The relay serves %s, in batches of at least %s", count_of(len(keys), "site"), count_of(least, "release"))
    server.run()


app = command_line(main)
