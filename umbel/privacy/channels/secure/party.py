"""A party of secure sums: what it sends, what it checks first, and what it never tells."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from umbel.privacy.channels.secure import seeds
from umbel.privacy.channels.secure.seeds import SEED, derived, text_of
from umbel.privacy.channels.secure.terms import Terms
from umbel.privacy.mechanisms.discrete_gaussian import draw
from umbel.protocol.errors import Refused
from umbel.protocol.signatures import PublicKey, line_of, verifies

OWN = ""
"""In place of a party's name: the seed of the mask that a party shares with no other."""


@dataclass(frozen=True)
class Announcement:
    """A party's public key for a run, signed by the key that identifies the party."""

    public: bytes
    signature: bytes


@dataclass(frozen=True)
class Masked:
    """A party's first message of a round.

    Attributes
    ----------
    numbers : bytes
        Its numbers with noise and masks (`umbel.privacy.channels.secure.seeds.packed`).
    boxes : dict of bytes
        By recipient: shares of the seeds of its masks, which only the recipient can read.
    proofs : dict of bytes
        The SHA-256 of each seed, by the other party of a mask, or `OWN`; and of each layer's seed in `layers`.
    """

    numbers: bytes
    boxes: dict[str, bytes]
    proofs: dict[str, bytes]
    layers: list[bytes]


@dataclass(frozen=True)
class Opened:
    """A survivor's last message of a round.

    Attributes
    ----------
    seeds : dict of bytes
        Its own mask's seed as `OWN`, and those of the masks that it has in common with parties that did not survive.
    layers : list of bytes
        The seeds of the layers of noise that it takes back, in their order.
    shares : dict of dict of bytes
        Its shares of the same seeds of each other survivor, by that survivor and by the key in `seeds`.
    """

    seeds: dict[str, bytes]
    layers: list[bytes]
    shares: dict[str, dict[str, bytes]]


@dataclass
class Turn:
    """A party's memory of its latest round; it is kept before a message leaves.

    Attributes
    ----------
    members : tuple of str
        The parties that were asked.
    parties : str
        Identifies them and their keys (`parties_in`).
    secret : bytes
        The round's secret, from which its own mask and its noise follow.
    survivors : tuple of str
        The set that it signed; empty before that.
    opened : bool
        Whether it has revealed anything.
    """

    round: int = 0
    members: tuple[str, ...] = ()
    parties: str = ""
    secret: bytes = b""
    survivors: tuple[str, ...] = ()
    opened: bool = False


