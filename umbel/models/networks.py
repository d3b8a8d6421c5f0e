"""The networks of the papers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """``y = x . theta`` without intercept, theta drawn from N(0, 1) (group privacy paper, Sec. 5.1)."""

    def __init__(self, inputs: int = 2) -> None:
        super().__init__(inputs, 1, bias=False)

    def reset_parameters(self) -> None:
        """Draw the parameters from N(0, 1)."""
        nn.init.normal_(self.weight)


class Units(nn.Module):
    """Scales features: ``(x - offset) / scale``, with constants from the model's name.

    Parameters
    ----------
    offset, scale : sequence of float
        One for each feature; empty for 0 and 1.
    """

    def __init__(self, offset: Sequence[float] = (), scale: Sequence[float] = ()) -> None:
        super().__init__()
        # Neither parameters nor buffers: they never change and never travel.
        self._offset = torch.tensor(offset or (0.0,), dtype=torch.float32)
        self._scale = torch.tensor(scale or (1.0,), dtype=torch.float32)

    def forward(self, rows: Tensor) -> Tensor:
        """Return scaled features (..., d)."""
        return (rows - self._offset.to(rows.device)) / self._scale.to(rows.device)


def mlp() -> nn.Module:
    """Return the hospital network 3 -> 2 -> 1 with ReLU: 11 parameters (Sec. 5.2).

    Weights start as PyTorch draws them, biases at 0. So at first two hypotheses differ in their dependence on the data,
    not in a constant that would make one of them fit all clients best.
    """
    layers = nn.Linear(3, 2), nn.Linear(2, 1)
    for layer in layers:
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


class CNN(nn.Module):
    """The FEMNIST network (Sec. 5.3 and Table 3): 1,206,590 parameters for 62 classes.

    The kernels are 3x3 and unpadded: the 2x2 kernels printed in Table 3 would give 1,400,990
    parameters, not the number that the text states. For 10 classes, of digits alone, there are 1,199,882.

    With ``smooth`` it has sigmoids instead of ReLU, as in the attack by deep leakage from gradients (Sec. 5.3). With
    ``dropout`` it is FedML's CNN_DropOut (Reddi et al., ICLR 2021, Table 4): a quarter after the pooling, half after
    the wide layer.
    """

    def __init__(self, classes: int = 62, smooth: bool = False, dropout: bool = False) -> None:
        super().__init__()
        self._after_pool: nn.Module = nn.Dropout(0.25) if dropout else nn.Identity()
        self._after_wide: nn.Module = nn.Dropout(0.5) if dropout else nn.Identity()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, classes)
        self._activation = torch.sigmoid if smooth else torch.relu

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes) of images (batch, 28, 28) or (batch, 1, 28, 28)."""
        hidden = self._activation(self.conv1(images.reshape(-1, 1, 28, 28)))
        # Pooling before the monotone activation gives the same result from a quarter of the numbers, and is faster.
        hidden = self._after_pool(self._activation(nn.functional.max_pool2d(self.conv2(hidden), 2))).flatten(1)
        logits: Tensor = self.fc2(self._after_wide(self._activation(self.fc1(hidden))))
        return logits


class TanhCNN(nn.Module):
    """Two convolutions with tanh for 28x28 images, as in Papernot et al. (AAAI 2021).

    They found that bounded activations suffer less from clipping and noise than ReLU. Theirs has 16 and 32 filters, 32
    hidden units and 26,010 parameters; with 64, 128 and 512 it has 1,189,578.

    Parameters
    ----------
    filters : sequence of int
        Filters of both convolutions.
    hidden, outputs : int
    """

    def __init__(self, filters: Sequence[int] = (16, 32), hidden: int = 32, outputs: int = 10) -> None:
        super().__init__()
        first, second = filters
        self.conv1 = nn.Conv2d(1, first, 8, stride=2, padding=3)
        self.conv2 = nn.Conv2d(first, second, 4, stride=2)
        self.fc1 = nn.Linear(16 * second, hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, outputs) of images (batch, 28, 28) or (batch, 1, 28, 28)."""
        hidden = nn.functional.max_pool2d(torch.tanh(self.conv1(images.reshape(-1, 1, 28, 28))), 2, 1)
        hidden = nn.functional.max_pool2d(torch.tanh(self.conv2(hidden)), 2, 1).flatten(1)
        logits: Tensor = self.fc2(torch.tanh(self.fc1(hidden)))
        return logits


class LeNet(nn.Module):
    """The network of the first attack by deep leakage from gradients (Zhu, Liu and Han, NeurIPS 2019), for 28x28
    images.

    Strides instead of pooling and sigmoids instead of ReLU make it twice differentiable, as the attack needs. Weights
    and biases start uniformly in [-1/2, 1/2], as in the authors' code. It is there for audits. For 10 classes, digits
    only, it has 13,426 parameters.
    """

    def __init__(self, classes: int = 62) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(12, 12, 5, stride=2, padding=2)
        self.conv3 = nn.Conv2d(12, 12, 5, padding=2)
        self.fc = nn.Linear(588, classes)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes) of images (batch, 28, 28) or (batch, 1, 28, 28)."""
        hidden = images.reshape(-1, 1, 28, 28)
        for layer in (self.conv1, self.conv2, self.conv3):
            hidden = layer(hidden).sigmoid()
        logits: Tensor = self.fc(hidden.flatten(1))
        return logits


class Softmax(nn.Module):
    """Logits ``W x`` without intercept, W drawn from N(0, .01²): the only trained layer, on fixed, public features.

    The price n/nu of a guarantee grows with the number n of parameters, which is features times classes here.

    From nearly 0, the first step on all rows is nearly a step of least squares, which for white features gives the
    solution. Exactly 0 would make all hypotheses the same.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes, bias=False)
        nn.init.normal_(self.linear.weight, std=0.01)

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits (batch, classes) of rows (batch, features)."""
        logits: Tensor = self.linear(rows)
        return logits
