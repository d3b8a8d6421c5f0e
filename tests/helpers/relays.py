"""A relay that is served on a port of this machine, with a certificate."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from umbel.deploy import certs
from umbel.deploy.relay import server_of
from umbel.privacy.anonymous.batches import Batches
from umbel.privacy.anonymous.link import RelayLink
from umbel.protocol.signatures import PublicKey, public_key


@dataclass
class Served:
    """A relay with its address, and its batches as only its operator could see them."""

    url: str
    ca: str
    batches: Batches

    @property
    def link(self) -> RelayLink:
        """A new way to it."""
        return RelayLink(self.url, self.ca)


def known(listed: str) -> dict[str, PublicKey]:
    """Return the keys in a policy's entry ``parties``."""
    return {name: public_key(name, line) for name, line in (pair.split("=", 1) for pair in listed.split())}


@contextmanager
def served(folder: Path, keys: Mapping[str, PublicKey], least: int, largest: int = 1 << 20) -> Iterator[Served]:
    """Serve a relay for sites with these keys, from a thread; its certificate lies in the folder."""
    certs.make(folder, [], [])
    listening, batches = socket.create_server(("127.0.0.1", 0)), Batches(keys, least)
    server = server_of(batches, largest, "127.0.0.1", 0, folder / "server.crt", folder / "server.key")
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield Served(f"https://127.0.0.1:{listening.getsockname()[1]}", str(folder / "ca.crt"), batches)
    finally:
        server.should_exit = True
        thread.join()
