"""The tasks: run configs of umbel, and the same for its peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

import client.app
from benchmarks.peers.brief import Brief, Settings
from experiments.runs import run_config
from federation import Manifest, find_federation, offsets_of, open_federation, write_federation
from protocol.messages import CONFIG, Demand, asked_clients
from protocol.records import to_array_record
from server import settings as server_settings
from server.rounds import initial_hypotheses
from simulation.grid import InProcessGrid

CLASSES = 62


def hospital(scratch: Path) -> dict[str, Any]:
    """Return the run config of the hospital experiment."""
    return run_config("hospital", patience=0, rounds=20)


def cnn(scratch: Path) -> dict[str, Any]:
    """Return the run config of made-up images in the shape of FEMNIST; they are written to `scratch`."""
    write_images(scratch / "images")
    return run_config(
        "femnist",
        federation=str(scratch / "images"),
        patience=0,
        validate_every=1,
        clients_per_round=10,
        validation_clients_per_round=20,
        rounds=5,
    )


TASKS: dict[str, Callable[[Path], dict[str, Any]]] = {"hospital": hospital, "cnn": cnn}


def write_images(folder: Path, clients: int = 200, validation: int = 50, seed: int = 0) -> None:
    """Write a federation of images: a pattern a class, with noise; every other writer's are turned."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(30, 61, clients)
    targets = rng.integers(0, CLASSES, lengths.sum())
    patterns = np.kron(rng.standard_normal((CLASSES, 7, 7), np.float32), np.ones((4, 4), np.float32))
    images: NDArray[np.float32] = patterns[targets] + 0.5 * rng.standard_normal((len(targets), 28, 28), np.float32)
    turned = np.repeat(np.arange(clients) % 2 == 1, lengths)
    images[turned] = np.rot90(images[turned], axes=(1, 2))
    manifest = Manifest("images", clients, {"train": clients - validation, "validation": validation}, model="cnn")
    write_federation(folder, manifest, images, targets, offsets_of(lengths))


def brief_of(config: Mapping[str, Any], cores: int = 1) -> Brief:
    """Return a run config's task as its peers get it: the clients that umbel draws, its initial hypotheses."""
    settings, grid = server_settings.Settings.parse(config), InProcessGrid(client.app.app, config)
    federation = open_federation(find_federation(str(config["federation"])))
    hypotheses = initial_hypotheses(settings, grid)
    arrays, strategy = to_array_record(hypotheses), settings.strategy
    train, validate = [], []
    for number in range(1, settings.rounds + 2):
        # One node hosts all clients, so that it counts them as the federation does.
        (message,) = strategy.configure_train(number, arrays, settings.train_config, grid)
        train.append(list(Demand.from_record(message.content.config_records[CONFIG]).clients))
        (message,) = strategy.configure_evaluate(number, arrays, ConfigRecord(), grid)
        validate.append(list(asked_clients(message.content.config_records[CONFIG])))
    return Brief(
        Settings(
            network=settings.model.name,
            train=train[:-1],
            validate=validate,
            step_size=float(config["step-size"]),
            batch_size=int(config["batch-size"]),
            local_epochs=int(config["local-epochs"]),
            noise_multiplier=float(config["noise-multiplier"]),
            cores=cores,
        ),
        np.array(federation.features, np.float32),
        np.array(federation.targets),
        np.array(federation.offsets),
        hypotheses,
    )
