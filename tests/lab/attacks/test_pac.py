"""A server that steals local parameters, played against the real ClientApp and its gate, and the theorems on it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from tests.helpers.errors import raises
from tests.helpers.grids import ListeningGrid
from tests.helpers.ledgers import participations
from tests.helpers.paper import sites_accept_the_paper as sites_accept_the_paper
from tests.lab.experiments.conftest import read_csv
from umbel.client.app import app as client_app
from umbel.client.cohort import LocalUpdate
from umbel.data import BUNDLED, open_dataset
from umbel.privacy.site.totals import Totals
from umbel.protocol.errors import ConfigError
from umbel.protocol.messages import hypotheses_in, training_in
from umbel.protocol.tasks import TrainingSpec
from umbel.server.callbacks import named
from umbel.server.history import State
from umbel.server.run import Run, initial_hypotheses
from umbel.server.run_folder import RunFolder
from umbel.server.setup import Setup
from umbel.simulation.in_process import run_config
from umbel_lab.attacks.__main__ import app
from umbel_lab.attacks.identify import ATTACKS, PAPER, attack, strongest
from umbel_lab.attacks.identify import Attacked as Audited
from umbel_lab.attacks.pac_attack import (
    Estimate,
    PacAttack,
    direction_error,
    error_rate,
    lean_of,
    local_parameters,
    needed,
    signs_by_items,
    theorem_1,
)
from umbel_lab.experiments import pac
from umbel_lab.experiments.__main__ import app as experiments
from umbel_lab.experiments.pac import Trials, interactions

pytestmark = pytest.mark.rest


Config = dict[str, Any]

N = 800  # parameters of 100 items of 8 factors
TRAINING = 60
# Three rounds of honest training, then at most twelve interactions with each of five clients.
OPTIONS = {"after": 3, "victims": 5, "interactions": 12}


def options(**changes: Any) -> Config:
    """Return the entry of the run config that sets the attack's options."""
    pairs = " ".join(f"{name}={value}" for name, value in (OPTIONS | changes).items())
    return {"strategy": f"umbel_lab.attacks.pac_attack:PacAttack {pairs}"}


class Attacked:
    """A run that is over."""

    def __init__(self, config: Config, nodes: int = 1, folder: RunFolder | None = None, **policy: Any) -> None:
        places = [{"partition-id": i, "num-partitions": nodes} | policy for i in range(nodes)]
        self.grid = ListeningGrid(client_app, config, node_configs=places)
        setup = Setup.parse(config)
        start = initial_hypotheses(setup, self.grid)
        run = Run(setup, self.grid, State.first(start), named(setup), folder=folder)
        run.do()
        self.strategy, self.state = run.strategy, run.state
        self.items: NDArray[Any] = run.state.hypotheses["items"]
        if isinstance(self.strategy, PacAttack):
            self.findings, self.told = self.strategy.findings, self.strategy.outcome()
            self.victims = sorted({row["client"] for row in self.findings})

    @property
    def trains(self) -> list[tuple[TrainingSpec, NDArray[Any]]]:
        """What was asked in each training message, and the items that it began from."""
        asked = [(training_in(message.content), message) for message in self.grid.sent]
        return [(task, hypotheses_in(message.content)["items"]) for task, message in asked if task is not None]

    def local_parameters(self) -> NDArray[Any]:
        """What the training clients keep."""
        truth = local_parameters(self.grid, self.strategy.nodes.roster(self.grid), np.arange(TRAINING))
        return np.stack([truth[client]["user"] for client in range(TRAINING)])

    def last(self, client: int) -> dict[str, Any]:
        """Return the last row on a client."""
        return [row for row in self.findings if row["client"] == client][-1]


@pytest.fixture
def attack_config(run_config: Config) -> Config:
    """The run config of an attack with `OPTIONS`."""
    attack = {"strategy": "umbel_lab.attacks.pac_attack:PacAttack", "dataset": "preferences", "rounds": 1000}
    steps = {"local-epochs": 0, "local-steps": 1, "clients-per-round": 20, "validation": "every=1000", "restarts": 1}
    return run_config | attack | steps | {"noise-multiplier": 0.0, "clipping": "update floor=1e-6"} | options()


# --- what an attack makes of updates, by hand

U = np.array([3.0, -4.0])


