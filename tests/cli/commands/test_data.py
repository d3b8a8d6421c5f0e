"""`umbel data`: from a table with a column of clients to a run, without Python."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from tests.helpers.errors import ended, raises
from tests.helpers.paper import paper_run
from umbel.cli.main import app
from umbel.client.node import Node
from umbel.data import find_dataset, open_dataset, read_manifest
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig
from umbel.simulation import in_process
from umbel.simulation.in_process import play
from umbel.simulation.start import read_values, values_of
from umbel.simulation.wanted import Wanted


def umbel(*words: Any) -> tuple[int, str]:
    told = CliRunner().invoke(app, list(map(str, words)), prog_name="umbel")
    return told.exit_code, told.output


def said(*words: Any) -> str:
    code, output = umbel(*words)
    assert code == 0, output
    return re.sub(r"[ \t]+", " ", output)


def refused(code: str, *words: Any) -> str:
    status, output = umbel(*words)
    ended(status, f"{output.splitlines()[-1]}\n", code)
    return output


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


SCALES = ("--set", "cost.scale=10000", "--set", "cost.unit=dollars", "--set", "age.scale=20", "--set", "age.offset=50")


def test_a_table_becomes_a_dataset_that_a_run_learns_from(stays: Path) -> None:
    told = said("data", "import", stays, "--client", "hospital", "--target", "cost", *SCALES)
    for line in (
        "clients 8 training, 2 validation", "rows 200; 20 a client", "target cost; dollars; float32",
        "model linear inputs=4 outputs=1", "loss mse", "hospital client text nothing",
        "age feature number (age - 50) / 20", "ward feature category A, B 2 numbers, 0 or 1",
        "smoker feature boolean 0 or 1", "cost target number dollars cost / 10000",
        "The categories of ward come from the rows",
    ):  # fmt: skip
        assert line in told
    assert told.splitlines()[-1] == "Next: umbel run stays"
    asked = {
        "dataset": "stays",
        "clients-per-round": 8,
        "noise-multiplier": 0.0,
        "rounds": 30,
        "restarts": 2,
        "device": "cpu",
    }
    run = play(paper_run() | asked)
    first, last = run.state.history[0].loss, run.state.history[-1].loss
    # In units of 10,000 dollars: what is left is noise of one model, not the difference of two.
    assert last < 0.05 < first


@pytest.mark.parametrize(("target", "categories"), [("smoker", {"no", "yes"}), ("ward", {"A", "B"})])
def test_what_is_predicted_goes_by_its_name(stays: Path, tmp_path: Path, target: str, categories: set[str]) -> None:
    said("data", "import", stays, "--client", "hospital", "--target", target, "--features", "age,cost", *SCALES[4:])
    run = in_process.run(paper_run() | {"dataset": "stays", "rounds": 1, "restarts": 1, "device": "cpu"})
    said("predict", run, "stays", "--out", tmp_path / "out.csv")
    made = pd.read_csv(tmp_path / "out.csv", dtype=str)
    assert set(made["prediction"]) <= categories == set(made["target"])
    # A client's rows are those of the table, in its order.
    frame, first = pd.read_csv(stays, dtype=str), open_dataset(find_dataset("stays")).names[0]
    told = frame.loc[frame["hospital"] == first, target].tolist()
    assert made.loc[made["client"] == "0", "target"].tolist() == told


def test_what_is_there_is_listed_and_described(stays: Path, umbel_home: Path) -> None:
    words = shlex.split("--client hospital --target smoker --features age,ward --test h1,h2")
    said("data", "import", stays, *words)
    (umbel_home / "data" / "broken").mkdir()
    (umbel_home / "data" / "broken" / "manifest.json").write_text("{}")
    listed = said("data", "show")
    assert "stays 6 2 smoker linear inputs=3 outputs=1 log" in listed
    assert "synthetic 100 100 linear" in listed
    assert "broken/manifest.json: the manifest lacks name" in listed
    described = said("data", "show", "stays")
    assert "clients 6 training, 2 validation" in described
    assert "smoker target boolean -1 or 1" in described
    assert described.splitlines()[-1] == str(umbel_home / "data" / "stays")
    assert "clients 0 training, 2 validation" in said("data", "show", "stays/test")


def test_brackets_in_a_name_are_described_as_text(stays: Path) -> None:
    frame = pd.read_csv(stays).rename(columns={"age": "age [years]", "ward": "ward [/A]", "cost": "cost [usd]"})
    frame.to_csv(stays, index=False)
    said("data", "import", stays, "--client", "hospital", "--target", "cost [usd]")
    described = said("data", "show", "stays")
    for text in ("age [years] feature", "ward [/A] feature", "cost [usd] target"):
        assert text in described
    assert " cost [usd] " in said("data", "show")


def test_a_site_checks_its_own_table_and_serves_it(stays: Path, tmp_path: Path) -> None:
    said("data", "import", stays, "--client", "hospital", "--target", "cost", *SCALES)
    schema = tmp_path / "schema.toml"
    schema.write_text(said("data", "show", "stays", "--schema"))
    own = tmp_path / "own.csv"
    own.write_text("hospital,age,ward,smoker,cost\nours,70,B,yes,12000\n")
    assert f"{own} fits {schema}; clients: 1, rows: 1" in said("data", "check", own, "--schema", schema)
    reader = {"reader": f"umbel.data.table:read schema={schema}"}
    node = Node.of({"data-path": str(own), **reader}, RunConfig(dataset="", device="cpu").entries())
    assert (node.model.name, node.model.loss.name) == ("linear inputs=4 outputs=1", "mse")
    np.testing.assert_array_equal(node.dataset.features, [[1, 0, 1, 1]])
    own.write_text("hospital,age,ward,smoker,cost\nours,70,C,yes,12000\n")
    assert "ward in data row 1 is 'C'" in refused("data", "data", "check", own, "--schema", schema)


def test_a_schema_makes_a_dataset_of_another_table(stays: Path, tmp_path: Path) -> None:
    said("data", "import", stays, "--client", "hospital", "--target", "cost", *SCALES)
    (tmp_path / "schema.toml").write_text(said("data", "show", "stays", "--schema"))
    said("data", "import", stays, "--schema", tmp_path / "schema.toml", "--name", "again")
    first, again = (open_dataset(Path(said("data", "show", name).splitlines()[-1])) for name in ("stays", "again"))
    np.testing.assert_array_equal(first.features, again.features)


def test_what_to_type_next_is_quoted_for_a_shell(stays: Path) -> None:
    told = said("data", "import", stays, "--client", "hospital", "--target", "cost", "--name", "two words")
    assert "Next: umbel run 'two words'" in told


def test_an_unreadable_table_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "ragged.csv").write_text("h,a,cost\nx,1,2\ny,1,2,3,4\n")
    words = ("--client", "h", "--target", "cost")
    assert "ragged.csv" in refused("data", "data", "import", tmp_path / "ragged.csv", *words)
    assert str(tmp_path) in refused("data.no-file", "data", "import", tmp_path, *words)


def test_rows_without_clients_are_dealt_out(stays: Path) -> None:
    told = said("data", "import", stays, "--clients", 4, "--target", "cost", "--drop", "hospital")
    assert told.splitlines()[-1] == "Next: umbel run stays"
    assert "3 training, 1 validation" in said("data", "show", "stays")
    assert "Test clients: 2, as dataset skewed/test." in said(
        *("data", "import", stays, "--clients", 6, "--set", "alpha=0.5", "--target", "ward", "--drop", "hospital"),
        *("--name", "skewed", "--test", 0.3),
    )


def test_numbers_without_a_range_are_told_once_with_what_a_guarantee_needs(stays: Path) -> None:
    words = ("data", "import", stays, "--client", "hospital", "--target", "cost")
    told = said(*words)
    assert "a public range of age, cost: declare it, as by --set age.minimum=NUMBER --set age.maximum=NUMBER," in told
    assert "--replace" not in told
    told = said(*words, "--set", "age.minimum=0", "--set", "age.maximum=120", "--set", "cost.scale=10000", "--replace")
    assert "(age - 60) / 60" in told
    assert "public range" not in told


def test_dates_and_gaps_need_no_python(stays: Path) -> None:
    frame = pd.read_csv(stays, dtype=str).assign(came="2024-02-29")
    frame.loc[3, "age"] = ""
    frame.to_csv(stays, index=False)
    words = ("data", "import", stays, "--client", "hospital", "--target", "cost")
    assert "--missing indicate" in refused("data.missing-value", *words)
    told = said(*words, "--missing", "indicate", "--set", "came.parts=['weekday']")
    assert "unchanged; 0 or 1, whether it is missing" in told
    assert "came feature date dates as 2024-01-31 numbers near 1: weekday" in told
    since = ("--set", "came.since=2024-02-19", "--set", "came.span=10")  # as the note says it
    told = said(*words, "--missing", "drop", "--set", "came.parts=['days']", *since, "--replace")
    assert open_dataset(find_dataset("stays")).features[0, -1] == 1
    schema = stays.with_name("schema.toml")
    schema.write_text(said("data", "show", "stays", "--schema").replace('"2024-02-19"', "2024-02-19"))
    frame.drop(index=3).to_csv(stays, index=False)
    assert "rows: 199" in said("data", "check", stays, "--schema", schema)


def test_missing_values_are_refused_until_it_is_said_what_to_do(stays: Path, umbel_home: Path) -> None:
    lines = stays.read_text().splitlines()
    lines[3] = ",".join(["h2", "", *lines[3].split(",")[2:]])
    stays.write_text("\n".join(lines))
    words = ("data", "import", stays, "--client", "hospital", "--target", "cost")
    assert "age (first data row 3)" in refused("data", *words)
    assert not umbel_home.exists(), "nothing is written"
    assert "Rows left out: 1, because age is missing." in said(*words, "--missing", "drop")
    assert "rows 200" in said(*words, "--set", "age.fill=50", "--replace")


def test_categories_are_those_found_or_given(stays: Path) -> None:
    words = ("data", "import", stays, "--client", "hospital", "--target", "ward", "--features", "age")
    assert "ward target category A, B, C classes 0 to 2" in said(*words, "--set", "ward.categories=A,B,C")
    found = said(
        "data",
        "import",
        stays,
        "--client",
        "hospital",
        "--target",
        "age",
        "--set",
        "age.categories=true",
        "--name",
        "ages",
    )
    assert read_manifest(Path(found.splitlines()[-2])).loss == "cross-entropy"


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("--target cost", "data.no-client", "--client"),
        ("--client hospital", "data.no-target", "--target 'cost'"),
        ("--client hospita --target cost", "data", "'hospita'"),
        ("--client hospital --target cost --drop x", "data", "'x'"),
        ("--client hospital --target cost --set scale=3", "data.bad-set", "COLUMN.ENTRY=VALUE"),
        ("--client hospital --target cost --set age.minimum=30", "data", "from 30"),
        ("--client hospital --target cost --validation h77", "data", "'h77'"),
        ("--client hospital --target cost --missing guess", "data", "refuse, drop"),
        ("--clients 300 --target cost", "data", "1 to 200"),
        ("--client hospital --target cost --set alpha=1", "data.alpha-without-clients", "--clients"),
        ("--schema own.toml --target cost", "data.schema-clash", "schema"),
        ("--client hospital --target cost --set 'model=mlp inputs=9 hidden=2 outputs=1'", "data", "inputs=9"),
        ("--client hospital --target smoker --set loss=cross-entropy", "data", "classes"),
        ("--client hospital --target cost --set model=rose", "model", "'rose'"),
    ],
)
def test_what_cannot_be_imported_is_told_in_one_line(
    stays: Path, umbel_home: Path, words: str, code: str, part: str
) -> None:
    assert part in refused(code, "data", "import", stays, *shlex.split(words))
    assert not umbel_home.exists()


def test_what_is_there_is_kept(stays: Path) -> None:
    words = ("data", "import", stays, "--client", "hospital", "--target", "cost")
    said(*words)
    assert "--replace" in refused("data.exists", *words)
    assert "nowhere.csv" in refused("data.no-file", *words[:2], "nowhere.csv", *words[3:])


def test_who_adds_what_the_import_says_can_plan_a_guarantee(tmp_path: Path, umbel_home: Path) -> None:
    """Large numbers, small ones of both signs, and some within a declared range, which no rows need tell."""
    draw = np.random.default_rng(0)
    columns = {"who": np.arange(400) % 40, "small": draw.uniform(-0.03, 0.017, 400), "near": draw.uniform(0, 4.2, 400)}
    columns |= {"far": draw.uniform(100, 4000, 400), "known": draw.uniform(0, 90, 400)}
    pd.DataFrame(columns).to_csv(tmp_path / "mixed.csv", index=False)
    words = ["data", "import", tmp_path / "mixed.csv", "--client", "who", "--target", "near"]
    words += ["--set", "known.minimum=0", "--set", "known.maximum=90"]
    told = said(*words)
    assert "a public range of small, far, near: " in told
    assert "--set small.minimum=NUMBER --set small.maximum=NUMBER" in told
    assert "--replace" not in told, "without a guarantee nothing has to be repeated"
    assert values_of("mixed").words
    with raises(ConfigError, "config.no-range", "small, far, near"):
        values_of("mixed", wanted=Wanted(epsilon=8), ask=False)
    ends = {"small": (-1, 1), "near": (0, 5), "far": (0, 5000)}
    for name, (low, high) in ends.items():
        words += ["--set", f"{name}.minimum={low}", "--set", f"{name}.maximum={high}"]
    told = said(*words, "--replace")
    assert "estimated" not in told
    assert "--set" not in told
    assert values_of("mixed", wanted=Wanted(epsilon=16)).words


def test_a_header_with_a_line_break_is_one_line(tmp_path: Path) -> None:
    table = {"who": np.arange(40) % 4, "x": np.arange(40) % 7, "cost\r\n(in\xa0dollars)": np.arange(40.0) / 40}
    pd.DataFrame(table).to_csv(tmp_path / "lines.csv", index=False)
    said("data", "import", tmp_path / "lines.csv", "--client", "who", "--target", "cost (in dollars)")
    assert read_manifest(find_dataset("lines")).target["name"] == "cost (in dollars)"


@pytest.mark.parametrize("name", ["-n", "a=b"])
def test_a_dataset_has_no_name_that_a_run_takes_for_an_option(stays: Path, name: str, umbel_home: Path) -> None:
    refused("data.name", "data", "import", stays, "--client", "hospital", "--target", "cost", f"--name={name}")
    assert not umbel_home.exists()


def test_a_dataset_may_be_called_as_a_run_begins(stays: Path, umbel_home: Path) -> None:
    said("data", "import", stays, "--client", "hospital", "--target", "cost", "--name", "2026", *SCALES)
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
    words = ("data", "import", tmp_path / "numbered.csv", "--client", "who", "--target", "cost", "--validation")
    said(*words, 3)
    assert open_dataset(find_dataset("numbered")).names[-1] == "3"
    refused("data.split", *words, 7, "--replace")
