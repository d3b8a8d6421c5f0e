"""`umbel predict`: clients pick the hypotheses that fit their labelled rows, and predict in the target's unit.

Rows are those of a table, of clients that are known, new, or without labels, or of a dataset of newcomers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import umbel
from tests.helpers import cli
from tests.helpers.cli import done, said, schema_of
from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from tests.helpers.learnt import learnt, learnt_from
from umbel.client.prediction import present
from umbel.data import offsets_of, write_dataset
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


def predict(*arguments: object) -> list[list[str]]:
    """Return the cells of what is predicted, below the names of their columns."""
    told = done("predict", *arguments, *PLAIN)
    assert told.exit_code == 0, told.output
    return [line.split(",") for line in told.stdout.splitlines()[1:]]


def notes(*arguments: object) -> str:
    return str(done("predict", *arguments, *PLAIN).stderr)


def refused(code: str, *arguments: object, parts: tuple[object, ...] = ()) -> None:
    cli.refused(code, "predict", *arguments, parts=parts)


def test_rows_of_clients_that_are_known_new_or_without_labels(run: Path, new: Path) -> None:
    """The north is known: its row here costs y, and is predicted as x. Shares are those of the last rounds: 12 to 1."""
    assert predict(run, new) == [
        ["south", "1", "1", "2000", ""],
        ["'=new", "2", "1", "5000", "5000"],
        ["north", "3", "0", "3000", "9000"],
        ["'=new", "4", "1", "7000", ""],
        ["bare", "5", "", f"{1000 * (12 * 4 + 1 * 8) / 13:.6g}", ""],
    ]
    told = notes(run, new)
    for words in ("known in stays: 2.", "New clients: 1. Their labelled rows here, 1,", "a labelled row: 1 (bare)"):
        assert words in told


def test_a_known_client_in_capitals_is_that_client_and_nearly_its_name_is_told(run: Path, new: Path) -> None:
    new.write_text("hospital,x,y\nNORTH,3,4\n north ,1,4\nNew,1,2\nNEW,1,2\nNew,1,2\n")
    assert [row[0] for row in predict(run, new)] == ["north"] * 2 + ["New"] * 3
    assert len(predict(run, new, "--client", "North")) == 2
    told = notes(run, new)
    assert "known in stays: 1." in told
    assert "'NORTH' as 'north'" in told
    assert "although" not in told
    new.write_text("hospital,x,y,cost\nNor th,3,1,3000\nsouth,3,1,2000\nbare,3,1,2000\n")
    assert "'Nor th' counts as a new client, although 'north' is known;" in notes(run, new)


def test_without_any_target_only_known_clients_choose(run: Path, tmp_path: Path, new: Path) -> None:
    table, out = tmp_path / "new.parquet", tmp_path / "out.csv"
    pd.read_csv(new).drop(columns="cost").to_parquet(table)
    assert [row[2:3] + row[4:] for row in predict(run, table)] == [["1"], [""], ["0"], [""], [""]]
    said("predict", run, table, *PLAIN, "--out", out)
    assert [line.split(",") for line in out.read_text().splitlines()[1:]] == predict(run, table)


@pytest.mark.parametrize("how", list(Personal))
def test_what_a_client_gets_depends_on_no_other_client_of_the_table(run: Path, new: Path, how: Personal) -> None:
    """And a known one gets what its rows in the dataset get."""
    loaded, known = umbel.load(run), KNOWN.drop(columns="cost")
    data = loaded.predict("stays", personalise=how).sort_values("name", kind="stable")
    np.testing.assert_allclose(loaded.predict(known, personalise=how)["prediction"], data["prediction"], rtol=1e-5)
    new.write_text(NEW + MORE)
    frame, turns = pd.read_csv(new), [4, 1, 3, 5, 6, 0, 2]
    with pytest.warns(UserWarning, match="bare"):
        whole, turned = (loaded.predict(rows, personalise=how) for rows in (frame, frame.iloc[turns]))
    alone = loaded.predict(frame, ["=new"], personalise=how)
    np.testing.assert_allclose(turned["prediction"], whole["prediction"][turns], rtol=1e-5)
    np.testing.assert_allclose(alone["prediction"], whole["prediction"][[1, 3, 5, 6]], rtol=1e-5)
    assert alone["row"].tolist() == [2, 4, 6, 7]


def test_bayes_knows_what_the_server_read_off_the_releases(run: Path, tmp_path: Path) -> None:
    """Clients differ in the first parameter alone, so a new one's label moves that one more than without a prior."""
    kept: dict[str, Any] = {}
    releases = np.stack([np.random.default_rng(2000).normal(size=100), np.zeros(100)], 1).astype(np.float32)
    add_releases(kept, releases, np.arange(100) % 2, BEST["weight"][:, 0], TrainingSpec())
    knows = umbel.load(learnt(tmp_path / "knows", "", "", BEST, "stays", kept=kept))
    frame = pd.DataFrame({"hospital": "new", "x": [1.0, 1.0, 0.0], "y": [1.0, 0.0, 1.0], "cost": [3000.0, None, None]})
    (_, x, y), (_, x_alone, y_alone) = (
        one.predict(frame, personalise="bayes")["prediction"] for one in (knows, umbel.load(run))
    )
    assert x - y > x_alone - y_alone


