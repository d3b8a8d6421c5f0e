"""A signature shows which researcher signed a run config, for which server, until when, and that nothing changed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.helpers.errors import raises
from tests.helpers.keys import pair
from umbel.deploy import certs
from umbel.protocol.errors import CertificateError, SiteError
from umbel.protocol.run_config import RunConfig
from umbel.protocol.signatures import Signed, names_no_server, public_key, server_of, sign, signer

RUN = RunConfig(rounds=3, step_size=0.1).unsigned()
UNTIL = datetime(2030, 1, 2, 3, 4, tzinfo=UTC)
HERE = "5e" * 32


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_who_signed_is_found_by_the_public_key(kind: str, tmp_path: Path) -> None:
    key, public = pair(tmp_path / "ann", kind)
    _, other = pair(tmp_path / "bob")
    signature = sign(RUN, key, UNTIL, HERE)
    by_ann = Signed("ann", UNTIL, HERE)
    assert signer(RUN, signature, {"bob": other, "ann": public}) == by_ann
    assert signer(dict(reversed(RUN.items())), signature, {"ann": public}) == by_ann, "in any order"
    assert signer(RUN, signature, {"bob": other}) is None
    assert signer(RUN, signature, {}) is None


def test_a_signature_covers_every_setting_its_end_and_its_server(tmp_path: Path) -> None:
    key, public = pair(tmp_path / "ann")
    signature = sign(RUN, key, UNTIL, HERE)
    assert {*RunConfig.names()} - RUN.keys() == {"signature"}, "but itself"
    for name in ("rounds", "noise-multiplier", "dataset", "observers"):
        changed = RUN[name] + (1 if isinstance(RUN[name], int | float) else "x")
        assert signer(RUN | {name: changed}, signature, {"ann": public}) is None
    last, server, signed = signature.split(" ")
    later = UNTIL + timedelta(days=1)
    for other in (
        f"{later:%Y-%m-%dT%H:%MZ} {server} {signed}", f"{last} {'0' * 64} {signed}", f"{last} {signed}", "", "x",
        *(f"2030-01-02T03:04Z{end}" for end in ("", " =", " 5e =", " 5e ÄÖ")), "\x00 a b",
    ):  # fmt: skip
        assert signer(RUN, other, {"ann": public}) is None
    # One of before is known by its form.
    assert names_no_server("2030-01-02T03:04Z c2lnbmF0dXJl")
    assert not names_no_server("")
    assert not names_no_server(signature)


def test_a_server_is_its_authority_and_not_its_certificate(tmp_path: Path) -> None:
    certs.make(tmp_path / "one", [], [])
    certs.make(tmp_path / "two", [], [])
    one, two = (tmp_path / name / "ca.crt" for name in ("one", "two"))
    before = server_of(one)
    assert len(before) == 64
    assert before != server_of(two)
    certs.make(tmp_path / "one", ["another.example.org"], [])  # the server's certificate has changed
    assert server_of(one) == before
    both = tmp_path / "both.crt"
    both.write_bytes(one.read_bytes() + two.read_bytes())
    with raises(CertificateError, "certificate.several", both):
        server_of(both)
    with raises(CertificateError, "certificate.unreadable", tmp_path / "one" / "ca.key"):
        server_of(tmp_path / "one" / "ca.key")
    with raises(CertificateError, "certificate.unreadable", "gone.crt"):
        server_of(tmp_path / "gone.crt")


def test_a_key_that_cannot_be_read_is_named_and_a_public_one_does_not_sign(tmp_path: Path) -> None:
    for text in ("", "ssh-ed25519", "AAAA", "AAAAC3NzaC1lZDI1NTE5AAAAIA", "AAAAB3NzaC1yc2EAAAADAQABAAAAAQA="):
        with raises(SiteError, "site.bad-key", "ann"):
            public_key("ann", text)
    key, public = pair(tmp_path / "ann")
    key.write_text(public)
    with raises(CertificateError, "certificate.no-key", key):
        sign(RUN, key, UNTIL, HERE)
