"""Clients that train alone or further, splits of the same clients by seed, and the numbers in tables."""

from __future__ import annotations

import csv
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from umbel.data import Dataset, Manifest, offsets_of, open_dataset, write_dataset
from umbel.privacy.site.policy import Personal
from umbel.protocol.errors import ConfigError
from umbel.server.setup import Setup
from umbel.simulation.baselines import personalised
from umbel.simulation.in_process import run_config
from umbel.simulation.sweep import LOCAL_ONLY, Result, Spec
from umbel_lab.experiments.scaffold import FINE_TUNE, INTERPOLATE, finish, good, page, shuffled, split_by_seed
from umbel_lab.output import Section

pytestmark = pytest.mark.rest


def test_clients_that_train_by_themselves_have_no_rounds() -> None:
    finished = finish(run_config("synthetic", strategy=LOCAL_ONLY))
    assert finished.state is None
    # Ten rows, of which five are for training, leave more than the irreducible .577.
    assert 0.577 < finished.measures["last"]["held_out"]["mean"] < 2
    with raises(ConfigError, "config.no-dataset"):
        finish(run_config("synthetic", strategy=LOCAL_ONLY, dataset="", model="linear"))


@pytest.mark.parametrize("how", [FINE_TUNE, INTERPOLATE])
def test_clients_that_make_a_hypothesis_their_own_start_from_what_the_run_found(how: str) -> None:
    config = run_config("synthetic", rounds=3, hypotheses=1)
    found, own = finish(config).state, finish({**config, "strategy": how})
    setup = Setup.parse(config)
    dataset = setup.open_dataset()
    assert found is not None
    assert dataset is not None
    assert own.state is None
    for state, hypotheses in (("last", found.hypotheses), ("best", found.best)):
        expected = personalised(setup.model, dataset, hypotheses, setup.config, Personal(how))
        assert own.measures.pop(state) == {"held_out": expected}
    assert not own.measures


# Client c has c % 3 + 1 rows, which all say c.
LENGTHS = [c % 3 + 1 for c in range(12)]
ROWS = np.repeat(np.arange(12, dtype=np.float32), LENGTHS)
MANIFEST = Manifest(
    name="twelve", clients=12, split={"train": 8, "validation": 4}, model="linear", groups=[c % 2 for c in range(12)]
)
TWELVE = Dataset(MANIFEST, np.stack([ROWS, ROWS], 1), ROWS, offsets_of(LENGTHS), [f"c{c}" for c in range(12)])


def clients(dataset: Dataset) -> list[int]:
    """Return which client is where, after a look at whether all of it came along."""
    found = []
    for i, name in enumerate(dataset.names):
        features, targets = dataset.client(i)
        (c,) = set(targets.tolist())
        found.append(int(c))
        assert (features == c).all()
        assert (len(targets), name, dataset.manifest.groups[i]) == (LENGTHS[int(c)], f"c{int(c)}", c % 2)
    return found


def test_clients_change_places_by_seed_and_nothing_else(tmp_path: Path) -> None:
    one, other = (shuffled(TWELVE, seed) for seed in (1, 2))
    assert sorted(clients(one)) == sorted(clients(other)) == list(range(12))
    assert set(clients(one)[:8]) != set(clients(other)[:8]), "others train"
    assert one.manifest.split == MANIFEST.split
    assert clients(shuffled(TWELVE, 1)) == clients(one)
    source = tmp_path / "source"
    write_dataset(source, TWELVE.manifest, TWELVE.features, TWELVE.targets, TWELVE.offsets, TWELVE.names)
    for seed in (2000, 2001):
        path = split_by_seed(str(source), tmp_path, seed)
        assert path == str(tmp_path / "data" / f"twelve-{seed}")
        assert clients(open_dataset(Path(path))) == clients(shuffled(TWELVE, seed))


def test_a_sweep_leaves_its_tables_and_its_configuration_and_tells_bad_runs(tmp_path: Path) -> None:
    def result(name: str, loss: float = 1.0, error: str = "", **config: Any) -> Result:
        measures = {} if error else {"best_loss": loss}
        return Result(Spec(name, {"seed": 0, "strategy": "ifca", **config}), measures, Path(name), error)

    results = [
        result("one", hypotheses=1),
        result("diverged", math.inf, hypotheses=2),
        result("broken", error="Traceback\nValueError: no such thing", hypotheses=3),
    ]
    assert [one.spec.name for one in good(results)] == ["one"]
    section = Section("Part", "Words.", ("k", "loss"), [["1", "0.5"], ["2", "0.25"]])
    rows = [{"k": 1, "loss": 1 / 3, "printed": None}, {"k": 2, "loss": 0.25, "printed": 0.3}]
    page("Title", [section], rows, results).write(tmp_path)
    said = (tmp_path / "table.md").read_text()
    for words in ("| 2 | 0.25 |", "2 of 3 runs", "ValueError: no such thing", "infinite"):
        assert words in said
    with (tmp_path / "table.csv").open() as file:
        assert list(csv.reader(file)) == [["k", "loss", "printed"], ["1", "0.333333", ""], ["2", "0.25", "0.3"]]
    config = tomllib.loads((tmp_path / "config.toml").read_text())
    assert config["common"] == {"seed": 0, "strategy": "ifca"}
    assert config["runs"]["one"] == {"hypotheses": 1}
