"""Whoever survives, the server gets the exact sum of their numbers, and the noise that the terms promise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.errors import raises
from tests.helpers.examples import examples
from tests.privacy.channels.secure.conftest import TERMS, Federation
from umbel.privacy.channels.secure import seeds
from umbel.privacy.channels.secure.party import Opened
from umbel.privacy.channels.secure.terms import Terms
from umbel.protocol.errors import ProtocolError, Refused


@pytest.mark.parametrize("bits", [3, 8, 32, 33, 62])
def test_numbers_are_added_modulo_a_power_of_two(bits: int) -> None:
    federation = Federation(replace(TERMS, bits=bits))
    found, _ = federation.third(federation.second(federation.first())).result()
    total, half = sum(federation.values().values()), 1 << (bits - 1)
    assert found.tolist() == ((total + half) % (1 << bits) - half).tolist()


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(3, 7), st.data())
def test_parties_may_fall_silent_at_any_stage(size: int, data: st.DataObject) -> None:
    """As long as as many survive, sign and open as the threshold says."""
    federation = Federation(replace(TERMS, length=3), size)
    names, t = sorted(federation.parties), TERMS.threshold(size)
    before, unsigned, unopened = (
        data.draw(st.sets(st.sampled_from(names), max_size=size - t), label) for label in ("first", "second", "third")
    )
    # The threshold counts survivors; of these some do not sign, and some do not open.
    left = size - len(before)
    unsigned, unopened = ({*sorted(some - before)[: left - t]} for some in (unsigned, unopened))
    found = federation.second(federation.first(gone=before), gone=unsigned)
    values, _ = federation.third(found, gone=unopened).result()
    expected = sum(value for name, value in federation.values().items() if name not in before)
    assert values.tolist() == expected.tolist()


@pytest.mark.parametrize("stage", ["first", "second", "third"])
def test_with_fewer_than_the_threshold_a_round_fails_and_the_next_one_works(stage: str) -> None:
    federation = Federation()
    gone = {stage: ["a", "b"]}

    def once(round: int, gone: dict[str, list[str]]) -> list[int]:
        found = federation.first(round, gone.get("first", ()))
        federation.third(federation.second(found, gone.get("second", ())), gone.get("third", ()))
        return found.result()[0].tolist()

    # A survivor refuses to open a set that too few have signed; the server itself finds the other two.
    with pytest.raises((Refused, ProtocolError), match=r"\[(refused.secure-survivors|protocol.secure-sum)\]"):
        once(1, gone)
    assert once(2, {}) == sum(federation.values().values()).tolist()


# --- noise


def test_noise_that_nobody_takes_back_stays_and_is_counted() -> None:
    """A survivor that does not open keeps all its layers in the sum."""
    terms = Terms("run 7", 20_000, 40, 300.0, least=4)
    federation = Federation(terms, 4)
    found, deviation = federation.third(federation.second(federation.first()), gone=["b"]).result()
    noise = found - sum(federation.values().values())
    assert math.isclose(deviation**2, 300.0**2 * (3 / 4 + 1 / 3), rel_tol=1e-9)
    assert abs(noise.std() / deviation - 1) < 5 / math.sqrt(2 * len(noise))


@pytest.mark.parametrize("change", [lambda layers: [bytes(16)], lambda layers: [], lambda layers: layers * 9])
def test_seeds_of_layers_that_are_wrong_leave_the_sum_right(change: object) -> None:
    terms = Terms("run 7", 50, 40, 300.0, least=4)
    federation = Federation(terms, 4)
    found = federation.third(federation.second(federation.first()))
    opened = found._opened["a"]
    found.opens("a", Opened(opened.seeds, change(opened.layers), opened.shares))  # type: ignore[operator]
    values, _ = found.result()
    assert abs(values - sum(federation.values().values())).max() < 8 * 300 * math.sqrt(2)


def some_of(generator: np.random.Generator, names: list[str], most: int) -> set[str]:
    """Return up to so many of the names."""
    return set(generator.permutation(names)[: generator.integers(0, most + 1)].tolist())


@pytest.mark.parametrize("sums", [200, pytest.param(2_000, marks=pytest.mark.rest)])
def test_whoever_falls_silent_the_honest_leave_the_promised_noise(sums: int) -> None:
    """Three to seven parties, of which some collude, and some fall silent at each stage.

    The noise of all numbers, each divided by the deviation that the server is told, has a variance of 1, within three
    standard errors (a false alarm in 370 runs; the draws are the same in each).
    """
    generator, secrets, away = np.random.default_rng(5), np.random.default_rng(6), []
    for number in range(sums):
        size = int(generator.integers(3, 8))
        colluding = int(generator.integers(0, size - 2)) if size > 3 else 0
        terms = Terms(f"run {number}", 400, 40, 300.0, colluding, least=size)
        federation, t = Federation(terms, size), terms.threshold(size)
        for member in federation.parties.values():
            member.random = secrets.bytes
        names = sorted(federation.parties)
        gone = some_of(generator, names, size - t)
        left = [name for name in names if name not in gone]
        unsigned, unopened = (some_of(generator, left, len(left) - t) for _ in range(2))
        found = federation.third(federation.second(federation.first(gone=gone), gone=unsigned), gone=unopened)
        total, told = found.result()
        assert told**2 >= 300.0**2 * (1 - 1e-12)
        values = federation.values()
        away.append((total - sum(values[name] for name in left)) / told)
    numbers = np.concatenate(away)
    assert abs(np.square(numbers).mean() - 1) < 3 * math.sqrt(2 / len(numbers))


def test_every_stream_comes_from_a_seed_of_128_bits_that_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks and layers of noise. Five parties have 25 masks, of which two parties each compute 10, and own layers."""
    terms = Terms("run 7", 400, 40, 300.0, least=5)
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


