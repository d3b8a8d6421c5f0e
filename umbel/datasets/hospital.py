"""Recipe: what Medicare pays hospitals, one client a provider (group privacy paper, Sec. 5.2).

Features of a row are the service, the longitude and the latitude of the provider; the target is the
average total payment. Numbers are scaled by public constants alone: a statistic of the data would
leak it, and no single client could compute it.

The charges are the Inpatient Prospective Payment System (IPPS) provider summary of fiscal year 2011
by the Centers for Medicare & Medicaid Services (data.cms.gov), ZIP codes are located by GeoNames
(download.geonames.org/export/zip, US.zip).

    python datasets/hospital.py --help
"""

from __future__ import annotations

import csv as csv_format
import sys
import zlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import numpy as np
import pandas as pd
import rich.progress
import typer
from numpy.typing import NDArray
from rich.console import Console

# A script finds modules next to itself; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from umbel.data import Column, DatasetError, Manifest, offsets_of, write_dataset
from umbel.data.making import Out, command, counted, split_of, writing
from umbel.data.table import as_texts, check_columns, column_in, values_of

SERVICES = (194, 292, 392, 690)
"""The four diagnosis-related groups (DRGs) with most providers; a service's index is its place here."""

COLUMNS = {
    "service": Column(
        name="DRG Definition", type="category", categories=list(map(str, SERVICES)), pattern=r"^\s*(\d+)\b"
    ),
    "provider": Column(name="Provider Id", type="integer", minimum=1, maximum=999_999),
    "zip": Column(name="Provider Zip Code", type="integer", minimum=1, maximum=99_999),
    "payment": Column(name="Average Total Payments", type="number", minimum=500, maximum=500_000),
}
"""What is read of the CSV, by our name of a column. The published payments are of 2,673 to 156,158 dollars."""

FEATURES: tuple[dict[str, Any], ...] = (
    {"name": "service", "unit": f"index in DRGs {', '.join(map(str, SERVICES))}", "scale": 4.0, "offset": 0.0},
    {"name": "longitude", "unit": "degrees", "scale": 50.0, "offset": -100.0},
    {"name": "latitude", "unit": "degrees", "scale": 50.0, "offset": 40.0},
)
TARGET: dict[str, Any] = {"name": "Average Total Payments", "unit": "dollars", "scale": 10_000.0}
"""Units of the columns: a stored number times ``scale``, plus ``offset``, is in ``unit``.

100 degrees west, 40 degrees north is the middle of the contiguous states. Places that all lie to one side of 0 are
nearly the same number to a network, whose hypotheses then start as constants: one of them suits all clients best, and
the others are never trained.
"""

_CHUNK_ROWS = 20_000

app = command()


class Zip(StrEnum):
    """How a ZIP code is looked up."""

    AS_INTEGER = "as-integer"
    PADDED = "padded"


def read_charges(csv: Path) -> pd.DataFrame:
    """Read the rows of the four services of an IPPS file, plain or compressed (.gz, .zip), showing progress.

    A row is one of a provider and service: ``service`` (index in `SERVICES`), ``provider`` (its id), ``zip`` (as an
    integer), ``payment`` (dollars).
    """
    service, parts = COLUMNS["service"], []
    for chunk in _chunks(csv):
        check_columns(chunk, list(COLUMNS.values()), csv)
        parts.append(chunk[as_texts(column_in(chunk, service), service.pattern).isin(service.categories)])
    rows = pd.concat(parts)
    if rows.empty:
        raise DatasetError(f"{csv}: no row has a DRG among {SERVICES}; give the IPPS file of 2011", code="data.no-rows")
    numbers = pd.DataFrame({name: values_of(rows, column, csv) for name, column in COLUMNS.items()})
    return numbers.astype({"service": np.int64, "provider": np.int64, "zip": np.int64})


