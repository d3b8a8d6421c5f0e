"""A guard in front of Flower's server, which otherwise starts runs for everyone who reaches its port.

It checks a request's origin and target before Flower reads any of it. Sites reach the Fleet interface, which checks
their keys. Only callers with the operator's secret, or from networks that the operator names, may start runs and
register nodes. Only the executor reaches the executor's interface. Everything else is refused, including unknown
requests.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import socket
import struct
from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any

from umbel.deploy.ready import PATH as READY
from umbel.deploy.ready import Asgi, Fault, Receive, Scope, Send, reply
from umbel.protocol.errors import GuardError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

REFUSAL = "forbidden by this server's guard (docs/operate/trouble.md)"
"""The caller's error text; the ``flwr`` command prints it."""

_OBJECT = "/v1/fleet/push-object"
"""The path for the parts of a site's answer."""
_STORED = ("/v1/fleet/push-messages", _OBJECT)
"""Paths of requests that need room on the server's disk."""
_LARGEST_OBJECT, _LARGEST_BODY = 64 << 20, 1 << 20
"""Maximum bytes of a request to the Fleet interface, with a part of an answer and without. Flower sends arrays in
pieces of 5 MiB, and names 10,000 parts in 680 kB."""
_UNFOLDED = 64
"""Bytes of memory that Flower uses for a byte of a request without a part: each 4 may be a message in a message."""
_IN_FLIGHT, _IN_FLIGHT_OF_A_PEER = 256 << 20, 128 << 20
"""Maximum bytes of memory for its requests in progress: of all sites, and of one address."""
_BODY_S = 600.0
"""Maximum seconds for a request's body."""

_ESTABLISHED = "01"
"""A connection's state in Linux's tables."""

_PATH = re.compile(r"/v1/(fleet|control|runtime)/[a-z]+(?:-[a-z]+)*")
_SECRET = re.compile(r"[!-~]{32,}")


@dataclass(frozen=True)
class Rules:
    """The permissions of callers."""

    # Callers with this secret, or from these networks, may start runs and register nodes. If both are empty, only this
    # machine may.
    secret: bytes | None = field(default=None, repr=False)
    control_from: tuple[Network, ...] = ()
    # Whether there are sites; a simulation has none.
    sites: bool = True
    # Addresses of this machine that the executor must call; if there are none, it must be on this machine.
    runtime_at: frozenset[Address] = frozenset()

    def let(self, scope: Scope) -> bool:
        """Return whether a request may pass."""
        path, method = scope["path"], scope["method"]
        # Paths are compared as sent: a path that needs decoding or cutting is unknown.
        if scope.get("root_path") or scope.get("raw_path") != path.encode():
            return False
        if path in ("/health", READY):
            return method in ("GET", "HEAD")
        known = _PATH.fullmatch(path)
        # Of all callers, a browser alone names an origin: the page may be a stranger's, and the address this machine's.
        if not known or method != "POST" or any(name == b"origin" for name, _ in scope["headers"]):
            return False
        return {"fleet": lambda _: self.sites, "control": self._controls, "runtime": self._executes}[known[1]](scope)

    def _controls(self, scope: Scope) -> bool:
        caller = _address(scope.get("client"))
        if caller and any(caller in network for network in self.control_from):
            return True
        if self.secret:
            sent = [value for name, value in scope["headers"] if name == b"authorization"]
            return len(sent) == 1 and hmac.compare_digest(sent[0], b"Bearer " + self.secret)
        return not self.control_from and _is_this_machine(scope)

    def _executes(self, scope: Scope) -> bool:
        if self.runtime_at:
            return _address(scope.get("server")) in self.runtime_at
        return _is_this_machine(scope) and _is_this_user(scope)


