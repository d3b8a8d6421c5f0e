"""A server that steals local models, played against the real ClientApp and its gate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from numpy.typing import NDArray

from attacks.pac_attack import PacAttack, Theft, checkpoint, error_rate, needed
from client.app import app
from client.personal import LocalModels
from privacy.memory_ledger import MemoryLedger
from protocol.errors import ConfigError
from protocol.messages import CONFIG, HYPOTHESES
from protocol.records import from_array_record
from server.rounds import State, initial_hypotheses, run_rounds
from server.settings import Settings
from simulation.grid import InProcessGrid

Config = dict[str, Any]
Findings = list[dict[str, Any]]

COLUMNS = ["attack", "noise_multiplier", "client", "interactions", "error", "spent"]
N = 800  # parameters of 100 items of 8 factors
TRAINING = 60

attacks = pytest.mark.parametrize("attack", ["zero", "jitter", "spectral"])


class SpyGrid(InProcessGrid):
    """The in-process grid; keeps the train messages that go through it."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.trains: list[Message] = getattr(self, "trains", [])
        self.trains += [message for message in messages if message.metadata.message_type == "train"]
        return super().push_messages(messages)


class Played:
    """A run that is over."""

    def __init__(self, config: Config, nodes: int = 1, **policy: Any) -> None:
        self.settings = Settings.parse(config)
        self.strategy = self.settings.strategy
        places = [{"partition-id": i, "num-partitions": nodes} | policy for i in range(nodes)]
        self.grid = SpyGrid(app, config, node_configs=places)
        start = initial_hypotheses(self.settings, self.grid)
        self.state = State(hypotheses=start, best=start)
        run_rounds(self.settings, self.grid, self.state, lambda _: None)
        self.contexts = list(self.grid.contexts.values())

    @property
    def items(self) -> NDArray[Any]:
        return self.state.hypotheses["items"]

    def local_models(self) -> NDArray[Any]:
        """What the training clients keep, where there is one node."""
        return LocalModels(self.contexts[0].state, 8, self.settings.seed).read(range(TRAINING))

    @property
    def findings(self) -> Findings:
        return self.strategy.findings

    @property
    def victims(self) -> list[int]:
        return sorted({row["client"] for row in self.findings})

    def last(self, client: int, noise_multiplier: float) -> dict[str, Any]:
        """Return the last row on a client at a noise multiplier."""
        rows = [row for row in self.findings if (row["client"], row["noise_multiplier"]) == (client, noise_multiplier)]
        return rows[-1]


@pytest.fixture
def attack_config(run_config: Config) -> Config:
    """Three rounds of honest training, then at most twelve interactions with each of five clients, without noise."""
    return run_config | {
        "strategy": "pac-attack", "federation": "preferences", "rounds": 1000, "restarts": 1, "validate-every": 1000,
        "local-epochs": 0, "local-steps": 1, "clients-per-round": 20, "noise-multiplier": 0.0, "radius-floor": 1e-6,
        "attack-after": 3, "attack-victims": 5, "attack-interactions": 12, "attack-multipliers": "0",
    }  # fmt: skip


# --- what an attack makes of updates, by hand

U = np.array([3.0, -4.0])


def test_from_updates_of_zeros_their_sum_turned_round_is_the_local_model() -> None:
    """Delta v_i = alpha / 2 y_i u: of three labels two are negative, so u is added up to minus itself."""
    theft = Theft(2, spectral=False)
    theft.add(np.array([U, -U, -U, 0 * U]))
    assert theft.local_model.tolist() == U.tolist()
    theft.add(np.array([-U, -U, -U, 0 * U]))
    assert theft.local_model.tolist() == (4 * U).tolist()
    assert theft.messages == 2


def test_from_honest_updates_the_direction_of_the_longest_is_the_local_model() -> None:
    """And their sum tells its sign, which the direction alone does not."""
    for sign in (1, -1):
        theft = Theft(2, spectral=True)
        theft.add(np.array([0.1 * U, -0.2 * U, -0.3 * U]) * sign)
        direction = theft.local_model
        np.testing.assert_allclose(direction / np.linalg.norm(direction), sign * U / 5, atol=1e-12)


def test_an_estimate_errs_on_the_items_that_it_puts_on_the_other_side() -> None:
    items = np.array([[1.0, 0], [0, 1], [-1, 0], [1, 1]])
    assert error_rate(np.array([1.0, 2]), np.array([3.0, 1]), items) == 0
    assert error_rate(np.array([1.0, 2]), np.array([1.0, -0.5]), items) == 0.25
    assert error_rate(-U, U, items) == 1
    assert error_rate(0 * U, U, items) == 1, "who knows nothing predicts nothing"


