"""What a container's health check says of processes that answer, and of those that do not."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from flwr.supercore.grpc_health import run_health_server_grpc_no_tls

from umbel.deploy.certs import make
from umbel.deploy.health import healthy
from umbel.simulation.superlink import free_port


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

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


@pytest.mark.parametrize("address", ["http://localhost:1/health", "localhost:1"])
def test_nothing_there(address: str) -> None:
    assert not healthy(address)
