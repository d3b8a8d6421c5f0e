"""Plans and prices from Python; `accounting/test_plan.py` checks the figures, `commands/test_plan.py` the command."""

from __future__ import annotations

from pathlib import Path

import pytest

import umbel
from tests.helpers.errors import raises
from umbel.privacy.accounting.guarantee import guarantee
from umbel.protocol.errors import ConfigError
from umbel.server.setup import Setup
from umbel.simulation.start import read_values

NUMBERS = {"parameters": 11, "hypotheses": 5, "clients": 2062, "clients_per_round": 100}


def test_noise_in_a_mean_falls_with_those_who_share_a_draw() -> None:
    """One hypothesis and 100 clients a round, at the same guarantee: each client leaves 1 / 10 of its noise in a mean,
    each of 20 sites sqrt(20) / 100, and all together 1 / 100."""
    numbers = NUMBERS | {"hypotheses": 1, "target_epsilon": 4.0, "sites": 20}
    left = {
        release: umbel.price(**numbers, release=release, mechanism="discrete-gaussian")
        for release in ("client", "site", "secure")
    }
    several = umbel.price(**numbers | {"hypotheses": 5}, release="secure")
    nu = several.release.noise_multiplier
    assert {figures.release.noise_multiplier for figures in left.values()} == {nu}, "a sum hides the choice for nothing"
    shares = {release: figures.noise_left / (nu * 11**0.5) for release, figures in left.items()}
    assert shares == pytest.approx({"client": 0.1, "site": 20**0.5 / 100, "secure": 0.01})


def test_a_configuration_that_limits_participations_costs_no_more_than_they_do() -> None:
    """Each client takes part once, at pure epsilon 4, where a random draw would take some eight times."""
    figures = umbel.price("hospital-services", delta=0.0)
    assert (figures.median_participations, figures.max_participations) == (1, 1)
    assert figures.maximum is not None
    assert figures.maximum.pure == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize(("release", "mechanism"), [("site", "gaussian"), ("secure", "discrete-gaussian")])
def test_a_configuration_of_sums_is_priced_as_its_strategy_releases(
    tmp_path: Path, release: str, mechanism: str
) -> None:
    """A choice that the sum hides costs nothing, and clients who share a draw of the noise leave less of it."""
    file = tmp_path / "sums.toml"
    file.write_text(
        f'dataset = "synthetic"\nstrategy = "{release}-average"\nmechanism = "{mechanism}"\nhypotheses = 2\n'
        'clipping = "public"\nnoise-multiplier = 3.0\nchoice-epsilon = 1.0\nrounds = 2\nrestarts = 1\n'
    )
    planned = umbel.price(file, sites=3)
    assert planned == umbel.price(file, release=release, sites=3)
    most = {Setup.parse(read_values(file)).release: planned.max_participations}
    assert planned.maximum == guarantee(most)
    assert planned.noise_left < umbel.price(file, release="client").noise_left


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({**NUMBERS, "target_epsilon": 4, "rounds": 10}, "config.both-ways"),
        ({**NUMBERS, "rounds": 10}, "config.missing-figure"),
        ({"parameters": 11}, "config.missing-figure"),
        ({"config": "synthetic", "parameters": 11}, "config.given-twice"),
        ({**NUMBERS, "target_epsilon": 4, "release": "secure"}, "config.impossible-figure"),
        ({**NUMBERS, "target_epsilon": 4, "release": "secure", "sites": 3, "mechanism": "laplace"}, "config.mechanism"),
        ({"config": "hospital-services", "epsilon": 4, "release": "site", "strategy": "fedavg"}, "config.both-ways"),
        ({"config": "hospital-services", "epsilon": 4, "release": "secure", "sites": 2}, "config.impossible-figure"),
    ],
)
def test_what_is_missing_or_given_twice_is_named(asked: dict[str, object], code: str) -> None:
    with raises(ConfigError, code):
        (umbel.plan if "epsilon" in asked else umbel.price)(**asked)  # type: ignore[operator]
