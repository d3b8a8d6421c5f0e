"""A site's part in secure sums: whole numbers of its clients' updates, and its memory as a party.

Each client adds its clipped update to the sum of the hypothesis that it trained, and one clip norm to that hypothesis's
count. Updates are rounded to whole steps, and then are no longer than the clip norm allows. Noise is whole
steps as well. So the sum, modulo a power of two, is exact, and its noise is what the account says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from umbel.privacy.accounting.guarantee import secure_release, secure_report
from umbel.privacy.gate import randomness, releases
from umbel.privacy.gate.runs import Runs
from umbel.privacy.gate.site import Site
from umbel.privacy.mechanisms.base import Matrix
from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian, to_grid
from umbel.privacy.secure.layout import REPORTS, Layout, Steps
from umbel.privacy.secure.party import Masked, Party, Turn
from umbel.privacy.secure.seeds import text_of
from umbel.privacy.secure.terms import Grid, Terms
from umbel.privacy.secure.wire import Introduction, Request, Stage, opened_record, signature_record
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


@dataclass(frozen=True)
class SecureSanitiser:
    """A site's numbers for a secure sum: like `umbel.privacy.gate.releases.SiteSanitiser`, without the noise.

    `numbers` are those of the sum about training, to be set.
    """

    task: TrainingSpec
    hypotheses: Matrix
    grid: Grid
    numbers: Steps

    @classmethod
    def of(cls, site: Site, hypotheses: Arrays, task: TrainingSpec, terms: Terms, numbers: Steps) -> SecureSanitiser:
        """Return a site's sanitiser for a task; raise `Refused` if the terms do not fit the task."""
        releases.check_hidden(site, task)
        everything = flatten(hypotheses)
        if task.release_by is not ReleaseBy.SECURE:
            raise not_in_a_sum()
        if task.clipping is not Clipping.PUBLIC or task.mechanism != DiscreteGaussian.name:
            text = f'a secure sum needs a public clip norm, and mechanism "{DiscreteGaussian.name}"'
            raise Refused(text, code="refused.secure-terms")
        if task.clip_norm < site.policy.clipping.floor:
            # All parties have the same grid, so no site can raise its own clip norm.
            text = f"a secure sum has clip norm {task.clip_norm:g}; the floor of this site's clipping is"
            raise Refused(f"{text} {site.policy.clipping.floor:g}", code="refused.secure-terms")
        if (terms.deviation > 0) is not (task.noise_multiplier > 0):
            raise Refused("terms and task of the secure sum differ in noise", code="refused.secure-terms")
        return cls(task, everything, Grid.of(task.clip_norm, task.noise_multiplier, terms.deviation), numbers)

    @property
    def layout(self) -> Layout:
        """The numbers about training."""
        k, n = self.hypotheses.shape
        return Layout(k, n, self.task.moments)

    @property
    def release(self) -> Release:
        """The release with which each participating client is charged."""
        k, n = self.hypotheses.shape
        return secure_release(self.task.release(n, k, self.task.clip_norm))

    @property
    def explore(self) -> float:
        """See `umbel.privacy.gate.releases.SiteSanitiser.explore`."""
        return self.task.explore

    def leave(self, seed: int | None, clients: releases.Ids, trained: Arrays, chosen: Labels) -> releases.Released:
        """Add the updates of charged clients to the sum, in which alone they leave."""
        self.numbers[:] = self.summed(trained, chosen)
        return releases.Released({})

    def summed(self, trained: Arrays, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the clients' sums by hypothesis, without reports, in steps (`umbel.privacy.secure.layout`)."""
        (k, n), layout, weight = self.hypotheses.shape, self.layout, self.grid.weight
        sums, squares = np.zeros((k, n), np.int64), np.zeros((k, layout.squares), np.int64)
        longest = self.task.clip_norm * layout.inside(weight)
        for block in releases.blocks(len(chosen), max(n, layout.squares)):
            updates = releases.updates_in(trained, block, self.hypotheses[chosen[block]])
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
class SecureReports:
    """A site's part of a secure sum of loss and metric; `numbers` are those of the sum, to be set."""

    task: EvaluationSpec
    grid: Grid
    numbers: Steps

    @classmethod
    def of(cls, site: Site, task: EvaluationSpec, terms: Terms, numbers: Steps) -> SecureReports:
        """Return a site's sums of reports for a task; raise `Refused` if the task permits none."""
        noise, least = task.report_noise_multiplier, site.policy.report_noise
        if not terms.deviation > 0:
            raise Refused("reports in a secure sum need noise, and its terms have none", code="refused.secure-terms")
        if noise < least:
            text = f"the server asks for reports with noise multiplier {noise:g}; this site accepts no less than"
            raise Refused(f"{text} {least:g}", code="refused.noise")
        return cls(task, Grid.of_reports(task.report_bound, noise, terms.deviation), numbers)

    @property
    def release(self) -> Release:
        """The release with which each reporting client is charged."""
        return secure_report(self.task.report_noise_multiplier, self.task.report_bound)

    def leave(self, seed: int | None, round: int, clients: releases.Ids, scores: Matrix) -> Matrix:
        """Add the loss and metric (m, 2) of charged clients to the sum; return NaN, since nothing else leaves."""
        self.numbers[:] = self.summed(scores.T)
        return np.full_like(scores, np.nan)

    def summed(self, scores: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the sums (2,) of clients' loss and metric (2, clients), in steps.

        A value that is no number counts as the bound. The bound has whole steps, rounded down, and no value has more.
        So any two reports lie within the diagonal of the square.
        """
        bound = self.task.report_bound
        inside = np.clip(np.nan_to_num(scores, nan=bound), 0, bound)
        steps = np.minimum(np.rint(inside / self.grid.step), math.floor(self.grid.weight)).astype(np.int64)
        return np.asarray(steps.sum(axis=1))


class SecureSum:
    """The site's part of a secure sum, to which its clients may add their updates and their reports.

    `paid` and `reported` are flags of the asked clients that are in the sum; None until there are any. For the
    parameters see `umbel.privacy.gate.answer.Incoming`; `content` is the message's.

    Raises
    ------
    Refused
        If the site would not enter this sum. Then no client is charged.
    """

    def __init__(
        self, site: Site, seed: int | None, state: RecordDict, hypotheses: Arrays, content: RecordDict
    ) -> None:
        asked, training, evaluation = Request.read(content), training_in(content), evaluation_in(content)
        if asked.stage is not Stage.MASK:
            raise not_in_a_sum()
        # Before the memory for so many numbers is taken.
        self._layout = layout_of(hypotheses, asked.terms, training, evaluation)
        self._site, self._state, self._asked = site, state, asked
        self._party = party_of(site, seed, state, asked.terms)
        self._party.check(asked.round, asked.announced)
        self._numbers = np.zeros(asked.terms.length, np.int64)
        self._alone = training is None and not (evaluation is not None and evaluation.summed)
        self.paid: NDArray[np.bool_] | None = None
        self.reported: NDArray[np.bool_] | None = None

    @property
    def leaves(self) -> bool:
        """Whether a task that was asked for is in the sum, or none was, so that the site adds masks alone."""
        return self._alone or self.paid is not None or self.reported is not None

    def updates(self, hypotheses: Arrays, task: TrainingSpec) -> SecureSanitiser:
        """Return what adds training clients' updates."""
        self._check_round(task)
        numbers = self._numbers[: self._layout.updates]
        return SecureSanitiser.of(self._site, hypotheses, task, self._asked.terms, numbers)

    def reports(self, task: EvaluationSpec) -> SecureReports:
        """Return what adds validation clients' loss and metric."""
        self._check_round(task)
        return SecureReports.of(self._site, task, self._asked.terms, self._numbers[-REPORTS:])

    def masked(self) -> Masked:
        """Return what leaves: all that was added, with the site's share of the noise, and masks."""
        masked = self._party.mask(self._asked.round, self._asked.announced, self._numbers)
        remember(self._site, self._state, self._party)
        return masked

    def _check_round(self, task: TrainingSpec | EvaluationSpec) -> None:
        if task.round != self._asked.round:
            raise not_in_a_sum()


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


def party_of(site: Site, seed: int | None, state: RecordDict, terms: Terms) -> Party:
    """Return the party that a site is in a run, with what it remembers."""
    identity = Identity.of(site, seed)
    if not site.simulated:
        site.policy.check_terms(terms)
    record = state.get(_RECORD)
    secret, turn = b"", Turn()
    if isinstance(record, ConfigRecord) and record.get("terms") == terms.digest:
        kept: dict[str, Any] = dict(record.items())
        members, survivors = tuple(kept["members"]), tuple(kept["survivors"])
        turn = Turn(kept["round"], members, kept["parties"], kept["turn"], survivors, kept["opened"])
        secret = kept["secret"]
    secret = secret or _random(site, seed, 0)(32)
    return Party(terms, identity.name, identity.keys, identity.sign, secret, turn, _random(site, seed, turn.round + 1))


def remember(site: Site, state: RecordDict, party: Party) -> None:
    """Keep what a party has to remember; called before its message leaves.

    Raises
    ------
    Refused
        If the site said something else in this round before.
    """
    turn = party.turn
    if turn.round and not site.simulated:
        _say_once(site, party)
    entries = {
        "terms": party.terms.digest, "secret": party.secret, "round": turn.round, "members": list(turn.members),
        "parties": turn.parties, "turn": turn.secret, "survivors": list(turn.survivors), "opened": turn.opened,
    }  # fmt: skip
    filled(state, {_RECORD: filled(ConfigRecord(), entries)})


def _say_once(site: Site, party: Party) -> None:
    """Note in the site's store, on disk, what a party says in a round; raise `Refused` if it said something else.

    Flower keeps the party's memory, but only after a reply has left. So the next message may find an older memory.
    """
    turn, runs = party.turn, Runs.of(site)
    for what, said in (("mask", turn.secret), ("agree", text_of(turn.survivors) if turn.survivors else b"")):
        digest = sha256(text_of("umbel secure", what, party.public.hex(), turn.round)).hexdigest()
        if said and runs.first_of(digest, (own := sha256(said).hexdigest())) != own:
            text = f"this site has sent something else in round {turn.round} of this secure sum"
            raise Refused(text, code="refused.secure-round")


def reply(site: Site, seed: int | None, state: RecordDict, asked: Request) -> ConfigRecord:
    """Return a site's reply to a message of a secure sum, in which it trains nothing."""
    party = party_of(site, seed, state, asked.terms)
    match asked.stage:
        case Stage.ANNOUNCE:
            listed = {name: line_of(key) for name, key in party.keys.items()}
            found = Introduction(party.name, listed[party.name], party.announce(), listed).to_record()
        case Stage.AGREE:
            found = signature_record(party.agree(asked.round, asked.survivors))
        case Stage.OPEN:
            found = opened_record(party.open(asked.round, asked.announced, asked.signatures, asked.boxes))
        case _:
            raise Refused("numbers for a secure sum are asked for with a round's training", code="refused.secure-round")
    remember(site, state, party)
    return found


def _random(site: Site, seed: int | None, round: int) -> Callable[[int], bytes]:
    """Return a source of a party's random bytes.

    With `insecure-seed` too, a site draws its secrets from the operating system: others rely on its share of the noise.
    """
    seed = seed if site.simulated else None
    return next(randomness.noise(seed, round, [site.first], "secure sum")).bytes


@dataclass(frozen=True)
class Identity:
    """A site among others.

    Attributes
    ----------
    name : str
        Its name in the list.
    keys : mapping of str to PublicKey
        The listed sites' keys, its own included.
    sign : callable
        Returns the site's signature of a text.
    """

    name: str
    keys: Mapping[str, PublicKey]
    sign: Callable[[bytes], bytes] = field(repr=False)

    @classmethod
    def of(cls, site: Site, seed: int | None) -> Identity:
        """Return the identity of a site; `Refused` if it lists no sites, `SiteError` if not itself."""
        if site.simulated:
            key = simulated_key(seed, site.first)
            return cls(simulated_name(site.first), simulated_keys(seed, site.step), key.sign)
        policy = site.policy
        if not (policy.parties and policy.party_key):
            text = "this site lists no sites to work with: set parties and party-key"
            raise Refused(text, code="refused.secure-parties")
        keys = {name: public_key(name, line) for name, line in policy.party_keys.items()}
        path = Path(policy.party_key).expanduser()
        own = line_of(public_half(path))
        for name, key_of in keys.items():
            if line_of(key_of) == own:
                return cls(name, keys, partial(signed, key=path))
        raise SiteError(f"parties does not list the key of {path}; add this site itself", code="site.not-a-party")
