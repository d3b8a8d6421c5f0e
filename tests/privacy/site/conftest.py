"""What the tests of the privacy layer share."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from tests.helpers.paper import sites_accept_the_paper as sites_accept_the_paper


@pytest.fixture
def node_log() -> Iterator[io.StringIO]:
    """What Flower logs on the node."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger("flwr").addHandler(handler)
    yield text
    logging.getLogger("flwr").removeHandler(handler)
