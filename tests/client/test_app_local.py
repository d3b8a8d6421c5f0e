"""A client's local parameters are trained on its node, are its own affair, and never leave; frozen ones stay."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from numpy.typing import NDArray

import umbel.client.app
from tests.helpers.cohorts import CPU, ByArrays, learner_of
from tests.helpers.datasets import manifest, save_plane
from tests.helpers.ledgers import forget, spent
from tests.helpers.messages import asked, refused, releases, scores, task_of, wire
from tests.helpers.models import draw_hypotheses
from tests.helpers.nodes import ask, serving
from umbel import models
from umbel.client.app import app
from umbel.client.cohort import Cohort
from umbel.client.local import LocalParameters
from umbel.client.work import noisy_messages
from umbel.data import BUNDLED, open_dataset
from umbel.models import Model
from umbel.privacy.channels.client import ClientSanitiser
from umbel.privacy.site.config import Site
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.policy import Policy
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.home import disk_error
from umbel.protocol.records import to_array_record
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
from umbel.simulation.grid import InProcessGrid

Config = dict[str, Any]

PREFERENCES = open_dataset(BUNDLED / "preferences.json")
FACTORS = models.load("factors items=100 size=8")
ITEMS = FACTORS.initial(0)


def step(*clients: int, **changes: Any) -> TrainingSpec:
    """Ask clients, counted in their node, for one step of a minibatch of ten without noise, unless changed."""
    asks: Config = {"local_epochs": 0, "local_steps": 1, "step_size": 0.1, "batch_size": 10, "noise_multiplier": 0.0}
    return task_of(clients, **(asks | changes))


def train(grid: InProcessGrid, *clients: int, items: Any = None, node: int = 0, **changes: Any) -> NDArray[Any]:
    """Train clients of the factor model and return the items that they released, (clients, items, factors)."""
    start = ITEMS["items"] if items is None else items
    reply = ask(grid, asked({"items": start[None]}, step(*clients, **changes)), node=node)
    assert not reply.has_error(), reply
    return releases(reply)["items"]


def kept(grid: InProcessGrid, clients: list[int], node: int = 0, model: Model = FACTORS, seed: int = 0) -> Arrays:
    """Return the local parameters that a node has of clients, counted over the dataset."""
    context = list(grid.contexts.values())[node]
    return LocalParameters(Site(Policy(), None, simulated=True), context.state, model, "", seed).read(clients)


@pytest.fixture
def factors_config(run_config: Config) -> Config:
    """The run config of the recommender on the preferences that come with the app."""
    return run_config | {"strategy": "recommender", "dataset": "preferences", "hypotheses": 1}


# --- the factor model


def test_what_a_client_answers_does_not_depend_on_the_number_of_nodes(factors_config: Config) -> None:
    one, seven = (InProcessGrid(app, factors_config, nodes) for nodes in (1, 7))
    changes = {"message_noise": 0.1, "noise_multiplier": 2.0}
    for number in (3, 17, 20):
        node = number % 7
        np.testing.assert_array_equal(train(one, number, **changes), train(seven, number // 7, node=node, **changes))
        np.testing.assert_array_equal(kept(one, [number])["user"], kept(seven, [number], node)["user"])
        states = [context.state for context in seven.contexts.values()]
        assert "umbel.local" in states[node], "in simulation they are in the node's state"


def shows(message: Message, numbers: NDArray[Any]) -> list[bool]:
    """Return for each number whether it is among a message's bytes, in either precision."""
    sent = wire(message)
    return [number.tobytes() in sent or np.float64(number).tobytes() in sent for number in numbers.ravel()]


