"""A failure at a client is that client's alone, and only its site learns of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.sites import own, simulated
from umbel.privacy.gate.undisclosed import Some, undisclosed

Compute = Callable[[Some], list[NDArray[Any]]]
CLIENTS = 5
BATCHES: list[Some] = [[0, 3], [1, 4], slice(2, 3)]


def nothing() -> list[NDArray[Any]]:
    return [np.full(CLIENTS, -1)]


def tens(
    failing: frozenset[int] = frozenset(), error: Callable[[], BaseException] = MemoryError
) -> tuple[Compute, list[list[int]]]:
    """Return what gives each client ten times its place, or fails at some, and the calls that it gets."""
    calls: list[list[int]] = []

    def compute(some: Some) -> list[NDArray[Any]]:
        places = np.arange(CLIENTS)[some]
        calls.append(places.tolist())
        if failing & {*places.tolist()}:
            raise error()
        return [10 * places]

    return compute, calls


def test_a_site_computes_its_batches() -> None:
    compute, calls = tens()
    (found,) = undisclosed(own(), CLIENTS, compute, nothing, batches=BATCHES)
    assert found.tolist() == [0, 10, 20, 30, 40]
    assert calls == [[0, 3], [1, 4], [2]]


def test_without_batches_each_client_is_computed_alone() -> None:
    compute, calls = tens()
    (found,) = undisclosed(own(), CLIENTS, compute, nothing)
    assert found.tolist() == [0, 10, 20, 30, 40]
    assert calls == [[c] for c in range(CLIENTS)]


def test_where_a_batch_fails_each_of_its_clients_is_computed_alone(caplog: pytest.LogCaptureFixture) -> None:
    compute, calls = tens(frozenset({4}))
    (found,) = undisclosed(own(), CLIENTS, compute, nothing, batches=BATCHES)
    assert found.tolist() == [0, 10, 20, 30, -1], "one client's failure is no other's"
    assert calls == [[0, 3], [1, 4], [1], [4], [2]]
    assert len(caplog.messages) == 1


def test_a_user_can_end_a_node() -> None:
    compute, _ = tens(frozenset({1}), KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        undisclosed(own(), CLIENTS, compute, nothing, batches=BATCHES)


def test_losses_without_noise_need_no_protection() -> None:
    compute, calls = tens()
    (found,) = undisclosed(own(), CLIENTS, compute, nothing, needed=False, batches=BATCHES)
    assert found.tolist() == [0, 10, 20, 30, 40]
    assert calls == [[0, 3], [1, 4], [2]]
    compute, _ = tens(frozenset({4}))
    with pytest.raises(MemoryError):
        undisclosed(own(), CLIENTS, compute, nothing, needed=False, batches=BATCHES)


def test_a_simulation_computes_all_together_and_raises() -> None:
    compute, calls = tens()
    undisclosed(simulated(), CLIENTS, compute, nothing, batches=BATCHES)
    assert calls == [[0, 1, 2, 3, 4]]
    with pytest.raises(MemoryError):
        undisclosed(simulated(), CLIENTS, tens(frozenset({4}))[0], nothing)
