"""A failure at a client is that client's alone, and only its site learns of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.sites import own, simulated
from umbel.privacy.site import work
from umbel.privacy.site.work import Places, Work, computed

Compute = Callable[[Places], list[NDArray[Any]]]
CLIENTS = 5
BATCHES: dict[str, Any] = {"batches": [[0, 3], [1, 4], slice(2, 3)]}
THREADS: dict[str, Any] = {"threads": 2}


def nothing(some: Places) -> list[NDArray[Any]]:
    return [np.full(len(np.arange(CLIENTS)[some]), -1)]


def tens(
    failing: frozenset[int] = frozenset(), error: Callable[[], BaseException] = MemoryError
) -> tuple[Compute, list[list[int]]]:
    """Return what gives each client ten times its place, or fails at some, and the calls that it gets."""
    calls: list[list[int]] = []

    def compute(some: Places) -> list[NDArray[Any]]:
        places = np.arange(CLIENTS)[some]
        calls.append(places.tolist())
        if failing & {*places.tolist()}:
            raise error()
        return [10 * places]

    return compute, calls


ALONE: list[list[int]] = [[client] for client in range(CLIENTS)]


@pytest.mark.parametrize(
    ("how", "failing", "hides", "results", "asked"),
    [
        (BATCHES, None, True, [0, 10, 20, 30, 40], [[0, 3], [1, 4], [2]]),
        ({}, None, True, [0, 10, 20, 30, 40], ALONE),
        (BATCHES, 4, True, [0, 10, 20, 30, -1], [[0, 3], [1, 4], [1], [4], [2]]),
        (BATCHES, None, False, [0, 10, 20, 30, 40], [[0, 3], [1, 4], [2]]),  # losses without noise need no protection
    ],
)
def test_where_a_batch_fails_each_of_its_clients_is_computed_alone(
    how: dict[str, Any],
    failing: int | None,
    hides: bool,
    results: list[int],
    asked: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One client's failure is no other's."""
    compute, calls = tens(frozenset() if failing is None else frozenset({failing}))
    (found,) = computed(own(), CLIENTS, Work(compute, **how), nothing, hides=hides)
    assert (found.tolist(), calls) == (results, asked)
    assert len(caplog.messages) == (failing is not None)


@pytest.mark.parametrize(("error", "hides"), [(MemoryError, False), (KeyboardInterrupt, True)])
def test_what_needs_no_protection_fails_openly_and_a_user_can_end_a_node(
    error: type[BaseException], hides: bool
) -> None:
    with pytest.raises(error):
        computed(own(), CLIENTS, Work(tens(frozenset({4}), error)[0], **BATCHES), nothing, hides=hides)


def test_clients_share_the_time_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may use half of its clients' time. If it fails, each of them still has the other half of its own."""
    limits: list[float] = []

    def limited(seconds: float, _: bool) -> AbstractContextManager[None]:
        limits.append(seconds)
        return nullcontext()

    monkeypatch.setattr(work, "time_limit", limited)
    computed(own(max_seconds=10.0), CLIENTS, Work(tens(frozenset({4}))[0], **BATCHES), nothing)
    assert limits == [2.0, 2.0, 1.0, 1.0, 2.0]


def test_a_simulation_computes_all_together_and_raises() -> None:
    compute, calls = tens()
    computed(simulated(), CLIENTS, Work(compute, **BATCHES), nothing)
    assert calls == [[0, 1, 2, 3, 4]]
    with pytest.raises(MemoryError):
        computed(simulated(), CLIENTS, Work(tens(frozenset({4}))[0]), nothing)


def test_threads_compute_clients_at_the_same_time() -> None:
    """Two clients wait for each other."""
    pair = threading.Barrier(2)

    def compute(some: Places) -> list[NDArray[Any]]:
        places = np.arange(4)[some]
        pair.wait()
        return [10 * places]

    (found,) = computed(own(), 4, Work(compute, **THREADS), nothing)
    assert found.tolist() == [0, 10, 20, 30]


@pytest.mark.parametrize("how", [{}, THREADS])
@pytest.mark.parametrize("error", [MemoryError, SystemExit])
def test_a_failure_is_one_clients(
    error: type[BaseException], how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A network that ends Python for some rows would end the node: the server would learn of them by silence."""
    (found,) = computed(own(), CLIENTS, Work(tens(frozenset({3}), error)[0], **how), nothing)
    assert found.tolist() == [0, 10, 20, -1, 40]
    assert len(caplog.messages) == 1


def test_a_client_that_never_ends_costs_no_other_client_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    def until_time_is_over(results: Sequence[Future[Any]], seconds: float) -> Iterator[Future[Any]]:
        assert seconds == 3600
        yield from islice(as_completed(results), CLIENTS - 1)
        raise TimeoutError

    monkeypatch.setattr("umbel.privacy.site.work.as_completed", until_time_is_over)

    def compute(some: Places) -> list[NDArray[Any]]:
        if some == slice(0, 1):
            end.wait()
        return [10 * np.arange(CLIENTS)[some]]

    try:
        (found,) = computed(own(max_seconds=3600), CLIENTS, Work(compute, **THREADS), nothing)
    finally:
        end.set()
    assert found.tolist() == [-1, 10, 20, 30, 40]
