"""The guard in front of Flower's server: what passes, from where and with what, over real sockets as well."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

import pytest
import uvicorn

from tests.helpers.errors import raises
from umbel.deploy import guard
from umbel.deploy.guard import REFUSAL, Guard, Rules, look_up, parse_networks, peer_of, read_secret
from umbel.protocol.errors import DiskError, GuardError

SECRET = b"0123456789abcdef" * 4
START, ACQUIRE, PULL = "/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/pull-messages"
PART = "/v1/fleet/push-object"
SERVER, SITE, OPERATOR = "192.0.2.1", "192.0.2.7", "198.51.100.4"


def scope(
    path: str,
    client: str | None = SITE,
    method: str = "POST",
    server: str | None = SERVER,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return a request as uvicorn describes it."""
    ends = {"client": client and (client, 5000), "server": server and (server, 8000)}
    paths = {"path": path, "raw_path": path.encode(), "root_path": ""} | more
    return {"type": "http", "method": method, "headers": list(headers), **paths, **ends}


def bearer(secret: bytes) -> tuple[bytes, bytes]:
    return b"authorization", b"Bearer " + secret


ALONE, GUARDED = Rules(), Rules(secret=SECRET)
NAMED = Rules(control_from=parse_networks("198.51.100.4, 10.8.0.0/24 2001:db8::/32"))
BOTH = replace(NAMED, secret=SECRET)
INSIDE = Rules(runtime_at=frozenset({ip_address("172.18.0.2")}))
"""The executor calls an address where others cannot."""
EVERYBODY = Rules(control_from=parse_networks("0.0.0.0/0 ::/0"), runtime_at=frozenset({ip_address(SERVER)}))
INSIDE_SERVER = {"client": "172.18.0.3", "server": "172.18.0.2"}
HOLDER: dict[str, Any] = {"headers": (bearer(SECRET),)}
THERE = {"client": SERVER}
"""This machine, by the server's own address."""
NAMED_ADDRESSES = ("198.51.100.4", "10.8.0.9", "::ffff:10.8.0.9", "2001:db8::7")
OTHERS = ("198.51.100.5", "10.9.0.9", "::ffff:10.9.0.9", "2001:db9::7", SERVER, "testclient", None)
METHODS = [{"method": method} for method in ("GET", "HEAD", "PUT", "OPTIONS", "CONNECT", "post", "")]
"""Flower does not use them."""
NO_SECRETS = [
    (bearer(SECRET[:-1]),), (bearer(SECRET + b" "),), (bearer(b""),), (bearer(SECRET.upper()),),
    ((b"authorization", SECRET),), ((b"authorization", b"Basic " + SECRET),), (bearer(SECRET), bearer(SECRET)),
    (bearer(b"x"), bearer(SECRET)), ((b"cookie", b"Bearer " + SECRET),), ((b"authorization", b"Bearer \xff\xff"),),
]  # fmt: skip
UNKNOWN = [
    "", "/", "/docs", "/openapi.json", "/v1", "/v1/fleet", "/v1/fleet/", "/v1/fleet/pull-messages/",
    "//v1/fleet/pull-messages", "/v1//fleet/pull-messages", "/v1/fleet//pull-messages",
    "/v1/fleet/../control/start-run", "/v1/fleet/./pull-messages",
    "/v1/fleet/pull-messages;/v1/control/start-run", "/v1/fleet/pull-messages?", "/v1/fleet/pull-messages\n",
    "/v1/fleet/pull messages", "/V1/fleet/pull-messages", "/v1/Fleet/pull-messages", "/v1/fleet/PULL-MESSAGES",
    "/v1/fleet\\pull-messages", "/v2/fleet/pull-messages", "/v1/fleet/pull-messages/v1/control/start-run",
    "/v1/fleetcontrol/start-run", "/v1/control", "/v1/control/", "//v1/control/start-run",
    "/v1/control/start-run/", "/health/", "//health", "/v1/fleet/pull-messag\u00e9s",
    "/v1/\u0455leet/pull-messages",
]  # fmt: skip
"""Paths that are refused even to the operator."""


