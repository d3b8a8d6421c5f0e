"""Each test hears what the Mods say, also what an earlier one has heard."""

from __future__ import annotations

import pytest

from umbel.mods import laplace


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    laplace._say.cache_clear()
