"""The channel of secure sums at a site: whole numbers of its clients' updates, and its memory as a party.

Each client adds its clipped update to the sum of the hypothesis that it trained, and one clip norm to that hypothesis's
count. Updates are rounded to whole steps, and then are no longer than the clip norm allows. Noise is whole
steps as well. So the sum, modulo a power of two, is exact, and its noise is what the account says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from umbel.privacy import channels
from umbel.privacy.accounting.guarantee import secure_release, secure_report
from umbel.privacy.channels import Channel, Flags, Ids, Outgoing, Place, Sanitiser
from umbel.privacy.channels.client import ClientSanitiser, blocks, updates_in
from umbel.privacy.channels.secure.layout import REPORTS, Layout, Steps
from umbel.privacy.channels.secure.party import Party, Turn
from umbel.privacy.channels.secure.seeds import text_of
from umbel.privacy.channels.secure.server import SecureSums
from umbel.privacy.channels.secure.terms import Grid, Terms
from umbel.privacy.channels.secure.wire import (
    RECORD,
    Introduction,
    Request,
    Stage,
    masked_record,
    opened_record,
    signature_record,
)
from umbel.privacy.mechanisms.base import Matrix
from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian, to_grid
from umbel.privacy.mechanisms.randomness import noise_sources
from umbel.protocol.arrays import Arrays, Labels, flatten
from umbel.protocol.errors import Refused, SiteError
from umbel.protocol.flower import filled
from umbel.protocol.messages import evaluation_in, training_in
from umbel.protocol.release import Clipping, Release, ReleaseBy
from umbel.protocol.signatures import (
    PublicKey,
    line_of,
    public_half,
    public_key,
    signed,
    simulated_key,
    simulated_keys,
    simulated_name,
)
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

_RECORD = "umbel.secure"


@dataclass
class Part:
    """A part of a site's numbers, in steps, and which of the asked clients are in it; None before any is."""

    numbers: Steps
    paid: Flags | None = None

    @property
    def flags(self) -> list[int]:
        """1 for each asked client that is in it, 0 for another."""
        return [] if self.paid is None else self.paid.astype(int).tolist()