# --- what a server refuses


def test_wrong_shares_of_some_parties_do_not_stop_a_sum() -> None:
    """Five of six open, and four right shares give the seed of the sixth; with two wrong ones there are only three."""
    federation = Federation(size=6)
    found = federation.third(federation.second(federation.first()), gone=["a"])

    def lies(name: str) -> None:
        opened = found._opened[name]
        wrong = {other: dict.fromkeys(own, bytes(16)) for other, own in opened.shares.items()}
        found.opens(name, replace(opened, shares=wrong))

    lies("b")
    assert found.result()[0].tolist() == sum(federation.values().values()).tolist()
    lies("c")
    with raises(ProtocolError, "protocol.secure-sum"):
        found.result()


def test_messages_that_do_not_fit_the_round_are_not_taken() -> None:
    federation = Federation()
    found = federation.first()
    masked = found._masked["a"]
    for other in (
        replace(masked, numbers=masked.numbers + b"0"),
        replace(masked, proofs={}),
        replace(masked, boxes={**masked.boxes, "x": b""}),
        replace(masked, layers=[b""]),
    ):
        with raises(ProtocolError, "protocol.secure-sum"):
            found.add("a", other)
    with raises(ProtocolError, "protocol.secure-sum"):
        found.add("x", masked)


# --- what the server sees


def test_a_message_is_hardly_larger_than_its_numbers() -> None:
    """Twenty parties with 20,000 numbers of 20 bits: shares and proofs add less than a third."""
    terms = replace(TERMS, length=20_000, deviation=300.0, least=20)
    federation = Federation(terms, 20)
    masked = federation.parties["a"].mask(1, federation.announced, np.zeros(terms.length, np.int64))
    rest = sum(map(len, masked.boxes.values())) + 32 * (len(masked.proofs) + len(masked.layers))
    assert len(masked.numbers) == 50_000
    assert (len(masked.numbers) + rest) / len(masked.numbers) < 1.3
