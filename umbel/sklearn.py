"""Federated learning behind scikit-learn's interface: each group of rows is a client.

It is a simulation, with all rows on this machine, and leaves no file behind.

>>> from umbel.sklearn import FederatedRegressor
>>> bounds = {"feature_range": (0, 100), "target_range": (0, 50_000)}
>>> model = FederatedRegressor(epsilon=4, **bounds).fit(X, cost, groups=hospital)  # doctest: +SKIP
>>> model.predict(X, groups=hospital)  # doctest: +SKIP
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from umbel.client.cohort import Cohort
from umbel.client.learner import learner_for
from umbel.client.personal import method
from umbel.client.personal.predictors import Predictors
from umbel.client.prediction import DEFAULT, Learnt
from umbel.client.trial import try_out
from umbel.data import open_dataset
from umbel.data.importers import from_arrays
from umbel.models.fit import traits_of
from umbel.privacy.accounting.guarantee import DELTA
from umbel.protocol.errors import ConfigError
from umbel.protocol.logs import quiet
from umbel.protocol.plugins import trust
from umbel.server.history import shares_of
from umbel.server.summary import Summary
from umbel.simulation.in_process import play
from umbel.simulation.start import check, values_of
from umbel.simulation.wanted import Wanted
from umbel.strategies.differences import prior_of

__all__ = ["FederatedClassifier", "FederatedRegressor"]

_Bounds = tuple[ArrayLike, ArrayLike]


class _Federated(BaseEstimator):
    """The common part of regressor and classifier: parameters that `FederatedRegressor` explains, and the run."""

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float = DELTA,
        hypotheses: int = 1,
        hidden: int | Sequence[int] = (),
        personalise: str = str(DEFAULT),
        feature_range: _Bounds | None = None,
        settings: Mapping[str, Any] | None = None,
        random_state: Any = None,
    ) -> None:
        self.epsilon, self.delta, self.hypotheses, self.hidden = epsilon, delta, hypotheses, hidden
        self.personalise, self.feature_range = personalise, feature_range
        self.settings, self.random_state = settings, random_state

    def _fit(self, X: NDArray[np.float64], targets: NDArray[Any], groups: ArrayLike | None, outputs: int) -> Self:
        """Learn from features (rows, features) and targets (rows,), which are scaled numbers or classes."""
        trust(self.personalise)
        method(self.personalise)
        self._offset, self._scale = self._units("feature_range", X)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        owners = self._owners(groups, len(X))
        widths = ",".join(map(str, np.atleast_1d(self.hidden)))
        kind = f"mlp inputs={X.shape[1]} hidden={widths}" if widths else f"linear inputs={X.shape[1]}"
        # A dataset sorts clients by their names.
        names = np.char.zfill(owners.astype(str), 9).astype(object)
        data = from_arrays(
            self._scaled(X), targets, client=names, model=f"{kind} outputs={outputs}", validation=0.0, seed=seed
        )
        wanted = None if self.epsilon is None else Wanted(self.epsilon, self.delta)
        given = {"seed": seed, "hypotheses": self.hypotheses, **(self.settings or {})}
        with tempfile.TemporaryDirectory(prefix="umbel-") as folder:
            path = data.write(Path(folder) / "rows")
            values = values_of(str(path), given, wanted).values
            check(values)
            self._learn(path, values)
        self.run_config_ = {key: value for key, value in values.items() if key != "dataset"}
        return self

    def _owners(self, groups: ArrayLike | None, rows: int) -> NDArray[np.int64]:
        """Return the number of each row's client, in `clients_`; without groups a row is a client by itself."""
        self.clients_ = np.empty(0)
        if groups is None:
            text = "without groups each row is a client: nothing is personalised, and a guarantee covers a single row"
            what = "whoever owns several rows, such as a hospital, a shop or a person"
            warnings.warn(f"{text}. Give fit each row's client as groups: {what}", UserWarning, stacklevel=4)
            return np.arange(rows)
        given = _names(groups)
        check_consistent_length(given, np.empty(rows))
        if len(lacking := np.flatnonzero(pd.isna(given))):
            text = f"row {lacking[0]}, counted from 0, has no group: name its client, or leave out that row"
            raise ConfigError(text, code="config.groups")
        self.clients_, owners = np.unique(given, return_inverse=True)
        return owners

    def _learn(self, path: Path, values: dict[str, Any]) -> None:
        """Do the run, and keep what it learnt and what clients make of that."""
        with quiet():  # whoever fits an estimator does not follow its rounds
            run = play(values)
        setup, state, spent = run.setup, run.state, run.fleet.participations
        k = len(next(iter(state.best.values())))
        self.history_ = pd.DataFrame([vars(entry) for entry in state.history]).set_index("number")
        summary = Summary.of(setup)
        left = summary.left(state.history)
        self.guarantee_ = summary.guarantee_lines(int(spent.max()), left=left)
        self._learnt = Learnt(setup.model, state.best, setup.config, prior_of(run.strategy.state, k))
        dataset = open_dataset(path)
        outputs = traits_of(setup.model, dataset.features.shape[1:]).outputs[-1]
        # For rows of no known client.
        self._mean = Predictors.weighted(1, state.best, outputs, shares_of(state.history, state.best_round, k))
        self._own: list[tuple[NDArray[np.int64], Predictors]] = []
        if len(self.clients_):
            learner = try_out(setup.model, dataset)
            numbers = np.array([int(name) for name in dataset.names])
            for some in self._learnt.chunks(range(len(numbers))):
                support = Cohort.gather(dataset, some, learner.device)
                self._own.append((numbers[some], self._learnt.personalise(learner, support, some, self.personalise)))

    def _outputs(self, X: ArrayLike, groups: ArrayLike | None) -> NDArray[np.float64]:
        """Return the outputs of the clients' own predictors, (rows, outputs)."""
        check_is_fitted(self)
        features = validate_data(self, X, reset=False)
        owners = np.full(len(features), -1)
        if groups is not None:
            named = _names(groups)
            check_consistent_length(named, features)
            if len(self.clients_) and _are_texts(named) is not _are_texts(self.clients_):
                text = f"groups are of type {named.dtype}, but those of fit were of type {self.clients_.dtype}"
                raise ConfigError(f"{text}, so all clients would be unknown: convert them", code="config.groups")
            owners = pd.Index(self.clients_).get_indexer(pd.Index(named))
        learner = learner_for(self._learnt.model, "cpu")
        rows = torch.from_numpy(self._scaled(features))
        found = np.empty((len(features), self._mean.offset.shape[1]))
        for clients, own in [(np.array([-1]), self._mean), *self._own]:
            places = pd.Index(clients).get_indexer(owners)
            asked = np.argsort(places, kind="stable")[np.count_nonzero(places < 0) :]
            if len(asked):
                there, lengths = np.unique(places[asked], return_counts=True)
                cohort = Cohort(rows[asked], rows[asked], lengths)
                found[asked] = own.part(there).outputs(learner, cohort).numpy()
        return found

    def _scaled(self, X: NDArray[np.float64]) -> NDArray[np.float32]:
        return ((X - self._offset) / self._scale).astype(np.float32)

    def _units(self, name: str, values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return offset and scale of public bounds, or of the rows where no guarantee forbids it."""
        if (bounds := getattr(self, name)) is not None:
            low, high = (np.asarray(bound, np.float64) for bound in bounds)
            if not (low < high).all():
                raise ConfigError(f"{name} = {bounds!r} must be (low, high), with low < high", code="config.bounds")
            if share := float(((values < low) | (values > high)).mean()):
                text = f"{share:.1%} of the numbers are outside {name} = {bounds!r}; give the range that they can have"
                warnings.warn(text, UserWarning, stacklevel=4)
            return (low + high) / 2, (high - low) / 2
        if self.epsilon is not None:
            text = f"epsilon needs public bounds, which must not come from rows: give {name}=(low, high)"
            raise ConfigError(text, code="config.no-range")
        with np.errstate(over="ignore", invalid="ignore"):
            mean, deviation = values.mean(axis=0), values.std(axis=0)
        if not np.isfinite([mean, deviation]).all():
            text = f"numbers are too large; divide them, or give {name}=(low, high)"
            raise ConfigError(text, code="config.bounds")
        return mean, np.where(deviation > 0, deviation, 1.0)


def _names(groups: ArrayLike) -> NDArray[Any]:
    """Return clients' names; numbers are of a type of numbers, also where their column may hold anything."""
    return np.asarray(pd.Index(column_or_1d(groups)).infer_objects())


def _are_texts(groups: NDArray[Any]) -> bool:
    return groups.dtype.kind in "OSTU"


class FederatedRegressor(RegressorMixin, _Federated):
    """Predict numbers, learnt from clients by federated learning.

    Parameters
    ----------
    epsilon : float, optional
        The guarantee for a client, between any two data sets that it may have. Noise and rounds are planned for it. By
        default there is no noise and no guarantee.
    delta : float
        Delta of the guarantee; 0 for a pure epsilon.
    hypotheses : int
        Number of models, for groups of clients that differ.
    hidden : int or sequence of int
        Units in each hidden layer; by default the model is linear.
    personalise : str
        How a client personalises the hypotheses with its rows in `fit`, as in `umbel.Run.predict`. It costs no privacy,
        because the result stays with the client; "no" uses the best hypothesis unchanged.
    feature_range, target_range : (low, high), optional
        Public bounds, each a number or one for each feature, which are scaled to -1 and 1. `epsilon` needs them. By
        default the rows standardise features and target.
    settings : mapping, optional
        Run-config values, which override planned ones.
    random_state : int, RandomState or None
        Seed of every draw, noise included.

    Attributes
    ----------
    guarantee_ : list of str
        The guarantee of each client in `fit`, in words.
    clients_ : ndarray
        The values of ``groups`` in `fit`; empty without groups.
    run_config_ : dict
        The run config.
    history_ : DataFrame
        A row for each round.
    """

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float = DELTA,
        hypotheses: int = 1,
        hidden: int | Sequence[int] = (),
        personalise: str = str(DEFAULT),
        feature_range: _Bounds | None = None,
        target_range: _Bounds | None = None,
        settings: Mapping[str, Any] | None = None,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            epsilon=epsilon,
            delta=delta,
            hypotheses=hypotheses,
            hidden=hidden,
            personalise=personalise,
            feature_range=feature_range,
            settings=settings,
            random_state=random_state,
        )
        self.target_range = target_range

    def fit(self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Learn from all clients.

        Parameters
        ----------
        X : array, shape (rows, features)
        y : array, shape (rows,)
        groups : array, shape (rows,), optional
            The client of each row: whoever owns several rows, such as a hospital, a shop or a person. By default each
            row is a client of its own, and a guarantee covers a single row.

        Warns
        -----
        UserWarning
            Without groups.

        Raises
        ------
        ConfigError
            If a parameter is invalid, bounds are missing for `epsilon`, or the model would learn nothing with it.
        """
        features, found = validate_data(self, X, y, y_numeric=True)
        targets = np.asarray(found, np.float64)
        self._target_offset, self._target_scale = self._units("target_range", targets)
        return self._fit(features, (targets - self._target_offset) / self._target_scale, groups, 1)

    def predict(self, X: ArrayLike, groups: ArrayLike | None = None) -> NDArray[np.float64]:
        """Return predictions, (rows,).

        Parameters
        ----------
        X : array, shape (rows, features)
        groups : array, shape (rows,), optional
            The client of each row. A client of `fit` uses its personalised predictor. Other clients, and all rows
            without groups, use the mean of the hypotheses, weighted by their releases.
        """
        found: NDArray[np.float64] = self._outputs(X, groups)[:, 0] * self._target_scale + self._target_offset
        return found

    def score(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, groups: ArrayLike | None = None
    ) -> float:
        """Return the coefficient of determination of `predict`."""
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))


class FederatedClassifier(ClassifierMixin, _Federated):
    """Predict classes, learnt from clients by federated learning; parameters are those of `FederatedRegressor`.

    Attributes
    ----------
    classes_ : ndarray
        The classes; with `epsilon` they count as public.
    guarantee_, clients_, run_config_, history_
        As those of `FederatedRegressor`.
    """

    def fit(self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Learn from all clients; see `FederatedRegressor.fit`."""
        features, found = validate_data(self, X, y)
        check_classification_targets(found)
        self.classes_, places = np.unique(found, return_inverse=True)
        return self._fit(features, places, groups, max(2, len(self.classes_)))

    def predict_proba(self, X: ArrayLike, groups: ArrayLike | None = None) -> NDArray[np.float64]:
        """Return the probability of each class, (rows, classes); for groups see `FederatedRegressor.predict`."""
        outputs = self._outputs(X, groups)
        logits = torch.from_numpy(outputs[:, : len(self.classes_)])
        found: NDArray[np.float64] = torch.softmax(logits, dim=1).numpy()
        return found

    def predict(self, X: ArrayLike, groups: ArrayLike | None = None) -> NDArray[Any]:
        """Return the most probable classes, (rows,); for groups see `FederatedRegressor.predict`."""
        places = self.predict_proba(X, groups).argmax(axis=1)
        found: NDArray[Any] = self.classes_[places]
        return found

    def score(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, groups: ArrayLike | None = None
    ) -> float:
        """Return the accuracy of `predict`."""
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))
