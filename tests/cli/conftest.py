"""A run of the app, in this process, that several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.paper import paper_run
from umbel.simulation import in_process

SMALL = {"rounds": 3, "restarts": 1, "seed": 3, "clients-per-round": 20}


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of the demo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UMBEL_HOME", str(tmp_path_factory.mktemp("kept")))
        return in_process.run(paper_run() | SMALL)
