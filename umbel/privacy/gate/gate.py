"""The gate: the one door through which what a client knows leaves its node.

A Flower Mod around the handler of a round's message. What is asked of training clients and of
validation clients passes one after the other, and what goes wrong with the one does not hold up the
other: the gate checks the task against the site's policy, charges the ledger, draws what hides each
client's choice, has the handler train, adds the noise, and builds a new reply from the allowed fields
alone. Whoever cannot pay does not train. It fails closed: whatever goes wrong inside, nothing is released,
the server reads nothing or "refused", and the reason stays in the node's own log. Where the data are a
site's own, nothing leaves that is not on record (`umbel.privacy.gate.site_log`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import compress
from logging import ERROR, INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from umbel.privacy.accounting.guarantee import amount, pure_cost
from umbel.privacy.gate import randomness
from umbel.privacy.gate.charges import Charge
from umbel.privacy.gate.consent import check_approved
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.memory_ledger import MemoryLedger
from umbel.privacy.gate.policy import Policy
from umbel.privacy.gate.precision import check_noise, round_to_grid
from umbel.privacy.gate.releases import Sanitiser, sanitise
from umbel.privacy.gate.runs import Runs
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.site_log import Entry, on_record
from umbel.privacy.gate.site_releases import SiteSanitiser
from umbel.privacy.gate.tripwire import degenerate, repeated
from umbel.privacy.mechanisms import choice
from umbel.privacy.mechanisms.laplace import Laplace
from umbel.protocol.arrays import Arrays, all_finite
from umbel.protocol.errors import Refused, UmbelError
from umbel.protocol.flower import ErrorCode, log
from umbel.protocol.messages import (
    evaluation_in,
    evaluation_only,
    evaluation_reply,
    hypotheses_in,
    run_names,
    site_reply,
    training_in,
    training_only,
    training_reply,
)
from umbel.protocol.records import Held, held_in
from umbel.protocol.release import Clipping, Kind, Release, ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

_RESULT = "result"

Check = Callable[[RecordDict, Context], None]
"""Raises where the handler could not do what the training part of a message asks, whatever the data are."""


@dataclass(frozen=True)
class LocalResult:
    """What `local_result` is told."""

    arrays: Arrays
    chosen: NDArray[np.int64]


@dataclass(frozen=True)
class LocalReport:
    """What `local_report` is told; loss and metric as one array (2, clients)."""

    scores: NDArray[np.float64]
    clients: tuple[int, ...]
    trains: bool


def local_result(trained: Arrays, chosen: NDArray[np.int64]) -> RecordDict:
    r"""Return what the handler hands to the gate for training clients; it never travels further.

    Parameters
    ----------
    trained : dict of ndarray, each (clients, \*shape)
        Shared parameters of each asked client, in the order asked.
    chosen : ndarray of int, shape (clients,)
        The hypothesis each started from.
    """
    return RecordDict({_RESULT: Held(LocalResult(trained, np.asarray(chosen)))})


def local_report(
    losses: NDArray[np.float64], metrics: NDArray[np.float64], clients: Sequence[int], trains: bool
) -> RecordDict:
    """Return what the handler hands to the gate for clients that report.

    Parameters
    ----------
    losses, metrics : ndarray, shape (clients,)
        Of each asked client.
    clients : sequence of int
        Their numbers within the node.
    trains : bool
        Whether they are training clients, whose reports need noise.
    """
    scores = np.stack([losses, metrics], dtype=np.float64)
    return RecordDict({_RESULT: Held(LocalReport(scores, tuple(clients) if trains else (), trains))})


def guard(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower Mod: when a handler fails, reply "refused" and keep the reason in the node's log.

    Flower itself would send the exception's text to the server. The error is replied, not
    raised, because in simulation a raised one also drops what the node has written to its state.
    """

    def answer(entry: Entry) -> Message:
        try:
            reply = call_next(msg, context)
            if not reply.has_error():
                return reply
            raise Refused("the handler replied an error")
        except Exception as error:  # anything at all: fail closed
            return _refused(msg, error, entry)

    return on_record(msg, context, answer, _refused)


def refuse(msg: Message, context: Context, error: Exception) -> Message:
    """Return "refused" for a message that does not come as far as a handler; the reason stays with the node."""
    return on_record(msg, context, lambda entry: _refused(msg, error, entry), _refused)


def _refused(msg: Message, error: Exception, entry: Entry | None = None) -> Message:
    _explain(msg.metadata.message_type, error, entry)
    return _refusal(msg)


