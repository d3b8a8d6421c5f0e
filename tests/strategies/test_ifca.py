"""IFCA: a release belongs to the hypothesis that its client says it chose."""

from __future__ import annotations

import pytest

from tests.helpers.scripted import on
from tests.strategies.conftest import one_round
from umbel.nodes.fleet import Fleet
from umbel.strategies.ifca import IFCA

HYPOTHESES = [(0, 0, 0), (10, 10, 10)]
# Both groups lie across both hypotheses: k-means would group these otherwise.
RELEASE = {0: (0, 0, 0), 1: (1, 1, 1), 2: (10, 10, 10), 3: (11, 11, 11)}
CHOICE = {0: 0, 1: 1, 2: 0, 3: 1}


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_round_averages_the_clients_that_chose_a_hypothesis(nodes: int) -> None:
    following, counts = one_round(on(Fleet(clients_per_round=4), IFCA()), HYPOTHESES, RELEASE, CHOICE, nodes)
    assert following.tolist() == [[5, 5, 5], [6, 6, 6]]
    assert counts["groups"] == [2, 2]


def test_choices_are_those_of_the_clients_that_released() -> None:
    some = RELEASE | {1: None, 2: None}
    following, _ = one_round(on(Fleet(clients_per_round=4), IFCA()), HYPOTHESES, some, CHOICE)
    assert following.tolist() == [[0, 0, 0], [11, 11, 11]]
