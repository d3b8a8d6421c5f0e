"""BlazeFL's part: federated averaging by its pool of threads; one model, no noise.

Its reference trainer and handler as they are, but for the loss, the clients of a round and the
validation, which are the task's.
"""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any

# Before BlazeFL imports it: a bar for every round is no work of the round.
os.environ["TQDM_DISABLE"] = "1"

import torch
from blazefl.contrib.fedavg import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer, FedAvgUplinkPackage
from blazefl.core import serialize_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.brief import Brief, serve
from benchmarks.peers.networks import loss_of, network


class Selector:
    """Hands out networks; a copy, as initial values are overwritten anyway and take long to draw."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def select_model(self, model_name: str) -> nn.Module:
        """Return a network of the task."""
        return deepcopy(self._module)


class Clients:
    """The clients' rows as BlazeFL asks for them."""

    def __init__(self, brief: Brief) -> None:
        self.rows = [tuple(map(torch.from_numpy, brief.client(c))) for c in range(len(brief.lengths))]

    def get_dataloader(self, type_: Any, cid: int, batch_size: int, generator: torch.Generator) -> Any:
        """Return a client's minibatches, in a new order each time."""
        return DataLoader(TensorDataset(*self.rows[cid]), batch_size, shuffle=True, generator=generator)


class Trainer(FedAvgThreadPoolClientTrainer):
    """Descends the task's loss; BlazeFL's own is always cross-entropy."""

    loss: Any = None

    def train(
        self, model: nn.Module, model_parameters: Tensor, train_loader: Any, device: str, epochs: int, lr: float,
        stop_event: Any, cid: int,
    ) -> Any:  # fmt: skip
        """Train one client."""
        nn.utils.vector_to_parameters(model_parameters.clone(), model.parameters())
        descent = torch.optim.SGD(model.parameters(), lr)
        for _ in range(epochs):
            for features, targets in train_loader:
                descent.zero_grad()
                self.loss(model(features), targets).backward()
                descent.step()
        return FedAvgUplinkPackage(cid, serialize_model(model), len(train_loader.dataset))


class Server(FedAvgBaseServerHandler):
    """Asks the task's clients."""

    brief: Any = None

    def sample_clients(self) -> list[int]:
        """Return the clients of the round."""
        clients: list[int] = self.brief.settings.train[self.round]
        return clients

    def validate(self) -> float:
        """Return the mean loss over the round's validation clients."""
        loss = loss_of(self.brief)
        rows = [self.dataset.rows[client] for client in self.brief.settings.validate[self.round]]
        with torch.no_grad():
            return sum(loss(self.model(x), y).item() for x, y in rows) / len(rows)


def prepare(brief: Brief, variant: str) -> Any:
    """Return what does a run."""
    settings = brief.settings
    torch.set_num_threads(1)  # the pool's threads are the ones that share the cores
    torch.manual_seed(0)
    clients, selector = Clients(brief), Selector(network(brief))
    number, asked = len(brief.lengths), len(settings.train[0])

    def run() -> float:
        server = Server(selector, "", clients, brief.rounds, number, asked / number, "cpu", settings.batch_size, 0)
        server.brief, server.num_clients_per_round = brief, asked
        trainer = Trainer(
            selector, "", clients, "cpu", number, settings.local_epochs, settings.batch_size, settings.step_size, 0,
            settings.cores,
        )  # fmt: skip
        trainer.loss = loss_of(brief)
        while not server.if_stop():
            server.validate()
            trainer.local_process(server.downlink_package(), server.sample_clients())
            for package in trainer.uplink_package():
                server.load(package)
        return server.validate()

    return run


if __name__ == "__main__":
    serve(prepare)
