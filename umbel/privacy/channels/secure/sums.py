"""The server's part of secure sums: it adds masked numbers, and takes the masks of the survivors away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from umbel.privacy.channels.secure import seeds
from umbel.privacy.channels.secure.party import (
    OWN,
    Announcement,
    Masked,
    Opened,
    add_mask,
    noise,
    parties_in,
    proof,
    survivors_text,
)
from umbel.privacy.channels.secure.seeds import SEED
from umbel.privacy.channels.secure.terms import Terms
from umbel.protocol.errors import ProtocolError
from umbel.protocol.signatures import PublicKey, verifies

_TRIES = 100  # sets of shares to try, where some party sends wrong ones


@dataclass
class Sum:
    """The sum of one round, as far as it has come.

    Parameters
    ----------
    terms : Terms
    round : int
    announced : mapping
        The announcements of the parties that were asked.
    keys : mapping of str to public key
        The keys that identify the parties.
    """

    terms: Terms
    round: int
    announced: Mapping[str, Announcement]
    keys: Mapping[str, PublicKey]
    survivors: tuple[str, ...] = ()
    signatures: dict[str, bytes] = field(default_factory=dict)
    _masked: dict[str, Masked] = field(default_factory=dict)
    _opened: dict[str, Opened] = field(default_factory=dict)

    @cached_property
    def members(self) -> tuple[str, ...]:
        """The parties that were asked, in order."""
        return tuple(sorted(self.announced))

    @property
    def threshold(self) -> int:
        """The number of parties that have to sign, and to open."""
        return self.terms.threshold(len(self.members))

    def add(self, name: str, masked: Masked) -> None:
        """Take in a party's first message; raise `ProtocolError` if it does not fit the round."""
        others = {OWN, *self.members} - {name}
        fits = (
            name in self.members
            and len(masked.numbers) == seeds.packed_size(self.terms.length, self.terms.bits)
            and {*masked.proofs} == others
            and {*masked.boxes} == others - {OWN}
            and len(masked.layers) == len(self.terms.layers(len(self.members)))
        )
        if not fits or self.survivors:
            raise ProtocolError(f"the numbers of {name} do not fit the secure sum", code="protocol.secure-sum")
        self._masked[name] = masked

    def close(self) -> tuple[str, ...]:
        """End the first exchange, and return the survivors; raise `ProtocolError` if there are too few."""
        if len(self._masked) < self.threshold:
            text = f"{len(self._masked)} of {len(self.members)} parties sent numbers, but {self.threshold} have to"
            raise ProtocolError(text, code="protocol.secure-sum")
        self.survivors = tuple(sorted(self._masked))
        return self.survivors

    def sign(self, name: str, signature: bytes) -> None:
        """Take in a survivor's signature; one that is not valid counts as none."""
        text = survivors_text(self.terms, self.round, parties_in(self.announced), self.survivors)
        if name in self.survivors and verifies(self.keys[name], signature, text):
            self.signatures[name] = signature

    def boxes(self, name: str) -> dict[str, bytes]:
        """Return the shares that the other survivors sent to a party."""
        return {sender: self._masked[sender].boxes[name] for sender in self.survivors if sender != name}

    def opens(self, name: str, opened: Opened) -> None:
        """Take in a survivor's last message."""
        if name in self.survivors:
            self._opened[name] = opened

    def result(self) -> tuple[NDArray[np.int64], float]:
        """Return the sum (terms.length,), and the standard deviation of its noise, that of colluding parties included.

        Raises
        ------
        ProtocolError
            If too few parties opened the sum, or sent seeds or shares that are wrong.
        """
        if len(self._opened) < self.threshold:
            text = (
                f"{len(self._opened)} of {len(self.survivors)} survivors opened the sum, but {self.threshold} have to"
            )
            raise ProtocolError(text, code="protocol.secure-sum")
        total = np.zeros(self.terms.length, np.uint64)
        lost = [name for name in self.members if name not in self.survivors]
        for name in self.survivors:
            total += seeds.unpacked(self._masked[name].numbers, self.terms.length, self.terms.bits)
            for other in (OWN, *lost):
                add_mask(total, self._seed(name, other), self.terms, plus=not (other == OWN or name < other))
        variance = 0.0
        for name in self.survivors:
            variance += self._take_back(total, name, len(lost))
        bits = np.uint64(64 - self.terms.bits)
        # The highest bit is the sign.
        return (total << bits).view(np.int64) >> bits.astype(np.int64), variance**0.5

    def _seed(self, name: str, other: str) -> bytes:
        """Return the seed of a survivor's mask, from itself or from its shares."""
        right = self._masked[name].proofs[other]
        if (own := self._opened.get(name)) and proof(own.seeds.get(other, b"")) == right:
            return own.seeds[other]
        shares = {
            self.members.index(opener): share
            for opener, one in self._opened.items()
            if len(share := one.shares.get(name, {}).get(other, b"")) == SEED
        }
        generator = np.random.default_rng(0)  # where a few are wrong, nearly all first sets in order may have one
        for _ in range(_TRIES if len(shares) >= self.threshold else 0):
            some = generator.permutation(sorted(shares))[: self.threshold].tolist()
            if proof(seed := seeds.seed_in({place: shares[place] for place in some})) == right:
                return seed
        text = f"the parties' shares of a mask of {name} do not fit together"
        raise ProtocolError(text, code="protocol.secure-sum")

    def _take_back(self, total: NDArray[np.uint64], name: str, lost: int) -> float:
        """Subtract the layers of a survivor's noise that are not needed; return the variance of the rest.

        Layers whose seeds are missing or wrong stay, and make the noise larger.
        """
        deviations, needed = self.terms.layers(len(self.members)), lost + 1
        variance = sum(deviation**2 for deviation in deviations)
        given = self._opened[name].layers if name in self._opened else []
        surplus = zip(deviations[needed:], given, self._masked[name].layers[needed:], strict=False)
        for deviation, seed, right in surplus:
            if proof(seed) == right:
                total -= noise(deviation, self.terms.length, seed).astype(np.uint64)
                variance -= deviation**2
        return variance
