"""The server's side of anonymous releases: its keys for a run's batches, and the batches that the relay hands on.

Keys are new in each process and in memory alone. Nothing here depends on which site replied first, or what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Message

from umbel.privacy.anonymous.batches import Batches, Relay
from umbel.privacy.anonymous.link import RelayLink, address_of
from umbel.privacy.anonymous.submission import Submission
from umbel.privacy.anonymous.terms import Opening, Terms
from umbel.protocol.arrays import Arrays, Vectors, all_finite, flatten
from umbel.protocol.errors import ConfigError, RelayError
from umbel.protocol.flower import filled, log
from umbel.protocol.messages import ANONYMOUS, submissions_in
from umbel.protocol.releases import Releases
from umbel.protocol.run_config import RunConfig
from umbel.protocol.signatures import simulated_keys
from umbel.protocol.tasks import TrainingSpec
from umbel.server.nodes.bounds import near
from umbel.server.nodes.replies import Asked
from umbel.server.nodes.roster import Roster
from umbel.server.nodes.words import told


@dataclass
class Anonymous:
    """A run's batches, as the server sees them.

    Parameters
    ----------
    least : int
        Minimum number of releases in a batch.
    relay : Relay
    simulated : bool
        Whether simulated nodes leave it to the server to hand their releases to the relay.
    """

    least: int
    relay: Relay
    simulated: bool
    _private: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    _closing: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate, repr=False)
    _round: int = 0

    @classmethod
    def of(cls, run: RunConfig, roster: Roster, together: bool) -> Anonymous:
        """Return those of a run; if its nodes are simulated `together` with the server, the relay is in this process.

        Raises
        ------
        ConfigError
            If the run config names no relay, and nodes are not simulated here.
        RelayError
            If the relay is away.
        """
        if together and roster.simulated:
            return cls(run.anonymous_least, Batches(simulated_keys(run.seed, len(roster)), run.anonymous_least), True)
        if not (run.relay and run.relay_ca):
            text = "anonymous-least needs a relay: set relay and relay-ca, or anonymous-least = 0"
            raise ConfigError(text, code="config.no-relay")
        try:
            address_of(run.relay)
        except ValueError as error:
            raise ConfigError(f"relay: {error}", code="config.no-relay") from None
        relay = RelayLink(run.relay, run.relay_ca)
        relay.check()
        return cls(run.anonymous_least, relay, False)

    def asking(self, messages: Sequence[Message], round: int) -> list[Message]:
        """Return a round's messages, each with the keys for the batch."""
        self._round, record = round, self.opening.to_record()
        for message in messages:
            filled(message.content, {ANONYMOUS: record})
        return [*messages]

    @property
    def opening(self) -> Opening:
        """The keys and the minimum for a batch, for the sites."""
        key, closing = (one.public_key().public_bytes_raw() for one in (self._private, self._closing))
        return Opening(key, closing, self.least)

    def releases(
        self, task: TrainingSpec, hypotheses: Arrays, asked: Asked, answers: Mapping[int, Message], furthest: float
    ) -> Releases:
        """Close a round's batch and return its releases; none if the relay hands on none.

        Parameters
        ----------
        task : TrainingSpec
            For all clients.
        hypotheses : dict of ndarray, each (k, \\*shape)
            The hypotheses that were sent.
        answers : mapping from int to Message
            The acknowledgements, by node.
        furthest : float
            As for `umbel.server.nodes.replies.read_releases`.
        """
        lost = len(asked.positions) - len(answers)
        terms = Terms.of(self.opening, task, self._round, hypotheses)
        if self.simulated:
            lost += sum(not self._handed_on(reply, node, asked) for node, reply in answers.items())
        try:
            sealed = self.relay.close(terms, self._closing.sign(terms.closing_text), len(asked.clients))
        except RelayError as error:
            log(WARNING, "round %d has no releases, and its clients are charged: %s", self._round, error)
            sealed = []
        vectors, wrong = self._read(terms, sealed)
        if wrong:
            log(WARNING, "left out %d releases of round %d that are not valid", wrong, self._round)
        inside = near(vectors, flatten(hypotheses), furthest) if len(vectors) else np.zeros(0, bool)
        if far := int((~inside).sum()):
            text = "left out %d of %d releases, further than %.3g from the hypotheses"
            log(WARNING, text, far, len(inside), furthest)
        vectors = vectors if not far else vectors[inside]
        vectors.flags.writeable = False
        unknown = np.full(len(vectors), -1, np.int64)
        return Releases(vectors, unknown, None, len(asked.clients), lost, np.full(far, -1, np.int64))

    def _read(self, terms: Terms, sealed: Sequence[bytes]) -> tuple[Vectors, int]:
        vectors, wrong = terms.opened(sealed, self._private)
        finite = all_finite(vectors, axis=1)
        return (vectors, wrong) if finite.all() else (vectors[finite], wrong + int((~finite).sum()))

    def _handed_on(self, reply: Message, node: int, asked: Asked) -> bool:
        """Hand a simulated node's submissions to the relay, and return whether it takes them."""
        try:
            for one in submissions_in(reply.content):
                self.relay.submit(Submission.read(one))
        except Exception as error:  # keep running: one bad node must not stop the round
            log(WARNING, "dropped the reply of %s: %s", asked.names[node], told(error))
            return False
        return True
