"""A model may start from weights in a file, which both sides must have alike."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from tests.helpers.errors import raises
from tests.helpers.models import Headed
from umbel import models
from umbel.models import LOSSES, METRICS, Model
from umbel.models.model import check, find_weights, read_weights
from umbel.protocol.errors import ModelError


def of(pretrained: Path | str, **kinds: tuple[str, ...]) -> Model:
    """Return the model of a body and a head that starts from a file."""
    model = Model("own", Headed, LOSSES["mse"], METRICS["rmse"], pretrained=str(pretrained), **kinds)
    check(model)
    return model


def save(path: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Write the weights of a body and a head, some of them changed, or left out where they are None."""
    state = {name: torch.full_like(value, 0.5) for name, value in Headed().state_dict().items()}
    state |= {name.replace("_", "."): value for name, value in changes.items()}
    state = {name: value for name, value in state.items() if value is not None}
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)
    return state


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "half.pth"])
def test_a_model_starts_from_a_file(name: str, tmp_path: Path) -> None:
    state = save(tmp_path / name)
    if name == "half.pth":  # half precision becomes single
        torch.save({key: value.half() for key, value in state.items()}, tmp_path / name)
    for seed in (0, 1):
        drawn = of(tmp_path / name).initial(seed)
        assert list(drawn) == list(Headed().state_dict())
        for key, value in drawn.items():
            np.testing.assert_array_equal(value, state[key].numpy())
            assert value.dtype == np.float32


@pytest.mark.parametrize(
    "change", [{"head_weight": torch.zeros(7, 3), "head_bias": None}, {"head_bias": torch.zeros(9)}]
)
def test_a_head_of_another_shape_is_drawn(
    change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "weights.pt"
    save(file, **change)
    with caplog.at_level(logging.INFO):
        first, other = of(file).initial(0), of(file).initial(1)
    for name, value in first.items():
        drawn = name.replace(".", "_") in change
        assert (value != other[name]).any() == drawn
        assert (value == 0.5).all() != drawn
        assert (name in caplog.messages[-1].partition(", but for ")[2]) == drawn


def test_a_file_by_its_name_is_among_umbels_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    save(tmp_path / "models" / "weights.pt")
    assert find_weights("weights.pt") == tmp_path / "models" / "weights.pt"
    model = models.load("tests.helpers.models:Headed", "mse", pretrained="weights.pt")
    assert (model.initial(3)["body.bias"] == 0.5).all()


def test_a_state_dict_may_lie_in_a_checkpoint(tmp_path: Path) -> None:
    state = save(tmp_path / "weights.pt")
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "checkpoint.pt")
    assert read_weights(tmp_path / "checkpoint.pt").keys() == state.keys()


class Payload:
    """What a file of weights could do to who opens it."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return Path.touch, ("opened",)  # type: ignore[return-value]


def test_a_file_runs_no_code(tmp_path: Path) -> None:
    torch.save({"weight": Payload()}, tmp_path / "weights.pt")
    with raises(ModelError, "model.pretrained"):
        read_weights(tmp_path / "weights.pt")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.safetensors", b"roses", "a.safetensors"),
        ("a.pt", b"roses", "a.pt"),
        ("a.pt", [torch.zeros(2)], "state dict"),
        ("a.pt", nn.Linear(1, 2).state_dict(), "'own'"),
        ("b.pt", None, "b.pt"),
    ],
)
def test_what_is_not_the_models_weights_is_refused(name: str, content: Any, reason: str, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    with raises(ModelError, "model.pretrained", reason) as error:
        of(tmp_path / name)
    assert "\n" not in error.value.text


def test_frozen_parameters_that_a_file_lacks_would_be_chance(tmp_path: Path) -> None:
    save(tmp_path / "weights.pt", body_bias=None)
    with raises(ModelError, "model.pretrained", "'body.bias'", "'own'"):
        of(tmp_path / "weights.pt", frozen=("body.*",))


# --- what both sides must have alike


def test_the_digest_is_of_the_file_as_well(tmp_path: Path) -> None:
    save(tmp_path / "one.pt")
    shutil.copy(tmp_path / "one.pt", tmp_path / "same.pt")
    save(tmp_path / "other.pt", head_bias=torch.zeros(1))
    digests = {name: of(tmp_path / f"{name}.pt").frozen_digest for name in ("one", "same", "other")}
    assert digests["one"] == digests["same"] != digests["other"]
    assert Model("own", Headed, LOSSES["mse"], METRICS["rmse"]).frozen_digest == ""
