"""A site and the loop answer the same message, and the loop computes one client after the other."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import sites
from benchmarks.measure import Reading, console
from umbel.client.learner import Learner

pytestmark = pytest.mark.rest


@pytest.mark.parametrize(("model", "kinds"), [("mlp", ["site", "loop"]), ("lenet10", ["loop"])])
def test_both_answer(model: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    original = sites.answered

    def answered(*arguments: Any) -> Reading:
        with monkeypatch.context() as patch:
            train = Learner.train
            patch.setattr(Learner, "train", lambda self, *rest: seen.append(self.engine) or train(self, *rest))
            return original(*arguments)

    monkeypatch.setattr(sites, "answered", answered)
    with console.capture() as printed:
        ratio = sites.measure(model, 2, 2, 1)
    assert ratio.median > 0
    assert f"{model}: 2 clients train, k = 2" in printed.get()
    assert {*seen} == {*kinds}
    assert "loop" in seen
