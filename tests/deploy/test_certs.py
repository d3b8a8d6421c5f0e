"""Certificates that Flower and TLS accept, private files that nobody else reads, and nothing overwritten."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from typer.testing import CliRunner

from tests.helpers.errors import ended, raises
from umbel.cli.main import app
from umbel.deploy import certs
from umbel.deploy.certs import make
from umbel.protocol.errors import CertificateError
from umbel.protocol.signatures import line_of, public_half, public_key

PUBLIC = {"ca.crt", "server.crt", "site-1.pub"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = make(tmp_path / "certs", ["umbel.example.org", "203.0.113.7"], ["site-1"])
    assert {file.name for file in made} == {file.name for file in (tmp_path / "certs").iterdir()}
    return tmp_path / "certs"


def shake_hands(folder: Path, name: str) -> None:
    """Do a TLS handshake in memory between a client that trusts the CA and the server."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=name), server.wrap_bio(up, down, server_side=True)]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def names(files: list[Path]) -> list[str]:
    return [file.name for file in files]


def test_a_client_that_trusts_the_ca_accepts_the_names_of_the_server_alone(folder: Path, tmp_path: Path) -> None:
    for name in ("umbel.example.org", "203.0.113.7", "localhost", "127.0.0.1", "superlink"):
        shake_hands(folder, name)
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        shake_hands(folder, "other.example.org")
    authority, server = (
        x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in ("ca.crt", "server.crt")
    )
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.critical, constraints.value.ca) == (True, True)
    usage = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    assert list(usage.value) == [x509.ExtendedKeyUsageOID.SERVER_AUTH]
    # A key and a certificate that do not belong together are made anew; another authority is not trusted.
    make(tmp_path / "other", [], [])
    (tmp_path / "other" / "server.key").replace(folder / "server.key")
    make(folder, [], [])
    shake_hands(folder, "localhost")
    (tmp_path / "other" / "ca.crt").replace(folder / "ca.crt")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(folder, "localhost")


