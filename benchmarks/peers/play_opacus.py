"""Opacus in the comparison of DP-SGD: clipped sums of rows' gradients, timed on request.

    python benchmarks/peers/play_opacus.py TASK.pt

TASK.pt has a network's name, its parameters, rows and targets. The first line of output says that it is ready. Then
each line of input asks for a contestant and a number of steps; the answer has the seconds, and the file with the sums.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CLIP_NORM = 0.5
BATCH = 64


class SmallCNN(nn.Module):
    """Two convolutions for 28x28 images: 26,010 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, stride=2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, stride=2)
        self.fc1 = nn.Linear(512, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits (batch, 10) of images (batch, 784)."""
        hidden = torch.max_pool2d(torch.relu(self.conv1(rows.reshape(-1, 1, 28, 28))), 2, 1)
        hidden = torch.max_pool2d(torch.relu(self.conv2(hidden)), 2, 1).flatten(1)
        found: Tensor = self.fc2(torch.relu(self.fc1(hidden)))
        return found


class Adapted(nn.Module):
    """Frozen layers over 49 places of an image, each with an adapter of rank 4 (LoRA), and a head."""

    def __init__(self, width: int = 128, rank: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width).requires_grad_(False)
        self.base = nn.ModuleList(nn.Linear(width, width).requires_grad_(False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, 10)

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits (batch, 10) of images (batch, 784)."""
        hidden = self.embed(rows.reshape(-1, 49, 16))
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            hidden = torch.relu(base(hidden) + up(down(hidden)))
        found: Tensor = self.head(hidden.mean(1))
        return found


NETWORKS: dict[str, type[nn.Module]] = {"small CNN": SmallCNN, "LoRA": Adapted}


def hooks(network: nn.Module, rows: Tensor, targets: Tensor) -> Callable[[], dict[str, Tensor]]:
    """Return a step of Opacus as its guide says: a gradient for each row."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    module = GradSampleModule(network, loss_reduction="sum")
    return _step(module, rows, targets, _optimizer(DPOptimizer, module), nn.CrossEntropyLoss(reduction="sum"))


def ghost(network: nn.Module, rows: Tensor, targets: Tensor) -> Callable[[], dict[str, Tensor]]:
    """Return a step of Opacus by ghost clipping, which takes two backward passes."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    module = GradSampleModuleFastGradientClipping(
        network, max_grad_norm=CLIP_NORM, use_ghost_clipping=True, loss_reduction="sum"
    )
    optimizer = _optimizer(DPOptimizerFastGradientClipping, module)
    loss = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss(reduction="sum"), "sum")
    return _step(module, rows, targets, optimizer, loss)


def _optimizer(kind: Any, module: nn.Module) -> Any:
    trained = [value for value in module.parameters() if value.requires_grad]
    plain = torch.optim.SGD(trained, 0.0)
    return kind(plain, noise_multiplier=0.0, max_grad_norm=CLIP_NORM, expected_batch_size=1, loss_reduction="sum")


def _step(
    module: nn.Module, rows: Tensor, targets: Tensor, optimizer: Any, loss: Any
) -> Callable[[], dict[str, Tensor]]:
    def step() -> dict[str, Tensor]:
        optimizer.zero_grad()
        loss(module(rows), targets).backward()
        optimizer.step()
        return {
            name.removeprefix("_module."): value.grad
            for name, value in module.named_parameters()
            if value.grad is not None
        }

    return step


def wait(found: Any) -> None:
    """Wait until a step on a GPU has ended; a step on the CPU has."""
    values = list(found.values()) if isinstance(found, dict) else list(found)
    if torch.cuda.is_available() and any(isinstance(value, Tensor) and value.is_cuda for value in values):
        torch.cuda.synchronize()


CONTESTANTS = {"Opacus": hooks, "Opacus, ghost clipping": ghost}


def main() -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    task = torch.load(sys.argv[1])
    steps = {}
    for name, make in CONTESTANTS.items():
        network = NETWORKS[task["network"]]().to(task["rows"].device)
        network.load_state_dict(task["state"])
        steps[name] = make(network, task["rows"], task["targets"])
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        step, start = steps[asked["contestant"]], time.perf_counter()
        for _ in range(asked["steps"]):
            wait(found := step())
        seconds = time.perf_counter() - start
        file = f"{sys.argv[1]}.{asked['contestant']}"
        torch.save({name: value.detach().clone() for name, value in found.items()}, file)
        print(json.dumps({"seconds": seconds, "sums": file}), flush=True)


if __name__ == "__main__":
    main()
