"""Algorithm 1, line 9: k-means from the hypotheses, checked by hand and against Lloyd's iterations spelt out.

And the two that need none: IFCA, whose clients say what they chose, and federated averaging.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from tests.helpers.scripted import on
from tests.strategies.conftest import one_round
from umbel.nodes.fleet import Fleet
from umbel.strategies.fedavg import FedAvg
from umbel.strategies.group_privacy import GroupOptions, GroupPrivacy, nearest, relocating_kmeans, seeded_kmeans
from umbel.strategies.ifca import IFCA


def column(*numbers: float) -> NDArray[np.float64]:
    """Return points on a line."""
    return np.array(numbers, float)[:, None]


# --- by hand


def test_a_point_between_two_centroids_goes_to_the_first() -> None:
    assert nearest(column(2), column(4, 0)).tolist() == [0]
    assert nearest(column(2), column(9, 0, 4)).tolist() == [1]
    assert nearest(column(2), column(0, 0, 0)).tolist() == [0]


@pytest.mark.parametrize(
    ("points", "centroids", "labels"),
    [
        # 3 is nearer to 5 than to 0; but the clusters {0, 2} and {3, 10} have the means 1 and 6.5,
        # and 3 is nearer to 1. The means are then 5/3 and 10, and nothing moves any more.
        ((0, 2, 3, 10), (0, 5), [0, 0, 0, 1]),
        # The border halfway between the means goes from 0.5 to 3.8, 6.3, 8.25 and 11.8.
        ((0, 1, 3, 6, 8, 20), (0, 1), [0, 0, 0, 0, 0, 1]),
        # Without points a centroid stays. `relocating_kmeans` moves the second one to the outlier, 49.
        ((0, 1, 49), (0, 100), [0, 0, 0]),
        # The middle centroid attracts 4 and 6, but its neighbours move to 3.5 and 6.5, which is nearer.
        ((3.5, 4, 6, 6.5), (2.5, 5, 7.5), [0, 0, 2, 2]),
    ],
)
def test_labels_on_a_line(points: tuple[float, ...], centroids: tuple[float, ...], labels: list[int]) -> None:
    assert seeded_kmeans(column(*points), column(*centroids)).tolist() == labels


@pytest.mark.parametrize(
    ("points", "centroids", "labels"),
    [
        ((0, 1, 49), (0, 100), [0, 0, 1]),
        # No cluster is ever empty: as in `test_labels_on_a_line`.
        ((0, 2, 3, 10), (0, 5), [0, 0, 0, 1]),
        # Two centroids without points move to the two outliers.
        ((0, 1, 49, 80), (0, 200, 300), [0, 0, 2, 1]),
        # Fewer points than centroids: all without points stay.
        ((0, 49), (0, 100, 200), [0, 0]),
        ((0, 1, 49), (0,), [0, 0, 0]),
    ],
)
def test_a_centroid_without_points_may_move(
    points: tuple[float, ...], centroids: tuple[float, ...], labels: list[int]
) -> None:
    assert relocating_kmeans(column(*points), column(*centroids)).tolist() == labels


@pytest.mark.filterwarnings("error")
def test_equal_points_have_fewer_places_than_centroids_and_nobody_is_warned() -> None:
    labels = relocating_kmeans(np.ones((5, 3), np.float32), column(0, 1, 2) * np.ones(3))
    assert labels.shape == (5,)
    assert set(labels.tolist()) <= {0, 1, 2}


def test_moving_depends_neither_on_threads_nor_on_where_the_points_lie() -> None:
    """More points than scikit-learn gives to one thread, in the 32 bits in which they travel."""
    random = np.random.default_rng(3)
    points, centroids = random.normal(size=(3000, 4)), random.normal(size=(6, 4))
    centroids[5] = 1000  # without points
    one, far = relocating_kmeans(points, centroids), points.astype(np.float32) + np.float32(4096)
    assert np.bincount(one, minlength=6).all()
    with threadpool_limits(4):
        np.testing.assert_array_equal(relocating_kmeans(points, centroids), one)
    np.testing.assert_array_equal(
        relocating_kmeans(far, centroids), relocating_kmeans(far.astype(np.float64), centroids)
    )


@pytest.mark.parametrize("cluster", [seeded_kmeans, relocating_kmeans])
def test_the_given_centroids_are_left_alone(cluster: Any) -> None:
    seeds = column(0, 5)
    cluster(column(0, 2, 3, 10), seeds)
    assert seeds[:, 0].tolist() == [0, 5]


def test_float32_releases_far_from_zero_are_told_apart() -> None:
    # The squares of these differ in the last of float32's 24 bits; differences come first.
    points = np.array([[4096.0], [4097.0]], np.float32).astype(np.float64)
    assert seeded_kmeans(points, column(4096, 4097)).tolist() == [0, 1]


# --- any clusters


@st.composite
def clusters(draw: st.DrawFn) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points and centroids in general position: two distances are never the same."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    m, k, n = draw(st.integers(1, 20)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return random.normal(size=(m, n)), random.normal(size=(k, n)) * draw(st.sampled_from([0.1, 1, 10]))


def lloyd(points: list[list[float]], centroids: list[list[float]]) -> list[int]:
    """Lloyd's iterations as a textbook has them."""
    labels: list[int] = []
    while True:
        following = [min(range(len(centroids)), key=lambda j: math.dist(p, centroids[j])) for p in points]
        if following == labels:
            return labels
        labels = following
        for j in range(len(centroids)):
            members = [p for p, label in zip(points, labels, strict=True) if label == j]
            if members:
                centroids[j] = [sum(numbers) / len(members) for numbers in zip(*members, strict=True)]


