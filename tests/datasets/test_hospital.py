"""The hospital recipe: a small file whose every figure can be checked by hand, then the real one."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pgeocode
import pytest
from typer.testing import CliRunner

from tests.datasets.conftest import DATA, Recipe, assert_same, needs
from umbel.data import BUNDLED, Dataset, open_dataset
from umbel.data.table import encode
from umbel.models import load

pytestmark = pytest.mark.rest

REAL_CSV, REAL_GEONAMES = DATA / "IPPS_FY2011.csv.gz", DATA / "geonames_US.txt.gz"

recipe = Recipe("hospital")
hospital, assert_refused = recipe.module, recipe.assert_refused

# Stray spaces, dollar signs, commas and the order of rows are as in the exports. 10001 is in Alabama; 20002 in
# Boston, whose ZIP code 02115 has lost its zero; 30003 in Beverly Hills; 40004 in no place that GeoNames knows;
# 50005 offers none of the four services.
CSV = """\
DRG Definition,Provider Id,Provider Name,Provider Zip Code, Average Covered Charges , Average Total Payments
690 - KIDNEY & URINARY TRACT INFECTIONS W/O MCC,10001,A,36301,1,"$4,500.00"
039 - EXTRACRANIAL PROCEDURES W/O CC/MCC,50005,E,36301,1,not read
292 - HEART FAILURE & SHOCK W CC,20002,B,2115,1,7000
392 - ESOPHAGITIS W/O MCC,30003,C,90210,1,5000
194 - SIMPLE PNEUMONIA & PLEURISY W CC,40004,D,99999,1,8000
194 - SIMPLE PNEUMONIA & PLEURISY W CC,10001,A,36301,1,6000.5
"""
PLACES = {"36301": [(31.14, -85.4)], "02115": [(42.34, -71.1)], "90210": [(34.08, -118.4), (34.1, -118.42)]}

# By hand: service index / 4, (longitude + 100) / 50, (latitude - 40) / 50 (the two places of 90210 at their mean);
# dollars / 10,000.
CLIENTS = {
    10001: ([[0.0, 0.292, -0.1772], [0.75, 0.292, -0.1772]], [0.60005, 0.45]),
    20002: ([[0.25, 0.578, 0.0468]], [0.7]),
    30003: ([[0.5, -0.3682, -0.1182]], [0.5]),
}


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "charges.csv"
    path.write_text(CSV)
    return path


@pytest.fixture
def geonames(tmp_path: Path) -> Path:
    """A GeoNames postal code file; a place name begins with a lone quotation mark: GeoNames does not quote."""
    path = tmp_path / "US.txt"
    rows = [(code, *place) for code, places in PLACES.items() for place in places]
    path.write_text("".join(f'US\t{c}\t"Camp X\tState\tST\tCounty\t1\t\t\t{lat}\t{lon}\t4\n' for c, lat, lon in rows))
    return path


def run(csv: Path, geonames: Path | None, out: Path, *options: str) -> Any:
    """Run the recipe's command line."""
    place = [] if geonames is None else ["--geonames", str(geonames)]
    return recipe.run(out, "--csv", csv, *place, *options)


def made(csv: Path, geonames: Path | None, out: Path, *options: str) -> Dataset:
    """Run it, and return what it wrote."""
    result = run(csv, geonames, out, *options)
    assert result.exit_code == 0, result.stderr
    return open_dataset(out)


def assert_holds(dataset: Dataset, providers: list[int]) -> None:
    """Check that the clients are those providers of `CLIENTS`, in that order."""
    assert dataset.manifest.clients == len(providers)
    for i, provider in enumerate(providers):
        features, targets = dataset.client(i)
        np.testing.assert_array_equal(features, np.array(CLIENTS[provider][0], np.float32))
        np.testing.assert_array_equal(targets, np.array(CLIENTS[provider][1], np.float32))


# --- the small file