def of(*clients: str | None) -> list[dict[str, Any]]:
    return [{"client": client} for client in clients]


PASS: list[tuple[Rules, str, list[Any]]] = [
    # A site gets to the fleet.
    *((rules, PULL, [{}]) for rules in (ALONE, GUARDED, NAMED)),
    *((rules, path, [{"method": "GET"}]) for rules in (ALONE, GUARDED, NAMED) for path in ("/health", "/ready")),
    # Where there is no secret this machine alone controls; with one, whoever has it; or addresses that are named.
    (ALONE, START, [THERE, *({"client": one, "server": one} for one in ("127.0.0.1", "::1"))]),
    (GUARDED, START, [HOLDER | one for one in of(SITE, OPERATOR, SERVER)]),
    *((rules, START, of(*NAMED_ADDRESSES)) for rules in (NAMED, BOTH)),
    (BOTH, START, [HOLDER | one for one in of(*OTHERS)]),
    # The executor is on this machine, or calls where others cannot.
    *((rules, ACQUIRE, [THERE]) for rules in (ALONE, GUARDED, NAMED)),
    (INSIDE, ACQUIRE, [INSIDE_SERVER, INSIDE_SERVER | {"server": "::ffff:172.18.0.2"}]),
]
REFUSED: list[tuple[Rules, str, list[Any]]] = [
    *((rules, path, [{}]) for rules in (ALONE, GUARDED, NAMED) for path in (START, ACQUIRE)),
    (ALONE, START, of("127.0.0.1")),  # at an address of the server's that others reach
    (GUARDED, START, of(SITE, OPERATOR, SERVER)),
    (GUARDED, START, [{"headers": headers} for headers in NO_SECRETS]),
    # The secret opens control and nothing else.
    (GUARDED, ACQUIRE, [HOLDER]),
    (GUARDED, "/docs", [HOLDER | {"method": "GET"}]),
    *((rules, START, of(*OTHERS)) for rules in (NAMED, BOTH)),
    (NAMED, ACQUIRE, of(*NAMED_ADDRESSES, *(one for one in OTHERS if one != SERVER))),
    # Not even this machine where the executor has an address of its own to call.
    (INSIDE, ACQUIRE, [THERE]),
    (INSIDE, START, [INSIDE_SERVER]),
    # Who has no address is nobody.
    *((rules, path, [{"client": nobody, "server": nobody} for nobody in (None, "")])
      for rules in (ALONE, Rules(runtime_at=frozenset({ip_address(SERVER)}))) for path in (START, ACQUIRE)),
    # A page in a browser of this machine calls from here, and by a name that it has moved here with any type.
    *((ALONE, path, [THERE | {"headers": ((b"origin", origin),)}])
      for path in (START, ACQUIRE, PULL) for origin in (b"http://example.org:8000", b"null", b"")),
    (ALONE, PULL, METHODS),
    (ALONE, START, [THERE | method for method in METHODS]),
    # A path is what was sent.
    (ALONE, PULL, [{"raw_path": b"/v1/%66leet/pull-messages"}, {"raw_path": START.encode()}, {"raw_path": None},
                   {"root_path": "/v1"}]),
    *((EVERYBODY, path, [{"method": method} for method in ("GET", "POST")]) for path in UNKNOWN),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "path", "requests", "passes"), [*((*one, True) for one in PASS), *((*one, False) for one in REFUSED)]
)
def test_what_passes_and_what_is_refused(
    rules: Rules, path: str, requests: list[Any], passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_is_this_user", lambda scope: True)
    for request in requests:
        assert rules.let(scope(path, **request)) is passes, request


async def no_content(send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Listener:
    """An application behind the guard that reads whole requests, and notes what reaches it."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope.get("path", scope["type"]))
        if scope["type"] != "http":
            return
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        if message["type"] == "http.request":
            await no_content(send)


def ask(
    rules: Rules, request: dict[str, Any], fault: DiskError | None = None, mib: int = 1
) -> tuple[list[str], list[Any], int]:
    """Return what reached the application, what was sent back, and how many MiB were read; of 0 none ever comes."""
    listener, sent, read = Listener(), [], 0

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        nonlocal read
        read += 1
        if not mib:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": read < mib}

    asyncio.run(Guard(listener, rules, lambda: fault)(request, receive, send))
    return listener.reached, sent, read


def test_a_refusal_says_so_and_reads_nothing_and_what_is_no_request_does_not_pass() -> None:
    reached, sent, read = ask(ALONE, scope(START))
    assert (reached, read, sent[0]["status"], REFUSAL.encode() in sent[1]["body"]) == ([], 0, 403, True)
    assert ask(ALONE, {"type": "lifespan"}) == (["lifespan"], [], 0)
    reached, sent, _ = ask(ALONE, {"type": "websocket", "path": PULL, "client": (SERVER, 1), "server": (SERVER, 2)})
    assert (reached, [message["type"] for message in sent]) == ([], ["websocket.close"])
    assert ask(ALONE, {"type": "what comes next"}) == ([], [], 0)


def test_a_reply_that_could_not_be_stored_waits_at_the_site() -> None:
    """Sites still ask for messages, and the researcher still reads how a run ended."""
    full = DiskError("the disk is full", code="disk.full")
    for path in (PART, "/v1/fleet/push-messages"):
        reached, (start, body), _ = ask(GUARDED, scope(path), full)
        assert (reached, start["status"]) == ([], 503), "which Flower's nodes repeat"
        assert b"[disk.full]" in body["body"]
    assert ask(GUARDED, scope(PULL), full)[0] == [PULL]
    assert ask(GUARDED, scope(START, **HOLDER), full)[0] == [START]


@pytest.mark.parametrize(
    ("path", "mib", "status"),
    [(PART, 64, 204), (PART, 65, 413), (PART, 10**9, 413), (PULL, 1, 204), (PULL, 2, 413), (PULL, 10**9, 413),
     (PULL, 0, 408)],
)  # fmt: skip
def test_no_more_of_a_request_is_read_than_a_site_may_send_and_a_body_that_never_ends_is_given_up(
    path: str, mib: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of who has no key: Flower looks at that when it has read all."""
    if not mib:
        monkeypatch.setattr(guard, "_BODY_S", 0.0)
    _, sent, read = ask(ALONE, scope(path), mib=mib)
    assert [message.get("status") for message in sent] == [status, None]
    assert read <= (65 if path == PART else 2)


@pytest.mark.parametrize(("path", "size"), [(PART, 1 << 20), (PULL, 1 << 14)])
def test_requests_share_a_bound_and_so_do_those_of_one_address(
    path: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten that take 1 MiB at most, five of an address; when one is over its room is free again."""
    monkeypatch.setattr(guard, "_IN_FLIGHT", 10 << 20)
    monkeypatch.setattr(guard, "_IN_FLIGHT_OF_A_PEER", 5 << 20)
    statuses: dict[str, list[int]] = {}

    async def run() -> None:
        full, over = asyncio.Event(), asyncio.Event()

        async def reader(_: Any, receive: Any, send: Any) -> None:
            if (await receive())["type"] == "http.request":
                await over.wait()
            await no_content(send)

        stands = Guard(reader, ALONE)

        async def ask(client: str) -> None:
            async def receive() -> Any:
                return {"type": "http.request", "body": bytes(size), "more_body": False}

            async def send(message: Any) -> None:
                if "status" in message:
                    statuses.setdefault(client, []).append(message["status"])
                if sum(map(len, statuses.values())) == 5:
                    full.set()

            await stands(scope(path, client), receive, send)

        asked = [
            asyncio.create_task(ask(client)) for client in ["192.0.2.7"] * 7 + ["192.0.2.8"] * 4 + ["192.0.2.9"] * 4
        ]
        await full.wait()
        assert statuses == {"192.0.2.7": [503] * 2, "192.0.2.9": [503] * 3}, "the tenth of all is of the third"
        over.set()
        await asyncio.gather(*asked)
        statuses.clear()
        await ask("192.0.2.7")
        assert statuses == {"192.0.2.7": [204]}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.7", "192.0.2.8", False),
        ("192.0.2.7", "::ffff:192.0.2.7", True),
        # Whoever has an address of IPv6 has the 2 ** 64 that begin alike.
        ("2001:db8:0:1::7", "2001:db8:0:1:ffff::8", True),
        ("2001:db8:0:1::7", "2001:db8:0:2::7", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_limits_count_all_addresses_of_a_host_as_one(one: str, other: str, same: bool) -> None:
    assert (peer_of((one, 5000)) == peer_of((other, 5001, 0, 0))) is same


# --- over sockets


def closed(sock: socket.socket) -> bool:
    """Return whether the server has closed a connection, reading what it said before."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_a_head_that_never_ends_is_cut_off() -> None:
    """httptools would keep it: 500 MB of headers in three seconds, before the guard sees anything."""
    with served(GUARDED) as (port, listener):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(f"POST {PULL} HTTP/1.1\r\n".encode())
            sent = 0
            try:
                while sent < 100 << 20:
                    sent += sock.send(b"X-Filler: " + bytes(b"a" * (1 << 16)) + b"\r\n")
            except ConnectionError:
                pass
            assert sent < 50 << 20, "the rest is what the sockets on the way hold"
            assert closed(sock)
        assert send_line(port, f"POST {PULL}") == 204
    assert listener.reached == [PULL]


def test_a_body_that_comes_in_pieces_is_not_read() -> None:
    """h11 takes each piece apart by itself: 5 MB a second, a byte each, have /health answer after half a minute."""
    with served(GUARDED) as (port, listener):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(f"POST {PART} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n".encode())
            assert sock.recv(12) == b"HTTP/1.1 411"
            assert closed(sock)
        assert send_line(port, f"POST {PART}") == 204
    assert listener.reached == [PART]


@contextmanager
def served(rules: Rules, parser: Literal["h11", "httptools"] = "h11") -> Iterator[tuple[int, Listener]]:
    """Serve the guard on a port of this machine, as `umbel.deploy.flower.run_superlink` does."""
    listener = Listener()
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        Guard(listener, rules), http=parser, lifespan="off", proxy_headers=False, ws="none", log_level="error",
        timeout_keep_alive=600,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield listening.getsockname()[1], listener
    finally:
        server.should_exit = True
        thread.join()


def send_line(port: int, line: str, *headers: str, source: str = "127.0.0.1") -> int:
    """Return the status that a request has whose first line is this one, to the letter."""
    with socket.create_connection(("127.0.0.1", port), source_address=(source, 0)) as sock:
        lines = [f"{line} HTTP/1.1", "Host: localhost", "Connection: close", "Content-Length: 0", *headers, "", ""]
        sock.sendall("\r\n".join(lines).encode("latin-1"))
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        return answer.status


TRICKS = [
    "POST //v1/control/start-run", "POST /v1/fleet/../control/start-run", "POST /v1/fleet/%2e%2e/control/start-run",
    "POST /v1/%63ontrol/start-run", "POST /v1/control%2Fstart-run", "POST /v1/fleet/%2F..%2Fcontrol/start-run",
    "POST /v1/fleet/pull-messages%00", "POST /v1/fleet/pull%2Dmessages",
    "POST /v1/control/start-run?/v1/fleet/pull-messages", "POST /v1/control/start-run#/v1/fleet/pull-messages",
    "POST http://localhost/v1/control/start-run", "POST https://localhost/v1/fleet/../control/start-run",
]  # fmt: skip
"""What a parser has to take apart before the guard sees a path."""
UPGRADE = (
    "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==",
)  # fmt: skip


@pytest.mark.parametrize("parser", ["httptools", "h11"])
def test_tricks_of_a_site_elsewhere_over_a_socket(parser: Literal["h11", "httptools"]) -> None:
    """Also with the parser that uvicorn would take."""
    with served(ALONE, parser) as (port, listener):
        for trick in TRICKS:
            assert send_line(port, trick, source="127.0.0.2") in (400, 403), trick
        told = ["X-Forwarded-For: 127.0.0.1", "Forwarded: for=127.0.0.1", "X-Real-IP: 127.0.0.1"]
        assert send_line(port, f"POST {START}", *told, source="127.0.0.2") == 403
        assert send_line(port, f"GET {PULL}", *UPGRADE, source="127.0.0.2") in (400, 403)
        rewritten = ["X-Original-URL: /v1/control/start-run", "X-HTTP-Method-Override: POST"]
        assert send_line(port, "GET /health", *rewritten, source="127.0.0.2") == 204
        for path, status in ((PULL, 204), (START, 403), (ACQUIRE, 403)):
            assert send_line(port, f"POST {path}", source="127.0.0.2") == status
            assert send_line(port, f"POST {path}") == 204, "this machine"
        assert listener.reached == ["/health", PULL, PULL, START, ACQUIRE]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the system does not tell whose a connection is")
@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_another_user_of_this_machine_is_no_executor(
    monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily, host: str
) -> None:
    own = os.getuid()
    with socket.create_server((host, 0), family=family) as listener, socket.socket(family) as caller:
        caller.connect(listener.getsockname())
        request = scope(ACQUIRE) | {"client": caller.getsockname()[:2], "server": listener.getsockname()[:2]}
        assert GUARDED.let(request)
        with monkeypatch.context() as other:
            other.setattr(os, "getuid", lambda: own + 1)
            assert not GUARDED.let(request)
        caller.close()
        monkeypatch.setattr(os, "getuid", lambda: 0)
        assert not GUARDED.let(request), "of a closed connection the system says that it is root's"


def test_the_second_request_of_a_connection_is_looked_at_as_well() -> None:
    with served(GUARDED) as (port, listener):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for path, status in ((PULL, 204), (START, 403), (PULL, 204)):
            connection.request("POST", path, body=b"x" * 300_000)
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (status, status == 403)
        connection.request("POST", START, headers={"Authorization": f"Bearer {SECRET.decode()}"})
        assert connection.getresponse().status == 204
        connection.close()
    assert listener.reached == [PULL, PULL, START]


def test_a_secret_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "control.secret"
    file.write_bytes(SECRET + b"\n")
    assert read_secret(file) == SECRET
    for content in (b"", b"\n", SECRET[:31], SECRET + b" " + SECRET, SECRET + "\u00e9".encode(), bytes(64)):
        file.write_bytes(content)
        with raises(GuardError, "guard.no-secret", "control.secret"):
            read_secret(file)


def test_networks_and_names() -> None:
    assert parse_networks("") == ()
    found = [str(one) for one in parse_networks(" 192.0.2.7,10.0.0.0/8  ::1 ")]
    assert found == ["192.0.2.7/32", "10.0.0.0/8", "::1/128"]
    for text in ("umbel.example.org", "10.0.0.1/8", "10.0.0.0/33", "*"):
        with raises(GuardError, "guard.bad-network"):
            parse_networks(text)
    assert ip_address("127.0.0.1") in look_up("localhost")
    assert look_up("192.0.2.1") == {ip_address("192.0.2.1")}
    with raises(GuardError, "guard.not-this-machine", "nothing.invalid"):
        look_up("nothing.invalid")
