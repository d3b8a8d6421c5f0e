"""A run's hypotheses as files that other programs read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch

import umbel
from protocol.errors import ConfigError, ModelError

ROWS = torch.tensor([[1.0, 2.0], [-3.0, 0.5]])


def outputs(network: torch.nn.Module) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    with torch.inference_mode():
        return np.asarray(network(ROWS))


@pytest.mark.parametrize("form", ["state-dict", "safetensors"])
def test_weights_are_those_of_the_run(kept: Path, tmp_path: Path, form: str) -> None:
    run = umbel.load(kept)
    files = umbel.export(run, tmp_path / "new", form)
    assert [file.stem for file in files] == ["hypothesis-0", "hypothesis-1"]
    for file, network in zip(files, run.hypotheses, strict=True):
        fresh = torch.nn.Linear(2, 1, bias=False)
        read = safetensors.torch.load_file(file) if form == "safetensors" else torch.load(file, weights_only=True)
        fresh.load_state_dict(read)
        np.testing.assert_array_equal(outputs(fresh), outputs(network))


def test_a_network_is_the_same_without_pytorch(kept: Path, tmp_path: Path) -> None:
    run = umbel.load(kept)
    for file, network in zip(umbel.export(run, tmp_path, "onnx"), run.hypotheses, strict=True):
        (found,) = onnxruntime.InferenceSession(file).run(None, {"rows": ROWS.numpy()})
        np.testing.assert_allclose(found, outputs(network), rtol=1e-5)


def test_what_is_not_the_same_when_it_is_read_again_is_not_written(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(content: bytes) -> dict[str, torch.Tensor]:
        return {name: value + 1 for name, value in whole(content).items()}

    whole = safetensors.torch.load
    monkeypatch.setattr("safetensors.torch.load", damaged)
    with pytest.raises(ModelError, match=r"\['weight'\] is not what is read again; nothing was written"):
        umbel.export(umbel.load(kept), tmp_path / "new", "safetensors")
    assert not list((tmp_path / "new").iterdir())


def test_another_form_is_named(kept: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no form 'pickle'; choose from state-dict, safetensors, onnx"):
        umbel.export(umbel.load(kept), tmp_path, "pickle")
