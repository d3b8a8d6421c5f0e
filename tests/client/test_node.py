"""A node serves its part of a simulated dataset, or all of its own data and nothing that a server names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import umbel.client.node
from tests.helpers.datasets import manifest, save_plane
from tests.helpers.errors import raises
from tests.helpers.models import write_module
from umbel.client.node import Node
from umbel.data import BUNDLED, offsets_of, write_dataset, write_leaf
from umbel.protocol.errors import ConfigError, DatasetError, ProtocolError, SiteError
from umbel.protocol.simulated import in_process
from umbel.protocol.tasks import Hosting

Config = dict[str, Any]


@pytest.fixture(autouse=True)
def simulation() -> Iterator[None]:
    """Run each test as the in-process grid runs a node."""
    with in_process():
        yield


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths that nodes look up by name, or open."""
    paths: list[Path] = []
    find, read = umbel.client.node.find_dataset, umbel.client.node.open_dataset

    def spy_on_find(name: str) -> Path:
        paths.append(Path(name))
        return find(name)

    def spy_on_open(path: Path) -> Any:
        paths.append(path)
        return read(path)

    monkeypatch.setattr(umbel.client.node, "find_dataset", spy_on_find)
    monkeypatch.setattr(umbel.client.node, "open_dataset", spy_on_open)
    umbel.client.node._open.cache_clear()
    return paths


def part(index: int, parts: int, run_config: Config) -> Node:
    return Node.of({"partition-id": index, "num-partitions": parts}, run_config)


# --- in simulation


@pytest.mark.parametrize("parts", [1, 7, 201])
def test_every_client_is_hosted_once_and_nodes_have_about_as_many(parts: int, run_config: Config) -> None:
    nodes = [part(index, parts, run_config) for index in range(parts)]
    hosted = [node.hosting for node in nodes]
    assert [(one.first, one.step) for one in hosted] == [(index, parts) for index in range(parts)]
    for counts in ([one.train for one in hosted], [one.validation for one in hosted]):
        assert max(counts) - min(counts) <= 1
    training, validation = list[int](), list[int]()
    for node, one in zip(nodes, hosted, strict=True):
        training += node.training_clients(tuple(range(one.train)))
        validation += node.validation_clients(tuple(range(one.train, one.train + one.validation)))
    assert sorted(training) == list(range(100))
    assert sorted(validation) == list(range(100, 200))


def test_clients_keep_the_order_in_which_they_were_asked(run_config: Config) -> None:
    assert part(1, 7, run_config).training_clients((3, 0, 14)) == [1 + 7 * 3, 1, 1 + 7 * 14]


def test_who_does_not_train_or_validate_here_is_refused(run_config: Config) -> None:
    node = part(0, 7, run_config)
    for role, clients, there, asked in (
        ("training", node.training_clients, "0 to 14", [(15,), (0, 29)]),
        ("validation", node.validation_clients, "15 to 28", [(14,), (20, 0), (29,)]),
    ):
        for one in asked:
            with raises(ProtocolError, "protocol.strangers", f"[{one[-1]}]", role, there):
                clients(one)


@pytest.mark.parametrize(
    ("model", "loss", "target", "told"),
    [("mlp", "", 0.5, "(2,)"), ("torch.nn:Linear in_features=2 out_features=3", "cross-entropy", 3, "0 to 2")],
)
def test_data_that_a_model_does_not_fit_are_refused_for_all_clients_alike(
    model: str, loss: str, target: Any, told: str, tmp_path: Path, run_config: Config
) -> None:
    """If training failed at some clients and not at others, that would tell about their data."""
    rows = {"a": ([[1.0, 2.0]], [0]), "b": ([[1.0, 2.0]], [target])}
    write_leaf(tmp_path / "few.json", manifest(2, model="linear"), rows)
    with raises(DatasetError, "model.misfit", told):
        part(0, 1, run_config | {"dataset": str(tmp_path / "few.json"), "model": model, "loss": loss})


def test_data_that_stay_the_same_are_read_once(run_config: Config, opened: list[Path]) -> None:
    first = part(0, 2, run_config).dataset
    assert part(1, 2, run_config).dataset is first
    assert opened.count(BUNDLED / "synthetic.json") == 1


# --- a site with data of its own