def test_a_zip_code_that_begins_with_0_is_found_where_it_is_padded(csv: Path, geonames: Path, tmp_path: Path) -> None:
    result = run(csv, geonames, tmp_path / "out", "--seed", "3")
    assert "ZIP code unknown to GeoNames: 2\n" in result.stdout
    dataset = open_dataset(tmp_path / "out")
    # The seed gives the first and the second provider, by id, the places 1 and 0.
    assert np.random.default_rng(3).permutation(2).tolist() == [1, 0]
    assert_holds(dataset, [30003, 10001])
    assert dataset.names == ["30003", "10001"]
    assert "begin with 0 are not found" in dataset.manifest.provenance
    assert "CC BY 4.0" in dataset.manifest.licence
    dataset = made(csv, geonames, tmp_path / "padded", "--zip", "padded")
    # 70 % of 3 clients, rounded down, train. Seed 0 gives 10001, 20002, 30003 the places 2, 0, 1.
    assert dataset.manifest.split == {"train": 2, "validation": 1}
    assert np.random.default_rng(0).permutation(3).tolist() == [2, 0, 1]
    assert_holds(dataset, [20002, 30003, 10001])
    assert "begin with 0" not in dataset.manifest.provenance
    manifest = dataset.manifest
    assert (manifest.name, manifest.model, manifest.loss) == ("hospital", "mlp", "rmse")
    assert (manifest.units["target"]["unit"], manifest.units["target"]["scale"]) == ("dollars", 10_000.0)
    assert [(one["name"], one["scale"], one["offset"]) for one in manifest.units["features"]] == [
        ("DRG Definition", 4.0, 0.0), ("longitude", 50.0, -100.0), ("latitude", 50.0, 40.0),
    ]  # fmt: skip
    assert dataset.features.dtype == dataset.targets.dtype == np.float32


def test_services_as_columns_suit_a_linear_model(csv: Path, geonames: Path, tmp_path: Path, umbel_home: Path) -> None:
    """And what the manifest says of columns is what a table is encoded by."""
    dataset = made(csv, geonames, tmp_path / "out", "--services", "one-hot")
    first, second = (dataset.client(index)[0] for index in range(2))
    np.testing.assert_array_equal(first, np.array([[1, 0, 0, 0, 0.292, -0.1772], [0, 0, 0, 1, 0.292, -0.1772]], "f4"))
    np.testing.assert_array_equal(second, np.array([[0, 0, 1, 0, -0.3682, -0.1182]], "f4"))
    manifest = dataset.manifest
    assert (manifest.name, manifest.model, manifest.loss) == ("hospital-services", "linear inputs=6 outputs=1", "mse")
    assert load(manifest.model, manifest.loss).num_parameters == 7
    assert manifest.layout is not None
    rows = pd.read_csv(csv).iloc[[0, 5]].assign(longitude=-85.4, latitude=31.14)
    np.testing.assert_array_equal(encode(rows, manifest.layout, csv).features[::-1], first)
    # Without a name services decide it.
    done = CliRunner().invoke(hospital.app, ["--csv", str(csv), "--geonames", str(geonames), "--services", "one-hot"])
    assert done.stdout.splitlines()[-1] == str(umbel_home / "data" / "hospital-services")


HEAD, *ROWS = CSV.splitlines()


@pytest.mark.filterwarnings("ignore:Length of header:pandas.errors.ParserWarning")
@pytest.mark.parametrize(
    "lines",
    [
        [HEAD, *reversed(ROWS)],
        [",".join(name.strip().replace(" ", "_").lower() for name in HEAD.split(",")), *ROWS],
        [HEAD, *(f"{row}," for row in ROWS)],
    ],
    ids=["order of rows", "names of other exports", "a comma too many"],
)
def test_what_plays_no_part_in_any_file(lines: list[str], csv: Path, geonames: Path, tmp_path: Path) -> None:
    csv.write_text("\n".join(lines))
    for path in (csv, geonames):
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
    for ending in ("", ".gz"):
        dataset = made(Path(f"{csv}{ending}"), Path(f"{geonames}{ending}"), tmp_path / "out", "--zip", "padded")
        assert_holds(dataset, [20002, 30003, 10001])


