"""Signed run configs: a researcher signs a run's settings, and a site checks them against keys that its policy lists.

A signature covers every entry of the run config, a time until which it may be used, and the server: a site answers it
only at a server with a certificate of the same authority. Keys are SSH keys, as ``ssh-keygen -t ed25519`` and ``umbel
certs --node NAME`` write them.
"""

from __future__ import annotations

import json
from base64 import b64decode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from umbel.protocol.errors import CertificateError, SiteError

SIGNATURE = "signature"
"""The run config's entry, which the signature itself does not cover."""
PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey
_TIME = "%Y-%m-%dT%H:%MZ"


@dataclass(frozen=True)
class Signed:
    """A valid signature: the name of who signed, until when it is valid, and the server (`server_of`)."""

    name: str
    until: datetime
    server: str


def server_of(authority: Path) -> str:
    """Return what identifies a server: the SHA-256 fingerprint of its certificate authority's certificate.

    Raises
    ------
    CertificateError
        If the file does not hold exactly one certificate. Of several, any could have certified another server.
    """
    try:
        found = x509.load_pem_x509_certificates(authority.read_bytes())
    except (OSError, ValueError) as error:
        text = f"{authority} cannot be read as a certificate: {error}"
        raise CertificateError(text, code="certificate.unreadable") from None
    if len(found) != 1:
        text = f"{authority} holds {len(found)} certificates; give the one of the server's certificate authority"
        raise CertificateError(text, code="certificate.several")
    return found[0].fingerprint(hashes.SHA256()).hex()


def sign(entries: Mapping[str, Any], key: Path, until: datetime, server: str) -> str:
    """Return the signature of a whole run config (`umbel.protocol.run_config.RunConfig.unsigned`), until a time.

    Parameters
    ----------
    entries : mapping
    key : Path
    until : datetime
    server : str
        Where the run will be started (`server_of`).

    Raises
    ------
    CertificateError
        If `key` holds no private SSH key without a passphrase, of the kind Ed25519 or ECDSA.
    """
    last = until.astimezone(UTC).strftime(_TIME)
    return f"{last} {server} {urlsafe_b64encode(signed(_text(entries, last, server), key)).decode()}"


def signed(text: bytes, key: Path) -> bytes:
    """Return the signature of a text by a private SSH key; errors as for `sign`."""
    private = _private(key)
    if isinstance(private, ed25519.Ed25519PrivateKey):
        return private.sign(text)
    return private.sign(text, ec.ECDSA(hashes.SHA256()))


def public_half(key: Path) -> PublicKey:
    """Return the public key that belongs to a private SSH key; errors as for `sign`."""
    return _private(key).public_key()


def simulated_key(seed: int | None, place: int) -> ed25519.Ed25519PrivateKey:
    """Return the key of a simulated node; in a simulation there is one computer, and nothing to hide from it."""
    return ed25519.Ed25519PrivateKey.from_private_bytes(
        sha256(f"umbel {seed} {simulated_name(place)}".encode()).digest()
    )


def simulated_name(place: int) -> str:
    """Return the name under which keys of a simulated node are listed."""
    return f"node {place}"


@lru_cache(maxsize=16)
def simulated_keys(seed: int | None, nodes: int) -> dict[str, PublicKey]:
    """Return the public keys of all nodes of a simulation, by name."""
    return {simulated_name(place): simulated_key(seed, place).public_key() for place in range(nodes)}


def _private(key: Path) -> ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey:
    try:
        private = load_ssh_private_key(key.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        text = f"{key} is no private SSH key without a passphrase: {error}"
        raise CertificateError(text, code="certificate.no-key") from None
    if not isinstance(private, ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{key} is neither Ed25519 nor ECDSA; make another", code="certificate.no-key")
    return private


def signer(entries: Mapping[str, Any], signature: str, keys: Mapping[str, str]) -> Signed | None:
    """Return what a signature of a run config says; None if it is by none of `keys`.

    `keys` are public keys by name, as `public_key` reads them.
    """
    try:
        last, server, coded = signature.split(" ", 2)
        until, code = datetime.strptime(last, _TIME).replace(tzinfo=UTC), urlsafe_b64decode(coded)
    except ValueError:
        return None
    for name, text in keys.items():
        if verifies(public_key(name, text), code, _text(entries, last, server)):
            return Signed(name, until, server)
    return None


def names_no_server(signature: str) -> bool:
    """Return whether a signature has the form that umbel made before signatures named a server."""
    return signature.count(" ") == 1


def identity(entries: Mapping[str, Any], signature: str, key: str) -> str:
    """Return what identifies a signature that `signer` accepted: a hash of what was signed, and of the public key.

    Whoever has a signature can write it in other ways, and of an ECDSA signature can compute another one that is valid.
    """
    last, server, _ = signature.split(" ", 2)
    return sha256(_text(entries, last, server) + key.encode()).hexdigest()


def public_key(name: str, text: str) -> PublicKey:
    """Return the key in a line of an SSH public key file, or in its middle part alone.

    Raises
    ------
    SiteError
        If it is no key of the kind Ed25519 or ECDSA.
    """
    try:
        blob = next(word for word in text.split() if word.startswith("AAAA"))
        kind = b64decode(blob)[4:].split(b"\0", 1)[0].decode("ascii")
        key = load_ssh_public_key(f"{kind} {blob}".encode())
    except (StopIteration, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, PublicKey):
        raise SiteError(
            f"the key of {name!r} is no Ed25519 or ECDSA key of SSH; give the line of a .pub file", code="site.bad-key"
        )
    return key


def same_key(keys: Mapping[str, PublicKey]) -> tuple[str, str] | None:
    """Return two names that have the same key; None if all have different ones."""
    names: dict[str, str] = {}
    for name, key in keys.items():
        if (other := names.setdefault(line_of(key), name)) != name:
            return other, name
    return None


def line_of(key: PublicKey) -> str:
    """Return a public key as a line of a public key file."""
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def verifies(key: PublicKey, signed: bytes, text: bytes) -> bool:
    """Return whether a signature of a text is by a key."""
    try:
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signed, text)
        else:
            key.verify(signed, text, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def _text(entries: Mapping[str, Any], until: str, server: str) -> bytes:
    """Return what is signed; the same for the same settings in any order."""
    return f"umbel run until {until} at {server}\n{json.dumps(dict(entries), sort_keys=True)}".encode(
        "utf-8", "surrogatepass"
    )
