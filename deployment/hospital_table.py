"""A site's own table of hospital charges, served as it is: the hospital recipe, without the folder it would write.

A node reads it with ``reader="deployment.hospital_table:read"`` and ``reader-options="geonames=/data/US.txt"``.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from logging import WARNING
from pathlib import Path
from types import ModuleType

import numpy as np

from federation import BUNDLED, Federation, check
from protocol.errors import FederationError, SiteError
from protocol.flower import log
from protocol.home import write_atomically


def read(csv: Path, register: Path, geonames: str = "") -> Federation:
    """Turn hospital charges into a federation in memory, one client a provider.

    Columns, services, units and ranges are those of ``datasets/hospital.py``, and so are the public
    constants that scale its numbers. ZIP codes get their leading zeros back.

    Parameters
    ----------
    csv : Path
        Charges, in the columns of the IPPS provider summary.
    register : Path
        Where the site keeps which provider has which number, made if need be. A ledger knows clients by
        number: a provider that comes gets the next, and none may go.
    geonames : str
        Path of GeoNames' postal codes of the US.

    Returns
    -------
    Federation

    Raises
    ------
    FederationError
        When a column is missing, or a number is none or out of range, or a provider of the register
        has gone. The text names the file, the column, the row and the fix.
    """
    if not Path(geonames).is_absolute():
        raise SiteError(
            f"{csv} is a table, whose ZIP codes must be located: unpack US.zip of geonames.org at this site, and set "
            f'reader-options to "geonames=/path/to/US.txt" in its node configuration'
        )
    recipe = _recipe()
    charges = recipe.read_charges(csv)
    places = recipe.locate(charges["zip"].to_numpy(), recipe.Zip.PADDED, Path(geonames))
    providers = {int(provider) for provider in charges["provider"][np.isfinite(places).all(axis=1)]}
    if lost := sorted({int(provider) for provider in charges["provider"]} - providers):
        log(WARNING, "%s: left out, because GeoNames does not know their ZIP codes: providers %s", csv, lost)
    known = _read_register(register)
    if gone := sorted(set(known) - providers):
        raise FederationError(
            f"{csv}: providers {gone} have taken part and are not there any more; put their rows back, since the "
            f"ledger counts clients in the order of {register}"
        )
    order = [*known, *sorted(providers - set(known))]
    federation = Federation(*recipe.build(charges, places, recipe.Zip.PADDED, order=order))
    check(federation, csv)
    if order != known:
        write_atomically(register, (json.dumps(order) + "\n").encode())
    return federation


def _read_register(register: Path) -> list[int]:
    try:
        text = register.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    try:
        known = json.loads(text)
    except json.JSONDecodeError:
        known = None
    if not isinstance(known, list) or not all(type(provider) is int for provider in known):
        raise FederationError(f"{register} is no list of providers; restore it from the backup, with the ledger")
    return known


@cache
def _recipe() -> ModuleType:
    # By its path: `datasets` is a folder of scripts, and no package, so as not to shadow the library of that name.
    spec = importlib.util.spec_from_file_location("umbel_hospital", BUNDLED / "hospital.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
