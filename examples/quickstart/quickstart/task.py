"""The model, the data, and how one is trained on the other: plain PyTorch."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, FEATURES = 4, 2


class Net(nn.Module):
    """A linear classifier."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.fc(x)


def make_data(rows, seed):
    """Return points around four corners, and which corner each belongs to."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    angles = labels * (math.tau / CLASSES)
    corners = torch.stack([angles.cos(), angles.sin()], dim=1)
    return TensorDataset(corners + 0.4 * torch.randn(rows, FEATURES, generator=generator), labels)


def load_data(partition_id):
    """Return the rows of one client."""
    return make_data(60, seed=partition_id)


def train(net, data, epochs, lr):
    """Train the network, and return the loss of the last batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=20, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
    return loss.item()


def test(net, data):
    """Return loss and accuracy."""
    x, y = data.tensors
    with torch.no_grad():
        scores = net(x)
    return nn.functional.cross_entropy(scores, y).item(), (scores.argmax(1) == y).float().mean().item()
