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


def test_a_site_computes_its_batches() -> None:
    compute, calls = tens()
    (found,) = computed(own(), CLIENTS, Work(compute, **BATCHES), nothing)
    assert found.tolist() == [0, 10, 20, 30, 40]
    assert calls == [[0, 3], [1, 4], [2]]


def test_without_batches_each_client_is_computed_alone() -> None:
    compute, calls = tens()
    (found,) = computed(own(), CLIENTS, Work(compute), nothing)
    assert found.tolist() == [0, 10, 20, 30, 40]
    assert calls == [[c] for c in range(CLIENTS)]


def test_where_a_batch_fails_each_of_its_clients_is_computed_alone(caplog: pytest.LogCaptureFixture) -> None:
    compute, calls = tens(frozenset({4}))
    (found,) = computed(own(), CLIENTS, Work(compute, **BATCHES), nothing)
    assert found.tolist() == [0, 10, 20, 30, -1], "one client's failure is no other's"
    assert calls == [[0, 3], [1, 4], [1], [4], [2]]
    assert len(caplog.messages) == 1


def test_clients_share_the_time_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may use half of its clients' time. If it fails, each of them still has the other half of its own."""
    limits: list[float] = []

    def limited(seconds: float, _: bool) -> AbstractContextManager[None]:
        limits.append(seconds)
        return nullcontext()

    monkeypatch.setattr(work, "time_limit", limited)
    computed(own(max_seconds=10.0), CLIENTS, Work(tens(frozenset({4}))[0], **BATCHES), nothing)
    assert limits == [2.0, 2.0, 1.0, 1.0, 2.0]


def test_a_user_can_end_a_node() -> None:
    compute, _ = tens(frozenset({1}), KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        computed(own(), CLIENTS, Work(compute, **BATCHES), nothing)


def test_losses_without_noise_need_no_protection() -> None:
    compute, calls = tens()
    (found,) = computed(own(), CLIENTS, Work(compute, **BATCHES), nothing, hides=False)
    assert found.tolist() == [0, 10, 20, 30, 40]
    assert calls == [[0, 3], [1, 4], [2]]
    compute, _ = tens(frozenset({4}))
    with pytest.raises(MemoryError):
        computed(own(), CLIENTS, Work(compute, **BATCHES), nothing, hides=False)


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
