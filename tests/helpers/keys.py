"""Researchers' SSH keys."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


def pair(path: Path, kind: str = "ed25519") -> tuple[Path, str]:
    """Write a private key; return its file and the line of its public key."""
    private = ed25519.Ed25519PrivateKey.generate() if kind == "ed25519" else ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return path, private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