def test_a_table_of_one_client_may_lack_its_name(run: Path, new: Path) -> None:
    new.write_text("x,y\n3,4\n")
    refused("data.missing-column", run, new, parts=("--client",))
    assert predict(run, new, "--client", "north") == [["north", "1", "0", "3000"]]


# --- classes


def test_a_class_goes_by_its_name_and_without_labels_by_the_mean_of_the_probabilities(
    umbel_home: Path, tmp_path: Path
) -> None:
    """Hypothesis 0 gives B .731, hypothesis 1 gives A nearly 1: at 3/4 and 1/4, A has .452. Mean logits would say A."""
    frame = pd.DataFrame({"hospital": ["a", "a", "b", "b"], "x": [1.0, 2.0, 1.0, 2.0], "ward": ["B", "B", "A", "A"]})
    umbel.from_dataframe(frame, client="hospital", target="ward").write("wards")
    run = learnt_from(tmp_path / "run", "wards", np.zeros((2, 2, 1)), [[0, 1], [9, 0]], groups=[[3, 1]])
    with pytest.warns(UserWarning, match="labelled row"):
        made = run.predict(pd.DataFrame({"hospital": ["a", "b", "c"], "x": 1.0}), personalise="no")
    assert made["prediction"].tolist() == ["B", "A", "B"]


def test_other_words_for_yes_and_no_are_read_and_shown_in_those_of_the_run(umbel_home: Path, new: Path) -> None:
    frame = pd.DataFrame({"hospital": ["a", "a", "b", "b"], "x": [1.0, 2, 1, 2], "again": ["Yes", "No", "No", "Yes"]})
    umbel.from_dataframe(frame, client="hospital", target="again").write("visits")
    run = learnt_from(new.with_name("run"), "visits", [[[1]]], [[0]]).path
    new.write_text("hospital,x,again\na,9,true\na,-9,0\na,9,\n")
    told = [(row[3], row[-1]) for row in predict(run, new)]
    assert told == [("Yes", "Yes"), ("No", "No"), ("Yes", "")]
    assert "probability of Yes" in done("predict", run, new, *PLAIN).stdout.splitlines()[0].split(",")


# --- the schema


def test_without_the_runs_dataset_the_schema_is_given(run: Path, umbel_home: Path, tmp_path: Path, new: Path) -> None:
    """As to a run of sites, which has none."""
    schema, sites = schema_of("stays", tmp_path / "schema.toml"), learnt(tmp_path / "sites", "linear", "mse", BEST)
    refused("data.no-schema", sites, new, parts=("sites",))
    assert [row[2] for row in predict(sites, new, "--schema", schema)] == ["", "1", "1", "1", ""]
    (umbel_home / "data" / "stays").rename(umbel_home / "data" / "away")
    refused("data.unknown", run, new, parts=("'stays'",))
    assert predict(run, new, "--schema", schema)


