"""Noise from the operating system's entropy, through a cryptographic generator.

A server that sees many noisy releases must not be able to work out the state of the generator
and with it the noise to come, as it could with the generators made for simulation.
"""

from __future__ import annotations

import secrets

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

# Normals are drawn so many at a time, which bounds the memory that a large model takes.
_BLOCK = 1 << 16


class SecureGenerator:
    """Normal and gamma variates from a ChaCha20 key stream with a fresh random key.

    Has the part of ``numpy.random.Generator`` that the mechanism uses.
    """

    def __init__(self) -> None:
        # A key is used for one stream alone, so the nonce may be fixed.
        self._stream = Cipher(ChaCha20(secrets.token_bytes(32), bytes(16)), mode=None).encryptor()

    def random(self, size: int) -> NDArray[np.float64]:
        """Return `size` independent numbers from [0, 1), multiples of 2**-53."""
        return self._uniform(size) - 2.0**-53

    def bytes(self, length: int) -> bytes:
        """Return `length` random bytes."""
        return self._stream.update(bytes(length))

    def _uniform(self, count: int) -> NDArray[np.float64]:
        """Return numbers from (0, 1], multiples of 2**-53."""
        return ((self._words(count) >> np.uint64(11)).astype(np.float64) + 1) * 2.0**-53

    def _words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(self.bytes(8 * count), np.uint64)

    def _near_zero(self, count: int) -> NDArray[np.float64]:
        """Return numbers from (0, 1], of 53 significant bits each also next to 0: the tails of normals hang on them."""
        high, low = (self._words(count).astype(np.float64) for _ in range(2))
        return (high + (low + 0.5) * 2.0**-64) * 2.0**-64

    def standard_normal(self, size: int) -> NDArray[np.float64]:
        """Return `size` independent standard normals, by the Box-Muller transform."""
        normals = np.empty(size + size % 2)
        for begin in range(0, len(normals), _BLOCK):
            pairs = (min(begin + _BLOCK, len(normals)) - begin) // 2
            radius = np.sqrt(-2 * np.log(self._near_zero(pairs)))
            angle = 2 * np.pi * self._uniform(pairs)
            normals[begin : begin + pairs] = radius * np.cos(angle)
            normals[begin + pairs : begin + 2 * pairs] = radius * np.sin(angle)
        return normals[:size]

    def standard_gamma(self, shape: float) -> float:
        """Return a gamma variate whose shape is a multiple of 1/2: half a sum of squared normals."""
        count = round(2 * shape)
        if count != 2 * shape or count < 1:
            raise ValueError(f"the shape must be a positive multiple of 1/2, got {shape}")
        total = 0.0
        for begin in range(0, count, _BLOCK):
            normals = self.standard_normal(min(_BLOCK, count - begin))
            total += float(normals @ normals)
        return total / 2
