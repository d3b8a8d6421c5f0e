"""A target runs in a separate process, which needs only NumPy and the target's packages, and bad input is told."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.errors import raises
from tests.helpers.sources import LAB, ROOT
from umbel.protocol.errors import ConfigError, NotApplicableError
from umbel.protocol.project import OWN_PATH
from umbel_lab.attacks.defences.process import Target, Worker

pytestmark = pytest.mark.rest

WORKER = ROOT / LAB / "attacks" / "defences" / "worker.py"
UPDATE = np.eye(8)[:1]

TARGETS = """
import os, sys
import numpy as np

print("a target may print")

def doubled(arrays):
    return [2 * array for array in arrays]

def dies(arrays):
    os._exit(3)

def fails(arrays):
    raise ValueError("not today")

GENERATOR = np.random.default_rng(5)

def seeded(arrays):
    return [array + GENERATOR.standard_normal(array.shape) for array in arrays]

def hangs(arrays):
    while True:
        pass

class Half:
    def __init__(self, factor, *, epsilon=1.0):
        self.factor, self.epsilon = factor, epsilon
    def __call__(self, arrays):
        return [self.factor * array for array in arrays]

number = 7
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of targets in the user's folder."""
    (tmp_path / "targets.py").write_text(TARGETS)
    monkeypatch.setenv(OWN_PATH, str(tmp_path))


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("a.b:C", Target("a.b:C")),
        ("a:C.made", Target("a:C.made")),
        ("a:C()", Target("a:C", ())),
        ("a:C(1, x=[2, -3.5], y='z')", Target("a:C", (1,), {"x": [2, -3.5], "y": "z"})),
    ],
)
def test_a_target_is_named_with_literal_arguments(text: str, target: Target) -> None:
    assert Target.parse(text) == target


@pytest.mark.parametrize(
    "text", ["a", "a:", ":C", "a:C(x=y)", "a:C(x=open('z'))", "a b:C", "a:C(", "a:C()()", "./mine.py:Mod(1)"]
)
def test_other_text_is_no_target(text: str) -> None:
    with raises(ConfigError, "config.audit-target", "mine:Mod(1)" if "mine" in text else text):
        Target.parse(text)


def test_a_target_runs_in_another_process_with_the_seeds_of_its_start() -> None:
    with Worker(Target("targets:doubled")) as worker:
        facts = worker.open()
        seen = worker.run(UPDATE, [0, 0], rounds=2)
    assert (facts["kind"], facts["package"]) == ("function of arrays", "targets")
    np.testing.assert_array_equal(seen.left, 2 * np.broadcast_to(UPDATE, (2, 2, 8)))
    assert not seen.gone.any()
    left = []
    for _ in range(2):
        with Worker(Target("targets:seeded")) as worker:
            worker.open()
            left.append(worker.run(UPDATE, [0, 0]).left)
    np.testing.assert_array_equal(*left)
    assert not np.array_equal(left[0][0], left[0][1])
    with Worker(Target("targets:Half", (0.5,))) as worker:  # arguments are bound by name
        assert worker.open()["given"] == ["factor"]
        assert worker.run(UPDATE, [0]).left[0, 0, 0] == 0.5
        assert worker.open(factor=0.25)["epsilon"] == 1.0
        assert worker.run(UPDATE, [0]).left[0, 0, 0] == 0.25


FAILS = 1 + TARGETS.splitlines().index('    raise ValueError("not today")')


@pytest.mark.parametrize(
    ("target", "code", "parts"),
    [
        (Target("targets:Half"), "target-fails", ["missing 1 required positional argument: 'factor'", "targets:Half"]),
        (Target("targets:Half", (None,)), "target-fails", []),
        (Target("targets:number"), "target-fails", ["int", "targets:number"]),
        (Target("targets:none"), "target-fails", ["targets:none"]),
        (Target("targets:fails"), "target-fails", ["not today", f"(targets.py, line {FAILS})"]),
        (Target("no_such_module:x"), "target-not-found", ["no_such_module"]),
        (Target("targets:dies"), "worker-died", ["a target may print"]),
        (Target("targets:hangs"), "target-hangs", []),
    ],
    ids=str,
)
def test_a_target_that_cannot_be_run_is_told(target: Target, code: str, parts: list[str]) -> None:
    timeout = 0.1 if code == "target-hangs" else 600.0
    with Worker(target, timeout=timeout) as worker, raises(NotApplicableError, f"attack.{code}", *parts):
        worker.open()


def test_a_worker_imports_only_numpy_until_it_knows_its_target() -> None:
    names = []
    for node in ast.parse(WORKER.read_text(encoding="utf-8")).body:
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "numpy"}
