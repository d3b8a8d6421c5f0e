"""What a malicious server can try, through the real ClientApp, at a site with data of its own.

In each case: nothing unsanitised leaves, the ledger is right, and the node goes on serving.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from tests.helpers.datasets import manifest
from tests.helpers.ledgers import spent
from tests.helpers.messages import asked, refused, released, scores, sent, task_of, wire
from tests.helpers.messages import releases as arrays_of
from umbel.client import node as client_node
from umbel.client.app import app
from umbel.client.cohort import Cohort
from umbel.client.learner import Learner
from umbel.data import offsets_of, write_dataset
from umbel.privacy.mechanisms import randomness
from umbel.privacy.site.journal import Journal
from umbel.protocol.records import pack
from umbel.protocol.tasks import VERSION, EvaluationSpec, TrainingSpec
from umbel.simulation.grid import InProcessGrid

CLIENTS = 4
HONEST = task_of((0, 1), noise_multiplier=3.0, clip_norm=0.01)
PRICE = Fraction(2, 3)
THETA = {"weight": np.array([[[5.0, 6.0]], [[4.0, -4.5]]], np.float32)}


class Site:
    """A site with four clients, a ledger, and a server that may send it anything."""

    def __init__(self, folder: Path, run_config: dict[str, Any], **policy: Any) -> None:
        generator = np.random.default_rng(0)
        features = generator.uniform(-1, 1, (10 * CLIENTS, 2)).astype(np.float32)
        targets = (features @ np.array([1.0, 2.0], np.float32)).astype(np.float32)
        own = manifest(CLIENTS, model="linear", loss="mse")
        write_dataset(folder / "own", own, features, targets, offsets_of([10] * CLIENTS))
        self.ledger_path = folder / "ledger.jsonl"
        policy = {key.replace("_", "-"): value for key, value in policy.items()}
        config = {"data-path": str(folder / "own"), "ledger-path": str(self.ledger_path)} | policy
        if {"budget", "paper-budget", "max-participations"} & set(policy):
            Journal.create(self.ledger_path)
        self.run_config, self.config = run_config, config
        self.grid = InProcessGrid(app, run_config, node_configs=[config])
        [self.node] = self.grid.get_node_ids()

    def send(self, content: RecordDict, message_type: str = "train") -> Message:
        [reply] = self.grid.send_and_receive([Message(content, self.node, message_type)])
        return reply

    def run(self, number: int) -> None:
        """Have what follows be another run's."""
        for context in self.grid.contexts.values():
            context.run_id = number

    def ask(self, task: TrainingSpec = HONEST, hypotheses: ArrayRecord | None = None) -> Message:
        return self.send(asked(THETA if hypotheses is None else hypotheses, task))

    def ask_raw(self, **changes: Any) -> Message:
        """Send a task that `TrainingSpec` itself would not let pass."""
        record = HONEST.to_record()
        for key, value in changes.items():
            record[key] = value
        return self.send(asked(THETA, record))

    def evaluate(self, clients: tuple[int, ...], hypotheses: Any = THETA) -> Message:
        return self.send(asked(hypotheses, None, EvaluationSpec(1, clients)), "evaluate")

    def spent(self) -> list[Fraction | float]:
        if not self.ledger_path.exists():
            return [Fraction(0)] * CLIENTS
        ledger = Journal(self.ledger_path)
        return [spent(ledger, client) for client in range(CLIENTS)]

    def lives(self) -> bool:
        """An honest task is still answered, with noise."""
        return not self.ask(replace(HONEST, clients=(3,))).has_error()


Open = Callable[..., Site]


@pytest.fixture
def open_site(tmp_path: Path, run_config: dict[str, Any]) -> Open:
    """What opens a site with a policy."""
    return partial(Site, tmp_path, run_config)


@pytest.fixture
def site(open_site: Open) -> Site:
    return open_site()


def releases(reply: Message) -> np.ndarray[Any, Any]:
    return arrays_of(reply)["weight"].reshape(-1, 2)


def test_an_honest_task_is_charged_and_noised(site: Site) -> None:
    reply = site.ask()
    assert released(reply) == [1, 1]
    assert site.spent() == [PRICE, PRICE, 0, 0]


