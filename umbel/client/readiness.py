"""Whether a site could answer a message now: its disk has room, and its ledger and log are intact.

A container's health check asks every few seconds. So the ledger and the log are read again only after a change.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from logging import ERROR, INFO
from pathlib import Path
from threading import Lock
from typing import Any

from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.site_log import SiteLog
from umbel.privacy.gate.store import beside, may_begin
from umbel.protocol.errors import SiteError, UmbelError
from umbel.protocol.flower import log


class Readiness:
    """A site's readiness, from the path of its ledger.

    Parameters
    ----------
    ledger : Path
    needed : bool
        Whether a missing ledger makes the site refuse.
    """

    def __init__(self, ledger: Path, needed: bool = True) -> None:
        self._ledger, self._needed = ledger, needed
        self._seen: list[tuple[int, int, int]] = []
        self._told: UmbelError | None = None
        self._lock = Lock()

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Readiness | None:
        """Return the readiness of the site that a node configuration describes; None if there is no ledger on disk."""
        site = Site.of(node_config)
        path = site.ledger_path
        return None if path is None else cls(path, not may_begin(site, path))

    def fault(self) -> UmbelError | None:
        """Return why the site could answer nothing; the node's log tells when that changes."""
        with self._lock:
            fault = self._fault()
            if (fault and fault.code) != (self._told and self._told.code):
                if fault:
                    log(ERROR, "This site is not ready: %s", fault)
                else:
                    log(INFO, "This site is ready again")
                self._told = fault
            return fault

    def _fault(self) -> UmbelError | None:
        try:
            if not (self._needed or self._ledger.exists()):
                return None
            site_log = SiteLog(beside(self._ledger))
            seen = [_seen(self._ledger), _seen(site_log.path)]
            if seen != self._seen:
                Ledger(self._ledger)
                if site_log.path.exists():
                    site_log.check_end()
                self._seen = seen
            site_log.reserve.keep()
        except UmbelError as error:
            return error
        except OSError as error:
            text = f"this user cannot write beside the ledger {self._ledger}: {error}; make it the owner: chown"
            return SiteError(text, code="site.permissions")
        return None


def _seen(path: Path) -> tuple[int, int, int]:
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return 0, 0, 0
