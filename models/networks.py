"""The networks of the papers."""

from __future__ import annotations

from torch import Tensor, nn


class Linear(nn.Linear):
    """``y = x . theta`` without intercept, theta drawn from N(0, 1) (group privacy paper, Sec. 5.1)."""

    def __init__(self, inputs: int = 2) -> None:
        super().__init__(inputs, 1, bias=False)

    def reset_parameters(self) -> None:
        """Draw the parameters from N(0, 1)."""
        nn.init.normal_(self.weight)


def mlp() -> nn.Module:
    """Return the hospital network 3 -> 2 -> 1 with ReLU: 11 parameters (Sec. 5.2).

    Weights start as PyTorch draws them, biases at 0: what sets two hypotheses apart at first is then
    what they make of the data, not a constant by which one of them suits all clients best.
    """
    layers = nn.Linear(3, 2), nn.Linear(2, 1)
    for layer in layers:
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


class CNN(nn.Module):
    """The FEMNIST network (Sec. 5.3 and Table 3): 1,206,590 parameters for 62 classes.

    The kernels are 3x3 and unpadded: the 2x2 kernels printed in Table 3 would give 1,400,990
    parameters, not the number that the text states.

    Parameters
    ----------
    classes : int
        Number of classes.
    """

    def __init__(self, classes: int = 62) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes) of images (batch, 28, 28) or (batch, 1, 28, 28)."""
        hidden = self.conv1(images.reshape(-1, 1, 28, 28)).relu()
        hidden = self.conv2(hidden).relu()
        hidden = nn.functional.max_pool2d(hidden, 2).flatten(1)
        logits: Tensor = self.fc2(self.fc1(hidden).relu())
        return logits


def cnn10() -> nn.Module:
    """Return the FEMNIST network for the ten digits alone: 1,199,882 parameters."""
    return CNN(10)
