"""What a malicious server can try, through the real ClientApp, at a site with data of its own.

In each case: nothing unsanitised leaves, the ledger is right, and the node goes on serving.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message

from tests.helpers.datasets import manifest
from tests.helpers.hostile import spoilt_task
from tests.helpers.ledgers import spent
from tests.helpers.messages import asked, refused, released, scores, task_of
from tests.helpers.messages import releases as arrays_of
from tests.helpers.nodes import ask
from umbel.client.app import app
from umbel.data import offsets_of, write_dataset
from umbel.privacy.site.journal import Journal
from umbel.protocol.records import pack
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
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
        self.ledger = Journal.create(folder / "ledger.jsonl")
        policy = {key.replace("_", "-"): value for key, value in policy.items()}
        self.config = {"data-path": str(folder / "own"), "ledger-path": str(self.ledger.path)} | policy
        self.start(run_config)

    def start(self, run_config: dict[str, Any]) -> None:
        self.grid = InProcessGrid(app, run_config, node_configs=[self.config])

    def ask(self, task: TrainingSpec | ConfigRecord = HONEST, hypotheses: Any = THETA) -> Message:
        return ask(self.grid, asked(hypotheses, task))

    def evaluate(self, clients: tuple[int, ...]) -> Message:
        return ask(self.grid, asked(THETA, None, EvaluationSpec(1, clients)), "evaluate")

    def spent(self) -> list[Fraction | float]:
        return [spent(self.ledger, client) for client in range(CLIENTS)]

    def lives(self) -> bool:
        """An honest task is still answered, with noise."""
        return not self.ask(replace(HONEST, clients=(3,))).has_error()


@pytest.fixture
def site(tmp_path: Path, run_config: dict[str, Any]) -> Site:
    return Site(tmp_path, run_config)


def releases(reply: Message) -> np.ndarray[Any, Any]:
    return arrays_of(reply)["weight"].reshape(-1, 2)


@pytest.mark.parametrize("clients", [[CLIENTS], [10**18], [*range(4)] * 1000])
def test_clients_that_are_not_there_are_asked_for_nothing(site: Site, clients: list[int]) -> None:
    """All else that no task can be is in `tests.helpers.hostile`."""
    assert refused(site.ask(spoilt_task("training", "clients", clients, **HONEST.to_record())))
    assert refused(site.evaluate(tuple(clients[:1]))), "nor do they report"
    assert site.spent() == [0, 0, 0, 0]
    assert site.lives()


def test_what_is_below_the_policy_is_refused_before_any_data_are_looked_at(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.client.app.Node.of", lambda *_: pytest.fail("the data were opened"))
    assert refused(site.ask(replace(HONEST, local_epochs=101)))
    assert site.spent() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "asks",
    [
        *({"optimizer": name} for name in ("sgd no-such=1", "sgd momentum=nan", "adam momentum=0.9", "steam")),
        *({"model": name} for name in ("mlp", "os:getcwd", "sys:exit", "torch.nn:PReLU")),
        {"loss": "cross-entropy"},  # clients whose labels do not fit would fail, and others not
        {"rounds": "many"},
        {"allow-unsanitised": "true"},
        {"min-noise-multiplier": 0.0},
        {"partition-id": 0, "num-partitions": 1},
    ],
    ids=str,
)
def test_a_run_config_that_cannot_be_served_is_refused_before_anybody_pays(
    asks: dict[str, Any], tmp_path: Path, run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It weakens no policy, claims no simulation, and has no code imported that the site's data are not for."""
    imported: list[str] = []
    monkeypatch.setattr("umbel.models.import_by_name", imported.append)
    site = Site(tmp_path, run_config | asks)
    assert refused(site.ask())
    assert refused(site.ask(replace(HONEST, noise_multiplier=0.0)))
    assert imported == []
    assert site.spent() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "hypotheses",
    [
        {"weight": np.ones((2, 3, 2), np.float32)},
        {"weight": np.ones((11, 1, 2), np.float32)},
    ],
    ids=["another shape", "too many"],
)
def test_hypotheses_that_are_none(site: Site, hypotheses: dict[str, Any]) -> None:
    """Others, which no model could have, are in `test_gate.py`, and of other models in `tests/client/test_node.py`."""
    assert refused(site.ask(hypotheses=pack(hypotheses)))
    assert site.spent() == [0, 0, 0, 0]
    assert site.lives()


