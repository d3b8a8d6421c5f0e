"""Time series: forecast the next hour of pumps, of which some work in shifts of 8 hours, and others of 12.

A rule makes the series: a value is 0.95 of the one a shift ago, and noise of deviation 0.3. 1,000 pumps have 36 hours
each, and a linear model forecasts from the last 12. The guarantee is an epsilon of 8 a pump.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import umbel

PUMPS, HOURS, LAGS = 1000, 36, 12


def pumps(seed):
    """Return the last hours (rows, lags), the next one (rows,), and the pump of each row."""
    draw = np.random.default_rng(seed)
    series = draw.standard_normal((PUMPS, HOURS + 100))
    for pump, values in enumerate(series):
        shift = 8 if pump % 2 else LAGS
        for hour in range(shift, len(values)):
            values[hour] = 0.95 * values[hour - shift] + 0.3 * draw.standard_normal()
    windows = np.lib.stride_tricks.sliding_window_view(series[:, 100:], LAGS + 1, axis=1)
    rows = windows.reshape(-1, LAGS + 1)
    return rows[:, :-1], rows[:, -1], np.repeat(np.arange(PUMPS), HOURS - LAGS)


def main(picture="time_series.svg", seed=2000, **settings):
    """Learn two hypotheses, draw what they learnt and what a pump gets, and return the run."""
    past, following, pump = pumps(seed)
    data = umbel.from_arrays(past, following, client=pump, validation=0.3, seed=seed)
    path = data.write(Path(tempfile.mkdtemp()) / "pumps")
    run = umbel.run(path, seed=seed, **{"hypotheses": 2, "epsilon": 8, "step_size": 0.05} | settings)
    figure, (left, right) = plt.subplots(2, 1, figsize=(7, 5.5), layout="constrained")
    for j, weights in enumerate(
        run.parameters["1.weight"] if "1.weight" in run.parameters else run.parameters["0.weight"]
    ):
        left.bar(np.arange(LAGS, 0, -1) + 0.4 * j - 0.2, weights[0], 0.4, label=f"hypothesis {j}")
    left.set(xlabel="hours ago", ylabel="weight", title="Weights of the two hypotheses")
    left.legend()
    run.worth["mean"].plot.barh(ax=right, title="Error of the forecast, of pumps that took no part")
    right.invert_yaxis()
    right.set(xlabel="RMSE", ylabel="")
    figure.savefig(picture)
    return run


if __name__ == "__main__":
    main()
