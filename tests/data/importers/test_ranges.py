"""Scales come from declared ranges, or from private medians whose guarantee and accuracy can be checked by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tests.helpers.errors import raises
from umbel.data import Schema
from umbel.data.importers.ranges import enough, log_density, private_median, scaled
from umbel.protocol.errors import DatasetError


def schema(**age: float) -> Schema:
    entries = {"features": [{"name": "age", "type": "integer", **age}], "target": {"name": "cost", "type": "number"}}
    return Schema.parse(entries)


def densities(points: np.ndarray, epsilon: float, at: np.ndarray) -> np.ndarray:
    """The normalised log density of the mechanism at some places."""
    edges, logs = log_density(points, epsilon)
    whole = np.log(np.sum(np.exp(logs) * np.diff(edges)))
    place = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, len(logs) - 1)
    return np.asarray(logs[place] - whole)


@pytest.mark.parametrize("other", [-1e12, -1.0, 0.0, 30.0, 1e12])
def test_a_clients_number_moves_no_density_by_more_than_epsilon(other: float) -> None:
    points = np.array([20.0, 30.0, 30.0, 45.0, 70.0])
    changed = np.array([*points[:-1], other])
    at = np.linspace(-41, 41, 9973)
    moved = np.abs(densities(points, 0.7, at) - densities(changed, 0.7, at))
    assert moved.max() <= 0.7 + 1e-9
    assert moved.max() > 0.1, "the median depends on the clients"


def test_a_median_lies_among_the_middle_clients_as_often_as_is_said() -> None:
    """At the epsilon that is enough, 95 % of the draws at least lie among the middle three quarters.

    Of 400 draws 360 or fewer would then do so by chance once in 10,000 times at most.
    """
    generator = np.random.default_rng(0)
    for points in (np.arange(2000.0, 2040.0), np.full(40, 7.0), generator.normal(0, 1e5, 40)):
        low, high = np.quantile(points, [1 / 8, 7 / 8])
        slack = 0.011 * np.abs(points).max()
        draws = np.array([private_median(points, enough(40), generator) for _ in range(400)])
        assert np.sum((draws >= low - slack) & (draws <= high + slack)) > 360


def test_what_an_estimate_costs_is_what_the_page_says() -> None:
    assert enough(1) == pytest.approx(102, rel=0.005)
    assert enough(2000) == pytest.approx(0.05, rel=0.02)
    assert enough(20) == pytest.approx(5, rel=0.02)


def test_declared_ranges_become_scales_and_cost_nothing() -> None:
    frame = pd.DataFrame({"age": [30], "cost": [5.0]})
    whole = schema(minimum=20, maximum=100).model_copy(update={"target": schema().target})
    bounded = Schema.parse(whole.entries() | {"target": {"name": "cost", "type": "number", "minimum": 0, "maximum": 9}})
    found = scaled(bounded, frame, np.zeros(1, np.int64), 0.0, np.random.default_rng(0))
    # By hand: 20 to 100 is 60 give or take 40; a target has no offset.
    assert (found.schema.features[0].offset, found.schema.features[0].scale) == (60, 40)
    assert (found.schema.target.offset, found.schema.target.scale) == (0, 9)
    assert (list(found.estimated), found.epsilon) == ([], 0)


def test_other_ranges_are_estimated_with_an_epsilon_that_follows_from_public_numbers() -> None:
    generator = np.random.default_rng(0)
    owners = np.repeat(np.arange(300), 5)
    frame = pd.DataFrame({"age": generator.integers(20, 80, 1500), "cost": generator.normal(1e4, 3e3, 1500)})
    found = scaled(schema(), frame, owners, 0.0, np.random.default_rng(1))
    assert found.epsilon == pytest.approx(3 * enough(300), rel=0.02)
    assert found.epsilon >= 3 * enough(300)
    age, cost = found.schema.features[0], found.schema.target
    assert 30 < age.offset < 70
    assert 10 < age.scale < 60
    assert 5e3 < cost.scale < 3e4
    again = scaled(schema(), frame, owners, 0.0, np.random.default_rng(1))
    assert again == found
    few = scaled(schema(), frame * 7, owners, 0.0, np.random.default_rng(1))
    assert few.epsilon == found.epsilon, "the rows do not say what they cost"


def test_too_small_an_epsilon_is_refused_with_the_one_that_does() -> None:
    frame = pd.DataFrame({"age": [30, 40], "cost": [5.0, 6.0]})
    with raises(DatasetError, "data.too-few-clients", "2 training clients", f"{3 * enough(2):.3g}"[:2], "age, cost"):
        scaled(schema(), frame, np.arange(2), 1.0, np.random.default_rng(0))


def test_numbers_that_are_all_the_same_keep_a_scale_of_one() -> None:
    frame = pd.DataFrame({"age": np.full(200, 5), "cost": np.arange(200.0)})
    found = scaled(schema(), frame, np.arange(200), 0.0, np.random.default_rng(0))
    assert found.schema.features[0].offset == pytest.approx(5, rel=0.02)
    assert 0.1 < found.schema.features[0].scale <= 1.1


def test_dates_get_a_first_day_and_a_span_near_theirs() -> None:
    """Of 400 clients with dates in 2023 and 2024, the middle is January 2024, and most ends are a year from it."""
    generator = np.random.default_rng(0)
    days = pd.Timestamp("2023-01-01") + pd.to_timedelta(generator.integers(0, 731, 8000), unit="D")
    frame = pd.DataFrame({"day": days, "cost": 1.0})
    entries = {"features": [{"name": "day", "type": "date"}], "target": {"name": "cost", "type": "number", "scale": 2}}
    found = scaled(Schema.parse(entries), frame, np.repeat(np.arange(400), 20), 0.0, generator)
    [day] = found.schema.features
    assert abs((pd.Timestamp(day.since) - pd.Timestamp("2024-01-01")).days) < 150
    assert 250 < day.span < 600
    assert found.estimated == ["day"]
    assert found.epsilon > 0
    declared = Schema.parse(entries | {"features": [{"name": "day", "type": "date", "since": "2024-01-01"}]})
    assert not scaled(declared, frame, np.zeros(8000, np.int64), 0.0, generator).estimated
