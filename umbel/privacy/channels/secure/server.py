"""The channel of secure sums at the server: who takes part, and the two exchanges that follow a round's training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from logging import WARNING
from typing import Any, TypeVar

import numpy as np
from flwr.app import Message, RecordDict
from numpy.typing import NDArray

from umbel.privacy import channels
from umbel.privacy.accounting.guarantee import report_deviation
from umbel.privacy.channels import NOBODY, answers_training, flags_in
from umbel.privacy.channels.client import concatenated
from umbel.privacy.channels.secure import seeds
from umbel.privacy.channels.secure.layout import REPORTS, Layout
from umbel.privacy.channels.secure.party import Masked, key_text
from umbel.privacy.channels.secure.sums import Sum
from umbel.privacy.channels.secure.terms import LARGEST, Grid, Terms, bits_for, finest_deviation
from umbel.privacy.channels.secure.wire import (
    RECORD,
    Introduction,
    Request,
    Stage,
    masked_in,
    opened_in,
    signature_in,
)
from umbel.privacy.mechanisms.discrete_gaussian import FINE, DiscreteGaussian, check_fine
from umbel.protocol.arrays import Arrays
from umbel.protocol.asked import Asked, read_replies
from umbel.protocol.errors import FleetError, ProtocolError
from umbel.protocol.flower import filled
from umbel.protocol.log import log
from umbel.protocol.messages import round_request
from umbel.protocol.records import pack
from umbel.protocol.releases import Scores, Sums
from umbel.protocol.signatures import line_of, public_key, verifies
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
from umbel.protocol.words import as_line

NO_REPORTS = EvaluationSpec()
"""Reports that are not in a secure sum."""
_FINER = 50  # steps in a clip norm for each root of the number of second moments

T = TypeVar("T")


@dataclass
class Round:
    """A round's secure sum: the clients that are asked to train and to report in it, and what is read of it at last.

    Nodes without any of these clients take part with noise and masks alone.
    """

    number: int
    training: Asked
    reports: EvaluationSpec
    reporting: Asked | None = None
    result: tuple[Sums, Scores | None] | None = None

    @property
    def nodes(self) -> set[int]:
        """The nodes in the sum."""
        return {*self.training.positions, *(self.reporting.positions if self.reporting else ())}


@dataclass
class Together:
    """The parties of a run's secure sums, as the server knows them.

    Attributes
    ----------
    parties : dict
        The introduction of each node. A party does not rely on this; the server needs the keys to see which
        signatures others will accept.
    members : dict
        The latest round's parties, by name.
    """

    terms: Terms
    nodes: Any
    parties: dict[int, Introduction] = field(default_factory=dict)
    members: dict[str, Introduction] = field(default_factory=dict)

    def invite(self, messages: Sequence[Message], round: int) -> list[Message]:
        """Return those of a round's messages whose nodes are parties, each with the announcements of all.

        Nodes that are new introduce themselves first. A node that others do not list is left out: none of these would
        add with it, so it could stop every sum.
        """
        nodes = [message.metadata.dst_node_id for message in messages]
        self._introduce([node for node in nodes if node not in self.parties])
        self.members = self._listing_each_other([self.parties[node] for node in nodes if node in self.parties])
        announced = {name: one.announcement for name, one in self.members.items()}
        record = Request(Stage.MASK, self.terms, round, announced).to_record()
        invited = [message for message, node in zip(messages, nodes, strict=True) if self._name(node) in self.members]
        for message in invited:
            filled(message.content, {RECORD: record})
        return invited

    def forget(self, nodes: Iterable[int]) -> None:
        """Forget nodes that did not take part: one that was started again has another key."""
        for node in nodes:
            self.parties.pop(node, None)

    def add(self, round: int, masked: Mapping[int, Masked]) -> tuple[Sum, list[int]]:
        """Return the sum of a round after its first exchange, and the nodes whose numbers are in it.

        Raises
        ------
        ProtocolError
            If there are too few.
        """
        announced = {name: one.announcement for name, one in self.members.items()}
        keys = {name: public_key(name, one.key) for name, one in self.members.items()}
        total, inside = Sum(self.terms, round, announced, keys), []
        for node, one in masked.items():
            try:
                total.add(self._name(node), one)
                inside.append(node)
            except ProtocolError as error:
                log(WARNING, "dropped the reply of %s: %s", self.nodes.known.names[node], as_line(error))
        total.close()
        return total, inside

    def finish(self, total: Sum) -> tuple[NDArray[np.int64], float]:
        """Do the other two exchanges, and return the sum and the deviation of its noise; errors as for `Sum.result`."""
        nodes = {node: one.name for node, one in self.parties.items() if one.name in total.survivors}
        agree = Request(Stage.AGREE, self.terms, total.round, survivors=total.survivors)
        for node, signature in self._ask(dict.fromkeys(nodes, agree), total.threshold, signature_in).items():
            total.sign(nodes[node], signature)
        opening = Request(Stage.OPEN, self.terms, total.round, total.announced, signatures=total.signatures)
        requests = {node: replace(opening, boxes=total.boxes(name)) for node, name in nodes.items()}
        for node, opened in self._ask(requests, total.threshold, opened_in).items():
            total.opens(nodes[node], opened)
        return total.result()

    def _name(self, node: int) -> str:
        return self.parties[node].name if node in self.parties else ""

    def _introduce(self, nodes: Sequence[int]) -> None:
        """Ask new nodes who they are; a sum can begin without those that do not say so."""
        asked, known = dict.fromkeys(nodes, Request(Stage.ANNOUNCE, self.terms)), len(self.parties)
        enough = max(self.terms.least, self.terms.threshold(known + len(nodes))) - known
        for node, one in self._ask(asked, enough, self._introduction).items():
            same = {other: known for other, known in self.parties.items() if known.name == one.name}
            if any(self._listing(one.name, one.key) > self._listing(one.name, known.key) for known in same.values()):
                self.forget(same)  # another node had taken this party's name
            others = self.parties.values()
            if any(one.name == other.name or one.announcement.public == other.announcement.public for other in others):
                text = "%s says that it is party %s, which is another node; it is not asked"
                log(WARNING, text, self.nodes.known.names[node], one.name)
                continue
            self.parties[node] = one

    def _listing(self, name: str, line: str) -> int:
        """Return how many parties list a name with a key."""
        return sum(one.listed.get(name) == line for one in self.parties.values())

    def _listing_each_other(self, parties: Sequence[Introduction]) -> dict[str, Introduction]:
        """Return the parties, by name, without those that others do not list, or list with another key."""
        left = {one.name: one for one in sorted(parties, key=lambda one: one.name)}
        doubts = {
            name: {other for other in left if left[other].listed.get(name) != one.key} for name, one in left.items()
        }

        def unlike(name: str) -> int:
            return len(doubts[name] & left.keys()) + sum(name in doubts[other] for other in left)

        while any(doubts[name] & left.keys() for name in left):
            worst = max(left, key=unlike)
            log(WARNING, "party %s is left out: it and others do not list each other's keys", worst)
            del left[worst]
        return left

    def _introduction(self, content: RecordDict) -> Introduction:
        """Return who a node says it is; raise if every party would refuse its key, and the sum with it."""
        one = Introduction.read(content)
        public = one.announcement.public
        seeds.shared(seeds.private_key(bytes(32)), public)
        text = key_text(self.terms, one.name, public)
        if not verifies(key := public_key(one.name, one.key), one.announcement.signature, text):
            raise ProtocolError(f"the key of party {one.name!r} is not signed", code="protocol.secure-message")
        return replace(one, key=line_of(key))

    def _ask(self, requests: Mapping[int, Request], enough: int, read: Callable[[RecordDict], T]) -> dict[int, T]:
        """Send messages, and return what their replies say, by node."""
        contents = {node: RecordDict({RECORD: request.to_record()}) for node, request in requests.items()}
        stages = {f"{RECORD} {request.stage}" for request in requests.values()}
        replies = self.nodes.stage(", ".join(stages), contents, enough)
        found = {}
        for node, content in replies.items():
            try:
                found[node] = read(content)
            except Exception as error:  # keep running: one bad node must not stop the round
                log(WARNING, "%s has no part in the secure sum: %s", self.nodes.known.names[node], as_line(error))
        return found


def terms_of(
    task: TrainingSpec,
    hypotheses: Arrays,
    clients: int,
    parties: int,
    colluding: int,
    least: int,
    reports: EvaluationSpec = NO_REPORTS,
    reporting: int = 0,
) -> Terms:
    """Return the terms of a run's secure sums over so many clients of so many parties, the same in each round.

    `reporting` is the number of clients that report, if `reports` are in the sums.
    """
    nu, layout = task.noise_multiplier, Layout.of(hypotheses, task.moments, reports.summed)
    # As many steps in a clip norm as the noise's deviation needs, where there is room, so that rounding costs nothing.
    # Many numbers are each a small part of a clip norm, and second moments are rounded, so both need more.
    finest = finest_deviation(max(parties, least), colluding)
    finer = max(finest, FINE * math.sqrt(layout.parameters), _FINER * math.sqrt(layout.squares))
    deviation = max(min(max(1.0, nu) * finer, LARGEST), finest) if nu > 0 else 0.0
    weight = Grid.of(task.clip_norm, nu, deviation).weight
    check_fine(weight, layout.parameters, nu)
    largest = clients * weight
    if reports.summed:
        grid = Grid.of_reports(reports.report_bound, reports.report_noise_multiplier, deviation)
        largest = max(largest, reporting * grid.weight)
    bits = bits_for(largest, deviation, max(parties, least), colluding)
    return Terms(task.run, layout.length, bits, deviation, colluding, least)


class SecureSums(channels.Channel):
    """A run's secure sums, one a round: its training and its reports are in the same."""

    def __init__(self, nodes: Any = None) -> None:
        super().__init__(nodes)
        self._together: Together | None = None
        self._round: Round | None = None

    def invite(self, round: int, asked: Asked, options: Mapping[str, Any]) -> None:
        """Let the nodes of a round's messages add their numbers securely, and keep the messages to those that do.

        Training comes first, and the round's evaluation joins its sum. If clients of too few nodes were drawn, others
        take part with noise and masks alone.

        Parameters
        ----------
        options : mapping
            ``colluding`` and ``least`` (`umbel.privacy.channels.secure.terms.Terms`); and ``reports``, an
            `EvaluationSpec` that says how the run's clients report: each round's sum has room for it.

        Raises
        ------
        FleetError
            If a run has fewer nodes than `least`.
        """
        colluding, least, reports = (options[name] for name in ("colluding", "least", "reports"))
        if not (isinstance(asked.task, TrainingSpec) or asked.messages):
            return
        run, roster = self.nodes.run, self.nodes.known
        if len(roster) < least:
            text = f"a secure sum needs at least {least} sites, and there are {len(roster)}; start more"
            raise FleetError(f"{text}, in simulation by umbel run --nodes", code="nodes.too-few-parties")
        now = self._round = self._with(round, asked, reports)
        training, reporting = now.training, run.validation.clients or roster.validation
        numbers = run.clients_per_round, len(roster), colluding, least
        terms = terms_of(training.task, training.hypotheses, *numbers, reports, reporting)
        if self._together is None or self._together.terms != terms:
            self._together = Together(terms, self.nodes)
        busy = now.nodes | roster.gone(round)
        idle = [node for node, _ in roster.nodes if node not in busy][: max(0, least - len(now.nodes))]
        training.positions.update((node, NOBODY) for node in idle)
        packed = pack(asked.hypotheses)
        asked.messages += [Message(round_request(packed), node, "train", group_id=str(round)) for node in idle]
        known = [] if asked is training else training.messages
        invited = {id(message) for message in self._together.invite([*known, *asked.messages], round)}
        asked.messages[:] = [message for message in asked.messages if id(message) in invited]

    def _with(self, round: int, asked: Asked, reports: EvaluationSpec) -> Round:
        """Return the sum of a round that also asks these clients."""
        before = self._round
        if isinstance(asked.task, TrainingSpec):
            return Round(round, asked, reports)
        if before is not None and before.number == round:
            return replace(before, reporting=asked)
        last = TrainingSpec() if before is None else before.training.task
        nobody = replace(asked, clients=asked.clients[:0], positions={}, messages=[], task=last)
        return Round(round, nobody, reports, asked)

    def read(self, asked: Asked, replies: Iterable[Message]) -> Sums | Scores | None:
        """Return the round's sums as those of one site, or the mean of its reports.

        The sum is read once, since it takes two more exchanges. If it failed, its clients were charged and are outside.
        """
        assert self._round is not None
        assert self._together is not None
        if self._round.result is None:
            self._round.result = summed(self._together, self._round, replies)
        return self._round.result[isinstance(asked.task, EvaluationSpec)]


