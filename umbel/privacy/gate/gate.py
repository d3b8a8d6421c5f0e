"""The gate: the one door through which what a client knows leaves its node (Algorithm 2).

A `Passage` is one message's way through the gate of its site. It checks the task against the site's policy,
charges the ledger, draws what hides each client's choice, has the clients train, adds the noise, and returns the
releases. A client over budget does not train. Whatever goes wrong raises, and nothing is released.

Two adapters, each a Flower Mod, translate messages for it and fail closed: `umbel.privacy.gate.own_app` for a
round's message, and `umbel.privacy.gate.stock_app` for any other Flower app.
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
from umbel.privacy.gate.charges import Charge
from umbel.privacy.gate.hypotheses import check_honest, check_hypotheses
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.memory_ledger import MemoryLedger
from umbel.privacy.gate.releases import Sanitiser, check_noise, round_to_grid, sanitise
from umbel.privacy.gate.runs import Runs
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.site_log import Entry
from umbel.privacy.gate.site_releases import SiteSanitiser
from umbel.privacy.mechanisms import choice
from umbel.privacy.mechanisms.laplace import Laplace
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import Refused
from umbel.protocol.flower import log
from umbel.protocol.release import Clipping, Kind, Release, ReleaseBy
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

C = TypeVar("C", bound=int)


@dataclass(frozen=True)
class LocalResult:
    r"""What clients have trained, in the order asked; it never leaves the node as it is.

    `arrays` has the shared parameters, each (clients, \*shape), and `chosen` (clients,) where each client started.
    """

    arrays: Arrays
    chosen: NDArray[np.int64]


@dataclass(frozen=True)
class LocalReport:
    """What clients report, in the order asked: loss and metric (2, clients), which have no noise yet.

    `clients` says who they are. Reports of clients that also train (`trains`) always need noise.
    """

    scores: NDArray[np.float64]
    clients: tuple[ClientOnNode, ...]
    trains: bool


class Clients(Protocol):
    """The clients behind the gate."""

    def check(self, task: TrainingSpec) -> None:
        """Raise where they could not do what a task asks, whatever their data are; called before the charge."""

    def train(self, task: TrainingSpec, assigned: NDArray[np.int64]) -> LocalResult:
        """Train, each client from the hypothesis assigned to it, or for -1 from the one that fits it best."""

    def report(self, task: EvaluationSpec) -> LocalReport:
        """Score the hypotheses, each client by the one that fits it best."""


@dataclass(frozen=True)
class Sanitised:
    r"""Releases of clients.

    Attributes
    ----------
    releases : dict of ndarray, each (m, \*shape)
        Of the clients that paid, in the order asked.
    paid : ndarray of bool
        A flag for each asked client.
    choices : list of int, or None
        Of the clients that paid, where the task asks for them (`TrainingSpec.disclose_choice`).
    step : float
        See `umbel.privacy.gate.releases.Sanitiser.step`; 0 where nothing travels.
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
    r"""A message on its way through the gate of the site that it came to.

    Attributes
    ----------
    run : str
        Flower's number of the run, for the ledger.
    seed : int or None
        Of all noise; None for the operating system's entropy.
    state : RecordDict
        The node's own memory of the run, which never leaves it.
    entry : Entry
        Its line of the site's log.
    hypotheses : dict of ndarray of float32, each (k, \*shape)
        What clients start from; empty where no client is asked to train.

    Raises
    ------
    Refused
        When the hypotheses are not finite float32 arrays with one common leading axis, of a length the site accepts.
    """

    site: Site
    run: str
    seed: int | None
    state: RecordDict
    entry: Entry
    clients: Clients
    hypotheses: Arrays = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.hypotheses:
            check_hypotheses(self.hypotheses, self.site.policy)

    def train(self, task: TrainingSpec) -> Sanitised | SanitisedSums:
        """Return the releases of the asked training clients, or their site's."""
        site, k = self.site, len(next(iter(self.hypotheses.values())))
        site.policy.check(task, k)
        if site.policy.tripwire:
            check_honest(self.hypotheses, self.state)
        return self._by_site(task) if task.release_by is ReleaseBy.SITE else self._by_client(task, k)

    def _by_client(self, task: TrainingSpec, k: int) -> Sanitised:
        """Return the release of each client that can pay."""
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
        releases = sanitiser.sanitised(trained, chosen, sources)
        choices = chosen.tolist() if task.disclose_choice else None
        # Quantise only when the release crosses a network.
        step = 0.0 if site.simulated else sanitiser.step
        return Sanitised(releases, paid, choices, step)

    def _by_site(self, task: TrainingSpec) -> SanitisedSums:
        """Return the sums of the clients that can pay, each of which pays the whole price."""
        site = self.site
        sanitiser = SiteSanitiser.of(site, self.hypotheses, task)
        paid, paying = self._charge_for_training(task, sanitiser.release, site.policy.min_clients)
        # The noise on the counts hides what each of them chooses; trying another hypothesis only helps learning.
        sources = randomness.noise(self.seed, task.round, site.client_ids(paying), "choice")
        assigned = choice.at_random(task.explore, len(sanitiser.hypotheses), sources)
        trained, chosen = self._trained(task, paying, assigned)
        sources = randomness.noise(self.seed, task.round, [site.first], "site")
        return SanitisedSums(*sanitiser.sanitised(trained, chosen, sources), paid)

    def evaluate(self, task: EvaluationSpec) -> NDArray[np.float64]:
        """Return loss and metric (2, clients) of the asked clients, with noise unless the site reports exactly."""
        if not self.site.simulated:
            # Before any client reports: a crash may waste a count, it never hides a report.
            Runs.of(self.site).count_evaluation(self.run, self.site.policy)
        able = self._able_to_report(task.clients)
        self._note_unpaid("evaluate", able)
        scores = np.full((2, len(task.clients)), np.nan)
        if able.any():
            some = task if able.all() else replace(task, clients=tuple(compress(task.clients, able)))
            scores[:, able] = self._reported(some)
        return scores

    def _able_to_report(self, clients: tuple[ClientOnNode, ...]) -> NDArray[np.bool_]:
        """Return a flag for each client that is not over its budget: nothing is computed on the data of others."""
        site, policy = self.site, self.site.policy
        if policy.trainers_report or not policy.report_noise > 0:
            return np.ones(len(clients), bool)
        return np.array(self._ledger.able(self._report, site.client_ids(clients), site.limits))

    def _reported(self, task: EvaluationSpec) -> NDArray[np.float64]:
        """Return loss and metric (2, clients) as they may leave."""
        reported = self.clients.report(task)
        values = reported.scores
        if not _is_array(values, np.float64, (2, len(task.clients))):
            raise Refused("the handler does not say loss and metric of each client", code="refused.result")
        exactly = reported.trains is False and self.site.policy.reports_exactly
        return values if exactly else self._noisy_reports(reported, task)

    def _charge_for_training(
        self, task: TrainingSpec, release: Release, at_least: int = 1
    ) -> tuple[NDArray[np.bool_], tuple[ClientOnNode, ...]]:
        """Charge the asked clients that can pay: return a flag for each, and who they are.

        Nothing is drawn before the charge: a crash may waste budget, it never hides a release.

        Raises
        ------
        Refused
            When fewer than `at_least` can pay; then none is charged.
        """
        self.site.check_priced(release)
        self.clients.check(task)
        paid = self._charge("train", release, task.round, task.clients, at_least)
        paying = tuple(compress(task.clients, paid))
        if not paying and at_least > 1:
            raise Refused(
                f"fewer than {at_least} asked clients can pay for this round (min-clients), so none is charged",
                code="refused.min-clients",
            )
        if not paying:
            raise Refused(f"no asked client can pay for this round, {_price(release)}", code="refused.budget")
        if self.site.insecure_seed:
            log(WARNING, "insecure-seed is set: the server knows the seed of the noise and can subtract it")
        elif not self.site.simulated:
            log(INFO, "noise comes from the operating system; the run's seed plays no part in it")
        return paid, paying

    def _note_unpaid(self, what: str, paid: NDArray[np.bool_]) -> None:
        """Note in the site's log how many clients cannot pay, if any."""
        if not paid.all():
            unpaid = f"{(~paid).sum()} of {len(paid)} clients cannot pay any more"
            self.entry.refuse(what, Refused(unpaid, code="refused.budget"))

    @cached_property
    def _ledger(self) -> MemoryLedger | Ledger:
        """The account of the clients, opened once a message."""
        return MemoryLedger(self.state) if self.site.ledger_path is None else Ledger.of(self.site)

    @property
    def _report(self) -> Release:
        """What a client pays for that reports with noise, by itself or in a mean."""
        policy = self.site.policy
        return Release(Kind.REPORT, 2, policy.report_noise, Clipping.PUBLIC, math.sqrt(2) * policy.report_bound)

    def _charge(
        self, what: str, release: Release, round: int, clients: tuple[ClientOnNode, ...], at_least: int = 1
    ) -> NDArray[np.bool_]:
        """Charge clients and return a flag for each that paid; none pays where fewer than `at_least` can."""
        if self.site.insecure_seed:
            release = replace(release, noise_multiplier=0.0)  # the server knows the seed, and takes the noise away
        charge, ids = Charge(self.run, round, release), self.site.client_ids(clients)
        paid = np.array(self._ledger.charge(charge, ids, self.site.limits, at_least))
        self.entry.paid += int(paid.sum())
        if paid.any() or at_least == 1:
            self._note_unpaid(what, paid)
        return paid

    def _trained(
        self, task: TrainingSpec, clients: tuple[ClientOnNode, ...], assigned: NDArray[np.int64]
    ) -> tuple[Arrays, NDArray[np.int64]]:
        """Have clients train what they are assigned, or choose; return what they trained, and from which hypothesis."""
        asked = task if clients == task.clients else replace(task, clients=clients)
        trained = self.clients.train(asked, assigned)
        _check_result(trained, self.hypotheses, len(clients))
        if ((assigned != choice.OWN) & (trained.chosen != assigned)).any():
            raise Refused("the handler trained another hypothesis than the gate had drawn", code="refused.result")
        return trained.arrays, trained.chosen

    def _noisy_reports(self, reported: LocalReport, task: EvaluationSpec) -> NDArray[np.float64]:
        """Charge clients for their reports: return loss and metric (2, clients), clipped and noised.

        Clients that train report each its own. For others the site reports their mean, so that noise is drawn once.
        Both are NaN for clients that cannot pay. Loss and metric lie in a square whose diagonal is the radius, so the
        guarantee holds between any two reports of one client, alone or in a sum.
        """
        site, own = self.site, reported.clients
        bound, release = site.policy.report_bound, self._report
        if not release.noise_multiplier > 0:
            raise Refused(
                "training clients of this site do not report; set report-noise-multiplier to let them",
                code="refused.no-reports",
            )
        if len(own) != reported.scores.shape[1]:
            raise Refused("the handler does not say whose loss and metric these are", code="refused.result")
        radius, mechanism = math.sqrt(2) * bound, Laplace(release.noise_multiplier)
        check_noise(mechanism, 2, radius)
        paid = self._charge("evaluate", release, task.round, own)
        scores = np.full_like(reported.scores, np.nan)
        if not paid.any():
            return scores
        clipped = np.clip(np.nan_to_num(reported.scores, nan=bound), 0, bound).T[paid]
        if reported.trains is not False:
            sources = randomness.noise(self.seed, task.round, compress(site.client_ids(own), paid), "report")
            # Centred, because the mechanism clips what it gets to the radius.
            noised, many = sanitise(mechanism, clipped - bound / 2, radius, Clipping.PUBLIC, sources) + bound / 2, 1
        else:
            sources = randomness.noise(self.seed, task.round, [site.first], "mean report")
            noise = mechanism.noise([2], np.array([[radius]]), sources)
            noised, many = clipped.sum(axis=0) + noise, len(clipped)
        finest = float(np.spacing(np.float32(bound * many)))
        scores[:, paid] = round_to_grid(noised, mechanism.deviation(2) * radius, finest).T / many
        return scores


