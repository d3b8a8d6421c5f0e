"""Hugging Face data sets become datasets.

The library is large: a stand-in with the few methods that are used takes its place, and the library's where it is
installed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import umbel
from tests.helpers.errors import raises
from umbel.protocol.errors import DatasetError


@dataclass
class StandIn:
    """A `datasets.Dataset` of columns."""

    columns: dict[str, Any]
    features: dict[str, Any] = field(default_factory=dict)

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def select_columns(self, names: list[str]) -> StandIn:
        return StandIn({name: self.columns[name] for name in names}, self.features)

    def select(self, rows: list[int]) -> StandIn:
        return StandIn({name: [values[row] for row in rows] for name, values in self.columns.items()}, self.features)

    def with_format(self, name: str) -> StandIn:
        assert name == "numpy"
        return self

    def __getitem__(self, rows: slice) -> dict[str, Any]:
        return {name: self._array(values[rows]) for name, values in self.columns.items()}

    @staticmethod
    def _array(values: list[Any]) -> Any:
        if len({np.shape(value) for value in values}) == 1:
            return np.array(values)
        ragged = np.empty(len(values), object)
        ragged[:] = [np.array(value) for value in values]
        return ragged


COLUMNS = {
    "ids": [[1, 2, 3], [4, 0, 1], [2, 2, 2], [3, 1, 0]],
    "label": [0, 1, 1, 0],
    "who": ["a", "b", "a", "b"],
    "x": [1.0, 2.0, 3.0, 4.0],
}


def stand_in(columns: dict[str, Any]) -> Any:
    return StandIn(columns, {"label": SimpleNamespace(names=["no", "yes"])})


def real(columns: dict[str, Any]) -> Any:
    from datasets import ClassLabel, Dataset, Features, List, Value

    kinds = {"ids": List(Value("int32")), "label": ClassLabel(names=["no", "yes"])}
    kinds |= {"who": Value("string"), "x": Value("float32")}
    return Dataset.from_dict(columns, features=Features(kinds))


@pytest.fixture(params=[stand_in, real])
def dataset(request: pytest.FixtureRequest) -> Any:
    if request.param is real and find_spec("datasets.arrow_dataset" if find_spec("datasets") else "datasets") is None:
        pytest.skip("the library datasets is not installed")
    return request.param


class ByParity:
    """A partitioner as those of Flower Datasets."""

    num_partitions = 2
    dataset: Any

    def load_partition(self, partition_id: int) -> Any:
        return self.dataset.select(list(range(partition_id, len(self.dataset), 2)))


def rows(data: Any, name: str) -> Any:
    return data.dataset.client(list(data.dataset.names).index(name))


@pytest.mark.parametrize("client", ["who", ByParity()])
def test_sequences_of_tokens_by_a_column_or_a_partitioner_of_flower_datasets(dataset: Any, client: Any) -> None:
    options: dict[str, Any] = {"client": client, "features": "ids"}
    data = umbel.from_datasets(dataset(COLUMNS), target="label", tokens=5, **options)
    features, targets = rows(data, "a" if client == "who" else "client-0")
    assert (features.tolist(), targets.tolist()) == ([[1, 2, 3], [2, 2, 2]], [0, 1])
    assert features.dtype.kind == "i"
    assert data.manifest.units["target"]["categories"] == ["no", "yes"]
    data = umbel.from_datasets(dataset(COLUMNS), target=None, tokens=True, **options)
    features, targets = rows(data, "b" if client == "who" else "client-1")
    assert (features.tolist(), targets.tolist()) == ([[4, 0], [3, 1]], [[0, 1], [1, 0]])
    for dealer in (umbel.Uniform(2), ByParity()):
        dealt = umbel.from_datasets(dataset(COLUMNS), client=dealer, features=["x"], target="label")
        assert sorted(dealt.dataset.names) == ["client-0", "client-1"]
    assert rows(dealt, "client-0")[0].tolist() == [[1], [3]]


def test_numbers_and_labels(dataset: Any) -> None:
    data = umbel.from_datasets(dataset(COLUMNS), client="who", features=["x"], target="label")
    features, targets = rows(data, "b")
    assert (features.tolist(), targets.tolist()) == ([[2], [4]], [1, 0])
    assert (data.manifest.model, data.manifest.loss) == ("linear inputs=1 outputs=2", "cross-entropy")
    layout = data.manifest.layout
    assert layout is not None
    assert layout.target.categories == ["no", "yes"]
    never = COLUMNS | {"label": [1, 1, 1, 1]}
    told: dict[str, Any] = {"columns": {"label": {"unit": "vote"}}}
    layout = umbel.from_datasets(dataset(never), client="who", features=["x"], target="label", **told).manifest.layout
    assert layout is not None
    assert (layout.target.categories, layout.target.unit) == (["no", "yes"], "vote")


def test_what_does_not_fit_is_refused(dataset: Any) -> None:
    ragged = COLUMNS | {"ids": [[1], [2, 3], [1], [2]]}
    for columns, options, reason in [
        (COLUMNS, {"target": "y"}, ("data.missing-column", "'y'", "ids, label, who, x")),
        (ragged, {"target": "label", "tokens": 5}, ("data.shape", "ids", "(1,)", "(2,)")),
    ]:
        with raises(DatasetError, *reason):
            umbel.from_datasets(dataset(columns), client="who", features="ids", **options)
    with raises(DatasetError, "data.one-split"):
        umbel.from_datasets({"train": dataset(COLUMNS)}, client="who", target="label")
