"""The gate of any other Flower app: a Mod that makes a ClientApp's train function release like umbel's clients.

A node is one client, and the server's arrays are its single hypothesis. The app's function stands behind the same gate
as umbel's own handlers: policy, charge, noise, ledger and log are the same. The reply has the form that stock
strategies understand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from umbel.mods.choose import Loss, choice_made, shown
from umbel.mods.flower_mod import METRICS, ONLY, FlowerClient
from umbel.privacy import mechanisms
from umbel.privacy.accounting.guarantee import DELTA, amount, guarantee
from umbel.privacy.gate.answer import Incoming
from umbel.privacy.gate.entry import Entry
from umbel.privacy.gate.policy import Approval, Budget, Mark, Policy, Role
from umbel.privacy.gate.refusals import answer_or_refuse
from umbel.privacy.gate.site import Site
from umbel.protocol.errors import ConfigError, Refused, SiteError, UmbelError
from umbel.protocol.log import log
from umbel.protocol.release import LAPLACE
from umbel.protocol.tasks import TrainingSpec
from umbel.protocol.words import count_of

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
        clients report: with noise (``reports``), or exactly (role ``validation``).
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
            client = FlowerClient(msg, context, call_next, self._task, self._frozen, self._reports, self._choose)
            # The operating system's entropy, even in simulation: a server that knows a seed can subtract the noise.
            message = Incoming(self._limited(site), str(context.run_id), None, context.state, entry, client)
            content = client.answers(message)
            content.metric_records[METRICS][self._weight] = 1
            _tell_spent(message, (self._budget.delta if self._budget else 0.0) or DELTA)
            return Message(content, reply_to=came)

        return answer_or_refuse(came, context, answer, own_data=False)

    def _limited(self, site: Site) -> Site:
        """Return the site with the app's budget if it sets none itself, and with at least the app's noise.

        A policy file that leaves the budget out has the default, which the app may only narrow.
        """
        policy = site.policy
        sets_budget = "budget" in policy.model_fields_set and not (site.simulated and math.isinf(policy.budget.epsilon))
        if self._budget is None or sets_budget:
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


def _task(noise_multiplier: float, clip_norm: Any, mechanism: str, choice_epsilon: float) -> TrainingSpec:
    """Return the app's task for each client in each round; the app alone decides how it trains."""
    noise: dict[str, Any] = {"noise_multiplier": noise_multiplier, "choice_epsilon": choice_epsilon}
    task = TrainingSpec(clients=ONLY, local_epochs=0, clip_norm=clip_norm, mechanism=mechanism, **noise)
    if task.noise_multiplier > 0:
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


def _tell_spent(message: Incoming, delta: float) -> None:
    """Log what the node's client has spent; in simulation, where many share a process, only a new maximum."""
    account = message.ledger.account(message.site.client_ids(ONLY)[0])
    spent, times, before = guarantee(account, delta), sum(account.values()), _told.get(message.run, 0)
    if message.site.simulated and times <= before:
        return
    _told.clear()
    _told[message.run] = times
    who, often = "a client" if message.site.simulated else "this site's client", count_of(times, "release")
    text = f"spent epsilon {amount(spent.epsilon)} at delta {spent.delta:g}" if spent else "no guarantee"
    log(INFO, "umbel.Gate: after %s %s has %s", often, who, text)
