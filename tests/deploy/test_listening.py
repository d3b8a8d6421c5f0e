"""The options of Flower's commands, ports that are taken, and certificates that have expired or soon will."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.helpers.errors import raises
from tests.helpers.ports import free_port
from umbel.deploy import certs
from umbel.deploy.listening import check_port, check_validity, option
from umbel.protocol.errors import CertificateError, ServerError, SiteError


@pytest.mark.parametrize(
    ("arguments", "port"),
    [
        ([], "9094"),
        (["--port", "7"], "7"),
        (["--port=8", "--host", "0.0.0.0"], "8"),
        (["--port"], "9094"),
        (["--port=8", "--port", "9"], "9"),
    ],
)
def test_an_option_has_its_last_value(arguments: list[str], port: str) -> None:
    assert option(arguments, "--port", "9094") == port


def test_a_port_that_is_taken_or_cannot_be_is_named_and_a_free_one_passes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with raises(SiteError, "site.port", port, "--port"):
            check_port(SiteError, "127.0.0.1", str(port))
    check_port(SiteError, "127.0.0.1", str(free_port()))
    for host, port in (("192.0.2.7", "9"), ("127.0.0.1", "x"), ("127.0.0.1", "99999999")):
        with raises(ServerError, "server.port", port):
            check_port(ServerError, host, port)


@pytest.mark.parametrize(("days", "told"), [(31, ""), (29.5, "30 days"), (0.5, "1 day")])
def test_the_last_30_days_of_a_certificate_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, days: float, told: str
) -> None:
    monkeypatch.setattr(certs, "SERVER_DAYS", days)
    certs.make(tmp_path, [], [])
    check_validity(tmp_path / "server.crt", "ask the operator")
    assert len(caplog.messages) == bool(told)
    assert told in caplog.text


def test_a_certificate_that_has_expired_or_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certs, "SERVER_DAYS", -0.01)
    certs.make(tmp_path, [], [])
    file = tmp_path / "server.crt"
    with raises(CertificateError, "certificate.expired", file, "umbel certs"):
        check_validity(file)
    file.write_bytes((tmp_path / "ca.crt").read_bytes() + file.read_bytes())
    with raises(CertificateError, "certificate.expired", file):
        check_validity(file)  # also behind one that is valid
    file.write_text("no certificate")
    for other in (file, tmp_path / "none.crt"):
        with raises(CertificateError, "certificate.unreadable", other):
            check_validity(other)
