"""Keys, streams, boxes and shares of secure sums, from the libraries ``cryptography`` and ``pycryptodome``.

Every secret has 256 bits, and those behind masks and noise 128, which is what fits in a share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from umbel.protocol.errors import Refused

Words = NDArray[np.uint64]

SEED = 16
"""Bytes of the seed of a mask, or of a layer of noise."""
_BLOCK = 1 << 13  # numbers whose bits fit a cache
_BIG = np.dtype(">u8")


def text_of(*what: Any) -> bytes:
    """Return names and numbers as bytes, different ones for different arguments."""
    return json.dumps(what, sort_keys=True).encode()


def derived(secret: bytes, *what: Any, length: int = 32) -> bytes:
    """Return a key that follows from a secret and its purpose, by HKDF."""
    return HKDF(SHA256(), length, salt=None, info=text_of("umbel secure sum", *what)).derive(secret)


def private_key(secret: bytes) -> X25519PrivateKey:
    """Return the private key that belongs to a party's secret."""
    return X25519PrivateKey.from_private_bytes(derived(secret, "key"))


def shared(private: X25519PrivateKey, public: bytes) -> bytes:
    """Return the secret that two parties share.

    Raises
    ------
    Refused
        If the other's public key is none.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # a wrong length, or a point that gives everybody the same secret
        raise Refused(f"a party's key is not usable: {error}", code="refused.secure-parties") from None


def shares_of(seed: bytes, threshold: int, count: int) -> list[bytes]:
    """Return Shamir's shares of a seed, of which `threshold` give the seed and fewer tell nothing."""
    return [share for _, share in Shamir.split(threshold, count, seed, False)]


def seed_in(shares: Mapping[int, bytes]) -> bytes:
    """Return what shares give, by their places from 0: the seed, if they are right and enough."""
    return Shamir.combine([(place + 1, share) for place, share in shares.items()], False)


class Stream:
    """Random bytes that follow from a seed, as a source of noise (`umbel.privacy.mechanisms.base.NoiseSource`)."""

    def __init__(self, seed: bytes) -> None:
        # Each key is used for one stream only, so the nonce may be fixed.
        self._stream = Cipher(ChaCha20(derived(seed, "stream"), bytes(16)), mode=None).encryptor()

    def bytes(self, length: int) -> bytes:
        """Return the next random bytes."""
        return self._stream.update(bytes(length))


def mask(seed: bytes, length: int, bits: int) -> Words:
    """Return the mask of a seed: uniform numbers below ``2**bits``."""
    kind = np.uint32 if bits <= 32 else np.uint64
    words = np.frombuffer(Stream(seed).bytes(length * kind().itemsize), kind).astype(np.uint64)
    return words & np.uint64((1 << bits) - 1)


def seal(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypt and authenticate a text, and authenticate what it is about; each key is for one text."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, about)


def unseal(key: bytes, box: bytes, about: bytes) -> bytes:
    """Return the text in a box; raise `Refused` if it is not the one that was sealed with this key."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), box, about)
    except InvalidTag:
        raise Refused("shares of a secret were changed on their way", code="refused.secure-shares") from None


def packed(values: Words, bits: int) -> bytes:
    """Return numbers below ``2**bits`` side by side, in ``bits`` bits each."""
    parts = []
    for begin in range(0, len(values), _BLOCK):
        some = np.unpackbits(values[begin : begin + _BLOCK].astype(_BIG).view(np.uint8)).reshape(-1, 64)
        parts.append(np.packbits(some[:, 64 - bits :]).tobytes())
    return b"".join(parts)


def unpacked(text: bytes, length: int, bits: int) -> Words:
    """Return the numbers that `packed` made; raise `Refused` if there are not `length` of them."""
    if len(text) != packed_size(length, bits):
        raise Refused(f"{len(text)} bytes do not hold {length} numbers of {bits} bits", code="refused.secure-terms")
    values, whole = np.empty(length, np.uint64), np.zeros((_BLOCK, 64), np.uint8)
    flat = np.frombuffer(text, np.uint8)
    for begin in range(0, length, _BLOCK):
        count = min(_BLOCK, length - begin)
        start = begin * bits // 8  # a block begins with a byte
        some = np.unpackbits(flat[start : start + packed_size(count, bits)], count=count * bits)
        whole[:count, 64 - bits :] = some.reshape(count, bits)
        values[begin : begin + count] = np.packbits(whole[:count]).view(_BIG)
    return values


def packed_size(length: int, bits: int) -> int:
    """Return how many bytes `packed` needs."""
    return -(-length * bits // 8)
