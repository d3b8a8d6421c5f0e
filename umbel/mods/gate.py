"""The gate of any other Flower app: a Mod that makes a ClientApp's train function release like umbel's clients.

A node is one client, and the server's arrays are its single hypothesis. The app's function stands behind the same gate
as umbel's own handlers: policy, charge, noise, ledger and log are the same. The reply has the form that stock
strategies understand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from umbel.mods.choose import Loss, best_fit, choice_made, choosing, round_in, shown, stacked_in, with_one
from umbel.privacy import mechanisms
from umbel.privacy.accounting.guarantee import DELTA, amount, guarantee
from umbel.privacy.gate.entry import Entry
from umbel.privacy.gate.gate import LocalReport, LocalResult, Passage, Sanitised
from umbel.privacy.gate.policy import Approval, Budget, Mark, Policy, Role
from umbel.privacy.gate.refusals import answered
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.undisclosed import Some, undisclosed
from umbel.privacy.mechanisms.choice import OWN
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import ConfigError, ProtocolError, Refused, SiteError, UmbelError
from umbel.protocol.flower import log
from umbel.protocol.records import from_array_record, to_array_record
from umbel.protocol.release import LAPLACE, Clipping
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
from umbel.protocol.words import count_of

_METRICS = "metrics"
_FLOATS = (2, 4, 8)  # bytes
_ONLY = (ClientOnNode(0),)  # the one client of the node
_told: dict[str, int] = {}  # by run: the largest number of participations that the log has told
# Entries of a site that only umbel's own app uses: whoever sets one would believe that it has an effect.
_NOT_HERE = [name for name, field in Policy.model_fields.items() if Mark.OURS in field.metadata]


class Gate:
    r"""Flower Mod: the results of a ClientApp's train function leave sanitised and charged, or not at all.

    ``ClientApp(mods=[Gate(noise_multiplier=4.0, clip_norm=0.5)])``. A node is one client. The client is charged before
    the app's function sees a message. From the function's reply only the arrays leave, clipped to `clip_norm` around
    the server's arrays and with noise from the operating system's entropy. The number of examples becomes 1; the gate
    drops all else. It refuses other messages to the app, except for `reports`.

    The parameters are requests to a site. The site's policy overrides them (`umbel.privacy.gate.policy`) only if the
    site runs an app that it has installed: a server that ships the app can ship it without a gate.

    Parameters
    ----------
    noise_multiplier : float
        nu, noise per unit of clip norm, in the mechanism's own meaning; 0 for none, in simulation only.
    clip_norm : float
        The public Euclidean norm to which an update is clipped.
    mechanism : str
        ``laplace``, ``gaussian``, ``discrete-gaussian``, or ``package.module:Class``.
    choose : callable, optional
        ``loss(arrays, context)`` of one model on the client's own rows, as for `umbel.ChooseHypothesis`: of several
        hypotheses in a message the app's functions see the one of lowest loss. Choice and update are one charge.
    choice_epsilon : float
        Epsilon of the choice, by randomised response; 0 for an open choice, which only a site without a budget allows.
    budget, delta : float, optional
        Maximum epsilon between any two data sets of a client, over all its releases in all runs, and its
        delta, for sites that set no budget themselves. None for no limit.
    frozen : str
        Patterns on the names of arrays, separated by spaces. Arrays that match, such as ``"backbone.*"``, return
        unchanged, even if the app changes them, and cost nothing. Arrays of integers must be among them.
    reports : sequence of str
        Names of one or two metrics that the evaluate function returns. They may leave if the site lets its
        clients report: with noise (``report-noise-multiplier``), or exactly (role ``validation``).
    weighted_by_key : str
        The strategy's setting: the metric by which it weights clients. It becomes 1 for all.

    Raises
    ------
    ConfigError
        If an argument is invalid.
    """

    def __init__(
        self,
        noise_multiplier: float,
        clip_norm: float,
        mechanism: str = LAPLACE,
        *,
        choose: Loss | None = None,
        choice_epsilon: float = 0.0,
        budget: float | None = None,
        delta: float = 0.0,
        frozen: str = "",
        reports: Sequence[str] = (),
        weighted_by_key: str = "num-examples",
    ) -> None:
        self._reports, self._weight, self._choose = tuple(reports), weighted_by_key, choose
        try:
            if not isinstance(frozen, str):
                text = f"frozen must be one text with patterns separated by spaces, got {frozen!r}"
                raise ConfigError(text, code="config.frozen-patterns")
            self._frozen = frozen.split()
            self._task = _task(noise_multiplier, clip_norm, mechanism, choice_epsilon)
            if choice_epsilon and choose is None:
                text = "choice_epsilon needs a loss to choose by: give choose, or leave choice_epsilon out"
                raise ConfigError(text, code="config.choice-epsilon")
            if budget is None and delta:
                raise ConfigError("delta needs a budget: give budget, or leave delta out", code="config.delta")
            if (
                budget is not None
                and not delta
                and noise_multiplier > 0
                and mechanisms.load(mechanism)(noise_multiplier).pure(1, 2) is None
            ):
                raise ConfigError(
                    f"a budget for mechanism {mechanism!r} needs a delta: give delta", code="config.delta"
                )
            self._budget = None if budget is None else Policy.of({"budget": f"{budget} delta={delta}"}).budget
        except UmbelError as error:
            raise ConfigError.of(error, "umbel.Gate: ") from None
        names = {*self._reports, weighted_by_key}
        if isinstance(reports, str) or len(names) != len(self._reports) + 1 or len(names) > 3:
            raise ConfigError(f"umbel.Gate: reports must list one or two names, got {reports!r}", code="config.reports")

    def __call__(self, msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Return a sanitised reply, or "refused"."""
        came = shown(msg, msg.content)  # what the app does to its message must not show in a reply or a refusal

        def answer(site: Site, entry: Entry) -> Message:
            _check_fit(site)
            if choice_made() is not None:
                text = "umbel.ChooseHypothesis before umbel.Gate would choose without a charge"
                fix = "write mods=[umbel.Gate(..., choose=loss, choice_epsilon=...)]"
                raise Refused(f"{text}; {fix}", code="refused.hypotheses")
            what, round = msg.metadata.message_type.partition(".")[0], round_in(msg.content)
            if what not in ("train", "evaluate"):
                raise Refused(
                    f"an app behind umbel's gate answers to train and evaluate, not to {what[:50]!r}",
                    code="refused.message-type",
                )
            name, record = _only(msg.content, ArrayRecord)
            if name.startswith(("fitins", "evaluateins")):
                text = "the app is a NumPyClient; umbel.Gate is for the Message API"
                raise Refused(text, code="refused.numpy-client")
            stacked = stacked_in(msg.content)
            if stacked and self._choose is None:
                text = "the message has several hypotheses: give umbel.Gate a loss to choose by, choose=loss"
                raise Refused(text, code="refused.hypotheses")
            sent = stacked or from_array_record(record)
            app = _App(
                site,
                msg,
                context,
                call_next,
                sent,
                self._reports,
                self._choose if stacked else None,
                self._task.choice_epsilon,
            )
            # The operating system's entropy, even in simulation: a server that knows a seed can subtract the noise.
            passage = Passage(self._limited(site), str(context.run_id), None, context.state, entry, app)
            if what == "train":
                return Message(self._train(passage, app, name, round), reply_to=came)
            return Message(self._evaluate(passage, round), reply_to=came)

        return answered(came, context, answer, own_data=False)

    def _limited(self, site: Site) -> Site:
        """Return the site with the app's budget if it sets none itself, and with at least the app's noise.

        A policy file that leaves the budget out has the default, which the app may only narrow.
        """
        policy = site.policy
        own = "budget" in policy.model_fields_set and not (site.simulated and math.isinf(policy.budget.epsilon))
        if self._budget is None or own:
            return site
        narrowed = self._budget
        if policy.policy_file:
            theirs = policy.budget
            narrowed = Budget(min(narrowed.epsilon, theirs.epsilon), min(narrowed.delta, theirs.delta))
        changes: dict[str, Any] = {"budget": narrowed}
        if "min_noise_multiplier" not in policy.model_fields_set:
            # The server may not request less noise than the app does.
            changes["min_noise_multiplier"] = max(policy.min_noise_multiplier, self._task.noise_multiplier)
        return replace(site, policy=policy.model_copy(update=changes))

    def _train(self, passage: Passage, app: _App, name: str, round: int) -> RecordDict:
        """Return the reply to a message that asks for training: the arrays that came, with the releases in place."""
        app.released = self._released(app)
        if passage.site.policy.role is Role.VALIDATION:
            raise Refused("clients of role validation do not train; set role to train to let them", code="refused.role")
        task = replace(self._task, round=round)
        with np.errstate(over="ignore"):  # a value too large for 32 bits becomes infinite, which the gate refuses
            start = {name: app.stacked(name).astype(np.float32) for name in app.released}
        passage.entry.asks(task, start)
        found = replace(passage, hypotheses=start).train(task)
        assert isinstance(found, Sanitised), "each client releases by itself"
        self._tell_spent(passage)
        arrays = {
            name: _as(found.releases[name][0], value.dtype) if name in start else app.stacked(name)[0]
            for name, value in app.sent.items()
        }
        return RecordDict({name: to_array_record(arrays), _METRICS: MetricRecord({self._weight: 1})})

    def _tell_spent(self, passage: Passage) -> None:
        """Log what the node's client has spent; in simulation, where many share a process, only a new maximum."""
        account = passage.account(_ONLY[0])
        found = guarantee(account, (self._budget.delta if self._budget else 0.0) or DELTA)
        times, before = sum(account.values()), _told.get(passage.run, 0)
        if passage.site.simulated and times <= before:
            return
        _told.clear()
        _told[passage.run] = times
        who, often = "a client" if passage.site.simulated else "this site's client", count_of(times, "release")
        if found is None:
            log(INFO, "umbel.Gate: after %s %s has no guarantee", often, who)
            return
        spent = f"epsilon {amount(found.epsilon)} at delta {found.delta:g}"
        log(INFO, "umbel.Gate: after %s %s has spent %s", often, who, spent)

    def _evaluate(self, passage: Passage, round: int) -> RecordDict:
        """Return the reply to a message that asks for evaluation: the metrics that may leave."""
        if not self._reports:
            raise Refused("no metric may leave; name some: umbel.Gate(reports=[...])", code="refused.no-reports")
        task = EvaluationSpec(round, _ONLY)
        passage.entry.asks(task)
        scores = passage.evaluate(task)
        if np.isnan(scores).any():
            raise Refused("the client is over budget for another report", code="refused.budget")
        self._tell_spent(passage)
        reported = dict(zip(self._reports, scores[:, 0].tolist(), strict=False))
        return RecordDict({_METRICS: MetricRecord(reported | {self._weight: 1})})

    def _released(self, app: _App) -> list[str]:
        """Return the names of arrays that get noise; raise for others that are not frozen."""
        sent = app.sent
        frozen = {pattern: {name for name in sent if fnmatchcase(name, pattern)} for pattern in self._frozen}
        for pattern, names in frozen.items():
            if not names:
                raise Refused(f"umbel.Gate's frozen names {pattern!r}, but no array matches it", code="refused.arrays")
        released = [name for name in sent if name not in set().union(*frozen.values())]
        for name in released:
            dtype = sent[name].dtype
            if dtype.kind != "f" or dtype.itemsize not in _FLOATS:
                raise Refused(
                    f"array {name!r} is of type {dtype}, which takes no noise. Name it in umbel.Gate's frozen to "
                    "return it unchanged; for BatchNorm, whose statistics then never change, use GroupNorm",
                    code="refused.arrays",
                )
        if app.choose and any((value != value[:1]).any() for name, value in sent.items() if name not in released):
            text = "frozen arrays differ between hypotheses, so that to return a client's would tell its choice"
            raise Refused(text, code="refused.arrays")
        if not sum(sent[name].size for name in released):
            raise Refused("the message has no array that could be released", code="refused.arrays")
        return released


