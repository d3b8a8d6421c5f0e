"""The parts of Flower that are not public, imported here and nowhere else in the app.

They move from one release to the next; `tests/protocol/test_flower.py` says which is gone.
"""

from flwr.common.constant import ErrorCode, SType
from flwr.supercore import log
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["ErrorCode", "Run", "SType", "TaskIdentity", "log"]
