"""Recipe: Medicare's payments to hospitals, one client for each provider (group privacy paper, Sec. 5.2).

The features of a row are the service, the longitude and the latitude of the provider; the target is the average total
payment. Only public constants scale the numbers (umbel/data/hospital.toml): a statistic of the data would leak
information, and no single client could compute it. In the paper, the service is a number. As four columns of 0 and 1,
it needs no network: payments differ by service, and the order of services means nothing.

Both results ship with umbel, as hospital.json and hospital-services.json next to this script.

The charges are the Inpatient Prospective Payment System (IPPS) provider summary of fiscal year 2011
by the Centers for Medicare & Medicaid Services (data.cms.gov), ZIP codes are located by GeoNames
(download.geonames.org/export/zip, US.zip; see NOTICE).

    python datasets/hospital.py --csv FILE --geonames FILE --out datasets/hospital.json
    python datasets/hospital.py --csv FILE --geonames FILE --services one-hot --out datasets/hospital-services.json
"""

from __future__ import annotations

import csv as csv_format
import sys
import zlib
from collections.abc import Iterator
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

from umbel.data import BUNDLED, Column, Dataset, DatasetError, Manifest, Schema, offsets_of
from umbel.data.making import command, counted, split_of, write, writing
from umbel.data.table import Reading, as_texts, check_columns, encode, named, values_of

LAYOUT = Schema.read(BUNDLED.parent / "data" / "hospital.toml")
"""The columns of a row, as in the paper.

100 degrees west, 40 degrees north is the middle of the contiguous states. Without this offset all places lie on one
side of 0, and are nearly the same number to a network, whose hypotheses then start as constants. One of these suits all
clients best, and the others are never trained. The published payments are of 2,673 to 156,158 dollars.
"""

_ZIP = Column(name="Provider Zip Code", type="integer", minimum=1, maximum=99_999)
_READ = [column for column in (LAYOUT.features[0], LAYOUT.client, _ZIP, LAYOUT.target) if column is not None]

LICENCE = (
    "charges: public domain (work of the US government); places: GeoNames postal codes (https://www.geonames.org), "
    "CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/), averaged by ZIP code and scaled"
)

_CHUNK_ROWS = 20_000

app = command()


class Services(StrEnum):
    """A model's view of the service."""

    INDEX = "index"
    ONE_HOT = "one-hot"


class Zip(StrEnum):
    """How a ZIP code is looked up."""

    AS_INTEGER = "as-integer"
    PADDED = "padded"


def layout(services: Services) -> Schema:
    """Return the schema of a row with its model: the paper's network, or a linear one for services as columns."""
    if services is Services.INDEX:
        return LAYOUT
    service, *places = LAYOUT.features
    columns = [service.model_copy(update={"encode": "one-hot", "scale": 1.0}), *places]
    linear = {"name": "hospital-services", "model": "linear inputs=6 outputs=1", "loss": "mse"}
    return LAYOUT.model_copy(update={"features": columns, **linear})


def read_charges(csv: Path) -> pd.DataFrame:
    """Read the rows of the four services of an IPPS file, plain or compressed (.gz, .zip), showing progress.

    Each row belongs to a provider and a service. Columns have the file's names; numbers are checked, and the service is
    the number of its diagnosis-related group (DRG), as text.
    """
    service, parts = LAYOUT.features[0], []
    for raw in _chunks(csv):
        chunk = named(raw, _READ)
        check_columns(chunk, _READ, csv)
        parts.append(chunk[as_texts(chunk[service.name], service.pattern).isin(service.categories)])
    rows = pd.concat(parts)
    if rows.empty:
        wrong = f"{csv}: no row has a DRG among {', '.join(service.categories)}"
        raise DatasetError(f"{wrong}; give the IPPS file of 2011", code="data.no-rows")
    reading, whole = Reading(csv), {column.name: np.int64 for column in _READ if column.type == "integer"}
    found = {column.name: values_of(rows, column, reading) for column in _READ}
    reading.end()
    services = np.array(service.categories)[found[service.name].astype(np.int64)]
    return pd.DataFrame(found | {service.name: services}).astype(whole)


def locate(zips: NDArray[np.int64], form: Zip, geonames: Path | None = None) -> NDArray[np.float64]:
    """Look ZIP codes (rows,) up in GeoNames; return longitudes and latitudes (rows, 2) in degrees.

    A code of several places lies at their mean, and an unknown one at NaN. `Zip.PADDED` looks up 02115 for the integer
    2115. `Zip.AS_INTEGER` looks up 2115, which is not a ZIP code: places whose code begins with 0 are not found.
          Without the file `geonames`, plain or compressed, pgeocode downloads it.
    """
    keys = [f"{code:05d}" if form is Zip.PADDED else str(code) for code in zips]
    places = _download(sorted(set(keys))) if geonames is None else _read_places(geonames)
    located: NDArray[np.float64] = places.reindex(keys)[["longitude", "latitude"]].to_numpy(dtype=np.float64)
    return located


