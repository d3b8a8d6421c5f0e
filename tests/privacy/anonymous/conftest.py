"""Sites, a server with its keys, and a relay in one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from umbel.privacy.anonymous.batches import Batches
from umbel.privacy.anonymous.submission import Submission, listed
from umbel.privacy.anonymous.terms import Opening, Terms
from umbel.protocol.tasks import TrainingSpec

LEAST = 3
"""The relay's own minimum."""
HYPOTHESES = {"weight": np.array([[0.0, 0.0], [1.0, -1.0]], np.float32)}


def identity(name: str) -> Ed25519PrivateKey:
    """Return the key that identifies a site; the same one for a name."""
    return Ed25519PrivateKey.from_private_bytes(sha256(name.encode()).digest())


KEYS = {name: identity(name).public_key() for name in ("east", "north", "west")}


@dataclass
class Server:
    """A server with its keys."""

    private: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    closing: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    def terms(self, round: int = 1, hypotheses: Any = None, **task: Any) -> Terms:
        opening = Opening(self.private.public_key().public_bytes_raw(), self.closing.public_key().public_bytes_raw(), 2)
        return Terms.of(opening, TrainingSpec(run="spring", **task), round, hypotheses or HYPOTHESES)

    def close(self, relay: Batches, terms: Terms, most: int = 1000) -> list[bytes]:
        return relay.close(terms, self.closing.sign(terms.closing_text), most)

    def read(self, sealed: Iterable[bytes], terms: Terms) -> NDArray[np.float32]:
        return terms.opened(sealed, self.private)[0]


def submission(terms: Terms, site: str, client: int, value: Any = (0.5, 0.25), **changes: Any) -> Submission:
    """Return a site's submission of a client's release, with changes that it signs."""
    [sealed] = terms.sealed(np.array([value], np.float32))
    one = Submission(terms, site, listed(KEYS), f"client {client}", 1, 0, sealed)
    one = replace(one, **changes)
    return replace(one, signature=identity(site).sign(one.text))