def _task(noise_multiplier: float, clip_norm: Any, mechanism: str, choice_epsilon: float) -> TrainingSpec:
    """Return the app's task for each client in each round; the app alone decides how it trains."""
    numbers = {"noise_multiplier": noise_multiplier, "clip_norm": clip_norm, "choice_epsilon": choice_epsilon}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} must be a number, got {value!r}", code="config.wrong-type")
    asked: dict[str, Any] = {**numbers, "mechanism": mechanism}
    task = TrainingSpec(clients=_ONLY, local_epochs=0, clipping=Clipping.PUBLIC, **asked)
    if noise_multiplier > 0:
        mechanisms.load(mechanism)(task.noise_multiplier)
    return task


def _check_fit(site: Site) -> None:
    """Raise if a site with its own data sets entries that only umbel's own app uses."""
    if site.simulated:
        return
    policy = site.policy
    for name in sorted(policy.model_fields_set.intersection(_NOT_HERE)):
        if name != "approve" or policy.approve is not Approval.POLICY:
            key = name.replace("_", "-")
            raise SiteError(f"{key} works only in umbel's own app; leave it out", code="site.not-here")
    if not policy.witness_path:
        text = "umbel.Gate: the journal's witness is in umbel's own folder; name one on another disk: witness-path"
        log(WARNING, text)
    if policy.role is Role.SPLIT:
        raise SiteError("role split is for umbel's own datasets; set role to train or validation", code="site.role")


