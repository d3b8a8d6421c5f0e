"""Several labels: a text may be about none, one or more of five topics.

Scikit-learn makes counts of 20 words in 12,000 texts of 1,200 clients. One linear model is learnt without noise, by
PyTorch's loss for several labels and a metric from this file.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from sklearn.datasets import make_multilabel_classification

import umbel

LOSS = "torch.nn.functional:binary_cross_entropy_with_logits"


def right(outputs, targets):
    """Return the share of labels that are right."""
    return ((outputs > 0) == (targets > 0.5)).float().mean()


right.higher_is_better = True


def main(picture="labels.svg", seed=2000, **settings):
    """Learn one model, draw what a client gets, and return the run."""
    words, topics = make_multilabel_classification(12_000, 20, n_classes=5, random_state=seed)
    data = umbel.from_arrays(
        words / 5 - 0.5, topics.astype(bool), client=umbel.Uniform(1200, seed=seed), loss=LOSS, metric="labels:right",
        validation=0.3, seed=seed,
    )  # fmt: skip
    path = data.write(Path(tempfile.mkdtemp()) / "topics")
    run = umbel.run(path, seed=seed, **{"hypotheses": 1} | settings)
    axes = run.worth["mean"].plot.barh(figsize=(7, 3), title="Labels that are right, of clients that took no part")
    axes.invert_yaxis()
    axes.set(xlabel="share of labels", ylabel="", xlim=(0, 1))
    plt.savefig(picture, bbox_inches="tight")
    return run


if __name__ == "__main__":
    main()