@pytest.mark.parametrize("noise", [{}, {"noise_multiplier": 3.0}, {"message_noise": 0.1}], ids=str)
def test_no_reply_holds_a_users_vector(factors_config: Config, noise: Config) -> None:
    """Not one number of it, before training or after; the search finds it in a message where it is."""
    grid, clients = InProcessGrid(app, factors_config), list(range(20))
    hypotheses, secrets = {"items": ITEMS["items"][None]}, [kept(grid, clients)["user"]]
    both = ask(grid, asked(hypotheses, step(*clients, **noise), EvaluationSpec(1, (60, 61))))
    secrets.append(kept(grid, clients)["user"])
    replies = [both, ask(grid, asked(hypotheses, evaluation=EvaluationSpec(1, (60, 61))), "evaluate")]
    assert set(both.content) == {"arrays", "released", "scores"}
    assert list(releases(both)) == ["items"]
    assert not any(any(shows(reply, np.concatenate(secrets))) for reply in replies)
    told = Message(RecordDict({"told": to_array_record({"user": secrets[0]})}), 1, "train", group_id="1")
    assert all(shows(told, secrets[0]))


def test_message_noise_is_for_models_with_local_parameters(run_config: Config) -> None:
    """On rows that changed alone it would show which those are, of any model."""
    hypotheses = {"weight": np.zeros((1, 1, 2), np.float32)}
    assert refused(ask(InProcessGrid(app, run_config), asked(hypotheses, step(0, message_noise=1.0))))


@pytest.fixture
def own_preferences(factors_config: Config, tmp_path: Path) -> InProcessGrid:
    rows = PREFERENCES.features, PREFERENCES.targets, PREFERENCES.lengths
    return serving(tmp_path, factors_config, PREFERENCES.manifest, *rows, role="split")