class Bodies:
    """An ASGI application that passes requests on to another as long as their bodies are within bounds."""

    def __init__(self, app: Asgi) -> None:
        self._app = app
        self._in_flight: Counter[str] = Counter()

    async def pass_on(self, scope: Scope, receive: Receive, send: Send, most: int, each: int = 1) -> None:
        """Pass a request on unless it has more bytes than `most`; each takes so many bytes of memory."""
        peer = peer_of(scope.get("client"))
        taken, refusal, begun = 0, (0, ""), False
        until = asyncio.get_running_loop().time() + _BODY_S

        async def receive_some() -> MutableMapping[str, Any]:
            nonlocal taken, refusal
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                refusal = 408, f"a request may take at most {_BODY_S:.0f} s"
                return {"type": "http.disconnect"}
            some = len(message.get("body", b""))
            taken += some
            self._in_flight[peer] += each * some
            if taken > most:
                refusal = 413, f"a request may have at most {most >> 20} MiB"
            elif self._in_flight.total() > _IN_FLIGHT or self._in_flight[peer] > _IN_FLIGHT_OF_A_PEER:
                refusal = 503, "too many requests are in progress; try again"
            return {"type": "http.disconnect"} if refusal[0] else message

        async def send_some(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            if not refusal[0]:
                begun = True
                await send(message)

        try:
            await self._app(scope, receive_some, send_some)
        except Exception:
            if not refusal[0]:
                raise
        finally:
            self._in_flight[peer] -= each * taken
            if not self._in_flight[peer]:
                del self._in_flight[peer]
        if refusal[0] and not begun:
            await _refuse(send, *refusal)


class Guard:
    """An ASGI application that passes allowed requests on to another; sites' replies only if there is no fault."""

    def __init__(self, app: Asgi, rules: Rules, fault: Fault = lambda: None) -> None:
        self._app, self.rules, self._fault = app, rules, fault
        self._bodies = Bodies(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a connection on, or refuse it."""
        kind = scope["type"]
        if kind == "lifespan":
            await self._app(scope, receive, send)
        elif kind == "http":
            if not self.rules.let(scope):
                await _refuse(send, 403, REFUSAL)
            elif any(name == b"transfer-encoding" for name, _ in scope["headers"]):
                # In chunks of one byte it would keep the parser busy at 1.5 MB/s. All of Flower's have a length.
                await _refuse(send, 411, "a request's body needs a length")
            elif scope["path"] in _STORED and (fault := self._fault()):
                await _refuse(send, 503, f"the server cannot store a reply now; try again [{fault.code}]")
            elif scope["path"].startswith("/v1/fleet/"):
                # Flower reads all of a request before it checks a key.
                bounds = (_LARGEST_OBJECT, 1) if scope["path"] == _OBJECT else (_LARGEST_BODY, _UNFOLDED)
                await self._bodies.pass_on(scope, receive, send, *bounds)
            else:
                await self._app(scope, receive, send)
        elif kind == "websocket":
            # Before it is accepted; the caller sees 403.
            await send({"type": "websocket.close", "code": 1008})


async def _refuse(send: Send, status: int, detail: str) -> None:
    await reply(send, status, {"detail": detail})


def read_secret(file: Path) -> bytes:
    """Return the operator's secret in a file, if it is long enough and fits into a header."""
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    if not _SECRET.fullmatch(text):
        text = f"{file} holds no secret of 32 or more letters, digits and signs; `make certs` makes one"
        raise GuardError(text, code="guard.no-secret")
    return text.encode()


def parse_networks(text: str) -> tuple[Network, ...]:
    """Return networks and single addresses that are separated by spaces or commas."""
    try:
        return tuple(ip_network(word) for word in text.replace(",", " ").split())
    except ValueError as error:
        text = f"{error}; give addresses or networks, as in 192.0.2.7 or 10.8.0.0/24"
        raise GuardError(text, code="guard.bad-network") from None


def look_up(name: str) -> frozenset[Address]:
    """Return the addresses that a name of this machine has."""
    try:
        found = {_address(entry[4]) for entry in socket.getaddrinfo(name, None)}
    except OSError as error:
        raise GuardError(f"{name!r} is not a name of this machine: {error}", code="guard.not-this-machine") from None
    return frozenset(address for address in found if address)


def _is_this_machine(scope: Scope) -> bool:
    """Return whether a connection has the same address at both ends, which only local ones have."""
    caller = _address(scope.get("client"))
    return caller is not None and caller == _address(scope.get("server"))


def _is_this_user(scope: Scope) -> bool:
    """Return whether the other end of a local connection is a process of this user.

    Another user at the executor's interface could take a run's work. If the system does not report a connection's
    owner, as on macOS, this accepts any user.
    """
    wanted = [(_address(scope[end]), scope[end][1]) for end in ("client", "server")]
    tables = [table for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.exists()]
    for table in tables:
        for row in table.read_text(encoding="ascii").splitlines()[1:]:
            _, local, remote, state, _, _, _, user, *_ = row.split()
            # A connection whose process has closed it counts as root's.
            if state == _ESTABLISHED and [_end(local), _end(remote)] == wanted:
                return int(user) == os.getuid()
    return not tables


def _end(text: str) -> tuple[Address | None, int]:
    """Return address and port of a connection's end from Linux's notation: hexadecimal, in words of a number."""
    digits, _, port = text.partition(":")
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    return _address([ip_address(struct.pack(f"={len(words)}I", *words))]), int(port, 16)


def peer_of(end: Any) -> str:
    """Return what limits count as one address at a connection's end: with IPv6 a /64 network, since a host has all of
    it."""
    address = _address(end)
    return str(IPv6Network((int(address) >> 64 << 64, 64))) if isinstance(address, IPv6Address) else str(address)


def _address(end: Any) -> Address | None:
    """Return the address of a connection's end; None if it has none, as with a Unix socket."""
    try:
        address = ip_address(end[0])
    except (TypeError, ValueError, IndexError):
        return None
    # A dual-stack socket shows IPv4 addresses as IPv6 ones.
    return getattr(address, "ipv4_mapped", None) or address