@pytest.mark.parametrize(
    ("old", "other", "code", "part"),
    [
        ('name = "y"', 'name = "y", missing = "indicate"', "data.unfit-rows", "(3,)"),
        ('model = "linear"', 'model = "planted:boom"', "config.untrusted-code", "planted:boom"),
    ],
)
def test_a_schema_has_the_columns_of_the_dataset_and_names_no_code_to_run(
    run: Path, tmp_path: Path, new: Path, old: str, other: str, code: str, part: str
) -> None:
    refused(code, run, new, "--schema", schema_of("stays", tmp_path / "schema.toml", old, other), parts=(part,))


def test_the_fix_that_is_told_for_a_row_leads_to_a_prediction(umbel_home: Path, tmp_path: Path, new: Path) -> None:
    """A new category or an indicator would be one more input, which the run does not have."""
    frame = pd.DataFrame({"hospital": ["a", "a", "b", "b"], "ward": ["A", "B", "A", "B"], "cost": [1.0, 2.0, 1.0, 2.0]})
    umbel.from_dataframe(frame, client="hospital", target="cost", model="linear").write("wards")
    run = learnt(tmp_path / "run", "", "", {"weight": np.ones((1, 1, 2), np.float32)}, "wards", [[3]])
    for value, code, fix in ("C", "data.bad-value", "other"), ("", "data.missing-value", "missing"):
        new.write_text(f"hospital,ward\na,A\na,{value}\n")
        entry = f'{fix} = "drop"'
        refused(code, run, new, parts=("data row 2", f"{entry} for the column 'ward' in a schema"))
        schema = schema_of("wards", tmp_path / "schema.toml", 'name = "ward"', f'name = "ward"\n{entry}')
        assert len(predict(run, new, "--schema", schema)) == 1


def test_a_name_that_a_terminal_would_act_on_is_not_printed(run: Path, new: Path) -> None:
    new.write_text("hospital,x,y\n\x1b[2J,1,2\n")
    assert "\x1b" not in said("predict", run, new)


# --- a dataset that has changed since the run


def import_again(scale: float) -> None:
    columns = {"cost": {"scale": scale}}
    data = umbel.from_dataframe(KNOWN, client="hospital", target="cost", columns=columns, model="linear")
    data.write("stays", replace=True)


def test_a_dataset_that_was_imported_again_with_another_scale_changes_no_prediction(run: Path, new: Path) -> None:
    """Costs are predicted in thousands of dollars, and the north is no longer known: its row here chooses for it."""
    RunFolder(run).write_manifest(umbel.load(run).dataset.manifest)
    before = predict(run, new)
    config = run / "config.toml"
    config.write_text(f'data = "0123456789abcdef"\n{config.read_text()}')
    assert "stays has changed since the run" in notes(run, new)
    import_again(1.0)
    assert "other columns or scales since the run" in notes(run, new)
    after = predict(run, new)
    assert (after[1], after[3:]) == (before[1], before[3:])
    assert after[2] == ["north", "3", "1", "4000", "9000"]
    assert umbel.load(run).unit == "dollars"


def test_rows_in_other_scales_than_those_of_the_run_are_refused(run: Path, tmp_path: Path) -> None:
    RunFolder(run).write_manifest(umbel.load(run).dataset.manifest)
    import_again(1.0)
    for ask in (
        lambda: umbel.load(run).predict("stays"),
        lambda: umbel.export(umbel.load(run), tmp_path, "onnx"),
        lambda: umbel.export(umbel.load(run), tmp_path, "onnx", client="north"),
    ):
        with raises(DatasetError, "data.unfit-rows", "scales"):
            ask()
    assert list(tmp_path.glob("*.onnx")) == []


# --- mistakes


