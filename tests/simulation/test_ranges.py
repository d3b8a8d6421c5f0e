"""Ranges by a private question: its price, its answer, and one epsilon for it and the run that builds on it."""

from __future__ import annotations

import math
import re
import tomllib
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from scipy import stats

import umbel
from examples.table import SERVICES, stays
from tests.helpers.cli import refused, said, schema_of
from tests.helpers.errors import raises
from tests.helpers.ledgers import proven
from tests.helpers.noise import proved
from tests.helpers.sites import simulated
from umbel.data import Schema, open_dataset
from umbel.data.importers import from_dataframe
from umbel.models.ranges import CELLS
from umbel.privacy.accounting.guarantee import with_before
from umbel.privacy.channels import Place
from umbel.privacy.channels.site import SiteSanitiser
from umbel.privacy.mechanisms.randomness import noise_sources
from umbel.protocol.errors import ConfigError
from umbel.protocol.ranges import RangesBefore, before
from umbel.protocol.release import LAPLACE, Kind, ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import TrainingSpec
from umbel.server.setup import Setup
from umbel.simulation.in_process import play
from umbel.simulation.ranges import Question, with_answers
from umbel.simulation.start import values_of
from umbel.simulation.wanted import Wanted

BARE: dict[str, dict[str, Any]] = {"service": {"categories": SERVICES}, "cost": {"unit": "dollars"}}


