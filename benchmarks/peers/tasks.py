"""The tasks: run configs of umbel, and the same for its peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import umbel
from benchmarks.in_process import Laps
from benchmarks.peers.brief import Brief, Settings
from umbel.protocol.errors import ConfigError
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.messages import evaluation_in, training_in
from umbel.simulation.in_process import play, run_config

CLASSES = 62


def hospital(scratch: Path | None = None) -> dict[str, Any]:
    """Return the run config of the hospital experiment, which needs no scratch folder."""
    return run_config("hospital", patience=0, rounds=20)


def cnn(scratch: Path) -> dict[str, Any]:
    """Return the run config of made-up images in the shape of FEMNIST; they are written to `scratch`."""
    write_images(scratch / "images")
    return run_config(
        "femnist",
        dataset=str(scratch / "images"),
        patience=0,
        validation="every=1 clients=20",
        clients_per_round=10,
        rounds=5,
        # One pass of the paper's algorithm alone, which every peer can do.
        strategy="group-privacy",
        local_epochs=1,
        step_size=0.1,
        batch_size=20,
    )


TASKS: dict[str, Callable[[Path], dict[str, Any]]] = {"hospital": hospital, "cnn": cnn}


def named(text: str) -> list[str]:
    """Return the tasks that a text names, separated by commas."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in TASKS]:
        raise ConfigError(f"--task: {unknown[0]!r} is none of {', '.join(TASKS)}", code="config.bad-option")
    return names


def write_images(folder: Path, clients: int = 200, validation: int = 50) -> None:
    """Write a dataset of images: a pattern a class, with noise; every other writer's are turned."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(30, 61, clients)
    targets = rng.integers(0, CLASSES, lengths.sum())
    patterns = np.kron(rng.standard_normal((CLASSES, 7, 7), np.float32), np.ones((4, 4), np.float32))
    images: NDArray[np.float32] = patterns[targets] + 0.5 * rng.standard_normal((len(targets), 28, 28), np.float32)
    turned = np.repeat(np.arange(clients) % 2 == 1, lengths)
    images[turned] = np.rot90(images[turned], axes=(1, 2))
    split = {"train": clients - validation, "validation": validation}
    manifest = umbel.Manifest(name="images", clients=clients, split=split, model="cnn")
    umbel.write_dataset(folder, manifest, images, targets, np.append(0, lengths.cumsum()))


def brief_of(config: Mapping[str, Any], cores: int = 1) -> Brief:
    """Return a run config's task as its peers get it: the clients that umbel draws, its initial hypotheses."""
    start = Laps(lambda run: run.state.hypotheses)
    run = play({**config, "rounds": 1}, observers=[start])
    hypotheses, own, fleet, dataset = start.notes[0], run.setup.config, run.fleet, run.setup.open_dataset()
    assert dataset is not None
    arrays, task = Hypotheses(hypotheses), run.setup.task().to_record()
    train, validate = [], []
    for number in range(1, int(config["rounds"]) + 2):
        # One node hosts all clients, so that it counts them as the dataset does.
        (message,) = fleet.ask_training(number, arrays, task, run.grid).messages
        training = training_in(message.content)
        (message,) = fleet.ask_evaluation(number, arrays, task, run.grid).messages
        evaluation = evaluation_in(message.content)
        assert training is not None
        assert evaluation is not None
        train.append([*map(int, training.clients)])
        validate.append([*map(int, evaluation.clients)])
    settings = Settings(
        run.setup.model.name, train[:-1], validate, own.step_size, own.batch_size, own.local_epochs,
        own.noise_multiplier, cores,
    )  # fmt: skip
    features, targets, offsets = (np.array(one) for one in (dataset.features, dataset.targets, dataset.offsets))
    return Brief(settings, features.astype(np.float32), targets, offsets, hypotheses)