def test_pgeocode_gives_the_same_places_and_a_download_that_fails_names_the_way_around(
    csv: Path, tmp_path: Path, geonames: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What pgeocode keeps after a download: the same columns, comma separated under a header.
    table = pd.read_csv(geonames, sep="\t", header=None, names=pgeocode.DATA_FIELDS, dtype=str, quoting=3)
    table.to_csv(tmp_path / "US.txt", index=False)
    monkeypatch.setattr(pgeocode, "STORAGE_DIR", str(tmp_path))
    assert_holds(made(csv, None, tmp_path / "out", "--zip", "padded"), [20002, 30003, 10001])
    monkeypatch.setattr(pgeocode, "STORAGE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(pgeocode, "DOWNLOAD_URL", [(tmp_path / "nothing.zip").as_uri()])
    assert_refused(run(csv, None, new := tmp_path / "new"), new, "GeoNames cannot be downloaded", "--geonames")


def test_the_script_runs_from_anywhere_and_writes_below_umbel_home(csv: Path, geonames: Path, tmp_path: Path) -> None:
    dataset = recipe.made_as_a_script(tmp_path, "--csv", csv.name, "--geonames", geonames.name)
    assert_holds(dataset, [10001, 30003])


# --- what cannot be used


def replaced(old: str, new: str) -> bytes:
    return CSV.replace(old, new).encode()


NO_SERVICE = "039 - EXTRACRANIAL PROCEDURES W/O CC/MCC,50005,E,36301,1,5"
PLACE = b'US\t36301\t"Camp X\tState\tST\tCounty\t1\t\t\t31.14\t-85.4\t4\n'
LACKS = "lacks the columns ['Provider Id', 'Provider Zip Code']"


@pytest.mark.parametrize(
    ("name", "content", "reasons"),
    [
        ("charges.csv", None, ["{file} is not a file", "data.cms.gov", "--csv"]),
        ("US.txt", None, ["{file} is not a file", "US.zip", "--geonames"]),
        ("charges.csv", replaced("Provider Id", "Hospital").replace(b"Provider Zip Code", b"Postcode"), [LACKS]),
        *(("charges.csv", f"{HEAD}\n{rows}\n".encode(), ["{file}: no row has a DRG among 194, 292, 392, 690", "2011"])
          for rows in ("", NO_SERVICE)),
        ("charges.csv", replaced("7000", "n/a"), ["{file}: Average Total Payments in data row 3 is missing"]),
        ("charges.csv", replaced("90210", "Beverly"), ["{file}: Provider Zip Code in data row 4 is 'Beverly'"]),
        *((name, content, ["{file} cannot be read as CSV: ", "download it again"]) for name, content in (
            ("charges.csv", b""), ("charges.csv", b"\xff\xfe\x00"),
            ("charges.csv.gz", gzip.compress(CSV.encode() * 99, mtime=0)[:200]),
        )),
        ("US.txt", b"", ["{file} is not a GeoNames postal code file", "US.txt of US.zip"]),
        ("US.txt", b"ZIP,LAT,LON\n36301,31.14,-85.4\n", ["{file} is not a GeoNames postal code file"]),
        ("US.txt", PLACE + PLACE.replace(b"31.14", b"north"), ["{file}: latitude in data row 2 is 'north'"]),
        # Providers that cannot be located are refused together.
        ("US.txt", PLACE, ["providers whose ZIP code GeoNames knows: 1, and at least 2", "--zip padded"]),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_named(
    csv: Path, geonames: Path, tmp_path: Path, name: str, content: bytes | None, reasons: list[str]
) -> None:
    file, out = tmp_path / name, tmp_path / "out"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    refused = run(file if "charges" in name else csv, geonames, out)
    assert_refused(refused, out, *(reason.replace("{file}", str(file)) for reason in reasons))


# --- the real file


@needs(REAL_CSV, REAL_GEONAMES)
@pytest.mark.parametrize(("name", "services"), [("hospital", "index"), ("hospital-services", "one-hot")])
def test_what_ships_is_what_the_recipe_makes(tmp_path: Path, name: str, services: str) -> None:
    file, folder = tmp_path / f"{name}.json", tmp_path / name
    one, other = (made(REAL_CSV, REAL_GEONAMES, out, "--services", services) for out in (file, folder))
    assert file.read_bytes() == (BUNDLED / f"{name}.json").read_bytes()
    assert_same(one, other)


def test_the_papers_rows_ship_to_the_bit_and_the_others_hold_the_same() -> None:
    paper, columns = (open_dataset(BUNDLED / f"{name}.json") for name in ("hospital", "hospital-services"))
    rows = hashlib.sha256()
    for array in (paper.features, paper.targets, paper.offsets):
        rows.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
    assert rows.hexdigest().startswith("25f2bf67b11ae489")
    assert paper.manifest.split == {"train": 2062, "validation": 885}
    assert len(paper.targets) == 11_119
    np.testing.assert_array_equal(columns.targets, paper.targets, strict=True)
    np.testing.assert_array_equal(columns.features[:, 4:], paper.features[:, 1:], strict=True)
    np.testing.assert_array_equal(columns.features[:, :4].argmax(axis=1), 4 * paper.features[:, 0])
    np.testing.assert_array_equal(columns.features[:, :4].sum(axis=1), 1)
    assert columns.names == paper.names


@needs(REAL_CSV, REAL_GEONAMES)
def test_the_real_file_gives_more_clients_where_zip_codes_are_padded(tmp_path: Path) -> None:
    dataset = made(REAL_CSV, REAL_GEONAMES, tmp_path / "out", "--zip", "padded")
    assert (dataset.manifest.split, len(dataset.features)) == ({"train": 2205, "validation": 945}, 11_911)
    # Each client is in one place, with increasing services.
    for i in range(dataset.manifest.clients):
        features, _ = dataset.client(i)
        assert len(np.unique(features[:, 1:], axis=0)) == 1
        assert np.all(np.diff(features[:, 0]) > 0)
