"""Limits for strangers at the server: on open connections, and on the time for a request's head.

They act before the guard, which sees only requests. The parser is h11, which limits a request's head; uvicorn's other
parser, httptools, keeps everything that is sent. A request's body must have a length, as all of Flower's do: h11 reads
a body in chunks of one byte at 1.5 MB/s, and answers no other request meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class _WithoutPieces(h11.Connection):
    """The server's side of h11, which rejects a body in chunks."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            raise h11.RemoteProtocolError("a request's body needs a length", error_status_hint=411)
        return event


class BoundedConnection(H11Protocol):
    """uvicorn's HTTP connection by h11, closed if there are too many or it sends no request in time.

    Connections from this machine count only in the total.
    """

    most: ClassVar[int] = 256
    """At once."""
    most_of_a_peer: ClassVar[int] = 16
    """Maximum simultaneous connections from one address."""
    head_seconds: ClassVar[float] = 10.0
    """Seconds from a connection, or a request's first byte, to the end of its headers."""

    _waiting: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _WithoutPieces(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most or self._of_this_peer() > self.most_of_a_peer:
            transport.abort()
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._waiting is None and self.conn.their_state is h11.IDLE:
            self._wait()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _of_this_peer(self) -> int:
        if not self.client or not self.server or self.client[0] == self.server[0]:
            return 0
        others = cast("set[H11Protocol]", self.connections)
        return [one.client and one.client[0] for one in others].count(self.client[0])

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
