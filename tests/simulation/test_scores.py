"""Scores of classes on rows small enough to count, and their intervals by leaving out each client in turn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, log_loss, roc_auc_score

from umbel.models.losses import of_classes
from umbel.simulation.scores import chance, jackknifed

LENGTHS = np.array([7, 12, 5, 16])
ROWS = int(LENGTHS.sum())
CLIENT = np.repeat(np.arange(len(LENGTHS)), LENGTHS)


def test_a_single_score_is_that_of_the_second_class() -> None:
    np.testing.assert_array_equal(of_classes(torch.tensor([[2.0], [-1.0]])), [[0, 2], [0, -1]])


def test_scores_of_two_classes_are_those_of_scikit_learn_with_and_without_each_client() -> None:
    generator = np.random.default_rng(0)
    score, labels = generator.integers(-3, 4, ROWS).astype(float), generator.integers(2, size=ROWS)
    values = of_classes(torch.from_numpy(score[:, None])).numpy()
    found = jackknifed(values, labels, LENGTHS, probabilities=True)

    def expected(kept: np.ndarray) -> list[float]:
        of, chance_of = labels[kept], 1 / (1 + np.exp(-score[kept]))
        told = score[kept] > 0
        return [balanced_accuracy_score(of, told), roc_auc_score(of, score[kept]), log_loss(of, chance_of)]

    whole, without = expected(CLIENT >= 0), np.array([expected(client != CLIENT) for client in range(4)])
    assert list(found) == ["balanced accuracy", "AUC", "log loss"]
    np.testing.assert_allclose([own[0] for own in found.values()], whole)
    np.testing.assert_allclose(np.array([*found.values()])[:, 1:].T, whole + 3 * (without.mean(0) - without))


def test_of_several_classes_there_is_macro_f1_over_those_that_are_there() -> None:
    values = np.random.default_rng(1).normal(size=(ROWS, 5))
    values[:, 4] = -9
    labels = np.random.default_rng(2).integers(3, size=ROWS)
    found = jackknifed(values, labels, LENGTHS, probabilities=True)
    assert list(found) == ["macro F1"]
    assert found["macro F1"][0] == pytest.approx(f1_score(labels, values.argmax(1), average="macro"))


def test_no_probability_no_log_loss_and_what_one_client_alone_holds_has_no_interval() -> None:
    """All positives are the first client's, so that there is no AUC without it."""
    values, labels = np.array([[0.0, 1.0], [0, -1], [0, -2]]), np.array([1, 0, 0])
    found = jackknifed(values, labels, np.array([1, 2]), probabilities=False)
    assert list(found) == ["balanced accuracy", "AUC"]
    assert found["AUC"][0] == 1
    assert np.isnan(found["AUC"][1:]).all()


def test_the_chance_of_few_values_is_larger() -> None:
    """Twice the standard error of very many, 13.97 times that of two; a single value shows nothing."""
    assert chance(np.array([0.0, 2.0])) == pytest.approx(13.97, rel=1e-3)
    assert chance(np.tile([-1.0, 1.0], 5000)) == pytest.approx(0.02, rel=1e-3)
    assert chance(np.ones(1)) == math.inf
