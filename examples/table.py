"""A table: the cost of hospital stays, with a guarantee for each hospital.

The table has a row for each service of 2,947 hospitals. A run learns from 2,063 hospitals, and the others show what it
gives to a hospital that took no part. The smaller epsilon is, the more noise is in what a hospital sends.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import umbel
from umbel.data import find_dataset, open_dataset

SERVICES = ["194", "292", "392", "690"]  # pneumonia, heart failure, stomach and bowel, urinary tract
COLUMNS = {
    "service": {"categories": SERVICES},
    "longitude": {"offset": -100, "scale": 50},
    "latitude": {"offset": 40, "scale": 50},
    "cost": {"minimum": 0, "maximum": 500_000, "scale": 10_000, "unit": "dollars"},
}


def stays():
    """Return the dataset that comes with umbel as the table that it once was."""
    data = open_dataset(find_dataset("hospital-services"))
    service, longitude, latitude = data.features[:, :4].argmax(axis=1), *data.features[:, 4:].T
    columns = {"hospital": np.repeat(data.names, data.lengths), "service": np.array(SERVICES)[service]}
    place = {"longitude": longitude * 50 - 100, "latitude": latitude * 50 + 40}
    return pd.DataFrame(columns | place | {"cost": data.targets * 10_000})


def main(picture="table.svg", seed=2000, epsilons=(1, 2, 4, 8), **settings):
    """Do a run for each epsilon, draw what a hospital gets, and return the runs."""
    data = umbel.from_dataframe(stays(), client="hospital", target="cost", columns=COLUMNS, validation=0.3, seed=seed)
    path = data.write(Path(tempfile.mkdtemp()) / "stays")
    runs = [umbel.run(path, epsilon=epsilon, delta=0, seed=seed, **settings) for epsilon in epsilons]
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    own = [run.worth["mean"]["this run, fitted per client"] for run in runs]
    axes.plot(epsilons, own, marker="o", label="with a guarantee, made the hospital's own")
    for label, style in (("each client alone", ":"), ("all rows pooled", "--")):
        axes.axhline(runs[0].worth["mean"][label], linestyle=style, color="gray", label=label)
    axes.set(xlabel="pure epsilon of a hospital", ylabel="RMSE, dollars", xscale="log", ylim=0)
    axes.set_xticks(epsilons, labels=map(str, epsilons))
    axes.minorticks_off()
    axes.set_title("Error for a stay, of hospitals that took no part")
    axes.legend()
    figure.savefig(picture)
    return runs


if __name__ == "__main__":
    main()
