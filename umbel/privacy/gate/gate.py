"""The gate: every result of a client leaves its node through here (Algorithm 2).

A `Passage` takes one message through the gate of its site. It checks the task against the site's policy, charges the
ledger, draws the randomness that hides each client's choice, lets the clients train, adds the noise, and returns the
releases. A client over budget does not train. Any failure raises, and then nothing is released.

Two adapters, each a Flower Mod, translate messages for it and fail closed: `umbel.privacy.gate.own_app` for a round's
message, and `umbel.mods.gate` for any other Flower app.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from logging import INFO, WARNING
from typing import Any, Protocol, TypeVar

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from umbel.privacy.accounting.guarantee import amount, pure_cost
from umbel.privacy.gate import randomness
from umbel.privacy.gate.charges import Account, Charge
from umbel.privacy.gate.entry import Entry
from umbel.privacy.gate.journal import Journal
from umbel.privacy.gate.refusals import check_hypotheses
from umbel.privacy.gate.releases import Sanitiser, SiteSanitiser
from umbel.privacy.gate.runs import Runs
from umbel.privacy.gate.secure_sums import (
    SecureReports,
    SecureSanitiser,
    layout_of,
    party_of,
    remember,
)
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.totals import Totals
from umbel.privacy.mechanisms import choice
from umbel.privacy.mechanisms.laplace import Laplace
from umbel.privacy.mechanisms.sanitise import check_noise, round_to_grid, sanitise
from umbel.privacy.secure.layout import REPORTS
from umbel.privacy.secure.party import Masked
from umbel.privacy.secure.wire import Request, Stage
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.cores import cores
from umbel.protocol.errors import Refused
from umbel.protocol.flower import log
from umbel.protocol.release import Clipping, Release, ReleaseBy, RowPrivacy, report_release
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
from umbel.protocol.words import count_of

C = TypeVar("C", bound=int)


@dataclass(frozen=True)
class LocalResult:
    r"""Results of clients' training, in the order asked. They leave the node only after sanitisation.

    `arrays` has the shared parameters, each (clients, \*shape), and `chosen` (clients,) the hypothesis from which each
    client started. `rows` is how their training hid each row, as the handler did it; None if it did not.
    """

    arrays: Arrays
    chosen: NDArray[np.int64]
    rows: RowPrivacy | None = None


@dataclass(frozen=True)
class LocalReport:
    """Clients' reports, in the order asked: loss and metric (2, clients), still without noise.

    `clients` are their numbers. Reports of clients that also train (`trains`) always need noise.
    """

    scores: NDArray[np.float64]
    clients: tuple[ClientOnNode, ...]
    trains: bool


class Clients(Protocol):
    """The clients behind the gate."""

    def check(self, task: TrainingSpec) -> None:
        """Raise if the clients cannot carry out a task, independently of their data; called before the charge."""

    def train(self, task: TrainingSpec, assigned: NDArray[np.int64]) -> LocalResult:
        """Train each client from the hypothesis assigned to it, or for -1 from the one that fits it best."""

    def report(self, task: EvaluationSpec) -> LocalReport:
        """Score each client's best hypothesis."""


@dataclass(frozen=True)
class Sanitised:
    r"""Releases of clients.

    Attributes
    ----------
    releases : dict of ndarray, each (m, \*shape)
        Those of the charged clients, in the order asked.
    paid : ndarray of bool
        A flag for each asked client: whether it was charged, and so released.
    choices : list of int, or None
        Those of the charged clients, if the task asks for them (`TrainingSpec.disclose_choice`).
    step : float
        See `umbel.privacy.gate.releases.Sanitiser.step`; 0 within a simulation.
    """

    releases: Arrays
    paid: NDArray[np.bool_]
    choices: list[int] | None
    step: float


@dataclass(frozen=True)
class SanitisedSums:
    r"""A site's release: sums (k, \*shape) of updates and counts (k,) by hypothesis, and a flag for each client."""

    sums: Arrays
    counts: list[float]
    paid: NDArray[np.bool_]


