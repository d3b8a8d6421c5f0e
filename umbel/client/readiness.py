"""Whether a site could answer a message now: its disk has room, and its journal is intact and writable.

Where the site's configuration is known, its policy must be valid too, and its data in their place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from logging import ERROR, INFO
from pathlib import Path
from threading import Lock
from typing import Any

from umbel.privacy.site.config import Site
from umbel.privacy.site.journal import Journal, may_begin
from umbel.protocol.errors import SiteError, UmbelError
from umbel.protocol.home import check_room
from umbel.protocol.log import log

_LEAST_ROOM = 1 << 20  # bytes for a new journal and its first lines


class Readiness:
    """A site's readiness, from the path of its ledger.

    Parameters
    ----------
    ledger : Path
    site : callable, optional
        Returns the site as its configuration and policy file describe it now, or raises.
    """

    def __init__(self, ledger: Path, site: Callable[[], Site] | None = None) -> None:
        self._ledger, self._site = ledger, site
        self._told: UmbelError | None = None
        self._lock = Lock()

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Readiness | None:
        """Return the readiness of the site that a node configuration describes; None if there is no ledger on disk."""
        path = Site.of(node_config).ledger_path
        return None if path is None else cls(path, lambda: Site.of(node_config))

    def fault(self) -> UmbelError | None:
        """Return why the site cannot answer; None if it can. A change is written to the node's log."""
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
            site = self._site and self._site()
            data = site and site.data_path
            if site and data and not (site.policy.reader or site.policy.app or data.exists()):
                # As where a disk is not mounted; a site's own reader may need no file.
                text = f"there are no data at {data}; mount their disk, or set data-path"
                return SiteError(text, code="site.no-data")
            # Once the site has answered, a journal that is gone is a lost one.
            if site and not self._ledger.exists() and may_begin(site):
                check_room(self._ledger, _LEAST_ROOM)
                return None
            journal = Journal(self._ledger, witness=site.witness_folder if site else None, opened=False)
            check_usable(self._ledger.parent, self._ledger, journal.witness.path)
            journal.keep_room()
        except UmbelError as error:
            return error
        except OSError as error:
            text = f"this user cannot write beside the ledger {self._ledger}: {error}; make it the owner: chown"
            return SiteError(text, code="site.permissions")
        return None


def check_usable(*paths: Path) -> None:
    """Raise if one of the paths that exist cannot be read and written: a disk with a fault becomes read-only in use."""
    for path in paths:
        if path.exists() and not os.access(path, os.R_OK | os.W_OK):
            text = f"{path} cannot be read and written: its disk is read-only, or this user is not its owner"
            raise SiteError(f"{text}; mount it again, or chown", code="site.permissions")