def test_an_estimate_is_the_local_vector_and_errs_on_items_on_the_other_side() -> None:
    """Delta v_i = alpha / 2 y_i u: of three labels two are negative, so u is added up to minus itself.

    From honest updates it is the direction of the longest, and their sum tells its sign.
    """
    estimate = Estimate(2, spectral=False)
    estimate.add(np.array([U, -U, -U, 0 * U]))
    assert estimate.vector.tolist() == U.tolist()
    estimate.add(np.array([-U, -U, -U, 0 * U]))
    assert (estimate.vector.tolist(), estimate.messages) == ((4 * U).tolist(), 2)
    for sign in (1, -1):
        estimate = Estimate(2, spectral=True)
        estimate.add(np.array([0.1 * U, -0.2 * U, -0.3 * U]) * sign)
        direction = estimate.vector
        np.testing.assert_allclose(direction / np.linalg.norm(direction), sign * U / 5, atol=1e-12)
    items = np.array([[1.0, 0], [0, 1], [-1, 0], [1, 1]])
    assert error_rate(np.array([1.0, 2]), np.array([1.0, -0.5]), items) == 0.25
    assert error_rate(-U, U, items) == error_rate(0 * U, U, items) == 1
    assert direction_error(-U, U, items) == 0
    for vector in ([1.0, 2], [-1.0, -2]):
        assert direction_error(np.array(vector), np.array([1.0, -0.5]), items) == 0.25
    assert direction_error(0 * U, U, items) == 1, "who knows nothing predicts nothing, whatever its sign"
    assert direction_error(U, 0 * U, items) == 1, "and of who has no taste nothing is to be known"
    assert [theorem_1(p, 10, 0.1) for p in (0.1, 0.3, 0.4, 0.45, 0.5)] == [1, 3, 12, 47, None]


def test_biases_tell_the_sign_of_who_likes_most() -> None:
    """Delta (v_i, b_i) = x_i (u, 1), with x_i > 0 for liked items: four of five, against Assumption 1."""
    rows = np.outer([0.2, 0.3, 0.1, 0.2, -0.7], [*U, 1.0])
    for spectral in (True, False):
        estimate = Estimate(2, spectral, biases=True)
        estimate.add(rows)
        np.testing.assert_allclose(estimate.vector / np.linalg.norm(estimate.vector), U / 5, atol=1e-12)
        without = Estimate(2, spectral)
        without.add(rows[:, :2] + (0.05 * U if spectral else 0))
        assert without.vector @ U < 0, "where most labels are likes, Assumption 1 turns it round"


def test_what_people_agree_on_tells_the_signs_together_or_which_labels_are_more_frequent() -> None:
    """Three of four like item 0 and dislike item 1; the last of them was stolen the wrong way round."""
    pushes = np.array([[1.0, -1, 1, 0], [2, -2, 0, 2], [0, -1, 1, 1], [-3, 3, -3, 0]])
    assert signs_by_items(pushes).tolist() == [1, 1, 1, -1]
    assert signs_by_items(-pushes).tolist() == [-1, -1, -1, 1], "items are pushed up on the whole"
    assert len(signs_by_items(np.zeros((2, 3)))) == 2
    preferences = open_dataset(BUNDLED / "preferences.json")
    targets = np.asarray(preferences.targets)
    half = np.resize([1, -1], len(targets)).astype(targets.dtype)
    for labels, lean in ((targets, "dislikes"), (-targets, "likes"), (half, "unknown")):
        assert lean_of(replace(preferences, targets=labels)) == lean
    # What was needed is when the error became and stayed low.
    errors = {7: [0.3, 0.05, 0.0], 8: [0.0, 0.3, 0.04], 9: [0.0, 0.0, 0.06], 4: [None, None, None]}
    found = ((client, t, error) for client, own in errors.items() for t, error in enumerate(own, start=1))
    rows = [dict(zip(("client", "interactions", "error"), one, strict=True)) for one in found]
    assert needed(rows, 0.05) == {7: 2, 8: 3, 9: None, 4: None}


@pytest.mark.parametrize("attack", ["zero", "jitter", "spectral"])
@pytest.mark.parametrize("unit", [{}, {"local-steps": 0, "local-epochs": 1}], ids=["steps", "epochs"])
def test_without_noise_all_are_stolen_in_a_few_interactions(
    attack_config: Config, attack: str, unit: Config, tmp_path: Path
) -> None:
    played = Attacked(attack_config | unit | options(attack=attack), folder=RunFolder(tmp_path / "run"))
    assert len(played.victims) == 5
    for row in map(played.last, played.victims):
        assert row["error"] <= 0.05
        assert row["interactions"] <= 8
        assert row["spent"] is None, "no number bounds what it gave away"
    assert "5 of 5" in played.told
    assert played.state.stopped == "the attack is over"
    table = pd.read_csv(tmp_path / "run" / "findings.csv")
    assert table.astype(object).where(table.notna(), None).to_dict("records") == played.findings