@pytest.mark.parametrize(
    ("text", "code", "parts"),
    [
        ("", "data.unreadable", ("new.csv",)),
        ("hospital,x,y\n", "data.no-rows", ("new.csv",)),
        ("hospital,x\nnorth,1\n", "data.missing-column", ("'y'",)),
        ("clinic,x,y\nnorth,1,2\n", "data.missing-column", ("'hospital'", "clinic, x, y")),
        ("hospital,x,y,cost\nnorth,1,2,many\n", "data.bad-value", ("cost in data row 1", "'many'")),
    ],
)
def test_what_is_wrong_with_a_table_is_told_by_row_and_column(
    run: Path, new: Path, text: str, code: str, parts: tuple[str, ...]
) -> None:
    new.write_text(text)
    refused(code, run, new, parts=parts)


def test_clients_and_methods_that_are_none_are_told(run: Path, new: Path) -> None:
    refused("data.unknown-client", run, new, "--client", "nort", parts=("did you mean 'north'?",))
    with raises(ConfigError, "config.personalise", "'own'", "calibrate"):
        umbel.load(run).predict(KNOWN, personalise="own")
    for rows in (KNOWN, "stays"):
        for clients in (["north", "west"], []):
            with raises(DatasetError, "data.unknown-client"):
                umbel.load(run).predict(rows, clients)


def test_a_name_is_no_list_of_letters_and_where_names_are_numbers_a_number_is_a_name(
    umbel_home: Path, run: Path, tmp_path: Path
) -> None:
    """Client 1 of the table is not the second of the dataset."""
    frame = pd.concat([KNOWN, KNOWN.assign(hospital="n")])
    assert set(umbel.load(run).predict(frame, "north")["client"]) == {"north"}
    assert set(umbel.load(run).predict("stays", "north")["name"]) == {"north"}
    options: dict[str, Any] = {"client": "hospital", "target": "cost", "columns": COST, "model": "linear", "seed": 1}
    numbered = KNOWN.assign(hospital=[1, 1, 0, 0])
    umbel.from_dataframe(numbered, **options).write("stays", replace=True)
    numbers = umbel.load(learnt(tmp_path / "numbers", "", "", BEST, "stays"))
    for client in (0, "0", 1, "1"):
        assert set(numbers.predict("stays", [client])["name"]) == {str(client)}
    umbel.from_dataframe(numbered.replace(0, 7), **options).write("stays", replace=True)
    with raises(DatasetError, "data.unknown-client", "called"):
        numbers.predict("stays", [0])


# --- datasets of newcomers


def newcomers(path: Path, x: Any, y: Any, lengths: list[int] | None = None, **entries: Any) -> Path:
    """Write the rows of clients, by default of one."""
    lengths = lengths or [len(x)]
    write_dataset(path, manifest(len(lengths), name=path.name, **entries), x, np.asarray(y), offsets_of(lengths))
    return path


@pytest.fixture
def laws(tmp_path: Path) -> Path:
    """A run that learnt y = x1 and y = x2."""
    return learnt(tmp_path / "run", "linear", "mse", {"weight": np.array([[[1, 0]], [[0, 1]]], np.float32)})


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """Two clients: of the first y = x2, of the second y = x1; numbers are in thousands of dollars."""
    x, y = np.array([[1, 2], [3, 4], [1234.567, 6]], np.float32), np.array([2, 4, 1234.567], np.float32)
    units = {"target": {"name": "cost", "unit": "dollars", "scale": 1000.0}}
    folder = newcomers(tmp_path / "new", x, y, [2, 1], model="linear", loss="mse", units=units)
    (folder / "clients.json").write_text('["north", "south"]')
    return folder


def test_each_client_predicts_with_the_hypothesis_that_fits_it_in_the_units_of_the_world(
    laws: Path, both: Path
) -> None:
    """Large amounts keep their digits, and a newcomer need not have the dataset of the run."""
    RunFolder(laws).write_config({"model": "", "loss": "", "dataset": "hospitals-of-others"})
    assert predict(laws, both) == [
        ["0", "north", "0", "1", "2000", "2000"],
        ["0", "north", "1", "1", "4000", "4000"],
        ["1", "south", "0", "0", "1234567", "1234567"],
    ]
    assert "rmse 0 dollars" in notes(laws, both)