def _only(content: RecordDict, kind: type[Any]) -> tuple[str, Any]:
    found = [(name, record) for name, record in content.items() if isinstance(record, kind)]
    if len(found) != 1:
        raise ProtocolError(f"{len(found)} records of type {kind.__name__}, not one", code="protocol.records")
    return found[0]


@dataclass
class _App:
    """The app behind the gate, as the only client of its node.

    `sent` are the received arrays, with a first axis for hypotheses where there is a loss to `choose` by; `reports`
    names the metrics that may leave, `released` the arrays that get noise.
    """

    site: Site
    msg: Message
    context: Context
    call_next: ClientAppCallable
    sent: Arrays
    reports: Sequence[str]
    choose: Loss | None
    choice_epsilon: float
    released: Sequence[str] = ()

    def stacked(self, name: str) -> NDArray[Any]:
        r"""Return an array that came, (k, \*shape)."""
        return self.sent[name] if self.choose else self.sent[name][None]

    def check(self, task: TrainingSpec) -> None:
        """Find nothing wrong: only the app's function knows what it can train."""

    def train(self, task: TrainingSpec, assigned: NDArray[np.int64]) -> LocalResult:
        """Return the arrays that the app's function has trained; NaN if that fails."""

        def nothing(_: Some) -> list[NDArray[Any]]:
            lost = [np.full((1, *self.stacked(name).shape[1:]), np.nan, np.float32) for name in self.released]
            return [np.maximum(assigned, 0), *lost]

        chosen, *found = undisclosed(self.site, 1, lambda _: self._trained(int(assigned[0])), nothing, interrupts=True)
        return LocalResult(dict(zip(self.released, found, strict=True)), chosen)

    def report(self, task: EvaluationSpec) -> LocalReport:
        """Return the metrics that may leave; a missing second one is 0."""
        policy = self.site.policy
        trains = policy.role is not Role.VALIDATION
        if trains and not policy.report_noise_multiplier > 0:
            raise Refused(
                "clients of this site do not report; set report-noise-multiplier and role = train, or role to "
                "validation (in simulation UMBEL_REPORT_NOISE_MULTIPLIER and UMBEL_ROLE)",
                code="refused.no-reports",
            )
        noisy = policy.report_noise > 0
        missing = np.full((1, 2), np.nan)
        (scores,) = undisclosed(
            self.site, 1, lambda _: [self._scores()], lambda _: [missing], needed=noisy, interrupts=True
        )
        return LocalReport(np.ascontiguousarray(scores.T), _ONLY, trains)

    def _chosen(self, assigned: int) -> tuple[int, Message]:
        """Return the hypothesis that the app's function gets, and its message with this alone."""
        if self.choose is None:
            return 0, self.msg
        fit = best_fit(self.choose, self.sent, self.context)  # always: time must not tell what was drawn
        chosen = fit if assigned == OWN else assigned
        return chosen, with_one(self.msg, self.sent, chosen)

    def _reply(self, message: Message) -> RecordDict:
        k = len(next(iter(self.sent.values()))) if self.choose else 1
        try:
            with choosing(k, self.choice_epsilon):
                reply = self.call_next(message, self.context)
        except SystemExit:
            raise Refused("the app's function ended the process", code="refused.handler") from None
        if reply.has_error():
            raise Refused(f"the app's function replied with an error: {reply.error.reason}", code="refused.handler")
        return reply.content

    def _trained(self, assigned: int) -> list[NDArray[Any]]:
        """Return the hypothesis that the app's function trained, and its arrays; raise unless they fit those sent."""
        chosen, message = self._chosen(assigned)
        arrays = from_array_record(_only(self._reply(message), ArrayRecord)[1])
        if wrong := {*self.released} - {*arrays} | {*arrays} - {*self.sent}:
            raise ProtocolError(
                f"arrays {sorted(wrong)} were sent but not returned, or returned but not sent", code="protocol.arrays"
            )
        trained: list[NDArray[Any]] = [np.array([chosen])]
        for name in self.released:
            value, shape = arrays[name], self.stacked(name).shape[1:]
            if value.dtype.kind != "f" or value.shape != shape:
                raise ProtocolError(
                    f"array {name!r} came back as {value.dtype} of shape {value.shape}, not {shape}",
                    code="protocol.arrays",
                )
            with np.errstate(over="ignore"):  # diverged training counts as no update
                trained.append(value.astype(np.float32)[None])
        return trained

    def _scores(self) -> NDArray[np.float64]:
        """Return the metrics that may leave, (1, 2)."""
        record = _only(self._reply(self._chosen(OWN)[1]), MetricRecord)[1]
        values = [record.get(name) for name in self.reports]
        # NumPy's float64, as of a mean, is a float; Flower's records hold no other numbers of NumPy's.
        if wrong := [name for name, one in zip(self.reports, values, strict=True) if not isinstance(one, int | float)]:
            raise ProtocolError(f"the app's function returns no number called {wrong[0]!r}", code="protocol.metric")
        scores = np.zeros((1, 2))
        scores[0, : len(values)] = values
        return np.where(np.isnan(scores), np.inf, scores)


def _as(released: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a release in the type of the server's array, finite there too."""
    largest = min(float(np.finfo(dtype).max), float(np.finfo(np.float32).max))
    # asarray, because NumPy's scalars have no byte order.
    return np.asarray(np.clip(released, -largest, largest)).astype(dtype)