@given(clusters())
def test_labels_are_those_of_lloyds_iterations(given: tuple[NDArray[np.float64], NDArray[np.float64]]) -> None:
    points, centroids = given
    assert seeded_kmeans(points, centroids).tolist() == lloyd(points.tolist(), centroids.tolist())


# --- a round of it


def test_a_round_clusters_the_releases_and_averages_each_cluster() -> None:
    # The example on a line from above, along the first of three parameters.
    release = {0: (0, 1, 1), 1: (2, 1, 3), 2: (3, 1, 5), 3: (10, 7, 9)}
    strategy = on(Fleet(clients_per_round=4), GroupPrivacy(hypotheses=3))
    following, counts = one_round(strategy, [(0, 1, 3), (5, 1, 3), (-90, 0, 0)], release)
    assert counts["groups"] == [3, 1, 0]
    np.testing.assert_allclose(following, [(5 / 3, 1, 3), (10, 7, 9), (-90, 0, 0)], rtol=1e-6)


def test_a_round_may_move_the_hypothesis_that_gets_no_release() -> None:
    """It goes to (10, 7, 9), the furthest from its cluster's centre, and keeps it; the others share the rest."""
    release = {0: (0, 1, 1), 1: (2, 1, 3), 2: (3, 1, 5), 3: (10, 7, 9)}
    strategy = on(Fleet(clients_per_round=4), GroupPrivacy(hypotheses=2, **vars(GroupOptions(empty="relocate"))))
    following, counts = one_round(strategy, [(0, 1, 3), (-90, 0, 0)], release)
    assert counts["groups"] == [3, 1]
    np.testing.assert_allclose(following, [(5 / 3, 1, 3), (10, 7, 9)], rtol=1e-6)


@pytest.mark.parametrize("nodes", [1, 3])
def test_under_ifca_a_release_belongs_to_the_hypothesis_that_its_client_says_it_chose(nodes: int) -> None:
    """Both groups lie across both hypotheses: k-means would group these otherwise."""
    release: dict[int, Any] = {0: (0, 0, 0), 1: (1, 1, 1), 2: (10, 10, 10), 3: (11, 11, 11)}
    choice, sent = {0: 0, 1: 1, 2: 0, 3: 1}, [(0, 0, 0), (10, 10, 10)]
    following, counts = one_round(on(Fleet(clients_per_round=4), IFCA()), sent, release, choice, nodes)
    assert following.tolist() == [[5, 5, 5], [6, 6, 6]]
    assert counts["groups"] == [2, 2]
    some = release | {1: None, 2: None}
    following, _ = one_round(on(Fleet(clients_per_round=4), IFCA()), sent, some, choice, nodes)
    assert following.tolist() == [[0, 0, 0], [11, 11, 11]]


def test_fedavg_has_one_hypothesis_and_averages_all_releases_each_counting_once() -> None:
    strategy = on(Fleet(clients_per_round=3), FedAvg(hypotheses=7))
    assert strategy.hypotheses == 1, "whatever is asked"
    following, counts = one_round(strategy, [(7, 7, 7)], {0: (1, 0, 3), 1: (2, 0, 3), 2: (6, 9, 3)}, nodes=2)
    assert following.tolist() == [[3, 3, 3]]
    assert counts["groups"] == [3]
