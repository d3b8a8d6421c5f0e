"""What the tests of a node share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.paper import sites_accept_the_paper as sites_accept_the_paper


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: on networks as small as these, threads on busy cores mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
