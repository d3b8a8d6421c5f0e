"""Joining a Ray cluster: what is told, at once, where that does not go."""

from __future__ import annotations

import platform
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

from tests.helpers.errors import raises
from umbel.cli.main import app
from umbel.protocol.errors import ClusterError
from umbel.simulation.cluster import address, check_versions, joined, probe, versions


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address where nobody listens."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    return "127.0.0.1:1"


@contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """Give an address where somebody listens, and gives one caller this answer."""

    def serve() -> None:
        with suppress(OSError):
            line, _ = server.accept()
            with line:
                line.recv(100)
                line.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        threading.Thread(target=serve, daemon=True).start()
        yield f"{host}:{port}"


@pytest.mark.parametrize(("named", "found"), [("", ""), ("local", ""), ("auto", "auto"), ("a:1", "a:1")])
def test_a_cluster_is_named_by_the_environment(named: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", named)
    assert address() == found


def test_an_address_where_nobody_listens_is_named(nobody: str) -> None:
    with raises(ClusterError, "cluster.unreachable", nobody):
        probe()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["a web server", "nothing"])
def test_an_address_where_somebody_else_listens_is_named(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(answer) as named:
        monkeypatch.setenv("RAY_ADDRESS", named)
        with raises(ClusterError, "cluster.not-ray", named):
            probe()


def test_so_does_a_run_before_it_makes_anything(nobody: str) -> None:
    told = CliRunner().invoke(app, ["run", "rounds=1"])
    assert told.exit_code == 1
    assert "start the cluster, or unset RAY_ADDRESS" in told.output


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.55.1\n    Python: 3.12.1\n"),
        ConnectionError("no raylet here"),
    ],
)
def test_what_ray_says_is_told_with_the_fix(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", refuse)
    with listening(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))) as named:  # as Ray speaks
        monkeypatch.setenv("RAY_ADDRESS", named)
        with raises(ClusterError, "cluster.not-joined", named), joined():
            pytest.fail("it was not joined")


# --- versions


def test_another_build_of_a_version_will_do() -> None:
    check_versions({"one": versions() | {"torch": f"{versions()['torch'].partition('+')[0]}+cu128"}})


@pytest.mark.parametrize(
    ("package", "theirs", "told"),
    [
        ("python", "3.9.1", f"python 3.9.1, and this one python {platform.python_version()}"),
        ("torch", "1.0.0", "torch 1.0.0, and this one torch"),
        ("flwr", "", "no flwr, and this one flwr"),
        ("umbel", "0.0.1", "umbel 0.0.1, and this one umbel"),
    ],
)
def test_another_version_is_told_with_the_machine_and_the_fix(package: str, theirs: str, told: tuple[str, ...]) -> None:
    with raises(ClusterError, "cluster.versions", "two", *told):
        check_versions({"one": versions(), "two": versions() | {package: theirs}})
