"""What a run learnt, as files that other programs read; what fails leaves nothing, as `tests/client` shows.

An ONNX file of data from a table goes from raw columns to the target's unit, as `umbel predict` does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import safetensors.torch
import torch

import umbel
from tests.helpers.errors import raises
from tests.helpers.learnt import learnt, learnt_from
from umbel import models
from umbel.client.exports import OwnNetwork
from umbel.client.prediction import Learnt, predictions
from umbel.data import Schema, read_manifest
from umbel.privacy.site.policy import Personal
from umbel.protocol.errors import ConfigError, DatasetError, ModelError
from umbel.protocol.run_config import RunConfig

pytestmark = pytest.mark.rest

# --- weights


def test_weights_are_those_of_the_run(kept: Path, tmp_path: Path) -> None:
    run = umbel.load(kept)
    for _ in range(2):  # those of the same run are replaced
        files = umbel.export(run, tmp_path / "new")
    assert [file.stem for file in files] == ["hypothesis-0", "hypothesis-1"]
    for file, network in zip(files, run.hypotheses, strict=True):
        np.testing.assert_array_equal(safetensors.torch.load_file(file)["weight"], network.state_dict()["weight"])


def test_what_cannot_be_written_is_named(kept: Path, tmp_path: Path) -> None:
    """Nor does a hypothesis of another run lie among those of a run."""
    run = umbel.load(kept)
    with raises(DatasetError, "data.no-schema", "torch.onnx"):
        umbel.export(run, tmp_path, "onnx")
    with raises(ConfigError, "config.unknown-format", "'pickle'", "safetensors, onnx"):
        umbel.export(run, tmp_path, "pickle")
    (tmp_path / "hypothesis-2.onnx").touch()
    with raises(ConfigError, "config.other-files", "hypothesis-2.onnx"):
        umbel.export(run, tmp_path, "onnx")
    with raises(ConfigError, "config.no-folder", "hypothesis-2"):
        umbel.export(run, tmp_path / "hypothesis-2.onnx")
    assert [file.name for file in tmp_path.glob("hypothesis-*")] == ["hypothesis-2.onnx"]


def test_a_model_whose_clients_keep_a_part_of_it_is_no_network_for_others(tmp_path: Path) -> None:
    """Its statistics would be those that PyTorch begins with, and its predictions those of no client."""
    name = f"{__name__}:Normalised"
    best = {key: value[None] for key, value in models.load(name, "mse").initial(0).items()}
    run = umbel.load(learnt(tmp_path / "run", name, "mse", best))
    for client in (None, 0):
        with raises(DatasetError, "data.local-parameters", "running_mean"):
            umbel.export(run, tmp_path, "onnx", client=client)
    assert umbel.export(run, tmp_path)


class Normalised(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))


# --- ONNX

# Names that the graph itself would use, and every way in which a column is encoded.
FEATURES = [
    {"name": "linear", "type": "number", "scale": 20, "offset": 50, "fill": 40},
    {"name": "Age in years", "type": "integer", "minimum": 0, "maximum": 120, "scale": 30},
    {"name": "prediction_", "type": "boolean"},
    {"name": "ward", "type": "category", "categories": ["A", "B"], "other": "category"},
    {"name": "drg", "type": "category", "categories": ["194", "292", "690"], "encode": "index", "scale": 4},
    {"name": "beds", "type": "number", "missing": "indicate", "scale": 100},
    {"name": "insurer", "type": "category", "categories": ["X", "Y"], "missing": "indicate", "fill": "Y"},
    {"name": "urgent", "type": "boolean", "missing": "indicate"},
]
TARGETS = {
    "number": {"name": "cost", "type": "number", "scale": 1000, "unit": "dollars"},
    "category": {"name": "outcome", "type": "category", "categories": ["home", "clinic", "other ward"]},
    "boolean": {"name": "back", "type": "boolean"},
}
RAW: dict[str, list[Any]] = {
    "linear": [1.5, 70.0, np.nan, -4e5],
    "Age in years": [0.0, 120.0, 33.0, 34.0],
    "prediction_": [True, False, False, True],
    "ward": ["A", "B", "Q", "B"],
    "drg": ["194", "690", "292", "292"],
    "beds": [20.0, np.nan, 300.0, 7.0],
    "insurer": ["X", "Y", "", "X"],
    "urgent": [True, None, False, True],
}


class Exported(NamedTuple):
    run: umbel.Run
    hypotheses: list[Path]
    own: Path  # of client h2


@pytest.fixture(scope="module", params=[pytest.param(one, marks=pytest.mark.slow) for one in TARGETS])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A run of two hypotheses over a schema with all types of columns and four clients, and its files."""
    target, draw = TARGETS[request.param], np.random.default_rng(2000)
    schema = Schema(client={"name": "hospital", "type": "text"}, target=target, features=FEATURES, licence="CC0")
    frame = pd.DataFrame({name: draw.choice(np.array(values, object), 80) for name, values in RAW.items()})
    values = {"number": draw.uniform(0, 9000, 80), "boolean": draw.random(80) < 0.5}
    frame[target["name"]] = values.get(request.param, draw.choice(target.get("categories", [""]), 80))
    frame = frame.assign(hospital=[f"h{i % 4}" for i in range(80)])
    folder = tmp_path_factory.mktemp("run")
    dataset = umbel.from_dataframe(frame, schema=schema).write(folder / "stays")
    described = read_manifest(dataset)
    shapes = models.load(described.model, described.loss).shapes.values()
    parameters = (draw.normal(size=(2, *shape)) for shape in shapes)
    run = learnt_from(folder / "run", dataset, *parameters, groups=[[3, 1]])
    (own,) = umbel.export(run, folder / "own", "onnx", client="h2", personalise="mixture")
    return Exported(run, umbel.export(run, folder / "hypotheses", "onnx"), own)


