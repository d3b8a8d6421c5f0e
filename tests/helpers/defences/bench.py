"""A worker of audits in this process, which saves the start of another."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from umbel_lab.attacks.defences.process import TIMEOUT, Target, Worker
from umbel_lab.attacks.defences.worker.frames import Arrays
from umbel_lab.attacks.defences.worker.serve import Bench


class WorkerHere(Worker):
    """Answers requests as the other process would."""

    def __init__(
        self,
        target: Target,
        python: str = "",
        mod: Target | None = None,
        clip_norm: float | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self._target, self._mod, self._clip_norm, self._bench = target, mod, clip_norm, Bench()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""

    def _answer(self, header: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        return self._bench.answer(header, arrays)
