"""A newcomer picks the hypothesis that fits its rows and predicts with it."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from tests.helpers.errors import ended
from tests.helpers.learnt import learnt
from umbel.cli.main import app
from umbel.client.prediction import present
from umbel.data import Manifest, offsets_of, write_dataset
from umbel.server.run_folder import RunFolder


def newcomer(path: Path, x: NDArray[Any], y: NDArray[Any], **more: Any) -> Path:
    """Write the rows of one client."""
    own = {"name": path.name, "clients": 1, "split": {"train": 1, "validation": 0}}
    write_dataset(path, Manifest(**own | more), x, y, offsets_of([len(x)]))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that learnt y = x1 and y = x2."""
    return learnt(tmp_path / "run", "linear", "mse", {"weight": np.array([[[1, 0]], [[0, 1]]], np.float32)})


@pytest.fixture
def newcomers(tmp_path: Path) -> Path:
    """Two clients: of the first y = x2, of the second y = x1; numbers are in thousands of dollars."""
    x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    y = np.array([2, 4, 5], np.float32)
    units = {"target": {"name": "cost", "unit": "dollars", "scale": 1000.0}}
    manifest = Manifest(
        name="new", clients=2, split={"train": 2, "validation": 0}, model="linear", loss="mse", units=units
    )
    write_dataset(tmp_path / "new", manifest, x, y, offsets_of([2, 1]))
    return tmp_path / "new"


def predict(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["predict", *map(str, arguments)])


def test_each_client_predicts_with_the_hypothesis_that_fits_it_in_the_units_of_the_world(
    run: Path, newcomers: Path
) -> None:
    done = predict(run, newcomers, "--personalise", "no")
    assert done.exit_code == 0, done.output
    assert list(csv.reader(io.StringIO(done.stdout))) == [
        ["client", "row", "hypothesis", "prediction", "target"],
        ["0", "0", "1", "2000", "2000"],
        ["0", "1", "1", "4000", "4000"],
        ["1", "0", "0", "5000", "5000"],
    ]
    assert "2 clients" in done.stderr
    assert "rmse 0 dollars" in done.stderr


def test_targets_of_another_scale_than_the_runs_are_refused(run: Path, newcomers: Path) -> None:
    """The run's numbers would be read in the newcomers' thousands of dollars."""
    manifest = Manifest(name="old", clients=1, split={"train": 1, "validation": 0})
    for scale, fits in ((1000, True), (1.0, False)):
        units = {"target": {"name": "cost", "unit": "dollars", "scale": scale}}
        RunFolder(run).write_manifest(manifest.model_copy(update={"units": units}))
        done = predict(run, newcomers, "--personalise", "no")
        assert (done.exit_code == 0) is fits, done.output
    ended(done.exit_code, done.output, "data.unfit-rows", "scale")


def test_large_amounts_keep_their_digits(run: Path, tmp_path: Path) -> None:
    units = {"target": {"name": "cost", "unit": "dollars", "scale": 1.0}}
    x, y = np.array([[1_234_567, 0], [0.123456789, 0]], np.float32), np.array([1_234_567, 0.123456789], np.float32)
    large = newcomer(tmp_path / "large", x, y, model="linear", loss="mse", units=units)
    done = predict(run, large, "--personalise", "no")
    assert [line.split(",")[-2:] for line in done.stdout.splitlines()[1:]] == [["1234567"] * 2, ["0.123457"] * 2]


def test_classes_are_predicted_as_classes(tmp_path: Path) -> None:
    from umbel import models

    model = models.load("cnn10")
    best = {name: np.stack([value] * 2) for name, value in model.initial(0).items()}
    for value in best.values():
        value[...] = 0
    # Whatever the image, hypothesis 0 says 3 and hypothesis 1 says 7.
    best["fc2.bias"][0, 3] = best["fc2.bias"][1, 7] = 1
    images, labels = np.zeros((2, 28, 28), np.uint8), np.array([7, 7])
    digits = newcomer(tmp_path / "digits", images, labels, model="cnn10", feature_scale=1 / 255)
    done = predict(learnt(tmp_path / "run", "cnn10", "", best), digits)
    assert done.exit_code == 0, done.output
    # Of ten logits one is 1 and nine are 0: e / (e + 9).
    assert done.stdout.splitlines()[1:] == ["0,0,1,7,0.231969,7", "0,1,1,7,0.231969,7"]
    assert "that of the predicted class" in done.stderr


