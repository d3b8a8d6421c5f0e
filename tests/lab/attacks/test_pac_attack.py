"""A server that steals local parameters, played against the real ClientApp and its gate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from tests.helpers.grids import ListeningGrid
from tests.helpers.ledgers import participations
from umbel.client.app import app
from umbel.data import BUNDLED, open_dataset
from umbel.privacy.site.totals import Totals
from umbel.protocol.errors import ConfigError
from umbel.protocol.messages import hypotheses_in, training_in
from umbel.protocol.tasks import TrainingSpec
from umbel.server.run_folder import RunFolder
from umbel.server.setup import Setup
from umbel.simulation.in_process import run_config
from umbel_lab.attacks.pac_attack import (
    Estimate,
    PacAttack,
    direction_error,
    error_rate,
    lean_of,
    local_parameters,
    needed,
    signs_by_items,
)

from .conftest import Config, RelayGrid, prepared

pytestmark = pytest.mark.rest

N = 800  # parameters of 100 items of 8 factors
TRAINING = 60
# Three rounds of honest training, then at most twelve interactions with each of five clients.
OPTIONS = {"after": 3, "victims": 5, "interactions": 12}

attacks = pytest.mark.parametrize("attack", ["zero", "jitter", "spectral"])


def options(**changes: Any) -> Config:
    """Return the entry of the run config that sets the attack's options."""
    pairs = " ".join(f"{name}={value}" for name, value in (OPTIONS | changes).items())
    return {"strategy": f"umbel_lab.attacks.pac_attack:PacAttack {pairs}"}


class Attacked:
    """A run that is over."""

    def __init__(
        self, config: Config, nodes: int = 1, folder: RunFolder | None = None, relayed: bool = False, **policy: Any
    ) -> None:
        places = [{"partition-id": i, "num-partitions": nodes} | policy for i in range(nodes)]
        self.grid = ListeningGrid(app, config, node_configs=places)
        run = prepared(config, RelayGrid(self.grid) if relayed else self.grid, folder)
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


@attacks
@pytest.mark.parametrize("unit", [{}, {"local-steps": 0, "local-epochs": 1}], ids=["steps", "epochs"])
def test_without_noise_all_are_stolen_in_a_few_interactions(attack_config: Config, attack: str, unit: Config) -> None:
    played = Attacked(attack_config | unit | options(attack=attack))
    assert len(played.victims) == 5
    for row in map(played.last, played.victims):
        assert row["error"] <= 0.05
        assert row["interactions"] <= 8
        assert row["spent"] is None, "no number bounds what it gave away"
    assert "5 of 5" in played.told
    assert played.state.stopped == "the attack is over"


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


def test_a_run_leaves_a_table_and_does_not_know_nodes_elsewhere(attack_config: Config, tmp_path: Path) -> None:
    config = attack_config | {"noise-multiplier": 2.0}
    here, played = Attacked(config, folder=RunFolder(tmp_path / "run")), Attacked(config, relayed=True)
    table = pd.read_csv(tmp_path / "run" / "findings.csv")
    assert list(table) == ["client", "interactions", "error", "by_rate", "by_items", "spent"]
    assert table.astype(object).where(table.notna(), None).to_dict("records") == here.findings
    assert here.told.startswith("Attack zero: clients released ")
    assert {row["error"] for row in played.findings} == {None}
    for client in here.victims:
        unknown = dict.fromkeys(("error", "by_rate", "by_items"))
        assert played.last(client) == here.last(client) | unknown, "which changes nothing else"
    assert "cannot be read here" in played.told


def test_the_truth_is_what_each_client_keeps_whatever_the_number_of_nodes(attack_config: Config) -> None:
    config = attack_config | {"strategy": "recommender", "rounds": 3}
    first, *others = (Attacked(config, nodes).local_parameters() for nodes in (1, 2, 7))
    assert first.shape == (TRAINING, 8)
    assert len({row.tobytes() for row in first}) == TRAINING
    for other in others:
        np.testing.assert_allclose(other, first, rtol=0, atol=1e-6)
    # Clients that have not been asked yet are as they will begin.
    fresh = Attacked(config | {"rounds": 1, "step-size": 1e-30}).local_parameters()
    assert 20 <= (first != fresh).any(axis=1).sum() < TRAINING
    # To read it changes nothing.
    grid = ListeningGrid(app, attack_config)
    roster = Setup.parse(attack_config).fleet.roster(grid)
    sent, state = len(grid.sent), dict(grid.contexts[100].state)
    assert list(local_parameters(grid, roster, np.array([7, 3]))) == [7, 3]
    assert (len(grid.sent), dict(grid.contexts[100].state)) == (sent, state)
    assert local_parameters(RelayGrid(grid), roster, np.array([7, 3])) == {}


@pytest.mark.parametrize(
    ("changes", "code", "part"),
    [
        *((options(**{name: value}), "", name) for name, value in (
            ("attack", "guess"), ("victims", 0), ("after", -1), ("interactions", "many"), ("error", "nan"),
            ("budget", 1),
        )),
        ({"rounds": 15}, "config.attack-rounds", "16 rounds"),
        ({"patience": 3}, "config.attack-patience", "patience = 0"),
        ({"resume": "yesterday"}, "config.attack-resume", 'resume = ""'),
        ({"dataset": "synthetic", "model": "mlp", "local": "0.*"}, "config.strategy-model", "'mlp'"),
    ],
    ids=str,
)  # fmt: skip
def test_an_attack_that_cannot_be_run_says_why(attack_config: Config, changes: Config, code: str, part: str) -> None:
    Setup.parse(run_config("pac-attack"))
    Setup.parse(attack_config | {"rounds": 16})
    with pytest.raises(ConfigError) as told:
        Setup.parse(attack_config | {"rounds": 16} | changes)
    assert code in ("", told.value.code)
    assert part in told.value.text