@dataclass
class Party:
    """One party in one run.

    Parameters
    ----------
    terms : Terms
    name : str
        Its own name among `keys`.
    keys : mapping of str to public key
        The parties that it trusts to be who they are, itself included, as its policy lists them.
    sign : callable
        Signs bytes with the key that identifies the party.
    secret : bytes
        32 random bytes, for this run alone.
    turn : Turn
        Its memory.
    random : callable
        Returns so many random bytes.
    """

    terms: Terms
    name: str
    keys: Mapping[str, PublicKey]
    sign: Callable[[bytes], bytes]
    secret: bytes
    turn: Turn = field(default_factory=Turn)
    random: Callable[[int], bytes] = secrets.token_bytes

    def __post_init__(self) -> None:
        if len({line_of(key) for key in self.keys.values()}) < len(self.keys):
            raise Refused(
                "two parties for secure sums have the same key; list each once", code="refused.secure-parties"
            )

    def announce(self) -> Announcement:
        """Return the party's key for the run."""
        return Announcement(self.public, self.sign(key_text(self.terms, self.name, self.public)))

    @property
    def public(self) -> bytes:
        """Its key for the run."""
        return seeds.private_key(self.secret).public_key().public_bytes_raw()

    # --- first exchange

    def mask(self, round: int, announced: Mapping[str, Announcement], values: NDArray[np.int64]) -> Masked:
        """Return the party's numbers with its share of the noise, hidden by masks.

        Parameters
        ----------
        round : int
            Later than any round before.
        announced : mapping
            The announcements of all parties in this sum, itself included.
        values : ndarray of int64, shape (terms.length,)

        Raises
        ------
        Refused
            If the round is not a new one, or the parties are too few, not listed, or not who they say they are.
        """
        members = self.check(round, announced)
        if values.shape != (self.terms.length,):
            raise ValueError(f"a sum has {self.terms.length} numbers, not {values.shape}")
        pairs = self._pairs(announced, members)
        self.turn = Turn(round, members, parties_in(announced), self.random(32))
        own = self._seeds(members, pairs)
        layers = self._layer_seeds(len(members))
        hidden = values.astype(np.uint64)  # negative numbers count down from 2**64, as they do modulo 2**bits
        for deviation, seed in zip(self.terms.layers(len(members)), layers, strict=True):
            hidden += noise(deviation, self.terms.length, seed).astype(np.uint64)
        for other, seed in own.items():
            add_mask(hidden, seed, self.terms, plus=other == OWN or self.name < other)
        boxes = self._boxes(members, pairs, own)
        proofs = {other: proof(seed) for other, seed in own.items()}
        numbers = seeds.packed(hidden & np.uint64((1 << self.terms.bits) - 1), self.terms.bits)
        return Masked(numbers, boxes, proofs, [proof(seed) for seed in layers])

    def check(self, round: int, announced: Mapping[str, Announcement]) -> tuple[str, ...]:
        """Return the names of the parties of a new sum, in order; raise `Refused` as `mask` does."""
        if round <= self.turn.round:
            text = f"round {round} of a secure sum is not after round {self.turn.round}, in which this party took part"
            raise Refused(text, code="refused.secure-round")
        if self.name not in announced or announced[self.name].public != self.public:
            raise Refused("this party is not among those of the sum, with its own key", code="refused.secure-parties")
        if len({one.public for one in announced.values()}) < len(announced):
            raise Refused("two parties of a sum have the same key", code="refused.secure-parties")
        for name, one in announced.items():
            if name not in self.keys:
                text = f"party {name!r} is not in this site's list of parties for secure sums"
                raise Refused(text, code="refused.secure-parties")
            if not verifies(self.keys[name], one.signature, key_text(self.terms, name, one.public)):
                text = f"the key of party {name!r} is not signed by {name!r}, or for other terms"
                raise Refused(text, code="refused.secure-parties")
        self.terms.check_parties(len(announced))
        members = tuple(sorted(announced))
        self._pairs(announced, members)  # raises if a key is not usable, before any client is charged
        return members

    def _pairs(self, announced: Mapping[str, Announcement], members: tuple[str, ...]) -> dict[str, bytes]:
        """Return the key that the party shares with each other member of a sum."""
        private, own, parties = seeds.private_key(self.secret), announced[self.name].public, parties_in(announced)
        pairs = {}
        for name in members:
            if name != self.name:
                other = announced[name].public
                publics = sorted([own.hex(), other.hex()])
                secret = seeds.shared(private, other)
                # All parties are part of the key: whoever is told others, or other keys, has other masks.
                pairs[name] = derived(secret, "pair", self.terms.digest, publics, parties)
        return pairs

    def _seeds(self, members: tuple[str, ...], pairs: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the seeds of all masks of the round."""
        own = {OWN: derived(self.turn.secret, "own", length=SEED)}
        return own | {name: derived(pair, "mask", self.turn.round, length=SEED) for name, pair in pairs.items()}

    def _layer_seeds(self, parties: int) -> list[bytes]:
        count = len(self.terms.layers(parties))
        return [derived(self.turn.secret, "noise", layer, length=SEED) for layer in range(count)]

    def _boxes(
        self, members: tuple[str, ...], pairs: Mapping[str, bytes], own: Mapping[str, bytes]
    ) -> dict[str, bytes]:
        """Return the shares of all seeds, sealed for each other member."""
        threshold, shares = self.terms.threshold(len(members)), {}
        for other, seed in own.items():
            shares[other] = dict(zip(members, seeds.shares_of(seed, threshold, len(members)), strict=True))
        return {
            name: seeds.seal(
                self._box_key(pairs[name], self.name, name),
                b"".join(shares[other][name] for other in self._order(self.name, members)),
                self._about(self.name, name, members),
            )
            for name in pairs
        }

    # --- second exchange

    def agree(self, round: int, survivors: Iterable[str]) -> bytes:
        """Return the party's signature of the set of those whose numbers are added.

        Raises
        ------
        Refused
            If the round is another, the set is too small or has others than the round's parties, or the party has
            signed another set.
        """
        chosen, turn = tuple(sorted(survivors)), self.turn
        if round != turn.round:
            raise Refused(f"this party is not in round {round} of a secure sum", code="refused.secure-round")
        if turn.survivors not in ((), chosen):
            text = f"this party has signed another set of survivors in round {round}"
            raise Refused(text, code="refused.secure-survivors")
        if len({*chosen}) < len(chosen) or not {*chosen} <= {*turn.members} or self.name not in chosen:
            raise Refused("survivors are this party and others of the round", code="refused.secure-survivors")
        if len(chosen) < self._threshold:
            text = f"{len(chosen)} of {len(turn.members)} parties survived, but {self._threshold} have to"
            raise Refused(text, code="refused.secure-survivors")
        turn.survivors = chosen
        return self.sign(survivors_text(self.terms, round, turn.parties, chosen))

    # --- third exchange

    def open(
        self, round: int, announced: Mapping[str, Announcement], signatures: Mapping[str, bytes],
        boxes: Mapping[str, bytes],
    ) -> Opened:  # fmt: skip
        """Return what removes the masks from the sum of the survivors whose set this party signed.

        Parameters
        ----------
        announced : mapping
            As in the first exchange.
        signatures : mapping
            By party, of the same set.
        boxes : mapping
            Those that other survivors sent to this party.

        Raises
        ------
        Refused
            If too few parties signed the set, or the party has opened this round before.
        """
        turn = self.turn
        if round != turn.round or not turn.survivors or turn.opened:
            raise Refused(f"there is nothing to open in round {round}", code="refused.secure-round")
        if parties_in(announced) != turn.parties:
            # With a survivor's key as that of a lost party, it would reveal the mask that it shares with the survivor.
            raise Refused("these are not the parties of the round, with their keys", code="refused.secure-parties")
        text = survivors_text(self.terms, round, turn.parties, turn.survivors)
        signed = [
            name
            for name in turn.survivors
            if name in signatures and name in self.keys and verifies(self.keys[name], signatures[name], text)
        ]
        if len(signed) < self._threshold:
            told = f"{len(signed)} parties signed the set of survivors, but {self._threshold} have to"
            raise Refused(told, code="refused.secure-survivors")
        pairs = self._pairs(announced, turn.members)
        lost = [name for name in turn.members if name not in turn.survivors]
        wanted = [OWN, *lost]
        shares = {}
        for name in turn.survivors:
            if name != self.name and name in boxes:
                with suppress(Refused):  # a box that is none must not keep this party from opening the others
                    shares[name] = self._shares(name, boxes[name], pairs[name], wanted)
        turn.opened = True
        own = self._seeds(turn.members, pairs)
        layers = self._layer_seeds(len(turn.members))[len(lost) + 1 :]
        return Opened({other: own[other] for other in wanted}, layers, shares)

    def _shares(self, sender: str, box: bytes, pair: bytes, wanted: Iterable[str]) -> dict[str, bytes]:
        """Return this party's shares of a survivor's seeds, of those alone that remove masks from the sum."""
        members = self.turn.members
        key, about = self._box_key(pair, sender, self.name), self._about(sender, self.name, members)
        text, order = seeds.unseal(key, box, about), self._order(sender, members)
        all_shares = {other: text[place * SEED : (place + 1) * SEED] for place, other in enumerate(order)}
        return {other: all_shares[other] for other in wanted}

    # --- texts and keys

    @property
    def _threshold(self) -> int:
        return self.terms.threshold(len(self.turn.members))

    def _box_key(self, pair: bytes, sender: str, receiver: str) -> bytes:
        return derived(pair, "box", self.turn.round, sender, receiver)

    def _about(self, sender: str, receiver: str, members: tuple[str, ...]) -> bytes:
        return text_of("umbel secure box", self.terms.digest, self.turn.round, sender, receiver, list(members))

    @staticmethod
    def _order(sender: str, members: tuple[str, ...]) -> list[str]:
        """Return whose seeds are in a box of a sender, in order."""
        return [OWN, *(name for name in members if name != sender)]


def key_text(terms: Terms, name: str, public: bytes) -> bytes:
    """Return what a party signs about its key for a run."""
    return text_of("umbel secure key", terms.digest, name, public.hex())


def parties_in(announced: Mapping[str, Announcement]) -> str:
    """Return what identifies the parties of a sum: a SHA-256 of their names and their keys for the run."""
    publics = [[name, announced[name].public.hex()] for name in sorted(announced)]
    return hashlib.sha256(text_of("umbel secure parties", publics)).hexdigest()


def survivors_text(terms: Terms, round: int, parties: str, survivors: Iterable[str]) -> bytes:
    """Return what a party signs about the survivors of a round of `parties` (`parties_in`).

    It names the keys for the run. A party that forgot its round has another key, so the set that it signs then does not
    count as a second signature in the round before.
    """
    return text_of("umbel secure survivors", terms.digest, round, parties, list(survivors))


def noise(deviation: float, length: int, seed: bytes) -> NDArray[np.int64]:
    """Return a layer of noise: exact discrete Gaussians that follow from the layer's seed."""
    return draw(deviation, length, seeds.Stream(seed))


def add_mask(values: NDArray[np.uint64], seed: bytes, terms: Terms, plus: bool) -> None:
    """Add the mask of a seed, or subtract it; modulo 2**64, which the bits divide."""
    change = seeds.mask(seed, terms.length, terms.bits)
    if plus:
        values += change
    else:
        values -= change


def proof(seed: bytes) -> bytes:
    """Return a seed's SHA-256, which tells a right seed from a wrong one and no more."""
    return hashlib.sha256(seed).digest()
