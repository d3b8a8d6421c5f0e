"""Sources of a client's random draws.

In simulation every client has separate streams, keyed by seed, round and client, so that a result does not depend on
the node that computes it. Where the data are a site's own there is no seed: a server that knows the seed could predict
the noise and subtract it. There the noise comes from the operating system's entropy, through a cryptographic generator
whose state cannot be derived from many noisy releases.
"""

from __future__ import annotations

import math
import secrets
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, overload

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from umbel.privacy.mechanisms.base import Matrix, NoiseSource

# Normals are drawn in blocks of this size, which bounds the memory for a large model and fits a cache.
_BLOCK = 1 << 16
_SUMMED = 1000.0  # a gamma variate of a larger shape is not summed: rejection is faster


def noise_sources(
    seed: int | None, round: int, clients: Iterable[int], purpose: str = "noise"
) -> Iterator[NoiseSource]:
    """Yield the source of each client's noise; each is valid until the next is taken.

    Without a seed each is a `SecureGenerator`.
    """
    if seed is None:
        yield from (SecureGenerator() for _ in clients)
        return
    philox = np.random.Philox(_NO_SEED)
    generator = np.random.Generator(philox)
    start = _start(_key(seed, purpose), round, 0)
    counter = start["state"]["counter"]
    for client in clients:
        counter[_CLIENT] = client
        philox.state = start
        yield generator


