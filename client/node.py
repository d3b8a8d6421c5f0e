"""The clients of a node: which federation it serves, and which part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import models
from federation import Federation, find_federation, open_federation
from models.base import Model
from privacy.site import Site
from protocol import Arrays, Hosting, ProtocolError


@dataclass(frozen=True)
class Node:
    """A node's clients, counted from 0, training clients first.

    Attributes
    ----------
    site : Site
        Where the node runs.
    federation : Federation
        The data it serves: in simulation every ``site.step``-th client, elsewhere all.
    model : Model
        The network the federation is for.
    """

    site: Site
    federation: Federation
    model: Model

    @classmethod
    def of(cls, node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> Node:
        """Return the node that the site's configuration describes.

        Only in simulation does the run config, which is the server's, name the federation.
        """
        site = Site.of(node_config)
        path = site.data_path or find_federation(str(run_config["federation"]))
        federation = _open(path, _modified(path))
        manifest = federation.manifest
        model = models.load_for(str(run_config["model"]), str(run_config["loss"]), manifest.model, manifest.loss)
        return cls(site, federation, model)

    @property
    def hosting(self) -> Hosting:
        """What the node says when asked."""
        manifest, site = self.federation.manifest, self.site
        train = len(range(site.first, manifest.train, site.step))
        clients = len(range(site.first, manifest.clients, site.step))
        place = (site.first, site.step) if site.simulated else (-1, -1)
        return Hosting(train, clients - train, *place)

    def training_clients(self, asked: tuple[int, ...]) -> list[int]:
        """Return the federation's numbers of asked clients, which must all train here."""
        return self._clients(asked, 0, self.hosting.train, "training")

    def validation_clients(self, asked: tuple[int, ...]) -> list[int]:
        """Return the federation's numbers of asked clients, which must all validate here."""
        hosting = self.hosting
        return self._clients(asked, hosting.train, hosting.train + hosting.validation, "validation")

    def check(self, hypotheses: Arrays) -> None:
        """Raise unless the hypotheses fit this node's model."""
        shapes = {name: value.shape[1:] for name, value in hypotheses.items()}
        if shapes != self.model.shapes:
            raise ProtocolError(
                f"hypotheses of shapes {shapes} do not fit model {self.model.name!r}: {self.model.shapes}"
            )

    def _clients(self, asked: tuple[int, ...], first: int, stop: int, role: str) -> list[int]:
        if strangers := [client for client in asked if not first <= client < stop]:
            raise ProtocolError(f"clients {strangers} are no {role} clients of this node ({first} to {stop - 1})")
        return self.site.client_ids(asked)


def _modified(path: Path) -> int:
    """Return when the data last changed, so that a node that lives on reads them again."""
    file = path / "manifest.json" if path.is_dir() else path
    return file.stat().st_mtime_ns if file.exists() else 0


@lru_cache(maxsize=4)
def _open(path: Path, _modified: int) -> Federation:
    return open_federation(path)