@pytest.mark.parametrize("simulated", [True, False])
def test_a_site_serves_all_clients_of_its_own_data(
    simulated: bool, tmp_path: Path, run_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.privacy.site.config.runs_in_simulation", lambda: simulated)
    path = save_plane(tmp_path / "own", 3, 2)
    # Flower may give real nodes a partition as well; it plays no part.
    node = Node.of({"data-path": str(path), "role": "split", "partition-id": 1, "num-partitions": 2}, run_config)
    assert node.hosting == Hosting(train=3, validation=2, first=-1, step=-1)
    assert node.training_clients((2, 0, 1)) == [2, 0, 1]
    assert node.validation_clients((4, 3)) == [4, 3]


@pytest.mark.parametrize("named", ["synthetic", "no-such-data", "/no/such/folder", "", "other"])
def test_no_site_opens_what_a_server_names(named: str, tmp_path: Path, run_config: Config, opened: list[Path]) -> None:
    own, other = save_plane(tmp_path / "own", 3, 2), save_plane(tmp_path / "other", 1)
    named = str(other) if named == "other" else named
    node = Node.of({"data-path": str(own), "role": "split"}, run_config | {"dataset": named})
    assert node.hosting == Hosting(3, 2)
    with raises(ConfigError, "config.unknown-key", "data-path"):
        Node.of({"data-path": str(own), "role": "split"}, run_config | {"data-path": named})
    assert opened == [own]


def test_data_that_change_are_read_again(tmp_path: Path, run_config: Config) -> None:
    """Also where one array changes alone."""
    path = save_plane(tmp_path / "own", 3, 2, seconds=1)
    config = {"data-path": str(path), "role": "split"}
    assert Node.of(config, run_config).hosting == Hosting(3, 2)
    save_plane(path, 4, seconds=2)
    read = [Node.of(config, run_config)]
    assert read[0].hosting == Hosting(4, 0)
    for name in ("features", "targets", "offsets"):
        np.save(tmp_path / "new.npy", np.load(path / f"{name}.npy"))
        os.utime(tmp_path / "new.npy", (10**10, 10**10))
        (tmp_path / "new.npy").replace(path / f"{name}.npy")
        read.append(Node.of(config, run_config))
    assert len({id(node.dataset) for node in read}) == 4


# --- frozen and local parameters

HEADED = "tests.helpers.models:Headed"
HEAD = {"head.weight": (1, 3), "head.bias": (1,)}
BODY = {"body.weight": (3, 2), "body.bias": (3,)}


def own(folder: Path, **entries: Any) -> Config:
    """Return the configuration of a node with data of its own for the network with a head."""
    path = save_plane(folder / "own", 2, model=HEADED, loss="mse", **entries)
    return {"data-path": str(path), "role": "split"}


BIAS, WEIGHT = {"bias": np.zeros((2, 3))}, {"weight": np.zeros((2, 3, 2))}


@pytest.mark.parametrize(
    "hypotheses",
    [
        {}, WEIGHT, BIAS | WEIGHT, {**WEIGHT, "bias": np.zeros((2, 2))}, {**WEIGHT, "bias": np.zeros((3, 3))},
        {"weight": np.zeros((3, 2)), **BIAS}, WEIGHT | BIAS | {"head": np.zeros((2, 3))},
    ],
    ids=["none", "a part", "another order", "another shape", "unequal numbers", "a single one", "a part more"],
)  # fmt: skip
def test_hypotheses_of_another_model_are_refused_before_any_data_is_looked_at(
    hypotheses: dict[str, Any], tmp_path: Path, run_config: Config
) -> None:
    """The answer of a client that cannot train is in the model's order: a server could tell it from others'."""
    node = Node.of(own(tmp_path, local="head.*"), run_config)
    node.check({f"body.{name}": value for name, value in (WEIGHT | BIAS).items()})
    with raises(ProtocolError, "protocol.shapes"):
        node.check({f"body.{name}": value for name, value in hypotheses.items()})


def test_in_simulation_the_run_says_which_parameters_are_frozen_and_local(tmp_path: Path, run_config: Config) -> None:
    path = str(save_plane(tmp_path / "any", 2, model=HEADED, loss="mse", local="body.*"))
    node = part(0, 1, run_config | {"dataset": path, "local": "head.*", "frozen": "body.bias"})
    assert (node.model.shapes, node.model.local_shapes) == ({"body.weight": (3, 2)}, HEAD)


KEPT = {"frozen": "body.bias", "local": "head.*"}


@pytest.mark.parametrize("entries", [{}, {"local": "head.*"}, KEPT])
def test_where_the_run_is_silent_or_asks_for_the_same_the_manifest_says_so(
    entries: Config, tmp_path: Path, run_config: Config
) -> None:
    """A server that does not know of a head sends the whole network, which is not taken."""
    path = save_plane(tmp_path / "any", 2, model=HEADED, loss="mse", **entries)
    silent, asked = (Node.of(own(tmp_path, **entries), run_config | run) for run in ({}, entries))
    for node in (silent, asked, part(0, 1, run_config | {"dataset": str(path)})):
        assert node.model.local_shapes == (HEAD if "local" in entries else {})
        assert set(node.model.frozen_values) == ({"body.bias"} if "frozen" in entries else set())
        assert {*node.model.shapes, *node.model.local_shapes, *node.model.frozen_values} == {*BODY, *HEAD}
        whole = {name: np.zeros((1, *shape), np.float32) for name, shape in (BODY | HEAD).items()}
        with raises(ProtocolError, "protocol.shapes") if entries else nullcontext():
            node.check(whole)


HUBER, L1 = "torch.nn.functional:huber_loss", "torch.nn.functional:l1_loss"


@pytest.mark.parametrize(
    ("said", "asked", "refused"),
    [
        ({"model": HEADED, "loss": "mse", "local": "head.*"}, {"local": "body.*"}, "local"),
        ({"model": HEADED, "loss": "mse", "frozen": "head.*"}, {"frozen": "body.*"}, "frozen"),
        ({"model": HEADED, "loss": "mse"}, {"local": "head.*"}, "local"),
        ({"model": HEADED, "loss": "mse", "local": "head.*"}, KEPT, "frozen"),
        # A name may lead to any code that is installed.
        *(
            ({what: said}, {what: asked}, what if refused else "")
            for what in ("loss", "metric")
            for said, asked, refused in ((L1, L1, False), (L1, "", False), (L1, HUBER, True), ("", L1, True))
        ),
        # A loss could make what a client answers depend on its data: whether hinge is refused tells of all labels.
        *(
            ({"model": model}, {"loss": loss}, refused)
            for model in ("linear", "linear inputs=2 outputs=1", "mlp inputs=2 hidden=3 outputs=1")
            for loss, refused in (("mse", ""), ("hinge", "loss"))
        ),
        ({"model": "linear", "loss": "rmse"}, {"model": "linear"}, ""),
    ],
)
def test_a_sites_manifest_wins_over_another_wish_of_the_server(
    said: Config, asked: Config, refused: str, tmp_path: Path, run_config: Config
) -> None:
    """What stays on the node, what is part of the model and which code runs is the site's word."""
    config = {"data-path": str(save_plane(tmp_path / "own", 2, **said))}
    if refused:
        with raises(ProtocolError, "protocol.other-model", refused, repr(asked[refused])):
            Node.of(config, run_config | asked)
    else:
        model, loss = Node.of(config, run_config | asked).model, said.get("loss") or asked.get("loss")
        assert model.loss.name == (loss or "mse")
        assert "metric" not in said or model.metric.name == said["metric"]


def test_a_site_whose_models_are_each_clients_own_already_is_told(tmp_path: Path, run_config: Config) -> None:
    """It would believe that they are fine-tuned."""
    entries = {"keep-model": str(tmp_path / "models"), "personalise": "fine-tune"}
    with raises(SiteError, "site.personalise", "local parameters"):
        Node.of(own(tmp_path, local="head.*") | entries, run_config)
    assert Node.of(own(tmp_path / "other") | entries, run_config).model.local_shapes == {}


def test_a_method_that_cannot_be_imported_is_told_before_the_run(tmp_path: Path, run_config: Config) -> None:
    site = {"data-path": str(save_plane(tmp_path / "own", 2)), "keep-model": str(tmp_path / "models")}
    with raises(ConfigError, "config.import", "nowhere"):
        Node.of(site | {"personalise": "nowhere:method"}, run_config)


def test_a_site_starts_from_a_file_of_its_own_and_opens_no_other(
    tmp_path: Path, run_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's path is a name on its own machine; the digest says whether the files are the same."""
    own, servers = tmp_path / "own.pt", tmp_path / "servers.pt"
    torch.save({"weight": torch.ones(1, 2)}, own)
    with_file = str(save_plane(tmp_path / "with", 2, pretrained=str(own)))
    without = str(save_plane(tmp_path / "without", 2))
    node = Node.of({"data-path": with_file}, run_config | {"pretrained": str(servers)})
    assert node.model.initial(0)["weight"].tolist() == [[1, 1]]
    hypotheses = {"weight": np.zeros((1, 1, 2), np.float32)}
    node.check(hypotheses, node.model.frozen_digest)
    with raises(ProtocolError, "protocol.frozen"):
        node.check(hypotheses, "00")
    with raises(ProtocolError, "protocol.other-model", "pretrained"):
        Node.of({"data-path": without}, run_config | {"pretrained": str(own)})


# --- a site's own reader

READER = """
import numpy as np
from umbel.data import Dataset, Manifest, offsets_of

def read(path, register, clients):
    names = clients.split("+")
    known = register.read()
    register.extend(known, [name for name in names if name not in known])
    split = {"train": len(names), "validation": 0}
    own = Manifest(name="own", clients=len(names), split=split, model="linear", loss="mse")
    rows = np.ones((len(names), 2), np.float32)
    LAST
    return Dataset(own, rows, rows[:, 0], offsets_of([1] * len(names)), names)
"""


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_config: Config) -> Callable[..., Node]:
    """Return a function that opens the node of a site with a reader of the site's own, which has another last line."""

    def node(options: str = "clients=north+south", last: str = "") -> Node:
        module = write_module(tmp_path, monkeypatch, READER.replace("LAST", last))
        entries = {"data-path": str(tmp_path / "t.csv"), "role": "train", "reader": f"{module}:read {options}"}
        return Node.of(entries, run_config)

    return node


def test_a_site_may_have_its_own_reader(reading: Callable[..., Node]) -> None:
    assert reading().hosting == Hosting(2, 0)
    assert list(reading("clients=north+south+east").dataset.names) == ["north", "south", "east"]


NAMED = "return Dataset(own, rows, rows[:, 0], offsets_of([1, 1]), {})"


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ("clients=south+north", ""),
        ("clients=south", ""),
        ("clients=north+south", NAMED.format("()")),
        ("clients=north+south", NAMED.format("['east', 'west']")),
    ],
)
def test_a_reader_whose_clients_would_be_charged_for_others_is_refused(
    reading: Callable[..., Node], options: str, last: str
) -> None:
    reading()
    with raises(DatasetError, "data.register", ":read"):
        reading(options, last)


