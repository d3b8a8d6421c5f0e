"""Short texts: the same word praises in one group of clients, and complains in the other.

A rule makes the texts: each has 6 of 40 words, each word praises or complains, and the text says what most of them
say. For every other client, the 20 words of slang mean the opposite. 100 clients have 30 texts each.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from torch import nn

import umbel

CLIENTS, TEXTS, WORDS, LENGTH = 100, 30, 40, 6


class Bag(nn.Module):
    """A number for each word, and their sum for a text."""

    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(WORDS, 1)
        nn.init.normal_(self.word.weight, std=0.1)

    def forward(self, texts):
        """Return how much each text (rows, words) praises, (rows, 1)."""
        return self.word(texts).sum(1)


def texts(seed):
    """Return texts (rows, words) as numbers of words, whether each praises, and the client of each."""
    draw = np.random.default_rng(seed)
    words = draw.integers(0, WORDS, (CLIENTS * TEXTS, LENGTH))
    client = np.repeat(np.arange(CLIENTS), TEXTS)
    praise = np.where(words % 2, 1, -1) * np.where((client % 2 == 1)[:, None] & (words < WORDS // 2), -1, 1)
    return words, praise.sum(1) + 0.1 * draw.standard_normal(len(words)) > 0, client


def main(picture="texts.svg", seed=2000, **settings):
    """Learn two hypotheses, draw what a client gets, and return the run."""
    words, praise, client = texts(seed)
    data = umbel.from_arrays(
        words, praise, client=client, tokens=WORDS, model="texts:Bag", loss="log", metric="accuracy",
        validation=0.3, seed=seed,
    )  # fmt: skip
    path = data.write(Path(tempfile.mkdtemp()) / "texts")
    run = umbel.run(path, seed=seed, **{"hypotheses": 2, "step_size": 0.5} | settings)
    axes = run.worth["mean"].plot.barh(figsize=(7, 3), title="Texts understood, of clients that took no part")
    axes.invert_yaxis()
    axes.set(xlabel="share of texts", ylabel="", xlim=(0, 1))
    plt.savefig(picture, bbox_inches="tight")
    return run


if __name__ == "__main__":
    main()