def test_the_victims_notice_nothing(attack_config: Config) -> None:
    """Their local parameters, and the items, are what the same rounds of honest training leave (Protocol 2, line 5)."""
    attacked = Attacked(attack_config)
    honest = Attacked(attack_config | {"strategy": "recommender", "rounds": 3})
    np.testing.assert_array_equal(attacked.local_parameters(), honest.local_parameters())
    np.testing.assert_array_equal(attacked.items, honest.items)
    assert len(attacked.state.history) > len(honest.state.history)
    assert all(entry.moved for entry in attacked.state.history[1:]), "nobody reads of too few releases"


def test_the_messages_are_those_of_protocol_2(attack_config: Config) -> None:
    played = Attacked(attack_config | options(error=0.0) | {"local-steps": 3})
    assert [row["error"] for row in played.findings] == [0.0] * 5, "items of zeros show the local parameters exactly"
    *honest, (task, stolen), (last, restored) = played.trains
    assert [task.local_steps for task, _ in honest] == [3, 3, 3]
    assert (task.local_steps, task.local_epochs, list(task.clients)) == (1, 0, played.victims)
    assert not stolen.any()
    assert (last.local_steps, last.local_epochs, list(last.clients)) == (0, 0, played.victims)
    np.testing.assert_array_equal(restored, played.items)
    # A spectral reading asks for a step on all rows, a short one where noise is in proportion, else a long one.
    for run, step in (({}, 0.1 / 64), ({"message-noise": 0.01}, 6.4)):
        played = Attacked(attack_config | options(reading="spectral", attack="jitter", interactions=1) | run)
        *_, (task, _), (last, _) = played.trains
        assert (task.local_steps, task.local_epochs, task.batch_size) == (0, 1, 0)
        assert task.step_size == pytest.approx(step)
        assert (last.local_steps, last.local_epochs) == (0, 0)
    # Jitter is never the same, and almost nothing.
    played = Attacked(attack_config | options(attack="jitter", error=0.0, after=0) | {"noise-multiplier": 9.0})
    sent = [items for _, items in played.trains[:-1]]
    assert len({items.tobytes() for items in sent}) == len(sent) == 12
    assert all(0 < np.abs(items).max() < 0.01 for items in sent)


@pytest.mark.parametrize(
    ("policy", "run", "maximum"),
    [
        ({"max-participations": 3}, {}, 3),
        ({"paper-budget": 5 * N / 2 + 1}, {}, 5),
        ({"budget": 4 * 2 * N / 2 + 1}, {"clipping": "public", "noise-per": "vector"}, 4),
    ],
    ids=["participations", "paper's budget", "epsilon"],
)
def test_a_budget_caps_the_interactions(attack_config: Config, policy: Config, run: Config, maximum: int) -> None:
    """n / nu = 400 a participation, or an epsilon of 2 n / nu."""
    config = attack_config | options(after=0) | {"noise-multiplier": 2.0} | run
    played = Attacked(config, **policy)
    ledger = Totals(next(iter(played.grid.contexts.values())).state)
    for client in played.victims:
        assert played.last(client)["interactions"] == maximum
        assert played.last(client)["spent"] == maximum * N / 2
        assert participations(ledger, client) == maximum
    assert played.state.stopped == "the attack is over"
    assert len(played.state.history) == maximum + 3, "round 0, a round without an answer, and one to restore the items"


def test_the_truth_is_what_each_client_keeps_whatever_the_number_of_nodes(attack_config: Config) -> None:
    config = attack_config | {"strategy": "recommender", "rounds": 3}
    first, *others = (Attacked(config, nodes).local_parameters() for nodes in (1, 2, 7))
    assert first.shape == (TRAINING, 8)
    assert len({row.tobytes() for row in first}) == TRAINING
    for other in others:
        np.testing.assert_allclose(other, first, rtol=0, atol=1e-6)
    # Clients that have not been asked yet are as they will begin, and to read it changes nothing.
    grid = ListeningGrid(client_app, attack_config)
    roster = Setup.parse(attack_config).fleet.roster(grid)
    sent, state = len(grid.sent), dict(grid.contexts[100].state)
    assert list(local_parameters(grid, roster, np.array([7, 3]))) == [7, 3]
    assert (len(grid.sent), dict(grid.contexts[100].state)) == (sent, state)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        *((options(**pair), "config.option-value") for pair in ({"attack": "guess"}, {"victims": 0}, {"error": "nan"})),
        ({"rounds": 15}, "config.attack-rounds"),
        ({"patience": 3}, "config.attack-patience"),
        ({"resume": "yesterday"}, "config.attack-resume"),
        ({"dataset": "synthetic", "model": "mlp", "local": "0.*"}, "config.strategy-model"),
    ],
    ids=str,
)  # fmt: skip
def test_an_attack_that_cannot_be_run_says_why(attack_config: Config, changes: Config, code: str) -> None:
    Setup.parse(run_config("pac-attack"))
    Setup.parse(attack_config | {"rounds": 16})
    with raises(ConfigError, code):
        Setup.parse(attack_config | {"rounds": 16} | changes)