def test_the_attack_looks_ever_more_seldom() -> None:
    assert [t for t in range(1, 100) if checkpoint(t)] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]


def test_what_was_needed_is_when_the_error_became_and_stayed_low() -> None:
    errors = {7: [0.3, 0.05, 0.0], 8: [0.0, 0.3, 0.04], 9: [0.0, 0.0, 0.06], 4: [None, None, None]}
    rows = [
        {"client": client, "interactions": t, "error": error}
        for client, own in errors.items()
        for t, error in enumerate(own, start=1)
    ]
    assert needed(rows, 0.05) == {7: 2, 8: 3, 9: None, 4: None}


# --- without noise


@attacks
@pytest.mark.parametrize("unit", [{}, {"local-steps": 0, "local-epochs": 1}], ids=["steps", "epochs"])
def test_without_noise_every_local_model_is_stolen_in_a_few_interactions(
    attack_config: Config, attack: str, unit: Config
) -> None:
    played = Played(attack_config | unit | {"attack": attack})
    assert len(played.victims) == 5
    for client in played.victims:
        row = played.last(client, 0.0)
        assert row["error"] <= 0.05
        assert row["interactions"] <= 8
        assert row["spent"] is None, "no number bounds what it gave away"
    (remark,) = played.state.remarks
    assert remark.startswith(f"Attack {attack}, no noise: 5 of 5 local models stolen, but for 5% of what they predict")
    assert played.state.stopped == "the attack is over"


def test_items_of_zeros_tell_the_local_model_exactly(attack_config: Config) -> None:
    played = Played(attack_config | {"attack-error": 0.0})
    assert [row["error"] for row in played.findings] == [0.0] * 5


def test_the_victims_notice_nothing(attack_config: Config) -> None:
    """Their local models, and the items, are what the same rounds of honest training leave (Protocol 2, line 5)."""
    attacked = Played(attack_config)
    honest = Played(attack_config | {"strategy": "recommender", "rounds": 3})
    np.testing.assert_array_equal(attacked.local_models(), honest.local_models())
    np.testing.assert_array_equal(attacked.items, honest.items)
    assert len(attacked.state.history) > len(honest.state.history)
    assert all(entry.moved for entry in attacked.state.history), "nobody reads of too few releases"


def test_the_messages_are_those_of_protocol_2(attack_config: Config) -> None:
    played = Played(attack_config | {"attack-error": 0.0, "local-steps": 3})
    *honest, theft, restoring = played.grid.trains
    assert [message.content.config_records[CONFIG]["local_steps"] for message in honest] == [3, 3, 3]
    demand = theft.content.config_records[CONFIG]
    assert (demand["local_steps"], demand["local_epochs"], demand["clients"]) == (1, 0, played.victims)
    assert not from_array_record(theft.content.array_records[HYPOTHESES])["items"].any()
    demand = restoring.content.config_records[CONFIG]
    assert (demand["local_steps"], demand["local_epochs"], demand["clients"]) == (0, 0, played.victims)
    np.testing.assert_array_equal(from_array_record(restoring.content.array_records[HYPOTHESES])["items"], played.items)


def test_jitter_is_never_the_same_and_almost_nothing(attack_config: Config) -> None:
    played = Played(
        attack_config | {"attack": "jitter", "attack-multipliers": "9", "attack-error": 0.0, "attack-after": 0}
    )
    sent = [
        from_array_record(message.content.array_records[HYPOTHESES])["items"] for message in played.grid.trains[:-1]
    ]
    assert len(sent) == 12
    assert all(0 < np.abs(items).max() < 0.01 for items in sent)
    assert len({items.tobytes() for items in sent}) == len(sent)


# --- with noise


def test_noise_makes_it_take_longer_and_cost_more(attack_config: Config) -> None:
    played = Played(
        attack_config
        | {"attack-multipliers": "0 1", "attack-interactions": 300, "attack-victims": 3, "attack-error": 0.1}
    )
    for client in played.victims:
        plain, noised = played.last(client, 0.0), played.last(client, 1.0)
        assert noised["interactions"] > plain["interactions"]
        assert noised["spent"] == noised["interactions"] * N
        assert noised["error"] <= 0.1
    assert [remark.split(":")[0] for remark in played.state.remarks] == [
        "Attack zero, no noise", "Attack zero, nu = 1",
    ]  # fmt: skip


def test_findings_have_the_columns_that_are_documented(attack_config: Config) -> None:
    played = Played(attack_config | {"attack-multipliers": "0 2"})
    assert played.findings
    assert all(list(row) == COLUMNS for row in played.findings)
    assert all(f"``{column}``" in str(PacAttack.__doc__) for column in COLUMNS)
    asked = [row["interactions"] for row in played.findings if row["client"] == played.victims[0]]
    assert asked[-7:] == [1, 2, 3, 4, 6, 8, 12]