def summed(together: Together, joint: Round, replies: Iterable[Message]) -> tuple[Sums, Scores | None]:
    """Return the secure sum of the nodes that sent their numbers."""
    asked, task, reports = joint.training, joint.training.task, joint.reports
    k, n = asked.hypotheses.matrix.shape
    everyone = replace(asked, positions=dict.fromkeys(joint.nodes, NOBODY))
    parts = read_replies(everyone, replies, partial(_part_in, joint))
    inside: list[int] = []
    sums, counts, scores, moments = np.zeros((0, k, n)), np.zeros((0, k)), None, None
    layout = Layout.of(asked.hypotheses, task.moments)
    try:
        total, inside = together.add(joint.number, {node: masked for node, (masked, _, _) in parts.items()})
        values, _ = together.finish(total)
        grid = Grid.of(task.clip_norm, task.noise_multiplier, together.terms.deviation)
        updates, numbers, squares = layout.split(values)
        sums = np.multiply(updates[None], grid.step, dtype=np.float64)
        counts = np.divide(numbers[None], layout.count(grid.weight), dtype=np.float64)
        if layout.moments:
            moments = layout.matrices(squares, grid.weight, grid.step)
        if there := sum(parts[node][2] for node in inside):
            bound, nu = reports.report_bound, reports.report_noise_multiplier
            loss, metric = values[-REPORTS:] * Grid.of_reports(bound, nu, together.terms.deviation).step / there
            noise = report_deviation(nu, bound, DiscreteGaussian.name) / there
            scores = Scores(float(loss), float(metric), there, noise=noise, bound=bound)
    except ProtocolError as error:
        log(WARNING, "the secure sum of round %d fails, and its clients are charged: %s", joint.number, as_line(error))
        inside = []
    together.forget(joint.nodes - {*parts})
    clients = np.sort(concatenated(parts[node][1] for node in inside))
    outside = np.sort(concatenated(mine for node, (_, mine, _) in parts.items() if node not in inside))
    lost = len(joint.nodes) - len(inside)
    return Sums(sums, counts, clients, len(asked.clients), lost, outside, moments), scores


def _part_in(joint: Round, node: int, reply: Message) -> tuple[Masked, NDArray[np.int64], int] | None:
    """Return a node's masked numbers, the training clients in them, and the number of reports in them."""
    if not answers_training(reply.content):
        return None
    mine, reporting = (one.positions.get(node, NOBODY) if one else NOBODY for one in (joint.training, joint.reporting))
    flags, reported = flags_in(reply.content, len(mine)), flags_in(reply.content, len(reporting), "reported")
    return masked_in(reply.content), joint.training.clients[mine[flags]], int(reported.sum())
