"""The ways in which results may leave a site, one file each.

=========  ===========================================================================
`client`   each client's model, with separate noise
`rows`     the same, where the noise of training hides each row, and nothing is added
`site`     sums over a site's clients, with noise once
`secure`   sums over several sites, which the server reads only as a whole
`reports`  loss and metric of each client, or a site's mean of them
=========  ===========================================================================

A channel's file prices, sanitises and encodes at a site, and reads back at the server. The gate, the nodes of a run and
the planner look channels up by name (`umbel.protocol.release.CHANNELS`), and know no more of them than this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from umbel.privacy.mechanisms.choice import keep_probability
from umbel.protocol.arrays import Arrays, Labels, Matrix
from umbel.protocol.asked import Asked
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import ProtocolError, Refused
from umbel.protocol.flower import filled
from umbel.protocol.plugins import import_by_name
from umbel.protocol.records import record_in
from umbel.protocol.release import CHANNELS, Kind, Release
from umbel.protocol.releases import Releases, Scores, Sums
from umbel.protocol.tasks import TrainingSpec

Ids = Sequence[ClientInDataset]
Flags = NDArray[np.bool_]
NOBODY = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Place:
    """A site in a run.

    Attributes
    ----------
    site : umbel.privacy.site.config.Site
    seed : int or None
        Seed of all noise; None for the operating system's entropy.
    state : RecordDict
        The node's memory of the run, which never leaves it.
    first_use : callable
        Notes on the site's disk what a digest is used for, and returns what it was used for first.
    """

    site: Any
    seed: int | None = None
    state: RecordDict = field(default_factory=RecordDict)
    first_use: Callable[[str, str], str] = lambda _, use: use


@dataclass(frozen=True)
class Outgoing:
    """The part of a task's results that leaves; nothing, if it leaves later (`AtSite.rest`).

    Attributes
    ----------
    paid : ndarray of bool
        For each asked client, whether it was charged, and so is in it.
    arrays : dict of ndarray
        The releases themselves.
    scores : ndarray, shape (2, asked)
        Loss and metric of each asked client, NaN without.
    """

    paid: Flags
    arrays: Arrays = field(default_factory=dict)
    scores: Matrix = field(default_factory=lambda: np.zeros((2, 0)))

    def records(self) -> Mapping[str, Any]:
        """Return the records of the reply."""
        return {}


class Sanitiser:
    """A channel at a site, for one task.

    Attributes
    ----------
    release : Release or None
        The release with which each client is charged; None for a report that has no price.
    fewest : int
        Number of charged clients below which nothing leaves.
    """

    release: Any
    fewest: Any = 1

    @property
    def explore(self) -> float:
        """Share of clients that train a hypothesis drawn at random: randomised response, as a price of single clients
        with a choice-epsilon says."""
        epsilon = self.release.choice_epsilon if self.release.kind is Kind.TRAIN else 0.0
        return 1 - keep_probability(epsilon, self.release.hypotheses) if epsilon > 0 else 0.0

    @classmethod
    def of(cls, place: Place, hypotheses: Arrays, task: Any) -> Any:
        """Return the sanitiser of a task; raise `Refused` if the task permits no release."""
        raise NotImplementedError

    def on_gpu(self, clients: Ids, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """Return what releases charged clients on the GPU that simulates them, given the shape of each array.

        It is a `umbel.privacy.site.work.OnGpu`; None if only `leave` can release them.
        """
        return None

    def leave(self, clients: Ids, results: Any, chosen: Labels, paid: Flags) -> Outgoing:
        r"""Return what leaves of charged clients.

        Parameters
        ----------
        results : dict of ndarray, each (clients, \*shape), or ndarray, shape (clients, 2)
            The model that each trained, or its loss and metric. Where they are not finite, training failed or diverged:
            that counts as no update (`umbel.privacy.channels.client.updates_in`), since what leaves must not tell.
        chosen : ndarray of int, shape (clients,)
            The hypothesis that each trained.
        """
        raise NotImplementedError


class AtSite:
    """A channel at a site, for one message."""

    def __init__(self, channel: type[Channel], place: Place, hypotheses: Arrays, content: RecordDict) -> None:
        self.channel, self.place, self.hypotheses = channel, place, hypotheses

    def sanitiser(self, task: Any) -> Any:
        """Return the sanitiser of a task; raise `Refused` if the task permits no release."""
        return self.channel.sanitiser.of(self.place, self.hypotheses, task)

    def rest(self) -> Mapping[str, Any]:
        """Return the records that leave once all tasks of the message are done."""
        return {}


class Channel:
    """One way in which results may leave a site; an object of the class is the server's side of it in a run.

    Parameters
    ----------
    nodes : umbel.nodes.fleet.Fleet
        The nodes of the run.
    """

    sanitiser: type[Sanitiser]
    at_site: type[AtSite] = AtSite

    def __init__(self, nodes: Any = None) -> None:
        self.nodes = nodes

    # --- the price

    @staticmethod
    def price(release: Release) -> Release:
        """Return the release with which each client is charged that would otherwise make `release` itself."""
        return release

    @staticmethod
    def count_deviation(task: Any) -> float:
        """Return the standard deviation of the noise on each count of clients; 0 if no count has noise."""
        return 0.0

    # --- at a site

    @staticmethod
    def answer(place: Place, content: RecordDict) -> RecordDict:
        """Return a site's reply in a stage besides a round's message."""
        raise Refused("this channel has no such stage", code="refused.message-type")

    # --- at the server

    def invite(self, round: int, asked: Asked, options: Mapping[str, Any]) -> None:
        """Add to a round's messages what the channel needs; `options` are the strategy's (`channel_options`)."""

    def read(self, asked: Asked, replies: Iterable[Message]) -> Releases | Sums | Scores | None:
        """Return what came back of a task's clients; None if it is scores, and there are no valid replies."""
        raise NotImplementedError

    @staticmethod
    def rows(k: int, clients: int) -> int:
        """Return the number of models in the reply about so many clients that released, from k hypotheses."""
        return clients

    @staticmethod
    def room(record: ConfigRecord) -> int:
        """Return the bytes of a reply to the channel's own record of a message."""
        return 0

    @staticmethod
    def answered(task: Any, content: RecordDict) -> int:
        """Return how many of a task's clients are in a reply, according to it; 0 for an inconsistent reply."""
        with suppress(ProtocolError):
            whose = "clients" if isinstance(task, TrainingSpec) else "reported"
            return int(flags_in(content, len(task.clients), whose).sum())
        return 0


@cache
def load(name: str) -> type[Channel]:
    """Return the channel of a name."""
    found: type[Channel] = import_by_name(CHANNELS[name])
    return found


# --- the record of who is in a reply


def released_record(paid: Sequence[int] | Flags, **entries: Any) -> MetricRecord:
    """Return the record that says which of the asked clients are in a reply: 1 for each that is, 0 for another."""
    return filled(MetricRecord(), {"clients": np.asarray(paid).astype(int).tolist(), **entries})


def answers_training(content: RecordDict) -> bool:
    """Return whether a reply has a part about training clients."""
    return "released" in content


def flags_in(content: RecordDict, asked: int, whose: str = "clients") -> Flags:
    """Check and return a reply's flag for each asked client."""
    flags = np.asarray(record_in(content, "released", MetricRecord).get(whose, ()))
    if flags.shape != (asked,) or not ((flags == 0) | (flags == 1)).all():
        raise ProtocolError("it does not say who released", code="protocol.released")
    return flags.astype(bool)
