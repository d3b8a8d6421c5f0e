"""SuperNodes that only answer, many in one process: Flower's connection, umbel's pace, and no PyTorch.

    python -m benchmarks.light_nodes ADDRESS CA_FILE KEY_FILE...

Each node has a key, a connection, a heartbeat and a separate thread, and sends the SuperLink the requests that a
`umbel site start` sends, as often as that looks for messages. It hosts a client that trains and one that validates.
It makes up its answers at once: a release beside the first hypothesis, and a loss.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects, push_objects
from flwr.supernode import fleet_http_connection

from umbel.deploy.flower import watch_calls
from umbel.deploy.node import Link
from umbel.privacy.channels.client import Released
from umbel.privacy.channels.reports import Reported
from umbel.protocol.messages import evaluation_in, hosting_reply, hypotheses_in, training_in
from umbel.protocol.polling import Pace
from umbel.protocol.tasks import Hosting

ONLINE, FAILED = "SuperNode ID: ", "failed: "
"""Beginnings of a node's lines: after its admission, like Flower's own node; and if it could not answer."""
# Seconds that Flower's SuperNode waits for a message and for a reply, and the pause of umbel's for parts on their way.
_MESSAGE_S, _REPLY_S, _SOON_S = 3.0, 0.5, 0.05


def answer(content: RecordDict, source: np.random.Generator) -> RecordDict:
    """Return the content of a node's reply to what the server asks."""
    reply = RecordDict()
    if training := training_in(content):
        some = len(training.clients)
        releases = {
            name: value[:1] + 0.1 * source.standard_normal((some, *value.shape[1:]), np.float32)
            for name, value in hypotheses_in(content).items()
        }
        reply.update(Released(np.ones(some, bool), releases).records())
    if evaluation := evaluation_in(content):
        losses = source.uniform(1, 2, len(evaluation.clients))
        reply.update(Reported(np.ones(len(losses), bool), scores=np.array([losses, losses])).records())
    # A query asks neither; nor does the end of a run, of which the server reads no answer.
    return reply or hosting_reply(Hosting(train=1, validation=1))


class Node:
    """A node that answers until its process ends, by Flower's calls to the SuperLink (`http_request_response`)."""

    def __init__(self, connection: tuple[Any, ...]) -> None:
        number, self._receive, self._send, self._run, self._bundle, self._pull, self._push, self._confirm = connection
        self._known: set[int] = set()
        self._pace, self._source = Pace(), np.random.default_rng(number)

    def serve(self) -> None:
        """Look for messages and answer them, for ever."""
        while True:
            try:
                answered = self._look()
            except Exception as error:  # any error: the next look may succeed
                print(f"{FAILED}{type(error).__name__}: {error}".splitlines()[0], flush=True)
                answered = False
            if not answered:
                time.sleep(self._pace.seconds(_MESSAGE_S))

    def _look(self) -> bool:
        if (received := self._receive()) is None:
            return False
        message, tree = received
        run = message.metadata.run_id
        if run not in self._known:
            self._bundle(self._run(run).fab_hash, run)
            self._known.add(run)
        parts = [part.object_id for part in iterate_object_tree(tree)]
        contents = pull_objects(parts, partial(self._pull, run), initial_backoff=_SOON_S)
        self._confirm(run, message.metadata.message_id)
        asked = inflate_object_from_contents(message.metadata.message_id, contents)
        assert isinstance(asked, Message)
        asked.metadata.__dict__["_message_id"] = message.metadata.message_id
        time.sleep(self._pace.seconds(_REPLY_S))  # as long as a site's waits at the least
        reply = Message(answer(asked.content, self._source), reply_to=asked)
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            missing, session = self._send(reply, get_object_tree(reply), 0.0)
            push = partial(self._push, run, session)
            push_objects(get_all_nested_objects(reply), push, object_ids_to_push=missing)
        return True


def join(address: str, ca: bytes, key: Path) -> None:
    """Connect a node by its key, and answer."""
    private: Any = load_ssh_private_key(key.read_bytes(), password=None)
    with fleet_http_connection.http_request_response(address, False, ca, (private, private.public_key())) as connection:
        print(f"{ONLINE}{connection[0]}", flush=True)
        Node(connection).serve()


def main(address: str, ca: str, *keys: str) -> None:
    """Start a node a key."""
    watch_calls(Link(address))  # whose heartbeats continue after one that a busy SuperLink fails
    # Flower takes the certificate as bytes in place of a path; here it is read once.
    threads = [Thread(target=join, args=(address, Path(ca).read_bytes(), Path(key)), daemon=True) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
