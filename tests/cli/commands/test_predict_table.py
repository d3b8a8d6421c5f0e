"""Rows of a table without a target are predicted in its unit, for clients that are known, new, or without labels."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import umbel
from tests.helpers.errors import ended, raises
from tests.helpers.learnt import learnt
from umbel.cli.main import app
from umbel.privacy.site.policy import Personal
from umbel.protocol.errors import ConfigError, DatasetError
from umbel.protocol.tasks import TrainingSpec
from umbel.server.run_folder import RunFolder
from umbel.strategies.differences import add_releases

BEST = {"weight": np.array([[[1, 0]], [[0, 1]]], np.float32)}
KNOWN = pd.DataFrame(
    {
        "hospital": ["north", "north", "south", "south"],
        "x": [1.0, 3.0, 2.0, 5.0],
        "y": [2.0, 1.0, 4.0, 1.0],
        "cost": [1000.0, 3000.0, 4000.0, 1000.0],  # x in the north, y in the south
    }
)
COST = {"cost": {"scale": 1000.0, "unit": "dollars"}}
NEW = """hospital,x,y,cost
south,1,2,
=new,1,5,5000
north,3,4,9000
=new,2,7,
bare,4,8,
"""
MORE = """=new,2,5,5500
=new,3,3,2500
"""
PLAIN = ("--personalise", "no")


@pytest.fixture
def run(umbel_home: Path, tmp_path: Path) -> Path:
    """A run that learnt y = x1, by three releases in four, and y = x2."""
    umbel.from_dataframe(KNOWN, client="hospital", target="cost", columns=COST, model="linear").write("stays")
    # One row a minibatch: then the order of a client's rows plays a part.
    return learnt(tmp_path / "run", "", "", BEST, "stays", [[9, 0], [3, 1]], **{"batch-size": 1})


@pytest.fixture
def new(tmp_path: Path) -> Path:
    (tmp_path / "new.csv").write_text(NEW)
    return tmp_path / "new.csv"


def predict(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["predict", *map(str, arguments)])


def refused(code: str, *arguments: object) -> str:
    done = predict(*arguments)
    ended(done.exit_code, done.stderr, code)
    return str(done.stderr)


def test_rows_of_clients_that_are_known_new_or_without_labels(run: Path, new: Path) -> None:
    """The north is known: its row here costs y, and is predicted as x. Shares are those of the last rounds: 12 to 1."""
    done = predict(run, new, *PLAIN)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "client,row,hypothesis,prediction,target",
        "south,1,1,2000,",
        "'=new,2,1,5000,5000",
        "north,3,0,3000,9000",
        "'=new,4,1,7000,",
        f"bare,5,,{1000 * (12 * 4 + 1 * 8) / 13:.6g},",
    ]
    assert "known in stays: 2." in done.stderr
    assert "New clients: 1. Their labelled rows here, 1, choose" in done.stderr
    assert "without a labelled row: 1 (bare)" in done.stderr


def test_a_new_client_with_nearly_the_name_of_a_known_one_is_told(run: Path, new: Path) -> None:
    new.write_text("hospital,x,y,cost\nNor th,3,1,3000\nsouth,3,1,2000\nbare,3,1,2000\n")
    notes = predict(run, new, *PLAIN).stderr
    assert "'Nor th' counts as a new client, although 'north' is known;" in notes
    new.write_text("hospital,x,y,cost\nnorth,3,1,3000\nbare,3,1,2000\n")
    assert "although" not in predict(run, new, *PLAIN).stderr


def test_a_known_client_in_capitals_is_that_client(run: Path, new: Path) -> None:
    new.write_text("hospital,x,y\nNORTH,3,4\n north ,1,4\nNew,1,2\nNEW,1,2\nNew,1,2\n")
    done = predict(run, new, *PLAIN)
    assert [line.split(",")[0] for line in done.stdout.splitlines()[1:]] == ["north"] * 2 + ["New"] * 3
    assert "known in stays: 1." in done.stderr
    assert "'NORTH' as 'north'" in done.stderr
    assert len(predict(run, new, "--client", "North", *PLAIN).stdout.splitlines()) == 3


def test_without_any_target_only_known_clients_choose(run: Path, tmp_path: Path, new: Path) -> None:
    pd.read_csv(new).drop(columns="cost").to_parquet(tmp_path / "new.parquet")
    made = pd.read_csv(io.StringIO(predict(run, tmp_path / "new.parquet", *PLAIN).stdout))
    assert list(made.columns) == ["client", "row", "hypothesis", "prediction"]
    assert made["hypothesis"].fillna(-1).tolist() == [1, -1, 0, -1, -1]


@pytest.mark.parametrize("how", list(Personal))
def test_a_known_client_predicts_as_from_its_dataset(run: Path, how: Personal) -> None:
    found = umbel.load(run).predict(KNOWN.drop(columns="cost"), personalise=how)
    data = umbel.load(run).predict("stays", personalise=how).sort_values("name", kind="stable")
    np.testing.assert_allclose(found["prediction"], data["prediction"], rtol=1e-5)


@pytest.mark.parametrize("how", list(Personal))
def test_what_a_client_gets_depends_on_no_other_client_of_the_table(run: Path, new: Path, how: Personal) -> None:
    new.write_text(NEW + MORE)
    loaded, frame = umbel.load(run), pd.read_csv(new)
    with pytest.warns(UserWarning, match="bare"):
        whole = loaded.predict(frame, personalise=how)
    with pytest.warns(UserWarning, match="bare"):
        turned = loaded.predict(frame.iloc[[4, 1, 3, 5, 6, 0, 2]], personalise=how)
    alone = loaded.predict(frame, ["=new"], personalise=how)
    np.testing.assert_allclose(turned["prediction"], whole["prediction"][[4, 1, 3, 5, 6, 0, 2]], rtol=1e-5)
    np.testing.assert_allclose(alone["prediction"], whole["prediction"][[1, 3, 5, 6]], rtol=1e-5)
    assert alone["row"].tolist() == [2, 4, 6, 7]


def test_labels_make_a_hypothesis_a_new_clients_own(run: Path) -> None:
    """A client whose rows cost half of what hypothesis 1 says gets a factor near one half."""
    y = np.arange(1.0, 41.0)
    frame = pd.DataFrame({"hospital": "new", "x": 100.0, "y": y, "cost": [*(500 * y[:-1]), np.nan]})
    own, plain = (umbel.load(run).predict(frame, personalise=how)["prediction"].iloc[-1] for how in ("calibrate", "no"))
    assert plain == 40_000
    assert own == pytest.approx(20_000, rel=0.01)


def test_bayes_knows_what_the_server_read_off_the_releases(run: Path, tmp_path: Path) -> None:
    """Clients differ in the first parameter alone, so a new one's label moves that one more than without a prior."""
    kept: dict[str, Any] = {}
    releases = np.stack([np.random.default_rng(2000).normal(size=100), np.zeros(100)], 1).astype(np.float32)
    add_releases(kept, releases, np.arange(100) % 2, BEST["weight"][:, 0], TrainingSpec())
    knows = umbel.load(learnt(tmp_path / "knows", "", "", BEST, "stays", kept=kept))
    assert umbel.load(run).prior is None
    assert knows.prior is not None
    frame = pd.DataFrame({"hospital": "new", "x": [1.0, 1.0, 0.0], "y": [1.0, 0.0, 1.0], "cost": [3000.0, None, None]})
    (_, x, y), (_, x_alone, y_alone) = (
        one.predict(frame, personalise="bayes")["prediction"] for one in (knows, umbel.load(run))
    )
    assert x - y > x_alone - y_alone


