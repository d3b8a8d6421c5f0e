"""A certificate that has expired, or soon will, is told where it is loaded at a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.errors import raises
from umbel.deploy import certs
from umbel.deploy.listening import check_validity
from umbel.protocol.errors import CertificateError


def certificate(folder: Path, monkeypatch: pytest.MonkeyPatch, days: float) -> Path:
    monkeypatch.setattr(certs, "SERVER_DAYS", days)
    certs.make(folder, [], [])
    return folder / "server.crt"


@pytest.mark.parametrize(("days", "told"), [(31, []), (29.5, ["30 days"]), (0.5, ["1 day"])])
def test_the_last_30_days_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, days: float, told: list[str]
) -> None:
    check_validity(certificate(tmp_path, monkeypatch, days), "ask the operator")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(told)
    assert all(f"expires in {part}; ask the operator" in line for part, line in zip(told, lines, strict=True))


def test_an_expired_certificate_is_refused_also_behind_one_that_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = certificate(tmp_path, monkeypatch, -0.01)
    with raises(CertificateError, "certificate.expired", file, "umbel certs"):
        check_validity(file)
    file.write_bytes((tmp_path / "ca.crt").read_bytes() + file.read_bytes())
    with raises(CertificateError, "certificate.expired", file):
        check_validity(file)


def test_a_file_without_a_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "server.crt").write_text("no certificate")
    for file in (tmp_path / "server.crt", tmp_path / "none.crt"):
        with raises(CertificateError, "certificate.unreadable", file):
            check_validity(file)
