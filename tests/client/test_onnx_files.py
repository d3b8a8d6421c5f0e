"""The graph of a file, before it is written; what files give is in `tests.cli.test_exports`."""

from __future__ import annotations

import torch

from umbel import models
from umbel.client.exports import _Graph
from umbel.data import Schema
from umbel.models.fit import traits_of


def test_a_single_output_of_a_loss_of_ones_own_is_no_class_of_several() -> None:
    target = {"name": "grade", "type": "category", "categories": ["bad", "fair", "good"]}
    schema = Schema(target=target, features=[{"name": "age", "type": "number"}])
    model = models.load("linear inputs=1 outputs=1")
    graph = _Graph(model.module, traits_of(model, (1,)), schema)
    assert graph.results == ["prediction"]
    (found,) = graph(torch.tensor([2.0, torch.nan], dtype=torch.float64))
    torch.testing.assert_close(found[:1], model.module(torch.tensor([[2.0]]))[:, 0])
    assert found[1].isnan()
