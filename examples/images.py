"""Images: two groups of clients hold their pages differently, and two hypotheses find that out.

Scikit-learn's 1,797 digits of 8 x 8 pixels are dealt to 60 clients. Every other client's images are turned by 90
degrees. No client says so.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import umbel

CLIENTS = 60


def digits(seed):
    """Return images (rows, 8, 8) as bytes, their digits, and the client of each."""
    data = load_digits()
    client = umbel.Uniform(CLIENTS, seed=seed).deal(len(data.target), data.target)
    images = (data.images * 15.9).astype(np.uint8)
    turned = np.where((client % 2 == 1)[:, None, None], np.rot90(images, axes=(1, 2)), images)
    return turned, data.target, client


def main(picture="images.svg", seed=2000, **settings):
    """Learn two hypotheses, draw what a client gets, and return the run."""
    images, targets, client = digits(seed)
    data = umbel.from_arrays(images, targets, client=client, validation=0.3, seed=seed)
    path = data.write(Path(tempfile.mkdtemp()) / "digits")
    run = umbel.run(path, seed=seed, **{"hypotheses": 2} | settings)
    figure, (left, right) = plt.subplots(2, 1, figsize=(7, 4.5), height_ratios=[1, 2], layout="constrained")
    left.imshow(np.hstack([images[np.flatnonzero(client == one)[:4]].transpose(1, 0, 2).reshape(8, 32)
                           for one in (0, 1)]), cmap="gray_r")  # fmt: skip
    left.set(xticks=[], yticks=[], title="Four images each of clients 0 and 1")
    run.worth["mean"].plot.barh(ax=right, title="Digits recognised, of clients that took no part")
    right.invert_yaxis()
    right.set(xlabel="share of images", ylabel="", xlim=(0, 1))
    figure.savefig(picture)
    return run


if __name__ == "__main__":
    main()
