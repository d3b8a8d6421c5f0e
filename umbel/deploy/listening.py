"""Checks before a process listens: of its port, its certificate, and the options of Flower's commands."""

from __future__ import annotations

import errno
import math
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from logging import WARNING
from pathlib import Path

from cryptography import x509

from umbel.deploy.certs import RENEW_DAYS
from umbel.protocol.errors import CertificateError, UmbelError
from umbel.protocol.log import log
from umbel.protocol.words import count_of


def option(arguments: Sequence[str], name: str, default: str = "") -> str:
    """Return the last value of an option, given as ``--name value`` or ``--name=value``."""
    found = default
    for i, word in enumerate(arguments):
        if word == name and i + 1 < len(arguments):
            found = arguments[i + 1]
        if word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def without(arguments: Sequence[str], name: str) -> list[str]:
    """Return options without one that takes a value."""
    before = ["", *arguments]
    return [
        word for last, word in zip(before, arguments, strict=False) if name not in (last, word, word.partition("=")[0])
    ]


def check_port(kind: type[UmbelError], host: str, port: str) -> None:
    """Raise an error of a kind if no process can listen at an address."""
    code = f"{kind.kind}.port"
    try:
        if not 0 <= int(port) < 1 << 16:
            raise ValueError
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except ValueError:
        raise kind(f"--port must be a number from 0 to 65535, got {port!r}", code=code) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} of {host} is in use; end the other program, or choose another: --port"
        else:
            text = f"nothing can listen at {host}:{port}: {error}; choose another address: --host, --port"
        raise kind(text, code=code) from None


def check_validity(file: Path, fix: str = "renew it: umbel certs") -> None:
    """Warn if a certificate in a PEM file expires within `RENEW_DAYS`; errors and warning end with the fix.

    Raises
    ------
    CertificateError
        If it has expired, since no site would accept it, or if the file holds none.
    """
    try:
        ends = min(one.not_valid_after_utc for one in x509.load_pem_x509_certificates(file.read_bytes()))
    except (OSError, ValueError) as error:
        text = f"{file} cannot be read as a certificate: {error}; {fix}"
        raise CertificateError(text, code="certificate.unreadable") from None
    days = (ends - datetime.now(UTC)).total_seconds() / 86_400
    if days < 0:
        text = f"{file} has expired on {ends:%d %B %Y}, so no site would connect; {fix}"
        raise CertificateError(text, code="certificate.expired")
    if days < RENEW_DAYS:
        log(WARNING, "%s expires in %s; %s", file, count_of(math.ceil(days), "day"), fix)
