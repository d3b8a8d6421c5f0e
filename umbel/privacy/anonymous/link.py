"""The way to a relay over HTTPS, for sites and for the server."""

from __future__ import annotations

import http.client
import ssl
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Self
from urllib.parse import urlsplit

from umbel.privacy.anonymous.batches import too_many
from umbel.privacy.anonymous.submission import Submission, closing_request
from umbel.privacy.anonymous.terms import Terms
from umbel.protocol.errors import RelayError, told
from umbel.protocol.words import one_line

SUBMIT, CLOSE, READY = "/v1/submit", "/v1/close", "/ready"
"""The relay's paths."""
_TIMEOUT_S, _WHOLE_S = 60.0, 3600.0
"""Maximum seconds of silence, and for a whole reply: a byte a minute would hold up a site, or a run, for days."""
_LONGEST = 1000
"""Bytes of a refusal."""
_OK = 200


def address_of(url: str) -> tuple[str, int]:
    """Return host and port of a relay's address; raise `ValueError` unless it is ``https://HOST:PORT``."""
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError(f"a relay's address is https://HOST:PORT, got {url!r}")
    return parts.hostname, parts.port or 443


@dataclass
class RelayLink:
    """A relay at another address. As a context, it hangs up at the end; several submissions share a connection.

    Parameters
    ----------
    url : str
        As ``https://HOST:PORT``.
    ca : str
        The file with the certificate of the authority that vouches for the relay.
    """

    url: str
    ca: str
    _connection: http.client.HTTPSConnection | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        """Return the link."""
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up."""
        self._hang_up()

    def check(self) -> None:
        """Raise `RelayError` if the relay is away."""
        with self:
            self._ask("GET", READY, b"", _LONGEST)

    def submit(self, submission: Submission) -> None:
        """Hand a submission to the relay; errors as for `umbel.privacy.anonymous.batches.Batches.submit`."""
        self._ask("POST", SUBMIT, submission.to_bytes(), _LONGEST)

    def close(self, terms: Terms, signature: bytes, most: int) -> list[bytes]:
        """Close a batch; see `umbel.privacy.anonymous.batches.Relay`."""
        size = terms.sealed_size
        with self:
            found = self._ask("POST", CLOSE, closing_request(terms, signature), most * size, again=False)
        if len(found) % size:
            raise RelayError("the relay's batch has another size than its releases", code="relay.size")
        return [found[start : start + size] for start in range(0, len(found), size)]

    def _ask(self, method: str, path: str, body: bytes, most: int, again: bool = True) -> bytes:
        """Return a reply of at most so many bytes. A request that may be repeated is sent again once."""
        reply: Future[tuple[int, bytes]] = Future()

        def send() -> None:
            try:
                reply.set_result(self._send(method, path, body, most))
            except Exception as error:
                reply.set_exception(error)

        Thread(target=send, daemon=True).start()
        try:
            status, found = reply.result(_WHOLE_S)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._hang_up()
            if again and not isinstance(error, ValueError):  # a connection that was idle for too long is closed
                return self._ask(method, path, body, most, again=False)
            text = f"the relay {self.url} is away: {one_line(str(error))}"
            raise RelayError(text, code="relay.away") from None
        if status == _OK:
            return found
        refusal = told(one_line(found[:_LONGEST].decode(errors="replace")))
        if isinstance(refusal, RelayError):
            raise refusal
        raise RelayError(f"the relay {self.url} is away: it replied with status {status}", code="relay.away")

    def _send(self, method: str, path: str, body: bytes, most: int) -> tuple[int, bytes]:
        if self._connection is None:
            host, port = address_of(self.url)
            context = ssl.create_default_context(cafile=self.ca)
            self._connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
        connection = self._connection
        connection.request(method, path, body, {"Content-Type": "application/octet-stream"})
        response = connection.getresponse()
        taken, length = response.status == _OK, response.length
        if length is None or length > (most if taken else _LONGEST):
            self._hang_up()
            if taken and length is not None:
                raise too_many()
            raise ValueError(f"it replied with status {response.status}, and too much")
        return response.status, response.read()

    def _hang_up(self) -> None:
        with suppress(OSError):
            if self._connection is not None:
                self._connection.close()
        self._connection = None
