"""Large models on made-up rows, and a bare loop of PyTorch that trains and averages the same clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import umbel
from umbel.protocol.plugins import trust

CLIENTS, VALIDATION, ROWS, BATCH, STEP = 4, 2, 32, 16, 0.01
_LONG = 128  # words of a text
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Task:
    """A model by its name in umbel, what builds it without umbel, and its rows."""

    model: str
    build: Callable[[], nn.Module]
    rows: Callable[[np.random.Generator, int], Any]
    classes: int


def bert() -> nn.Module:
    """Return a small BERT."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes: Any = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    sizes |= {"vocab_size": 8000, "max_position_embeddings": _LONG, "num_labels": 3}
    network: nn.Module = BertForSequenceClassification(BertConfig(**sizes))
    return network


def lora() -> nn.Module:
    """Return the small BERT with an adapter of low rank; the rest is frozen."""
    from peft import LoraConfig, get_peft_model

    network: nn.Module = get_peft_model(bert(), LoraConfig("SEQ_CLS", r=8))
    return network


def resnet18() -> nn.Module:
    """Return torchvision's network for ten classes."""
    network: nn.Module = import_module("torchvision.models").resnet18(num_classes=10)
    return network


def images(generator: np.random.Generator, count: int) -> Any:
    """Draw images in colour."""
    return generator.integers(0, 256, (count, 3, 224, 224), dtype=np.uint8)


def texts(generator: np.random.Generator, count: int) -> Any:
    """Draw texts, by the numbers of their words."""
    return generator.integers(0, 8000, (count, _LONG))


TASKS = {
    "resnet18": Task("torchvision.models:resnet18 num_classes=10", resnet18, images, 10),
    "bert": Task("benchmarks.big:bert", bert, texts, 3),
    "lora": Task("benchmarks.big:lora", lora, texts, 3),
}


def write(task: Task, folder: Path) -> None:
    """Write made-up clients of a task."""
    generator, clients = np.random.default_rng(0), CLIENTS + VALIDATION
    trust(task.model)
    rows = task.rows(generator, clients * ROWS)
    manifest = umbel.Manifest(
        name="big", clients=clients, split={"train": CLIENTS, "validation": VALIDATION}, model=task.model,
        loss="cross-entropy", metric="accuracy", feature_scale=1 / 255 if rows.dtype == np.uint8 else 1.0,
    )  # fmt: skip
    targets = generator.integers(0, task.classes, len(rows))
    umbel.write_dataset(folder, manifest, rows, targets, np.arange(clients + 1) * ROWS)


def bare(task: Task, home: Path, rounds: int, device: torch.device = CPU) -> list[float]:
    """Train and average, as one would write it for a single model; return the seconds of each round."""
    folder = home / "data" / "big"
    features, targets = np.load(folder / "features.npy", "r"), torch.from_numpy(np.load(folder / "targets.npy"))
    torch.manual_seed(0)
    network = task.build().to(device)
    trained, laps = [name for name, value in network.named_parameters() if value.requires_grad], []
    for _ in range(rounds):
        began = time.perf_counter()
        start = {name: value.detach().clone() for name, value in network.state_dict().items()}
        sums = {name: torch.zeros_like(start[name]) for name in trained}
        for client in range(CLIENTS):
            network.load_state_dict(start)
            train(network, slice(client * ROWS, (client + 1) * ROWS), features, targets, device)
            for name, value in network.state_dict().items():
                if name in sums:
                    sums[name] += value / CLIENTS
        network.load_state_dict(start | sums)
        if device.type == "cuda":
            torch.cuda.synchronize()
        laps.append(time.perf_counter() - began)
    return laps


def train(network: nn.Module, own: slice, features: Any, targets: Tensor, device: torch.device) -> None:
    """Train a client for one epoch."""
    x, y = torch.from_numpy(np.array(features[own])).to(device), targets[own].to(device)
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    optimizer = torch.optim.SGD([value for value in network.parameters() if value.requires_grad], STEP)
    network.train()
    for batch in torch.randperm(len(y), device=device).split(BATCH):
        outputs = network(x[batch])
        optimizer.zero_grad()
        nn.functional.cross_entropy(getattr(outputs, "logits", outputs), y[batch]).backward()
        optimizer.step()
