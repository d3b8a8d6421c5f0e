"""Metrics in Prometheus's format, on an address that serves nothing else."""

from __future__ import annotations

import math
import threading
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from tests.helpers.errors import raises
from umbel.protocol.errors import MetricsError
from umbel.protocol.metrics import Series, exposition, machine, publish
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


def test_only_metrics_are_served() -> None:
    address = f"127.0.0.1:{free_port()}"
    threading.Thread(target=publish, args=(lambda: SOME, address), daemon=True).start()
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics") as answer:
                assert answer.read().decode() == exposition(SOME)
            break
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):  # which says that it does not listen yet
                raise
    for path in ("/", "/metrics/../etc", "/metrics?x"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{address}{path}")
        assert refused.value.code == 404
    with raises(MetricsError, "metrics.address", address):
        publish(lambda: SOME, address)


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
    with raises(MetricsError, "metrics.certificate", "y.crt"):
        machine(tmp_path, {"y.crt": tmp_path / "y.crt"}, [], "umbel_x")
