"""A run's hypotheses as files that other programs read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import umbel
from tests.helpers.errors import raises
from tests.helpers.learnt import learnt
from umbel import models
from umbel.protocol.errors import ConfigError, DatasetError

pytestmark = pytest.mark.rest

ROWS = torch.tensor([[1.0, 2.0], [-3.0, 0.5]])


def outputs(network: torch.nn.Module) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    with torch.inference_mode():
        return np.asarray(network(ROWS))


def test_weights_are_those_of_the_run(kept: Path, tmp_path: Path) -> None:
    run = umbel.load(kept)
    files = umbel.export(run, tmp_path / "new")
    assert [file.stem for file in files] == ["hypothesis-0", "hypothesis-1"]
    for file, network in zip(files, run.hypotheses, strict=True):
        fresh = torch.nn.Linear(2, 1, bias=False)
        fresh.load_state_dict(safetensors.torch.load_file(file))
        np.testing.assert_array_equal(outputs(fresh), outputs(network))


def test_data_from_no_table_have_no_onnx_file(kept: Path, tmp_path: Path) -> None:
    with raises(DatasetError, "data.no-schema", "torch.onnx"):
        umbel.export(umbel.load(kept), tmp_path, "onnx")


def test_another_form_or_a_file_where_the_folder_should_be_is_named(kept: Path, tmp_path: Path) -> None:
    with raises(ConfigError, "config.unknown-format", "'pickle'", "safetensors, onnx"):
        umbel.export(umbel.load(kept), tmp_path, "pickle")
    (tmp_path / "taken").touch()
    with raises(ConfigError, "config.no-folder", "taken"):
        umbel.export(umbel.load(kept), tmp_path / "taken")


def test_no_hypothesis_of_another_run_lies_among_those_of_a_run(kept: Path, tmp_path: Path) -> None:
    run, other = umbel.load(kept), tmp_path / "hypothesis-2.onnx"
    other.touch()
    with raises(ConfigError, "config.other-files", "hypothesis-2.onnx"):
        umbel.export(run, tmp_path, "onnx")
    assert list(tmp_path.glob("hypothesis-*")) == [other]
    assert len(umbel.export(run, tmp_path)) == len(umbel.export(run, tmp_path)) == 2, (
        "those of the same run are replaced"
    )


def test_a_model_whose_clients_keep_a_part_of_it_is_no_network_for_others(tmp_path: Path) -> None:
    """Its statistics would be those that PyTorch begins with, and its predictions those of no client."""
    name = f"{__name__}:Normalised"
    model = models.load(name, "mse")
    best = {key: value[None] for key, value in model.initial(0).items()}
    run = umbel.load(learnt(tmp_path / "run", name, "mse", best))
    for client in (None, 0):
        with raises(DatasetError, "data.local-parameters", "running_mean"):
            umbel.export(run, tmp_path, "onnx", client=client)
    assert umbel.export(run, tmp_path)


class Normalised(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
