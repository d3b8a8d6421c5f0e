"""Networks that nobody here wrote: each trains through the whole app, in the engine that is picked.

torchvision, timm, transformers and peft are imported here alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tests.helpers.torchvision_ops  # noqa: F401
from tests.helpers.datasets import manifest
from umbel.client.trial import try_out
from umbel.data import offsets_of, open_dataset, write_dataset
from umbel.simulation.in_process import play, run_config

pytestmark = pytest.mark.rest

LENGTHS = [3, 2, 4, 3]  # rows of the clients, of which the last reports

Rows = tuple[NDArray[Any], NDArray[Any]]


def rows_of(kind: str) -> Rows:
    generator, count = np.random.default_rng(0), sum(LENGTHS)

    def numbers(*shape: int) -> NDArray[np.float32]:
        return generator.normal(size=(count, *shape)).astype(np.float32)

    classes, tokens = generator.integers(0, 3, count), generator.integers(0, 11, (count, 6))
    return {
        "vectors": (numbers(6), classes),
        "rows for rows": (numbers(6), numbers(6)),
        "sequences": (numbers(5, 2), classes),
        "images": (numbers(3, 16, 16), classes),
        "pictures": (numbers(3, 32, 32), classes),
        "masks": (numbers(1, 8, 8), generator.uniform(size=(count, 1, 8, 8)).round().astype(np.float32)),
        "places": (numbers(1, 8, 8), generator.integers(0, 3, (count, 8, 8))),
        "texts": (tokens, classes),
        "next": (tokens, np.roll(tokens, -1, 1)),
    }[kind]


def save(folder: Path, kind: str) -> Path:
    features, targets = rows_of(kind)
    write_dataset(folder / "data", manifest(3, 1), features, targets, offsets_of(LENGTHS))
    return folder / "data"


VIT = "timm.models.vision_transformer:vit_tiny_patch16_224"
OURS = "tests.helpers.strangers"
STRANGERS: list[tuple[str, str, str, dict[str, Any]]] = [
    # Its last blocks are most of its 11 million parameters, and of the time.
    ("torchvision.models:resnet18 num_classes=3", "images", "loop", {"frozen": "layer[34].*"}),
    (f"{VIT} img_size=32 embed_dim=24 depth=2 num_heads=3 num_classes=3", "pictures", "loop", {}),
    (
        "timm.models.mlp_mixer:MlpMixer img_size=32 patch_size=8 embed_dim=16 num_blocks=2 num_classes=3",
        "pictures",
        "loop",
        {},
    ),
    (f"{OURS}:bert", "texts", "loop", {}),
    (f"{OURS}:adapted", "texts", "loop", {}),
    (f"{OURS}:gpt2", "next", "loop", {}),
    (f"{OURS}:TiedWriter", "next", "batched", {}),
    (f"{OURS}:Recurrent kind=GRU layers=2 dropout=0.2", "sequences", "loop", {}),
    (f"{OURS}:Attending", "sequences", "loop", {}),
    (f"{OURS}:Words", "texts", "loop", {}),
    (f"{OURS}:Unet", "masks", "loop", {"loss": "torch.nn.functional:binary_cross_entropy_with_logits"}),
    (f"{OURS}:Unet outputs=3", "places", "loop", {"loss": "torch.nn.functional:cross_entropy"}),
    (f"{OURS}:TiedAutoencoder", "rows for rows", "batched", {"loss": "mse"}),
    (f"{OURS}:Grouped", "images", "loop", {}),
    (f"{OURS}:normalised_mlp", "vectors", "loop", {"optimizer": "adam"}),
    (f"{OURS}:normalised_mlp track_running_stats=False", "vectors", "loop", {}),
    (f"{OURS}:layered_mlp", "vectors", "batched", {"optimizer": "momentum clip-gradient=1.0"}),
    (f"{OURS}:spectral", "vectors", "loop", {"local": "*weight_u *weight_v"}),
]


@pytest.mark.parametrize(("name", "kind", "engine", "more"), STRANGERS, ids=[one[0] for one in STRANGERS])
def test_a_stranger_trains_two_rounds(name: str, kind: str, engine: str, more: dict[str, Any], tmp_path: Path) -> None:
    path = save(tmp_path, kind)
    asked = {"loss": "cross-entropy"} | more
    run = play(
        run_config(
            "synthetic", dataset=str(path), model=name, rounds=2, hypotheses=1, restarts=1, clients_per_round=2,
            validation="every=2", noise_multiplier=0.0, step_size=0.01, batch_size=2, patience=0, **asked,
        )
    )  # fmt: skip
    assert [entry.releases for entry in run.state.history[1:]] == [2, 2]
    assert np.isfinite(run.state.history[-1].loss)
    assert all(np.isfinite(value).all() for value in run.state.hypotheses.values())
    model, dataset = run.setup.model, open_dataset(path)
    assert try_out(model, dataset, "cpu").engine == engine