@pytest.mark.parametrize(
    ("names", "fits"),
    [("north south east", True), ("east north south", False), ("south north", False), ("north", False), ("", True)],
)
def test_a_folder_whose_clients_would_be_charged_for_others_is_refused(
    tmp_path: Path, run_config: Config, names: str, fits: bool
) -> None:
    """As one that was imported again with a new client, before the others."""

    def node(names: list[str]) -> Node:
        rows = np.ones((n := len(names) or 2, 2), np.float32)
        about = manifest(n, model="linear", loss="mse")
        write_dataset(tmp_path / "own", about, rows, rows[:, 0], offsets_of([1] * n), names)
        return Node.of({"data-path": str(tmp_path / "own")}, run_config)

    node(["north", "south"])
    for _ in range(2):
        with nullcontext() if fits else raises(DatasetError, "data.register"):
            node(names.split())
    node(["north", "south", "east"] if fits and names else ["north", "south"])


@pytest.mark.parametrize(
    ("options", "last", "parts"),
    [
        ("clients=a", "return None", ("NoneType",)),
        ("clients=a", "{}['born']", ("KeyError", "born", ".py:15")),
        ("clients=a", "raise SystemExit(0)", ("SystemExit",)),
        ("schema=a", "", ("TypeError", "schema")),
    ],
)
def test_a_reader_that_fails_is_named(
    reading: Callable[..., Node], options: str, last: str, parts: tuple[str, ...]
) -> None:
    with raises(DatasetError, "data.reader", ":read", *parts):
        reading(options, last)
