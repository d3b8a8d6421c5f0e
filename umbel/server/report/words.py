"""The words of a report: what came out, what was run, what the figure for privacy is worth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from umbel.privacy.accounting.guarantee import DELTA, MEANINGFUL, amount, gap, guarantee
from umbel.protocol.release import Clipping
from umbel.server.history import last_rounds
from umbel.server.report.alarms import alarms as found_alarms
from umbel.server.report.alarms import count_of
from umbel.server.report.figures import number
from umbel.server.report.view import View


@dataclass(frozen=True)
class Verdict:
    """What a run guarantees its clients, and beside it what the paper's heuristic says.

    Attributes
    ----------
    kind : str
        ``none``, ``weak`` for an epsilon that promises next to nothing, or ``holds``.
    value, text : str
        Of the guarantee.
    paper_value, paper_text : str
        Of the heuristic; empty where it counts nothing.
    """

    kind: str
    value: str
    text: str
    paper_value: str = ""
    paper_text: str = ""


def verdict(view: View) -> Verdict:
    """Return what is guaranteed, and apart from it the heuristic."""
    release, times = view.summary.release, int((view.participations > 0).sum())
    paper = ("", "")
    if release.paper_cost is not None:
        median, most = view.paper()
        paper = (
            f"at most {most}",
            f"The paper's budget, n/\N{GREEK SMALL LETTER NU} a participation: {median} for the median client. It "
            "counts noise, and guarantees nothing.",
        )
    clients = f"the {count_of(times, 'client')} that took part"
    if not times:
        return Verdict("holds", "nothing released", "No client released anything.", *paper)
    if not view.sanitised:
        text = f"No noise was added, so nothing bounds what the releases told about the data of {clients}."
        return Verdict("none", "none", text, *paper)
    if why := gap(release):
        text = f"Noise was added, but nothing is guaranteed to {clients}, because {why}."
        return Verdict("none", "none", text, *paper)
    median, most = view.epsilons()
    found = view.guarantees[1]
    weak = found is None or found.epsilon > MEANINGFUL
    text = (
        f"Of the client that took part most often; {median} for the median one. But for a chance of {DELTA:g}, all "
        "that a client released is at most e to the power of epsilon times as likely as if its data were any others."
    )
    if weak:
        text += f" Above {MEANINGFUL} that promises next to nothing."
    return Verdict("weak" if weak else "holds", f"epsilon {most}", text, *paper)


def alarms(view: View) -> list[Any]:
    manifest = view.summary.manifest
    validators = manifest.split["validation"] if manifest else None
    return list(found_alarms(view.steady, view.k, int(view.config.get("validate-every", 1)), validators))


def _hypotheses(view: View) -> str:
    """Return how many hypotheses there are, and among how many a client's choice was."""
    most, now = view.summary.release.hypotheses, count_of(view.k, "hypothesis", "hypotheses")
    return now if most <= view.k else f"{now}, after a choice among {most}, at which each participation is priced"


def rounds_judged(view: View) -> int:
    """Return how many rounds tell who still gets releases at the end."""
    return len(last_rounds(view.history))


def lead(view: View) -> str:
    """Return what came out, for somebody who has not read the paper."""
    state, rounds = view.state, count_of(len(view.trained), "round")
    asked = count_of(max((entry.asked for entry in view.trained), default=0), "client")
    what = (
        f"{view.k} hypotheses (versions of one model, of which each client uses the one that fits its own data best)"
        if view.k > 1
        else "one hypothesis (a single model for all clients)"
    )
    first = f"In {rounds}, {asked} at a time (a client is one owner of data, such as a hospital) trained {what}"
    if state.best_round:
        loss = view.summary.loss(state.best_loss)
        first += (
            f"; {'they' if view.k > 1 else 'it'} did best {view.best_when()}, with {loss} (the lower, the better) "
            "on validation clients, whose data were not used for training."
        )
    else:
        first += "; no client reported how well that went, so the newest state is kept."
    return first


def tiles(view: View) -> list[tuple[str, str, str]]:
    """Return the numbers to see first: what, value, and a remark."""
    tiles = []
    if view.state.best_round:
        name, value = view.summary.loss(view.state.best_loss).split(" ", 1)
        tiles.append((f"Best validation {name}", value, view.best_when()))
        if view.metric_differs() and view.best and view.best.metric is not None:
            name = view.summary.model.metric.name
            tiles.append((f"Validation {name} in that round", f"{view.best.metric:.4f}", "of the same hypotheses"))
        if view.best and (spread := view.best.loss_spread):
            name, value = view.summary.loss(spread[-1]).split(" ", 1)
            tiles.append((f"{name} of the worst tenth", value, "or more, of the clients that validated"))
    asked, released = (sum(getattr(entry, what) for entry in view.trained) for what in ("asked", "releases"))
    if view.measured and (held := view.measured.held_out):
        metric = view.summary.model.metric.name
        factor = view.summary.scale[0] if metric == "rmse" and view.summary.scale[0] else 1.0
        name = metric if view.metric_differs() else view.summary.loss_name
        worst = f"on rows held out; {number(held.worst_decile * factor)} of the worst tenth"
        tiles.append((f"{name[:1].upper()}{name[1:]} held out", number(held.mean * factor), worst))
    tiles.append(("Rounds", f"{len(view.trained):,}", view.state.stopped or "not over yet"))
    tiles.append(("Releases", f"{released:,}", f"of {asked:,} asked for"))
    return tiles