def test_a_single_output_of_a_loss_of_ones_own_is_no_class_of_several() -> None:
    manifest = Manifest(
        name="grades", clients=1, split={"train": 1, "validation": 0},
        units={"target": {"categories": ["bad", "fair", "good"]}},
    )  # fmt: skip
    assert present(np.array([1.5, -1], np.float32), manifest) == [1.5, -1]
    assert present(np.array([2, 0]), manifest) == ["good", "bad"]
    manifest.units["target"]["categories"] = ["no", "yes"]
    assert present(np.array([1.5, -1], np.float32), manifest) == ["yes", "no"]


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["{run}/nothing", "{new}"], "config", "nothing"),
        (["{run}", "{new}-gone"], "data", "gone"),
        (["{run}", "{new}", "--client", "2"], "data.unknown-client", "0 to 1"),
        (["{run}", "{new}", "--client", "north"], "data.unknown-client", "'north'"),
        (["{run}", "{new}", "--out", "{run}/gone/out.csv"], "data.no-folder", "gone/out.csv"),
        (["{run}", "{new}", "--out", "{new}"], "data.not-writable", "new"),
    ],
)
def test_bad_input_is_named(run: Path, newcomers: Path, arguments: list[str], code: str, part: str) -> None:
    done = predict(*(argument.format(run=run, new=newcomers) for argument in arguments))
    ended(done.exit_code, done.stderr, code, part)


def test_a_newcomer_need_not_have_the_dataset_of_the_run(run: Path, newcomers: Path) -> None:
    RunFolder(run).write_config({"model": "", "loss": "", "dataset": "hospitals-of-others"})
    assert predict(run, newcomers).exit_code == 0


def test_data_that_the_model_does_not_take_are_refused(run: Path, tmp_path: Path) -> None:
    rows = np.zeros((1, 5), np.float32), np.zeros(1, np.float32)
    done = predict(run, newcomer(tmp_path / "wide", *rows, model="linear", loss="mse"))
    ended(done.exit_code, done.stderr, "data.unfit-model", "wide", "'linear'", "(5,)")


def test_a_model_with_parameters_of_each_clients_own_is_refused(run: Path, tmp_path: Path) -> None:
    model, best = "factors items=3 size=2", {"items": np.ones((1, 3, 2), np.float32)}
    items, likes = np.arange(3, dtype=np.float32)[:, None], np.array([1, -1, 1], np.float32)
    done = predict(learnt(run, model, "", best), newcomer(tmp_path / "likes", items, likes, model=model))
    ended(done.exit_code, done.stderr, "data.local-parameters", "user", repr(model))


def test_a_newcomer_takes_the_statistics_of_its_own_rows(tmp_path: Path) -> None:
    """Two rows that are normalised are at -1 and 1, once the running statistics have come near to theirs."""
    best = {"weight": np.ones((1, 2), np.float32), "bias": np.zeros((1, 2), np.float32)}
    run = learnt(tmp_path / "run", "torch.nn:BatchNorm1d num_features=2", "mse", best)
    x = np.array([[1, 20], [3, 40]] * 3, np.float32)
    new = newcomer(tmp_path / "new", x, np.zeros((6, 2), np.float32), model="", loss="mse")
    refused = predict(run, new, "--personalise", "fine-tune")
    ended(refused.exit_code, refused.stderr, "config.personalise", "fine-tune")
    done = predict(run, new)
    assert done.exit_code == 0, done.output
    rows = list(csv.reader(io.StringIO(done.stdout)))[1:]
    made = np.array([[float(number) for number in row[3].split()] for row in rows])
    np.testing.assert_allclose(made, np.where(x > [2, 30], 1, -1), atol=0.12)


def test_a_name_that_is_unknown_is_told_with_those_that_are_known(run: Path, newcomers: Path) -> None:
    (newcomers / "clients.json").write_text('["north", "south"]')
    done = predict(run, newcomers, "--client", "nroth")
    known = "'nroth'", "called 'north', 'south'", "did you mean 'north'?"
    ended(done.exit_code, done.stderr, "data.unknown-client", *known)
