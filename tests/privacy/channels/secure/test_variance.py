"""The noise of many sums, whoever falls silent: the shares of the honest add up to what was promised."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.privacy.channels.secure.conftest import Federation
from umbel.privacy.channels.secure import party, seeds
from umbel.privacy.channels.secure.terms import Terms

_LENGTH, _DEVIATION = 400, 300.0


def some_of(generator: np.random.Generator, names: list[str], most: int) -> set[str]:
    """Return up to so many of the names."""
    return set(generator.permutation(names)[: generator.integers(0, most + 1)].tolist())


@pytest.mark.parametrize("sums", [200, pytest.param(2_000, marks=pytest.mark.rest)])
def test_whoever_falls_silent_the_honest_leave_the_promised_noise(sums: int) -> None:
    """Three to seven parties, of which some collude, and some fall silent at each stage.

    In every sum, the layers that honest survivors keep have at least the whole variance. The noise of all numbers, each
    divided by the deviation that the server is told, has a variance of 1, within three standard errors (a false alarm
    in 370 runs; the draws are the same in each).
    """
    generator, secrets, away = np.random.default_rng(5), np.random.default_rng(6), []
    for number in range(sums):
        size = int(generator.integers(3, 8))
        colluding = int(generator.integers(0, size - 2)) if size > 3 else 0
        terms = Terms(f"run {number}", _LENGTH, 40, _DEVIATION, colluding, least=size)
        federation, t = Federation(terms, size), terms.threshold(size)
        for member in federation.parties.values():
            member.random = secrets.bytes
        names = sorted(federation.parties)
        gone = some_of(generator, names, size - t)
        left = [name for name in names if name not in gone]
        unsigned, unopened = (some_of(generator, left, len(left) - t) for _ in range(2))
        found = federation.third(federation.second(federation.first(gone=gone), gone=unsigned), gone=unopened)
        total, told = found.result()

        kept = [deviation**2 for deviation in terms.layers(size)][: len(gone) + 1]
        honest = len(left) - colluding
        assert honest * math.fsum(kept) >= _DEVIATION**2 * (1 - 1e-12)
        assert told**2 >= _DEVIATION**2 * (1 - 1e-12)
        values = federation.values()
        away.append((total - sum(values[name] for name in left)) / told)
    numbers = np.concatenate(away)
    assert abs(np.square(numbers).mean() - 1) < 3 * math.sqrt(2 / len(numbers))


def test_every_stream_comes_from_a_seed_of_128_bits_that_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks and layers of noise. Five parties have 25 masks, of which two parties each compute 10, and own layers."""
    terms = Terms("run 7", _LENGTH, 40, _DEVIATION, least=5)
    federation, seen = Federation(terms, 5), []
    stream = seeds.Stream

    def watch(seed: bytes) -> seeds.Stream:
        seen.append(seed)
        return stream(seed)

    monkeypatch.setattr(seeds, "Stream", watch)
    for round in (1, 2):
        federation.first(round)
    assert {len(seed) for seed in seen} == {seeds.SEED}
    assert seeds.SEED * 8 >= 128
    layers = len(terms.layers(5))
    assert len(seen) == 2 * (5 + 20 + 5 * layers)
    assert len({*seen}) == 2 * (5 + 10 + 5 * layers)
    assert party.seeds is seeds
