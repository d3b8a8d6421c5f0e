"""What the tests of datasets share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.datasets import FEATURES, MANIFEST, OFFSETS, TARGETS
from umbel.data import write_dataset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The small dataset on disk, alone in its parent folder."""
    path = tmp_path / "data" / "small"
    write_dataset(path, MANIFEST, FEATURES, TARGETS, OFFSETS)
    return path
