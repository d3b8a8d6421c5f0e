"""What the tests of Mods share. Each test hears what the Mods say, also what an earlier one has heard."""

from __future__ import annotations

import pytest

from tests.privacy.site.conftest import node_log as node_log
from tests.privacy.site.conftest import sites_accept_the_paper as sites_accept_the_paper
from umbel.mods import laplace


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    laplace._say.cache_clear()