def given(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the columns as the files take them."""
    own = {name: frame[name].to_numpy(np.float64, na_value=np.nan) for name in ("prediction_", "urgent")}
    return {name: frame[name].to_numpy() for name in RAW} | own


def results(file: Path, frame: pd.DataFrame) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(file)
    return dict(zip([one.name for one in session.get_outputs()], session.run(None, given(frame)), strict=True))


def assert_alike(found: Any, wanted: Any) -> None:
    if found.dtype == object:
        assert found.tolist() == list(wanted)
    else:
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-3)


def test_raw_columns_give_what_predict_gives(made: Exported) -> None:
    """Of a client's own predictor, which mixes two networks and has an offset, and of the hypothesis that it chose."""
    frame = pd.DataFrame(RAW)
    found = results(made.own, frame)["prediction"]
    assert_alike(found, made.run.predict(frame, ["h2"], personalise="mixture")["prediction"])
    assert_alike(results(made.own, frame[2:3])["prediction"], found[2:3])
    assert made.own.stat().st_mode & 0o077 == 0
    for client in range(4):
        told = made.run.predict(frame, [f"h{client}"], personalise="no")
        found = results(made.hypotheses[told["hypothesis"][0]], frame)
        assert_alike(found["prediction"], told["prediction"])


def test_a_file_that_onnx_itself_refuses_leaves_nothing_behind(
    made: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: Any) -> None:
        raise ValueError("a node has no name")

    monkeypatch.setattr("onnx.checker.check_model", refuse)
    with raises(ModelError, "model.onnx", "a node has no name"):
        umbel.export(made.run, tmp_path / "new" / "models", "onnx")
    assert not [*tmp_path.iterdir()]


def test_a_value_that_the_schema_does_not_take_gets_no_prediction(made: Exported) -> None:
    """Too old, half a year, no age, no ward, a service that is unknown; the last row is sound."""
    frame = pd.DataFrame(RAW).iloc[[0] * 6].reset_index(drop=True)
    frame["Age in years"] = [121.0, 0.5, np.nan, 3.0, 3.0, 3.0]
    frame["ward"], frame["drg"] = ["A", "A", "A", "", "A", "A"], ["194", "194", "194", "194", "195", "194"]
    found = results(made.hypotheses[0], frame)
    gone = [one == "" or one != one for one in found["prediction"]]
    assert gone == [True, True, True, True, True, False]
    assert np.isnan(found.get("scores", np.full(6, np.nan))[:5]).all()


def test_the_file_says_what_it_takes_and_where_it_is_from(made: Exported) -> None:
    said, own = (
        onnxruntime.InferenceSession(file).get_modelmeta().custom_metadata_map
        for file in (made.hypotheses[1], made.own)
    )
    dataset = made.run.dataset
    assert dataset is not None
    layout = dataset.manifest.layout
    assert layout is not None
    inputs, target = json.loads(said["inputs"]), json.loads(said["target"])
    assert [one["name"] for one in inputs] == list(RAW)
    assert inputs[3] == FEATURES[3] | {"takes": "text, empty if missing"}
    assert inputs[5]["takes"] == "float64, NaN if missing"
    assert target == layout.entries()["target"]
    assert (said["name"], said["run"], said["dataset"], said["licence"]) == ("hypothesis-1", "run", "stays", "CC0")
    assert "Guarantee" in said["guarantee"]
    assert (own["client"], own["personalise"], own["guarantee"][:5]) == ("h2", "mixture", "None:")
    assert str(Path.cwd()).encode() not in made.hypotheses[1].read_bytes(), "no path of this machine"


@pytest.mark.parametrize("how", list(Personal))
def test_a_clients_predictor_as_a_network_is_what_predicts(tmp_path: Path, how: Personal) -> None:
    draw = np.random.default_rng(2001)
    rows, classes = draw.normal(size=(40, 3)).astype(np.float32), draw.integers(0, 2, 40)
    data = umbel.from_arrays(rows, classes, client=np.arange(40) % 4, validation=0.0).dataset
    model = models.load("linear inputs=3 outputs=2", "cross-entropy")
    best = {name: draw.normal(size=(2, *shape)).astype(np.float32) for name, shape in model.shapes.items()}
    found = Learnt(model, best, RunConfig())
    (told,) = predictions(found, data, [1], how=how)
    network = OwnNetwork(model, found.predictor_of(data, 1, how))
    with torch.inference_mode():
        both = (torch.log_softmax(one, 1) for one in (network(torch.tensor(data.client(1)[0])), told.outputs))
        torch.testing.assert_close(*both, rtol=1e-5, atol=1e-6)


def test_a_clients_own_predictor_has_no_other_form(tmp_path: Path) -> None:
    run = umbel.load(learnt(tmp_path / "run", "linear", "mse", {"weight": np.ones((1, 1, 2), np.float32)}))
    with raises(ConfigError, "config.client-form", "onnx"):
        umbel.export(run, tmp_path, "safetensors", client="h2")
    with raises(ConfigError, "config.no-dataset", "rows"):
        umbel.export(run, tmp_path, "onnx", client="h2")


def written(folder: Path, frame: pd.DataFrame, *parameters: object, **options: Any) -> tuple[umbel.Run, Path]:
    """Return a run of a table of one client, the north, which learnt these parameters, and its hypothesis's file."""
    options = {"client": "hospital", "validation": 0.0} | options
    dataset = umbel.from_dataframe(frame.assign(hospital="north"), **options).write(folder / "stays")
    run = learnt_from(folder / "run", dataset, *parameters)
    (file,) = umbel.export(run, folder, "onnx")
    return run, file


def test_a_few_columns_by_hand(tmp_path: Path) -> None:
    """Costs are 1000 (2 ward B + age / 20), of both hypotheses, and halved at the client that pays half."""
    frame = pd.DataFrame({"age": [20.0, 40.0] * 50, "ward": ["A", "B"] * 50, "cost": [500, 2000] * 50})
    columns = {"cost": {"scale": 1000}, "age": {"scale": 20}}
    run, file = written(tmp_path, frame, [[[1, 0, 2]]], [[0]], target="cost", columns=columns)
    (own,) = umbel.export(run, tmp_path, "onnx", client="north", personalise="calibrate")
    asked = {"age": np.array([60.0, 60.0, 60.0]), "ward": np.array(["A", "B", "C"], object)}
    for one, share, tolerance in ((file, 1.0, 1e-3), (own, 0.5, 15)):
        (found,) = onnxruntime.InferenceSession(one).run(None, asked)
        np.testing.assert_allclose(found, [3000 * share, 5000 * share, np.nan], atol=tolerance)


def test_columns_may_have_the_outputs_names(tmp_path: Path) -> None:
    """The second class is that of rows whose `scores` is above 0."""
    frame = pd.DataFrame({"prediction": [*range(20)] * 2, "scores": [-1.5, 2.5] * 20, "ward": ["A", "B"] * 20})
    _, file = written(tmp_path, frame, [[[0, 0], [0, 1]]], [[0, 0]], target="ward")
    session = onnxruntime.InferenceSession(file)
    assert [one.name for one in session.get_outputs()] == ["prediction_", "scores_"]
    found = session.run(None, {"prediction": np.array([3.0, 4.0]), "scores": np.array([3.0, -3.0])})
    assert found[0].tolist() == ["B", "A"]
    np.testing.assert_allclose(found[1], [[0, 3], [0, -3]])


def test_a_file_takes_no_dates(tmp_path: Path) -> None:
    frame = pd.DataFrame({"day": ["2024-01-01", "2024-02-01"] * 20, "cost": [1.0, 2.0] * 20})
    with raises(DatasetError, "data.date-in-onnx", "'day'"):
        written(
            tmp_path, frame, [[[1], [1]]], [[0, 0]], target="cost", columns={"day": {"type": "date", "parts": ["days"]}}
        )


class Coded(torch.nn.Module):
    """Four classes of two codes, which it takes as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(2, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(rows).sum(1)
        return found


def test_a_class_that_the_data_do_not_have_is_the_number_that_predict_gives(tmp_path: Path) -> None:
    """Of a model with more outputs than classes, which also takes codes and no numbers."""
    frame = pd.DataFrame({"ward": ["A", "B"] * 20, "age": [0, 1] * 20, "drg": ["x", "y", "z", "x"] * 10})
    columns: dict[str, Any] = {"ward": {"encode": "index"}, "age": {"scale": 1, "offset": 0}}
    model = {"model": f"{__name__}:Coded", "loss": "cross-entropy"}
    table = [[[0, 1, 0, 0], [0, 0, 0, 1]]]
    run, file = written(tmp_path, frame, table, target="drg", columns=columns, **model)
    asked = pd.DataFrame({"ward": ["A", "B"], "age": [0, 1]})
    given = {"ward": np.array(["A", "B", "C"], object), "age": np.array([0, 1, np.nan])}
    found = onnxruntime.InferenceSession(file).run(["prediction"], given)[0].tolist()
    assert found == [*run.predict(asked, "north", personalise="no")["prediction"], ""] == ["y", "3", ""]