@dataclass(frozen=True)
class Passage:
    r"""One message's way through the gate of its site.

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

    def train(self, task: TrainingSpec) -> Sanitised | SanitisedSums:
        """Return the releases of the asked training clients, or their site's release."""
        match task.release_by:
            case ReleaseBy.CLIENT:
                return self._by_client(task, self._checked(task))
            case ReleaseBy.SITE:
                self._checked(task)
                return self._by_site(task)
            case ReleaseBy.SECURE:
                raise Refused("the message says nothing about its secure sum", code="refused.secure-terms")

    def _checked(self, task: TrainingSpec) -> int:
        """Return k; raise `Refused` if task or hypotheses violate the policy."""
        k = len(next(iter(self.hypotheses.values())))
        self.site.policy.check(task, k)
        return k

    def _by_client(self, task: TrainingSpec, k: int) -> Sanitised:
        """Return the release of each client within its budget."""
        site, seed = self.site, self.seed
        # Validate the task before charging the ledger.
        sanitiser = Sanitiser.of(site, self.hypotheses, task)
        paid, paying = self._charge_for_training(task, sanitiser.release)
        assigned = np.full(len(paying), choice.OWN, np.int64)
        if sanitiser.release.choice_epsilon > 0:
            sources = randomness.noise(seed, task.round, site.client_ids(paying), "choice")
            assigned = choice.draw(sanitiser.release.choice_epsilon, k, sources)
        trained, chosen = self._trained(task, paying, assigned)
        sources = randomness.noise(seed, task.round, site.client_ids(paying))
        # A seed's sources share one generator, so only one client at a time can draw.
        releases = sanitiser.sanitised(trained, chosen, sources, threads=cores() if seed is None else 1)
        choices = chosen.tolist() if task.disclose_choice else None
        # Quantise only when the release crosses a network.
        step = 0.0 if site.simulated else sanitiser.step
        return Sanitised(releases, paid, choices, step)

    def _by_site(self, task: TrainingSpec) -> SanitisedSums:
        """Return the sums over the clients within their budgets; each of these is charged the whole price."""
        site = self.site
        sanitiser = SiteSanitiser.of(site, self.hypotheses, task)
        paid, paying = self._charge_for_training(task, sanitiser.release, site.policy.min_clients)
        # The noise on the counts hides each client's choice; exploring another hypothesis only helps learning.
        sources = randomness.noise(self.seed, task.round, site.client_ids(paying), "choice")
        assigned = choice.at_random(task.explore, len(sanitiser.hypotheses), sources)
        trained, chosen = self._trained(task, paying, assigned)
        sources = randomness.noise(self.seed, task.round, [site.first], "site")
        return SanitisedSums(*sanitiser.sanitised(trained, chosen, sources), paid)

    def evaluate(self, task: EvaluationSpec) -> NDArray[np.float64]:
        """Return loss and metric (2, clients) of the asked clients, with noise unless the site reports exactly."""
        if task.summed:
            raise Refused("the message says nothing about its secure sum", code="refused.secure-terms")
        policy, scores = self.site.policy, np.full((2, len(task.clients)), np.nan)
        priced = not policy.trainers_report and policy.report_noise > 0
        able, some = self._able_to_report(task, self._report if priced else None)
        if some.clients:
            reported = self._reported(some)
            exactly = reported.trains is False and policy.reports_exactly
            scores[:, able] = reported.scores if exactly else self._noisy_reports(reported, some)
        return scores

    def _able_to_report(
        self, task: EvaluationSpec, release: Release | None
    ) -> tuple[NDArray[np.bool_], EvaluationSpec]:
        """Return a flag for each asked client whose budget allows `release`, and the task for these.

        The gate computes nothing on the data of others.
        """
        # Without an intact ledger, also what has no price stays here.
        site, ledger, able = self.site, self._ledger, np.ones(len(task.clients), bool)
        if not site.simulated:
            # Count before any client reports: a crash may waste a count, but never hides a report.
            Runs.of(site).count_evaluation(self.run, site.policy)
        if release is not None:
            able = np.array(ledger.able(release, site.client_ids(task.clients), site.limits))
        self._note_unpaid("evaluate", able)
        return able, task if able.all() else replace(task, clients=tuple(compress(task.clients, able)))

    def _reported(self, task: EvaluationSpec) -> LocalReport:
        """Return what clients report; it may not leave like this."""
        reported = self.clients.report(task)
        if not _is_array(reported.scores, np.float64, (2, len(task.clients))):
            raise Refused("the handler does not return loss and metric of each client", code="refused.result")
        return reported

    def _charge_for_training(
        self, task: TrainingSpec, release: Release, at_least: int = 1
    ) -> tuple[NDArray[np.bool_], tuple[ClientOnNode, ...]]:
        """Charge the asked clients within their budgets; return a flag for each asked client, and the charged ones.

        Nothing is drawn before the charge: a crash may waste budget, but never hides a release.

        Raises
        ------
        Refused
            If fewer than `at_least` are within budget; then none is charged.
        """
        self.site.check_priced(release)
        self.clients.check(task)
        paid = self._charge("train", release, task.round, task.clients, at_least, self.most)
        paying = tuple(compress(task.clients, paid))
        if not paying and at_least > 1:
            raise Refused(
                f"fewer than {at_least} asked clients are within budget for this round (min-clients); none is charged",
                code="refused.min-clients",
            )
        if not paying:
            raise Refused(f"no asked client is within budget for this round, {_price(release)}", code="refused.budget")
        if self.site.insecure_seed:
            log(WARNING, "insecure-seed is set: the server knows the seed of the noise and can subtract it")
        elif not self.site.simulated:
            log(INFO, "the operating system draws the noise; the run's seed does not affect it")
        return paid, paying

    def account(self, client: ClientOnNode) -> Account:
        """Return what a client has released."""
        return self._ledger.account(self.site.client_ids((client,))[0])

    def _note_unpaid(self, what: str, paid: NDArray[np.bool_]) -> None:
        """Note in the site's log how many clients are over budget, if any."""
        if not paid.all():
            unpaid = f"{(~paid).sum()} of {len(paid)} clients are over budget"
            if (most := self.most if what == "train" else self.most_reports) < math.inf:
                unpaid += f", or took part {most:g} times, as often as this run may ask them"
            self.entry.refuse(what, Refused(unpaid, code="refused.budget"))

    @cached_property
    def _ledger(self) -> Totals | Journal:
        """What clients were charged, opened once for each message."""
        return Totals(self.state) if self.site.ledger_path is None else Journal.of(self.site)

    @property
    def _report(self) -> Release:
        """The charge for a client that reports with noise, by itself or in a mean."""
        policy = self.site.policy
        return report_release(policy.report_noise, policy.report_bound)

    def _charge(
        self,
        what: str,
        release: Release,
        round: int,
        clients: tuple[ClientOnNode, ...],
        at_least: int = 1,
        most: float = math.inf,
    ) -> NDArray[np.bool_]:
        """Charge clients and return a flag for each; charge none if fewer than `at_least` are within budget.

        A client that has made `most` such releases in this run is not charged, and makes no other.
        """
        if self.site.insecure_seed:
            release = release.without_noise()  # the server knows the seed, and can subtract the noise
        charge, ids = Charge(self.run, round, release), self.site.client_ids(clients)
        paid = np.array(self._ledger.charge(charge, ids, self.site.limits, at_least, most))
        self.entry.charge(int(paid.sum()))
        if paid.any() or at_least == 1:
            self._note_unpaid(what, paid)
        return paid

    def _trained(
        self, task: TrainingSpec, clients: tuple[ClientOnNode, ...], assigned: NDArray[np.int64]
    ) -> tuple[Arrays, NDArray[np.int64]]:
        """Train clients from their assigned or chosen hypotheses; return the results, and each client's hypothesis."""
        asked = task if clients == task.clients else replace(task, clients=clients)
        trained = self.clients.train(asked, assigned)
        _check_result(trained, self.hypotheses, len(clients))
        if trained.rows != task.row_privacy:
            raise Refused("the handler did not train with the task's guarantee for rows", code="refused.result")
        if ((assigned != choice.OWN) & (trained.chosen != assigned)).any():
            raise Refused("the handler trained another hypothesis than the gate assigned", code="refused.result")
        return trained.arrays, trained.chosen

    def _noisy_reports(self, reported: LocalReport, task: EvaluationSpec) -> NDArray[np.float64]:
        """Charge clients for their reports; return loss and metric (2, clients), clipped and with noise.

        Clients that train report separately. For others the site reports their mean, so that noise is drawn once. Both
        are NaN for clients over budget. Loss and metric lie in a square whose diagonal is the radius, so the guarantee
        holds between any two reports of one client, alone or in a sum.
        """
        site, own = self.site, _reporting(reported)
        bound, release = site.policy.report_bound, self._report
        if not release.noise_multiplier > 0:
            raise Refused(_NO_REPORTS, code="refused.no-reports")
        radius, mechanism = math.sqrt(2) * bound, Laplace(release.noise_multiplier)
        check_noise(mechanism, 2, radius)
        paid = self._charge("evaluate", release, task.round, own, most=self.most_reports)
        scores = np.full_like(reported.scores, np.nan)
        if not paid.any():
            return scores
        clipped = np.clip(np.nan_to_num(reported.scores, nan=bound), 0, bound).T[paid]
        if reported.trains is not False:
            sources = randomness.noise(self.seed, task.round, compress(site.client_ids(own), paid), "report")
            # Centred, because the mechanism clips to the radius around 0.
            noised, many = sanitise(mechanism, clipped - bound / 2, radius, Clipping.PUBLIC, sources) + bound / 2, 1
        else:
            sources = randomness.noise(self.seed, task.round, [site.first], "mean report")
            noise = mechanism.noise([2], np.array([[radius]]), sources)
            noised, many = clipped.sum(axis=0) + noise, len(clipped)
        finest = float(np.spacing(np.float32(bound * many)))
        scores[:, paid] = round_to_grid(noised, mechanism.deviation(2) * radius, finest).T / many
        return scores


