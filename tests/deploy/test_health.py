"""What a container's health check says of processes that are ready, and of those that are not."""

from __future__ import annotations

import gc
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from flwr.supercore.grpc_health import run_health_server_grpc_no_tls

from tests.helpers.ports import free_port
from umbel.deploy.certs import make
from umbel.deploy.health import healthy
from umbel.deploy.ready import serve_health
from umbel.protocol.errors import SiteError


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


def test_http() -> None:
    with http_server() as port:
        assert healthy(f"http://localhost:{port}/health")
        assert not healthy(f"http://localhost:{port}/elsewhere")
    assert not healthy(f"http://localhost:{port}/health")


def test_a_proxy_of_the_organisation_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with http_server() as port:
        assert healthy(f"http://localhost:{port}/health")
    address = f"127.0.0.1:{free_port()}"
    server = run_health_server_grpc_no_tls(address)
    assert healthy(address)
    server.stop(None).wait()


def test_an_answer_that_is_none_is_not_healthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: listening.accept()[0].sendall(b"\xff\n"), daemon=True)
        thread.start()
        assert not healthy(f"http://127.0.0.1:{listening.getsockname()[1]}/ready")


def test_why_a_process_is_not_ready_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Docker keeps it: docker inspect."""
    with http_server() as port:
        assert not healthy(f"http://localhost:{port}/ready")
    assert '{"code": "disk.full"}' in capsys.readouterr().out


def test_https_only_from_the_server_of_the_ca(tmp_path: Path) -> None:
    make(tmp_path / "certs", [], [])
    make(tmp_path / "other", [], [])
    with http_server(tmp_path / "certs") as port:
        assert healthy(f"https://localhost:{port}/health", str(tmp_path / "certs" / "ca.crt"))
        assert not healthy(f"https://localhost:{port}/health", str(tmp_path / "other" / "ca.crt"))


def test_the_health_service_of_an_executor() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert not healthy(address)
    server = run_health_server_grpc_no_tls(address)
    assert healthy(address)
    server.stop(None).wait()


def test_an_executor_is_alive_also_while_its_site_is_not_ready() -> None:
    found: list[SiteError] = []
    address = f"127.0.0.1:{free_port()}"
    serve_health(address, lambda: found[0] if found else None)
    gc.collect()
    assert healthy(address)
    found.append(SiteError("no data", code="site.no-data"))
    assert not healthy(address)
    assert not healthy(f"{address}/ready")
    assert healthy(f"{address}/health")


@pytest.mark.parametrize("address", ["http://localhost:1/health", "localhost:1"])
def test_nothing_there(address: str) -> None:
    assert not healthy(address)
