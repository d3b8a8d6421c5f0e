"""Make the credentials of server and nodes: a CA, the server's certificate, secrets, the nodes' keys.

    umbel certs --server umbel.example.org --node site-1 --node site-2

Existing files are kept. Only the server's certificate is replaced: when it lacks a name or is about to expire. The new
one has the names of the old one, too. Nodes need no new files then, because they trust the CA. The CA's key may be
elsewhere until it has to sign something.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.hazmat.primitives.serialization import load_pem_private_key as load_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from umbel.protocol.cli import command_line, errors_in_one_line
from umbel.protocol.errors import CertificateError
from umbel.protocol.home import sync
from umbel.protocol.signatures import line_of, public_half

T = TypeVar("T")
CA_DAYS, SERVER_DAYS, RENEW_DAYS = 3650, 365, 30
# Of the server's own machine and the executor beside it, which Flower starts with the address 127.0.0.1.
OWN_NAMES = ("localhost", "127.0.0.1", "superlink")

_RESTORE = "copy it here from where it is kept: no site trusts another authority"
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")


def main(
    server: Annotated[str, typer.Option(help="Names and addresses of the server, separated by spaces or commas.")] = "",
    node: Annotated[list[str] | None, typer.Option(help="A node to make a key for. May be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("certs"),
    owner: Annotated[
        int,
        typer.Option(
            envvar="IMAGE_UID", help="User ID in the image. If root makes the files, this user owns the private ones."
        ),
    ] = 1000,
) -> None:
    """Make the certificates, secrets and keys that the folder lacks."""
    with errors_in_one_line():
        made = make(out, server.replace(",", " ").split(), node or [], owner)
    for file in made:
        typer.echo(f"made {file}")
    if out / "server.crt" in made:
        typer.echo("If the server runs, restart it: it keeps the certificate that it has loaded.")
    if not made:
        typer.echo(f"{out} has all files")


def make(folder: Path, names: list[str], nodes: list[str], owner: int = 1000) -> list[Path]:
    """Make the files that a folder lacks, and return them.

    They are ``ca.crt``, ``ca.key``, ``server.crt``, ``server.key``, ``superexec.secret``, ``control.secret`` and, for
    every node, ``NODE`` and ``NODE.pub``.

    Parameters
    ----------
    folder : Path
    names : list of str
        Host names and IP addresses of the server, in addition to `OWN_NAMES`.
    nodes : list of str
    owner : int
        Number of the image's user, who gets the private files when root writes them.

    Raises
    ------
    CertificateError
        If a name is invalid or an existing file cannot be read.
    """
    subjects = [_subject(name) for name in dict.fromkeys([*OWN_NAMES, *names])]
    for node in nodes:
        if not _NODE.fullmatch(node):
            text = f"{node!r} is not a valid name for a node; use letters, digits and hyphens, as in site-1"
            raise CertificateError(text, code="certificate.bad-node")
        if (folder / f"{node}.pub").exists() and not (folder / node).exists():
            text = f"{folder} has only {node}.pub; register it, since its private key is at the site"
            raise CertificateError(text, code="certificate.key-at-site")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        text = f"nothing can be written in {folder}: {error.strerror}; name another folder: --out"
        raise CertificateError(text, code="certificate.folder") from None
    made: list[Path] = []

    def write(name: str, content: bytes, mode: int = 0o644, reader: int | None = None) -> None:
        _write(folder / name, content, mode, reader)
        made.append(folder / name)

    def missing(*names: str) -> int:
        return sum(not (folder / name).exists() for name in names)

    if missing("ca.key", "ca.crt") == 2:
        key = ec.generate_private_key(ec.SECP384R1())
        write("ca.key", _pem(key), 0o600)  # no container reads it
        write("ca.crt", _authority(key).public_bytes(Encoding.PEM))
    if missing("ca.crt"):
        raise CertificateError(f"{folder} has ca.key, but no ca.crt; {_RESTORE}", code="certificate.half-a-ca")
    # At a site: the operator's ca.crt, and keys of nodes.
    serves = bool(names or not nodes) or missing("ca.key", "server.key", "server.crt") < 3
    ca = _read_certificate(folder / "ca.crt")
    if serves and (missing("server.key", "server.crt") or _stale(folder, ca, subjects)):
        if missing("ca.key"):
            told = f"{folder} has ca.crt, but no ca.key, which has to sign server.crt now; {_RESTORE}"
            raise CertificateError(told, code="certificate.half-a-ca")
        ca_key, key = _read_key(folder / "ca.key"), ec.generate_private_key(ec.SECP384R1())
        # Sites call the server by these names, also where it is renewed while somebody makes a node's key.
        subjects = list(dict.fromkeys([*subjects, *_names(folder / "server.crt")]))
        write("server.key", _pem(key), 0o600, owner)
        write("server.crt", _server(key, subjects, ca, ca_key).public_bytes(Encoding.PEM))
    for shared in ("superexec.secret", "control.secret"):
        if serves and missing(shared):
            write(shared, secrets.token_hex(32).encode(), 0o600, owner)
    for node in nodes:
        if missing(node):
            key = ec.generate_private_key(ec.SECP384R1())
            write(node, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), 0o600, owner)
        if missing(f"{node}.pub"):
            write(f"{node}.pub", f"{line_of(public_half(folder / node))} {node}\n".encode())
    return made


def _subject(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", name):
        text = f"{name!r} is not a host name or IP address; give it without https:// and without a port"
        raise CertificateError(text, code="certificate.bad-name")
    return x509.DNSName(name)


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "umbel CA")])
    return (
        _builder(name, key, CA_DAYS)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )


def _server(
    key: ec.EllipticCurvePrivateKey,
    subjects: list[x509.GeneralName],
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    return (
        _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "umbel server")]), key, SERVER_DAYS)
        .issuer_name(ca.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(subjects), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )


def _builder(name: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks differ, but a node's clock should be off by less than an hour.
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    signs = {"key_cert_sign": signs_certificates, "crl_sign": signs_certificates}
    never = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not signs_certificates, **signs, **never)


def _stale(folder: Path, ca: x509.Certificate, subjects: list[x509.GeneralName]) -> bool:
    """Return whether the server's certificate has another CA or key, lacks a name, or is about to expire."""
    certificate, key = _read_certificate(folder / "server.crt"), _read_key(folder / "server.key")
    try:
        certificate.verify_directly_issued_by(ca)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return True
    soon = datetime.now(UTC) + timedelta(days=RENEW_DAYS)
    ours = certificate.public_key() == key.public_key()
    return not ours or certificate.not_valid_after_utc < soon or not set(subjects) <= set(names)


