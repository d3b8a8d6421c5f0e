"""The relay's batches: they collect submissions, and each is handed on once, shuffled, if it is large enough.

They are in memory alone, and bounded. A listed site can make batches fail, by submissions for other terms or with a
minimum that no batch reaches, but it cannot make one smaller than another site allows.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from secrets import SystemRandom
from typing import ClassVar, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from umbel.privacy.anonymous.submission import Submission, listed
from umbel.privacy.anonymous.terms import Terms
from umbel.protocol.errors import RelayError
from umbel.protocol.signatures import PublicKey, verifies


class Relay(Protocol):
    """A way to a relay."""

    def check(self) -> None:
        """Raise `RelayError` if the relay is away."""

    def submit(self, submission: Submission) -> None:
        """Hand a submission to the relay; `RelayError` if it does not take it."""

    def close(self, terms: Terms, signature: bytes, most: int) -> list[bytes]:
        """Close a batch, and return its ciphertexts, at most so many, in random order.

        Raises
        ------
        RelayError
            If they are too few, or the batch is closed already. It cannot be closed again.
        """


@dataclass
class _Batch:
    terms: Terms
    began: float
    least: int = 0
    colluding: int = 0
    sealed: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """By site and admission."""

    @property
    def counted(self) -> int:
        """Number of releases, without those of the sites that may work with the server: the ones that sent most."""
        by_site = Counter(site for site, _ in self.sealed)
        return len(self.sealed) - sum(count for _, count in by_site.most_common(self.colluding))


class Batches:
    """The batches of a relay.

    Parameters
    ----------
    keys : mapping of str to PublicKey
        The sites whose submissions count, by name.
    least : int
        Minimum number of releases in a batch; a site may ask for more.
    memory : int
        Maximum bytes of all submissions together (`beside` counts, too).
    clock : callable
        Returns the time in seconds.
    """

    beside: ClassVar[int] = 1024
    """Bytes that a submission may take beside its ciphertext, which a site can make as short as it likes."""
    most_open: ClassVar[int] = 64
    """Maximum number of batches that are open at the same time."""
    most_closed: ClassVar[int] = 100_000
    """Number of batches that are known to be closed; of each, the relay remembers 32 bytes."""
    open_seconds: ClassVar[float] = 86_400.0
    """Seconds after which an open batch is closed, and its submissions forgotten."""

    def __init__(
        self,
        keys: Mapping[str, PublicKey],
        least: int,
        memory: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys, self._listed, self._least, self._memory = dict(keys), listed(keys), least, memory
        self._clock = clock
        self._open: dict[bytes, _Batch] = {}
        self._closed: OrderedDict[bytes, None] = OrderedDict()
        self._held = 0  # bytes

    def check(self) -> None:
        """Do nothing: it is here."""

    @property
    def held(self) -> tuple[int, int]:
        """Number of submissions, and of their bytes."""
        return sum(len(batch.sealed) for batch in self._open.values()), self._held

    def submit(self, submission: Submission) -> None:
        """Take a submission into its batch; a client's second one to the same batch is dropped.

        Raises
        ------
        RelayError
            If no listed site signed it, it has another size than all others, its batch is closed, or there is no room.
        """
        self._expire()
        terms, sealed = submission.terms, submission.sealed
        if (key := self._keys.get(submission.site)) is None or submission.listed != self._listed:
            text = "the relay and the site that sent this do not list the same sites with the same keys"
            raise RelayError(text, code="relay.sites")
        if not verifies(key, submission.signature, submission.text):
            raise RelayError("the release is not signed by the site that it names", code="relay.signature")
        if len(sealed) != terms.sealed_size:
            raise RelayError("the release has another size than the others of its batch", code="relay.size")
        if terms.digest in self._closed:
            raise RelayError("the release comes too late: its batch is closed", code="relay.closed")
        batch = self._open.get(terms.digest) or _Batch(terms, self._clock())
        if (place := (submission.site, submission.admission)) in batch.sealed:
            return
        new = terms.digest not in self._open
        if (new and len(self._open) >= self.most_open) or self._held + self.beside + len(sealed) > self._memory:
            raise RelayError("the relay has no room for more releases; give it more memory", code="relay.full")
        self._open[terms.digest] = batch
        self._held += self.beside + len(sealed)
        batch.sealed[place] = sealed
        batch.least = max(batch.least, submission.least)
        batch.colluding = max(batch.colluding, submission.colluding)

    def close(self, terms: Terms, signature: bytes, most: int) -> list[bytes]:
        """Close a batch; see `Relay`. Nothing of it remains, whether or not it is handed on."""
        self._expire()
        try:
            Ed25519PublicKey.from_public_bytes(terms.closing).verify(signature, terms.closing_text)
        except (InvalidSignature, ValueError):
            text = "the request to close a batch is not signed by the server that opened it"
            raise RelayError(text, code="relay.signature") from None
        # A closed batch and one without releases look the same: whether anyone has released is no one's business.
        if (batch := self._open.get(terms.digest)) is None:
            raise _too_few()
        self._forget(batch)
        if batch.counted < max(self._least, batch.least):
            raise _too_few()
        if len(batch.sealed) > most:
            raise too_many()
        sealed = list(batch.sealed.values())
        SystemRandom().shuffle(sealed)
        return sealed

    def _expire(self) -> None:
        now = self._clock()
        for batch in [one for one in self._open.values() if now - one.began > self.open_seconds]:
            self._forget(batch)

    def _forget(self, batch: _Batch) -> None:
        del self._open[batch.terms.digest]
        self._held -= sum(self.beside + len(sealed) for sealed in batch.sealed.values())
        self._closed[batch.terms.digest] = None
        if len(self._closed) > self.most_closed:
            self._closed.popitem(last=False)


def _too_few() -> RelayError:
    text = "the batch has too few releases to hide their senders, or is closed, so the relay hands on none"
    return RelayError(text, code="relay.too-few")


def too_many() -> RelayError:
    """Return the error of a batch that is larger than expected."""
    text = "the batch has more releases than clients were asked; a site sends too many"
    return RelayError(text, code="relay.too-many")
