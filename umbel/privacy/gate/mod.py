"""The gate for any Flower app: a Mod that has a ClientApp's own train function release as umbel's clients do.

It translates, and `gate.gate` decides. A message of Flower's own shape, with arrays and a config, becomes a
round's message with one hypothesis and one client; what the app's function returns becomes what that client
trained; and of what the gate lets out a reply is made that stock strategies understand. So policy, charge,
noise, ledger and log are the same as in umbel's own app, and nothing leaves that has not gone through there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from logging import ERROR
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from umbel.privacy import mechanisms
from umbel.privacy.gate import gate
from umbel.privacy.gate.policy import Approval, Policy, Role
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.time_limit import time_limit
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError, ProtocolError, Refused, SiteError, UmbelError
from umbel.protocol.flower import log
from umbel.protocol.messages import released_in, round_request, scores_in
from umbel.protocol.records import from_array_record, pack, to_array_record
from umbel.protocol.release import LAPLACE, Clipping
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

_METRICS = "metrics"
_ROUND = "server-round"  # what Flower's strategies call it in their config
_LAST_ROUND = 2**31
_FLOATS = (2, 4, 8)  # bytes
# Entries of a site that umbel's own app alone heeds: whoever sets one would believe that it does something.
_NOT_HERE = (
    "approve", "balanced_batches", "insecure_seed", "keep_model", "max_examples", "max_local_epochs", "max_local_steps",
    "noise_all_items", "personalise", "personalise_epochs", "place", "reader", "reader_options",
)  # fmt: skip

Handler = Callable[[], Message]
"""The app's own function, called with the message and context that came."""


