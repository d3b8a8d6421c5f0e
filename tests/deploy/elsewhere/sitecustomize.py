"""Makes a command call from another address than this machine's servers listen at, as if it ran elsewhere.

Python imports a module of this name when it starts, where its folder is on PYTHONPATH.
"""

from __future__ import annotations

import socket
from typing import Any

_connect = socket.create_connection


def connect(address: tuple[str, int], *arguments: Any, **options: Any) -> socket.socket:
    return _connect(address, *arguments, **options | {"source_address": ("127.0.0.2", 0)})


socket.create_connection = connect