def _names(file: Path) -> list[x509.GeneralName]:
    """Return the names in a certificate, if there is one."""
    if not file.exists():
        return []
    try:
        return list(_read_certificate(file).extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _read_key(file: Path) -> ec.EllipticCurvePrivateKey:
    key = _read(file, lambda content: load_key(content, password=None))
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        text = f"{file} is not an elliptic-curve key; use the one that was made here"
        raise CertificateError(text, code="certificate.unreadable")
    return key


def _read_certificate(file: Path) -> x509.Certificate:
    return _read(file, x509.load_pem_x509_certificate)


def _read(file: Path, load: Callable[[bytes], T]) -> T:
    try:
        return load(file.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        text = f"{file} cannot be read as a key or certificate: {error}"
        raise CertificateError(text, code="certificate.unreadable") from None


def _write(file: Path, content: bytes, mode: int, reader: int | None) -> None:
    """Write a file completely or not at all, to disk, and give it to `reader` if root writes it."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        scratch.unlink(missing_ok=True)  # left by a process of that number that was killed
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(descriptor, mode)  # at any umask: a container must read public files
            stream.write(content)
            if reader is not None and os.geteuid() == 0:
                # A container mounts the file unchanged, and its user is not root.
                os.fchown(descriptor, reader, reader)
            stream.flush()
            os.fsync(descriptor)
        scratch.replace(file)
        sync(file.parent)
    finally:
        scratch.unlink(missing_ok=True)


app = command_line(main)
