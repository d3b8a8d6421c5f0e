"""What a server and parties that work with it learn: the sum of the others, and nothing else.

Without all masks and noise that they know, each honest party's numbers are uniform, those of any two are independent,
and all together give their sum. A simulator makes such numbers from the sum alone, so a real round tells nothing more.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from tests.privacy.channels.secure.conftest import Federation
from umbel.privacy.channels.secure import seeds
from umbel.privacy.channels.secure.party import OWN, Party, add_mask, noise
from umbel.privacy.channels.secure.sums import Sum
from umbel.privacy.channels.secure.terms import Terms

TERMS = Terms("run 7", length=400, bits=16, deviation=300.0, colluding=1, least=5)
NAMES = ["a", "b", "c", "d", "e"]
COLLUDING, LOST = {"e"}, {"d"}
HONEST = [name for name in NAMES if name not in COLLUDING | LOST]
LEVEL = 1e-4
"""Chance of each test's false alarm; the draws are the same in each run."""

Words = NDArray[np.uint64]
Round = tuple[Federation, Sum]


class Played(Federation):
    """A federation whose parties have constant numbers, and secrets that follow from a seed."""

    def party(self, name: str, terms: Terms | None = None, secret: bytes = b"") -> Party:
        generator = np.random.default_rng([10, NAMES.index(name)])
        made = super().party(name, terms, secret or generator.bytes(32))
        made.random = generator.bytes
        return made

    def values(self, seed: int = 0) -> dict[str, NDArray[np.int64]]:
        return {name: np.full(TERMS.length, 1000 * place) for place, name in enumerate(NAMES, 1)}


@pytest.fixture(scope="module")
def played() -> Round:
    federation = Played(TERMS, len(NAMES))
    return federation, federation.third(federation.second(federation.first(gone=LOST)))


def kept_noise(federation: Federation, name: str) -> NDArray[np.int64]:
    """Return the noise that a survivor does not take back."""
    party, layers = federation.parties[name], TERMS.layers(len(NAMES))
    own = party._layer_seeds(len(NAMES))[: len(LOST) + 1]
    return sum(
        (noise(deviation, TERMS.length, seed) for deviation, seed in zip(layers, own, strict=False)), np.int64(0)
    )


def stripped(federation: Federation, found: Sum, name: str) -> Words:
    """Return an honest survivor's masked numbers without every mask and layer that server and coalition know."""
    party = federation.parties[name]
    left = seeds.unpacked(found._masked[name].numbers, TERMS.length, TERMS.bits).copy()
    masks = party._seeds(party.turn.members, party._pairs(federation.announced, party.turn.members))
    for other in (OWN, *LOST, *COLLUDING):
        add_mask(left, masks[other], TERMS, plus=not (other == OWN or name < other))
    for seed, deviation in zip(found._opened[name].layers, TERMS.layers(len(NAMES))[len(LOST) + 1 :], strict=True):
        left -= noise(deviation, TERMS.length, seed).astype(np.uint64)
    return left & np.uint64((1 << TERMS.bits) - 1)


@pytest.mark.parametrize("name", HONEST)
def test_numbers_without_the_known_masks_are_uniform(played: Round, name: str) -> None:
    """16 bins of 400 numbers."""
    counts = np.bincount((stripped(*played, name) >> np.uint64(TERMS.bits - 4)).astype(int), minlength=16)
    assert stats.chisquare(counts).pvalue > LEVEL


def test_any_two_parties_look_independent_and_all_three_give_the_sum(played: Round) -> None:
    parts = {name: stripped(*played, name) for name in HONEST}
    for pair in combinations(parts.values(), 2):
        signs = [(part >> np.uint64(TERMS.bits - 1)).astype(int) for part in pair]
        assert stats.chi2_contingency(np.histogram2d(*signs, bins=2)[0]).pvalue > LEVEL
        assert abs(stats.spearmanr(*(part.astype(float) for part in pair)).statistic) < 4 / TERMS.length**0.5
    federation, _ = played
    total = sum(federation.values()[name] + kept_noise(federation, name) for name in HONEST)
    assert ((sum(parts.values()).astype(int) - total) % (1 << TERMS.bits) == 0).all()


def test_a_mask_left_out_would_be_noticed(played: Round) -> None:
    """The tests above can fail: without the masks among the honest, a real round shows constant numbers with noise."""
    left, federation = stripped(*played, "a"), played[0]
    party = federation.parties["a"]
    masks = party._seeds(party.turn.members, party._pairs(federation.announced, party.turn.members))
    for other in HONEST[1:]:
        add_mask(left, masks[other], TERMS, plus=other < "a")
    shown = (left & np.uint64((1 << TERMS.bits) - 1)).astype(int)
    counts = np.bincount(shown >> (TERMS.bits - 4), minlength=16)
    assert stats.chisquare(counts).pvalue < LEVEL