def build(
    charges: pd.DataFrame,
    places: NDArray[np.float64],
    form: Zip,
    seed: int = 0,
    services: Services = Services.INDEX,
) -> Dataset:
    """Turn located charges into a dataset.

    Charges are as from `read_charges`, and places as from `locate` for their rows. Providers become clients in random
    order; the first 70 % train. Rows of providers without a location are left out.

    A row is the service (one number, or four), longitude and latitude, in the units of `layout`, and the target is in
    10,000 dollars; a client's rows come by increasing service. A client's name is the provider's id.
    """
    located = np.flatnonzero(np.isfinite(places).all(axis=1))
    charges = charges.assign(longitude=places[:, 0], latitude=places[:, 1]).iloc[located]
    schema = layout(services)
    assert schema.client is not None
    # Sorted ids, so that the result does not depend on the order of the file.
    providers, provider = np.unique(charges[schema.client.name], return_inverse=True)
    known = f"providers whose ZIP code GeoNames knows: {len(providers)}"
    split = split_of(len(providers), 70, known, f"check the GeoNames file, or use --zip {Zip.PADDED}")
    place = np.random.default_rng(seed).permutation(len(providers))
    client = place[provider]
    # If a provider lists a service twice, the payment decides which row comes first.
    rows = np.lexsort((charges[schema.target.name], charges[schema.features[0].name].astype(int), client))
    encoded = encode(charges, schema, "the charges")
    lost = " kept as integers, so that those that begin with 0 are not found" if form is Zip.AS_INTEGER else ""
    manifest = Manifest(**schema.said | {
        "name": schema.name,
        "clients": len(providers),
        "split": split,
        "provenance": (
            "Centers for Medicare & Medicaid Services, Inpatient Prospective Payment System provider summary for the "
            f"top 100 diagnosis-related groups, fiscal year 2011; columns {', '.join(one.name for one in _READ)}; DRGs "
            f"{', '.join(schema.features[0].categories)}. ZIP codes{lost} located by GeoNames postal codes. Made by "
            f"datasets/hospital.py with seed {seed}."
        ),
        "licence": LICENCE,
    })  # fmt: skip
    names = list(map(str, providers[np.argsort(place)]))
    offsets = offsets_of(np.bincount(client))
    return Dataset(manifest, encoded.features[rows], encoded.targets[rows], offsets, names)


@app.command()
def main(
    csv: Annotated[Path, typer.Option(help="IPPS provider summary FY2011 from data.cms.gov (.csv, .csv.gz).")],
    geonames: Annotated[
        Path | None,
        typer.Option(help="GeoNames postal codes of the US (.txt, .txt.gz); otherwise umbel downloads them."),
    ] = None,
    form: Annotated[
        Zip,
        typer.Option(
            "--zip",
            help="as-integer loses the leading 0 of ZIP codes, so hospitals of the north-east are not located and drop "
            "out. Only this gives the paper's 2947 clients. padded locates them and gives 3150 clients.",
        ),
    ] = Zip.AS_INTEGER,
    services: Annotated[
        Services,
        typer.Option(
            help="index: the service as one number, for a network, as in the paper. one-hot: four columns of 0 and 1, "
            "for a linear model; the dataset is then called hospital-services."
        ),
    ] = Services.INDEX,
    out: Annotated[
        Path | None, typer.Option(help="Folder, or LEAF JSON file (.json).", show_default="$UMBEL_HOME/data/NAME")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of clients, which decides the split.")] = 0,
) -> None:
    """Write Medicare's hospital payments as a dataset, one client per provider (group privacy paper, Sec. 5.2)."""
    with writing(out, layout(services).name) as path:
        _check(csv, "download the IPPS FY2011 CSV from data.cms.gov, then give --csv")
        if geonames is not None:
            _check(geonames, "unpack US.zip of geonames.org and give --geonames US.txt")
        charges = read_charges(csv)
        places = locate(charges[_ZIP.name].to_numpy(), form, geonames)
        dataset = build(charges, places, form, seed, services)
        write(path, dataset)
    lost = charges[_READ[1].name].nunique() - dataset.manifest.clients
    typer.echo(
        f"{counted(dataset.manifest)}, {len(dataset.targets)} rows; providers left out, their ZIP code unknown to "
        f"GeoNames: {lost}"
    )
    typer.echo(path)


def _check(file: Path, fix: str) -> None:
    if not file.is_file():
        raise DatasetError(f"{file} is not a file; {fix}", code="data.no-file")


def _chunks(csv: Path) -> Iterator[pd.DataFrame]:
    """Read a CSV in parts, with all columns as text; progress counts bytes of the file."""
    # pandas guesses the compression of a path, not of an open file.
    compression: Any = {".gz": "gzip", ".zip": "zip"}.get(csv.suffix)
    try:
        with rich.progress.open(csv, "rb", description=f"Reading {csv.name}", console=Console(stderr=True)) as file:
            # Text stays unchanged, so that errors can show it. Without index_col=False, an extra comma at the end of
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
    reading = Reading(geonames)
    numbers = {
        name: values_of(table, Column(name=name, type="number", minimum=-most, maximum=most), reading)
        for name, most in {"longitude": 180.0, "latitude": 90.0}.items()
    }
    reading.end()
    return pd.DataFrame(numbers).groupby(table["zip"].str.strip()).mean()


def _download(keys: list[str]) -> pd.DataFrame:
    """Return longitude and latitude by ZIP code from pgeocode, which downloads GeoNames once."""
    try:
        # Imported only here: it is not needed if a file is at hand.
        import pgeocode

        table: pd.DataFrame = pgeocode.Nominatim("us").query_postal_code(keys)
    except (ImportError, OSError, BadZipFile) as error:
        fix = "download US.zip from geonames.org elsewhere, unpack it, and give --geonames US.txt"
        raise DatasetError(f"GeoNames cannot be downloaded by pgeocode: {error}; {fix}", code="data.download") from None
    return table.set_index("postal_code")[["longitude", "latitude"]]


if __name__ == "__main__":
    app()
