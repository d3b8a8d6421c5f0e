"""Asking one client again and again."""

from __future__ import annotations

import pytest
import torch

from umbel.models.model import Parameters
from umbel.protocol.errors import FleetError
from umbel.research.attacks.victims import averaged


class Answers:
    """Answers 1, 2, 3, ... and refuses from some number on."""

    def __init__(self, until: int) -> None:
        self.until, self.given = until, 0

    def __call__(self) -> list[Parameters]:
        if self.given == self.until:
            raise FleetError("the gate refused")
        self.given += 1
        return [{"weight": torch.tensor([float(self.given), 10.0])}]


def test_releases_are_averaged() -> None:
    (found,), answered = averaged(Answers(99), 4)
    assert (found["weight"].tolist(), answered) == ([2.5, 10.0], 4)


def test_a_budget_ends_it() -> None:
    (found,), answered = averaged(Answers(2), 4)
    assert (found["weight"].tolist(), answered) == ([1.5, 10.0], 2)


def test_a_gate_that_never_answers_is_an_error() -> None:
    with pytest.raises(FleetError):
        averaged(Answers(0), 4)
