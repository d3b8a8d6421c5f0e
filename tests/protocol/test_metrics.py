"""Metrics in Prometheus's format, on an address that serves nothing else."""

from __future__ import annotations

import math
import socket
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from tests.helpers.errors import raises
from tests.helpers.ports import free_port
from tests.helpers.series import values_of
from umbel.deploy import certs
from umbel.protocol.errors import MetricsError
from umbel.protocol.metrics import exposition, machine, metric, publish, watched


def some() -> list[Metric]:
    return [metric("a_total", "Grows.", 3), metric("b", "By label.", {'say "hi"\n\\': 0.5, "none": math.nan}, "what")]


def test_the_format_is_prometheus() -> None:
    assert exposition(some).decode() == (
        "# HELP a_total Grows.\n# TYPE a_total counter\na_total 3.0\n"
        "# HELP b By label.\n# TYPE b gauge\n"
        'b{what="say \\"hi\\"\\n\\\\"} 0.5\nb{what="none"} NaN\n'
    )


def served(listen: str) -> None:
    """Serve metrics at an address, from another thread, once it answers."""
    threading.Thread(target=publish, args=(some, listen), daemon=True).start()


def read(address: str) -> str:
    while True:
        with (
            suppress(urllib.error.URLError),  # it does not listen yet
            urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer,
        ):
            return str(answer.read().decode())


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_they_are_served_at_an_address(host: str) -> None:
    try:
        socket.create_server((host.strip("[]"), 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    address = f"{host}:{free_port()}"
    served(address)
    assert read(address) == exposition(some).decode()
    with raises(MetricsError, "metrics.address", address):
        publish(some, address)


@pytest.mark.parametrize("listen", ["{port}", ":{port}"])
def test_a_port_is_of_this_machine_and_a_silent_connection_closed(listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.protocol.metrics._IDLE_S", 0.2)
    port = free_port()
    served(listen.format(port=port))
    assert read(f"127.0.0.1:{port}")
    # Where another address of this machine is bound too, nobody else can bind it.
    with socket.create_server(("127.0.0.2", port)):
        pass
    with socket.create_connection(("127.0.0.1", port), timeout=20) as silent:
        assert silent.recv(1) == b""
    for address in ("host:port", "127.0.0.1:", "127.0.0.1:99999"):
        with raises(MetricsError, "metrics.address", address):
            publish(some, address)


def test_certificates_disk_and_memory_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certs, "SERVER_DAYS", 10)
    certs.make(tmp_path, [], [])
    file = (tmp_path / "server.crt").rename(tmp_path / "x.crt")
    found = values_of(machine(tmp_path / "not" / "yet", {"x.crt": file}, ["python"], "umbel_x"))
    assert found["umbel_x_certificate_days_left"][("x.crt",)] == pytest.approx(10, abs=0.01)
    assert found["umbel_x_disk_free_bytes"][()] > 0
    assert found["umbel_x_memory_bytes"][()] > 10 << 20
    other = tmp_path / "other" / "x.crt"
    other.parent.mkdir()
    other.write_bytes(file.read_bytes())
    assert watched([file, other]) == {str(file): file, str(other): other}
    assert watched([file, file]) == {"x.crt": file}
    file.unlink()
    without = values_of(machine(tmp_path, {"x.crt": file}, [], "umbel_x"))  # without words, no memory
    assert without.keys() == {"umbel_x_disk_free_bytes", "umbel_x_certificate_days_left"}
    assert without["umbel_x_certificate_days_left"] == {("x.crt",): 0}
    with raises(MetricsError, "metrics.certificate", "y.crt"):
        watched([tmp_path / "y.crt"])
