"""What an object can do tells its kind; each kind is asked for a release as its framework does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp.mod import fixedclipping_mod
from numpy.typing import NDArray

from umbel_lab.attacks.defences.worker import Asked, Kind, Refusal, kind_of, maker, required

UPDATE = {"w": np.array([[3.0, 4.0]], np.float32), "b": np.zeros(2, np.float32)}


def made(one: Any, **options: Any) -> Kind:
    return kind_of(lambda: one, **options)


def test_a_function_takes_a_list_a_dictionary_or_a_flat_array_and_nothing_else_is_a_target() -> None:
    functions: list[Callable[..., Any]] = [
        lambda arrays: [-array for array in arrays],
        lambda named: {name: -array for name, array in named.items()},
        lambda flat: -flat,
    ]
    for function in functions:
        kind = made(function)
        assert kind.name == "function of arrays"
        left, _ = kind.release(Asked(UPDATE, 1))
        assert {name: value.tolist() for name, value in left.items()} == {"w": [[-3, -4]], "b": [0, 0]}
    others: list[Any] = [lambda arrays: 7, lambda arrays: arrays[:1], 7, "text"]
    for other in others:
        with pytest.raises(TypeError):
            made(other)


def test_a_mod_needs_three_arguments_and_its_arrays_are_matched_by_name_or_position() -> None:
    assert required(lambda msg, context, call_next: msg) == 3
    assert required(lambda msg, context, call_next, more=1: msg) == 3
    seen = []

    def mod(msg: Any, context: Any, call_next: Any) -> Any:
        seen.append(dict(msg.content.config_records["config"]))
        return call_next(msg, context)

    def unnamed(msg: Any, context: Any, call_next: Any) -> Any:
        reply = call_next(msg, context)
        reply.content["arrays"] = ArrayRecord(reply.content["arrays"].to_numpy_ndarrays())
        return reply

    kind = made(mod, clip_norm=2)
    arrays, numbers = kind.release(Asked(UPDATE, 5, loss=0.25, examples=9))
    assert kind.name == "Flower Mod"
    assert arrays["w"].tolist() == [[3, 4]]
    assert numbers == {"metrics.train_loss": 0.25, "metrics.num-examples": 9, "client.rows": 9}
    assert (seen[0]["server-round"], seen[0]["clipping_norm"]) == (5, 2.0), "what the server sent"
    left, _ = made(unnamed).release(Asked(UPDATE, 1))
    assert {name: value.tolist() for name, value in left.items()} == {"w": [[3, 4]], "b": [0, 0]}
    with pytest.raises(Refusal):  # it finds no clip norm in the message, and replies an error
        made(fixedclipping_mod).release(Asked(UPDATE, 1))
    left, _ = made(fixedclipping_mod, clip_norm=1.0).release(Asked(UPDATE, 1))
    np.testing.assert_allclose(left["w"], [[0.6, 0.8]], rtol=1e-6)


WRAPPER = "flwr.serverapp.strategy:DifferentialPrivacyClientSideFixedClipping"
GIVEN = {"noise_multiplier": 0.0, "clipping_norm": 1.0, "num_sampled_clients": 4}


def test_a_wrapper_wraps_fedavg_and_averages_the_canary_with_others() -> None:
    make, given = maker(WRAPPER, [], GIVEN)
    assert given == [*GIVEN]
    kind = kind_of(make)
    facts = kind.facts()
    assert (facts["share"], facts["clips"], facts["clip_norm"], facts["deviation"]) == (0.25, False, 1.0, 0.0)
    np.testing.assert_allclose(kind.release(Asked(UPDATE, 1))[0]["w"], [[0.75, 1]], atol=0.01)
    kind = kind_of(maker(WRAPPER, [], GIVEN)[0], ("flwr.clientapp.mod:fixedclipping_mod", None, {}))
    assert kind.facts()["clips"], "its clients run the Mod"
    np.testing.assert_allclose(kind.release(Asked(UPDATE, 1))[0]["w"], [[0.15, 0.2]], atol=0.01)


class Dxo:
    """As NVFlare's, which is not installed here."""

    def __init__(self, data_kind: str, data: dict[str, NDArray[Any]]) -> None:
        self.data_kind, self.data = data_kind, data

    def to_shareable(self) -> Any:
        return {"DXO": self}


class Clip:
    """A filter of NVFlare's that clips one of two arrays, and leaves the other out."""

    gamma = 2.0

    def process(self, shareable: Any, context: Any) -> Any:
        dxo = shareable["DXO"]
        assert dxo.data_kind == "WEIGHT_DIFF"
        return {"DXO": Dxo(dxo.data_kind, {"w": np.clip(dxo.data["w"], -self.gamma, self.gamma)})}

    def get_privacy_spent(self) -> float:
        return 3.5


def test_a_filter_sees_a_difference_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    dxo = {"DXO": Dxo, "DataKind": SimpleNamespace(WEIGHT_DIFF="WEIGHT_DIFF"), "from_shareable": lambda one: one["DXO"]}
    contexts = {"FLContext": SimpleNamespace}
    for name in ("nvflare", "nvflare.apis", "nvflare.apis.dxo", "nvflare.apis.fl_context"):
        module = ModuleType(name)
        vars(module).update(dxo if name.endswith("dxo") else contexts)
        monkeypatch.setitem(sys.modules, name, module)
    kind = made(Clip())
    left, _ = kind.release(Asked(UPDATE, 1))
    assert kind.facts()["box"] == 2.0
    assert {name: value.tolist() for name, value in left.items()} == {"w": [[2, 2]]}
    assert kind.spent() == [3.5, 0.0]


def test_an_optimizer_protects_a_row_of_its_batch() -> None:
    """Opacus itself is not installed here; the stand-in clips and averages gradients of rows as its optimizer does."""

    class Clipping:
        noise_multiplier, max_grad_norm, expected_batch_size, loss_reduction = 0.5, 1.0, 4, "mean"

        def __init__(self) -> None:
            self.param_groups: list[dict[str, Any]] = [{"params": []}]

        def step(self) -> None:
            parameters = self.param_groups[0]["params"]
            flat = torch.cat([one.grad_sample.reshape(4, -1) for one in parameters], dim=1)
            factor = (self.max_grad_norm / flat.norm(dim=1).clamp(min=1e-9)).clamp(max=1)
            for one in parameters:
                one.grad = torch.einsum("i,i...", factor, one.grad_sample) / self.expected_batch_size

    kind = made(Clipping())
    facts = kind.facts()
    assert (facts["share"], facts["rows"], facts["deviation"]) == (0.25, True, 0.125)
    np.testing.assert_allclose(kind.release(Asked(UPDATE, 1))[0]["w"], [[0.15, 0.2]], rtol=1e-6)
