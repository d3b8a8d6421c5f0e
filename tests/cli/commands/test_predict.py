"""A newcomer picks the hypothesis that fits its rows and predicts with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.command import done, refused
from tests.helpers.datasets import manifest
from tests.helpers.learnt import learnt
from umbel.client.prediction import present
from umbel.data import offsets_of, write_dataset
from umbel.server.run_folder import RunFolder

PLAIN = ("--personalise", "no")


def newcomers(path: Path, x: Any, y: Any, lengths: list[int] | None = None, **entries: Any) -> Path:
    """Write the rows of clients, by default of one."""
    lengths = lengths or [len(x)]
    write_dataset(path, manifest(len(lengths), name=path.name, **entries), x, np.asarray(y), offsets_of(lengths))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that learnt y = x1 and y = x2."""
    return learnt(tmp_path / "run", "linear", "mse", {"weight": np.array([[[1, 0]], [[0, 1]]], np.float32)})


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """Two clients: of the first y = x2, of the second y = x1; numbers are in thousands of dollars."""
    x, y = np.array([[1, 2], [3, 4], [1234.567, 6]], np.float32), np.array([2, 4, 1234.567], np.float32)
    units = {"target": {"name": "cost", "unit": "dollars", "scale": 1000.0}}
    folder = newcomers(tmp_path / "new", x, y, [2, 1], model="linear", loss="mse", units=units)
    (folder / "clients.json").write_text('["north", "south"]')
    return folder


def predicted(*arguments: object) -> list[list[str]]:
    """Return the cells of what is predicted, with the names of their columns."""
    told = done("predict", *arguments)
    assert told.exit_code == 0, told.output
    return [line.split(",") for line in told.stdout.splitlines()]


def test_each_client_predicts_with_the_hypothesis_that_fits_it_in_the_units_of_the_world(run: Path, new: Path) -> None:
    """Large amounts keep their digits, and a newcomer need not have the dataset of the run."""
    RunFolder(run).write_config({"model": "", "loss": "", "dataset": "hospitals-of-others"})
    assert predicted(run, new, *PLAIN) == [
        ["client", "name", "row", "hypothesis", "prediction", "target"],
        ["0", "north", "0", "1", "2000", "2000"],
        ["0", "north", "1", "1", "4000", "4000"],
        ["1", "south", "0", "0", "1234567", "1234567"],
    ]
    assert "rmse 0 dollars" in done("predict", run, new, *PLAIN).stderr


def test_classes_are_predicted_as_classes(tmp_path: Path) -> None:
    """Hypothesis 0 says 0 and hypothesis 1 says 2, with a logit of 1 beside two of 0: e / (e + 2)."""
    name, loss, weight = "softmax features=2 classes=3", "cross-entropy", np.zeros((2, 3, 2), np.float32)
    weight[0, 0, 0] = weight[1, 2, 0] = 1
    rows = newcomers(tmp_path / "new", np.eye(2, dtype=np.float32)[[0, 0]], [2, 2], model=name, loss=loss)
    told = predicted(learnt(tmp_path / "run", name, loss, {"linear.weight": weight}), rows)[1:]
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
def test_bad_input_is_named(run: Path, new: Path, tmp_path: Path, arguments: str, code: str, part: str) -> None:
    rows = np.zeros((1, 5), np.float32), np.zeros(1, np.float32)
    wide = newcomers(tmp_path / "wide", *rows, model="linear", loss="mse")
    refused(code, "predict", *arguments.format(run=run, new=new, wide=wide).split(), parts=(part,))


def test_a_model_with_parameters_of_each_clients_own_is_refused(run: Path, tmp_path: Path) -> None:
    model, best = "factors items=3 size=2", {"items": np.ones((1, 3, 2), np.float32)}
    items, likes = np.arange(3, dtype=np.float32)[:, None], np.array([1, -1, 1], np.float32)
    rows = newcomers(tmp_path / "likes", items, likes, model=model)
    refused("data.local-parameters", "predict", learnt(run, model, "", best), rows, parts=("user", repr(model)))


def test_a_newcomer_takes_the_statistics_of_its_own_rows(tmp_path: Path) -> None:
    """Two rows that are normalised are at -1 and 1, once the running statistics have come near to theirs."""
    best = {"weight": np.ones((1, 2), np.float32), "bias": np.zeros((1, 2), np.float32)}
    run = learnt(tmp_path / "run", "torch.nn:BatchNorm1d num_features=2", "mse", best)
    x = np.array([[1, 20], [3, 40]] * 3, np.float32)
    new = newcomers(tmp_path / "new", x, np.zeros((6, 2), np.float32), model="", loss="mse")
    refused("config.personalise", "predict", run, new, "--personalise", "fine-tune", parts=("fine-tune",))
    made = np.array([[float(number) for number in row[3].split()] for row in predicted(run, new)[1:]])
    np.testing.assert_allclose(made, np.where(x > [2, 30], 1, -1), atol=0.12)