class Share:
    """The site's part of a secure sum, to which its clients may add their updates and their reports.

    Each client within its budget is charged, also if the sum fails.

    Parameters
    ----------
    passage : Passage
        The way of the message that asks for it.
    asked : Request
        The part of the message about the sum.
    training, evaluation : TrainingSpec or None, EvaluationSpec or None
        The tasks that the message asks for.

    Raises
    ------
    Refused
        If the site would not enter this sum. Then no client is charged.
    """

    def __init__(
        self, passage: Passage, asked: Request, training: TrainingSpec | None, evaluation: EvaluationSpec | None
    ) -> None:
        if asked.stage is not Stage.MASK:
            raise Refused("the message says nothing about its secure sum", code="refused.secure-terms")
        # Before the memory for so many numbers is taken.
        self._layout = layout_of(passage.hypotheses, asked.terms, training, evaluation)
        self._passage, self._asked = passage, asked
        self._party = party_of(passage.site, passage.seed, passage.state, asked.terms)
        self._party.check(asked.round, asked.announced)
        self._values = np.zeros(asked.terms.length, np.int64)
        self._parts = (training is not None) + (evaluation is not None and evaluation.summed)
        self._added = 0
        self.paid, self.reported = np.zeros((2, 0), bool)

    @property
    def leaves(self) -> bool:
        """Whether a part that was asked for is in the sum, or none was asked for."""
        return self._added > 0 or not self._parts

    def train(self, task: TrainingSpec) -> None:
        """Let the asked training clients add their updates; `paid` has a flag for each."""
        passage, site = self._passage, self._passage.site
        self._check_round(task)
        passage._checked(task)
        sanitiser = SecureSanitiser.of(site, passage.hypotheses, task, self._asked.terms)
        paid, paying = passage._charge_for_training(task, sanitiser.release)
        sources = randomness.noise(passage.seed, task.round, site.client_ids(paying), "choice")
        assigned = choice.at_random(task.explore, len(sanitiser.hypotheses), sources)
        trained, chosen = passage._trained(task, paying, assigned)
        self._values[: self._layout.updates] = sanitiser.summed(trained, chosen)
        self.paid, self._added = paid, self._added + 1

    def report(self, task: EvaluationSpec) -> None:
        """Let the asked validation clients add loss and metric; `reported` has a flag for each."""
        passage = self._passage
        self._check_round(task)
        sums = SecureReports.of(passage.site, task, self._asked.terms)
        able, some = passage._able_to_report(task, sums.release)
        flags = np.zeros(len(task.clients), bool)
        if some.clients:
            reported = passage._reported(some)
            if reported.trains is not False and not passage.site.policy.trainers_report:
                raise Refused(_NO_REPORTS, code="refused.no-reports")
            own = _reporting(reported)
            paid = passage._charge("evaluate", sums.release, task.round, own, most=passage.most_reports)
            self._values[-REPORTS:] = sums.summed(reported.scores[:, paid])
            flags[np.flatnonzero(able)[paid]] = True
        self.reported, self._added = flags, self._added + 1

    def masked(self) -> Masked:
        """Return what leaves: all that was added, with the site's share of the noise, and masks."""
        passage = self._passage
        masked = self._party.mask(self._asked.round, self._asked.announced, self._values)
        remember(passage.site, passage.state, self._party)
        return masked

    def _check_round(self, task: TrainingSpec | EvaluationSpec) -> None:
        if task.round != self._asked.round:
            raise Refused("the message says nothing about its secure sum", code="refused.secure-terms")


