"""A site's own table of hospital payments; its schema is ``hospital.toml``, next to this file.

A node reads it with ``reader="umbel.data.hospital_table:read geonames=/data/US.txt"``.
"""

from __future__ import annotations

from logging import WARNING
from pathlib import Path

import numpy as np
import pandas as pd

from umbel.data.data import Dataset
from umbel.data.find import load_recipe
from umbel.data.schema import Column
from umbel.data.table import Register, values_of
from umbel.data.table import read as read_table
from umbel.protocol.errors import DatasetError, SiteError
from umbel.protocol.flower import log

SCHEMA = Path(__file__).resolve().with_name("hospital.toml")
_ZIP = Column(name="Provider Zip Code", type="integer", minimum=1, maximum=99_999)


def read(csv: Path, register: Register, geonames: str = "") -> Dataset:
    """Turn hospital payments into a dataset in memory, one client a provider (see `umbel.data.table.read`).

    The columns of `csv` are those of the IPPS provider summary. GeoNames' postal codes of the US locate a provider by
    its ZIP code, after leading zeros are restored.
    """
    if not Path(geonames).is_absolute():
        fix = "add geonames=/path/to/US.txt to reader in its node configuration"
        wrong = (
            f"{csv} is a table with ZIP codes, which GeoNames must locate: unpack US.zip of geonames.org at this site"
        )
        raise SiteError(f"{wrong}, and {fix}", code="site.no-geonames")

    def locate(charges: pd.DataFrame) -> pd.DataFrame:
        recipe = load_recipe("hospital")
        zips = values_of(charges, _ZIP, csv).astype(np.int64)
        places = recipe.locate(zips, recipe.Zip.PADDED, Path(geonames))
        found = np.isfinite(places).all(axis=1)
        if not found.any():
            text = f"{csv}: no provider has a ZIP code that GeoNames knows; check {geonames}"
            raise DatasetError(text, code="data.no-place")
        if not found.all():
            lost = sorted(set(zips[~found].tolist()))
            log(WARNING, "%s: rows left out, because GeoNames does not know their ZIP codes: %s", csv, lost)
        located: pd.DataFrame = charges.assign(longitude=places[:, 0], latitude=places[:, 1])[found]
        return located

    return read_table(csv, register, str(SCHEMA), locate)