CANNOT_BE: list[dict[str, Any]] = [
    *({"noise_multiplier": nu} for nu in (0.0, -1.0, math.nan, math.inf, -math.inf, 1e-300, 0.999)),
    *({"clip_norm": radius} for radius in (0.0, -1.0, math.nan, math.inf)),
    *({"clients": who} for who in ([], [0, 0], [-1], [CLIENTS], [10**18], [0.5], ["0"], [True], [*range(4)] * 1000)),
    *({"local_epochs": epochs} for epochs in (101, 2**31)),
    {"local_steps": 1001},
]


def test_what_makes_no_sense_or_is_below_the_policy_is_refused_for_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes in CANNOT_BE:
        assert refused(site.ask_raw(**changes)), str(changes)[:99]
    with monkeypatch.context() as patch:
        patch.setattr("umbel.client.app.Node.of", lambda *_: pytest.fail("the data were opened"))
        assert refused(site.ask_raw(local_epochs=101)), "before any data are looked at"
    assert site.spent() == [0, 0, 0, 0]
    assert site.lives()


@pytest.mark.parametrize(
    "asks",
    [
        {"optimizer": "sgd no-such=1"},
        {"optimizer": "sgd momentum=nan"},
        {"optimizer": "adam momentum=0.9"},
        {"optimizer": "adam epsilon=1e-400"},
        {"optimizer": "steam"},
    ],
)
def test_an_optimizer_that_there_is_not_is_refused_before_anybody_pays(
    asks: dict[str, Any], tmp_path: Path, run_config: dict[str, Any]
) -> None:
    site = Site(tmp_path, run_config | asks)
    assert refused(site.ask())
    assert site.spent() == [0, 0, 0, 0]


def test_a_seed_that_the_server_knows_does_not_predict_the_noise(site: Site) -> None:
    """Two identical tasks differ, and neither is what the seed's streams give in simulation."""
    first, second = releases(site.ask()), releases(site.ask())
    assert (first != second).any(axis=1).all()  # single numbers may coincide, on the grid they are rounded to
    assert site.spent() == [2 * PRICE, 2 * PRICE, 0, 0]
    seed = int(site.run_config["seed"])
    streams = randomness.noise_sources(seed, HONEST.round, list(HONEST.clients))
    expected = [generator.standard_normal(2) for generator in streams]
    trained = THETA["weight"].reshape(2, 2)
    for release, noise in zip(first, expected, strict=True):
        for start in trained:
            left = release - start
            cosine = abs(left @ noise) / np.linalg.norm(left) / np.linalg.norm(noise)
            assert cosine < 1 - 1e-9


