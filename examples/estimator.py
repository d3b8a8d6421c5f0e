"""scikit-learn's interface: cross-validation over rows, and a guarantee for each client.

The 2,947 hospitals of umbel's dataset each have a few rows. `FederatedRegressor` learns one linear model from all of
them, and each hospital makes it its own. Linear regression without privacy sees all rows, but not the hospitals.
"""

import matplotlib.pyplot as plt
import numpy as np
import sklearn
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import KFold, cross_val_score

from umbel.data import find_dataset, open_dataset
from umbel.sklearn import FederatedRegressor

BOUNDS = {"feature_range": (-1, 1), "target_range": (0, 5)}  # services as 0 and 1, places, tens of thousands of dollars


def main(picture="estimator.svg", seed=2000, epsilons=(1, 2, 4, 8), folds=3):
    """Cross-validate, draw R² by epsilon, and return it by way, (folds,)."""
    data = open_dataset(find_dataset("hospital-services"))
    X, y, hospital = np.asarray(data.features), np.asarray(data.targets), np.repeat(data.names, data.lengths)
    sklearn.set_config(enable_metadata_routing=True)
    split = {"cv": KFold(folds, shuffle=True, random_state=seed)}
    found = {"linear regression, all rows, no privacy": cross_val_score(LinearRegression(), X, y, **split)}
    for epsilon in epsilons:
        model = FederatedRegressor(epsilon=epsilon, random_state=seed, **BOUNDS)
        model.set_fit_request(groups=True).set_score_request(groups=True)
        found[f"federated, epsilon {epsilon}"] = cross_val_score(model, X, y, params={"groups": hospital}, **split)
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.barh([*found], [one.mean() for one in found.values()], xerr=[one.std() for one in found.values()])
    axes.invert_yaxis()
    axes.set(xlabel="R²", title=f"Rows left out of {len(data.names):,} hospitals, {folds} folds")
    figure.savefig(picture)
    return found


if __name__ == "__main__":
    main()