class Gate:
    r"""Flower Mod: what the train function of a ClientApp returns leaves sanitised and paid for, or not at all.

    ``ClientApp(mods=[Gate(noise_multiplier=4.0, radius=0.5)])``. A node is one client. Before the app's function
    sees a message the client is charged. Of its reply the arrays leave, clipped to `radius` around what the server
    sent and with noise from the operating system's entropy; in place of the number of examples there is a 1; all
    else is dropped. What else the app answers is refused, but for `reports`.

    All of this is what the app asks of a site; a site's own policy wins over it (`gate.policy`), where the
    site also runs an app that it has installed. A server that ships the app can ship it without a gate.

    Parameters
    ----------
    noise_multiplier : float
        nu, noise per unit of radius, in the mechanism's own meaning; 0 for none, in simulation only.
    radius : float
        That everybody knows: the Euclidean norm to which an update is clipped.
    mechanism : str
        ``laplace``, ``gaussian``, or ``package.module:Class``.
    budget, delta : float, optional
        The largest epsilon between any two data sets of a client, over all it ever released, and with which
        delta; for sites that set no budget of their own. None for no limit.
    frozen : str
        Patterns on the names of arrays, separated by spaces: such as ``"backbone.*"`` go back as they came, whatever
        the app makes of them, and cost nothing. Arrays of whole numbers cannot be anything else.
    reports : sequence of str
        Names of one metric or two that the evaluate function returns, and that may leave where the site lets its
        clients report: with noise (``report-noise-multiplier``), or as they are (role ``validation``).
    weighted_by_key : str
        The strategy's: the metric by which it weights clients, which is 1 for all.

    Raises
    ------
    ConfigError
        When an argument cannot be used.
    """

    def __init__(
        self,
        noise_multiplier: float,
        radius: float,
        mechanism: str = LAPLACE,
        *,
        budget: float | None = None,
        delta: float = 0.0,
        frozen: str = "",
        reports: Sequence[str] = (),
        weighted_by_key: str = "num-examples",
    ) -> None:
        self._frozen, self._reports, self._weight = frozen.split(), tuple(reports), weighted_by_key
        self._budget = {} if budget is None else {"budget": budget, "delta": delta}
        try:
            self._task = _task(noise_multiplier, radius, mechanism)
            if budget is None and delta:
                raise ConfigError("delta is of a budget, and there is none: give budget, or leave delta out")
            Policy.of(self._budget)
        except UmbelError as error:
            raise ConfigError(f"umbel.Gate: {error}") from None
        names = {*self._reports, weighted_by_key}
        if isinstance(reports, str) or len(names) != len(self._reports) + 1 or len(names) > 3:
            raise ConfigError(f"umbel.Gate: reports must be a list of one metric's name or two, got {reports!r}")

    def __call__(self, msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Return a sanitised reply, or "refused"."""
        try:
            own, asked = self._own(context), self._asked(msg, context, lambda: call_next(msg, context))
            request = copy(msg)
            request.content = asked.request
        except Exception as error:  # anything at all: fail closed
            return gate.refuse(msg, context, error)
        reply = _GATE(request, own, asked.answer)
        if not reply.has_error():
            try:
                reply.content = asked.reply(reply.content)
            except Exception as error:
                return gate.refuse(msg, context, error)
        return reply

    def _own(self, context: Context) -> Context:
        """Return a node's context as the gate shall read it: with the app's budget, and with noise nobody knows."""
        policy, node_config = Site.of(context.node_config).policy, dict(context.node_config)
        # Clients of role validation release nothing that a budget could count.
        if "budget" not in policy.model_fields_set and policy.role is not Role.VALIDATION:
            node_config |= self._budget
            if "min_noise_multiplier" not in policy.model_fields_set:
                # A server cannot ask for less than the app does, and the account need not reckon with that.
                least = max(policy.min_noise_multiplier, self._task.noise_multiplier)
                node_config["min-noise-multiplier"] = least
        # A site draws from the operating system anyway; a simulated node from a seed, which is drawn there.
        run_config: dict[str, Any] = {"seed": secrets.randbits(128)}
        return Context(context.run_id, context.node_id, node_config, context.state, run_config)

    def _asked(self, msg: Message, context: Context, handler: Handler) -> _Training | _Evaluation:
        """Check what a message asks, and translate it."""
        site = Site.of(context.node_config)
        _check_fit(site)
        name, sent = _sent(msg.content)
        round = _round(msg.content)
        what = msg.metadata.message_type.partition(".")[0]
        if what == "train":
            released = self._released(sent)
            if site.policy.role is Role.VALIDATION:
                raise Refused("clients of role validation do not train; set role to train to let them")
            return _Training(site, handler, name, sent, released, self._task, round, self._weight)
        if what == "evaluate":
            if not self._reports:
                raise Refused("the app names no metric that may leave: umbel.Gate(reports=[...])")
            return _Evaluation(site, handler, name, sent, self._reports, round, self._weight)
        raise Refused(f"an app behind umbel's gate answers to train and evaluate, not to {what[:50]!r}")

    def _released(self, sent: Arrays) -> list[str]:
        """Return the names of arrays that take noise; raise for others that are not frozen."""
        for pattern in self._frozen:
            if not any(fnmatchcase(name, pattern) for name in sent):
                raise Refused(f"no array of the message is called {pattern!r}, as umbel.Gate's frozen says")
        released = [name for name in sent if not any(fnmatchcase(name, pattern) for pattern in self._frozen)]
        for name in released:
            dtype = sent[name].dtype
            if dtype.kind != "f" or dtype.itemsize not in _FLOATS:
                raise Refused(
                    f"array {name!r} is of type {dtype}, which takes no noise. Name it in umbel.Gate's frozen to have "
                    "it go back as it came; for BatchNorm, whose statistics then stay as they are, use GroupNorm"
                )
        if not sum(sent[name].size for name in released):
            raise Refused("the message has no array that could be released")
        return released


def _task(noise_multiplier: float, radius: float, mechanism: str) -> TrainingSpec:
    """Return what an app asks of each client in each round. How it trains is its own affair, and no part of it."""
    for name, value in (("noise_multiplier", noise_multiplier), ("radius", radius)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} must be a number, got {value!r}")
    task = TrainingSpec(1, (0,), 0, 1.0, 0, noise_multiplier, Clipping.PUBLIC, radius, mechanism=mechanism)
    if noise_multiplier > 0:
        mechanisms.load(mechanism)(task.noise_multiplier)
    return task


def _check_fit(site: Site) -> None:
    """Raise where a site with data of its own is set up for what only umbel's own app does."""
    if site.simulated:
        return
    policy = site.policy
    idle = [name for name in _NOT_HERE if name in policy.model_fields_set]
    if "approve" in idle and policy.approve is Approval.POLICY:
        idle.remove("approve")
    if idle:
        raise SiteError(f"{idle[0].replace('_', '-')} is heeded by umbel's own app alone, and not here; leave it out")
    if policy.role is Role.SPLIT:
        raise SiteError("role split is for umbel's own datasets; set role to train or validation")


def _sent(content: RecordDict) -> tuple[str, Arrays]:
    """Return the one record of arrays that a message has, and its name."""
    name, record = _only(content, ArrayRecord)
    if name.startswith(("fitins", "evaluateins")):
        raise Refused("the app is a NumPyClient; umbel.Gate is for functions of the Message API, as @app.train()")
    return name, from_array_record(record)


def _only(content: RecordDict, kind: type[Any]) -> tuple[str, Any]:
    found = [(name, record) for name, record in content.items() if isinstance(record, kind)]
    if len(found) != 1:
        raise ProtocolError(f"there are {len(found)} records of type {kind.__name__} where one should be")
    return found[0]


def _round(content: RecordDict) -> int:
    """Return which round a message says it is of, for the record; 1 where it says nothing that could be one."""
    for record in content.values():
        number = record.get(_ROUND) if isinstance(record, ConfigRecord) else None
        if type(number) is int and 1 <= number <= _LAST_ROUND:
            return number
    return 1


@dataclass(frozen=True)
class _Asked:
    """A message on its way through the gate.

    Attributes
    ----------
    site : Site
    handler : callable
    name : str
        Of the record of arrays.
    sent : dict of ndarray
        The arrays as they came.
    """

    site: Site
    handler: Handler
    name: str
    sent: Arrays

    def _found(self, read: Callable[[RecordDict], Any], nothing: Any, undisclosed: bool = True) -> Any:
        """Return what the app's function answers, as `read` reads it; `nothing` where that goes wrong.

        Whether it does depends on the data, and a reply that stayed away would tell that. Only in simulation, where
        nobody is to be protected, an error shall be seen.
        """
        try:
            with time_limit(self.site.policy.max_seconds):
                reply = self._reply()
            if reply.has_error():
                raise Refused(f"the app's function replied an error: {reply.error.reason}")
            return read(reply.content)
        except Exception as error:
            if self.site.simulated or not undisclosed:
                raise
            log(ERROR, "the app's function failed, and the client answers as if it had no update", exc_info=error)
            return nothing

    def _reply(self) -> Message:
        try:
            return self.handler()
        except SystemExit:
            raise Refused("the app's function ended the process") from None


@dataclass(frozen=True)
class _Training(_Asked):
    released: Sequence[str]
    task: TrainingSpec
    round: int
    weight: str

    @property
    def request(self) -> RecordDict:
        with np.errstate(over="ignore"):  # too large for 32 bits is infinite, and the gate refuses that
            start = {name: self.sent[name].astype(np.float32)[None] for name in self.released}
        return round_request(pack(start), training=replace(self.task, round=self.round))

    def answer(self, message: Message, _: Context) -> Message:
        nothing = {name: np.full((1, *self.sent[name].shape), np.nan, np.float32) for name in self.released}
        trained = self._found(self._trained, nothing)
        return Message(gate.local_result(trained, np.zeros(1, np.int64)), reply_to=message)

    def _trained(self, content: RecordDict) -> Arrays:
        """Return what the app's function has trained; raise unless that fits what was sent."""
        arrays = from_array_record(_only(content, ArrayRecord)[1])
        if not {*self.released} <= {*arrays} <= {*self.sent}:
            wrong = sorted({*self.released} ^ ({*arrays} - ({*self.sent} - {*self.released})))
            raise ProtocolError(f"arrays {wrong} were sent and not returned, or the other way round")
        trained = {}
        for name in self.released:
            value, shape = arrays[name], self.sent[name].shape
            if value.dtype.kind != "f" or value.shape != shape:
                raise ProtocolError(f"array {name!r} came back as {value.dtype} of shape {value.shape}, not {shape}")
            with np.errstate(over="ignore"):  # what blew up in training counts as no update
                trained[name] = value.astype(np.float32)[None]
        return trained

    def reply(self, content: RecordDict) -> RecordDict:
        releases, _, _ = released_in(content, 1)
        arrays = {
            name: _as(releases[name][0], value.dtype) if name in releases else value
            for name, value in self.sent.items()
        }
        return RecordDict({self.name: to_array_record(arrays), _METRICS: MetricRecord({self.weight: 1})})


@dataclass(frozen=True)
class _Evaluation(_Asked):
    reports: Sequence[str]
    round: int
    weight: str

    @property
    def request(self) -> RecordDict:
        # It is not asked for; the gate's messages have one.
        return round_request(pack({"none": np.zeros((1, 1), np.float32)}), evaluation=EvaluationSpec(self.round, (0,)))

    def answer(self, message: Message, _: Context) -> Message:
        policy = self.site.policy
        trains = policy.role is not Role.VALIDATION
        if trains and not policy.report_noise_multiplier > 0:
            raise Refused("clients of this site do not report; set report-noise-multiplier, or role to validation")
        scores = self._found(self._scores, np.full((2, 1), np.nan), undisclosed=trains)
        return Message(gate.local_report(scores[0], scores[1], (0,), trains), reply_to=message)

    def _scores(self, content: RecordDict) -> NDArray[np.float64]:
        """Return the metrics that may leave, (2, 1); a second that is not there is 0."""
        record = _only(content, MetricRecord)[1]
        values = [record.get(name) for name in self.reports]
        if wrong := [name for name, value in zip(self.reports, values, strict=True) if type(value) not in (int, float)]:
            raise ProtocolError(f"the app's function returns no number called {wrong[0]!r}")
        scores = np.zeros((2, 1))
        scores[: len(values), 0] = values
        return np.where(np.isnan(scores), np.inf, scores)

    def reply(self, content: RecordDict) -> RecordDict:
        scores = scores_in(content, 1)
        if scores is None or np.isnan(scores).any():
            raise Refused("the client cannot pay for a report any more")
        reported = dict(zip(self.reports, scores[:, 0].tolist(), strict=False))
        return RecordDict({_METRICS: MetricRecord(reported | {self.weight: 1})})


def _as(released: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a release in the type in which the server sent what it started from, finite there too."""
    largest = min(float(np.finfo(dtype).max), float(np.finfo(np.float32).max))
    # An array even where it has no axis: numpy's single numbers have no order of bytes.
    return np.asarray(np.clip(released, -largest, largest)).astype(dtype)


def _whatever(_content: RecordDict, _context: Context) -> None:
    """Find nothing wrong: what a message asks was checked before it was translated."""


_GATE = gate.Gate(_whatever)