@pytest.mark.parametrize("name", ["synthetic", "{own}", "../../own"])
def test_a_run_config_that_names_a_dataset_is_not_listened_to(
    tmp_path: Path, run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    site = Site(tmp_path, run_config | {"dataset": name.format(own=tmp_path / "own")})

    def never(asked: str) -> Path:
        raise AssertionError(f"the node looked for {asked}")

    monkeypatch.setattr(client_node, "find_dataset", never)
    assert not site.ask().has_error()
    assert site.spent() == [PRICE, PRICE, 0, 0]


def test_a_run_config_cannot_weaken_the_policy(tmp_path: Path, run_config: dict[str, Any]) -> None:
    """Neither can it claim a simulation."""
    wishes = {"allow-unsanitised": "true", "min-noise-multiplier": 0.0, "partition-id": 0, "num-partitions": 1}
    site = Site(tmp_path, run_config | wishes)
    assert refused(site.ask(replace(HONEST, noise_multiplier=0.0)))
    assert refused(site.ask()), "a run config with entries that there are not is not served at all"
    assert site.spent() == [0, 0, 0, 0]


def test_after_the_budget_is_gone_nothing_is_trained(open_site: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of 4/3 is two participations; a client that still can is trained alone."""
    site = open_site(paper_budget="1.3333333334")
    for _ in range(2):
        assert not site.ask().has_error()
    reply = site.ask(replace(HONEST, clients=(1, 2)))
    assert released(reply) == [0, 1]
    assert len(releases(reply)) == 1
    assert site.spent() == [2 * PRICE, 2 * PRICE, PRICE, 0]

    trained: list[Any] = []
    monkeypatch.setattr("umbel.client.work.NodeClients.train", lambda *asked: trained.append(asked))
    assert refused(site.ask())
    assert trained == []
    assert site.spent() == [2 * PRICE, 2 * PRICE, PRICE, 0]


def stacked(k: int, value: float = 1.0) -> dict[str, np.ndarray[Any, Any]]:
    return {"weight": np.full((k, 1, 2), value, np.float32)}


# Others that no model could have are in `test_gate.py`.
NO_HYPOTHESES: dict[str, dict[str, Any]] = {
    "NaN": stacked(2, math.nan),
    "wrong shape": {"weight": np.ones((2, 3, 2), np.float32)},
    "no axis": {"weight": np.float32(1.0)},
    "another key": {"wait": np.ones((2, 1, 2), np.float32)},
    "one key too many": stacked(2) | {"bias": np.ones((2, 1), np.float32)},
    "too many": stacked(11),
    "a million copies": stacked(1_000_000),
    "text": {"weight": np.array([["<script>"]])},
}


def test_hypotheses_that_are_none(site: Site) -> None:
    asked = set()
    for name, hypotheses in NO_HYPOTHESES.items():
        try:
            record = sent(hypotheses)
        except (TypeError, ValueError):  # what Flower itself cannot send
            continue
        asked.add(name)
        assert refused(site.ask(hypotheses=record)), name
    assert NO_HYPOTHESES.keys() - asked <= {"text"}
    assert site.spent() == [0, 0, 0, 0]
    assert site.lives()


def test_arrays_that_are_a_pickle_are_not_loaded(site: Site, tmp_path: Path) -> None:
    """An .npy of objects is a pickle, and loading one runs code."""
    marker = tmp_path / "ran"

    class Payload:
        def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
            return (Path.touch, (marker,))  # type: ignore[return-value]

    array = pack(stacked(2))
    buffer = BytesIO()
    np.save(buffer, np.array([[Payload()]], dtype=object), allow_pickle=True)
    next(iter(array.values())).data = buffer.getvalue()
    assert refused(site.ask(hypotheses=array))
    assert not marker.exists()
    assert site.lives()


def test_an_empty_message(site: Site) -> None:
    for kind in ("train", "evaluate", "query"):
        for empty in (RecordDict(), RecordDict({"training": ConfigRecord()})):
            assert refused(site.send(empty, kind)), kind
    assert site.lives()


def test_training_clients_do_not_report(site: Site) -> None:
    for clients in ((0,), (CLIENTS,), (0, 1, 2, 3)):
        assert refused(site.evaluate(clients))
    assert site.lives()


def test_a_message_type_that_the_app_does_not_know(site: Site) -> None:
    for kind in ("train.steal", "query.data", "evaluate.all"):
        reply = site.send(asked(THETA, HONEST), kind)
        assert reply.has_error()
        assert not reply.has_content()
        assert "own" not in reply.error.reason
    assert site.spent() == [0, 0, 0, 0]
    assert site.lives()


def test_training_asked_for_by_another_type_of_message_is_charged_and_noised(site: Site) -> None:
    content = asked(THETA, HONEST, EvaluationSpec(1, (0, 1)))
    first, second = (releases(site.send(content, "evaluate")) for _ in range(2))
    assert (first != second).any(axis=1).all()
    assert site.spent() == [2 * PRICE, 2 * PRICE, 0, 0]


def test_steps_that_blow_up_release_the_hypothesis_with_noise_and_cost_as_ever(site: Site) -> None:
    """A release that stayed away would tell the server something, for nothing."""
    reply = site.ask(replace(HONEST, step_size=1e38, local_epochs=50))
    assert released(reply) == [1, 1]
    assert np.isfinite(releases(reply)).all()
    assert site.spent() == [PRICE, PRICE, 0, 0]
    assert site.lives()


# --- work without end


def no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("Unable to allocate 14.9 TiB for an array with shape (5000, 411)")


def no_memory_of_torch(*_: Any, **__: Any) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 411 bytes")


def no_memory_of_the_gpu(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 411 bytes.")


@pytest.mark.parametrize("where", ["Cohort.gather", "LocalUpdate.passes_over", "LocalUpdate.size"])
@pytest.mark.parametrize("fault", [no_memory, no_memory_of_torch, no_memory_of_the_gpu])
def test_memory_that_is_not_enough_is_charged_and_answered_as_any_release(
    site: Site, monkeypatch: pytest.MonkeyPatch, where: str, fault: Callable[..., Any], node_log: StringIO
) -> None:
    """How much is needed depends on the number of rows; a reply that stayed away would tell it."""
    usual = site.ask()
    with monkeypatch.context() as patch:
        patch.setattr(f"umbel.client.cohort.{where}", fault)
        reply = site.ask()
    assert set(reply.content) == set(usual.content) == {"arrays", "released"}
    assert released(reply) == [1, 1]
    assert len(wire(reply)) == len(wire(usual))
    assert np.isfinite(releases(reply)).all()
    assert site.spent() == [2 * PRICE, 2 * PRICE, 0, 0]
    assert "could not compute" in node_log.getvalue()
    assert site.lives()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_client_whose_rows_need_too_much_memory_changes_nobody_elses_release(
    tmp_path: Path, run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    """A server that saw all updates vanish would know that some client has many rows."""
    gather, score, last = Cohort.gather, Learner.score, []

    def too_many(dataset: Any, clients: list[int], device: Any) -> Any:
        last[:] = clients
        if 0 in clients and not on_gpu:
            raise MemoryError
        return gather(dataset, clients, device)

    def too_many_on_gpu(self: Any, hypotheses: Any, cohort: Cohort, *rest: Any) -> Any:
        def none(_engine: Any, _part: slice) -> None:
            raise torch.OutOfMemoryError

        if 0 in last and on_gpu:
            self._in_chunks(cohort, cohort.lengths, none)
        return score(self, hypotheses, cohort, *rest)

    task, seeded = replace(HONEST, noise_multiplier=1.0, clients=(0, 1)), {"insecure-seed": True}
    site, other = (Site(tmp_path / name, run_config, **seeded) for name in ("one", "other"))
    usual = releases(site.ask(task))
    monkeypatch.setattr(Cohort, "gather", too_many)
    monkeypatch.setattr(Learner, "score", too_many_on_gpu)
    now = releases(other.ask(task))
    np.testing.assert_array_equal(usual[1], now[1])
    assert (usual[0] != now[0]).any(), "the one that could not be computed releases no update"
    assert other.spent() == site.spent()


def test_time_that_is_over_is_charged_and_answered_as_any_release(open_site: Open, tmp_path: Path) -> None:
    """The release is one of the hypotheses with noise: nobody's data play a part in it."""
    site = open_site(max_seconds=1e-9, min_noise_multiplier=2**-10)
    reply = site.ask(replace(HONEST, noise_multiplier=2**-10, step_size=0.5, batch_size=0, clients=(0, 1, 2, 3)))
    assert released(reply) == [1] * 4
    # They have not chosen either; training would have moved them by more than 1.
    np.testing.assert_allclose(releases(reply), [[5, 6]] * 4, atol=0.01)
    assert site.spent() == [2048] * 4
    assert not (tmp_path / "ledger.jsonl.local").exists()


def test_passes_beyond_max_examples_are_left_out_in_silence(open_site: Open) -> None:
    """Ten rows a client and thirty computations: three epochs, whatever was asked."""
    site = open_site(min_noise_multiplier=1e-6, max_work="examples=30")
    exact = replace(HONEST, noise_multiplier=1e-6, batch_size=0, clients=(0,))
    three, twenty = (releases(site.ask(replace(exact, local_epochs=epochs))) for epochs in (3, 20))
    np.testing.assert_allclose(three, twenty, atol=1e-4)
    two = releases(site.ask(replace(exact, local_epochs=2)))
    assert np.abs(two - three).max() > 0.01


def test_reports_of_training_clients_are_charged_where_nothing_could_be_computed(
    open_site: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = open_site(reports="noise=4.0")
    monkeypatch.setattr("umbel.client.cohort.Cohort.gather", no_memory)
    losses, metrics = scores(site.evaluate((CLIENTS, CLIENTS + 1)))
    assert np.isfinite([losses, metrics]).all()
    assert site.spent() == [Fraction(1, 2), Fraction(1, 2), 0, 0]


def test_clients_that_report_as_it_is_do_not_report_what_is_not_so(
    open_site: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = open_site(role="validation")
    monkeypatch.setattr("umbel.client.cohort.Cohort.gather", no_memory)
    assert refused(site.evaluate((0,)))


def test_in_simulation_an_error_is_seen(run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    grid = InProcessGrid(app, run_config)
    monkeypatch.setattr("umbel.client.cohort.Cohort.gather", no_memory)
    [reply] = grid.send_and_receive([Message(asked(THETA, HONEST), *grid.get_node_ids(), "train")])
    assert refused(reply)


def test_a_site_may_accept_a_public_radius_alone(open_site: Open) -> None:
    site = open_site(clipping="public")
    assert refused(site.ask())
    assert not site.ask(replace(HONEST, clipping="public", clip_norm=0.5)).has_error()
    [first, *_] = Journal(site.ledger_path).rows()
    assert (first["clipping"], first["clip_norm"]) == ("public", 0.5)


def test_a_slip_in_the_policy_closes_the_site(open_site: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_site.py` has all slips."""
    site = open_site(min_noise_multiplier=math.nan)
    assert refused(site.ask())
    assert site.spent() == [0, 0, 0, 0]
    monkeypatch.setenv("UMBEL_MIN_NOISE", "50")
    assert refused(open_site().ask())


def test_a_ledger_that_was_lost_is_not_made_anew_where_there_is_a_limit(open_site: Open) -> None:
    site = open_site(paper_budget=10.0)
    assert not site.ask().has_error()
    site.ledger_path.unlink()
    assert refused(site.ask())
    assert not site.ledger_path.exists()


def test_releases_are_counted_where_noise_makes_them_cheap(open_site: Open) -> None:
    """At nu = 1e6 a release costs next to nothing, but the choice of a hypothesis shows through any noise."""
    site = open_site(max_participations=3)
    cheap = replace(HONEST, noise_multiplier=1e6)
    assert [refused(site.ask(cheap)) for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize("model", ["mlp", "os:getcwd", "sys:exit", "torch.nn:PReLU"])
def test_a_model_that_the_data_are_not_for_is_not_even_imported(
    tmp_path: Path, run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    imported: list[str] = []
    monkeypatch.setattr("umbel.models.import_by_name", imported.append)
    site = Site(tmp_path, run_config | {"model": model})
    assert refused(site.ask())
    assert imported == []
    assert site.spent() == [0, 0, 0, 0]


def test_a_loss_that_the_data_are_not_for_is_refused(tmp_path: Path, run_config: dict[str, Any]) -> None:
    """With cross entropy, clients whose labels do not fit would fail and the others not."""
    assert refused(Site(tmp_path, run_config | {"loss": "cross-entropy"}).ask())


# --- exact losses, of which six are enough for a small model


def test_a_run_may_have_clients_report_so_often_and_no_oftener(open_site: Open, run_config: dict[str, Any]) -> None:
    """Least squares of two parameters is a quadratic function, which six losses give away."""
    site = open_site(role="validation", max_evaluations=3)
    assert [refused(site.evaluate((0, 1))) for _ in range(5)] == [False] * 3 + [True] * 2
    site.grid = InProcessGrid(app, run_config, node_configs=[site.config])
    assert refused(site.evaluate((0, 1))), "a node that was started again remembers"
    site.run(2)
    assert [refused(site.evaluate((0,))) for _ in range(4)] == [False] * 3 + [True]


def test_a_report_that_fails_counts_too(open_site: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    site = open_site(role="validation", max_evaluations=1)
    with monkeypatch.context() as patch:
        patch.setattr("umbel.client.cohort.Cohort.gather", no_memory)
        assert refused(site.evaluate((0,)))
    assert refused(site.evaluate((0,)))


@pytest.mark.parametrize("content", [b"", b"not a database, but long enough to be taken for one" * 10])
@pytest.mark.parametrize("role", ["train", "validation"])
def test_a_ledger_or_a_count_that_cannot_be_read_closes_the_site(open_site: Open, role: str, content: bytes) -> None:
    site = open_site(role=role)
    ask = site.ask if role == "train" else lambda: site.evaluate((0,))
    assert not refused(ask())
    site.ledger_path.write_bytes(content)
    assert refused(ask())
    assert site.ledger_path.read_bytes() == content


def test_a_validation_site_reports_as_it_is_and_never_trains(open_site: Open) -> None:
    site = open_site(role="validation")
    losses, metrics = scores(site.evaluate((0,)))
    assert (len(losses), len(metrics)) == (1, 1)
    assert refused(site.ask())
    assert site.spent() == [0, 0, 0, 0]


def test_noise_is_drawn_only_after_the_charge_is_on_disk(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*_: Any) -> Any:
        assert site.spent() == [PRICE, PRICE, 0, 0]
        raise RuntimeError("crash")

    monkeypatch.setattr("umbel.privacy.mechanisms.sanitise.sanitise_in_place", look)
    assert refused(site.ask())
    assert site.spent() == [PRICE, PRICE, 0, 0]


def test_a_choice_shows_through_any_noise_and_costs_next_to_nothing(site: Site) -> None:
    """A limit of the guarantees, not a feature: docs/explain/threat-model.md, "What lies outside".

    Two hypotheses a thousand apart, noise a hundred radii wide: the release is plainly near one of
    them, and says which side of the plane between them the client's optimum (1, 2) lies on.
    """
    side = np.array([1.0, 0.0])
    for offset, expected in ((0.5, 1), (1.5, 0)):
        middle = np.array([offset, 0.0])
        pair = np.stack([middle - 1024 * side, middle + 1024 * side]).astype(np.float32)
        question = replace(HONEST, clients=(0,), noise_multiplier=1e3, clipping="public", step_size=1e-30)
        reply = site.ask(question, pack({"weight": pair[:, None]}))
        nearest = np.linalg.norm(pair - releases(reply), axis=1).argmin()
        assert nearest == expected
    assert site.spent()[0] == Fraction(2, 1000) * 2


# --- a recommender's local parameters


class Preferences(Site):
    """A site of four clients that have each labelled the items 0 to 9 of twenty and the two next to their number."""

    def __init__(self, folder: Path, run_config: dict[str, Any], **policy: Any) -> None:
        super().__init__(folder, run_config, **policy)
        items = np.array([[*range(10), 10 + 2 * client, 11 + 2 * client] for client in range(CLIENTS)])
        labels = np.tile([1, 1, -1, -1, -1, -1, -1, -1, -1, 1, -1, -1], CLIENTS).astype(np.int8)
        own = manifest(CLIENTS, model="factors items=20 size=4")
        write_dataset(folder / "preferences", own, items.reshape(-1, 1), labels, offsets_of([12] * CLIENTS))
        config = {"data-path": str(folder / "preferences"), "ledger-path": str(self.ledger_path)} | policy
        self.grid = InProcessGrid(app, run_config, node_configs=[config])

    def updates(self, items: np.ndarray[Any, Any], **changes: Any) -> np.ndarray[Any, Any]:
        """Return what the first client says of items (20, 4)."""
        task = replace(HONEST, **{"clients": (0,), "local_epochs": 0, "local_steps": 1, **changes})
        reply = self.ask(task, pack({"items": items[None].astype(np.float32)}))
        assert not reply.has_error()
        released: np.ndarray[Any, Any] = arrays_of(reply)["items"][0] - items
        return released


@pytest.fixture
def preferences(tmp_path: Path, run_config: dict[str, Any]) -> Preferences:
    return Preferences(tmp_path, run_config)


@pytest.mark.parametrize("kind", ["query.local", "query", "query.keep"])
def test_a_site_tells_no_local_parameters(preferences: Preferences, kind: str) -> None:
    """The door by which attacks on them were once judged is gone, and no other leads there."""
    content = asked({"items": np.ones((1, 20, 4), np.float32)})
    content["local"] = ConfigRecord({"clients": [0]})
    content["version"] = ConfigRecord({"version": VERSION})
    reply = preferences.send(content, kind)
    assert not reply.has_content() or set(reply.content) <= {"hosting"}
    assert preferences.spent() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "changes", [{"local_steps": 0}, {}, *({"message_noise": sigma} for sigma in (1e-300, 1.0, 1e30))], ids=str
)
def test_items_of_zeros_are_noised_and_charged_as_any_others(preferences: Preferences, changes: dict[str, Any]) -> None:
    """Without an update too (R = 0): else its reply, unchanged, would say that there was none.

    A server that asks for noisy messages cannot have the gate leave its own noise away, nor make it fail.
    """
    first, second = (preferences.updates(np.zeros((20, 4)), **changes) for _ in range(2))
    assert np.isfinite(first).all()
    assert (first != second).any(axis=1).all()
    assert preferences.spent() == [2 * Fraction(80, 3), 0, 0, 0]


def test_noise_a_row_shows_which_items_a_client_has_labelled(preferences: Preferences) -> None:
    """A weakness of the heuristic that a site should know: no policy forbids ``noise-per = "row"``.

    Rows that were not moved get the floor's noise, rows that were get noise of their own, longer, update.
    Within a public radius, or over the whole vector, all rows get the same.
    """
    items = np.random.default_rng(0).standard_normal((20, 4))
    asks = {"step_size": 10.0, "batch_size": 0}
    labelled = np.isin(np.arange(20), [*range(10), 10, 11])
    by_row = np.linalg.norm(preferences.updates(items, noise_per="row", **asks), axis=1)
    assert by_row[~labelled].max() < by_row[labelled].min()
    whole = np.linalg.norm(preferences.updates(items, **asks), axis=1)
    assert whole[~labelled].max() > whole[labelled].min()
