"""What the tests of experiments share: sweeps without Ray."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import umbel.research.experiments.sweep
from umbel.research.experiments.runs import Finished, Spec


def read_csv(folder: Path) -> list[dict[str, str]]:
    with (folder / "table.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Do the runs in this process instead of in Ray's; return the names of those that were done."""
    done: list[str] = []

    def each(specs: Any, task: Callable[[Mapping[str, Any]], Finished]) -> Iterator[tuple[Spec, Finished | None, str]]:
        for spec in specs:
            done.append(spec.name)
            yield spec, *umbel.research.experiments.sweep._attempt(task, spec.config, None)

    monkeypatch.setattr(umbel.research.experiments.sweep, "_each", each)
    return done
