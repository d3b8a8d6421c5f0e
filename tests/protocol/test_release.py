"""What a release costs is exact, and the radius of a round follows its schedule."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.release import Clipping, Kind, NoisePer, Release, ReleaseBy, exact, quotient


def release(n: int, noise_multiplier: float, mode: Clipping = Clipping.UPDATE) -> Release:
    """Return a release of n numbers."""
    return Release(Kind.TRAIN, n, noise_multiplier, mode)


def test_what_releases_cost_together_is_exact() -> None:
    assert release(11, 3.0).paper_cost == Fraction(11, 3), "the hospital network"
    assert release(2, 0.1).paper_cost == 20, "a tenth is the tenth that people write"
    assert release(4, 0.3).paper_cost == Fraction(40, 3), "so that three of them fit a budget of 40"
    assert (release(11, 3.0).paper_spend(3), release(11, 3.0).paper_spend(0)) == (11, 0)
    assert (release(11, 0.0).paper_cost, release(11, 0.0).paper_spend(1), release(11, 0.0).paper_spend(0)) == (
        None, math.inf, 0,
    )  # fmt: skip
    for mode in Clipping:  # it does not hang on the radius
        assert Release(Kind.REPORT, 2, 4.0, mode, 7.0).paper_cost == release(2, 4.0).paper_cost == Fraction(1, 2)


def test_a_price_that_is_no_short_fraction_is_rounded_up() -> None:
    assert quotient(1, 1000.0) == Fraction(1, 1000)
    assert quotient(1, 1001.0) == Fraction(math.ceil(2**32 / 1001), 2**32)
    assert quotient(1, 1e300) == Fraction(1, 2**32)
    assert exact(1e-300) == Fraction(1, 10**300)


@given(st.integers(1, 10**7), st.floats(0, exclude_min=True, allow_infinity=False))
def test_a_price_is_never_too_low_and_hardly_too_high(n: int, noise_multiplier: float) -> None:
    cost = release(n, noise_multiplier).paper_cost
    assert isinstance(cost, Fraction)
    true = Fraction(n) / Fraction(repr(noise_multiplier))
    assert true <= cost <= true + Fraction(1, 2**32)
    assert cost.denominator <= 2**32


def test_a_guarantee_takes_noise_a_public_radius_and_a_private_choice() -> None:
    assert release(11, 3.0, Clipping.PUBLIC).formal
    assert not release(11, 0.0, Clipping.PUBLIC).formal
    assert not release(11, 3.0, Clipping.UPDATE).formal
    chosen = replace(release(11, 3.0, Clipping.PUBLIC), hypotheses=2)
    assert not chosen.formal
    assert replace(chosen, choice_epsilon=1.0).formal
    assert not replace(chosen, hypotheses=0).formal, "how many there were is not on record"


def test_names_are_those_that_travel_and_stand_in_ledgers() -> None:
    assert [*Clipping] == ["update", "public"]
    assert [*Kind] == ["train", "site", "secure", "report"]
    assert [*NoisePer] == ["vector", "layer", "row"]
    assert [*ReleaseBy] == ["client", "site", "secure"]