@dataclass(frozen=True)
class SecureSanitiser(Sanitiser):
    """A site's numbers for a secure sum: like `umbel.privacy.channels.site.SiteSanitiser`, without the noise."""

    task: TrainingSpec
    hypotheses: Matrix
    grid: Grid
    part: Part

    @classmethod
    def of_terms(
        cls, place: Place, hypotheses: Arrays, task: TrainingSpec, terms: Terms, part: Part
    ) -> SecureSanitiser:
        """Return a site's sanitiser for a task; raise `Refused` if the terms do not fit the task."""
        ClientSanitiser.check_hidden(place, task)
        everything = flatten(hypotheses)
        if task.release_by is not ReleaseBy.SECURE:
            raise not_in_a_sum()
        if task.clipping is not Clipping.PUBLIC or task.mechanism != DiscreteGaussian.name:
            text = f'a secure sum needs a public clip norm, and mechanism "{DiscreteGaussian.name}"'
            raise Refused(text, code="refused.secure-terms")
        if task.clip_norm < (floor := place.site.policy.clipping.floor):
            # All parties have the same grid, so no site can raise its own clip norm.
            text = f"a secure sum has clip norm {task.clip_norm:g}; the floor of this site's clipping is"
            raise Refused(f"{text} {floor:g}", code="refused.secure-terms")
        if (terms.deviation > 0) is not (task.noise_multiplier > 0):
            raise Refused("terms and task of the secure sum differ in noise", code="refused.secure-terms")
        return cls(task, everything, Grid.of(task.clip_norm, task.noise_multiplier, terms.deviation), part)

    @property
    def layout(self) -> Layout:
        """The numbers about training."""
        k, n = self.hypotheses.shape
        return Layout(k, n, self.task.moments)

    @cached_property
    def release(self) -> Release:
        """The release with which each participating client is charged."""
        k, n = self.hypotheses.shape
        return Secure.price(self.task.release(n, k, self.task.clip_norm))

    @property
    def explore(self) -> float:
        """See `umbel.privacy.channels.site.SiteSanitiser.explore`."""
        return self.task.explore

    def leave(self, clients: Ids, results: Arrays, chosen: Labels, paid: Flags) -> Outgoing:
        """Add the updates of charged clients to the sum, in which alone they leave."""
        self.part.numbers[:], self.part.paid = self.summed(results, chosen), paid
        return Outgoing(paid)

    def summed(self, trained: Arrays, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the clients' sums by hypothesis, without reports, in steps (`Layout`)."""
        (k, n), layout, weight = self.hypotheses.shape, self.layout, self.grid.weight
        sums, squares = np.zeros((k, n), np.int64), np.zeros((k, layout.squares), np.int64)
        longest = self.task.clip_norm * layout.inside(weight)
        for block in blocks(len(chosen), max(n, layout.squares)):
            updates = updates_in(trained, block, self.hypotheses[chosen[block]])
            steps = to_grid(updates, longest, self.grid.step).astype(np.int64)
            _add(sums, chosen[block], steps)
            if layout.moments:
                _add(squares, chosen[block], layout.squared(steps, weight))
        counts = np.bincount(chosen, minlength=k).astype(np.int64) * layout.count(weight)
        return np.concatenate([sums.ravel(), counts, squares.ravel()])


def _add(sums: Steps, chosen: NDArray[np.int64], rows: Steps) -> None:
    """Add each row (m, n) to the chosen one of the sums (k, n)."""
    for j in np.unique(chosen):
        sums[j] += rows[chosen == j].sum(axis=0) if len(rows) > 1 else rows[0]


@dataclass(frozen=True)
class SecureReports(Sanitiser):
    """A site's sums of loss and metric for a secure sum."""

    task: EvaluationSpec
    grid: Grid
    part: Part

    @classmethod
    def of_terms(cls, place: Place, task: EvaluationSpec, terms: Terms, part: Part) -> SecureReports:
        """Return a site's sums of reports for a task; raise `Refused` if the task permits none."""
        noise, least = task.report_noise_multiplier, place.site.policy.report_noise
        if not terms.deviation > 0:
            raise Refused("reports in a secure sum need noise, and its terms have none", code="refused.secure-terms")
        if noise < least:
            text = f"the server asks for reports with noise multiplier {noise:g}; this site accepts no less than"
            raise Refused(f"{text} {least:g}", code="refused.noise")
        return cls(task, Grid.of_reports(task.report_bound, noise, terms.deviation), part)

    @cached_property
    def release(self) -> Release:
        """The release with which each reporting client is charged."""
        return secure_report(self.task.report_noise_multiplier, self.task.report_bound)

    def leave(self, clients: Ids, results: Matrix, chosen: Labels, paid: Flags) -> Outgoing:
        """Add the loss and metric (m, 2) of charged clients to the sum, in which alone they leave."""
        self.part.numbers[:], self.part.paid = self.summed(results.T), paid
        return Outgoing(paid)

    def summed(self, scores: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the sums (2,) of clients' loss and metric (2, clients), in steps.

        A value that is no number counts as the bound. The bound has whole steps, rounded down, and no value has more.
        So any two reports lie within the diagonal of the square.
        """
        bound = self.task.report_bound
        inside = np.clip(np.nan_to_num(scores, nan=bound), 0, bound)
        steps = np.minimum(np.rint(inside / self.grid.step), math.floor(self.grid.weight)).astype(np.int64)
        return np.asarray(steps.sum(axis=1))


class AtSite(channels.AtSite):
    """The site's part of a secure sum, to which its clients may add their updates and their reports.

    Raises
    ------
    Refused
        If the site would not enter this sum. Then no client is charged.
    """

    def __init__(self, channel: type[Channel], place: Place, hypotheses: Arrays, content: RecordDict) -> None:
        super().__init__(channel, place, hypotheses, content)
        if RECORD not in content:
            raise not_in_a_sum()
        asked, training, evaluation = Request.read(content), training_in(content), evaluation_in(content)
        if asked.stage is not Stage.MASK or not (training is None or training.release_by is ReleaseBy.SECURE):
            raise not_in_a_sum()
        # Before the memory for so many numbers is taken.
        layout = layout_of(hypotheses, asked.terms, training, evaluation)
        self._asked, self._party = asked, party_of(place, asked.terms)
        self._party.check(asked.round, asked.announced)
        self._numbers = np.zeros(asked.terms.length, np.int64)
        self._updates, self._reports = Part(self._numbers[: layout.updates]), Part(self._numbers[-REPORTS:])
        self._alone = training is None and not (evaluation is not None and evaluation.summed)

    def sanitiser(self, task: TrainingSpec | EvaluationSpec) -> SecureSanitiser | SecureReports:
        """Return what adds training clients' updates, or validation clients' loss and metric."""
        if task.round != self._asked.round:
            raise not_in_a_sum()
        if isinstance(task, TrainingSpec):
            return SecureSanitiser.of_terms(self.place, self.hypotheses, task, self._asked.terms, self._updates)
        return SecureReports.of_terms(self.place, task, self._asked.terms, self._reports)

    def rest(self) -> Mapping[str, Any]:
        """Return all that was added, with the site's share of the noise, and masks.

        Nothing leaves if tasks were asked for and none is in the sum; without any the site adds masks alone.
        """
        if not self._alone and self._updates.paid is None and self._reports.paid is None:
            return {}
        masked = self._party.mask(self._asked.round, self._asked.announced, self._numbers)
        remember(self.place, self._party)
        flags = MetricRecord({"clients": self._updates.flags, "reported": self._reports.flags})
        return {RECORD: masked_record(masked), "released": flags}


def not_in_a_sum() -> Refused:
    """Return why a task is refused whose message does not fit its secure sum."""
    return Refused("the message says nothing about its secure sum", code="refused.secure-terms")


def layout_of(
    hypotheses: Arrays, terms: Terms, training: TrainingSpec | None, evaluation: EvaluationSpec | None
) -> Layout:
    """Return what is in a sum; raise `Refused` if what is asked for does not fit into its terms.

    A run's terms stay the same in rounds without training or without reports, so these may have room for both.
    """
    moments = (False, True) if training is None else (training.moments,)
    reports = (True,) if evaluation is not None and evaluation.summed else (False, True)
    for layout in (Layout.of(hypotheses, one, other) for one in moments for other in reports if hypotheses):
        if layout.length == terms.length:
            return layout
    raise Refused("the secure sum has another length than the hypotheses", code="refused.secure-terms")


def party_of(place: Place, terms: Terms) -> Party:
    """Return the party that a site is in a run, with what it remembers."""
    name, keys, sign = _identity(place)
    if not place.site.simulated:
        place.site.policy.check_terms(terms)
    record = place.state.get(_RECORD)
    secret, turn = b"", Turn()
    if isinstance(record, ConfigRecord) and record.get("terms") == terms.digest:
        kept: dict[str, Any] = dict(record.items())
        members, survivors = tuple(kept["members"]), tuple(kept["survivors"])
        turn = Turn(kept["round"], members, kept["parties"], kept["turn"], survivors, kept["opened"])
        secret = kept["secret"]
    secret = secret or _random(place, 0)(32)
    return Party(terms, name, keys, sign, secret, turn, _random(place, turn.round + 1))


def remember(place: Place, party: Party) -> None:
    """Keep what a party has to remember; called before its message leaves.

    Raises
    ------
    Refused
        If the site said something else in this round before.
    """
    turn = party.turn
    if turn.round and not place.site.simulated:
        _say_once(place, party)
    entries = {
        "terms": party.terms.digest, "secret": party.secret, "round": turn.round, "members": list(turn.members),
        "parties": turn.parties, "turn": turn.secret, "survivors": list(turn.survivors), "opened": turn.opened,
    }  # fmt: skip
    filled(place.state, {_RECORD: filled(ConfigRecord(), entries)})


def _say_once(place: Place, party: Party) -> None:
    """Note in the site's store, on disk, what a party says in a round; raise `Refused` if it said something else.

    Flower keeps the party's memory, but only after a reply has left. So the next message may find an older memory.
    """
    turn = party.turn
    for what, said in (("mask", turn.secret), ("agree", text_of(turn.survivors) if turn.survivors else b"")):
        digest = sha256(text_of("umbel secure", what, party.public.hex(), turn.round)).hexdigest()
        if said and place.first_use(digest, (own := sha256(said).hexdigest())) != own:
            text = f"this site has sent something else in round {turn.round} of this secure sum"
            raise Refused(text, code="refused.secure-round")


def _random(place: Place, round: int) -> Callable[[int], bytes]:
    """Return a source of a party's random bytes.

    With `insecure-seed` too, a site draws its secrets from the operating system: others rely on its share of the noise.
    """
    seed = place.seed if place.site.simulated else None
    return next(noise_sources(seed, round, [place.site.first], "secure sum")).bytes


def _identity(place: Place) -> tuple[str, Mapping[str, PublicKey], Callable[[bytes], bytes]]:
    """Return a site's name, the listed sites' keys, its own included, and how it signs.

    Raises
    ------
    Refused
        If the site lists no sites.
    SiteError
        If it does not list itself.
    """
    site, policy = place.site, place.site.policy
    if site.simulated:
        name, keys = simulated_name(site.first), simulated_keys(place.seed, site.step)
        return name, keys, simulated_key(place.seed, site.first).sign
    if not (policy.parties and policy.party_key):
        text = "this site lists no sites to work with: set parties and party-key"
        raise Refused(text, code="refused.secure-parties")
    keys = {name: public_key(name, line) for name, line in policy.party_keys.items()}
    path = Path(policy.party_key).expanduser()
    for name, key in keys.items():
        if line_of(key) == line_of(public_half(path)):
            return name, keys, partial(signed, key=path)
    raise SiteError(f"parties does not list the key of {path}; add this site itself", code="site.not-a-party")


class Secure(SecureSums):
    """Sums over several sites, each with a share of the noise, which the server reads only as a whole."""

    at_site = AtSite

    @staticmethod
    def price(release: Release) -> Release:
        """Return the release with which each client in the sum is charged."""
        return secure_release(release)

    @staticmethod
    def rows(k: int, clients: int) -> int:
        """Return 0: no model leaves by itself."""
        return 0

    @staticmethod
    def room(record: ConfigRecord) -> int:
        """Return the bytes of a sum's numbers, and of a share and a proof for each pair of parties."""
        names, length, bits = (record.get(name) for name in ("names", "length", "bits"))
        if not (isinstance(names, list) and isinstance(length, int) and isinstance(bits, int)):
            return 0
        return length * bits // 8 + 128 * (len(names) + 1) ** 2

    @staticmethod
    def count_deviation(task: TrainingSpec) -> float:
        """Return the standard deviation of the noise on each count, which weighs a clip norm or less."""
        return task.noise_multiplier * (math.sqrt(2) if task.moments else 1.0)

    @staticmethod
    def answer(place: Place, content: RecordDict) -> RecordDict:
        """Return a site's reply to a message of a secure sum in which it trains nothing."""
        asked = Request.read(content)
        party = party_of(place, asked.terms)
        match asked.stage:
            case Stage.ANNOUNCE:
                listed = {name: line_of(key) for name, key in party.keys.items()}
                record = Introduction(party.name, listed[party.name], party.announce(), listed).to_record()
            case Stage.AGREE:
                record = signature_record(party.agree(asked.round, asked.survivors))
            case Stage.OPEN:
                record = opened_record(party.open(asked.round, asked.announced, asked.signatures, asked.boxes))
            case _:
                text = "numbers for a secure sum are asked for with a round's training"
                raise Refused(text, code="refused.secure-round")
        remember(place, party)
        return RecordDict({RECORD: record})
