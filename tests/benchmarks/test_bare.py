"""The bare loops do what umbel does, so that times are of the same work; and the parts of a round are told apart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import bare, bare_loops, in_process
from benchmarks.parts import PARTS, Stopwatch, by_parts
from benchmarks.peers.tasks import TASKS, brief_of, named
from tests.benchmarks.conftest import write_charges
from tests.helpers.errors import raises
from umbel.client.learner import Learner
from umbel.privacy.channels.client import ClientSanitiser
from umbel.protocol.errors import ConfigError
from umbel.simulation.in_process import run_config

pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def hospital(tmp_path: Path) -> dict[str, Any]:
    """Rounds of the hospital experiment on made-up charges."""
    return run_config(
        "hospital", dataset=write_charges(tmp_path, [1, 2, 3, 4] * 10, 30), hypotheses=3, clients_per_round=8,
        validation="clients=5", patience=0, rounds=4,
    )  # fmt: skip


@pytest.fixture
def cnn(tmp_path: Path) -> dict[str, Any]:
    """Two rounds of made-up images, all of a client's at once, so that their order plays no part."""
    few = {"clients-per-round": 2, "validation": "clients=2", "rounds": 2, "batch-size": 0}
    return TASKS["cnn"](tmp_path) | few


@pytest.mark.parametrize("task", ["hospital", "cnn"])
def test_without_noise_the_bare_loop_has_the_losses_of_umbel(task: str, request: pytest.FixtureRequest) -> None:
    config = request.getfixturevalue(task)
    _, ours = in_process.rounds({**config, "noise-multiplier": 0.0})
    brief = brief_of(config)
    loop = bare_loops.LOOPS[task](brief)
    theirs = bare_loops.play(loop, brief, 0.0)
    assert len(ours) == config["rounds"] + 1
    np.testing.assert_allclose(theirs, ours, rtol=1e-5)
    assert len(set(ours)) > 1
    if task == "hospital":
        for player, clean in ((partial(bare_loops.play, loop), theirs), (bare_loops.by_client, None)):
            clean = clean or player(brief, 0.0)
            np.testing.assert_allclose(clean, ours, rtol=1e-5)
            with_noise = player(brief, 3.0)
            assert with_noise[0] == clean[0], "the first validation is of the initial hypotheses"
            assert with_noise[1:] != clean[1:]
    else:
        other_layout = bare_loops.CNN(brief, torch.channels_last)
        np.testing.assert_allclose(bare_loops.play(other_layout, brief, 0.0), ours, rtol=1e-5)
        start = {name: torch.from_numpy(value) for name, value in brief.hypotheses.items()}
        clients = brief.settings.train[0]
        few = replace(brief, settings=replace(brief.settings, batch_size=20))
        one, two = (np.subtract(*each.train(start, clients)) for each in (loop, bare_loops.CNN(few)))
        assert np.linalg.norm(two) > 1.2 * np.linalg.norm(one), "minibatches are steps of their own"


def test_all_three_take_turns_in_known_tasks(hospital: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert named("cnn, hospital") == ["cnn", "hospital"]
    with raises(ConfigError, "config.bad-option", "'foo'", "hospital, cnn"):
        named("cnn,foo")
    assert bare.compare("hospital", hospital, times=1, by_client=True).median > 0
    printed = capsys.readouterr().out
    assert all(f"{name}, no noise" in printed for name in ("bare loop", "umbel", "algorithm.py"))


def test_every_part_of_a_round_is_found_and_nothing_stays_changed(hospital: dict[str, Any]) -> None:
    # A part does not count those inside it: the outer one runs from 1 to 10, the inner one from 3 to 7.
    watch = Stopwatch(iter([1.0, 3.0, 7.0, 10.0]).__next__)
    watch.around("outer", watch.around("inner", lambda: None))()
    assert watch.seconds == {"inner": 4.0, "outer": 5.0}
    before = Learner.score, ClientSanitiser.sanitised
    whole, parts, _ = by_parts(hospital)
    assert set(parts) == set(PARTS)
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) < whole
    assert (Learner.score, ClientSanitiser.sanitised) == before