class SecureGenerator:
    """Normal and gamma variates from a ChaCha20 key stream with a fresh random key.

    It has the part of ``numpy.random.Generator`` that mechanisms use.
    """

    def __init__(self) -> None:
        # Each key is used for one stream only, so the nonce may be fixed.
        self._stream = Cipher(ChaCha20(secrets.token_bytes(32), bytes(16)), mode=None).encryptor()

    def random(self, size: int) -> Matrix:
        """Return `size` independent numbers from [0, 1), multiples of 2**-53."""
        return self._uniform(size) - 2.0**-53

    def bytes(self, length: int) -> bytes:
        """Return `length` random bytes."""
        return self._stream.update(bytes(length))

    def _uniform(self, count: int) -> Matrix:
        """Return numbers from (0, 1], multiples of 2**-53."""
        words = self._words(count, 53)
        words += 1
        words *= 2.0**-53
        return words

    def _words(self, count: int, bits: int) -> Matrix:
        """Return whole numbers of at most 63 random bits."""
        words = np.frombuffer(self.bytes(8 * count), np.uint64) >> np.uint64(64 - bits)
        return words.view(np.int64).astype(np.float64)  # ten times as fast as from unsigned numbers

    def _near_zero(self, count: int) -> Matrix:
        """Return numbers from (0, 1] with 53 significant bits, also next to 0: the tails of normals depend on them."""
        high, low = (self._words(count, 63) for _ in range(2))
        low += 0.5
        low *= 2.0**-63
        high += low
        high *= 2.0**-63
        return high

    def standard_normal(self, size: int) -> Matrix:
        """Return `size` independent standard normals, by the Box-Muller transform.

        The cosine and sine of an angle come from the tangent of its half, the fastest of the three.
        """
        normals = np.empty(size + size % 2)
        for begin in range(0, len(normals), _BLOCK):
            pairs = (min(begin + _BLOCK, len(normals)) - begin) // 2
            cosine, sine = normals[begin : begin + pairs], normals[begin + pairs : begin + 2 * pairs]
            # In place: threads that allocate memory wait for each other.
            radius = self._near_zero(pairs)
            np.log(radius, out=radius)
            radius *= -2
            np.sqrt(radius, out=radius)
            tangent = self._uniform(pairs)
            tangent *= np.pi
            np.tan(tangent, out=tangent)
            np.multiply(tangent, tangent, out=cosine)
            radius /= np.add(cosine, 1, out=sine)
            np.subtract(1, cosine, out=cosine)
            cosine *= radius
            radius *= 2
            np.multiply(radius, tangent, out=sine)
        return normals[:size]

    def standard_gamma(self, shape: float) -> float:
        """Return a gamma variate whose shape is a multiple of 1/2.

        It is a sum of exponentials, and of half a squared normal for what is left. Of a large shape it is drawn by
        rejection (Marsaglia and Tsang, ACM Transactions on Mathematical Software 26, 2000), which is exact too and
        takes the same time for any shape.
        """
        halves = round(2 * shape)
        if halves != 2 * shape or halves < 1:
            raise ValueError(f"the shape must be a positive multiple of 1/2, got {shape}")
        if shape > _SUMMED:
            return self._gamma_by_rejection(shape)
        total = -float(np.log(self._near_zero(halves // 2)).sum())
        return total + float(self.standard_normal(1)[0]) ** 2 / 2 if halves % 2 else total

    def _gamma_by_rejection(self, shape: float) -> float:
        """Return a gamma variate of a shape of at least 1."""
        d = shape - 1 / 3
        c = 1 / math.sqrt(9 * d)
        while True:
            x = float(self.standard_normal(1)[0])
            v = (1 + c * x) ** 3
            if v > 0 and math.log(float(self._near_zero(1)[0])) < x * x / 2 + d * (1 - v + math.log(v)):
                return d * v


def streams(seed: int | None, purpose: str, round: int, clients: Iterable[int]) -> Sequence[np.random.Generator]:
    """Return a generator for each client, numbered over the whole dataset; for noise, see `noise_sources` instead.

    Draws for different purposes are independent. Without a seed they come from the operating system's entropy.
    """
    if seed is None:
        return [np.random.Generator(np.random.PCG64()) for _ in clients]
    return _Streams(_key(seed, purpose), round, clients)


@dataclass(frozen=True)
class RowSource:
    """A client's randomness for training with a guarantee for rows: of the sample of each step, and of its noise."""

    sample: NoiseSource
    noise: NoiseSource


def row_sources(seed: int | None, round: int, clients: Iterable[int]) -> list[RowSource]:
    """Return the sources of each client's training; without a seed each is a `SecureGenerator`.

    The guarantee counts on samples that stay as secret as the noise.
    """
    if seed is None:
        return [RowSource(SecureGenerator(), SecureGenerator()) for _ in clients]
    clients = list(clients)
    samples, noises = (streams(seed, purpose, round, clients) for purpose in ("row sample", "row noise"))
    return [RowSource(samples[i], noises[i]) for i in range(len(clients))]


class _Streams(Sequence[np.random.Generator]):
    """A generator for each client, made on request and always at its beginning."""

    def __init__(self, key: list[int], round: int, clients: Iterable[int]) -> None:
        self._key, self._round, self._clients = key, round, list(clients)

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, index: int) -> np.random.Generator: ...
    @overload
    def __getitem__(self, index: slice) -> _Streams: ...
    def __getitem__(self, index: int | slice) -> np.random.Generator | _Streams:
        if isinstance(index, slice):
            return _Streams(self._key, self._round, self._clients[index])
        philox = np.random.Philox(_NO_SEED)
        philox.state = _start(self._key, self._round, self._clients[index])
        return np.random.Generator(philox)


@lru_cache(maxsize=16)
def _key(seed: int, purpose: str) -> list[int]:
    state = np.random.SeedSequence([seed, zlib.crc32(purpose.encode())]).generate_state(2, np.uint64)
    return [int(word) for word in state]


_CLIENT = 3  # position of the client's number in the counter


def _start(key: list[int], round: int, client: int) -> Any:
    """Return the state of a Philox at the beginning of a client's stream."""
    # Philox computes each block from key and counter alone: the low half of the counter runs
    # within a stream, and the high half separates the streams.
    # Lists: NumPy reads their numbers in half the time of an array's.
    return _START | {"state": {"counter": [0, 0, round, client], "key": key}}


class _NoSeed(np.random.SeedSequence):
    """Saves a generator, whose state is set at once, the work of seeding."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return np.zeros(n_words, dtype)


_NO_SEED = _NoSeed(0)
_START: Any = np.random.Philox(_NO_SEED).state | {"buffer": [0] * 4}
