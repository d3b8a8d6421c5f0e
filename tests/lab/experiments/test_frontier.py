"""Accuracy against epsilon: which runs there are, and what the table says of each."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.datasets import manifest
from tests.lab.experiments.conftest import read_csv
from umbel.data import offsets_of, write_dataset
from umbel.models import MODELS
from umbel.privacy.accounting.guarantee import guarantee, pure_cost
from umbel.protocol.arrays import flatten
from umbel.protocol.release import Clipping, Kind, Release
from umbel.protocol.run_config import RunConfig
from umbel.simulation.in_process import play, run_config
from umbel.simulation.sweep import Result, Spec
from umbel_lab.experiments import frontier, scaffold
from umbel_lab.experiments.frontier import (
    ALONE,
    CENTRAL,
    CFL,
    CLIENT,
    HEURISTIC,
    ONE,
    OPEN,
    PLAIN,
    SITE,
    TASKS,
    THREE,
)  # fmt: skip

pytestmark = pytest.mark.rest

SERVICES = TASKS["hospital-services"]


def release_of(config: dict[str, Any], n: int) -> Release:
    run = RunConfig(**config)
    return Release(
        Kind.TRAIN, n, run.noise_multiplier, run.clipping.mode, mechanism=run.mechanism, hypotheses=run.hypotheses,
        choice_epsilon=run.choice_epsilon if run.hypotheses > 1 else 0.0,
    )  # fmt: skip


def test_configurations_cost_the_epsilon_in_their_names() -> None:
    """Pure, one participation a client, its choice included; and at delta of one sum that all trust."""
    for epsilon in TASKS["hospital"]["epsilons"]:
        config = run_config(f"hospital-epsilon-{epsilon}")
        assert config["max-participations"] == 1
        cost = pure_cost(release_of(config, MODELS["mlp"].num_parameters))
        assert isinstance(cost, Fraction)
        assert 0.99 * epsilon <= cost <= epsilon
    for epsilon in SERVICES["epsilons"]:
        config = frontier.base_of("hospital-services", epsilon)
        assert (config["max-participations"], config["hypotheses"], config["model"]) == (1, 1, "")
        assert pure_cost(release_of(config, SERVICES["parameters"])) == epsilon
    for epsilon in (1, 2, 4, 8, 16):
        nu = frontier.central(epsilon)["noise-multiplier"]
        found = guarantee({Release(Kind.SITE, 7, nu, Clipping.PUBLIC, mechanism="gaussian", hypotheses=1): 1}, 1e-5)
        assert found is not None
        assert 0.99 * epsilon <= found.epsilon <= epsilon


def test_one_site_with_gaussian_noise_is_central_dp_fedavg(tmp_path: Path) -> None:
    """The mean of clipped updates; noise on their sum deviates by nu times the clip norm (McMahan et al., 2018)."""
    generator, clients, d = np.random.default_rng(0), 20, 99
    x = generator.normal(size=(clients * 4, d)).astype(np.float32)
    own = manifest(clients - 1, 1, name="wide", model=f"linear inputs={d} outputs=1", loss="mse")
    write_dataset(tmp_path / "wide", own, x, x[:, 0] * 3, offsets_of([4] * clients))
    clip, nu = 0.01, 3.0
    base = run_config(
        "hospital-services", dataset=str(tmp_path / "wide"), rounds=1, clients_per_round=19,
        clipping=f"public norm={clip}", noise_multiplier=0.0,
    )  # fmt: skip
    plain = flatten(play(base | {"strategy": "fedavg"}).state.hypotheses)
    summed = {"strategy": "site-average", "mechanism": "gaussian"}
    np.testing.assert_allclose(flatten(play(base | summed).state.hypotheses), plain, rtol=0, atol=1e-7)
    noisy = flatten(play(base | summed | {"noise-multiplier": nu}).state.hypotheses)
    noise = (noisy - plain) * 19 / (nu * clip)
    # Of 100 normals the mean square is within .5 of 1, but for once in some 1000 seeds.
    assert noise.shape == (1, 100)
    assert np.square(noise).mean() == pytest.approx(1, abs=0.5)


def test_seeds_are_compared_one_by_one() -> None:
    def result(arm: str, label: str, seed: int, **kinds: tuple[float, float]) -> Result:
        last = {kind: {"mean": mean, "worst_decile": worst} for kind, (mean, worst) in kinds.items()}
        return Result(Spec("", {"seed": seed}, ("hospital", arm, label)), {"last": last}, Path())

    arms = {
        (ONE, "epsilon 4"): [result(ONE, "", 0, own=(1, 5)), result(ONE, "", 1, own=(2, 5))],
        (ALONE, "x"): [result(ALONE, "", 0, own=(3, 4)), result(ALONE, "", 1, own=(3, 6))],
        (CFL, "x"): [result(CFL, "", seed, held_out=(1.5, 9), own=(0.5, 1)) for seed in (0, 1)],
    }
    [section] = frontier.better(arms)
    assert section.columns[2:] == (f"{ALONE}, x", f"{CFL}, x", f"{CFL}, x, made its own")
    assert section.rows == [[ONE, "epsilon 4", "2, 1 of 2", "1, 2 of 2", "0, 0 of 2"]]
    assert not [*frontier.better({(ONE, "epsilon 4"): arms[ONE, "epsilon 4"]})]


def test_the_table_tells_guarantees_and_none_where_there_is_none(hospitals: Path, tmp_path: Path) -> None:
    short = {"rounds": 2, "clients-per-round": 60}
    specs = scaffold.specs(frontier, tmp_path, [2000], True, "hospital")
    results = [Result(spec, frontier.play(spec.config | short).measures, tmp_path) for spec in specs]
    frontier.page(results).write(tmp_path)
    rows = {(row["arm"], row["label"]): row for row in read_csv(tmp_path)}
    assert {rows[arm, "epsilon 16"]["epsilon_text"] for arm in (CLIENT, SITE, ONE, THREE)} == {"16"}
    assert float(rows[THREE, "epsilon 16"]["epsilon"]) <= 16
    assert rows[CENTRAL, "epsilon 16"]["epsilon_text"] == "16, δ 1e-05"
    alone = rows[ALONE, "service as a number"]
    assert (alone["epsilon_text"], alone["held_out_last"]) == ("none", "")
    assert float(alone["own_last"]) > 0
    assert rows[OPEN, "epsilon 16"]["epsilon_text"] == rows[HEURISTIC, "nu 3"]["epsilon_text"] == "none"
    assert rows[HEURISTIC, "nu 3"]["paper_text"] == "3.67", "11/3, once"
    assert rows[PLAIN, "k = 5"]["epsilon_text"] == rows[PLAIN, "k = 5"]["paper_text"] == "none"
    assert "between any two data sets of a client" in (tmp_path / "table.md").read_text()
