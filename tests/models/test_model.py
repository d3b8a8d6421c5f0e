"""A model's parameters are of three kinds: frozen, shared and local; only the shared ones are what a hypothesis is."""

from __future__ import annotations

import hashlib
import logging
import math
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
from tests.helpers.models import Headed, headed
from umbel import models
from umbel.models import LOSSES, METRICS, Model
from umbel.models.model import Kind, check, find_weights, read_weights
from umbel.protocol.errors import ModelError

HEAD = {"head.weight": (1, 3), "head.bias": (1,)}
BODY = {"body.weight": (3, 2), "body.bias": (3,)}
BIASES = {"body.bias": (3,), "head.bias": (1,)}
Shapes = dict[str, tuple[int, ...]]


def of(network: Callable[[], nn.Module], frozen: str = "", local: str = "") -> Model:
    return Model("own", network, LOSSES["mse"], METRICS["rmse"], tuple(frozen.split()), tuple(local.split()))


def frozen_head() -> nn.Module:
    network = Headed()
    network.head.requires_grad_(False)
    return network


class Owned(Headed):
    """A network that says itself that its head is each client's own."""

    local_parameters = ("head.*",)


# --- three kinds


@pytest.mark.parametrize(
    ("model", "shared", "local", "frozen"),
    [
        (headed(local=""), BODY | HEAD, {}, {}),
        (of(frozen_head), BODY, {}, HEAD),
        (of(Headed, frozen="head.*"), BODY, {}, HEAD),
        (headed(), BODY, HEAD, {}),
        (of(Owned), BODY, HEAD, {}),
        (of(Headed, frozen="body.bias", local="head.*"), {"body.weight": (3, 2)}, HEAD, {"body.bias": (3,)}),
        # What a network freezes or keeps itself stays so, whatever a server asks.
        (of(frozen_head, local="head.* body.bias"), {"body.weight": (3, 2)}, {"body.bias": (3,)}, HEAD),
        (of(Owned, frozen="head.*"), BODY, HEAD, {}),
        (of(Owned, frozen="*.bias"), {"body.weight": (3, 2)}, HEAD, {"body.bias": (3,)}),
        (of(Owned, local="head.weight"), BODY, HEAD, {}),
        # Patterns are of whole names in their own case.
        (of(Headed, frozen="body"), BODY | HEAD, {}, {}),
        (of(Headed, frozen="BODY.*"), BODY | HEAD, {}, {}),
        (of(Headed, frozen="*.bias"), {"body.weight": (3, 2), "head.weight": (1, 3)}, {}, BIASES),
        (of(Headed, frozen="body.bias head.*"), {"body.weight": (3, 2)}, {}, {"body.bias": (3,)} | HEAD),
    ],
)
def test_each_parameter_is_of_one_kind_and_only_shared_ones_are_counted_and_drawn(
    model: Model, shared: Shapes, local: Shapes, frozen: Shapes
) -> None:
    kinds = {Kind.SHARED: shared, Kind.LOCAL: local, Kind.FROZEN: frozen}
    assert model.kinds == {name: kind for kind, names in kinds.items() for name in names}
    assert (model.shapes, model.local_shapes) == (shared, local)
    assert {name: tuple(value.shape) for name, value in model.frozen_values.items()} == frozen
    assert bool(model.frozen_digest) == bool(frozen)
    assert model.num_parameters == sum(math.prod(shape) for shape in shared.values())
    assert {name: value.shape for name, value in model.initial(3).items()} == shared


def test_what_is_shared_starts_the_same_whatever_the_others_are() -> None:
    """A pattern in the run config changes no draw."""
    whole = of(Headed).initial(5)
    for model in (of(Headed, local="head.*"), of(Headed, frozen="head.*"), of(Headed, "head.bias", "head.weight")):
        for name, value in model.initial(5).items():
            np.testing.assert_array_equal(value, whole[name])


# --- what cannot be


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (of(Headed, frozen="conv*"), ("model.no-match", "'conv*'", "body.weight, body.bias, head.weight, head.bias")),
        (of(Headed, local="head.* tail.*"), ("model.no-match", "'tail.*'")),
        (of(Headed, frozen="*.bias", local="head.*"), ("model.two-kinds", "['head.bias']")),
        (of(Headed, frozen="body.*", local="head.*"), ("model.nothing-shared", "body.weight, body.bias, head.weight")),
        (of(Headed, frozen="*"), ("model.nothing-shared",)),
        (of(Owned, local="body.*"), ("model.nothing-shared",)),
    ],
)
def test_patterns_that_cannot_be_used_are_told_with_the_fix(model: Model, reason: tuple[str, ...]) -> None:
    with raises(ModelError, *reason):
        check(model)


# --- what both sides must have alike


def with_head(value: float) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        network = frozen_head()
        nn.init.constant_(network.head.weight, value)
        return network

    return build


def zeros_alone() -> nn.Module:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    return network


