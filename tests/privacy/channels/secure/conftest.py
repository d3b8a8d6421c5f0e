"""A federation of parties in one process, whose parties can fall silent after each exchange."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from umbel.privacy.channels.secure.party import Announcement, Party
from umbel.privacy.channels.secure.sums import Sum
from umbel.privacy.channels.secure.terms import Terms
from umbel.protocol.signatures import PublicKey

TERMS = Terms("run 7", length=5, bits=20, deviation=0.0)


def identity(name: str) -> Ed25519PrivateKey:
    """Return the key that identifies a party; the same one for a name."""
    return Ed25519PrivateKey.from_private_bytes(sha256(name.encode()).digest())


def listed(*names: str) -> dict[str, PublicKey]:
    """Return the keys that a site's policy lists."""
    return {name: identity(name).public_key() for name in names}


@dataclass
class Federation:
    """Parties a, b, c and so on, and their server."""

    terms: Terms = TERMS
    size: int = 3
    parties: dict[str, Party] = field(init=False)

    def __post_init__(self) -> None:
        names = [chr(ord("a") + i) for i in range(self.size)]
        self.keys = listed(*names)
        self.parties = {name: self.party(name) for name in names}

    def party(self, name: str, terms: Terms | None = None, secret: bytes = b"") -> Party:
        secret = secret or sha256(b"secret of " + name.encode()).digest()
        return Party(terms or self.terms, name, self.keys, identity(name).sign, secret)

    @property
    def announced(self) -> dict[str, Announcement]:
        return {name: party.announce() for name, party in self.parties.items()}

    def values(self, seed: int = 0) -> dict[str, NDArray[np.int64]]:
        """Return numbers of each party, whose sums fit into the terms' bits."""
        generator, most = np.random.default_rng(seed), (1 << (self.terms.bits - 1)) // self.size
        return {name: generator.integers(-most + 1, most, self.terms.length) for name in self.parties}

    def first(self, round: int = 1, gone: Collection[str] = (), seed: int = 0) -> Sum:
        """Do the first exchange, in which some parties are not heard."""
        found, announced, values = (
            Sum(self.terms, round, self.announced, self.keys),
            self.announced,
            self.values(seed),
        )
        for name, party in self.parties.items():
            masked = party.mask(round, announced, values[name])
            if name not in gone:
                found.add(name, masked)
        return found

    def second(self, found: Sum, gone: Collection[str] = ()) -> Sum:
        """Do the second exchange."""
        survivors = found.close()
        for name in survivors:
            signature = self.parties[name].agree(found.round, survivors)
            if name not in gone:
                found.sign(name, signature)
        return found

    def third(self, found: Sum, gone: Collection[str] = ()) -> Sum:
        """Do the third exchange."""
        for name in found.survivors:
            if name not in gone:
                opened = self.parties[name].open(found.round, self.announced, found.signatures, found.boxes(name))
                found.opens(name, opened)
        return found