@attacks
def test_a_seed_gives_the_same_findings_whatever_the_number_of_nodes(attack_config: Config, attack: str) -> None:
    config = attack_config | {"attack": attack, "attack-multipliers": "0 2", "message-noise": 0.01}
    first, *others = (Played(config, nodes).findings for nodes in (1, 2, 7))
    assert first == others[0] == others[1]
    assert Played(config | {"seed": 1}).findings != first


# --- what a site can do


@pytest.mark.parametrize(("policy", "most"), [({"most-participations": 3}, 3), ({"budget": 5 * N / 2 + 1}, 5)], ids=str)
def test_a_budget_caps_the_interactions(attack_config: Config, policy: Config, most: int) -> None:
    """Of all noise multipliers together; a participation costs n / nu = 400 at the first."""
    config = attack_config | {"attack-after": 0, "noise-multiplier": 2.0, "attack-multipliers": "2 4"}
    played = Played(config, **policy)
    ledger = MemoryLedger(played.contexts[0].state)
    for client in played.victims:
        assert played.last(client, 2.0)["interactions"] == most
        assert played.last(client, 2.0)["spent"] == most * N / 2
        assert played.last(client, 4.0)["interactions"] == 0
        assert ledger.participations(client) == most
    assert all("Then no victim released anything any more." in remark for remark in played.state.remarks)
    assert f"the others held out for {most}." in played.state.remarks[0]
    assert played.state.stopped == "the attack is over"
    assert len(played.state.history) == most + 3, "two rounds without an answer, and one to restore the items"


def test_honest_rounds_use_up_the_same_budget(attack_config: Config) -> None:
    config = attack_config | {"clients-per-round": TRAINING}
    played = Played(config, **{"most-participations": 4, "allow-unsanitised": True})
    assert [row["interactions"] for row in played.findings] == [1] * 5


def test_of_clients_that_do_not_tell_nobody_knows_what_was_stolen(attack_config: Config) -> None:
    config = attack_config | {"attack-multipliers": "2", "noise-multiplier": 2.0}
    played = Played(config, **{"allow-unsanitised": False})
    assert {row["error"] for row in played.findings} == {None}
    (remark,) = played.state.remarks
    assert remark == "Attack zero, nu = 2: no client tells its local model, so nobody knows what was stolen."


@pytest.mark.parametrize(("attack", "interactions"), [("zero", 0), ("spectral", 1), ("jitter", 12)])
def test_a_tripwire_stops_zeros_and_repeats_but_not_who_knows_of_it(
    attack_config: Config, attack: str, interactions: int
) -> None:
    config = attack_config | {"attack": attack, "attack-error": 0.0, "attack-multipliers": "2"}
    played = Played(config, tripwire=True)
    assert {played.last(client, 2.0)["interactions"] for client in played.victims} == {interactions}


def test_balanced_minibatches_leave_the_sum_nothing_to_tell(attack_config: Config) -> None:
    """What is left is rounding, of which a guess is made: half of the items, more or less."""
    config = attack_config | {"attack-victims": 20}
    errors = [
        [played.last(client, 0.0)["error"] for client in played.victims]
        for played in (Played(config), Played(config, **{"balanced-batches": True}))
    ]
    assert max(errors[0]) <= 0.05
    assert np.mean(errors[1]) > 0.3


# --- what cannot be run


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attack": "guess"}, "attack must be one of zero, jitter, spectral, got 'guess'"),
        ({"attack-multipliers": ""}, "attack-multipliers must be different numbers of at least 0, apart by spaces"),
        ({"attack-multipliers": "1, 2"}, "attack-multipliers must be different numbers"),
        ({"attack-multipliers": "1 -2"}, "attack-multipliers must be different numbers"),
        ({"attack-multipliers": "1 inf"}, "attack-multipliers must be different numbers"),
        ({"attack-multipliers": "nan"}, "attack-multipliers must be different numbers"),
        (
            {"noise-multiplier": 1.0},
            "attack-multipliers go below noise-multiplier = 1; lower that to the least of them",
        ),
        ({"rounds": 15}, "the attack may take 16 rounds; raise rounds to that"),
        ({"rounds": 27, "attack-multipliers": "0 1"}, "the attack may take 28 rounds; raise rounds to that"),
        ({"federation": "synthetic"}, "strategy 'pac-attack' is for factor models, not 'linear'"),
    ],
    ids=str,
)
def test_an_attack_that_cannot_be_run_says_why(attack_config: Config, changes: Config, reason: str) -> None:
    Settings.parse(attack_config | {"rounds": 16})
    with pytest.raises(ConfigError, match=f"^{reason}"):
        Settings.parse(attack_config | changes)
