"""A site's part in secure sums: whole numbers of its clients' updates, and its memory as a party.

Each client adds its clipped update to the sum of the hypothesis that it trained, and one clip norm to that hypothesis's
count. Updates are rounded towards zero to whole steps, so no client is longer than its clip norm allows. Noise is whole
steps as well. So the sum, modulo a power of two, is exact, and its noise is what the account says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from umbel.privacy.accounting.guarantee import secure_release
from umbel.privacy.gate import randomness, releases
from umbel.privacy.gate.identity import Identity
from umbel.privacy.gate.runs import Runs
from umbel.privacy.gate.site import Site
from umbel.privacy.mechanisms.base import Matrix, clip
from umbel.privacy.mechanisms.discrete_gaussian import SHORTER, DiscreteGaussian
from umbel.privacy.secure.party import Party, Turn
from umbel.privacy.secure.seeds import text_of
from umbel.privacy.secure.terms import Grid, Terms
from umbel.privacy.secure.wire import Introduction, Request, Stage, opened_record, signature_record
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.errors import Refused
from umbel.protocol.flower import filled
from umbel.protocol.release import Clipping, Release
from umbel.protocol.signatures import line_of
from umbel.protocol.tasks import TrainingSpec

_RECORD = "umbel.secure"


@dataclass(frozen=True)
class SecureSanitiser:
    """A site's numbers for a secure sum: like `umbel.privacy.gate.site_releases.SiteSanitiser`, without the noise."""

    task: TrainingSpec
    hypotheses: Matrix
    grid: Grid

    @classmethod
    def of(cls, site: Site, hypotheses: Arrays, task: TrainingSpec, terms: Terms) -> SecureSanitiser:
        """Return a site's sanitiser for a task; raise `Refused` if the terms do not fit the task."""
        everything = flatten(hypotheses)
        if task.clipping is not Clipping.PUBLIC or task.mechanism != DiscreteGaussian.name:
            text = f'a secure sum needs a public clip norm, and mechanism "{DiscreteGaussian.name}"'
            raise Refused(text, code="refused.secure-terms")
        if task.clip_norm < site.policy.clip_norm_floor:
            # All parties have the same grid, so no site can raise its own clip norm.
            text = f"a secure sum has clip norm {task.clip_norm:g}; this site's clip-norm-floor is"
            raise Refused(f"{text} {site.policy.clip_norm_floor:g}", code="refused.secure-terms")
        check_length(hypotheses, terms)
        if (terms.deviation > 0) is not (task.noise_multiplier > 0):
            raise Refused("terms and task of the secure sum differ in noise", code="refused.secure-terms")
        return cls(task, everything, Grid.of(task.clip_norm, task.noise_multiplier, terms.deviation))

    @property
    def release(self) -> Release:
        """The release with which each participating client is charged."""
        return secure_release(releases.train_release(self.task, self.hypotheses, self.task.clip_norm))

    def summed(self, trained: Arrays, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums of the clients' updates and their counts by hypothesis, (k n + k,), in steps."""
        k, n = self.hypotheses.shape
        sums = np.zeros((k, n), np.int64)
        for block in releases.blocks(len(chosen), n):
            updates = releases.updates_in(trained, block, self.hypotheses[chosen[block]])
            inside = clip(updates, self.task.clip_norm * SHORTER)
            np.add.at(sums, chosen[block], np.trunc(inside / self.grid.step).astype(np.int64))
        counts = np.bincount(chosen, minlength=k).astype(np.int64) * self.grid.weight
        return np.concatenate([sums.ravel(), counts])


def check_length(hypotheses: Arrays, terms: Terms) -> None:
    """Raise `Refused` unless a sum has a number for each parameter of the hypotheses, and one for each of them."""
    sizes = [value.size for value in hypotheses.values()]
    if not sizes or terms.length != sum(sizes) + len(next(iter(hypotheses.values()))):
        raise Refused("the secure sum has another length than the hypotheses", code="refused.secure-terms")


def party_of(site: Site, seed: int | None, state: RecordDict, terms: Terms) -> Party:
    """Return the party that a site is in a run, with what it remembers."""
    identity = Identity.of(site, seed)
    if not site.simulated:
        site.policy.check_terms(terms)
    record = state.get(_RECORD)
    secret, turn = b"", Turn()
    if isinstance(record, ConfigRecord) and record.get("terms") == terms.digest:
        secret, turn = cast(bytes, record["secret"]), _turn(record)
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


def _turn(record: ConfigRecord) -> Turn:
    found: dict[str, Any] = dict(record.items())
    members, survivors = tuple(found["members"]), tuple(found["survivors"])
    return Turn(found["round"], members, found["parties"], found["turn"], survivors, found["opened"])


def _random(site: Site, seed: int | None, round: int) -> Callable[[int], bytes]:
    """Return a source of a party's random bytes.

    With `insecure-seed` too, a site draws its secrets from the operating system: others rely on its share of the noise.
    """
    seed = seed if site.simulated else None
    return next(randomness.noise(seed, round, [site.first], "secure sum")).bytes
