"""What the tests of a node share."""

from __future__ import annotations

import pytest

from tests.helpers.paper import sites_accept_the_paper as sites_accept_the_paper


@pytest.fixture(scope="module", autouse=True)
def small_networks(one_thread: None) -> None:
    """On networks as small as these, threads on busy cores mostly wait for each other."""