def small(home: Path, clients: int, name: str = "small") -> Path:
    """Write clients of three rows with ages, and a cost that follows from them; neither has a range."""
    generator = np.random.default_rng(0)
    age = generator.uniform(20, 60, 3 * clients).round()
    frame = pd.DataFrame({"who": np.repeat(np.arange(clients), 3), "age": age, "cost": 1000 + 50 * age})
    from_dataframe(frame, client="who", target="cost", columns={"age": {"type": "number"}}).write(name)
    return home / "data" / name


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The hospitals without any range, and with the ends of their numbers as ranges."""
    table, folder = stays(), tmp_path_factory.mktemp("hospitals")
    known: dict[str, dict[str, Any]] = {**BARE, "cost": {}}
    for name in ("longitude", "latitude", "cost"):
        known[name] = {"minimum": math.floor(table[name].min()), "maximum": math.ceil(table[name].max())}
    options: dict[str, Any] = {"client": "hospital", "target": "cost", "validation": 0.3, "seed": 2000}
    return {
        name: from_dataframe(table, columns=columns, **options).write(folder / name)
        for name, columns in (("bare", BARE), ("known", known))
    }


# --- the price


def delta_of(epsilon: float, n: int, nu: float, sigma: float) -> float:
    """Return the delta of a vector of n Laplace and one of normal noise, each at a distance of two clip norms.

    By quadrature over the length r of the first vector and its angle to the difference, with the normal loss beyond.
    """
    mu, rate = 2 / sigma, n / nu
    radii = stats.gamma.ppf((np.arange(4000) + 0.5) / 4000, n, scale=1 / rate)
    angles = np.cos((np.arange(4000) + 0.5) / 4000 * np.pi)
    weights = (1 - angles**2) ** ((n - 2) / 2)  # of equal steps of the angle itself
    loss = rate * (np.sqrt(radii[:, None] ** 2 + 4 - 4 * radii[:, None] * angles) - radii[:, None])
    left = epsilon - loss
    beyond = stats.norm.cdf(mu / 2 - left / mu) - np.exp(left) * stats.norm.cdf(-mu / 2 - left / mu)
    return float((beyond @ weights).mean() / weights.sum())


def test_the_account_of_question_and_run_is_that_of_a_quadrature() -> None:
    released = RangesBefore(348, 14.08, "gaussian", ReleaseBy.SITE).release
    assert (released.kind, released.n, released.hypotheses) == (Kind.SITE, 348, 1)
    for nu in (3.526, 6.0):
        run = RunConfig(noise_multiplier=nu, mechanism=LAPLACE).release(7, 1)
        epsilon = proven(with_before({run: 1}, released)).epsilon
        assert 0.97e-5 < delta_of(epsilon, 7, nu, 14.08) < 1.001e-5


def test_a_plan_spends_all_of_epsilon_on_question_and_run(hospitals: dict[str, Path]) -> None:
    planned = values_of(hospitals["bare"], wanted=Wanted(epsilon=4))
    setup = Setup.parse(planned.values)
    assert setup.config.before is not None
    have = proven(with_before({setup.release: setup.config.most_participations}, setup.config.before))
    assert 3.9 < have.epsilon <= 4
    assert proven({setup.release: 1}).epsilon < 3.95
    assert 0.49 < proven({setup.config.before: 1}).epsilon <= 0.5
    assert "longitude -128 to -64" in planned.words[0]
    # Without asking it reads no row, and wants ranges.
    with raises(ConfigError, "config.no-range", "longitude", "umbel ranges"):
        values_of(hospitals["bare"], wanted=Wanted(epsilon=4), ask=False)


def test_an_audit_finds_less_than_the_question_claims() -> None:
    """A client whose rows lie in one cell, or in another, beside clients that stay: the sum tells which at most so well
    as is claimed. The bound is wrong once in a million times."""
    nu, draws, counts = 2.5, 20_000, np.zeros((5, 1, CELLS), np.float32)
    claim = proven({RangesBefore(CELLS, nu, "gaussian", ReleaseBy.SITE).release: 1})
    task = TrainingSpec(
        round=1, clients=(0, 1, 2, 3, 4), noise_multiplier=nu, mechanism="gaussian", clip_norm=1.0, choice_epsilon=0.0,
        release_by=ReleaseBy.SITE,
    )  # fmt: skip
    sanitiser = SiteSanitiser.of(Place(simulated()), {"counts": np.zeros((1, 1, CELLS), np.float32)}, task)
    counts[1:, 0, 60] = 1
    seeds, found = count(), []
    for cell in (70, 80):
        counts[0, 0, 50:] = 0
        counts[0, 0, cell] = 1
        sums = np.empty(draws)
        for i in range(draws):
            sources = noise_sources(next(seeds), 1, [0], "site")
            noisy = sanitiser.sanitised({"counts": counts}, np.zeros(5, np.int64), sources)[0]["counts"][0, 0]
            sums[i] = noisy[70] - noisy[80]
        found.append(sums)
    thresholds = np.quantile(found[0][: draws // 2], np.linspace(0.01, 0.99, 99))
    first, second = (sums[: draws // 2] for sums in found)
    best = thresholds[np.argmax(proved(first, second, thresholds)), None]
    measured = float(proved(found[0][draws // 2 :], found[1][draws // 2 :], best)[0])
    assert 0.2 * claim.epsilon < measured <= claim.epsilon


# --- enough clients


@pytest.mark.parametrize(("name", "clients"), [("clinics", 60), ("shops", 40)])
def test_with_too_few_clients_nothing_is_spent_and_public_ranges_are_asked_for(
    umbel_home: Path, name: str, clients: int
) -> None:
    small(umbel_home, clients, name)
    for words in (("run", name, "--epsilon", 4), ("ranges", name)):
        refused("config.few-for-ranges", *words, parts=("public ranges of age, cost",))
    assert not (umbel_home / "runs").exists()


def test_the_rule_is_that_the_noise_hides_no_tenth_of_the_clients() -> None:
    """By hand: 0.5 at 1e-5 takes normal noise of 14.08 clip norms, and two columns halve what a client counts in each.
    Four deviations of sqrt(2) 14.08 are 10 % of 797 clients."""
    asked = Question.planned(["age", "cost"], 797, Wanted(0.5))
    assert asked.spread == pytest.approx(math.sqrt(2) * 14.08, rel=1e-3)
    with raises(ConfigError, "config.few-for-ranges", "797"):
        Question.planned(["age", "cost"], 796, Wanted(0.5))
    with raises(ConfigError, "config.few-for-ranges"):  # each of four sites adds noise
        Question.planned(["age", "cost"], 1000, Wanted(0.5), sites=4)
    assert Question.planned(["age", "cost"], 1000, Wanted(0.5), ReleaseBy.SECURE, 4)


# --- answers


def test_a_dataset_is_asked_by_any_channel_and_the_schema_makes_a_dataset_whose_plan_counts_it(
    umbel_home: Path, tmp_path: Path
) -> None:
    """By hand: ages of 20 to 60 lie in 16 to 64, costs of 2,000 to 4,000 in 1,024 to 4,096."""
    small(umbel_home, 4000)
    schema = tmp_path / "schema.toml"
    for words in (("--sites", 3, "--release", "secure"), ("--sites", 3), ("--sites", 1)):
        schema.unlink(missing_ok=True)
        said("ranges", "small", *words, "--out", schema)
        found = Schema.read(schema)
        assert (found.features[0].offset, found.features[0].scale) == (40, 24)
        assert (found.target.offset, found.target.scale) == (0, 4096)
    refused("config.exists", "ranges", "small", "--out", schema)
    stranger = Question.planned(["x"], 10**4, Wanted(1))
    with raises(ConfigError, "config.question", "'x'"):
        with_answers(found, stranger.answers({"counts": np.ones((1, 1, CELLS))}), stranger.release)
    table = pd.DataFrame({"who": np.arange(1000).astype(str), "age": 30.0, "cost": 2500.0})
    from_dataframe(table, schema=schema).write("ranged")
    stated = before(open_dataset(umbel_home / "data" / "ranged").manifest.provenance)
    assert values_of("ranged", wanted=Wanted(epsilon=8), ask=False).values["ranges"] == stated
    assert tomllib.loads(schema.read_text())["provenance"].count(stated) == 1


def test_the_run_of_a_question_answers_it_again_and_another_run_does_not(umbel_home: Path, tmp_path: Path) -> None:
    small(umbel_home, 1500)
    said("ranges", "small", "--out", tmp_path / "first.toml")
    said("ranges", "last", "--out", tmp_path / "again.toml")
    assert Schema.read(tmp_path / "again.toml") == Schema.read(tmp_path / "first.toml")
    said("run", "synthetic", "rounds=1", "--no-baselines")
    refused("config.question", "ranges", "last", "--out", tmp_path / "other.toml")


def test_a_schema_without_ranges_makes_the_run_config_of_a_question(umbel_home: Path, tmp_path: Path) -> None:
    small(umbel_home, 20)
    schema, out = schema_of("small", tmp_path / "schema.toml"), tmp_path / "question.toml"
    words = ("ranges", schema, "--release", "secure", "--sites", 3, "--out", out)
    refused("config.few-for-ranges", *words, "--clients", 30, parts=("public ranges",))
    assert not out.exists()
    said(*words, "--clients", 3000)
    run = RunConfig.parse(tomllib.loads(out.read_text()))
    assert (run.model, run.dataset, run.strategy, run.rounds) == ("ranges columns=age,cost", "", "secure-average", 1)
    assert run.delta == 1e-5


@pytest.mark.parametrize("size", [1e9, 0.9])
def test_a_hostile_site_moves_no_count_by_more_than_its_clients_norms(
    umbel_home: Path, monkeypatch: pytest.MonkeyPatch, size: float
) -> None:
    """One of ten sites says that all of its clients lie in the last cell: longer sums than theirs are left out."""
    small(umbel_home, 6250)  # a fifth of them validates
    honest, clients = SiteSanitiser.sanitised, 5000
    asked = Question.planned(["age", "cost"], clients, Wanted(0.5), sites=10)

    def wild(self: SiteSanitiser, *arguments: Any) -> Any:
        sums, counts = honest(self, *arguments)
        if self.place.site.first == 7:
            sums["counts"][:] = 0
            sums["counts"][0, 0, -1] = size * clients / 10
        return sums, counts

    config = {**asked.values, "dataset": "small"}
    monkeypatch.setattr(SiteSanitiser, "sanitised", wild)
    run = play(config, nodes=10)
    found, released = run.state.hypotheses["counts"][0], max(entry.releases for entry in run.state.history)
    assert released == (clients if size < 1 else clients * 9 // 10)
    assert found[0, -1] * released <= clients / 10 + 6 * asked.spread


@pytest.mark.rest
def test_hospitals_without_ranges_learn_as_well_as_with_them(hospitals: dict[str, Path]) -> None:
    """Error over three seeds, each hospital's own, at the same epsilon: at most a tenth above that with true ranges."""
    errors: dict[str, NDArray[np.float64]] = {}
    for name, path in hospitals.items():
        runs = [umbel.run(path, epsilon=4, seed=seed) for seed in range(3)]
        ways = ["this run, last round", "this run, fitted per client"]
        errors[name] = np.mean([run.worth["mean"][ways] for run in runs], axis=0)
        assert all(re.search(r"epsilon (3\.9\d+ at delta 1e-05|4)\.$", run.guarantee[0]) for run in runs)
    assert (errors["bare"] <= 1.1 * errors["known"]).all(), errors
