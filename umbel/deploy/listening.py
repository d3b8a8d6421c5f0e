"""Checks of a port before a process listens there, and of the options of Flower's commands."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from umbel.protocol.errors import UmbelError


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
