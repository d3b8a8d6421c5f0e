"""What a server and parties that work with it learn: the sum of the others, and nothing else.

A simulator knows that sum and the colluding parties' secrets, and not the others' numbers. It makes the transcript of a
round. No test here tells its transcripts from real ones, so a real transcript tells nothing that the sum does not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

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


@dataclass
class Played(Federation):
    """A federation with the numbers of its parties, whose secrets follow from a seed."""

    own: dict[str, NDArray[np.int64]] | None = None
    seed: int = 0

    def party(self, name: str, terms: Terms | None = None, secret: bytes = b"") -> Party:
        generator = np.random.default_rng([self.seed, NAMES.index(name)])
        made = super().party(name, terms, secret or generator.bytes(32))
        made.random = generator.bytes
        return made

    def values(self, seed: int = 0) -> dict[str, NDArray[np.int64]]:
        assert self.own is not None
        return self.own


def played(own: dict[str, NDArray[np.int64]], seed: int, gone: Collection[str] = LOST) -> tuple[Played, Sum]:
    """Do a round."""
    federation = Played(TERMS, len(NAMES), own=own, seed=seed)
    return federation, federation.third(federation.second(federation.first(gone=gone)))


def simulated(total: NDArray[np.int64], colluding: dict[str, NDArray[np.int64]], seed: int) -> tuple[Played, Sum]:
    """Make a round in which the honest survivors' numbers with the noise that they keep add up to `total`.

    The simulator does not know their numbers, and draws uniform ones. Its parties draw noise as real ones do; a last
    number makes up for it.
    """
    generator = np.random.default_rng(seed)
    drawn = {name: generator.integers(0, 1 << TERMS.bits, TERMS.length) for name in [*HONEST, *LOST]}
    # Once to see the noise that the honest will keep, which follows from their secrets, and once for the transcript.
    first, _ = played({**drawn, **colluding}, seed)
    kept = sum(kept_noise(first, name) for name in HONEST)
    last = HONEST[-1]
    drawn[last] = total - kept - sum(drawn[name] for name in HONEST[:-1])
    return played({**drawn, **colluding}, seed)


def kept_noise(federation: Played, name: str) -> NDArray[np.int64]:
    """Return the noise that a survivor does not take back."""
    party, layers = federation.parties[name], TERMS.layers(len(NAMES))
    own = party._layer_seeds(len(NAMES))[: len(LOST) + 1]
    return sum(
        (noise(deviation, TERMS.length, seed) for deviation, seed in zip(layers, own, strict=False)), np.int64(0)
    )


def stripped(federation: Played, found: Sum, name: str) -> Words:
    """Return an honest survivor's masked numbers without every mask and layer that server and coalition know."""
    party = federation.parties[name]
    left = seeds.unpacked(found._masked[name].numbers, TERMS.length, TERMS.bits).copy()
    masks = party._seeds(party.turn.members, party._pairs(federation.announced, party.turn.members))
    for other in (OWN, *LOST, *COLLUDING):
        add_mask(left, masks[other], TERMS, plus=not (other == OWN or name < other))
    for seed, deviation in zip(found._opened[name].layers, TERMS.layers(len(NAMES))[len(LOST) + 1 :], strict=True):
        left -= noise(deviation, TERMS.length, seed).astype(np.uint64)
    return left & np.uint64((1 << TERMS.bits) - 1)


@pytest.fixture(scope="module")
def both() -> tuple[tuple[Played, Sum], tuple[Played, Sum]]:
    """A real round, whose honest parties have constant numbers, and a simulated one of the same sum."""
    own = {name: np.full(TERMS.length, 1000 * place) for place, name in enumerate(NAMES, 1)}
    federation, found = played(own, seed=10)
    total = sum((own[name] + kept_noise(federation, name) for name in HONEST), np.int64(0))
    return (federation, found), simulated(np.asarray(total), {name: own[name] for name in COLLUDING}, seed=11)


Both = tuple[tuple[Played, Sum], tuple[Played, Sum]]


def test_the_simulated_round_has_the_sum_that_the_simulator_knew(both: Both) -> None:
    """Apart from the colluding party's own noise, which the coalition knows."""
    sums = [found.result()[0] - sum(kept_noise(federation, name) for name in COLLUDING) for federation, found in both]
    assert (sums[0] - sums[1] == 0).all()


@pytest.mark.parametrize("name", HONEST)
def test_numbers_without_the_known_masks_are_uniform_in_both(both: Both, name: str) -> None:
    """16 bins of 400 numbers; in the real round the party's own numbers were all the same."""
    for federation, found in both:
        counts = np.bincount((stripped(federation, found, name) >> np.uint64(TERMS.bits - 4)).astype(int), minlength=16)
        assert stats.chisquare(counts).pvalue > LEVEL
    values = [stripped(federation, found, name).astype(float) for federation, found in both]
    assert stats.ks_2samp(*values).pvalue > LEVEL


def test_any_two_parties_look_independent_in_both_and_all_three_give_the_sum(both: Both) -> None:
    bits = np.uint64(TERMS.bits)
    for federation, found in both:
        parts = [stripped(federation, found, name) for name in HONEST]
        for i, j in ((0, 1), (0, 2), (1, 2)):
            signs = [(part >> (bits - np.uint64(1))).astype(int) for part in (parts[i], parts[j])]
            table = np.histogram2d(*signs, bins=2)[0]
            assert stats.chi2_contingency(table).pvalue > LEVEL
            assert (
                abs(stats.spearmanr(parts[i].astype(float), parts[j].astype(float)).statistic) < 4 / TERMS.length**0.5
            )
    totals = [
        sum(stripped(federation, found, name) for name in HONEST) & np.uint64((1 << TERMS.bits) - 1)
        for federation, found in both
    ]
    assert (totals[0] == totals[1]).all()


def test_a_mask_left_out_would_be_noticed(both: Both) -> None:
    """The tests above can fail: without the masks among the honest, a real round shows constant numbers with noise."""
    federation, found = both[0]
    left = stripped(federation, found, "a")
    party = federation.parties["a"]
    masks = party._seeds(party.turn.members, party._pairs(federation.announced, party.turn.members))
    for other in HONEST[1:]:
        add_mask(left, masks[other], TERMS, plus=other < "a")
    shown = (left & np.uint64((1 << TERMS.bits) - 1)).astype(int)
    counts = np.bincount(shown >> (TERMS.bits - 4), minlength=16)
    assert stats.chisquare(counts).pvalue < LEVEL
