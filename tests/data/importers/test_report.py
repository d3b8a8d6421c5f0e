"""One look at a table says all that is the matter with it, and what mends it works."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import umbel
from tests.helpers import messy
from tests.helpers.errors import ended, raises
from umbel.cli.main import app
from umbel.data import Column, Schema, find_dataset, open_dataset
from umbel.data.hints import Syntax
from umbel.data.importers.report import look
from umbel.data.table import Reading, as_texts, encode, number_in, values_of
from umbel.protocol.errors import ConfigError, DatasetError
from umbel.simulation import start
from umbel.simulation.wanted import Wanted

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "data.md"

GOLDEN = {
    "shops": """\
column  role  type  in the rows  missing  umbel proposes
Shop  client  text  Shop 00, Shop 01, Shop 02 and 9 more
Date  feature  date  2025-01-01 to 2025-03-01
Avg Price  feature  number  1.35 to 21.63  37  indicate
Footfall  feature  number  86 to 151  24  indicate
Promo  feature  boolean  N, Y
Weather  feature  category  Sun, rain, sun  43  indicate
Sales  target  number  778.03 to 1,305.45  16  missing=drop
Next: umbel data import shops.csv --client Shop --target Sales --missing indicate --set Sales.missing=drop
""",
    "clinics": """\
