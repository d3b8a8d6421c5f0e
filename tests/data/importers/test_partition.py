"""Partitioners deal the rows of a central data set to clients, from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from umbel.data.importers import Dirichlet, Uniform, from_arrays
from umbel.protocol.errors import DatasetError

LABELS = np.repeat(np.arange(4), 50)


@pytest.mark.parametrize("partitioner", [Uniform(7), Dirichlet(7, 0.5)])
def test_every_row_goes_to_a_client_and_every_client_has_a_row(partitioner: Any) -> None:
    dealt = partitioner.deal(200, LABELS)
    assert sorted(set(dealt)) == list(range(7))
    np.testing.assert_array_equal(dealt, partitioner.deal(200, LABELS))
    other = type(partitioner)(**(vars(partitioner) | {"seed": 1})).deal(200, LABELS)
    assert (dealt != other).any()


def test_uniform_is_even_and_a_small_alpha_leaves_a_client_few_classes() -> None:
    assert sorted(np.bincount(Uniform(3).deal(10, LABELS[:10]))) == [3, 3, 4]

    def classes(alpha: float) -> float:
        dealt = Dirichlet(4, alpha).deal(200, LABELS)
        return float(np.mean([len(np.unique(LABELS[dealt == client])) for client in range(4)]))

    assert classes(0.05) < 3 < classes(100) == 4


def test_shares_of_a_class_are_those_drawn() -> None:
    # One class alone: its 50 rows go by the first draw of Dir(1, 1, 1), after that of their order.
    generator = np.random.default_rng(0)
    generator.permutation(50)
    borders = np.rint(np.cumsum(generator.dirichlet(np.ones(3))) * 50)
    dealt = Dirichlet(3, 1.0).deal(50, np.zeros(50, np.int64))
    assert np.bincount(dealt).tolist() == np.diff(borders, prepend=0).tolist()


@pytest.mark.parametrize(
    ("partitioner", "labels", "reason"),
    [
        (Uniform(0), LABELS, ("data.partition", "200 rows", "200 clients")),
        (Uniform(201), LABELS, ("data.partition", "201")),
        (Uniform(2.5), LABELS, ("data.partition", "2.5")),  # type: ignore[arg-type]
        (Dirichlet(3, np.inf), LABELS, ("data.partition", "inf")),
        (Dirichlet(3, 1e308), LABELS, ("data.partition", "1e+308")),
        (Dirichlet(3, 0.0), LABELS, ("data.partition", "0.0")),
        (Dirichlet(3, -1), LABELS, ("data.partition",)),
        (Dirichlet(3, 1), LABELS / 2, ("data.classes",)),
        (Dirichlet(190, 0.01), LABELS, ("data.partition", "190 clients")),
    ],
)
def test_what_cannot_be_dealt_is_refused(partitioner: Any, labels: Any, reason: tuple[str, ...]) -> None:
    with raises(DatasetError, *reason):
        partitioner.deal(len(labels), labels)


# --- a user's own


@dataclass
class Own:
    """A partitioner that deals by a function of the labels."""

    rule: Callable[[Any], Any]

    def deal(self, rows: int, labels: Any) -> Any:
        assert rows == len(labels)
        return self.rule(labels)


def by_own(deal: Callable[[Any], Any]) -> list[str]:
    dealt = from_arrays(np.zeros((8, 1)), np.arange(8.0)[::-1], client=Own(deal))
    return sorted(dealt.dataset.names)


@pytest.mark.parametrize("kind", [list, np.uint8, np.int64])
def test_numbers_of_clients_may_be_of_any_integers(kind: Any) -> None:
    assert by_own(lambda labels: kind(np.arange(len(labels)) % 4)) == [f"client-{c}" for c in range(4)]


@pytest.mark.parametrize(
    "deal",
    [
        lambda labels: None,
        lambda labels: np.arange(len(labels) - 1),
        lambda labels: np.zeros((len(labels), 1), int),
        lambda labels: np.arange(len(labels)) - 1,
        lambda labels: np.arange(len(labels)) / 2,
        lambda labels: ["north"] * len(labels),
        lambda labels: (c for c in range(len(labels))),
    ],
)
def test_a_partitioner_that_gives_rows_no_numbers_is_refused(deal: Callable[[Any], Any]) -> None:
    with raises(DatasetError, "data.partition", "Own.deal"):
        by_own(deal)


def test_a_partitioner_is_an_object() -> None:
    with raises(DatasetError, "data.partition", "Own()"):
        from_arrays(np.zeros((8, 1)), np.zeros(8), client=Own)


def test_a_partitioner_cannot_give_rows_the_targets_of_others() -> None:
    def deal(labels: Any) -> Any:
        labels.sort()
        return np.arange(len(labels)) % 4

    with pytest.raises(ValueError, match="read-only"):
        by_own(deal)