_NO_REPORTS = "training clients of this site do not report; set report-noise-multiplier to let them"


def _price(release: Release) -> str:
    """Describe a release's price, and the command that shows past spending."""
    pure, paper = pure_cost(release), release.paper_spend(1)
    prices = [f"a pure epsilon of {amount(pure)}"] if math.isfinite(pure) else []
    prices += [f"{amount(paper)} of the paper's budget"] if math.isfinite(paper) else []
    if release.by_rows:
        noise, rate = release.row_noise_multiplier, release.row_rate
        prices += [f"for a row {count_of(release.row_steps, 'step')} with noise {noise:g} at rate {rate:g}"]
    if not prices:
        prices = [f"an epsilon at a delta, by {release.mechanism} noise of {release.noise_multiplier:g} clip norms"]
    return (
        f"which costs {', and '.join(prices)}; limits of the site are lower or used up, or its clients released "
        "without a guarantee before: see umbel site journal"
    )


def _check_result(trained: LocalResult, hypotheses: Arrays, clients: int) -> None:
    """Raise unless the handler's result fits the hypotheses."""
    if not isinstance(trained.arrays, dict) or list(trained.arrays) != list(hypotheses):
        raise Refused(f"trained arrays do not match hypotheses {sorted(hypotheses)}", code="refused.result")
    for name, value in trained.arrays.items():
        if not _is_array(value, np.float32, (clients, *hypotheses[name].shape[1:])):
            raise Refused(f"trained {name!r} is not a float32 array with a row for each client", code="refused.result")
    k = len(next(iter(hypotheses.values())))
    chosen = trained.chosen
    if not _is_array(chosen, np.int64, (clients,)) or not 0 <= chosen.min() <= chosen.max() < k:
        raise Refused("the handler does not say which hypothesis each client chose", code="refused.result")


def _reporting(reported: LocalReport) -> tuple[ClientOnNode, ...]:
    """Return the clients of a report, who are charged for it."""
    if len(reported.clients) != reported.scores.shape[1]:
        raise Refused("the handler does not say to which clients loss and metric belong", code="refused.result")
    return reported.clients


def _is_array(value: Any, dtype: type[np.generic], shape: tuple[int, ...]) -> bool:
    return type(value) is np.ndarray and value.dtype == dtype and value.shape == shape
