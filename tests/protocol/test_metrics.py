"""Metrics in Prometheus's format, on an address that serves nothing else."""

from __future__ import annotations

import math
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from tests.helpers.errors import raises
from umbel.protocol.errors import MetricsError
from umbel.protocol.metrics import Series, exposition, machine, publish, watched
from umbel.simulation.superlink import free_port

SOME = [
    Series.of("a_total", "Grows.", 3),
    Series.of("b", "By label.", {'say "hi"\n\\': 0.5, "none": math.nan}, "what"),
]


def test_the_format_is_prometheus() -> None:
    assert exposition(SOME) == (
        "# HELP a_total Grows.\n# TYPE a_total counter\na_total 3\n"
        "# HELP b By label.\n# TYPE b gauge\n"
        'b{what="say \\"hi\\"\\n\\\\"} 0.5\nb{what="none"} NaN\n'
    )


def served(collect: Callable[[], Sequence[Series]], host: str = "127.0.0.1") -> str:
    """Serve metrics; return the address once it answers."""
    address = f"{host}:{free_port()}"
    threading.Thread(target=publish, args=(collect, address), daemon=True).start()
    while True:
        with suppress(urllib.error.URLError):  # it does not listen yet
            status(address, "/nothing")
            return address


def status(address: str, path: str = "/metrics") -> int:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_only_metrics_are_served(host: str) -> None:
    try:
        socket.create_server((host.strip("[]"), 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    address = served(lambda: SOME, host)
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        assert answer.read().decode() == exposition(SOME)
    for path in ("/", "/metrics/../etc", "/metrics?x"):
        assert status(address, path) == 404
    with raises(MetricsError, "metrics.address", address):
        publish(lambda: SOME, address)


def test_connections_that_never_finish_a_request_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.protocol.metrics._IDLE_S", 1.0)
    address = served(lambda: SOME)
    host, port = address.split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(60)]
    assert threading.active_count() < 60, "only some of them have threads"
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for one in slow:
            with suppress(OSError):
                one.sendall(b"x")
        with suppress(OSError):  # no connection is free yet
            if status(address) == 200:
                break
        time.sleep(0.1)
    assert time.monotonic() < until
    for one in slow:
        one.close()


def test_what_cannot_be_collected_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def collect() -> list[Series]:
        raise MetricsError("no disk", code="metrics.address")

    assert status(served(collect)) == 503
    assert caplog.messages == ["the metrics cannot be collected: no disk [metrics.address]"]


def test_metrics_are_collected_at_most_once_a_second() -> None:
    times = []

    def collect() -> list[Series]:
        times.append(time.monotonic())
        return SOME

    address = served(collect)
    for _ in range(20):
        assert status(address) == 200
    assert all(later - before > 0.9 for before, later in pairwise(times))


def test_a_name_that_is_no_text_is_served() -> None:
    address = served(lambda: [Series.of("runs", "Runs.", {"x\udcff": 1}, "run")])
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        assert b'runs{run="x\\udcff"} 1' in answer.read()


@pytest.mark.parametrize("listen", ["9465", ":9465", "host:port", "127.0.0.1:99999"])
def test_an_address_that_cannot_be_used_is_named(listen: str) -> None:
    with raises(MetricsError, "metrics.address", listen):
        publish(lambda: SOME, listen)


def test_certificates_disk_and_memory_of_this_machine(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=10))
    file = tmp_path / "x.crt"
    file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    disk, memory, days = machine(tmp_path / "not" / "yet", {"x.crt": file}, ["python"], "umbel_x")
    assert days.values[(("certificate", "x.crt"),)] == pytest.approx(10, abs=0.01)
    assert disk.values[()] > 0
    assert memory.values[()] > 10 << 20
    other = tmp_path / "other" / "x.crt"
    other.parent.mkdir()
    other.write_bytes(file.read_bytes())
    assert watched([file, other]) == {str(file): file, str(other): other}
    assert watched([file, file]) == {"x.crt": file}
    file.unlink()
    _, gone = machine(tmp_path, {"x.crt": file}, [], "umbel_x")  # without words, no memory
    assert gone.values == {(("certificate", "x.crt"),): 0}
    with raises(MetricsError, "metrics.certificate", "y.crt"):
        watched([tmp_path / "y.crt"])