def test_own_data_get_noise_on_every_item(own_preferences: InProcessGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of the gate grows with it, and would not cover which items a client has labelled."""
    seen: list[Arrays] = []

    def watch(*arguments: Any) -> Arrays:
        seen.append(noisy_messages(*arguments))
        return seen[-1]

    monkeypatch.setattr(umbel.client.work, "noisy_messages", watch)
    train(own_preferences, 3, message_noise=0.1, noise_multiplier=3.0)
    assert (seen[0]["items"][0] != ITEMS["items"]).any(axis=1).all()


def test_training_that_nobody_has_paid_for_leaves_no_trace(
    own_preferences: InProcessGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server could train a client's local parameters as often as it likes."""
    with monkeypatch.context() as patch:
        # As where another node that shares the ledger was first.
        patch.setattr(Journal, "charge", lambda self, charge, clients, *_: [False] * len(clients))
        ask(own_preferences, asked({"items": ITEMS["items"][None]}, step(3, 4, noise_multiplier=3.0)))
    assert not list(tmp_path.glob("ledger.jsonl.local/**/*.s*"))
    train(own_preferences, 3, noise_multiplier=3.0)
    assert len(list(tmp_path.glob("ledger.jsonl.local/**/*.safetensors"))) == 1


def test_newcomers_report_how_well_the_items_suit_them(factors_config: Config) -> None:
    grid = InProcessGrid(app, factors_config)
    hypotheses = {"items": np.stack([ITEMS["items"], FACTORS.initial(1)["items"]])}
    reply = ask(grid, asked(hypotheses, evaluation=EvaluationSpec(1, (60, 66))), "evaluate")
    cohort = Cohort.gather(PREFERENCES, [60, 66], CPU)
    losses, metrics = ByArrays(learner_of("batched", FACTORS)).score_newcomers(
        hypotheses, cohort, kept(grid, [60, 66]), 0.1
    )
    best = losses.argmin(axis=0)
    assert scores(reply)[0] == pytest.approx(losses.min(axis=0).tolist())
    assert scores(reply)[1] == pytest.approx(np.take_along_axis(metrics, best[None], 0)[0].tolist())
    assert "umbel.local" not in next(iter(grid.contexts.values())).state, "nothing is kept of who only reports"


# --- a head of one's own


@pytest.fixture
def headed_config(run_config: Config) -> Config:
    """The run config of a network with a local head on the synthetic clients."""
    return run_config | {"model": "tests.helpers.models:Headed", "loss": "mse", "local": "head.*"}


def model_in(config: Config) -> Model:
    return models.load(config["model"], config["loss"], config["frozen"], config["local"])


def test_heads_differ_and_are_not_handed_to_the_gate(headed_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Arrays] = []
    original = ClientSanitiser.sanitised

    def spy(self: ClientSanitiser, trained: Arrays, *others: Any) -> Any:
        handed.append(trained)
        return original(self, trained, *others)

    monkeypatch.setattr(ClientSanitiser, "sanitised", spy)
    model, grid = model_in(headed_config), InProcessGrid(app, headed_config)
    fresh = kept(grid, [3, 4], model=model)
    reply = ask(grid, asked(draw_hypotheses(model, 2), step(3, 4, 7)))
    heads = kept(grid, [3, 4, 7], model=model)
    for name, value in heads.items():
        assert (value[0] != value[1]).any(), "each client has its own"
        assert (value[:2] != fresh[name]).any(axis=tuple(range(1, value.ndim))).all(), "and has trained it"
    (trained,) = handed
    assert list(trained) == list(releases(reply)) == ["body.weight", "body.bias"]
    assert not any(any(shows(reply, value)) for value in (*heads.values(), *fresh.values()))


# --- at a site


class Hospital:
    """A site of three clients, whose manifest keeps the head at home. Its node is started anew for each message."""

    def __init__(self, folder: Path, run: Config) -> None:
        self.run, self.ledger = run, folder / "site" / "ledger.jsonl"
        self.data = save_plane(folder / "own", 3, model=run["model"], loss="mse", local="head.*")
        self.ledger.parent.mkdir()

    def train(self, name: str = "spring", **changes: Any) -> NDArray[Any]:
        """Have two clients train in a run, and return the heads that the site then has of them in it."""
        config = {"data-path": str(self.data), "ledger-path": str(self.ledger), "rows": "largest=2000"}
        run = self.run | {"dataset": "", "model": "", "loss": "", "local": ""}
        grid = InProcessGrid(app, run, node_configs=[config])
        task = step(0, 2, run=name, **({"noise_multiplier": 5.0} | changes))
        assert not ask(grid, asked(draw_hypotheses(model_in(self.run), 1), task)).has_error()
        assert not next(iter(grid.contexts.values())).state
        return self.heads(name)

    def heads(self, name: str = "spring") -> NDArray[Any]:
        where = Site(Policy(ledger_path=str(self.ledger)), self.data)
        return LocalParameters(where, RecordDict(), model_in(self.run), name, 0).read([0, 2])["head.weight"]


@pytest.fixture
def site(tmp_path: Path, headed_config: Config) -> Hospital:
    return Hospital(tmp_path, headed_config)


def test_a_full_disk_costs_a_head_its_round_and_no_release_that_was_paid_for(
    site: Hospital, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rather than a charge without a reply."""
    first = site.train()

    def full(path: Path, *_: Any, **__: Any) -> None:
        raise disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path) or AssertionError

    monkeypatch.setattr("umbel.client.local.write_atomically", full)
    np.testing.assert_array_equal(site.train(round=2), first)
    assert len(list(Journal(site.ledger).rows())) == 4
    assert "[disk.full]" in caplog.text


# --- frozen parameters


def test_a_server_with_other_frozen_parameters_is_refused(
    run_config: Config, headed_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    config = headed_config | {"local": "", "frozen": "body.*"}
    model, grid = model_in(config), InProcessGrid(app, config)
    hypotheses = draw_hypotheses(model, 1)
    for digest, right in ((model.frozen_digest, True), ("", False), ("00" * 32, False)):
        training = ask(grid, asked(hypotheses, step(0, frozen_digest=digest)))
        evaluation = ask(grid, asked(hypotheses, None, EvaluationSpec(1, (100,), frozen_digest=digest)), "evaluate")
        assert training.has_error() == evaluation.has_error() == (not right)
    assert caplog.text.count("[protocol.frozen]") == 4


def test_an_adapter_costs_a_site_its_own_numbers_alone(tmp_path: Path, run_config: Config) -> None:
    """Four lines of a user's, and n is 22 of 49."""
    name, rows = "tests.helpers.models:Adapted", np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    about, model = manifest(2, model=name, loss="cross-entropy"), models.load(name, "cross-entropy")
    grid = serving(tmp_path, run_config, about, rows, np.array([0, 1, 2, 0, 1, 2]), [3, 3])
    task = step(0, 1, noise_multiplier=4.0, frozen_digest=model.frozen_digest)
    reply = ask(grid, asked(draw_hypotheses(model, 1), task))
    shapes = {key: value.shape for key, value in releases(reply).items()}
    assert shapes == {"down.weight": (2, 2, 8), "up.weight": (2, 3, 2)}
    ledger = Journal(tmp_path / "ledger.jsonl")
    assert [[release.n for release in ledger.account(client)] for client in (0, 1)] == [[22], [22]]
    assert [spent(ledger, client) for client in (0, 1)] == [5.5, 5.5]


# --- a guarantee for each row

ROWS = {"row_clip_norm": 1.0, "row_noise_multiplier": 1.0, "row_rate": 0.5, "row_batch": 2.0}


STILL = {"step_size": 1e-9}
"""With such short steps, heads stay where they begin."""


def moved(one: NDArray[Any], other: NDArray[Any]) -> list[bool]:
    """Return which numbers differ by more than short steps do."""
    return [bool(far) for far in (np.abs(one - other) > 1e-6).ravel()]


def test_training_that_hides_rows_never_starts_from_heads_of_training_that_does_not(site: Hospital) -> None:
    """They depend on all rows, so a row would change the gradients of all others, and no clipping bounds that."""
    first = site.train()
    hidden = site.train(round=2, **STILL, **ROWS)
    assert all(moved(hidden, first))
    assert not any(moved(site.train(round=3, **STILL, **ROWS), hidden))
    assert not any(moved(site.train(round=4, **STILL), hidden))
    assert all(moved(site.train(round=5, **STILL, **ROWS), hidden)), "round 4 did not hide rows"


def test_a_head_whose_charge_an_older_ledger_lost_is_no_start_for_training_that_hides_rows(
    site: Hospital,
) -> None:
    """A backup took the place of the journal, the index and the witness."""
    site.train(**ROWS)
    files = [site.ledger, Journal(site.ledger).index, Journal(site.ledger).witness.path]
    backup = [file.read_bytes() for file in files]
    trained = site.train(round=2, **ROWS)
    for file, content in zip(files, backup, strict=True):
        file.write_bytes(content)
    forget()
    begun = site.train(round=3, **STILL, **ROWS)
    assert all(moved(begun, trained))
    assert not any(moved(site.train(round=4, **STILL, **ROWS), begun))


def test_a_head_that_one_row_moved_cheaply_reaches_no_cheap_release(tmp_path: Path, headed_config: Config) -> None:
    """A release that costs little by its own noise trains the head with little noise on one of 401 rows; the next
    costs little by its steps, and shows how long the head is through all other rows' gradients."""
    rows = np.tile(np.array([[0, 1]], np.float32), (401, 1))
    targets = np.zeros((401, 1), np.float32)
    rows[-1], targets[-1] = [1, 0], 1e6
    about = manifest(1, model=headed_config["model"], loss="mse", local="head.*")
    policy = {"protect": "rows", "budget": "inf", "row_budget": "1 delta=1e-5"}
    grid = serving(tmp_path, headed_config, about, rows, targets, [401], **policy)

    def train(weight: Any, **changes: Any) -> Message:
        start = {"body.weight": np.array([weight], np.float32), "body.bias": np.zeros((1, 3), np.float32)}
        every = {"clipping": "public", "clip_norm": 1e3, "row_clip_norm": 1.0, "row_rate": 1.0, "row_batch": 1.0}
        return ask(grid, asked(start, step(0, **every | changes)))

    # The body is saturated, so that it does not train. The row's direction is orthogonal to the others'.
    bare = {"noise_multiplier": 1e12, "row_noise_multiplier": 0.5, "local_steps": 1000, "step_size": 0.01}
    assert not train([[20, 20], [20, -20], [-20, 20]], **bare).has_error()
    cheap = {"noise_multiplier": 0.0, "row_noise_multiplier": 20.0, "step_size": 1.0}
    assert refused(train(np.zeros((3, 2)), round=2, **cheap)), "the head has no noise but that of round 1"
    assert len(Journal(tmp_path / "ledger.jsonl").account(ClientInDataset(0))) == 1
