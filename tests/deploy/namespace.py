"""A network of its own for one site, with a cable to this machine that can be pulled out."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class NamespaceError(RuntimeError):
    """This machine lets nobody make a network namespace; the text says what is missing."""


@dataclass(frozen=True)
class Namespace:
    """A network namespace and a pair of virtual devices, one end on either side.

    `name` is that of the namespace and of the device in it, and `host` the address of this machine as seen from there.
    """

    name: str
    host: str

    @property
    def within(self) -> list[str]:
        """A command that runs the command behind it in the namespace."""
        return ["ip", "netns", "exec", self.name]

    def plug(self, state: str) -> None:
        """Cut the namespace off ("down"), so that whatever is sent is lost, or let it send again ("up")."""
        _run(*self.within, "ip", "link", "set", self.name, state)


@contextmanager
def namespace() -> Iterator[Namespace]:
    """Make a namespace, and remove it at the end; raise `NamespaceError` when that cannot be done here."""
    # Device names hold 15 characters. The addresses are those set aside for tests of networks (RFC 2544).
    name, outside = f"umbel{os.getpid()}", f"umbel{os.getpid()}h"
    subnet = f"198.{18 + os.getpid() % 2}.{os.getpid() // 2 % 256}"
    made = Namespace(name, f"{subnet}.1")
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", name, "netns", name)
        _run("ip", "address", "add", f"{made.host}/24", "dev", outside)
        _run("ip", "link", "set", outside, "up")
        _run(*made.within, "ip", "address", "add", f"{subnet}.2/24", "dev", name)
        # The SuperNode and its client processes talk over it.
        _run(*made.within, "ip", "link", "set", "lo", "up")
        made.plug("up")
        yield made
    finally:
        _run("ip", "netns", "delete", name)  # which takes both devices along


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise NamespaceError(f"{' '.join(command)}: {getattr(error, 'stderr', error)}") from None
