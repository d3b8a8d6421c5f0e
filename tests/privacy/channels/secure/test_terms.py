"""What follows from a run's terms: how many have to sign, and how much noise each party adds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.errors import raises
from tests.privacy.channels.secure.conftest import TERMS
from umbel.privacy.channels.secure.terms import FINEST, Terms, bits_for, finest_deviation
from umbel.protocol.errors import Refused


@pytest.mark.parametrize(("parties", "colluding", "threshold"), [(3, 0, 2), (10, 3, 7), (20, 7, 14), (4, 0, 3)])
def test_more_than_half_of_the_honest_and_all_that_collude_sign(parties: int, colluding: int, threshold: int) -> None:
    assert replace(TERMS, colluding=colluding, least=parties).threshold(parties) == threshold


@given(st.integers(2, 60), st.data())
def test_no_server_gets_two_sets_signed(parties: int, data: st.DataObject) -> None:
    """Honest parties sign one set, colluding ones both: together less than two thresholds."""
    colluding = data.draw(st.integers(0, parties - 2))
    honest = parties - colluding
    assert honest + 2 * colluding < 2 * replace(TERMS, colluding=colluding, least=parties).threshold(parties)


@given(st.integers(2, 40), st.data())
def test_the_honest_survivors_carry_the_whole_noise(parties: int, data: st.DataObject) -> None:
    colluding = data.draw(st.integers(0, parties - 2))
    terms = replace(TERMS, colluding=colluding, least=parties, deviation=1000.0)
    if terms.threshold(parties) > parties:
        return
    layers = terms.layers(parties)
    for survivors in range(terms.threshold(parties), parties + 1):
        kept = layers[: parties - survivors + 1]
        honest = (survivors - colluding) * sum(deviation**2 for deviation in kept)
        assert math.isclose(honest, 1000.0**2, rel_tol=1e-9)


@given(st.integers(2, 100), st.data())
def test_each_layer_is_fine_enough_to_add_up(parties: int, data: st.DataObject) -> None:
    """Two layers add up to nearly a discrete Gaussian: of deviations s and t, log-probabilities differ by at most
    5 exp(-2 pi^2 / (1/s^2 + 1/t^2)) (Kairouz, Liu and Steinke, 2021)."""
    assert 5 * math.exp(-2 * math.pi**2 / (2 / FINEST**2)) < 1e-270
    colluding = data.draw(st.integers(0, parties - 2))
    terms = Terms("run", 1, 62, finest_deviation(parties, colluding), colluding, parties)
    if terms.threshold(parties) <= parties:
        terms.check_parties(parties)
        assert min(terms.layers(parties)) >= FINEST * (1 - 1e-12)


def test_without_noise_there_are_no_layers() -> None:
    assert TERMS.layers(5) == []


def test_noise_that_is_too_coarse_for_so_many_parties_is_refused() -> None:
    terms = replace(TERMS, deviation=256.0)
    terms.check_parties(32)
    with raises(Refused, "refused.secure-terms"):
        terms.check_parties(33)


@pytest.mark.parametrize("parties", [0, 1, 2])
def test_sums_of_too_few_parties_are_refused(parties: int) -> None:
    with raises(Refused, "refused.secure-parties"):
        TERMS.check_parties(parties)


@pytest.mark.parametrize(
    "terms",
    [{"colluding": 2}, {"colluding": -1}, {"bits": 63}, {"bits": 0}, {"length": 0}, {"deviation": -1.0},
     {"deviation": math.inf}, {"deviation": math.nan}, {"least": 1}],
)  # fmt: skip
def test_terms_that_hide_nothing_are_refused(terms: dict[str, float]) -> None:
    with raises(Refused, "refused.secure-terms"):
        replace(TERMS, **terms)


@given(st.floats(0, 1e9), st.floats(0, 1e4), st.integers(2, 50), st.data())
def test_a_sum_fits_into_its_bits(largest: float, deviation: float, parties: int, data: st.DataObject) -> None:
    """With fourteen deviations of the most noise that may be left, after every dropout."""
    colluding = data.draw(st.integers(0, parties - 2))
    terms = Terms("run", 1, 62, deviation, colluding, parties)
    t = terms.threshold(parties)
    if t <= parties:
        most = deviation * math.sqrt(parties / (t - colluding))
        assert largest + 14 * most <= 2 ** (bits_for(largest, deviation, parties, colluding) - 1)


def test_other_terms_have_another_digest() -> None:
    changed = [{"run": "run 8"}, {"length": 6}, {"bits": 21}, {"deviation": 1.0}, {"colluding": 1}, {"least": 4}]
    assert len({TERMS.digest, *(replace(TERMS, **one).digest for one in changed)}) == 1 + len(changed)