def test_arrays_that_are_a_pickle_are_not_loaded(site: Site, tmp_path: Path) -> None:
    """An .npy of objects is a pickle, and loading one runs code."""
    marker = tmp_path / "ran"

    class Payload:
        def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
            return (Path.touch, (marker,))  # type: ignore[return-value]

    array = pack(THETA)
    buffer = BytesIO()
    np.save(buffer, np.array([[Payload()]], dtype=object), allow_pickle=True)
    next(iter(array.values())).data = buffer.getvalue()
    assert refused(site.ask(hypotheses=array))
    assert not marker.exists()
    assert site.lives()


def test_training_asked_for_by_another_type_of_message_is_charged_and_noised(site: Site) -> None:
    content = asked(THETA, HONEST, EvaluationSpec(1, (0, 1)))
    first, second = (releases(ask(site.grid, content, "evaluate")) for _ in range(2))
    assert (first != second).any(axis=1).all()
    assert site.spent() == [2 * PRICE, 2 * PRICE, 0, 0]


# --- work without end


def test_time_that_is_over_is_charged_and_answered_as_any_release(tmp_path: Path, run_config: dict[str, Any]) -> None:
    """The release is one of the hypotheses with noise: nobody's data play a part in it."""
    site = Site(tmp_path, run_config, max_seconds=1e-9, min_noise_multiplier=2**-10)
    reply = site.ask(replace(HONEST, noise_multiplier=2**-10, step_size=0.5, batch_size=0, clients=(0, 1, 2, 3)))
    assert released(reply) == [1] * 4
    # They have not chosen either; training would have moved them by more than 1.
    np.testing.assert_allclose(releases(reply), [[5, 6]] * 4, atol=0.01)
    assert site.spent() == [2048] * 4
    assert not (tmp_path / "ledger.jsonl.local").exists()


# --- exact losses, of which six are enough for a small model


def test_a_run_may_have_clients_report_so_often_and_no_oftener(
    tmp_path: Path, run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least squares of two parameters is a quadratic function, which six losses give away."""
    site = Site(tmp_path, run_config, role="validation", max_evaluations=3)
    assert [refused(site.evaluate((0, 1))) for _ in range(5)] == [False] * 3 + [True] * 2
    site.start(run_config)
    assert refused(site.evaluate((0, 1))), "a node that was started again remembers"
    [context] = site.grid.contexts.values()
    context.run_id = 2
    with monkeypatch.context() as patch:
        patch.setattr("umbel.client.cohort.Cohort.gather", Mock(side_effect=MemoryError))
        assert refused(site.evaluate((0,))), "a report that fails counts too"
    losses, metrics = scores(site.evaluate((0,)))
    assert (len(losses), len(metrics)) == (1, 1)
    assert [refused(site.evaluate((0,))) for _ in range(2)] == [False, True]
    assert refused(site.ask()), "it never trains"
    assert site.spent() == [0, 0, 0, 0]


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


def test_noise_a_row_shows_which_items_a_client_has_labelled(tmp_path: Path, run_config: dict[str, Any]) -> None:
    """A weakness of the heuristic that a site should know: no policy forbids ``noise-per = "row"``.

    Rows that were not moved get the floor's noise, rows that were get noise of their own, longer, update. Over the
    whole vector, all rows get the same. The client has labelled the first 12 of 20 items.
    """
    site, items = Site(tmp_path, run_config), np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    own, labels = manifest(1, model="factors items=20 size=4"), np.tile([1, -1], 6).astype(np.int8)
    write_dataset(tmp_path / "preferences", own, np.arange(12).reshape(-1, 1), labels, offsets_of([12]))
    site.config["data-path"] = str(tmp_path / "preferences")
    site.start(run_config)
    task = replace(HONEST, clients=(0,), local_epochs=0, local_steps=1, step_size=10.0, batch_size=0)
    by_row, whole = (
        np.linalg.norm(arrays_of(reply)["items"][0] - items, axis=1)
        for reply in (
            site.ask(replace(task, noise_per=part), pack({"items": items[None]})) for part in ("row", "vector")
        )
    )
    assert by_row[12:].max() < by_row[:12].min()
    assert whole[12:].max() > whole[:12].min()
