"""`umbel data`: from a table with a column of clients to a run, without Python.

What each option makes of rows `tests/data/importers` shows.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.helpers import cli
from tests.helpers.cli import refused, schema_of
from tests.helpers.errors import raises
from tests.helpers.paper import paper_run
from umbel.data import find_dataset, open_dataset, read_manifest
from umbel.protocol.errors import ConfigError
from umbel.simulation.in_process import play
from umbel.simulation.start import read_values, values_of
from umbel.simulation.wanted import Wanted

COST = ("--client", "hospital", "--target", "cost")
SCALES = ("--set", "cost.scale=10000", "--set", "cost.unit=dollars", "--set", "age.scale=20", "--set", "age.offset=50")


def said(*words: object) -> str:
    """Return what is printed, with the columns of its tables one space apart."""
    return re.sub(r"[ \t]+", " ", cli.said("data", *words))


@pytest.fixture
def stays(tmp_path: Path) -> Path:
    """200 stays at ten hospitals: half of the hospitals charge for age, half for youth."""
    draw = np.random.default_rng(0)
    hospital, age = np.arange(200) % 10, draw.integers(20, 90, 200)
    smoker = draw.random(200) < 0.3
    cost = 10_000 + np.where(hospital % 2, 100, -100) * (age - 50) + 2_000 * smoker
    names, ward = [f"h{number}" for number in hospital], draw.choice(["A", "B"], 200)
    columns = {"hospital": names, "age": age, "ward": ward, "smoker": np.where(smoker, "yes", "no"), "cost": cost}
    pd.DataFrame(columns).to_csv(tmp_path / "stays.csv", index=False)
    return tmp_path / "stays.csv"


def test_a_table_becomes_a_dataset_that_a_run_learns_from_and_whose_schema_makes_it_again(
    stays: Path, tmp_path: Path
) -> None:
    told = said("import", stays, *COST, *SCALES)
    for line in (
        "clients 8 training, 2 validation", "rows 200; 20 a client", "target cost; dollars; float32",
        "model linear inputs=4 outputs=1", "loss mse", "age feature number (age - 50) / 20",
        "ward feature category A, B 2 numbers, 0 or 1", "smoker feature boolean 0 or 1",
        "cost target number dollars cost / 10000",
    ):  # fmt: skip
        assert line in told
    assert told.splitlines()[-1] == "Next: umbel run stays"
    asked = {"dataset": "stays", "clients-per-round": 8, "noise-multiplier": 0.0, "rounds": 30, "restarts": 2}
    run = play(paper_run() | asked)
    first, last = run.state.history[0].loss, run.state.history[-1].loss
    # In units of 10,000 dollars: what is left is noise of one model, not the difference of two.
    assert last < 0.05 < first
    said("import", stays, "--schema", schema_of("stays", tmp_path / "schema.toml"), "--name", "two words")
    first, again = (open_dataset(find_dataset(name)) for name in ("stays", "two words"))
    np.testing.assert_array_equal(first.features, again.features)


def test_what_is_there_is_listed_and_described(stays: Path, umbel_home: Path) -> None:
    """Brackets in a name are text."""
    frame = pd.read_csv(stays).rename(columns={"age": "age [years]", "ward": "ward [/A]"})
    frame.to_csv(stays, index=False)
    words = ("--target", "smoker", "--features", "age [years],ward [/A]", "--test", "h1,h2")
    said("import", stays, "--client", "hospital", *words)
    (umbel_home / "data" / "broken").mkdir()
    (umbel_home / "data" / "broken" / "manifest.json").write_text("{}")
    listed = said("show")
    for line in ("stays 6 2 smoker linear inputs=3 outputs=1 log", "synthetic 100 100 linear", "broken/manifest.json"):
        assert line in listed
    described = said("show", "stays")
    for line in ("clients 6 training, 2 validation", "smoker target boolean -1 or 1", "age [years] feature", "[/A]"):
        assert line in described
    assert described.splitlines()[-1] == str(umbel_home / "data" / "stays")
    assert "clients 0 training, 2 validation" in said("show", "stays/test")


def test_a_site_checks_its_own_table_against_the_schema(stays: Path, tmp_path: Path) -> None:
    said("import", stays, *COST, *SCALES)
    schema, own = schema_of("stays", tmp_path / "schema.toml"), tmp_path / "own.csv"
    own.write_text("hospital,age,ward,smoker,cost\nours,70,B,yes,12000\n")
    assert "clients: 1, rows: 1" in said("check", own, "--schema", schema)
    own.write_text("hospital,age,ward,smoker,cost\nours,70,C,yes,12000\n")
    refused("data", "data", "check", own, "--schema", schema, parts=("ward in data row 1 is 'C'",))


def test_rows_without_clients_are_dealt_out(stays: Path) -> None:
    said("import", stays, "--clients", 4, "--target", "cost", "--drop", "hospital")
    assert read_manifest(find_dataset("stays")).split == {"train": 3, "validation": 1}
    words = ("--set", "alpha=0.5", "--target", "ward", "--drop", "hospital", "--test", 0.3)
    assert "as dataset skewed/test." in said("import", stays, "--clients", 6, *words, "--name", "skewed")


def test_dates_and_gaps_need_no_python(stays: Path, umbel_home: Path) -> None:
    frame = pd.read_csv(stays, dtype=str).assign(came="2024-02-29")
    frame.loc[3, "age"] = ""
    frame.to_csv(stays, index=False)
    words = ("import", stays, *COST)
    refused("data.missing-value", "data", *words)
    assert not umbel_home.exists(), "nothing is written"
    told = said(*words, "--missing", "indicate", "--set", "came.parts=['weekday']")
    assert "unchanged; 0 or 1, whether it is missing" in told
    assert "came feature date dates as 2024-01-31 numbers near 1: weekday" in told
    since = ("--set", "came.parts=['days']", "--set", "came.since=2024-02-19", "--set", "came.span=10")
    assert "Rows left out: 1" in said(*words, "--missing", "drop", *since, "--replace")
    assert open_dataset(find_dataset("stays")).features[0, -1] == 1


def test_categories_are_those_found_or_given(stays: Path) -> None:
    words = ("import", stays, "--client", "hospital", "--target")
    told = said(*words, "ward", "--features", "age", "--set", "ward.categories=A,B,C")
    assert "ward target category A, B, C classes 0 to 2" in told
    said(*words, "age", "--set", "age.categories=true", "--name", "ages")
    assert read_manifest(find_dataset("ages")).loss == "cross-entropy"


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("--target cost", "data.no-client", "--client"),
        ("--client hospital", "data.no-target", "--target 'cost'"),
        ("--client hospita --target cost", "data", "'hospita'"),
        ("--client hospital --target cost --drop x", "data", "'x'"),
        ("--client hospital --target cost --set scale=3", "data.bad-set", "COLUMN.ENTRY=VALUE"),
        ("--client hospital --target cost --set age.minimum=30", "data.bad-value", "1 fault"),
        ("--client hospital --target cost --validation h77", "data", "'h77'"),
        ("--client hospital --target cost --missing guess", "data", "refuse, drop"),
        ("--clients 300 --target cost", "data", "1 to 200"),
        ("--client hospital --target cost --set alpha=1", "data.alpha-without-clients", "--clients"),
        ("--schema own.toml --target cost", "data.schema-clash", "schema"),
        ("--client hospital --target cost --set 'model=mlp inputs=9 hidden=2 outputs=1'", "data", "inputs=9"),
        ("--client hospital --target smoker --set loss=cross-entropy", "data", "classes"),
        ("--client hospital --target cost --set model=rose", "model", "'rose'"),
        ("--client hospital --target cost --name=-n", "data.name", "-n"),
    ],
)
def test_what_cannot_be_imported_is_told_in_one_line(
    stays: Path, umbel_home: Path, words: str, code: str, part: str
) -> None:
    refused(code, "data", "import", stays, *shlex.split(words), parts=(part,))
    assert not umbel_home.exists()


def test_files_that_are_no_table_and_names_that_are_taken_are_told(stays: Path, tmp_path: Path) -> None:
    (tmp_path / "ragged.csv").write_text("h,a,cost\nx,1,2\ny,1,2,3,4\n")
    said("import", stays, *COST)
    for code, file in (
        ("data", "ragged.csv"), ("data.no-file", "."), ("data.no-file", "nowhere.csv"), ("data.exists", "stays.csv"),
    ):  # fmt: skip
        refused(code, "data", "import", tmp_path / file, *COST)


def test_who_adds_what_the_import_says_can_plan_a_guarantee(tmp_path: Path, umbel_home: Path) -> None:
    """Large numbers, small ones of both signs, and some within a declared range, which no rows need tell."""
    draw = np.random.default_rng(0)
    columns = {"who": np.arange(400) % 40, "small": draw.uniform(-0.03, 0.017, 400), "near": draw.uniform(0, 4.2, 400)}
    columns |= {"far": draw.uniform(100, 4000, 400), "known": draw.uniform(0, 90, 400)}
    pd.DataFrame(columns).to_csv(tmp_path / "mixed.csv", index=False)
    words = ["import", tmp_path / "mixed.csv", "--client", "who", "--target", "near"]
    words += ["--set", "known.minimum=0", "--set", "known.maximum=90"]
    told = said(*words)
    assert "small, far, near: " in told
    assert "--set small.minimum=NUMBER --set small.maximum=NUMBER" in told
    assert "--replace" not in told, "without a guarantee nothing has to be repeated"
    with raises(ConfigError, "config.no-range", "small, far, near"):
        values_of("mixed", wanted=Wanted(epsilon=8), ask=False)
    for name, (low, high) in {"small": (-1, 1), "near": (0, 5), "far": (0, 5000)}.items():
        words += ["--set", f"{name}.minimum={low}", "--set", f"{name}.maximum={high}"]
    assert "--set" not in said(*words, "--replace")
    assert values_of("mixed", wanted=Wanted(epsilon=16)).words


def test_a_dataset_may_be_called_as_a_run_begins(stays: Path, umbel_home: Path) -> None:
    said("import", stays, *COST, "--name", "2026", *SCALES)
    run = umbel_home / "runs" / "20260101-100000-one"
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    assert read_values("2026")["dataset"] == "2026"
    for name in ("202601", run.name, "last", str(run)):
        with raises(ConfigError, "config.is-a-run"):
            read_values(name)


def test_a_client_whose_name_is_a_number_may_validate(tmp_path: Path) -> None:
    rows = [f"{who},{who},{x}" for who in range(5) for x in range(4)]
    (tmp_path / "numbered.csv").write_text("who,age,cost\n" + "\n".join(rows))
    words = ("import", tmp_path / "numbered.csv", "--client", "who", "--target", "cost", "--validation")
    said(*words, 3)
    assert open_dataset(find_dataset("numbered")).names[-1] == "3"
    refused("data.split", "data", *words, 7, "--replace")
