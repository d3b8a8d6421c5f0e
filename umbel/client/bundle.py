"""The bundles that a site answers: a bundle is the code that a server ships, identified by the SHA-256 of its bytes.

    umbel bundle

prints the SHA-256 for the installed umbel. A site never opens a bundle and runs its own app; the hash says whether the
server's run uses the umbel that the site has reviewed.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import typer

from umbel.privacy.site.config import Site
from umbel.protocol.cli import command_line, errors_in_one_line
from umbel.protocol.errors import ConfigError, SiteError
from umbel.protocol.flower import build_bundle
from umbel.protocol.project import APP, described


@dataclass(frozen=True)
class Bundle:
    """An umbel with its bundle's hash."""

    version: str
    sha256: str

    def __str__(self) -> str:
        return f"umbel {self.version}, bundle {self.sha256}"

    @classmethod
    @cache
    def installed(cls) -> Bundle | None:
        """Return the umbel that runs here; None if its ``pyproject.toml`` is missing, so that no bundle can be made."""
        if not (APP / "pyproject.toml").exists():
            return None
        return cls(described()["version"], hashlib.sha256(build_bundle(APP)).hexdigest())


def reviewed(bundle: bytes, node_config: Mapping[str, Any]) -> str:
    """Return why a site, whose configuration may name bundles, refuses a bundle; empty if it does not."""
    own, named = Bundle.installed(), Site.of(node_config).policy.bundles
    if not (named or own):
        raise SiteError("this site has reviewed no bundle: set bundle in its configuration", code="site.no-bundle")
    sha256 = hashlib.sha256(bundle).hexdigest()
    if sha256 in (named or [own.sha256 if own else ""]):
        return ""
    runs = str(own) if own else f"bundle {' or '.join(named)}"
    return f"this site runs {runs}; it has not reviewed bundle {sha256}, which the server sent"


def unpack(folder: Path) -> None:
    """Write the files of the installed umbel's bundle into a new folder; among these alone, ``flwr`` finds them at
    once."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(BytesIO(build_bundle(APP))) as archive:
        archive.extractall(folder)


def main(
    out: Annotated[Path | None, typer.Option(help="A new folder for the bundle's files, for flwr run.")] = None,
) -> None:
    """Print the version of the installed umbel, and the SHA-256 of its bundle."""
    with errors_in_one_line():
        if (own := Bundle.installed()) is None:
            raise SiteError(f"no pyproject.toml in {APP}; install a wheel or a checkout", code="site.no-project")
        if out is not None:
            if out.exists():
                raise ConfigError(f"{out} exists already; give a new folder", code="config.project-exists")
            unpack(out)
        typer.echo(own)


app = command_line(main)