# --- the audit, and its command


Row = dict[str, Any]

FEW: Row = {"victims": 6, "after": 5, "interactions": 48}


def row(found: list[Row]) -> Row:
    return Audited(1.0, PAPER, found, 0.05).row


def test_without_noise_all_local_parameters_are_stolen_and_noise_makes_a_theft_take_longer() -> None:
    """Within the bound of theorem 1 or two; who reads the direction needs fewer interactions than the paper."""

    def stolen(nu: float, name: str = PAPER) -> list[Row]:
        return attack("preferences", nu, FEW | ATTACKS[name])

    bare, papers, spectral = stolen(0.0), stolen(1.0), stolen(1.0, "spectral")
    for found in (bare, spectral):
        assert sum(victim["enough"] is not None for victim in found) == 6
    # A bound that holds with probability .9: of six clients, three or more beyond it have a chance below .02.
    assert sum((victim["enough"] or 0) > (victim["bound"] or 0) for victim in bare) <= 2
    assert all(victim["spent"] is None for victim in bare), "nothing bounds what an unsanitised release tells"
    assert all(victim["spent"] == victim["interactions"] * 800 / 1.0 for victim in papers), "n / nu"
    assert row(papers)["enough"] > row(bare)["enough"]
    assert row(spectral)["enough"] < row(papers)["enough"]


def one(client: int, error: float | None, enough: int | None, by_rate: Any, by_items: Any, likes: float) -> Row:
    return {
        "client": client, "interactions": 10 if error is not None else 0, "likes": likes, "enough": enough,
        "spent": 100.0, "bound": 3, "error": error, "by_rate": by_rate, "by_items": by_items,
    }  # fmt: skip


FOUND = [one(1, 0.0, 2, 0.0, 0.0, 0.4), one(2, 0.04, 6, 0.96, 0.04, 0.5), one(3, 0.4, None, 0.4, 0.6, 0.7)]


def test_a_row_counts_directions_and_signs_and_the_strongest_attack_steals_most_and_of_these_the_fastest() -> None:
    assert row(FOUND) == {
        "nu": 1.0, "attack": PAPER, "stolen": "2 of 3", "sign by rate": 1, "by items": 2, "enough": 4.0, "maximum": 6,
        "asked": 10, "error": 0.04, "spent": 40.0,
    }  # fmt: skip
    nothing = row([one(1, None, None, None, None, 0.4)])
    assert (nothing["stolen"], nothing["enough"], nothing["error"]) == ("0 of 1", None, None)
    slow, fast = [one(1, 0.0, 9, 0, 0, 0.4)], [one(1, 0.0, 2, 0, 0, 0.4)]
    made = [(1.0, "a", slow), (1.0, "b", fast), (1.0, "c", FOUND[2:]), (3.0, "c", FOUND), (3.0, "a", slow)]
    found = strongest([Audited(*one, 0.05) for one in made])
    assert [(best.nu, best.attack) for best in found] == [(1.0, "b"), (3.0, "c")]


def test_the_command_prints_what_it_wrote_and_names_bad_input_before_anything_is_attacked(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    line = ["identify", "--victims", "3", "--after", "2", "--interactions", "4", *out]
    result = CliRunner().invoke(app, [*line, "--noise-multiplier", "0"])
    assert result.exit_code == 0, result.output
    assert "the strongest attack" in result.output
    assert (tmp_path / "out" / "table.md").exists()
    for option, value, part in (
        ("--dataset", "nowhere", "'nowhere'"),
        ("--dataset", "synthetic", "[data.no-preferences]"),
        ("--model", "steal", "'steal'"),
        ("--noise-multiplier", "-1", "noise-multiplier"),
    ):
        result = CliRunner().invoke(app, ["identify", *out, option, value])
        assert result.exit_code in (2, 3)
        assert part in " ".join(result.output.split())


# --- the theorems of the paper


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
        result = CliRunner().invoke(experiments, ["pac", "--quick", "--out", str(tmp_path / name)])
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
