"""Asking one client again and again."""

from __future__ import annotations

import pytest
import torch

from umbel.models.model import Parameters
from umbel.protocol.errors import FleetError
from umbel_lab.attacks.victims import averaged

pytestmark = pytest.mark.rest


class Answers:
    """Answers 1, 2, 3, ... and refuses from some number on."""

    def __init__(self, until: int) -> None:
        self.until, self.given = until, 0

    def __call__(self) -> list[Parameters]:
        if self.given == self.until:
            raise FleetError("the gate refused")
        self.given += 1
        return [{"weight": torch.tensor([float(self.given), 10.0])}]


@pytest.mark.parametrize(("until", "mean", "times"), [(99, 2.5, 4), (2, 1.5, 2)], ids=["all", "a budget ends it"])
def test_releases_are_averaged(until: int, mean: float, times: int) -> None:
    (found,), answered = averaged(Answers(until), 4)
    assert (found["weight"].tolist(), answered) == ([mean, 10.0], times)


def test_a_gate_that_never_answers_is_an_error() -> None:
    with pytest.raises(FleetError):
        averaged(Answers(0), 4)
