"""The bare loops do what umbel does, so that times are of the same work; and the parts of a round are told apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import umbel.privacy.gate.gate
from benchmarks import bare, bare_algorithm, in_process
from benchmarks.parts import PARTS, Stopwatch
from benchmarks.peers.tasks import brief_of, cnn, named
from tests.helpers.errors import raises
from umbel.client.learner import Learner
from umbel.data import Manifest, offsets_of, write_dataset
from umbel.protocol.errors import ConfigError
from umbel.simulation.in_process import run_config


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def hospital(tmp_path: Path) -> dict[str, Any]:
    """Rounds of the hospital experiment on made-up charges."""
    rng, lengths = np.random.default_rng(0), np.tile([1, 2, 3, 4], 10)
    features = rng.uniform(-1, 1, (lengths.sum(), 3)).astype(np.float32)
    targets = (features.sum(1) ** 2).astype(np.float32)
    split = {"train": 30, "validation": 10}
    manifest = Manifest(name="charges", clients=40, split=split, model="mlp", loss="rmse")
    write_dataset(tmp_path / "charges", manifest, features, targets, offsets_of(lengths))
    return run_config(
        "hospital",
        dataset=str(tmp_path / "charges"),
        hypotheses=3,
        clients_per_round=8,
        validation_clients_per_round=5,
        patience=0,
        rounds=4,
    )


@pytest.fixture
def images(tmp_path: Path) -> dict[str, Any]:
    """Two rounds of made-up images."""
    return cnn(tmp_path) | {"clients-per-round": 2, "validation-clients-per-round": 2, "rounds": 2}


def test_tasks_are_named_with_commas_and_a_wrong_one_is_refused_before_any_is_done() -> None:
    assert named("cnn, hospital") == ["cnn", "hospital"]
    with raises(ConfigError, "config.bad-option", "'foo'", "hospital, cnn"):
        named("cnn,foo")


@pytest.mark.parametrize("task", ["hospital", "images"])
def test_without_noise_the_bare_loop_has_the_losses_of_umbel(task: str, request: pytest.FixtureRequest) -> None:
    config = request.getfixturevalue(task)
    ours = in_process.prepare({**config, "noise-multiplier": 0.0})()
    loop = bare.bare_loop({"images": "cnn"}.get(task, task), config)
    theirs = loop(0.0)()
    assert len(ours) == config["rounds"] + 1
    np.testing.assert_allclose(theirs, ours, rtol=1e-5)
    assert len(set(ours)) > 1
    with_noise = loop(3.0)()
    assert with_noise[0] == theirs[0], "the first validation is of the initial hypotheses"
    assert with_noise[1:] != theirs[1:], "with noise it draws its own"


def test_client_by_client_the_losses_are_those_of_umbel(hospital: dict[str, Any]) -> None:
    ours = in_process.prepare({**hospital, "noise-multiplier": 0.0})()
    brief = brief_of(hospital)
    np.testing.assert_allclose(bare_algorithm.play(brief, 0.0), ours, rtol=1e-5)
    with_noise = bare_algorithm.play(brief, 3.0)
    assert with_noise[0] == pytest.approx(ours[0], rel=1e-5), "the first validation is of the initial hypotheses"
    assert with_noise[1:] != ours[1:]


def test_all_three_take_turns(hospital: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert bare.compare("hospital", hospital, times=1, by_client=True).median > 0
    printed = capsys.readouterr().out
    assert all(f"{name}, no noise" in printed for name in ("bare loop", "umbel", "algorithm.py"))


def test_a_part_does_not_count_the_parts_inside_it() -> None:
    # The outer part runs from 1 to 10, the inner one inside it from 3 to 7.
    watch = Stopwatch(iter([1.0, 3.0, 7.0, 10.0]).__next__)
    watch.around("outer", watch.around("inner", lambda: None))()
    assert watch.seconds == {"inner": 4.0, "outer": 5.0}


def test_every_part_of_a_round_is_found_and_nothing_stays_changed(hospital: dict[str, Any]) -> None:
    before = Learner.score, umbel.privacy.gate.gate.sanitise
    watch = Stopwatch()
    go = in_process.prepare(hospital)
    began = time.perf_counter()
    with watch.watch():
        go()
    assert set(watch.seconds) == set(PARTS)
    assert sum(watch.seconds.values()) < time.perf_counter() - began
    assert (Learner.score, umbel.privacy.gate.gate.sanitise) == before
