"""Networks as people bring them: of PyTorch's own layers, and an adapter on a transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Recurrent(nn.Module):
    """Classes of sequences (batch, time, 2) by the last state."""

    def __init__(self, kind: str, hidden: int = 6, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.cells = getattr(nn, kind)(2, hidden, layers, batch_first=True, dropout=dropout, bidirectional=True)
        self.out = nn.Linear(2 * hidden, 3)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.cells(rows)[0][:, -1])
        return outputs


class Words(nn.Module):
    """Classes of sequences of tokens, by convolutions of several widths (Kim, EMNLP 2014)."""

    def __init__(self, words: int = 11, dropout: float = 0.5) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 8, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(8, 4, width) for width in (2, 3))
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = self.words(tokens).mT
        found = torch.cat([conv(vectors).relu().amax(-1) for conv in self.convs], 1)
        outputs: Tensor = self.out(self.dropout(found))
        return outputs


class Unet(nn.Module):
    """An image for an image: down, up, and the way across (Ronneberger et al., MICCAI 2015)."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, outputs, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        across = self.down1(images)
        risen = self.up(self.down2(F.max_pool2d(across, 2)))
        outputs: Tensor = self.out(torch.cat([across, risen], 1))
        return outputs


class TiedAutoencoder(nn.Module):
    """Rows for rows, decoded by the encoder's own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 6) / 3), nn.Parameter(torch.zeros(6))

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(F.linear(rows, self.weight).tanh(), self.weight.mT, self.bias)


class TiedWriter(nn.Module):
    """The next token of each place, by a transformer whose last layer is its first."""

    def __init__(self, words: int = 11, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(16, width))
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(16), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        rows = self.words(tokens) + self.places[:time]
        outputs: Tensor = self.out(self.blocks(rows, mask=self.mask[:time, :time]))
        return outputs


class Attending(nn.Module):
    """Classes of sequences, by attention that drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 8)
        self.attention, self.out = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True), nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first(rows)
        outputs: Tensor = self.out((rows + self.attention(rows, rows, rows, need_weights=False)[0]).mean(1))
        return outputs


class Grouped(nn.Module):
    """A residual block with group normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8))
        self.out = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images)
        outputs: Tensor = self.out((hidden + self.block(hidden)).relu().mean((2, 3)))
        return outputs


def normalised_mlp(**options: bool) -> nn.Module:
    """Return a dense network with batch normalisation."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, **options), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def layered_mlp() -> nn.Module:
    """Return a dense network with layer normalisation."""
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def spectral() -> nn.Module:
    """Return a network whose normalisation keeps a vector from step to step."""
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3))


def _small_bert(layers: int = 1) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=11, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=16,
        num_labels=3,
    )  # fmt: skip


def bert() -> nn.Module:
    """Return a small BERT with a head for three classes."""
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(_small_bert())


def gpt2() -> nn.Module:
    """Return a small GPT-2, without the cache that generating text takes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8, use_cache=False))


def adapted() -> nn.Module:
    """Return a small BERT of which adapters of rank 2 and the head alone are trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertForSequenceClassification

    network: nn.Module = get_peft_model(BertForSequenceClassification(_small_bert(2)), LoraConfig("SEQ_CLS", r=2))
    return network