def test_classes_are_predicted_as_classes(tmp_path: Path) -> None:
    """Hypothesis 0 says 0 and hypothesis 1 says 2, with a logit of 1 beside two of 0: e / (e + 2)."""
    name, loss, weight = "softmax features=2 classes=3", "cross-entropy", np.zeros((2, 3, 2), np.float32)
    weight[0, 0, 0] = weight[1, 2, 0] = 1
    rows = newcomers(tmp_path / "new", np.eye(2, dtype=np.float32)[[0, 0]], [2, 2], model=name, loss=loss)
    told = predict(learnt(tmp_path / "run", name, loss, {"linear.weight": weight}), rows)
    assert told == [["0", row, "1", "2", "0.576117", "2"] for row in ("0", "1")]


def test_a_single_output_of_a_loss_of_ones_own_is_no_class_of_several() -> None:
    for categories, outputs, told in (
        (["bad", "fair", "good"], np.array([1.5, -1], np.float32), [1.5, -1]),
        (["bad", "fair", "good"], np.array([2, 0]), ["good", "bad"]),
        (["no", "yes"], np.array([1.5, -1], np.float32), ["yes", "no"]),
    ):
        assert present(outputs, manifest(1, units={"target": {"categories": categories}})) == told


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        ("{run}/nothing {new}", "config", "nothing"),
        ("{run} {new}-gone", "data", "gone"),
        ("{run} {new} --client 2", "data.unknown-client", "'north', 'south'"),
        ("{run} {new} --client nroth", "data.unknown-client", "did you mean 'north'?"),
        ("{run} {new} --out {run}/gone/out.csv", "data.no-folder", "gone/out.csv"),
        ("{run} {new} --out {new}", "data.not-writable", "new"),
        ("{run} {wide}", "data.unfit-model", "(5,)"),
    ],
)
def test_bad_input_is_named(laws: Path, both: Path, tmp_path: Path, arguments: str, code: str, part: str) -> None:
    rows = np.zeros((1, 5), np.float32), np.zeros(1, np.float32)
    wide = newcomers(tmp_path / "wide", *rows, model="linear", loss="mse")
    refused(code, *arguments.format(run=laws, new=both, wide=wide).split(), parts=(part,))


def test_a_model_with_parameters_of_each_clients_own_is_refused(laws: Path, tmp_path: Path) -> None:
    model, best = "factors items=3 size=2", {"items": np.ones((1, 3, 2), np.float32)}
    items, likes = np.arange(3, dtype=np.float32)[:, None], np.array([1, -1, 1], np.float32)
    rows = newcomers(tmp_path / "likes", items, likes, model=model)
    refused("data.local-parameters", learnt(laws, model, "", best), rows, parts=("user", repr(model)))


def test_a_newcomer_takes_the_statistics_of_its_own_rows(tmp_path: Path) -> None:
    """Two rows that are normalised are at -1 and 1, once the running statistics have come near to theirs."""
    best = {"weight": np.ones((1, 2), np.float32), "bias": np.zeros((1, 2), np.float32)}
    run = learnt(tmp_path / "run", "torch.nn:BatchNorm1d num_features=2", "mse", best)
    x = np.array([[1, 20], [3, 40]] * 3, np.float32)
    new = newcomers(tmp_path / "new", x, np.zeros((6, 2), np.float32), model="", loss="mse")
    refused("config.personalise", run, new, "--personalise", "fine-tune", parts=("fine-tune",))
    rows = [line.split(",") for line in done("predict", run, new).stdout.splitlines()[1:]]
    made = np.array([[float(number) for number in row[3].split()] for row in rows])
    np.testing.assert_allclose(made, np.where(x > [2, 30], 1, -1), atol=0.12)
