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
from umbel.data.table import as_texts, encode, number_in
from umbel.protocol.errors import ConfigError, DatasetError
from umbel.simulation import start
from umbel.simulation.wanted import Wanted

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "data.md"


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["umbel", *words])
    told = CliRunner().invoke(app, list(words), prog_name="umbel")
    return told.exit_code, told.output


def following(output: str) -> list[str]:
    (line,) = re.findall(r"^Next: umbel (data import .*)$", output, flags=re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize(
    ("name", "types", "options"),
    [
        (
            "shops",
            "text date number number boolean category number",
            "--client Shop --target Sales --missing indicate --set Sales.missing=drop",
        ),
        (
            "clinics",
            "text number number number boolean",
            "--client clinic --target again --missing indicate --drop patient_id",
        ),
    ],
)
def test_one_look_reports_every_column_and_what_it_proposes_imports(
    name: str, types: str, options: str, tmp_path: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    getattr(messy, name)(tmp_path / f"{name}.csv")
    monkeypatch.chdir(tmp_path)
    status, output = typed(monkeypatch, "data", "import", f"{name}.csv")
    assert status == 0, output
    assert re.findall(r" {2}(?:client|feature|target) +(\w+) {2}", output) == types.split()
    assert following(output) == ["data", "import", f"{name}.csv", *options.split()]
    if name == "shops":
        assert "\n".join(line.rstrip() for line in output.splitlines()) in GUIDE.read_text(encoding="utf-8")
    else:
        assert "patient_id (predicts again alone)" in output
    assert not umbel_home.exists()
    status, output = typed(monkeypatch, *following(output))
    assert status == 0, output
    assert np.isfinite(open_dataset(find_dataset(name)).features).all()
    with raises(ConfigError, "config.in-vain", "leaving out columns"):
        start.values_of(name, wanted=Wanted(epsilon=4))


def test_all_faults_of_all_kinds_are_told_at_once_and_what_mends_them_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers out of their public range are clipped then, and scaled by it."""
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
    own = {"age": {"minimum": 0, "maximum": 120}}
    faults = ("'01/02/2025'", "'unknown'", "'130'", "ward", "cost", "features=['day', 'age', 'ward']")
    with raises(DatasetError, "data.faults", *faults):
        umbel.from_dataframe(frame, client="who", target="cost", columns=own)
    frame.to_csv(tmp_path / "all.csv", index=False)
    words = ["data", "import", str(tmp_path / "all.csv"), "--client", "who", "--target", "cost"]
    status, output = typed(monkeypatch, *words, "--set", "age.minimum=0", "--set", "age.maximum=120")
    ended(status, f"{output.splitlines()[-1]}\n", "data.faults")
    status, output = typed(monkeypatch, *following(output))
    assert status == 0, output
    above = (frame["age"][frame["cost"] != "n.a."] == "130").sum()
    assert f"Values of age taken to the bound of its range: {above}." in output
    assert "Rows left out: 20, because cost is missing." in output
    layout = open_dataset(find_dataset("all")).manifest.layout
    assert layout is not None
    (place,) = (at for at, one in enumerate(layout.units["features"]) if one["name"] == "age")
    # By hand: 30, 50 and the bound, 120, of 0 to 120; 0 where it is missing.
    assert {*open_dataset(find_dataset("all")).features[:, place].tolist()} <= {-0.5, np.float32(-1 / 6), 1, 0}


def test_a_site_clips_too_and_reads_what_its_schema_says() -> None:
    price = {"name": "price", "type": "number", "minimum": 0, "maximum": 9, "outside": "clip", "decimal": ","}
    price |= {"na": ["x"], "missing": "drop"}
    schema = Schema.parse({"features": [price], "target": {"name": "cost", "type": "number"}})
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
        (["£5", "£6", "€7"], None),
    ],
)
def test_a_unit_or_a_decimal_comma_in_a_few_rows_is_read_if_it_can_be_nothing_else(
    values: list[str], numbers: list[float] | None
) -> None:
    frame = pd.DataFrame({"who": ["a", "b", "c"], "weight": values, "cost": [1.0, 2.0, 3.0]})
    given = {"weight": {"type": "number"}}
    report = look(frame, "who", "cost", None, given, "visits", Syntax.FLAGS)
    assert bool(report.faults) == (numbers is None)
    schema = Schema(target=Column(name="cost", type="number"), features=[Column(name="weight", type="number")])
    if numbers is None:
        with raises(DatasetError, "data.bad-value", "weight"):
            encode(frame, schema, "new", to_predict=True, syntax=Syntax.PREDICTION)
        return
    assert encode(frame, report.schema, "visits").features.ravel() == pytest.approx(numbers)
    rows = encode(frame, schema, "new", to_predict=True, syntax=Syntax.PREDICTION)
    assert rows.features.ravel() == pytest.approx(numbers)
    with raises(DatasetError, "data.bad-value", "weight"):  # a site reads what its schema says
        encode(frame, schema, "a site's")


@pytest.mark.parametrize(
    ("values", "words"),
    [(["Yes", "No", "No"], ["No", "Yes"]), (["y", "n", "Y"], ["n", "y"]), (["0", "1", "1"], []), ([False, True], [])],
)
def test_a_boolean_target_keeps_its_words(values: list[Any], words: list[str]) -> None:
    values = values * 3
    frame = pd.DataFrame({"who": np.arange(len(values)) % 3, "x": np.arange(len(values)), "again": values})
    target = look(frame, "who", "again", None, {}, "visits", Syntax.FLAGS).schema.target
    assert (target.type, target.categories) == ("boolean", words)


def test_a_guess_at_the_client_names_the_other_columns_that_may_be_one() -> None:
    """An id comes before names. Dates that no single format reads and times are none, and rows are of few clients."""
    days = [f"{day % 28 + 1}/5/2024" if day % 2 else f"2024-05-{day % 28 + 1:02d}" for day in range(160)]
    frame = pd.DataFrame(
        {
            "day": days,
            "time": [f"{row % 24:02d}:{row % 60:02d}" for row in range(160)],
            "room": [f"room {row % 10}" for row in range(160)],
            "good": [f"good {row % 12}" for row in range(160)],
            "call": [f"call {row % 40}" for row in range(160)],
            "kind": [f"kind {row % 9}" for row in range(160)],
            "cost": np.arange(160.0) % 7,
        }
    )
    guesses = [
        look(one, None, "cost", None, {}, "t", Syntax.FLAGS).guesses[0]
        for one in (frame, frame.rename(columns={"room": "room_id"}))
    ]
    assert [re.findall(r"is (\w+),|--client (\w+)", one) for one in guesses] == [
        [("good", ""), ("", "room"), ("", "call")],
        [("room_id", ""), ("", "good"), ("", "call")],
    ]


def test_a_guess_at_the_client_passes_over_names_that_are_missing() -> None:
    rows = np.arange(300)
    frame = pd.DataFrame({"job": [f"job {row % 20}" for row in rows], "state": [f"state {row % 10}" for row in rows]})
    frame["rate"] = rows / 7
    assert look(frame, None, "rate", None, {}, "loans", Syntax.PYTHON).settings["client"] == "job"
    frame.loc[5, "job"] = ""
    assert look(frame, None, "rate", None, {}, "loans", Syntax.PYTHON).settings["client"] == "state"


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
