"""What the tests of the privacy layer share."""

from __future__ import annotations

import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture(autouse=True, scope="session")
def task() -> None:
    """An identity for this process: Flower's own processes have one, and a Message needs it."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
