"""The messages of secure sums, as records of Flower; those from the network are checked.

==========  ================================================================================
announce    the terms; back, the party's name, the key that identifies it, its key for the run, and its list of parties
mask        with a round's training: the terms, and the announcements of its parties; back, `Masked`
agree       the survivors; back, a signature
open        the signatures, and the boxes for this party; back, `Opened`
==========  ================================================================================

A message and its reply have one record, `RECORD`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from umbel.privacy.channels.secure.party import Announcement, Masked, Opened
from umbel.privacy.channels.secure.terms import Terms
from umbel.protocol.errors import ProtocolError
from umbel.protocol.records import record_in
from umbel.protocol.tasks import LONGEST_NAME

RECORD = "secure"
"""The name of the record, and of the channel."""
_TERMS: dict[str, type] = {
    "run": str, "length": int, "bits": int, "deviation": float, "colluding": int, "least": int,
}  # fmt: skip


class Stage(StrEnum):
    """The exchange that a message belongs to."""

    ANNOUNCE = "announce"
    MASK = "mask"
    AGREE = "agree"
    OPEN = "open"


@dataclass(frozen=True)
class Request:
    """A message of the server, see above."""

    stage: Stage
    terms: Terms
    round: int = 0
    announced: Mapping[str, Announcement] = field(default_factory=dict)
    survivors: tuple[str, ...] = ()
    signatures: Mapping[str, bytes] = field(default_factory=dict)
    boxes: Mapping[str, bytes] = field(default_factory=dict)

    def to_record(self) -> ConfigRecord:
        """Return the message's record."""
        return ConfigRecord(
            {
                "stage": str(self.stage),
                "round": self.round,
                **asdict(self.terms),
                "names": list(self.announced),
                "publics": [one.public for one in self.announced.values()],
                "announcements": [one.signature for one in self.announced.values()],
                "survivors": list(self.survivors),
                **_split("signatures", self.signatures),
                **_split("boxes", self.boxes),
            }
        )

    @classmethod
    def read(cls, content: RecordDict) -> Request:
        """Return the message in a content from the network; raise `ProtocolError` if it is none."""
        record = record_in(content, RECORD, ConfigRecord)
        if (stage := _of(record, "stage", str)) not in [*Stage]:
            raise _wrong("stage")
        names, publics, announcements = (_list(record, name) for name in ("names", "publics", "announcements"))
        _check(names, str)
        if any(len(name) > LONGEST_NAME for name in [_of(record, "run", str), *names]):  # they stand in a node's log
            raise _wrong("names")
        terms = Terms(**{name: _of(record, name, kind) for name, kind in _TERMS.items()})
        _check([*publics, *announcements], bytes)
        if not len(names) == len(publics) == len(announcements) == len({*names}):
            raise _wrong("names")
        announced = {
            name: Announcement(public, signature)
            for name, public, signature in zip(names, publics, announcements, strict=True)
        }
        survivors = _list(record, "survivors")
        _check(survivors, str)
        signatures, boxes = _joined(record, "signatures"), _joined(record, "boxes")
        return cls(Stage(stage), terms, _of(record, "round", int), announced, tuple(survivors), signatures, boxes)


@dataclass(frozen=True)
class Introduction:
    """A party's first reply: who it is."""

    name: str
    key: str
    """Its public key, as a line of OpenSSH."""
    announcement: Announcement
    listed: Mapping[str, str] = field(default_factory=dict)
    """The keys, as such lines, of the parties with which it adds."""

    def to_record(self) -> ConfigRecord:
        """Return the reply's record."""
        one, own = self.announcement, {"name": self.name, "key": self.key}
        lists = {"listed-names": list(self.listed), "listed": list(self.listed.values())}
        return ConfigRecord({**own, "public": one.public, "signature": one.signature, **lists})

    @classmethod
    def read(cls, content: RecordDict) -> Introduction:
        """Return the introduction in a reply."""
        record = record_in(content, RECORD, ConfigRecord)
        announcement = Announcement(_of(record, "public", bytes), _of(record, "signature", bytes))
        names, keys = _list(record, "listed-names"), _list(record, "listed")
        _check([*names, *keys], str)
        if len(names) != len(keys):
            raise _wrong("listed")
        listed, name = dict(zip(names, keys, strict=True)), _of(record, "name", str)
        if not (0 < len(name) <= LONGEST_NAME and name.isprintable()):  # it stands in the server's log
            raise _wrong("name")
        return cls(name, _of(record, "key", str), announcement, listed)


def masked_record(masked: Masked) -> ConfigRecord:
    """Return the record of a party's numbers."""
    both = _split("boxes", masked.boxes) | _split("proofs", masked.proofs)
    return ConfigRecord({"numbers": masked.numbers, "layers": masked.layers, **both})


def masked_in(content: RecordDict) -> Masked:
    """Return a party's numbers in a reply."""
    record = record_in(content, RECORD, ConfigRecord)
    layers = _list(record, "layers")
    _check(layers, bytes)
    return Masked(_of(record, "numbers", bytes), _joined(record, "boxes"), _joined(record, "proofs"), layers)


def signature_record(signature: bytes) -> ConfigRecord:
    """Return the record of a signature."""
    return ConfigRecord({"signature": signature})


def signature_in(content: RecordDict) -> bytes:
    """Return the signature in a reply."""
    found: bytes = _of(record_in(content, RECORD, ConfigRecord), "signature", bytes)
    return found


def opened_record(opened: Opened) -> ConfigRecord:
    """Return the record of a party's seeds and shares."""
    flat = [(of, other, share) for of, own in opened.shares.items() for other, share in own.items()]
    names = {"of": [one[0] for one in flat], "with": [one[1] for one in flat]}
    shares = [one[2] for one in flat]
    return ConfigRecord({"layers": opened.layers, "shares": shares, **_split("seeds", opened.seeds), **names})


def opened_in(content: RecordDict) -> Opened:
    """Return a party's seeds and shares in a reply."""
    record = record_in(content, RECORD, ConfigRecord)
    layers, of, others, shares = (_list(record, name) for name in ("layers", "of", "with", "shares"))
    _check([*layers, *shares], bytes)
    _check([*of, *others], str)
    if not len(of) == len(others) == len(shares):
        raise _wrong("shares")
    found: dict[str, dict[str, bytes]] = {}
    for one, other, share in zip(of, others, shares, strict=True):
        found.setdefault(one, {})[other] = share
    return Opened(_joined(record, "seeds"), layers, found)


def _split(name: str, by_party: Mapping[str, bytes]) -> dict[str, list[str] | list[bytes]]:
    return {f"{name}-of": list(by_party), name: list(by_party.values())}


def _joined(record: ConfigRecord, name: str) -> dict[str, bytes]:
    parties, values = _list(record, f"{name}-of"), _list(record, name)
    _check(parties, str)
    _check(values, bytes)
    if not len(parties) == len(values) == len({*parties}):
        raise _wrong(name)
    return dict(zip(parties, values, strict=True))


def _of(record: ConfigRecord, name: str, kind: type) -> Any:
    value = record.get(name)
    if type(value) is not kind:
        raise _wrong(name)
    return value


def _list(record: ConfigRecord, name: str) -> list[Any]:
    found: list[Any] = _of(record, name, list)
    return found


def _check(values: Iterable[Any], kind: type) -> None:
    if any(type(value) is not kind for value in values):
        raise _wrong("a list")


def _wrong(name: str) -> ProtocolError:
    return ProtocolError(f"{name} of a message about a secure sum is missing or wrong", code="protocol.secure-message")
