"""``hypotheses = "auto"``: how many groups there are is found from the releases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbel.client.app
from tests.helpers.disk import Killed
from tests.helpers.errors import raises
from tests.helpers.runs import run_app
from tests.helpers.scripted import on
from umbel import strategies
from umbel.data import Manifest, write_leaf
from umbel.nodes.fleet import Fleet
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Clipping
from umbel.protocol.run_config import RunConfig
from umbel.server.setup import Setup
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import play
from umbel.strategies.how_many import HowMany, merged

pytestmark = pytest.mark.rest

# --- by hand


@pytest.mark.parametrize(
    ("sums", "counts", "start", "labels"),
    [
        # In the mean at 10, 2, 11, -7 and 12; the longest way is 12, of which three tenths are 3.6.
        ([100, 2, 220, -140, 120], [10, 1, 20, 20, 10], [0] * 5, [0, -1, 0, 1, 0]),
        ([10, 12], [1, 1], [0, 0], [0, 0]),
        ([10, 12], [1, 1], [10, 10], [0, 1]),  # the way is 2, and so is the distance
        ([0, 9], [0, 3], [0, 0], [-1, 0]),
    ],
)
def test_those_near_one_another_become_one_and_those_hardly_used_none(
    sums: list[float], counts: list[int], start: list[float], labels: list[int]
) -> None:
    columns = [np.array(numbers, float)[:, None] for numbers in (sums, start)]
    assert merged(columns[0], np.array(counts), columns[1]).tolist() == labels


def test_it_looks_at_the_last_rounds_and_chooses_once() -> None:
    chooses, state = HowMany(after=7), {}
    sent = np.array([[0.0], [1], [2]])
    for round, labels in enumerate([[1, 1]] * 2 + [[0, 2]] * 5, start=1):
        state["momentum"] = np.ones(3)
        moved = sent + np.array([[16.0], [0], [16]]) / 7
        sent = chooses.choose(state, round, moved, sent, np.array(labels))
        assert len(sent) == (1 if round == 7 else 3)
    # Hypothesis 1 was trained before the window alone. The others end at 16 and 18, and weigh the same.
    assert sent.tolist() == [[pytest.approx(17)]]
    assert state.keys() == {"how-many/chosen"}, "what was kept of three hypotheses says nothing of one"
    again = HowMany(after=20).choose(state, 8, sent + 1, sent, np.array([0]))
    assert again.tolist() == [[pytest.approx(18)]], "also where a run goes on for longer"


# --- what a run says of it


@pytest.mark.parametrize(("clients", "most"), [(1, 2), (15, 3), (40, 8), (1000, 8)])
def test_a_run_tries_no_more_than_its_releases_are_enough_for(clients: int, most: int) -> None:
    run = RunConfig(hypotheses=0, clients_per_round=clients)
    assert run.most_hypotheses == most
    strategy = on(Fleet(), strategies.make(run))
    assert (strategy.hypotheses, strategy.how_many) == (most, HowMany(33))
    fedavg = on(Fleet(), strategies.make(RunConfig(strategy="fedavg", hypotheses=0, clients_per_round=clients)))
    assert (fedavg.hypotheses, fedavg.how_many) == (1, None), "what has one has nothing to choose"


def test_a_choice_too_random_to_show_groups_is_refused() -> None:
    run = RunConfig(hypotheses=0, clients_per_round=40, choice_epsilon=1)
    with raises(ConfigError, "config.choice-epsilon"):
        on(Fleet(), strategies.make(run))
    assert math.log(7) <= 1.95
    on(Fleet(), strategies.make(RunConfig(hypotheses=0, clients_per_round=40, choice_epsilon=1.95)))


def test_sums_do_not_show_groups() -> None:
    run = RunConfig(strategy="site-average", hypotheses=0, clipping=Clipping.PUBLIC)
    with raises(ConfigError, "config.hypotheses"):
        Setup.parse(run.entries())


def test_a_run_is_priced_by_what_reveals_most_of_all_that_it_tries() -> None:
    """By the most for an open choice, and by the fewest for a random one: that reveals more among two."""
    for epsilon, k in ((0.0, 8), (2.0, 2)):
        setup = Setup.parse(RunConfig(hypotheses=0, clients_per_round=40, choice_epsilon=epsilon).entries())
        assert setup.release.hypotheses == k


# --- whole runs

GROUPS = [(5.0, 6.0), (4.0, -4.5), (-5.0, 1.0), (0.0, 0.0), (-4.0, -6.0)]


def dataset(folder: Path, groups: int, seed: int) -> str:
    """Write a dataset of 150 training clients, ten rows each, of so many linear models; return its path."""
    random, data = np.random.default_rng(seed), {}
    for i in range(180):
        x = random.uniform(-1, 1, (10, 2))
        data[f"client-{i:03}"] = x, (x * GROUPS[i % groups]).sum(axis=1) + random.uniform(0, 1, 10)
    split = {"train": 150, "validation": 30}
    truth = [list(one) for one in GROUPS[:groups]]
    manifest = Manifest(name="groups", model="linear", loss="mse", clients=180, split=split, truth=truth)
    write_leaf(folder / "groups.json", manifest, data)
    return str(folder / "groups.json")


@pytest.fixture
def config(run_config: dict[str, Any]) -> dict[str, Any]:
    return run_config | {
        "hypotheses": "auto", "clients-per-round": 40, "rounds": 75, "restarts": 1,
        "validation": "every=25",
    }  # fmt: skip


@pytest.mark.parametrize(("groups", "noise_multiplier"), [(1, 3.0), (2, 3.0), (3, 0.0), (3, 3.0), (5, 3.0)])
def test_as_many_are_left_as_there_are_groups(
    groups: int, noise_multiplier: float, tmp_path: Path, config: dict[str, Any]
) -> None:
    config |= {"dataset": dataset(tmp_path, groups, 0), "noise-multiplier": noise_multiplier}
    run = play(config | {"seed": 1})
    found = run.state.best["weight"].reshape(-1, 2)
    assert len(found) == groups
    for truth in GROUPS[:groups]:
        assert np.linalg.norm(found - np.array(truth), axis=1).min() < 1
    assert run.state.best_round > 25, "what was best of eight is not what is best of these"


def test_a_run_that_was_stopped_before_or_after_the_choice_goes_on(
    tmp_path: Path, config: dict[str, Any], blank_figures: None
) -> None:
    config |= {"dataset": dataset(tmp_path, 2, 0), "rounds": 9, "validation": "every=1"}
    config |= {"strategy": "flower:FedAvgM server-momentum=0.9"}
    whole = run_app(config, InProcessGrid(umbel.client.app.app, config))
    assert [len(entry["groups"]) for entry in whole.trained] == [8, 8, 8] + [len(whole.arrays("latest")["weight"])] * 6
    assert "diverged" not in (whole.folder / "report.html").read_text(), "there were no such hypotheses then"

    for last in (2, 3, 5):
        grid = InProcessGrid(umbel.client.app.app, config)

        def until(messages: Any, last: int = last, push: Any = grid.push_messages) -> Any:
            messages = list(messages)
            if any(message.metadata.group_id == str(last + 1) for message in messages):
                raise Killed
            return push(messages)

        grid.push_messages = until  # type: ignore[method-assign]
        before = set(whole.folder.parent.iterdir())
        with pytest.raises(Killed):
            run_app(config, grid)
        (stopped,) = set(whole.folder.parent.iterdir()) - before
        again = config | {"resume": stopped.name}
        resumed = run_app(again, InProcessGrid(umbel.client.app.app, again))
        for file in ("latest", "hypotheses"):
            for name, value in whole.arrays(file).items():
                assert resumed.arrays(file)[name].tobytes() == value.tobytes(), (last, file, name)
