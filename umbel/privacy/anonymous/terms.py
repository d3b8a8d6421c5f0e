"""The terms of a batch, which all of its releases have in common, and their encryption."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from umbel.privacy.secure.seeds import text_of
from umbel.protocol.arrays import Arrays, Vectors
from umbel.protocol.errors import ProtocolError
from umbel.protocol.messages import ANONYMOUS
from umbel.protocol.records import record_in
from umbel.protocol.tasks import TrainingSpec

KEY = 32
"""Bytes of a public key, of X25519 or Ed25519."""
OVERHEAD = 48
"""Bytes of a ciphertext beyond its text: the sender's public key for it, and the tag."""
MOST = 1 << 31
"""More than any number of releases or bytes here."""
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_NUMBER = np.dtype("<f4")


@dataclass(frozen=True)
class Opening:
    """A server's message about a round's batch.

    Attributes
    ----------
    key : bytes
        The public key to which releases are encrypted (X25519).
    closing : bytes
        The public key of the signature that closes the batch (Ed25519).
    least : int
        The minimum number of releases in the batch.
    """

    key: bytes
    closing: bytes
    least: int

    def to_record(self) -> ConfigRecord:
        """Return the record of a message."""
        return ConfigRecord({"key": self.key, "closing": self.closing, "least": self.least})

    @classmethod
    def read(cls, content: RecordDict) -> Opening:
        """Return the opening in a message from the network; raise `ProtocolError` if there is none."""
        record = record_in(content, ANONYMOUS, ConfigRecord)
        key, closing, least = (record.get(name) for name in ("key", "closing", "least"))
        if not (type(key) is type(closing) is bytes and len(key) == len(closing) == KEY):
            raise ProtocolError("the message has no keys for its anonymous releases", code="protocol.anonymous")
        if type(least) is not int or not 1 <= least <= MOST:
            raise ProtocolError("the message does not say how many releases a batch has", code="protocol.anonymous")
        try:
            _SUITE.encrypt(b"", X25519PublicKey.from_public_bytes(key))
        except ValueError:  # a point that gives everyone the same secret
            text = "no release can be encrypted to the key in the message"
            raise ProtocolError(text, code="protocol.anonymous") from None
        return cls(key, closing, least)


@dataclass(frozen=True)
class Terms:
    """The common properties of all releases of a batch; a release for other terms is in another batch.

    Attributes
    ----------
    run : str
        The run's name.
    round : int
    work : str
        Hash of the hypotheses and of the task, as the site received them.
    size : int
        Bytes of a release before encryption.
    key, closing : bytes
        As in `Opening`.
    """

    run: str
    round: int
    work: str
    size: int
    key: bytes
    closing: bytes

    @classmethod
    def of(cls, opening: Opening, task: TrainingSpec, round: int, hypotheses: Arrays) -> Terms:
        r"""Return the terms of a round's batch: server and sites compute the same, from what was sent.

        `hypotheses` are float32 arrays, each (k, \*shape). Of the task, the asked clients do not count.
        """
        size = sum(value[0].size for value in hypotheses.values()) * _NUMBER.itemsize
        return cls(task.run, round, _work(task, hypotheses), size, opening.key, opening.closing)

    @cached_property
    def digest(self) -> bytes:
        """Identifies the batch."""
        named = self.run, self.round, self.work, self.size, self.key.hex(), self.closing.hex()
        return sha256(text_of("umbel batch", *named)).digest()

    @property
    def sealed_size(self) -> int:
        """Bytes of each ciphertext."""
        return self.size + OVERHEAD

    @property
    def closing_text(self) -> bytes:
        """The text whose signature closes the batch."""
        return text_of("umbel close batch", self.digest.hex())

    def sealed(self, releases: Vectors) -> list[bytes]:
        """Encrypt each of the releases (m, n) for these terms alone."""
        public = X25519PublicKey.from_public_bytes(self.key)
        return [_SUITE.encrypt(one.tobytes(), public, info=self.digest) for one in releases.astype(_NUMBER, copy=False)]

    def opened(self, sealed: Collection[bytes], private: X25519PrivateKey) -> tuple[Vectors, int]:
        """Decrypt releases, and return them (m, n) in an order that depends on nothing else.

        Also return how many are no releases for these terms, or repeat one; they are left out.
        """
        once = {*sealed}  # a site seals each with a fresh key: only a relay can send one twice
        texts, wrong = [], len(sealed) - len(once)
        for one in once:
            try:
                text = _SUITE.decrypt(one, private, info=self.digest)
                if len(text) != self.size:
                    raise ValueError("a release has another size")
                texts.append(text)
            except (InvalidTag, ValueError):  # a listed site may send anything
                wrong += 1
        vectors = np.frombuffer(b"".join(sorted(texts)), _NUMBER).astype(np.float32, copy=False)
        return vectors.reshape(len(texts), self.size // _NUMBER.itemsize), wrong


def _work(task: TrainingSpec, hypotheses: Arrays) -> str:
    fields = {name: str(value) for name, value in vars(task).items() if name not in ("clients", "round")}
    # In the order in which a release has them: a site that was sent another one is in another batch.
    found = sha256(text_of("umbel work", fields, [(name, value.shape) for name, value in hypotheses.items()]))
    value: NDArray[np.float32]
    for value in hypotheses.values():
        found.update(np.ascontiguousarray(value, _NUMBER).tobytes())
    return found.hexdigest()
