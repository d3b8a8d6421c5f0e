"""What the tests of federations share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.federations import FEATURES, MANIFEST, OFFSETS, TARGETS
from umbel.data import write_federation


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The small federation on disk, alone in its parent folder."""
    path = tmp_path / "data" / "small"
    write_federation(path, MANIFEST, FEATURES, TARGETS, OFFSETS)
    return path