def facts(view: View) -> list[tuple[str, str]]:
    """Return what was run."""
    summary, config = view.summary, view.config
    manifest = summary.manifest
    clients = f"{len(view.participations):,} train"
    if manifest:
        clients += f", {manifest.split['validation']:,} validate"
    radius = {
        Clipping.UPDATE: "within the norm of each client's update",
        Clipping.PUBLIC: "within a radius that everybody knows",
    }[summary.release.clipping]
    unit = config.get("noise-per", "vector")
    parts = ", on each site's sums" if view.by_site else "" if unit == "vector" else f", {unit} by {unit}"
    noise = (
        f"{summary.release.mechanism}, multiplier {view.multiplier()}, {radius}{parts}" if view.sanitised else "none"
    )
    rounds = f"{len(view.trained):,}: {view.state.stopped or 'not over yet'}"
    facts = [
        ("Data", manifest.name if manifest else "each node's own"),
        ("Clients", clients),
        ("Model", f"{summary.model.name}, {count_of(view.n, 'parameter')}, loss {summary.model.loss.name}"),
        ("Strategy", f"{config.get('strategy')}, {_hypotheses(view)}"),
        ("Rounds", rounds),
        ("Noise", noise),
        ("Choice", _choice(view)),
        ("Seed", str(config.get("seed"))),
        ("Time", f"{sum(entry.seconds for entry in view.history):,.1f} s of rounds"),
    ]
    return facts


def _choice(view: View) -> str:
    """Return how it is hidden which hypothesis a client chose."""
    release = view.summary.release
    if not release.chooses:
        return "none to make"
    priced = f", epsilon {release.choice_epsilon:g}" if release.choice_epsilon else ""
    if view.by_site:
        return f"hidden by noise on each site's counts{priced}" if view.sanitised else "open"
    return f"randomised{priced}" if priced else "open"


def spent_means(view: View) -> list[str]:
    """Return what the figure for privacy is worth."""
    counted = (
        "Only releases that reached the server in this run are counted. A client's own ledger, on its node, may show "
        "more: it is charged before a release leaves, for other runs too, and for what training clients report."
    )
    if before := view.config.get("start-from"):
        counted += f" The run started from hypotheses of {before}: what clients gave away there comes on top."
    release = view.summary.release
    if not view.sanitised:
        what = "sites released sums of updates" if view.by_site else "clients released their trained models"
        return [
            f"This run was unsanitised (noise-multiplier 0, which only a simulation allows): {what} as they were. "
            "Nothing bounds what these tell about the data of a client that took part.",
            counted,
        ]
    price = (
        f"The paper's budget counts n/\N{GREEK SMALL LETTER NU} = {view.n:,}/{view.multiplier()} = "
        f"{number(release.paper_spend(1))} a participation (parameters over noise multiplier): "
        f"{view.paper()[0]} for the median client, {view.paper()[1]} at most. It is a heuristic and guarantees nothing."
        if release.paper_cost is not None
        else "The paper's budget counts nothing here: it knows the paper's noise alone, vector Laplace noise."
    )
    if why := gap(release):
        worth = (
            f'There is no guarantee, because {why}. For one, set clipping = "public", and with more than one '
            "hypothesis a choice-epsilon."
        )
        return [worth, price, counted]
    return [*_guaranteed(view), price, counted]


def _guaranteed(view: View) -> list[str]:
    """Return what epsilon means, of a run that has one."""
    release = view.summary.release
    once, most = guarantee({release: 1}), view.guarantees[1]
    assert once is not None, "there is no gap"
    assert most is not None
    pure = (
        f", or {amount(once.pure)} without that chance" if math.isfinite(once.pure) else "; without that chance, none"
    )
    chosen = ""
    if release.chooses:
        how = (
            "of that only counts left its site, with noise"
            if view.by_site
            else f"by randomised response of epsilon {release.choice_epsilon:g}"
        )
        chosen = f" Which hypothesis a client trained is covered: {how}."
    if view.by_site:
        chosen += " Clients trust their site, which sees their updates and adds the noise."
    worth = (
        "Between any two data sets that a client may have, whatever hypotheses the server sent, all its releases "
        "together are at most e to the power of epsilon times as likely under one as under the other, but for a chance "
        f"of {DELTA:g}. One participation has epsilon {amount(once.epsilon)}{pure}.{chosen}"
    )
    means = [worth]
    if most.epsilon > MEANINGFUL:
        means.append(
            f"An epsilon above {MEANINGFUL} promises next to nothing; docs/privacy.md says what noise stops in "
            "practice, and what it does not."
        )
    return means