def _refusal(msg: Message) -> Message:
    return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason="refused"), reply_to=msg)


def _explain(what: str, error: Exception, entry: Entry | None = None) -> None:
    """Write the reason to the node's own log, and to the site's; an error in doing so must not leave either."""
    with suppress(Exception):
        if entry is not None:
            entry.refuse(what, error)
        reason = None if isinstance(error, UmbelError) else error
        log(ERROR, "umbel refused to answer (%s): %s", what, error, exc_info=reason)


class Gate:
    """Flower Mod: sanitise what the handler of a round's message returns (Algorithm 2).

    Parameters
    ----------
    check : callable
        Is asked before anybody is charged.
    """

    def __init__(self, check: Check) -> None:
        self._check = check

    def __call__(self, msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Return a sanitised reply, or "refused"."""

        def answer(entry: Entry) -> Message:
            try:
                passage = _Passage.of(msg, context, call_next, self._check, entry)
            except Exception as error:
                return _refused(msg, error, entry)
            return passage.answer()

        return on_record(msg, context, answer, _refused)


@dataclass(frozen=True)
class _Passage:
    """A message on its way through the gate of the site that it came to, with its line of the site's log."""

    site: Site
    hypotheses: Arrays
    msg: Message
    context: Context
    call_next: ClientAppCallable
    check: Check
    entry: Entry

    @classmethod
    def of(cls, msg: Message, context: Context, call_next: ClientAppCallable, check: Check, entry: Entry) -> _Passage:
        """Let a message in that the site answers at all."""
        site = Site.of(context.node_config)
        hypotheses = checked_hypotheses(msg.content, site.policy)
        check_approved(site, context, _size(hypotheses), msg.content, hypotheses)
        _remember(site, msg, context, hypotheses)
        return cls(site, hypotheses, msg, context, call_next, check, entry)

    def answer(self) -> Message:
        """Return what may leave of both parts, or "refused"."""
        content = RecordDict()
        for what, part in (("train", self.train), ("evaluate", self.evaluate)):
            try:
                passed = part()
                for name, record in passed.items() if passed is not None else ():
                    content[name] = record
            except Exception as error:  # anything at all: fail closed
                _explain(what, error, self.entry)
        return Message(content, reply_to=self.msg) if content else _refusal(self.msg)

    def train(self) -> RecordDict | None:
        """Return the releases of the asked training clients; None where none are asked."""
        task = training_in(self.msg.content)
        if task is None:
            return None
        site, k = self.site, len(next(iter(self.hypotheses.values())))
        site.policy.check(task, k)
        if site.policy.tripwire:
            _check_honest(self.hypotheses, self.context)
        return self._by_site(task) if task.release_by is ReleaseBy.SITE else self._by_client(task, k)

    def _by_client(self, task: TrainingSpec, k: int) -> RecordDict:
        """Return the release of each client that can pay."""
        site, seed = self.site, self.seed
        # Whatever a task alone can make fail comes before the charge.
        sanitiser = Sanitiser.of(site, self.hypotheses, task)
        paid, paying = self._paying(task, sanitiser.release)
        assigned = np.full(len(paying), choice.OWN, np.int64)
        if sanitiser.release.choice_epsilon > 0:
            sources = randomness.noise(seed, task.round, site.client_ids(paying), "choice")
            assigned = choice.draw(sanitiser.release.choice_epsilon, k, sources)
        trained, chosen = self._trained(task, paying, assigned)
        sources = randomness.noise(seed, task.round, site.client_ids(paying))
        releases = sanitiser.sanitised(trained, chosen, sources)
        choices = chosen.tolist() if task.disclose_choice else None
        # Only where it has a way to go are fewer bits worth the work.
        step = 0.0 if site.simulated else sanitiser.step
        return training_reply(releases, paid.astype(int).tolist(), choices, step)

    def _by_site(self, task: TrainingSpec) -> RecordDict:
        """Return the sums of the clients that can pay, each of which pays the whole price."""
        site = self.site
        sanitiser = SiteSanitiser.of(site, self.hypotheses, task)
        paid, paying = self._paying(task, sanitiser.release, site.policy.min_clients)
        # The noise on the counts hides what each of them chooses; who tries another hypothesis is for learning alone.
        sources = randomness.noise(self.seed, task.round, site.client_ids(paying), "choice")
        assigned = choice.at_random(task.explore, len(sanitiser.hypotheses), sources)
        trained, chosen = self._trained(task, paying, assigned)
        sources = randomness.noise(self.seed, task.round, [site.first], "site")
        sums, counts = sanitiser.sanitised(trained, chosen, sources)
        return site_reply(sums, counts, paid.astype(int).tolist())

    def evaluate(self) -> RecordDict | None:
        """Return loss and metric of the asked clients, with noise where they train; None where none are asked."""
        task = evaluation_in(self.msg.content)
        if task is None:
            return None
        if not self.site.simulated:
            # Before anybody reports: a crash may waste a count, it never hides a report.
            Runs.of(self.site).count_evaluation(str(self.context.run_id), self.site.policy)
        reported = held_in(self._ask(evaluation_only(self.hypotheses, task)), _RESULT, LocalReport)
        values = reported.scores
        if not _is_array(values, np.float64, (2, len(task.clients))):
            raise Refused("the handler does not say loss and metric of each client")
        if reported.trains is not False:
            values = self._noised(values, reported.clients, task)
        return evaluation_reply(*values)

    @property
    def seed(self) -> int | None:
        """The run's seed in simulation, None where the data are the site's own."""
        return self.site.seed(RunConfig.of(self.context.run_config))

    def _paying(
        self, task: TrainingSpec, release: Release, at_least: int = 1
    ) -> tuple[NDArray[np.bool_], tuple[int, ...]]:
        """Charge those asked to train that can pay: a flag for each, and who they are.

        Nothing is drawn before the charge: a crash may waste budget, it never hides a release.

        Raises
        ------
        Refused
            When fewer than `at_least` can, who are not charged either.
        """
        self.site.check_priced(release)
        everybody = np.full(len(task.clients), choice.OWN, np.int64)
        self.check(training_only(self.hypotheses, task, everybody), self.context)
        paid = self._charge("train", release, task.round, task.clients, at_least)
        paying = _which(task.clients, paid)
        if not paying and at_least > 1:
            raise Refused(
                f"fewer than {at_least} asked clients can pay for this round (min-clients), so none is charged"
            )
        if not paying:
            raise Refused(f"no asked client can pay for this round, {_price(release)}")
        _log_noise_source(self.site)
        return paid, paying

    def _charge(
        self, what: str, release: Release, round: int, clients: tuple[int, ...], at_least: int = 1
    ) -> NDArray[np.bool_]:
        """Charge clients, counted within the node, and return a flag for each, whether it has paid.

        Nobody pays where fewer than `at_least` can.
        """
        charge = Charge(str(self.context.run_id), round, release)
        ids = self.site.client_ids(clients)
        paid = np.array(_ledger(self.site, self.context).charge(charge, ids, self.site.limits, at_least))
        number = int(paid.sum())
        self.entry.paid += number
        if number < len(clients) and (number or at_least == 1):
            self.entry.refuse(what, Refused(f"{len(clients) - number} of {len(clients)} clients cannot pay any more"))
        return paid

    def _trained(
        self, task: TrainingSpec, clients: tuple[int, ...], assigned: NDArray[np.int64]
    ) -> tuple[Arrays, NDArray[np.int64]]:
        """Have clients train what they are assigned, or choose; return what they trained, and from which hypothesis."""
        asked = task if clients == task.clients else replace(task, clients=clients)
        trained = held_in(self._ask(training_only(self.hypotheses, asked, assigned)), _RESULT, LocalResult)
        _check_result(trained, self.hypotheses, len(clients))
        if ((assigned != choice.OWN) & (trained.chosen != assigned)).any():
            raise Refused("the handler trained another hypothesis than the gate had drawn")
        return trained.arrays, trained.chosen

    def _ask(self, content: RecordDict) -> RecordDict:
        """Return what the handler answers to a part of the message; raise if that is an error."""
        narrowed = copy(self.msg)
        narrowed.content = content
        reply = self.call_next(narrowed, self.context)
        if reply.has_error():
            raise Refused("the handler replied an error")
        return reply.content

    def _noised(self, values: NDArray[np.float64], own: tuple[int, ...], task: EvaluationSpec) -> NDArray[np.float64]:
        """Return (2, clients) loss and metric, clipped and noised; NaN for clients that cannot pay.

        Both lie in a square whose diagonal is the radius, so the guarantee holds between any two
        reports.
        """
        site = self.site
        nu, bound = site.policy.report_noise_multiplier, site.policy.report_bound
        if not nu > 0:
            raise Refused("training clients of this site do not report; set report-noise-multiplier to let them")
        clients = site.client_ids(own)
        if len(clients) != values.shape[1]:
            raise Refused("the handler does not say whose loss and metric these are")
        radius, mechanism = math.sqrt(2) * bound, Laplace(nu)
        check_noise(mechanism, 2, radius)
        seed, release = self.seed, Release(Kind.REPORT, 2, nu, Clipping.PUBLIC, radius)
        paid = self._charge("evaluate", release, task.round, own)
        clipped = np.clip(np.nan_to_num(values, nan=bound), 0, bound).T[paid]
        sources = randomness.noise(seed, task.round, _which(clients, paid), "report")
        # Centred, because the mechanism clips what it gets to the radius.
        noised = sanitise(mechanism, clipped - bound / 2, radius, Clipping.PUBLIC, sources) + bound / 2
        reported = np.full_like(values, np.nan)
        noise = mechanism.deviation(2) * radius
        reported[:, paid] = round_to_grid(noised, noise, float(np.spacing(np.float32(bound)))).T
        return reported


def _price(release: Release) -> str:
    """Say what a release costs, and where to see what was spent."""
    pure, paper = amount(pure_cost(release)), amount(release.paper_spend(1))
    return (
        f"whose price is a pure epsilon of {pure}, and {paper} of the paper's budget: the site's limits are lower, or "
        "used up, or its clients released without a guarantee before; see umbel ledger show"
    )


def _log_noise_source(site: Site) -> None:
    """Say in the node's log where its noise comes from."""
    if site.insecure_seed:
        log(WARNING, "insecure-seed is set: the server knows the seed of the noise and can subtract it")
    elif not site.simulated:
        log(INFO, "noise comes from the operating system; the run's seed plays no part in it")


def _check_honest(hypotheses: Arrays, context: Context) -> None:
    """Raise for hypotheses that an honest server would not send."""
    if name := degenerate(hypotheses):
        raise Refused(f"all rows of hypotheses {name!r} are alike; no honest server sends that")
    if repeated(hypotheses, context.state):
        raise Refused("the server sent the same hypotheses before")


def _remember(site: Site, msg: Message, context: Context, hypotheses: Arrays) -> None:
    """Remember what a run sent, so that the site knows at its end what it can have found."""
    if site.simulated:
        return
    for name in run_names(msg.content):
        Runs.of(site).note_sent(str(context.run_id), name, hypotheses)


def _ledger(site: Site, context: Context) -> Ledger | MemoryLedger:
    return MemoryLedger(context.state) if site.ledger_path is None else Ledger.of(site)


def _size(hypotheses: Arrays) -> int:
    """Return n, the number of parameters of a hypothesis."""
    return sum(math.prod(value.shape[1:]) for value in hypotheses.values())


def _which(clients: Sequence[int], flags: Sequence[bool] | NDArray[np.bool_]) -> tuple[int, ...]:
    if len(clients) != len(flags):
        raise ValueError(f"{len(flags)} flags for {len(clients)} clients")
    return tuple(compress(clients, flags))


def checked_hypotheses(content: RecordDict, policy: Policy) -> Arrays:
    """Return what was sent if these are finite float32 arrays with one common leading axis."""
    hypotheses = hypotheses_in(content)
    counts = {value.shape[0] if value.ndim else 0 for value in hypotheses.values()}
    if len(counts) != 1 or not 1 <= min(counts) <= policy.max_hypotheses:
        raise Refused(f"the hypotheses are not 1 to {policy.max_hypotheses} stacked arrays of one length")
    for name, value in hypotheses.items():
        if value.dtype != np.float32:
            raise Refused(f"hypotheses {name!r} are {value.dtype}, not float32")
        if not all_finite(value):
            raise Refused(f"hypotheses {name!r} are not finite")
    return hypotheses


def _check_result(trained: LocalResult, hypotheses: Arrays, clients: int) -> None:
    """Raise unless the handler's result fits the hypotheses."""
    if not isinstance(trained.arrays, dict) or list(trained.arrays) != list(hypotheses):
        raise Refused(f"trained arrays do not match hypotheses {sorted(hypotheses)}")
    for name, value in trained.arrays.items():
        if not _is_array(value, np.float32, (clients, *hypotheses[name].shape[1:])):
            raise Refused(f"trained {name!r} is no float32 array with a row a client")
    k = len(next(iter(hypotheses.values())))
    chosen = trained.chosen
    if not _is_array(chosen, np.int64, (clients,)) or not 0 <= chosen.min() <= chosen.max() < k:
        raise Refused("the handler does not say which hypothesis each client chose")


def _is_array(value: Any, dtype: type[np.generic], shape: tuple[int, ...]) -> bool:
    return type(value) is np.ndarray and value.dtype == dtype and value.shape == shape
