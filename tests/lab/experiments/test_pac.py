"""The theorems of the PAC paper: bounds by hand, trials that are what they say, tables that are whole."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.lab.experiments.conftest import read_csv
from umbel.client.cohort import LocalUpdate
from umbel_lab.attacks.pac_attack import Estimate
from umbel_lab.experiments import pac
from umbel_lab.experiments.__main__ import app
from umbel_lab.experiments.pac import Trials, interactions

pytestmark = pytest.mark.rest


def test_theorems_2_and_3_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Trials.draw(1, 0.1, seed=4)
    monkeypatch.setattr(pac, "geometry", lambda _: (4.0, np.array([0.5])))  # M and tau
    # Theorem 3: 2 (.05 * 4)^2 ln(2 * 500 / .1) / (40 (.1 * .8 * .5 * .5)^2)
    assert pac.theorem_3(clients, 0.1, 0.05) == [math.ceil(0.08 * math.log(10_000) / (40 * 0.02**2))]
    # Theorem 2 is at its minimum where its two terms meet, and never below the larger of them at any beta.
    (minimum,) = pac.theorem_2(clients, 0.1, 0.05).tolist()
    for beta in (0.2, 0.5, 0.7):
        first = 2 * math.log(20) / (10 * (0.8 - beta) ** 2)
        second = 2 * 0.04 * math.log(20_000) / (10 * (0.1 * beta * 0.5 * 0.5) ** 2)
        assert minimum <= math.ceil(max(first, second))


def test_tau_is_the_largest_with_at_most_a_share_epsilon_below() -> None:
    clients = Trials.draw(1, 0.1, seed=5)
    longest, (tau,) = pac.geometry(clients)
    scores = np.abs(clients.items @ clients.local[0])
    assert (scores < tau).mean() <= pac.EPSILON < (scores <= tau * (1 + 1e-6)).mean()
    assert longest == pytest.approx(np.linalg.norm(clients.items, axis=1).max())


@pytest.mark.slow
def test_the_command_writes_every_table_and_the_same_bytes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The work grows with the square of the noise, as the theorems' bounds do.
    monkeypatch.setattr(pac, "SIGMAS", (0.01,))
    monkeypatch.setattr(pac, "RATES", (0.1,))
    monkeypatch.setattr(pac, "MULTIPLIERS", (1.0,))
    monkeypatch.setattr(pac, "_EPOCHS", 5)
    for name in ("one", "two"):
        result = CliRunner().invoke(app, ["pac", "--quick", "--out", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    one, two = tmp_path / "one", tmp_path / "two"
    assert all((one / file).read_bytes() == (two / file).read_bytes() for file in ("table.md", "table.csv"))
    rows = read_csv(one)
    assert {row["table"] for row in rows} == {"theorem 1", "theorem 2", "theorem 3", "proposition 1"}
    # Each theorem allows a share .1 of failures.
    assert max(float(row["failures"]) for row in rows if row["failures"]) < pac.DELTA
    assert [float(row["holds"]) for row in rows if row["table"] == "proposition 1"] == [1.0] * 2


def test_trials_are_what_they_say_and_zeros_stand_for_items_that_nobody_labelled() -> None:
    clients = Trials.draw(5, 0.3, seed=1)
    labels = clients.cohort.targets.numpy().reshape(5, 40)
    numbers = clients.cohort.features.numpy().reshape(5, 40)
    assert (labels > 0).sum(axis=1).tolist() == [12] * 5, "exactly its like rate"
    assert all(len(set(own)) == 40 for own in numbers.tolist()), "each item once"
    update = LocalUpdate(0, 0.1, 10, 1)
    whole, _ = next(interactions(clients, update, True, 0))
    narrow, _ = next(interactions(clients.narrowed(), update, True, 0))
    np.testing.assert_allclose(narrow.sum(axis=1), whole.sum(axis=1), rtol=1e-6)
    assert narrow.shape == (5, 40, 8)
    # Noise by rows leaves rows that did not change.
    updates = np.zeros((2, 3, 8), np.float32)
    updates[0, 1] = 1
    noised = pac.sanitise_rows(updates, 1.0, np.random.default_rng(0))
    assert (noised[0, 1] != 1).all()
    assert not noised[0, [0, 2]].any()
    assert not noised[1].any()


def test_an_error_is_0_of_the_local_model_and_1_of_its_opposite_and_what_is_enough_stays_enough() -> None:
    clients = Trials.draw(2, 0.1, seed=3)
    estimates = [Estimate(8, spectral=False) for _ in range(2)]
    for estimate, own in zip(estimates, clients.local, strict=True):
        estimate.add(-own[None])  # items are pushed away from u
    assert clients.errors(estimates, clients.local).tolist() == [0, 0]
    assert clients.errors(estimates, -clients.local).tolist() == [1, 1]
    for failures, place in (([0.5, 0.3, 0.1, 0.0], 3), ([0.0, 0.2, 0.0], 3), ([0.0], 1), ([0.5, 0.4], None)):
        assert pac.suffices(failures) == place
