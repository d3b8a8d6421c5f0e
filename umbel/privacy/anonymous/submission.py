"""A site's submission of one client's release to the relay, and the request that closes a batch, as bytes.

Both begin with the length of a head in JSON, which holds everything but the ciphertext.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from umbel.privacy.anonymous.terms import KEY, MOST, Terms
from umbel.privacy.secure.seeds import text_of
from umbel.protocol.errors import RelayError
from umbel.protocol.signatures import PublicKey, line_of
from umbel.protocol.tasks import LONGEST_NAME

LONGEST_HEAD = 8192
"""Maximum bytes of a head."""
_LENGTH = 4


def listed(keys: Mapping[str, PublicKey]) -> str:
    """Return what identifies a list of sites: a hash of their names and keys."""
    return sha256(text_of("umbel sites", sorted((name, line_of(key)) for name, key in keys.items()))).hexdigest()


@dataclass(frozen=True)
class Submission:
    """One client's release, encrypted and signed by its site.

    Attributes
    ----------
    terms : Terms
    site : str
        Name of the site in the list.
    listed : str
        The site's list (`listed`).
    admission : str
        The same for each submission of a client to a batch; only the site knows which client it is.
    least : int
        Minimum number of releases with which the site lets this one go.
    colluding : int
        Number of sites whose releases the site does not count.
    sealed : bytes
        The ciphertext.
    signature : bytes
        The site's, of `text`.
    """

    terms: Terms
    site: str
    listed: str
    admission: str
    least: int
    colluding: int
    sealed: bytes
    signature: bytes = b""

    @property
    def text(self) -> bytes:
        """The signed text."""
        about = self.terms.digest.hex(), self.site, self.listed, self.admission, self.least, self.colluding
        return text_of("umbel anonymous release", *about, sha256(self.sealed).hexdigest())

    def to_bytes(self) -> bytes:
        """Return the submission as it travels."""
        own = {name: getattr(self, name) for name in ("site", "listed", "admission", "least", "colluding")}
        return _with_head(_terms_entries(self.terms) | own | {"signature": self.signature.hex()}, self.sealed)

    @classmethod
    def read(cls, data: bytes) -> Submission:
        """Return the submission in bytes from the network; raise `RelayError` if they are none."""
        head, sealed = _head_in(data)
        site, lists, admission = (_text(head, name) for name in ("site", "listed", "admission"))
        least, colluding = (_whole(head, name) for name in ("least", "colluding"))
        return cls(_terms_in(head), site, lists, admission, least, colluding, sealed, _bytes(head, "signature"))


def closing_request(terms: Terms, signature: bytes) -> bytes:
    """Return the request that closes a batch."""
    return _with_head(_terms_entries(terms) | {"signature": signature.hex()}, b"")


def closing_in(data: bytes) -> tuple[Terms, bytes]:
    """Return terms and signature in such a request from the network."""
    head, _ = _head_in(data)
    return _terms_in(head), _bytes(head, "signature")


def _terms_entries(terms: Terms) -> dict[str, Any]:
    named = {name: getattr(terms, name) for name in ("run", "round", "work", "size")}
    return {**named, "key": terms.key.hex(), "closing": terms.closing.hex()}


def _terms_in(head: dict[str, Any]) -> Terms:
    keys = [_bytes(head, name) for name in ("key", "closing")]
    if any(len(key) != KEY for key in keys):
        raise _wrong("key")
    return Terms(_text(head, "run"), _whole(head, "round"), _text(head, "work"), _whole(head, "size"), *keys)


def _with_head(entries: dict[str, Any], rest: bytes) -> bytes:
    head = json.dumps(entries).encode()
    return len(head).to_bytes(_LENGTH, "big") + head + rest


def _head_in(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:_LENGTH], "big")
    if not length <= min(LONGEST_HEAD, len(data) - _LENGTH):
        raise _wrong("head")
    try:
        head = json.loads(data[_LENGTH : _LENGTH + length])
    except (ValueError, RecursionError):
        raise _wrong("head") from None
    if type(head) is not dict:
        raise _wrong("head")
    return head, data[_LENGTH + length :]


def _text(head: dict[str, Any], name: str) -> str:
    value = head.get(name)
    if type(value) is not str or len(value) > LONGEST_NAME:
        raise _wrong(name)
    return value


def _bytes(head: dict[str, Any], name: str) -> bytes:
    try:
        return bytes.fromhex(_text(head, name) if name != "signature" else str(head.get(name)))
    except ValueError:
        raise _wrong(name) from None


def _whole(head: dict[str, Any], name: str) -> int:
    value = head.get(name)
    if type(value) is not int or not 0 <= value <= MOST:
        raise _wrong(name)
    return value


def _wrong(name: str) -> RelayError:
    return RelayError(f"{name} of a request to the relay is missing or wrong", code="relay.request")