def _price(release: Release) -> str:
    """Say what a release costs, and where to see what was spent."""
    return (
        f"whose price is a pure epsilon of {amount(pure_cost(release))}, and {amount(release.paper_spend(1))} of the "
        "paper's budget: the site's limits are lower, or used up, or its clients released without a guarantee before; "
        "see umbel ledger show"
    )


def _check_result(trained: LocalResult, hypotheses: Arrays, clients: int) -> None:
    """Raise unless the handler's result fits the hypotheses."""
    if not isinstance(trained.arrays, dict) or list(trained.arrays) != list(hypotheses):
        raise Refused(f"trained arrays do not match hypotheses {sorted(hypotheses)}", code="refused.result")
    for name, value in trained.arrays.items():
        if not _is_array(value, np.float32, (clients, *hypotheses[name].shape[1:])):
            raise Refused(f"trained {name!r} is no float32 array with a row a client", code="refused.result")
    k = len(next(iter(hypotheses.values())))
    chosen = trained.chosen
    if not _is_array(chosen, np.int64, (clients,)) or not 0 <= chosen.min() <= chosen.max() < k:
        raise Refused("the handler does not say which hypothesis each client chose", code="refused.result")


def _is_array(value: Any, dtype: type[np.generic], shape: tuple[int, ...]) -> bool:
    return type(value) is np.ndarray and value.dtype == dtype and value.shape == shape
