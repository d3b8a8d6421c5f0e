"""Limits for strangers at the server: on open connections, and on the time for a request's head and for a response.

They act before the guard, which sees only requests, and before TLS, since a stranger may never finish its handshake.
The parser is h11, which limits a request's head; uvicorn's other parser, httptools, keeps everything that is sent. A
request's body must have a length, as all of Flower's do: h11 reads a body in chunks of one byte at 1.5 MB/s, and
answers no other request meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from functools import partial
from logging import WARNING
from typing import Any, ClassVar

import h11
from uvicorn.loops.auto import auto_loop_factory
from uvicorn.protocols.http.h11_impl import H11Protocol

from umbel.deploy.guard import OF_CONNECTION, peer_of
from umbel.protocol.log import log

_SILENT_S = 600.0
"""Minimum seconds between two lines on closed connections."""

LOOP = f"{__name__}:bounded_loop"
"""The event loop's place, for uvicorn."""


def bounded_loop() -> asyncio.AbstractEventLoop:
    """Return uvicorn's event loop; its servers accept a bounded number of connections."""
    loop: Any = auto_loop_factory()()
    loop.create_server = partial(_create_server, loop)
    loop_: asyncio.AbstractEventLoop = loop
    return loop_


async def _create_server(
    loop: asyncio.AbstractEventLoop,
    factory: Callable[[], BoundedConnection],
    host: str | None = None,
    port: int | None = None,
    *,
    sock: socket.socket | None = None,
    ssl: ssl.SSLContext | None = None,
    backlog: int = 100,
) -> Door:
    if sock is None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.create_server(address[:2], family=family, backlog=backlog)
    return Door(loop, factory, sock, ssl)


class Door:
    """A listening socket that closes connections above the limits at once; for uvicorn, an ``asyncio.Server``.

    Connections from this machine count only in the total.
    """

    most: ClassVar[int] = 512
    """Maximum simultaneous connections. A site has two; a process may usually have 1,024 files and connections."""
    most_of_a_peer: ClassVar[int] = 16
    """Maximum simultaneous connections from one address; with IPv6 from one /64 network."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], BoundedConnection],
        listening: socket.socket,
        context: ssl.SSLContext | None,
    ) -> None:
        self._loop, self._factory, self._context = loop, factory, context
        self._open: Counter[str] = Counter()
        self._silent_until = 0.0
        self._served: set[asyncio.Task[None]] = set()
        listening.setblocking(False)
        self.sockets = (listening,)
        self._accepting = loop.create_task(self._accept(listening))

    def close(self) -> None:
        """Accept no more connections."""
        self._accepting.cancel()
        self.sockets[0].close()

    async def wait_closed(self) -> None:
        """Wait until no more are accepted; uvicorn ends those that are open."""
        await asyncio.wait([self._accepting])

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listening)
            except OSError:  # no file descriptors left, or the caller is gone already
                await asyncio.sleep(0.1)
                continue
            try:
                other, own = connection.getpeername(), connection.getsockname()
            except OSError:
                connection.close()
                continue
            peer, elsewhere = peer_of(other), other[0] != own[0]
            if self._open.total() >= self.most or (elsewhere and self._open[peer] >= self.most_of_a_peer):
                connection.close()
                self._tell()
                continue
            self._open[peer] += 1
            task = self._loop.create_task(self._serve(connection, peer))
            self._served.add(task)
            task.add_done_callback(self._served.discard)

    def _tell(self) -> None:
        """Say that connections are closed, at most once in a while."""
        if (now := self._loop.time()) >= self._silent_until:
            self._silent_until = now + _SILENT_S
            told = "new connections are closed at once: %d are open, and at most %d may be, %d of them from one address"
            log(WARNING, told, self._open.total(), self.most, self.most_of_a_peer)

    async def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            timeout = BoundedConnection.head_seconds if self._context else None
            protocol = self._factory()
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=timeout
            )
            await protocol.lost.wait()
        except OSError:  # no TLS, or not in time
            connection.close()
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]


class _WithoutPieces(h11.Connection):
    """The server's side of h11, which rejects a body in chunks."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            raise h11.RemoteProtocolError("a request's body needs a length", error_status_hint=411)
        return event


class BoundedConnection(H11Protocol):
    """uvicorn's HTTP connection by h11, closed if it sends no request in time."""

    head_seconds: ClassVar[float] = 10.0
    """Seconds for TLS, from a connection, or a request's first byte, to the end of its headers, and from a response to
    the end of a body that is not read."""
    stalled_seconds: ClassVar[float] = 600.0
    """Seconds for a caller to take a part of a response."""

    _waiting: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _WithoutPieces(h11.SERVER)
        self.lost = asyncio.Event()
        self.app_state = {**self.app_state, OF_CONNECTION: {}}  # each request gets a shallow copy

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._waiting is None and self.conn.their_state is h11.IDLE:
            self._wait()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and not self._sends_more():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        # uvicorn would read the rest of the body for as long as it comes.
        if self._sends_more() and self._waiting is None:
            self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.stalled_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stalled()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self._stop_waiting()
        self._stop_stalled()
        super().connection_lost(exc)

    def _sends_more(self) -> bool:
        """Return whether the body of a request that has its response is still coming."""
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _stop_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