def test_a_table_that_names_no_clients_is_one_clients(run: Path, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("x,y\n1,2\n")
    made = predict(run, tmp_path / "own.csv", "--client", "south", *PLAIN).stdout.splitlines()
    assert made[1] == "south,1,1,2000"
    assert "hospital" in refused("data.missing-column", run, tmp_path / "own.csv")


def test_a_class_goes_by_its_name_and_without_labels_by_the_mean_of_the_probabilities(
    umbel_home: Path, tmp_path: Path
) -> None:
    """Hypothesis 0 gives B .731, hypothesis 1 gives A nearly 1: at 3/4 and 1/4, A has .452. Mean logits would say A."""
    frame = pd.DataFrame({"hospital": ["a", "a", "b", "b"], "x": [1.0, 2.0, 1.0, 2.0], "ward": ["B", "B", "A", "A"]})
    umbel.from_dataframe(frame, client="hospital", target="ward").write("wards")
    best = {"0.weight": np.zeros((2, 2, 1), np.float32), "0.bias": np.array([[0, 1], [9, 0]], np.float32)}
    model = umbel.load(learnt(tmp_path / "other", "linear inputs=1 outputs=2", "cross-entropy", {})).model
    best = dict(zip(model.shapes, best.values(), strict=True))
    run = learnt(tmp_path / "run", "", "", best, "wards", [[3, 1]])
    asked = pd.DataFrame({"hospital": ["a", "b", "c"], "x": 1.0})
    with pytest.warns(UserWarning, match="labelled row"):
        made = umbel.load(run).predict(asked, personalise="no")
    assert made["prediction"].tolist() == ["B", "A", "B"]


def test_other_words_for_yes_and_no_are_read_and_shown_in_those_of_the_run(umbel_home: Path, tmp_path: Path) -> None:
    frame = pd.DataFrame({"hospital": ["a", "a", "b", "b"], "x": [1.0, 2, 1, 2], "again": ["Yes", "No", "No", "Yes"]})
    umbel.from_dataframe(frame, client="hospital", target="again").write("visits")
    model = umbel.load(learnt(tmp_path / "other", "linear inputs=1 outputs=1", "log", {})).model
    best = dict(zip(model.shapes, [np.ones((1, 1, 1), np.float32), np.zeros((1, 1), np.float32)], strict=True))
    run = learnt(tmp_path / "run", "", "", best, "visits", [[3]])
    (tmp_path / "new.csv").write_text("hospital,x,again\na,9,true\na,-9,0\na,9,\n")
    made = predict(run, tmp_path / "new.csv", *PLAIN)
    told = pd.read_csv(io.StringIO(made.stdout), dtype=str)
    assert told["prediction"].tolist() == ["Yes", "No", "Yes"]
    assert told["target"].fillna("").tolist() == ["Yes", "No", ""]
    assert "The probability is that of Yes." in made.stderr


def test_a_run_of_sites_takes_the_schema_by_hand(run: Path, tmp_path: Path, new: Path) -> None:
    schema = tmp_path / "schema.toml"
    schema.write_text(CliRunner().invoke(app, ["data", "show", "stays", "--schema"]).stdout)
    sites = learnt(tmp_path / "sites", "linear", "mse", BEST)
    assert "sites" in refused("data.no-schema", sites, new)
    made = predict(sites, new, "--schema", schema, *PLAIN)
    assert made.exit_code == 0, made.output
    assert [line.split(",")[2] for line in made.stdout.splitlines()[1:]] == ["", "1", "1", "1", ""]


def test_a_run_whose_dataset_is_elsewhere_takes_the_schema_too(
    run: Path, umbel_home: Path, tmp_path: Path, new: Path
) -> None:
    schema = tmp_path / "schema.toml"
    schema.write_text(CliRunner().invoke(app, ["data", "show", "stays", "--schema"]).stdout)
    (umbel_home / "data" / "stays").rename(umbel_home / "data" / "away")
    assert "'stays'" in refused("data.unknown", run, new)
    assert predict(run, new, "--schema", schema).exit_code == 0


def test_a_schema_of_other_columns_than_the_datasets_is_refused(run: Path, tmp_path: Path, new: Path) -> None:
    schema = tmp_path / "schema.toml"
    whole = CliRunner().invoke(app, ["data", "show", "stays", "--schema"]).stdout
    schema.write_text(whole.replace('name = "y"', 'name = "y", missing = "indicate"'))
    assert "(3,)" in refused("data.unfit-rows", run, new, "--schema", schema)


def test_the_fix_that_is_told_for_a_row_leads_to_a_prediction(umbel_home: Path, tmp_path: Path, new: Path) -> None:
    """A new category or an indicator would be one more input, which the run does not have."""
    frame = pd.DataFrame({"hospital": ["a", "a", "b", "b"], "ward": ["A", "B", "A", "B"], "cost": [1.0, 2.0, 1.0, 2.0]})
    umbel.from_dataframe(frame, client="hospital", target="cost", model="linear").write("wards")
    best = {"weight": np.ones((1, 1, 2), np.float32)}
    run = learnt(tmp_path / "run", "", "", best, "wards", [[3]])
    said = CliRunner().invoke(app, ["data", "show", "wards", "--schema"]).stdout
    for value, code, fix in ("C", "data.bad-value", "other"), ("", "data.missing-value", "missing"):
        new.write_text(f"hospital,ward\na,A\na,{value}\n")
        told = refused(code, run, new)
        entry = f'{fix} = "drop"'
        assert f"{entry} for the column 'ward' in a schema (umbel data show" in told
        assert "indicate" not in told
        (tmp_path / "schema.toml").write_text(said.replace('name = "ward"', f'name = "ward"\n{entry}'))
        done = predict(run, new, "--schema", tmp_path / "schema.toml")
        assert len(done.stdout.splitlines()) == 2, done.stderr


def test_a_table_of_one_client_may_lack_its_name(run: Path, new: Path) -> None:
    new.write_text("x,y\n3,4\n")
    assert "--client" in refused("data.missing-column", run, new)
    assert "north" in predict(run, new, "--client", "north").stdout


def test_a_schema_names_no_code_to_run(run: Path, tmp_path: Path, new: Path) -> None:
    schema = tmp_path / "schema.toml"
    whole = CliRunner().invoke(app, ["data", "show", "stays", "--schema"]).stdout
    schema.write_text(whole.replace('model = "linear"', 'model = "planted:boom"'))
    assert "planted:boom" in refused("config.untrusted-code", run, new, "--schema", schema)


def test_a_name_that_a_terminal_would_act_on_is_not_printed(run: Path, new: Path) -> None:
    new.write_text("hospital,x,y\n\x1b[2J,1,2\n")
    assert "\x1b" not in predict(run, new).output


def test_a_dataset_that_has_changed_since_the_run_is_told(run: Path, new: Path) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(f'data = "0123456789abcdef"\n{text}')
    assert "stays has changed since the run" in predict(run, new).stderr


def import_again(scale: float) -> None:
    columns = {"cost": {"scale": scale}}
    data = umbel.from_dataframe(KNOWN, client="hospital", target="cost", columns=columns, model="linear")
    data.write("stays", replace=True)


def test_a_dataset_that_was_imported_again_with_another_scale_changes_no_prediction(run: Path, new: Path) -> None:
    """Costs are predicted in thousands of dollars, and the north is no longer known: its row here chooses for it."""
    RunFolder(run).write_manifest(umbel.load(run).dataset.manifest)
    before = predict(run, new, *PLAIN).stdout.splitlines()
    import_again(1.0)
    done = predict(run, new, *PLAIN)
    after = done.stdout.splitlines()
    assert "other columns or scales since the run" in done.stderr
    assert (after[2], after[4:]) == (before[2], before[4:])
    assert after[3] == "north,3,1,4000,9000"
    assert umbel.load(run).unit == "dollars"


def test_rows_in_other_scales_than_those_of_the_run_are_refused(run: Path, tmp_path: Path) -> None:
    RunFolder(run).write_manifest(umbel.load(run).dataset.manifest)
    import_again(1.0)
    assert "scales" in refused("data.unfit-rows", run, "stays")
    for ask in (
        lambda: umbel.load(run).predict("stays"),
        lambda: umbel.export(umbel.load(run), tmp_path, "onnx"),
        lambda: umbel.export(umbel.load(run), tmp_path, "onnx", client="north"),
    ):
        with raises(DatasetError, "data.unfit-rows", "scales"):
            ask()
    assert list(tmp_path.glob("*.onnx")) == []


@pytest.mark.parametrize(
    ("text", "code", "parts"),
    [
        ("", "data.unreadable", ["new.csv"]),
        ("hospital,x,y\n", "data.no-rows", ["new.csv", "no rows"]),
        ("hospital,x\nnorth,1\n", "data.missing-column", ["'y'", "add them (empty if unknown"]),
        ("clinic,x,y\nnorth,1,2\n", "data.missing-column", ["'hospital'; it has clinic, x, y"]),
        ("hospital,x,y\nnorth,1,2\nsouth,1,\n", "data.missing-value", ["y in data row 2"]),
        ("hospital,x,y\nnorth,1,2\nsouth,1,two\n", "data.bad-value", ["y in data row 2", "'two'"]),
        ("hospital,x,y,cost\nnorth,1,2,many\n", "data.bad-value", ["cost in data row 1", "'many'"]),
        ("hospital,x,y\n,1,2\n", "data.missing-value", ["hospital in data row 1"]),
        ("hospital,x,y\nnorth,1e300,2\n", "data.bad-value", ["x in data row 1", "'1e300'"]),
    ],
)
def test_what_is_wrong_with_a_table_is_told_by_row_and_column(
    run: Path, new: Path, text: str, code: str, parts: list[str]
) -> None:
    new.write_text(text)
    told = refused(code, run, new)
    assert not [part for part in parts if part not in told], told


def test_other_mistakes_are_told(run: Path, new: Path, tmp_path: Path) -> None:
    assert "gone.csv" in refused("data.no-file", run, tmp_path / "gone.csv")
    told = refused("data.unknown-client", run, new, "--client", "nort")
    assert "'north'" in told
    assert "did you mean 'north'?" in told
    with raises(ConfigError, "config.personalise", "'own'", "calibrate"):
        umbel.load(run).predict(KNOWN, personalise="own")
    with raises(DatasetError, "data.unknown-client", "west", "0 to 1"):
        umbel.load(run).predict("stays", ["west"])
    with raises(DatasetError, "data.unknown-client", "west"):
        umbel.load(run).predict(KNOWN, ["north", "west"])
    for rows in (KNOWN, "stays"):
        with raises(DatasetError, "data.unknown-client"):
            umbel.load(run).predict(rows, [])


def test_one_client_may_be_named_by_itself(run: Path) -> None:
    """And its name is no list of names of one letter."""
    loaded, frame = umbel.load(run), pd.concat([KNOWN, KNOWN.assign(hospital="n")])
    assert set(loaded.predict(frame, "north")["client"]) == {"north"}
    assert set(loaded.predict("stays", "north")["name"]) == {"north"}


def test_where_names_are_numbers_a_number_is_a_name(umbel_home: Path, tmp_path: Path) -> None:
    """Client 1 of the table is not the second of the dataset."""
    numbered = KNOWN.assign(hospital=[1, 1, 0, 0])
    umbel.from_dataframe(numbered, client="hospital", target="cost", columns=COST, model="linear", seed=1).write(
        "stays"
    )
    run = umbel.load(learnt(tmp_path / "run", "", "", BEST, "stays", **{"batch-size": 1}))
    assert run.dataset is not None
    for client in (0, "0", 1, "1"):
        assert set(run.predict("stays", [client])["name"]) == {str(client)}
    with raises(DatasetError, "data.unknown-client", "called"):
        umbel.from_dataframe(
            numbered.replace(0, 7), client="hospital", target="cost", columns=COST, model="linear"
        ).write("stays", replace=True)
        run.predict("stays", [0])


def test_an_unknown_category_is_told_by_row_with_the_fix(umbel_home: Path, tmp_path: Path) -> None:
    frame = KNOWN.assign(ward=["A", "B", "A", "B"])[["hospital", "ward", "cost"]]
    umbel.from_dataframe(frame, client="hospital", target="cost", model="linear").write("wards")
    run = learnt(tmp_path / "run", "", "", BEST, "wards")
    (tmp_path / "new.csv").write_text("hospital,ward\nnorth,A\nnorth,C\n")
    told = refused("data.bad-value", run, tmp_path / "new.csv")
    assert "ward in data row 2 is 'C', not one of its categories A, B; repair that row" in told
