"""The words of a report: what came out, what was run, what the figure for privacy is worth."""

from __future__ import annotations

from typing import Any

from protocol.release import RadiusMode
from server.report.alarms import alarms as found_alarms
from server.report.alarms import count_of, last_rounds
from server.report.figures import number
from server.report.view import View

_LARGE_COST = 20  # a participation that costs more promises nothing by itself


def alarms(view: View) -> list[Any]:
    manifest = view.summary.manifest
    validators = manifest.split["validation"] if manifest else None
    return list(found_alarms(view.history, view.k, int(view.config.get("validate-every", 1)), validators))


def rounds_judged(view: View) -> int:
    """Return how many rounds tell who still gets releases at the end."""
    return len(last_rounds(view.history))


def lead(view: View) -> list[str]:
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
    times = int((view.participations > 0).sum())
    if not times:
        second = "No client released anything, so none spent any privacy."
    elif not view.sanitised:
        second = (
            f"No noise was added, so nothing bounds what the releases told about the data of the {times:,} clients "
            "that took part: the privacy they spent is infinite."
        )
    else:
        median, maximum = view.spent()
        worth = (
            "here a rule of thumb, no guarantee"
            if view.summary.release.radius_mode is RadiusMode.UPDATE
            else "guaranteed for updates one radius apart"
        )
        second = (
            f"This cost the clients privacy: the median client spent {number(median)}, and none spent more than "
            f"{number(maximum)}. What a client spent limits how much all its releases together tell about its data "
            f"(the lower, the better; {worth})."
        )
    return [first, second]


def tiles(view: View) -> list[tuple[str, str, str]]:
    """Return the numbers to see first: what, value, and a remark."""
    tiles = []
    if view.state.best_round:
        name, value = view.summary.loss(view.state.best_loss).split(" ", 1)
        tiles.append((f"Best validation {name}", value, view.best_when()))
        if view.metric_differs():
            best = next(entry for entry in view.history if entry.number == view.state.best_round)
            if best.metric is not None:
                name = view.summary.model.metric.name
                tiles.append((f"Validation {name} in that round", f"{best.metric:.4f}", "of the same hypotheses"))
    asked, released = (sum(getattr(entry, what) for entry in view.trained) for what in ("asked", "releases"))
    tiles.append(("Releases", f"{released:,}", f"of {asked:,} asked for"))
    kind = view.kind()
    median, maximum = view.spent()
    tiles.append(("Privacy spent, median client", number(median), kind))
    tiles.append(("Privacy spent, maximum", number(maximum), kind))
    return tiles


def facts(view: View) -> list[tuple[str, str]]:
    """Return what was run."""
    summary, config = view.summary, view.config
    manifest = summary.manifest
    clients = f"{len(view.participations):,} train"
    if manifest:
        clients += f", {manifest.split['validation']:,} validate"
    radius = {
        RadiusMode.UPDATE: "within the norm of each client's update",
        RadiusMode.PUBLIC: "within a radius that everybody knows",
    }[summary.release.radius_mode]
    noise = f"multiplier {view.multiplier()}, {radius}" if view.sanitised else "none"
    rounds = f"{len(view.trained):,}: {view.state.stopped or 'not over yet'}"
    facts = [
        ("Data", manifest.name if manifest else "each node's own"),
        ("Clients", clients),
        ("Model", f"{summary.model.name}, {count_of(view.n, 'parameter')}, loss {summary.model.loss.name}"),
        ("Strategy", f"{config.get('strategy')}, {count_of(view.k, 'hypothesis', 'hypotheses')}"),
        ("Rounds", rounds),
        ("Noise", noise),
        ("Seed", str(config.get("seed"))),
        ("Time", f"{sum(entry.seconds for entry in view.history):,.1f} s of rounds"),
    ]
    return facts


def spent_means(view: View) -> list[str]:
    """Return what the figure for privacy is worth."""
    counted = (
        "Only releases that reached the server in this run are counted. A client's own ledger, on its node, may show "
        "more: it is charged before a release leaves, and for other runs too."
    )
    if not view.sanitised:
        return [
            "This run was unsanitised (noise-multiplier 0, which only a simulation allows): clients released their "
            "trained models as they were. Nothing bounds what these tell about the data of a client that took part, so "
            "its spend is infinite. The figure shows instead how often clients took part.",
            counted,
        ]
    cost = view.summary.release.spend(1)
    price = (
        f"A participation costs n/\N{GREEK SMALL LETTER NU} = {view.n:,}/{view.multiplier()} = "
        f"{number(cost)} (parameters over noise multiplier), and participations add up."
    )
    if view.summary.release.radius_mode is RadiusMode.UPDATE:
        unit = view.config.get("noise-per", "vector")
        layers = "" if unit == "vector" else f", {unit} by {unit}"
        worth = (
            f"The figure holds within the norm of the client's own update{layers}, which makes it a heuristic and "
            "no guarantee: the noise depends on what it hides, so that between updates of different norm nothing "
            'is bounded. For a guarantee, set radius = "public".'
        )
    else:
        worth = (
            "This is a guarantee: for any two updates one radius apart, what was released is at most e to the power of "
            "the spend times as likely under one as under the other; for any two updates from the same hypothesis, "
            "at most the square of that. It does not cover which hypothesis a client chose."
        )
    means = [price, worth]
    if cost > _LARGE_COST:
        means.append(
            f"At {number(cost)} a participation, the figure by itself promises next to nothing in either case; "
            "docs/privacy.md says what noise of this kind stops in practice, and what it does not."
        )
    return [*means, counted]
