"""Whether a site could answer a message now: its disk has room, and its ledger and log are intact.

A container's health check asks every few seconds. So the ledger and the log are read again only after a change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

Seen = tuple[tuple[int, int, int], ...]


class Readiness:
    """A site's readiness, from the path of its ledger.

    Parameters
    ----------
    ledger : Path
    needed : callable
        Returns whether a missing ledger makes the site refuse.
    keeps : bool
        Keep room for the site's log, as the site itself does. Without it nothing is written, for another process that
        only looks.
    """

    def __init__(self, ledger: Path, needed: Callable[[], bool] = lambda: True, keeps: bool = True) -> None:
        self._ledger, self._needed, self._keeps = ledger, needed, keeps
        self._seen: Seen = ()
        self._told: UmbelError | None = None
        self._lock = Lock()

    @classmethod
    def of(cls, node_config: Mapping[str, Any], keeps: bool = True) -> Readiness | None:
        """Return the readiness of the site that a node configuration describes; None if there is no ledger on disk."""
        site = Site.of(node_config)
        path = site.ledger_path
        # Once the site has answered, a ledger that is gone is a lost one.
        return None if path is None else cls(path, lambda: not may_begin(site, path), keeps)

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
            site_log = SiteLog(beside(self._ledger))
            if not (self._ledger.exists() or self._needed()):
                site_log.reserve.look()
                return None
            seen = seen_of(self._ledger)
            if seen != self._seen:
                Ledger(self._ledger)
                if site_log.path.exists():
                    site_log.check_end()
                self._seen = seen
            if self._keeps:
                site_log.reserve.keep()
            else:
                site_log.reserve.look()
        except UmbelError as error:
            return error
        except OSError as error:
            text = f"this user cannot write beside the ledger {self._ledger}: {error}; make it the owner: chown"
            return SiteError(text, code="site.permissions")
        return None


def seen_of(ledger: Path) -> Seen:
    """Return what changes whenever a ledger or the log beside it does."""
    return _seen(ledger), _seen(beside(ledger))


def _seen(path: Path) -> tuple[int, int, int]:
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return 0, 0, 0
