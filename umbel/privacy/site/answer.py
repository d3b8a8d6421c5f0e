"""The gate: every result of a client leaves its node through here (Algorithm 2).

`train` and `report` each answer a task. The task is checked against the site's policy and priced, and the clients
within their budgets are charged. Each of them then computes within its time (`umbel.privacy.site.work`), and the task's
channel returns what may leave of that (`umbel.privacy.channels`). A client over budget computes nothing, no charge is
refunded, and any failure of the gate itself raises, so that nothing is released.

Two translators read messages for the gate and fail closed: `umbel.privacy.site.umbel_app` for a round's message, and
`umbel.mods.flower_mod` for any other Flower app.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from logging import INFO, WARNING
from typing import Protocol, TypeVar

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from umbel.privacy import channels
from umbel.privacy.accounting.guarantee import amount, pure_cost
from umbel.privacy.channels import AtSite, Flags, Outgoing, Place, Sanitiser
from umbel.privacy.mechanisms import choice, randomness
from umbel.privacy.site.charges import Charge
from umbel.privacy.site.config import Site
from umbel.privacy.site.entry import Entry
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.policy import Role
from umbel.privacy.site.refusals import check_hypotheses
from umbel.privacy.site.runs import Runs
from umbel.privacy.site.totals import Totals
from umbel.privacy.site.work import Places, Results, Work, computed
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientInDataset, ClientOnNode
from umbel.protocol.errors import Refused
from umbel.protocol.log import log
from umbel.protocol.release import Release
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
from umbel.protocol.words import count_of

Task = TypeVar("Task", TrainingSpec, EvaluationSpec)


class Clients(Protocol):
    """The clients of a node, as the gate calls them."""

    def check(self, task: TrainingSpec | EvaluationSpec, hypotheses: Arrays) -> Sequence[ClientOnNode]:
        """Return the numbers under which a task's clients are charged, each in its place.

        Raises if they cannot carry out the task, independently of their data.
        """

    def train(self, task: TrainingSpec, hypotheses: Arrays, assigned: NDArray[np.int64]) -> Work:
        r"""Return how the clients of a task train from the hypotheses, each (k, \*shape).

        Results are the hypothesis from which each client started, (clients,), and the parameters that it trained, each
        (clients, \*shape) in float32. A client starts from the hypothesis in `assigned` (clients,), or for -1 from the
        one that fits it best.
        """

    def score(self, task: EvaluationSpec, hypotheses: Arrays) -> Work:
        """Return how the clients of a task score their best hypothesis: loss and metric, (clients, 2)."""


@dataclass(frozen=True)
class Incoming:
    r"""A run's message at a site.

    Attributes
    ----------
    run : str
        Flower's number of the run, for the ledger.
    seed : int or None
        Seed of all noise; None for the operating system's entropy.
    state : RecordDict
        The node's memory of the run, which never leaves it.
    entry : Entry
        The message's line in the site's log.
    clients : Clients
    hypotheses : dict of ndarray of float32, each (k, \*shape)
        Where clients start; empty if no client is asked to train.
    most, most_reports : float
        Maximum number of a client's releases in this run, and of its reports with noise.

    Raises
    ------
    Refused
        If the hypotheses are not finite float32 arrays with one common leading axis, of a length that the site accepts.
    """

    site: Site
    run: str
    seed: int | None
    state: RecordDict
    entry: Entry
    clients: Clients
    hypotheses: Arrays = field(default_factory=dict)
    most: float = math.inf
    most_reports: float = math.inf

    def __post_init__(self) -> None:
        if self.hypotheses:
            check_hypotheses(self.hypotheses, self.site.policy)

    @cached_property
    def ledger(self) -> Totals | Journal:
        """The totals of what clients were charged, opened once."""
        return Totals(self.state) if self.site.ledger_path is None else Journal.of(self.site)

    def open_channel(self, channel: str, content: RecordDict | None = None) -> AtSite:
        """Return a channel for this message, or for its content; raise `Refused` if it takes no part in it."""
        place = place_of(self.site, self.seed, self.state)
        found = channels.load(channel)
        return found.at_site(found, place, self.hypotheses, content or RecordDict())


def place_of(site: Site, seed: int | None, state: RecordDict) -> Place:
    """Return a site in a run, as channels see it."""
    return Place(site, seed, state, lambda digest, use: Runs.of(site).first_of(digest, use))


def train(message: Incoming, task: TrainingSpec, channel: AtSite | None = None) -> Outgoing:
    """Return what the asked training clients release by a channel, by default one opened for this task alone.

    Nothing is drawn before the charge: a crash may waste budget, but never hides a release.

    Raises
    ------
    Refused
        If the task violates the policy, or too few clients are within budget. Then no client is charged.
    """
    site, hypotheses, seed = message.site, message.hypotheses, message.seed
    k = len(next(iter(hypotheses.values())))
    site.policy.check(task, k)
    sanitiser: Sanitiser = (channel or message.open_channel(task.channel)).sanitiser(task)
    site.check_priced(sanitiser.release)
    numbers = message.clients.check(task, hypotheses)
    paid, asked, ids = _charge_clients(message, "train", sanitiser, task, numbers, message.most, sanitiser.fewest)
    if not paid.any():
        raise _over_budget(sanitiser.release, sanitiser.fewest)
    if site.insecure_seed:
        log(WARNING, "insecure-seed is set: the server knows the seed of the noise and can subtract it")
    elif not site.simulated:
        log(INFO, "the operating system draws the noise; the run's seed does not affect it")
    assigned = np.full(len(ids), choice.OWN, np.int64)
    if sanitiser.explore:
        assigned = choice.at_random(sanitiser.explore, k, randomness.noise_sources(seed, task.round, ids, "choice"))
    work = message.clients.train(asked, hypotheses, assigned)
    shapes = {name: value.shape[1:] for name, value in hypotheses.items()}
    releases = sanitiser.on_gpu(ids, shapes) if work.on_gpu else None
    if work.on_gpu and releases:
        there = work.on_gpu
        work = replace(work, compute=lambda places: there(places, releases))
    chosen, *arrays = _train_clients(message, asked, assigned, work)
    return (releases or sanitiser).leave(ids, dict(zip(hypotheses, arrays, strict=True)), chosen, paid)


def report(message: Incoming, task: EvaluationSpec, channel: AtSite | None = None) -> Outgoing:
    """Return the loss and metric that the asked clients report, by a channel as in `train`.

    Raises
    ------
    Refused
        If clients of the site do not report, or not as the task asks. Then no client is charged.
    """
    site, policy, hypotheses = message.site, message.site.policy, message.hypotheses
    if not site.simulated:
        # Count before any client reports: a crash may waste a count, but never hides a report.
        Runs.of(site).count_evaluation(message.run, policy)
    numbers = message.clients.check(task, hypotheses)
    if policy.role is Role.TRAIN and not policy.trainers_report:
        text = "training clients of this site do not report; give reports a noise to let them"
        raise Refused(text, code="refused.no-reports")
    sanitiser: Sanitiser = (channel or message.open_channel(task.channel)).sanitiser(task)
    paid, asked, ids = _charge_clients(message, "evaluate", sanitiser, task, numbers, message.most_reports)
    scores = np.zeros((0, 2))
    if ids:
        work, hides = message.clients.score(asked, hypotheses), policy.report_noise > 0
        (scores,) = computed(site, len(ids), work, _no_scores, hides=hides)
    return sanitiser.leave(ids, scores, np.zeros(0, np.int64), paid)


def _charge_clients(
    message: Incoming,
    what: str,
    sanitiser: Sanitiser,
    task: Task,
    numbers: Sequence[ClientOnNode],
    most: float,
    at_least: int = 1,
) -> tuple[Flags, Task, list[ClientInDataset]]:
    """Charge the asked clients within their budgets, under their numbers.

    Return a flag for each asked client, the task of the charged ones alone, and their numbers in the dataset. None is
    charged if there are fewer than `at_least`. A client that has made `most` such releases in this run makes no other.
    Without a release nothing has a price.
    """
    site, ledger, ids = message.site, message.ledger, message.site.client_ids(numbers)
    release = sanitiser.release
    if len(ids) != len(task.clients):
        raise Refused("the node does not say which clients are charged", code="refused.result")
    if release is None:  # without an intact ledger, also what has no price stays here
        return np.ones(len(ids), bool), task, ids
    if site.insecure_seed:
        release = release.without_noise()  # the server knows the seed, and can subtract the noise
    charge = Charge(message.run, task.round, release)
    paid = np.array(ledger.charge(charge, ids, site.limits, at_least, most))
    message.entry.charge(int(paid.sum()))
    if paid.all():
        return paid, task, ids
    if paid.any() or at_least == 1:
        unpaid = f"{(~paid).sum()} of {len(paid)} clients are over budget"
        if most < math.inf:
            unpaid += f", or took part {most:g} times, as often as this run may ask them"
        message.entry.refuse(what, Refused(unpaid, code="refused.budget"))
    return paid, replace(task, clients=tuple(compress(task.clients, paid))), list(compress(ids, paid))


def _train_clients(message: Incoming, task: TrainingSpec, assigned: NDArray[np.int64], work: Work) -> Results:
    """Let charged clients train; return the hypothesis that each started from, and what it trained."""
    hypotheses = message.hypotheses
    k = len(next(iter(hypotheses.values())))
    if work.rows != task.row_privacy:
        raise Refused("the clients do not train with the task's guarantee for rows", code="refused.result")

    def no_update(places: Places) -> Results:
        start = np.maximum(assigned[places], 0)
        if work.without_rows is not None and len(start):
            # The noise of training is all that hides a row: without it, the release would tell who failed.
            return work.without_rows(places)
        return [start, *(np.full((len(start), *value.shape[1:]), np.nan, np.float32) for value in hypotheses.values())]

    def check(places: Places, results: Results) -> None:
        chosen, told = results[0], assigned[places]
        if not 0 <= chosen.min() <= chosen.max() < k or ((told != choice.OWN) & (chosen != told)).any():
            raise Refused("clients trained another hypothesis than the gate assigned", code="refused.result")

    results = computed(message.site, len(task.clients), work, no_update, check)
    work.keep(results)
    return results


def _no_scores(places: Places) -> Results:
    """Return loss and metric of clients that could not compute them: as of a model that diverged."""
    return [np.full((len(places) if isinstance(places, list) else 0, 2), np.inf)]


def _over_budget(release: Release, at_least: int) -> Refused:
    """Return why no client takes part: a release's price, and the command that shows past spending."""
    if at_least > 1:
        return Refused(
            f"fewer than {at_least} asked clients are within budget for this round (min-clients); none is charged",
            code="refused.min-clients",
        )
    pure, paper = pure_cost(release), release.paper_spend(1)
    prices = [f"a pure epsilon of {amount(pure)}"] if math.isfinite(pure) else []
    prices += [f"{amount(paper)} of the paper's budget"] if math.isfinite(paper) else []
    if release.by_rows:
        noise, rate = release.row_noise_multiplier, release.row_rate
        prices += [f"for a row {count_of(release.row_steps, 'step')} with noise {noise:g} at rate {rate:g}"]
    if not prices:
        prices = [f"an epsilon at a delta, by {release.mechanism} noise of {release.noise_multiplier:g} clip norms"]
    return Refused(
        f"no asked client is within budget for this round, which costs {', and '.join(prices)}; limits of the site are "
        "lower or used up, or its clients released without a guarantee before: see umbel site journal",
        code="refused.budget",
    )
