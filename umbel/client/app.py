"""The ClientApp: a node's replies to the server.

A round's message goes through the gate (`umbel.privacy.site.umbel_app`), which calls the node's clients
(`umbel.client.work`).
"""

from __future__ import annotations

from logging import INFO

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from umbel.client.local import LocalParameters
from umbel.client.node import Node
from umbel.client.personal.keep import models_to_keep, write_models
from umbel.client.work import NodeClients
from umbel.models.prior import Prior
from umbel.privacy.site.config import Site
from umbel.privacy.site.consent import check_admitted, check_allowed, check_strategy
from umbel.privacy.site.refusals import check_hypotheses, guard
from umbel.privacy.site.runs import Runs
from umbel.privacy.site.time_limit import time_limit
from umbel.privacy.site.umbel_app import answer_round, answer_stage
from umbel.privacy.site.work import log_failure
from umbel.protocol.errors import Refused
from umbel.protocol.log import log
from umbel.protocol.messages import hosting_reply, hypotheses_in, prior_in, run_in, version_in
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import VERSION

app = ClientApp()


@app.query(mods=[guard])
def query(msg: Message, context: Context) -> Message:
    """Report how many clients this node hosts."""
    version = version_in(msg.content)
    if version != VERSION:
        raise Refused(
            f"the run speaks protocol {version!r}, this site {VERSION}; use the same umbel on both sides",
            code="refused.version",
        )
    # The server asks nothing of a node that it does not know.
    node = _admitting(context)
    if node.site.simulated and node.learner.device.type == "cuda" and not node.run.rows:
        log(INFO, "a step trains up to %s", node.room)
    return Message(hosting_reply(node.hosting), reply_to=msg)


@app.evaluate()
@app.train()
def take_part(msg: Message, context: Context) -> Message:
    """Train the asked clients, score the hypotheses for them, or both."""
    return answer_round(msg, context, NodeClients)


def _admitting(context: Context) -> Node:
    """Return the node of a run that the site answers; raise `Refused` for any other run."""
    site, run, run_id = Site.of(context.node_config), RunConfig.of(context.run_config), str(context.run_id)
    check_strategy(site, run)
    try:
        node = Node.at(site, run)
        n = node.model.num_parameters
    except Exception as error:
        check_allowed(site, run_id, run, error)
        raise
    check_admitted(site, run_id, run, n)
    return node


@app.query("channel", mods=[guard])
def take_stage(msg: Message, context: Context) -> Message:
    """Do this site's part of what a channel needs besides a round's message."""
    site = _admitting(context).site
    return answer_stage(msg, site, site.seed(RunConfig.of(context.run_config)), context.state)


@app.query("keep", mods=[guard])
def keep_models(msg: Message, context: Context) -> Message:
    """Keep each client's best hypothesis, if the site wants that; nothing leaves."""
    node = _admitting(context)
    hypotheses, name = hypotheses_in(msg.content), run_in(msg.content)
    check_hypotheses(hypotheses, node.site.policy)
    node.check(hypotheses)
    arrays, k = prior_in(msg.content), len(next(iter(hypotheses.values())))
    prior = None if arrays is None else Prior.read(arrays, k, node.model.num_parameters)
    # A site that keeps nothing runs the same checks, so that its reply does not reveal that.
    if not node.site.simulated:
        Runs.of(node.site).end(str(context.run_id), name, hypotheses, evaluates=len(node.validation) > 0)
    if (folder := node.site.keep_model) is not None:
        kept = LocalParameters(node.site, context.state, node.model, name, node.seed)
        try:
            with time_limit(node.site.policy.max_seconds):
                models = models_to_keep(node, hypotheses, kept, prior)
            write_models(folder, models)
        except KeyboardInterrupt:  # a user ends the node
            raise
        except BaseException as error:  # as in `umbel.privacy.site.work.computed`
            if node.site.simulated:
                raise
            log_failure("and keep the best hypothesis of each client", error)
    return Message(RecordDict(), reply_to=msg)