def test_keys_are_as_flower_loads_them_and_what_is_private_is_its_owners_alone(folder: Path) -> None:
    private = load_ssh_private_key((folder / "site-1").read_bytes(), password=None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert try_load_public_key(folder / "site-1.pub") == public_key_to_bytes(private.public_key())
    for file in folder.iterdir():
        assert file.stat().st_mode & 0o777 == (0o644 if file.name in PUBLIC else 0o600), file.name


def test_root_gives_the_image_s_user_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the open file: at its name another user's link may lie, in a folder of theirs."""
    given: dict[int, int] = {}
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.fchown", lambda file, uid, _: given.update({os.fstat(file).st_ino: uid}))
    make(tmp_path, [], ["site-1"], owner=1234)
    private = {file for file in tmp_path.iterdir() if file.name not in PUBLIC} - {tmp_path / "ca.key"}
    assert given == {file.stat().st_ino: 1234 for file in private}


def test_what_is_there_is_kept_and_another_name_makes_another_certificate_of_the_same_ca(folder: Path) -> None:
    before = {file: file.read_bytes() for file in folder.iterdir()}
    assert make(folder, ["umbel.example.org"], ["site-1"]) == []
    assert names(make(folder, [], ["site-2"])) == ["site-2", "site-2.pub"]
    assert all(file.read_bytes() == content for file, content in before.items())
    assert names(make(folder, ["new.example.org"], [])) == ["server.key", "server.crt"]
    assert (folder / "ca.crt").read_bytes() == before[folder / "ca.crt"]
    shake_hands(folder, "new.example.org")


@pytest.mark.parametrize("nodes", [[], ["site-2"]])
def test_a_certificate_about_to_expire_is_made_anew_for_its_names(
    folder: Path, nodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where somebody only makes another node's key in its last month."""
    before = (folder / "server.crt").read_bytes()
    monkeypatch.setattr(certs, "RENEW_DAYS", certs.SERVER_DAYS + 1)
    assert names(make(folder, [], nodes))[:2] == ["server.key", "server.crt"]
    assert (folder / "server.crt").read_bytes() != before
    for name in ("umbel.example.org", "203.0.113.7", "localhost"):
        shake_hands(folder, name)


def test_the_key_of_the_ca_is_needed_only_to_sign_and_never_by_a_site(folder: Path, tmp_path: Path) -> None:
    (folder / "ca.key").rename(folder.parent / "ca.key")
    assert make(folder, ["umbel.example.org"], ["site-1"]) == []
    assert names(make(folder, [], ["site-2"])) == ["site-2", "site-2.pub"]
    with raises(CertificateError, "certificate.half-a-ca", "ca.key", "server.crt"):
        make(folder, ["new.example.org"], [])
    assert not (folder / "ca.key").exists()
    (tmp_path / "site").mkdir()
    (folder / "ca.crt").rename(tmp_path / "site" / "ca.crt")
    assert names(make(tmp_path / "site", [], ["site-9"])) == ["site-9", "site-9.pub"]


def test_a_key_that_a_crash_left_alone_gets_its_public_half(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = certs._write

    def killed(file: Path, *rest: Any) -> None:
        if file.suffix == ".pub":
            raise KeyboardInterrupt
        write(file, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(certs, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            make(folder, [], ["site-2"])
    private = (folder / "site-2").read_bytes()
    assert [file.name for file in make(folder, [], ["site-2"])] == ["site-2.pub"]
    assert (folder / "site-2").read_bytes() == private
    assert line_of(public_key("site-2", (folder / "site-2.pub").read_text())) == line_of(public_half(folder / "site-2"))


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a power cut could leave an empty ca.key, and sites that trust no other authority."""
    file, scratch, synced, fsync = tmp_path / "ca.key", tmp_path / f".ca.key.{os.getpid()}", [], os.fsync

    def look(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), file.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    scratch.write_bytes(b"half a k")
    certs._write(file, b"key", 0o600, None)
    assert (file.read_bytes(), synced) == (b"key", [(scratch, False), (tmp_path, True)])


@pytest.mark.parametrize(
    ("gone", "damaged", "server", "nodes", "code", "parts"),
    [
        ("ca.key server.crt", "", [], [], "certificate.half-a-ca", ["ca.key", "ca.crt"]),
        ("ca.crt server.crt", "", [], [], "certificate.half-a-ca", ["ca.key", "ca.crt"]),
        ("site-1", "", [], ["site-1"], "certificate.key-at-site", ["site-1.pub"]),  # the site has its key
        *(("", file, ["new.example.org"], [], "certificate.unreadable", [file])
          for file in ("ca.key", "ca.crt", "server.crt")),
        *(("", "", [name], [], "certificate.bad-name", [name])
          for name in ("https://umbel.example.org", "umbel.example.org:8000")),
        ("", "", [], ["../site"], "certificate.bad-node", ["../site"]),
    ],
)  # fmt: skip
def test_half_of_what_belongs_together_is_not_replaced_and_what_is_wrong_is_named(
    folder: Path, gone: str, damaged: str, server: list[str], nodes: list[str], code: str, parts: list[str]
) -> None:
    for file in gone.split():
        (folder / file).unlink()
    if damaged:
        (folder / damaged).write_bytes(b"damaged")
    before = {file: file.read_bytes() for file in folder.iterdir()}
    with raises(CertificateError, code, *parts):
        make(folder, server, nodes)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_the_command_makes_what_is_missing_and_names_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    options = ["certs", "--server", "a.example.org, 203.0.113.7", "--node", "site-1", "--node", "site-2", "--out"]
    for _ in range(2):
        assert CliRunner().invoke(app, [*options, str(tmp_path)]).exit_code == 0
        assert (tmp_path / "site-2.pub").exists()
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", Path("/proc/nowhere")):
        done = CliRunner().invoke(app, [*options, str(place)])
        ended(done.exit_code, done.output, "certificate.folder", place, "--out")