def locate(zips: NDArray[np.int64], form: Zip, geonames: Path | None = None) -> NDArray[np.float64]:
    """Look ZIP codes (rows,) up in GeoNames; return longitudes and latitudes (rows, 2) in degrees.

    A code of several places lies at their mean, and an unknown one at NaN. `Zip.PADDED` looks up 02115 for the integer
    2115, `Zip.AS_INTEGER` looks up 2115, which is no ZIP code: places whose code begins with 0 are not found. Without
    the file `geonames`, plain or compressed, pgeocode downloads it.
    """
    keys = [f"{code:05d}" if form is Zip.PADDED else str(code) for code in zips]
    places = _download(sorted(set(keys))) if geonames is None else _read_places(geonames)
    located: NDArray[np.float64] = places.reindex(keys)[["longitude", "latitude"]].to_numpy(dtype=np.float64)
    return located


def build(
    charges: pd.DataFrame, places: NDArray[np.float64], form: Zip, seed: int = 0, order: Sequence[int] | None = None
) -> tuple[Manifest, NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Turn located charges into a dataset.

    Charges are as from `read_charges`, and places as from `locate` for their rows. Providers take the clients' places
    in random order, unless the ids of all located ones are given in an order; the first 70 % train. Rows of a provider
    that could not be located are left out.

    The results are as in `umbel.data.Dataset`: a row (3,) is the service's index, longitude and latitude in the units
    of `FEATURES`, and the target is in 10,000 dollars; a client's rows come by increasing service.
    """
    located = np.flatnonzero(np.isfinite(places).all(axis=1))
    charges, places = charges.iloc[located], places[located]
    # Sorted ids, so that the result does not depend on the order of the file.
    providers, provider = np.unique(charges["provider"], return_inverse=True)
    known = f"providers whose ZIP code GeoNames knows: {len(providers)}"
    split = split_of(len(providers), 70, known, f"check the GeoNames file, or use --zip {Zip.PADDED}")
    if order is None:
        client = np.random.default_rng(seed).permutation(len(providers))[provider]
    else:
        client = np.argsort(order)[provider]
    # Should a provider list a service twice, the payment settles which comes first.
    rows = np.lexsort((charges["payment"], charges["service"], client))
    features = np.column_stack([charges["service"], places])
    features = (features - [column["offset"] for column in FEATURES]) / [column["scale"] for column in FEATURES]
    targets = charges["payment"].to_numpy() / TARGET["scale"]
    lost = " kept as integers, so that those that begin with 0 are not found" if form is Zip.AS_INTEGER else ""
    names = [column.name for column in COLUMNS.values()]
    manifest = Manifest(
        name="hospital",
        model="mlp",
        loss="rmse",
        clients=len(providers),
        split=split,
        units={"target": TARGET, "features": list(FEATURES)},
        provenance=(
            "Centers for Medicare & Medicaid Services, Inpatient Prospective Payment System provider summary for the "
            f"top 100 diagnosis-related groups, fiscal year 2011; columns {', '.join(names)}; DRGs "
            f"{', '.join(map(str, SERVICES))}. ZIP codes{lost} located by GeoNames postal codes. Made by "
            f"datasets/hospital.py with seed {seed}."
        ),
        licence="charges: public domain (work of the US government); places: GeoNames, CC BY 4.0",
    )
    offsets = offsets_of(np.bincount(client))
    return manifest, features[rows].astype(np.float32), targets[rows].astype(np.float32), offsets


@app.command()
def main(
    csv: Annotated[Path, typer.Option(help="IPPS provider summary FY2011 from data.cms.gov (.csv, .csv.gz).")],
    geonames: Annotated[
        Path | None, typer.Option(help="GeoNames postal codes of the US (.txt, .txt.gz); without it, downloaded.")
    ] = None,
    form: Annotated[
        Zip,
        typer.Option(
            "--zip",
            help="as-integer loses the leading 0 of a ZIP code, so that hospitals of the north-east are not located "
            "and drop out: only this gives the paper's 2947 clients. padded locates them, for 3150 clients.",
        ),
    ] = Zip.AS_INTEGER,
    out: Out = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of clients, and so of the split.")] = 0,
) -> None:
    """Write Medicare's hospital payments as a dataset, one client a provider (group privacy paper, Sec. 5.2)."""
    with writing(out, "hospital") as folder:
        _check(csv, "download the IPPS FY2011 CSV from data.cms.gov, then give --csv")
        if geonames is not None:
            _check(geonames, "unpack US.zip of geonames.org and give --geonames US.txt")
        charges = read_charges(csv)
        places = locate(charges["zip"].to_numpy(), form, geonames)
        manifest, features, targets, offsets = build(charges, places, form, seed)
        write_dataset(folder, manifest, features, targets, offsets)
    lost = charges["provider"].nunique() - manifest.clients
    typer.echo(
        f"{counted(manifest)}, {len(targets)} rows; providers left out, their ZIP code unknown to GeoNames: {lost}"
    )
    typer.echo(folder)


def _check(file: Path, fix: str) -> None:
    if not file.is_file():
        raise DatasetError(f"{file} is not a file; {fix}", code="data.no-file")


def _chunks(csv: Path) -> Iterator[pd.DataFrame]:
    """Read a CSV a part at a time, all columns as text; progress counts bytes of the file."""
    # pandas guesses the compression of a path, not of an open file.
    compression: Any = {".gz": "gzip", ".zip": "zip"}.get(csv.suffix)
    try:
        with rich.progress.open(csv, "rb", description=f"Reading {csv.name}", console=Console(stderr=True)) as file:
            # Text as it stands, for errors to show; and without index_col=False, one comma too many at the end of
            # each row would shift the columns.
            yield from pd.read_csv(
                file, dtype=str, keep_default_na=False, index_col=False, compression=compression, chunksize=_CHUNK_ROWS
            )
    except (OSError, EOFError, ValueError, BadZipFile, zlib.error) as error:
        fix = "download it again from data.cms.gov"
        raise DatasetError(f"{csv} cannot be read as CSV: {error}; {fix}", code="data.unreadable") from None


def _read_places(geonames: Path) -> pd.DataFrame:
    """Read longitude and latitude by ZIP code from a GeoNames postal code file."""
    names = {1: "zip", 9: "latitude", 10: "longitude"}
    try:
        # GeoNames does not quote: a quotation mark is part of a name.
        table = pd.read_csv(
            geonames, sep="\t", header=None, usecols=list(names), dtype=str, quoting=csv_format.QUOTE_NONE
        )
    except (OSError, EOFError, ValueError, BadZipFile, zlib.error) as error:
        wrong = f"{geonames} is not a GeoNames postal code file: {error}"
        raise DatasetError(f"{wrong}; give US.txt of US.zip", code="data.unreadable") from None
    table = table.rename(columns=names)
    numbers = {
        name: values_of(table, Column(name=name, type="number", minimum=-most, maximum=most), geonames)
        for name, most in {"longitude": 180.0, "latitude": 90.0}.items()
    }
    return pd.DataFrame(numbers).groupby(table["zip"].str.strip()).mean()


def _download(keys: list[str]) -> pd.DataFrame:
    """Return longitude and latitude by ZIP code as pgeocode has it, which downloads GeoNames once."""
    try:
        # Only here: with a file at hand it is not needed.
        import pgeocode

        table: pd.DataFrame = pgeocode.Nominatim("us").query_postal_code(keys)
    except (ImportError, OSError, BadZipFile) as error:
        fix = "download US.zip from geonames.org elsewhere, unpack it, and give --geonames US.txt"
        raise DatasetError(f"GeoNames cannot be downloaded by pgeocode: {error}; {fix}", code="data.download") from None
    return table.set_index("postal_code")[["longitude", "latitude"]]


if __name__ == "__main__":
    app()
