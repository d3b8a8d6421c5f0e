"""A site's own table of charges, served as it is: the hospital recipe, without the folder it would write."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

from federation import BUNDLED, Federation, check

SUFFIXES = (".csv", ".csv.gz", ".csv.zip")


def is_table(path: Path) -> bool:
    """Return whether the data at `path` are a table."""
    return path.name.lower().endswith(SUFFIXES)


def open_table(csv: Path, geonames: Path) -> Federation:
    """Turn hospital charges into a federation in memory, one client a provider.

    Columns, services, units and ranges are those of ``datasets/hospital.py``, and so are the public
    constants that scale its numbers. ZIP codes get their leading zeros back.

    Parameters
    ----------
    csv : Path
        Charges, in the columns of the IPPS provider summary.
    geonames : Path
        GeoNames' postal codes of the US.

    Returns
    -------
    Federation

    Raises
    ------
    FederationError
        When a column is missing, or a number is none or out of range. The text names the file, the
        column, the row and the fix.
    """
    recipe = _recipe()
    charges = recipe.read_charges(csv)
    places = recipe.locate(charges["zip"].to_numpy(), recipe.Zip.PADDED, geonames)
    federation = Federation(*recipe.build(charges, places, recipe.Zip.PADDED))
    check(federation, csv)
    return federation


@cache
def _recipe() -> ModuleType:
    # By its path: `datasets` is a folder of scripts, and no package, so as not to shadow the library of that name.
    spec = importlib.util.spec_from_file_location("umbel_hospital", BUNDLED / "hospital.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
