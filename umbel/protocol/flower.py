"""Parts of Flower that are not public, which messages, records, runs and bundles need.

This module and `umbel.deploy.flower` alone touch such parts; ``tools/private.toml`` lists each, with the reason and
with what Flower would have to offer (``make check``). They change between releases: `tests/protocol/test_flower.py`
names each part that is gone or has changed. A change that guards fails closed, and one that only saves time is left out
with a warning.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from warnings import warn

from flwr.app import Array, Message
from flwr.common.config import parse_config_args
from flwr.common.constant import ErrorCode, SType
from flwr.supercore.run import Run

from umbel.protocol import project

__all__ = [
    "ErrorCode",
    "Run",
    "SType",
    "build_bundle",
    "delivered",
    "drop_limit",
    "encoded",
    "filled",
    "identify",
    "in_memory",
    "keep_secret",
    "limit_answer",
    "limit_in",
    "number",
    "parse_config_args",
    "pull_soon",
    "refuse_repeated_parts",
    "without_proxy",
]

T = TypeVar("T")
_SCALARS = (int, float, str, bytes)

_SOON_S = 0.05
"""Seconds until a missing part of a message is looked for again; Flower waits a second."""

_LIMIT = re.compile(r", answer up to (\d{1,18}) bytes$")
"""Maximum size of the answer, in a message's group: Flower's database keeps the group, and the logs show it."""


def identify(node: int = 1) -> None:
    """Set this process's identity where Flower has not: no Message can be made without one.

    Its source stands alone: the lab's audits send it to environments without umbel.
    """
    from flwr.supercore.task_identity import TaskIdentity

    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, node, 1


def number(message: Message, name: str) -> None:
    """Give a message an id, as Flower's own grids do when they send it."""
    message.metadata.__dict__["_message_id"] = name


def filled(record: T, entries: Mapping[str, Any]) -> T:
    """Put entries that fit into a record, without Flower's check of each number, which takes longer than all the
    rest."""
    data: Any = record.__dict__.get("_data")
    if data is None:
        warn("Flower keeps records in another way: messages are made more slowly", stacklevel=2)
        data = record
    data.update(entries)
    return record


def encoded(dtype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """Return an array in NumPy's format, like ``Array(dtype, shape, SType.NUMPY, data)`` but without its checks."""
    array = Array.__new__(Array)
    vars(array).update(dtype=dtype, shape=shape, stype=SType.NUMPY, data=data)
    return array


def delivered(message: Message) -> Message:
    """Return a message as it arrives over a network: whoever changes it changes no other.

    Only the bytes of arrays are shared, which are read-only.
    """
    known: Any = {"metadata": _shallow(message.metadata)}
    return Message(message.error, **known) if message.has_error() else Message(_deep(message.content), **known)


def _deep(value: Any) -> Any:
    """Return a copy of a record, or of an entry of one."""
    if isinstance(value, _SCALARS):  # most entries
        return value
    if isinstance(value, list):
        return value.copy()
    if isinstance(value, Array):
        return _shallow(value)
    return filled(value.copy(), {name: _deep(entry) for name, entry in value.items()})


def _shallow(value: T) -> T:
    other = object.__new__(type(value))
    vars(other).update(vars(value))
    return other


def build_bundle(folder: Path) -> bytes:
    """Return the bundle that ``flwr run`` would submit for the app in a folder."""
    build = import_module("flwr.cli.build")
    if (folder := folder.resolve()) != project.APP:
        return bytes(build.build_fab_from_disk(folder))
    # In a wheel the files of umbel's own app lie at two places, and a checkout has a virtual environment beside them.
    files = {file.name: file for file in folder.iterdir() if file.is_file() and not file.is_symlink()}
    package = [file for file in project.PACKAGE.rglob("*") if file.is_file() and project.INSTALLED not in file.parents]
    files |= {file.relative_to(project.PACKAGE.parent).as_posix(): file for file in package}
    return bytes(build.build_fab_from_files(files)[0])


def limit_answer(message: Message, most: int) -> None:
    """Note on a message how many bytes its answer may have; a server behind umbel's guard accepts no more."""
    message.metadata.group_id += f", answer up to {most} bytes"


def limit_in(group: str, most: int) -> int:
    """Return how many bytes the answer to a message of that group may have, `most` in any case."""
    limit = _LIMIT.search(group)
    return min(most, int(limit[1])) if limit else most


def drop_limit(answer: Message) -> None:
    """Give an answer the message's group from before `limit_answer`."""
    answer.metadata.group_id = _LIMIT.sub("", answer.metadata.group_id)


def in_memory(grid: object) -> bool:
    """Return whether a grid is Flower's own simulation grid, which Flower imports before the app runs."""
    return isinstance(grid, getattr(sys.modules.get("flwr.superlink.grid.inmemory_grid"), "InMemoryGrid", ()))


def pull_soon() -> None:
    """Shorten the wait for parts of a message that are on their way.

    To be called before Flower's grid, SuperNode or ClientApp process is imported, which read the wait.
    """
    constants: Any = import_module("flwr.supercore.constant")
    if not hasattr(constants, "PULL_INITIAL_BACKOFF"):
        warn("Flower waits in another way: messages arrive more slowly", stacklevel=2)
    constants.PULL_INITIAL_BACKOFF = _SOON_S


@cache
def refuse_repeated_parts() -> None:
    """From here on, refuse received arrays that use a part more than once, in one array or in several of a message.

    Flower would copy the part for each use: a message of 100 kB could fill any memory. So arrays take no more memory
    than their parts.
    """
    inflate = Array.inflate.__func__  # type: ignore[attr-defined]

    def inflate_once(cls: type, content: bytes, children: Any = None) -> Any:
        uses = json.loads(content.partition(b"\0")[2])["arraychunk_ids"]
        parts = (children or {}).values()  # each once, though the content may name it twice
        if len(uses) != len(parts) or any("used" in vars(part) for part in parts):
            raise ValueError("an array repeats one of its parts or another array's; umbel accepts no such array")
        for part in parts:
            vars(part)["used"] = True
        return inflate(cls, content, children)

    Array.inflate = classmethod(inflate_once)  # type: ignore[assignment, method-assign]


def keep_secret(home: Path, address: str, secret: str) -> None:
    """Make the ``flwr`` command send a secret to a server, as ``Authorization: Bearer``.

    Parameters
    ----------
    home : Path
        Flower's home, ``FLWR_HOME``.
    address : str
        Address of the server, as in the connection.
    """
    store = import_module("flwr.supercore.credential_store.file_credential_store").FileCredentialStore
    kept = store(home / "credentials.yaml")
    # Flower sends no access token without a refresh token; this one is never refreshed.
    for name, value in {"authn-type": "oidc", "oidc-access-token": secret, "oidc-refresh-token": "none"}.items():
        kept.set(f"flower.account-auth.{address}.{name}", value.encode())


def without_proxy() -> dict[str, str]:
    """Return the environment in which programs of this machine reach each other directly.

    Many organisations name a proxy for all addresses. It cannot reach the loopback of the machine that asks.
    """
    named = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    value = ",".join([*filter(None, [named]), "127.0.0.1", "localhost"])
    return {"no_proxy": value, "NO_PROXY": value}