def test_the_digest_is_of_the_frozen_values_alone() -> None:
    one, again, other = of(with_head(1.0)), of(with_head(1.0)), of(with_head(1.0 + 1e-7))
    assert one.frozen_digest
    torch.rand(1)  # PyTorch's generator plays no part
    assert one.frozen_digest == again.frozen_digest
    assert one.frozen_digest != other.frozen_digest
    assert len(one.frozen_digest) == len(hashlib.sha256().hexdigest())
    digests = {of(zeros_alone, which).frozen_digest for which in ("0.weight", "1.weight", "0.bias", "1.bias")}
    assert len(digests) == 4, "it tells which parameters are frozen"


# --- fresh local parameters


def generators(*seeds: int) -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in seeds]


def test_each_client_starts_from_local_parameters_of_its_own() -> None:
    before = torch.random.get_rng_state()
    drawn = headed().initial_local(generators(1, 2, 1))
    assert torch.equal(torch.random.get_rng_state(), before), "PyTorch's generator is left alone"
    assert {name: value.shape for name, value in drawn.items()} == {"head.weight": (3, 1, 3), "head.bias": (3, 1)}
    for value in drawn.values():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value[0], value[2])
        assert (value[0] != value[1]).all()


def test_a_fresh_head_is_as_the_network_draws_it() -> None:
    """A linear layer's weights are uniform within 1 / sqrt(inputs)."""
    drawn = headed().initial_local(generators(*range(50)))["head.weight"]
    assert np.abs(drawn).max() <= 3**-0.5
    assert np.abs(drawn).max() > 0.9 * 3**-0.5


def test_a_network_may_draw_its_own() -> None:
    class Counting(Headed):
        def draw_local(self, generator: np.random.Generator) -> dict[str, np.ndarray]:
            return {"head.weight": np.full((1, 3), generator.integers(1, 9)), "head.bias": np.zeros(1)}

    drawn = of(Counting, local="head.*").initial_local(generators(1, 2))
    assert [len(set(row.ravel())) for row in drawn["head.weight"]] == [1, 1]
    assert drawn["head.weight"].dtype == np.float32
    assert not drawn["head.bias"].any()


# --- shared parameters, and their beginning


@pytest.mark.parametrize("name", list(models.MODELS))
def test_initial_parameters_are_those_of_their_seed(name: str) -> None:
    model, before = models.load(name), torch.random.get_rng_state()
    first = model.initial(1)
    assert torch.equal(torch.random.get_rng_state(), before), "PyTorch's generator is left alone"
    torch.rand(1)  # and plays no part
    again, other = model.initial(1), model.initial(2)
    assert {key: value.shape for key, value in first.items()} == model.shapes
    for key, value in first.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, again[key])
        # The biases of the mlp start at 0.
        assert (value != other[key]).any() != (name == "mlp" and key.endswith("bias") and not value.any())


def test_seeds_may_have_64_bits() -> None:
    model = models.load("linear")
    assert (model.initial(2**64 - 1)["weight"] != model.initial(2**63)["weight"]).all()


# --- weights from a file, which both sides must have alike


def started(pretrained: Path | str, **kinds: tuple[str, ...]) -> Model:
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
        drawn = started(tmp_path / name).initial(seed)
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
        first, other = started(file).initial(0), started(file).initial(1)
    for name, value in first.items():
        drawn = name.replace(".", "_") in change
        assert (value != other[name]).any() == drawn
        assert (value == 0.5).all() != drawn
        assert (name in caplog.messages[-1].partition(", except for ")[2]) == drawn


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
    ("name", "content"),
    [
        ("a.safetensors", b"roses"), ("a.pt", b"roses"), ("a.pt", [torch.zeros(2)]),
        ("a.pt", nn.Linear(1, 2).state_dict()), ("b.pt", None),
    ],
)  # fmt: skip
def test_what_is_not_the_models_weights_is_refused(name: str, content: Any, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    with raises(ModelError, "model.pretrained") as error:
        started(tmp_path / name)
    assert "\n" not in error.value.text


def test_frozen_parameters_that_a_file_lacks_would_be_chance(tmp_path: Path) -> None:
    save(tmp_path / "weights.pt", body_bias=None)
    with raises(ModelError, "model.pretrained", "'body.bias'", "'own'"):
        started(tmp_path / "weights.pt", frozen=("body.*",))


def test_the_digest_is_of_the_file_as_well(tmp_path: Path) -> None:
    save(tmp_path / "one.pt")
    shutil.copy(tmp_path / "one.pt", tmp_path / "same.pt")
    save(tmp_path / "other.pt", head_bias=torch.zeros(1))
    digests = {name: started(tmp_path / f"{name}.pt").frozen_digest for name in ("one", "same", "other")}
    assert digests["one"] == digests["same"] != digests["other"]
    assert Model("own", Headed, LOSSES["mse"], METRICS["rmse"]).frozen_digest == ""