column  role  type  in the rows  missing  umbel proposes
clinic  client  text  clinic 00, clinic 01, clinic 02 and 17 more
patient_id  feature  number  100,000 to 901,168  leave it out
age  feature  number  18 to 94
bmi  feature  number  12.7 to 44.7  35  indicate
again  target  boolean  no, yes
Next: umbel data import clinics.csv --client clinic --target again --missing indicate --drop patient_id
""",
}


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["umbel", *words])
    told = CliRunner().invoke(app, list(words), prog_name="umbel")
    return told.exit_code, told.output


def following(output: str) -> list[str]:
    (line,) = re.findall(r"^Next: umbel (data import .*)$", output, flags=re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("name", GOLDEN)
def test_one_look_reports_every_column_and_what_it_proposes_imports(
    name: str, tmp_path: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    getattr(messy, name)(tmp_path / f"{name}.csv")
    monkeypatch.chdir(tmp_path)
    status, output = typed(monkeypatch, "data", "import", f"{name}.csv")
    ended(status, f"{output.splitlines()[-1]}\n", "data.no-client")
    lines = [re.sub(" {2,}", "  ", line.strip()) for line in output.splitlines()]
    notes = [line for line in lines if re.match(r"(A guess|To mend|\w.*(;|\.)$)", line)]
    assert [line for line in lines[:-1] if line not in notes] == GOLDEN[name].splitlines(), output
    if name == "shops":
        assert "\n".join(line.rstrip() for line in output.splitlines()[:-1]) in GUIDE.read_text(encoding="utf-8")
    assert ("patient_id alone predicts again" in output) == (name == "clinics")
    assert not umbel_home.exists()
    status, output = typed(monkeypatch, *following(output))
    assert status == 0, output
    assert np.isfinite(open_dataset(find_dataset(name)).features).all()
    with raises(ConfigError, "config.in-vain", "leaving out columns"):
        start.values_of(name, wanted=Wanted(epsilon=4))


def test_all_faults_of_all_kinds_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "who": ["a", "b"] * 40,
            "day": draw.choice(["01/02/2025", "03/04/2025"], 80),
            "age": draw.choice(["30", "unknown", "130", "50"], 80),
            "note": [f"text {row}" for row in range(80)],
            "ward": draw.choice(["A", ""], 80),
            "cost": ["$1,200", "$90.50", "n.a.", "$7"] * 20,
        }
    )
    frame.loc[0, "day"] = "01/02/2025"
    own = {"age": {"maximum": 120}}
    with raises(
        DatasetError, "data.faults", "'01/02/2025'", "'unknown'", "'130'", "ward", "cost", "missing='indic"
    ) as caught:
        umbel.from_dataframe(frame, client="who", target="cost", columns=own)
    assert "features=['day', 'age', 'ward']" in caught.value.text
    frame.to_csv(tmp_path / "all.csv", index=False)
    words = (
        "data",
        "import",
        str(tmp_path / "all.csv"),
        "--client",
        "who",
        "--target",
        "cost",
        "--set",
        "age.maximum=120",
    )
    status, output = typed(monkeypatch, *words)
    ended(status, f"{output.splitlines()[-1]}\n", "data.faults")
    status, output = typed(monkeypatch, *following(output))
    assert status == 0, output
    assert (
        f"Values of age taken to the bound of its range: {(frame['age'][frame['cost'] != 'n.a.'] == '130').sum()}."
        in output
    )
    assert "Rows left out: 20, because cost is missing." in output


def test_numbers_out_of_a_public_range_are_clipped_and_counted_and_scale_by_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stays.csv").write_text("who,age,cost\na,-5,0\nb,60,5\nc,130,10\n")
    ranges = ["age.minimum=0", "age.maximum=120", "cost.minimum=0", "cost.maximum=10"]
    words = ["data", "import", str(tmp_path / "stays.csv"), "--client", "who", "--target", "cost"]
    words += [part for one in ranges for part in ("--set", one)]
    status, output = typed(monkeypatch, *words)
    ended(status, f"{output.splitlines()[-1]}\n", "data.bad-value")
    status, output = typed(monkeypatch, *words, "--clip")
    assert status == 0, output
    assert "Values of age taken to the bound of its range: 2." in output
    data = open_dataset(find_dataset("stays"))
    assert sorted(data.features.ravel().tolist()) == [-1, 0, 1]
    assert sorted(data.targets.tolist()) == [0, 0.5, 1]


def test_a_site_clips_too_and_reads_what_its_schema_says() -> None:
    price = {
        "name": "price",
        "type": "number",
        "minimum": 0,
        "maximum": 9,
        "outside": "clip",
        "decimal": ",",
        "na": ["x"],
    }
    schema = Schema.parse({"features": [price | {"missing": "drop"}], "target": {"name": "cost", "type": "number"}})
    rows = encode(pd.DataFrame({"price": ["1,5 €", "1.200", "x"], "cost": 1.0}), schema, "stays")
    assert (rows.features.ravel().tolist(), rows.clipped) == ([1.5, 9], {"price": 1})


@pytest.mark.parametrize(
    ("values", "flagged"),
    [
        (lambda cost, draw: cost * 1.2, True),
        (lambda cost, draw: np.where(cost > np.median(cost), "late", "soon"), True),
        (lambda cost, draw: np.where(cost > np.median(cost), 1.0, np.nan), True),
        (lambda cost, draw: cost + draw.normal(0, 0.3, len(cost)), False),
        (lambda cost, draw: draw.choice(list("abcdef"), len(cost)), False),
    ],
)
def test_a_feature_that_predicts_the_target_alone_is_flagged(values: Any, flagged: bool) -> None:
    draw = np.random.default_rng(0)
    cost = draw.normal(size=400)
    frame = pd.DataFrame({"who": np.arange(400) % 8, "x": values(cost, draw), "age": draw.random(400), "cost": cost})
    notes = umbel.from_dataframe(frame, client="who", target="cost", missing="indicate").notes
    assert any("x alone predicts cost" in note for note in notes) == flagged


@pytest.mark.parametrize(("name", "flagged"), [("patient id", True), ("price", False)])
def test_numbers_of_people_who_come_again_are_an_id_by_their_name(name: str, flagged: bool) -> None:
    draw = np.random.default_rng(0)
    table = {"who": np.arange(400) % 8, name: draw.permutation(400) // 1.5 // 1, "cost": draw.random(400)}
    notes = umbel.from_dataframe(pd.DataFrame(table), client="who", target="cost").notes
    assert any(f"Most values of {name} differ" in note for note in notes) == flagged


@pytest.mark.parametrize(
    ("apart", "names", "joined"),
    [({}, ["Alton Vets", "b"], True), ({"vet": {"categories": True}}, ["ALTON VETS", "Alton Vets", "b"], False)],
)
def test_names_of_clients_are_trimmed_and_joined_by_case_unless_that_is_declined(
    apart: dict[str, Any], names: list[str], joined: bool
) -> None:
    vets = ["ALTON VETS", "Alton Vets ", "Alton Vets", " b", "b ", "b"] * 10
    frame = pd.DataFrame({"vet": vets, "x": np.arange(60.0), "cost": np.arange(60.0)})
    report = look(frame, None, "cost", None, apart, "visits", Syntax.FLAGS)
    assert f"whose {len(names)} values" in report.guesses[0]
    assert any("--set vet.categories=true" in note for note in report.notes) == joined
    data = umbel.from_dataframe(frame, client="vet", target="cost", columns=apart)
    assert sorted(data.dataset.names) == names


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["0", "1", "2-10", "over 10"], "category"),
        (["0", "1", "2", "unknown"], "number"),
        (["0", "1", "2", "3"], "number"),
    ],
)
def test_as_many_texts_as_numbers_are_classes_and_fewer_are_faults(values: list[str], kind: str) -> None:
    frame = pd.DataFrame({"who": ["a", "b"] * 60, "struck": [*values, "0", "1"] * 20, "cost": np.arange(120.0)})
    report = look(frame, "who", "cost", None, {}, "birds", Syntax.PYTHON)
    finding = next(one for one in report.findings if one.column.name == "struck")
    assert (finding.column.type, bool(finding.faults)) == (kind, "unknown" in values)


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        (["5.4 kg", "5.4", "7"], [5.4, 5.4, 7]),
        (["17,7", "17.7", "5 kg"], [17.7, 17.7, 5]),
        (["17,7", "1,234", "17.7"], None),  # the comma may be one between thousands
        (["17,7", "1.234,5", "0.125"], None),
        (["5 kg", "5 lb", "5"], None),
        (["5 k", "5", "6"], None),
        (["90 plus", "89", "6"], None),
        (["2 million", "3", "6"], None),
        (["5%", "0.05", "7"], None),
    ],
)
def test_a_unit_or_a_decimal_comma_in_a_few_rows_is_read_if_it_can_be_nothing_else(
    values: list[str], numbers: list[float] | None
) -> None:
    frame = pd.DataFrame({"who": ["a", "b", "c"], "weight": values, "cost": [1.0, 2.0, 3.0]})
    given = {"weight": {"type": "number"}}
    report = look(frame, "who", "cost", None, given, "visits", Syntax.FLAGS)
    assert bool(report.faults) == (numbers is None)
    assert any(note.startswith("Numbers of weight, as '") for note in report.notes) == (numbers is not None)
    schema = Schema(target=Column(name="cost", type="number"), features=[Column(name="weight", type="number")])
    if numbers is None:
        with raises(DatasetError, "data.bad-value", "weight"):
            encode(frame, schema, "new", to_predict=True, syntax=Syntax.PREDICTION)
        return
    assert encode(frame, report.schema, "visits").features.ravel() == pytest.approx(numbers)
    rows = encode(frame, schema, "new", to_predict=True, syntax=Syntax.PREDICTION)
    assert rows.features.ravel() == pytest.approx(numbers)
    assert rows.notes[0].startswith("Numbers of weight, as '")
    with raises(DatasetError, "data.bad-value", "weight"):  # a site reads what its schema says
        encode(frame, schema, "a site's")


def test_where_either_sign_is_decimal_a_comma_before_three_digits_is_asked_about() -> None:
    reading = Reading("mine")
    values_of(pd.DataFrame({"x": ["17,7", "1,234", "5"]}), Column(name="x", type="number", decimal="either"), reading)
    assert [(fault.row, fault.count) for fault in reading.faults] == [(2, 1)]


@pytest.mark.parametrize(
    ("values", "words"),
    [(["Yes", "No", "No"], ["No", "Yes"]), (["y", "n", "Y"], ["n", "y"]), (["0", "1", "1"], []), ([False, True], [])],
)
def test_a_boolean_target_keeps_its_words(values: list[Any], words: list[str]) -> None:
    values = values * 3
    frame = pd.DataFrame({"who": np.arange(len(values)) % 3, "x": np.arange(len(values)), "again": values})
    target = look(frame, "who", "again", None, {}, "visits", Syntax.FLAGS).schema.target
    assert (target.type, target.categories) == ("boolean", words)


def test_columns_that_the_next_command_leaves_out_are_told_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messy.clinics(tmp_path / "clinics.csv")
    output = typed(monkeypatch, "data", "import", str(tmp_path / "clinics.csv"))[1].splitlines()
    before = output[output.index(next(line for line in output if line.startswith("Next:"))) - 1]
    assert "patient_id (predicts again alone)" in before


def test_a_guess_at_the_client_passes_over_names_that_are_missing() -> None:
    rows = np.arange(300)
    frame = pd.DataFrame({"job": [f"job {row % 100}" for row in rows], "state": [f"state {row % 10}" for row in rows]})
    frame["rate"] = rows / 7
    assert look(frame, None, "rate", None, {}, "loans", Syntax.PYTHON).settings["client"] == "job"
    frame.loc[5, "job"] = ""
    assert look(frame, None, "rate", None, {}, "loans", Syntax.PYTHON).settings["client"] == "state"


def test_a_sum_in_two_currencies_is_none() -> None:
    frame = pd.DataFrame({"x": ["£5", "£6", "€7"]})
    reading = Reading("mine")
    values_of(frame, Column(name="x", type="number"), reading)
    assert [(fault.row, fault.count) for fault in reading.faults] == [(3, 1)]


@given(st.integers(-(10**9), 10**9), st.integers(0, 99), st.sampled_from("$€£¥"), st.sampled_from([",", " ", "'", ""]))
def test_a_formatted_number_reads_as_the_number(whole: int, cents: int, money: str, between: str) -> None:
    text = f"{abs(whole):,}".replace(",", between) + f".{cents:02d}"
    number = float(f"{abs(whole)}.{cents:02d}")
    assert number_in(f"{money}{text}") == number_in(f"{text} {money}") == number_in(text) == number
    assert number_in(f"-{money}{text}") == number_in(f"({text})") == number_in(f"\u2212{text}") == -number
    assert number_in(f"{text} kg", unit="kg") == number
    assert number_in(text.translate(str.maketrans(",.", ".,")), decimal=",") == number


@given(st.lists(st.text(max_size=8), min_size=1, max_size=5))
def test_trimming_twice_is_trimming_once(texts: list[str]) -> None:
    once = as_texts(pd.Series(texts, dtype=str))
    assert as_texts(once).tolist() == once.tolist() == [text.strip() for text in texts]
