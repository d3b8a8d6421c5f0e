"""A signature shows which researcher signed a run config, until when, and that nothing of it has changed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.helpers.errors import raises
from tests.helpers.keys import pair
from umbel.protocol.errors import CertificateError, SiteError
from umbel.protocol.run_config import RunConfig
from umbel.protocol.signatures import public_key, sign, signer

RUN = RunConfig(rounds=3, step_size=0.1).unsigned()
UNTIL = datetime(2030, 1, 2, 3, 4, tzinfo=UTC)


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_who_signed_is_found_by_the_public_key(kind: str, tmp_path: Path) -> None:
    key, public = pair(tmp_path / "ann", kind)
    _, other = pair(tmp_path / "bob")
    signature = sign(RUN, key, UNTIL)
    assert signer(RUN, signature, {"bob": other, "ann": public}) == ("ann", UNTIL)
    assert signer(dict(reversed(RUN.items())), signature, {"ann": public}) == ("ann", UNTIL), "in any order"
    assert signer(RUN, signature, {"bob": other}) == ("", None)
    assert signer(RUN, signature, {}) == ("", None)


@pytest.mark.parametrize("name", ["rounds", "noise-multiplier", "dataset", "observers"])
def test_any_other_setting_is_not_signed(name: str, tmp_path: Path) -> None:
    key, public = pair(tmp_path / "ann")
    signature = sign(RUN, key, UNTIL)
    changed = RUN[name] + (1 if isinstance(RUN[name], int | float) else "x")
    assert signer(RUN | {name: changed}, signature, {"ann": public}) == ("", None)


def test_nor_is_a_later_end(tmp_path: Path) -> None:
    key, public = pair(tmp_path / "ann")
    _, _, signed = sign(RUN, key, UNTIL).partition(" ")
    later = UNTIL + timedelta(days=1)
    assert signer(RUN, f"{later:%Y-%m-%dT%H:%MZ} {signed}", {"ann": public}) == ("", None)


@pytest.mark.parametrize(
    "signature", ["", "x", "2030-01-02T03:04Z", "2030-01-02T03:04Z =", "2030-01-02T03:04Z ÄÖ", "\x00 a"]
)
def test_what_is_no_signature_is_nobodys(signature: str, tmp_path: Path) -> None:
    _, public = pair(tmp_path / "ann")
    assert signer(RUN, signature, {"ann": public}) == ("", None)


@pytest.mark.parametrize(
    "text", ["", "ssh-ed25519", "AAAA", "AAAAC3NzaC1lZDI1NTE5AAAAIA", "AAAAB3NzaC1yc2EAAAADAQABAAAAAQA="]
)
def test_a_key_that_cannot_be_read_is_named(text: str) -> None:
    with raises(SiteError, "site.bad-key", "ann"):
        public_key("ann", text)


def test_a_public_key_does_not_sign(tmp_path: Path) -> None:
    key, public = pair(tmp_path / "ann")
    key.write_text(public)
    with raises(CertificateError, "certificate.no-key", key):
        sign(RUN, key, UNTIL)


def test_a_signature_of_a_run_without_a_relay_is_the_same_as_before_there_were_relays() -> None:
    assert not {"anonymous-least", "relay", "relay-ca", "signature"} & RUN.keys()
    assert {"rounds", "step-size", "seed"} <= RUN.keys()
    relayed = RunConfig(rounds=3, step_size=0.1, clients_per_round=7, anonymous_least=5).unsigned()
    assert relayed == RUN | {"anonymous-least": 5, "clients-per-round": 7}
