"""Liveness and readiness: what processes say of themselves, and what a container's health check makes of it."""

from __future__ import annotations

import asyncio
import gc
import importlib
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.ports import free_port
from umbel.deploy import flower
from umbel.deploy.certs import make
from umbel.deploy.health import healthy
from umbel.deploy.ready import serve_health
from umbel.protocol.errors import DiskError, SiteError


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"/health": 200, "/ready": 503}.get(self.path, 404))
        self.end_headers()
        self.wfile.write(b'{"code": "disk.full"}')

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def http_server(certs: Path | None = None) -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        if certs:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certs / "server.crt", certs / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()


def test_a_check_uses_no_proxy_and_prints_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Docker keeps what it prints: docker inspect."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with http_server() as port:
        assert healthy(f"http://localhost:{port}/health")
        assert not healthy(f"http://localhost:{port}/elsewhere")
        assert not healthy(f"http://localhost:{port}/ready")
    assert '{"code": "disk.full"}' in capsys.readouterr().out
    assert not healthy(f"http://localhost:{port}/health")


def test_https_only_from_the_server_of_the_ca(tmp_path: Path) -> None:
    make(tmp_path / "certs", [], [])
    make(tmp_path / "other", [], [])
    with http_server(tmp_path / "certs") as port:
        assert healthy(f"https://localhost:{port}/health", str(tmp_path / "certs" / "ca.crt"))
        assert not healthy(f"https://localhost:{port}/health", str(tmp_path / "other" / "ca.crt"))


def test_an_executor_is_alive_also_while_its_site_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    found: list[SiteError] = []
    address = f"127.0.0.1:{free_port()}"
    assert not healthy(address)
    serve_health(address, lambda: found[0] if found else None)
    gc.collect()
    assert healthy(address)
    found.append(SiteError("no data", code="site.no-data"))
    assert [healthy(f"{address}{path}") for path in ("", "/ready", "/health")] == [False, False, True]


@pytest.mark.parametrize(
    ("fault", "status", "content"),
    [
        (None, 200, {"ready": True}),
        (DiskError("full, in /a/secret/folder", code="disk.full"), 503, {"ready": False, "code": "disk.full"}),
    ],
)
def test_the_code_of_a_fault_is_told_beside_whether_the_process_is_alive(
    monkeypatch: pytest.MonkeyPatch, fault: Any, status: int, content: dict[str, Any]
) -> None:
    health = importlib.import_module("flwr.supercore.routers.health").router
    monkeypatch.setattr(health, "routes", [*health.routes])
    flower._say_ready(lambda: fault)
    app = importlib.import_module("flwr.supernode.main").create_app()

    async def ask(path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://site") as asking:
            return await asking.get(path)

    ready = asyncio.run(ask("/ready"))
    assert (ready.status_code, ready.json()) == (status, content)
    assert asyncio.run(ask("/health")).status_code == 200
