"""The report of a run: one page that needs no other file, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from protocol.arrays import flatten
from protocol.release import RadiusMode
from server.history import Round, State
from server.observer import Section
from server.report import figures
from server.report.alarms import DRIFTED, LEAST_ROUNDS, RELEASES_EACH, alarms, count_of, last_rounds
from server.report.figures import STYLED, number
from server.report.template import PAGE
from server.snapshots import Snapshots
from server.summary import Summary

_MOST_ROWS = 1000
_MOST_GROUPS = 12
_SMALL = 3  # hypotheses of so many parameters are printed
_LARGE_COST = 20  # a participation that costs more promises nothing by itself


@dataclass(frozen=True)
class Picture:
    """A figure of the page: heading, SVG, and what it shows in words."""

    title: str
    svg: Markup
    caption: str


@dataclass(frozen=True)
class Table:
    """A table of the page; the first cell of a row is its heading."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]] = field(default_factory=list)
    marked: int | None = None
    note: str = ""


def render(
    name: str,
    summary: Summary,
    state: State,
    participations: NDArray[np.int64],
    snapshots: Snapshots,
    config: Mapping[str, Any],
    versions: Mapping[str, str],
    sections: Sequence[Section] = (),
) -> str:
    """Return the report of a run that is over, as one HTML page.

    Parameters
    ----------
    name : str
        Of the run.
    summary : Summary
    state : State
    participations : ndarray of int
        How often each training client released.
    snapshots : Snapshots
    config : mapping
        The run config.
    versions : mapping
        Of what the run ran with.
    sections : sequence of Section
        What observers add.
    """
    told = _Report(summary, state, participations, snapshots, config)
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(PAGE).render(
        name=name,
        alarms=told.alarms(),
        judged=told.judged(),
        lead=told.lead(),
        tiles=told.tiles(),
        facts=told.facts(),
        pictures=told.over_rounds(),
        hypotheses=told.hypotheses(),
        truth=summary.found(state.best),
        spending=told.spending(),
        spent_means=told.spent_means(),
        planes=told.planes(),
        sections=sections,
        rounds=told.rounds(),
        config=[(key, _text(config[key])) for key in config],
        versions=list(versions.items()),
        rules={"rounds": LEAST_ROUNDS, "each": RELEASES_EACH, "drifted": f"{DRIFTED:.0%}"},
    )


class _Report:
    """The parts of a report."""

    def __init__(
        self,
        summary: Summary,
        state: State,
        participations: NDArray[np.int64],
        snapshots: Snapshots,
        config: Mapping[str, Any],
    ) -> None:
        self.summary, self.state, self.snapshots, self.config = summary, state, snapshots, config
        self.participations = participations
        self.history = state.history
        self.trained = [entry for entry in self.history if entry.asked]
        self.k = len(next(iter(state.best.values())))
        self.n = summary.model.num_parameters
        self.groups = np.array([entry.groups for entry in self.trained], np.int64).reshape(len(self.trained), self.k)
        most = np.argsort(-self.groups.sum(axis=0), kind="stable")[:STYLED]
        self.shown: list[int] = list(range(self.k)) if self.k <= STYLED else sorted(int(j) for j in most)
        self.sanitised = summary.release.cost is not None

    # --- words

    def alarms(self) -> list[Any]:
        manifest = self.summary.manifest
        validators = manifest.split["validation"] if manifest else None
        return list(alarms(self.history, self.k, int(self.config.get("validate-every", 1)), validators))

    def judged(self) -> int:
        """Return how many rounds tell who still gets releases at the end."""
        return len(last_rounds(self.history))

    def lead(self) -> list[str]:
        """Return what came out, for somebody who has not read the paper."""
        state, rounds = self.state, count_of(len(self.trained), "round")
        asked = count_of(max((entry.asked for entry in self.trained), default=0), "client")
        what = (
            f"{self.k} hypotheses (versions of one model, of which each client uses the one that fits its own data "
            "best)"
            if self.k > 1
            else "one hypothesis (a single model for all clients)"
        )
        first = f"In {rounds}, {asked} at a time (a client is one owner of data, such as a hospital) trained {what}"
        if state.best_round:
            loss = self.summary.loss(state.best_loss)
            first += (
                f"; {'they' if self.k > 1 else 'it'} did best {self._best_when()}, with {loss} (the lower, the better) "
                "on validation clients, whose data nothing was trained on."
            )
        else:
            first += "; no client reported how well that went, so the newest state is kept."
        times = int((self.participations > 0).sum())
        if not times:
            second = "No client released anything, so none spent any privacy."
        elif not self.sanitised:
            second = (
                f"No noise was added, so nothing bounds what the releases told about the data of the {times:,} clients "
                "that took part: the privacy they spent is infinite."
            )
        else:
            median, most = self._spent()
            worth = (
                "here a rule of thumb, no guarantee"
                if self.summary.release.radius_mode is RadiusMode.UPDATE
                else "guaranteed for updates one radius apart"
            )
            second = (
                f"This cost the clients privacy, a spend of {number(median)} in the median and of {number(most)} at "
                "most, where the spend is a limit on how much all releases of a client together tell about its data "
                f"(the lower, the better; {worth})."
            )
        return [first, second]

    def tiles(self) -> list[tuple[str, str, str]]:
        """Return the numbers to see first: what, value, and a remark."""
        tiles = []
        if self.state.best_round:
            name, value = self.summary.loss(self.state.best_loss).split(" ", 1)
            tiles.append((f"Best validation {name}", value, self._best_when()))
            if self._metric_differs():
                best = next(entry for entry in self.history if entry.number == self.state.best_round)
                if best.metric is not None:
                    name = self.summary.model.metric.name
                    tiles.append((f"Validation {name} there", f"{best.metric:.4f}", "of the same hypotheses"))
        asked, released = (sum(getattr(entry, what) for entry in self.trained) for what in ("asked", "releases"))
        tiles.append(("Releases", f"{released:,}", f"of {asked:,} asked for"))
        kind = self._kind()
        median, most = self._spent()
        tiles.append(("Privacy spent, median client", number(median), kind))
        tiles.append(("Privacy spent, at most", number(most), kind))
        return tiles

    def facts(self) -> list[tuple[str, str]]:
        """Return what was run."""
        summary, config = self.summary, self.config
        manifest = summary.manifest
        clients = f"{len(self.participations):,} train"
        if manifest:
            clients += f", {manifest.split['validation']:,} validate"
        radius = {
            RadiusMode.UPDATE: "within the norm of each client's update",
            RadiusMode.PUBLIC: "within a radius that everybody knows",
        }[summary.release.radius_mode]
        noise = f"multiplier {self._multiplier()}, {radius}" if self.sanitised else "none"
        rounds = f"{len(self.trained):,}: {self.state.stopped or 'not over yet'}"
        facts = [
            ("Data", manifest.name if manifest else "each node's own"),
            ("Clients", clients),
            ("Model", f"{summary.model.name}, {count_of(self.n, 'parameter')}, loss {summary.model.loss.name}"),
            ("Strategy", f"{config.get('strategy')}, {count_of(self.k, 'hypothesis', 'hypotheses')}"),
            ("Rounds", rounds),
            ("Noise", noise),
            ("Seed", str(config.get("seed"))),
            ("Time", f"{sum(entry.seconds for entry in self.history):,.1f} s of rounds"),
        ]
        return facts

    def spent_means(self) -> list[str]:
        """Return what the figure for privacy is worth."""
        counted = (
            "Counted are the releases that reached the server in this run. A client's own ledger, on its node, may say "
            "more: it is charged before a release leaves, and for other runs too."
        )
        if not self.sanitised:
            return [
                "This run was unsanitised (noise-multiplier 0, which only a simulation allows): clients released their "
                "trained models as they were. For whoever took part nothing bounds what these tell about the data, and "
                "the spend is infinite. The figure shows how often clients took part instead.",
                counted,
            ]
        cost = self.summary.release.spend(1)
        price = (
            f"A participation costs n/\N{GREEK SMALL LETTER NU} = {self.n:,}/{self._multiplier()} = "
            f"{number(cost)} (parameters over noise multiplier), and participations add up."
        )
        if self.summary.release.radius_mode is RadiusMode.UPDATE:
            unit = self.config.get("noise-per", "vector")
            layers = "" if unit == "vector" else f", {unit} by {unit}"
            worth = (
                f"The figure holds within the norm of the client's own update{layers}, which makes it a heuristic and "
                "no guarantee: the noise depends on what it hides, so that between updates of different norm nothing "
                'is bounded. A guarantee takes radius = "public".'
            )
        else:
            worth = (
                "This is a guarantee: of updates one radius apart, none makes what was released more likely than "
                "another by more than a factor of e to the power of the spend; of any two updates from the same "
                "hypothesis, by more than the square of that. Which hypothesis a client chose is not covered."
            )
        means = [price, worth]
        if cost > _LARGE_COST:
            means.append(
                f"At {number(cost)} a participation, either way it promises next to nothing by itself; what noise of "
                "this kind stops in practice, and what not, is in docs/privacy.md."
            )
        return [*means, counted]

    # --- figures and tables

    def over_rounds(self) -> list[Picture]:
        """Return the figures that have rounds along them."""
        pictures = []
        validated = [entry for entry in self.history if entry.loss is not None]
        best = self.state.best_round or None
        if validated:
            factor, unit = self.summary.scale
            name = self.summary.loss_name
            losses = [(entry.loss or 0.0) * (factor or 1.0) for entry in validated]
            what = (
                "the hypotheses that each round started from, each validation client using the one that fits it best"
                if self.k > 1
                else "the hypothesis that each round started from, over validation clients"
            )
            label = f"validation {name}" + (f" ({unit})" if unit else "")
            pictures.append(
                Picture(
                    "Validation loss",
                    figures.curve(
                        "loss", _curve_alt(label, validated, losses), _numbers(validated), losses, label, best
                    ),
                    f"{name[:1].upper()}{name[1:]} of {what}; lower is better."
                    + (" Marked is the best round." if best else ""),
                )
            )
            if self._metric_differs():
                metric = self.summary.model.metric.name
                values = [entry.metric if entry.metric is not None else np.nan for entry in validated]
                alt = _curve_alt(f"validation {metric}", validated, values)
                pictures.append(
                    Picture(
                        f"Validation {metric}",
                        figures.curve("metric", alt, _numbers(validated), values, f"validation {metric}", best),
                        f"The {metric} that the same clients report at the same time.",
                    )
                )
        if self.trained and self.groups.size:
            totals = self.groups.sum(axis=0)
            alt = "Releases a round for each hypothesis. In total: " + ", ".join(
                f"hypothesis {j} {totals[j]:,}" for j in self.shown
            )
            pictures.append(
                Picture(
                    "Releases of each hypothesis",
                    figures.releases("releases", alt + ".", _numbers(self.trained), self.groups, self.shown),
                    "A release is a trained model that a client sent, with noise, and that the server assigned to "
                    "a hypothesis. A strip that runs dry is a hypothesis that nobody trains any more."
                    if self.sanitised
                    else "A release is a trained model that a client sent and that was assigned to a hypothesis. "
                    "A strip that runs dry is a hypothesis that nobody trains any more.",
                )
            )
        if self.k > 1 and self.history:
            nearest = np.array([entry.nearest for entry in self.history])
            ends = ", ".join(f"hypothesis {j} {number(nearest[0, j])} and {number(nearest[-1, j])}" for j in self.shown)
            alt = f"Distance from each hypothesis to the nearest other one, at first and at last: {ends}."
            pictures.append(
                Picture(
                    "How far apart the hypotheses are",
                    figures.distances("distances", alt, _numbers(self.history), nearest, self.shown),
                    "The distance from each hypothesis to the nearest other one when a round starts. Near zero, they "
                    "are the same model.",
                )
            )
        return pictures

    def hypotheses(self) -> Table:
        """Return what became of each hypothesis."""
        totals = self.groups.sum(axis=0) if self.groups.size else np.zeros(self.k, np.int64)
        last = last_rounds(self.history)
        ends = np.sum([entry.groups for entry in last], axis=0) if last else np.zeros(self.k, np.int64)
        small = self.n <= _SMALL
        vectors = flatten(self.state.best) if small else None
        head = ["Hypothesis", "Releases"]
        head += [f"In the last {len(last)} rounds"] if last else []
        head += ["Parameters at best" if self.state.best_round else "Parameters"] if small else []
        rows: list[list[Any]] = []
        for place, j in enumerate(self.shown):
            row: list[Any] = [figures.key(place) + f" {j}", f"{totals[j]:,}"]
            row += [f"{ends[j]:,}"] if last else []
            if vectors is not None:
                row.append(f"({', '.join(f'{x:.3f}' for x in vectors[j])})".replace("-", "\N{MINUS SIGN}"))
            rows.append(row)
        if rest := [j for j in range(self.k) if j not in self.shown]:
            row = [figures.key(None) + f" {len(rest)} others", f"{totals[rest].sum():,}"]
            row += [f"{ends[rest].sum():,}"] if last else []
            row += [""] if small else []
            rows.append(row)
        return Table(head, rows)

    def spending(self) -> Picture | None:
        """Return the histogram of what training clients spent."""
        if not len(self.participations):
            return None
        bars = figures.tally(self.participations)
        cost = self.summary.release.spend(1) if self.sanitised else None
        median, most = float(np.median(self.participations)), int(self.participations.max())
        values = [number(times * (cost or 1)) for times in (median, most)]
        marks = [(f"median {values[0]}", median), (f"most {values[1]}", float(most))]
        what = "Privacy spent" if self.sanitised else "Times taken part"
        none = int((self.participations == 0).sum())
        caption = f"Number of training clients by what they spent, of {len(self.participations):,} in all"
        if not self.sanitised:
            caption = f"Number of training clients by how often they took part, of {len(self.participations):,} in all"
        caption += f"; {none:,} never took part." if none else "."
        alt = f"Histogram over {len(self.participations):,} training clients: median {values[0]}, most {values[1]}."
        return Picture(f"{what}, by client", figures.spending("spending", alt, bars, cost, marks), caption)

    def planes(self) -> list[Picture]:
        """Return the first and the best round in the plane, for models of two parameters."""
        first, best = self.snapshots.first, self.snapshots.best
        if first is None or best is None:
            return []
        truth = self.summary.truth(2)
        drawn = [("first", first)] + ([("best", best)] if best.round != first.round else [])
        limits = figures.window([one for _, one in drawn], truth)
        pictures = []
        for which, one in drawn:
            counts = ", ".join(f"{int((one.groups == j).sum())} to hypothesis {j}" for j in self.shown)
            alt = f"Round {one.round}: {len(one.releases)} releases in the plane of the two parameters, {counts}."
            title = f"Round {one.round}, the first" if which == "first" else f"Round {one.round}"
            if one.round == self.state.best_round:
                title = f"Round {one.round}, " + ("the first and the best" if which == "first" else "the best")
            elif which == "best":
                title += ", the last"
            caption = (
                f"{count_of(len(one.releases), 'release')}, each in colour and shape of the hypothesis that it was "
                "assigned to. Open markers are the hypotheses that the round started from."
            )
            if len(self.shown) < self.k:
                caption += " All in grey belongs to the other hypotheses."
            if len(one.releases) > figures.MOST_RELEASES:
                caption += f" About {figures.MOST_RELEASES:,} releases are drawn."
            if one.round + 1 == self.state.best_round:
                caption += " What it left is what did best."
            if len(one.releases) and (one.groups < 0).all():
                caption += " Too few to move the hypotheses."
            pictures.append(Picture(title, figures.plane(which, alt, one, truth, self.shown, limits), caption))
        return pictures

    def rounds(self) -> Table:
        """Return the round-by-round table."""
        factor, unit = self.summary.scale
        differs = self._metric_differs()
        every = -(-len(self.history) // _MOST_ROWS) or 1
        entries = [
            entry
            for i, entry in enumerate(self.history)
            if i % every == 0 or entry.number == self.state.best_round or i == len(self.history) - 1
        ]
        head = ["Round", self.summary.loss_name + (f" ({unit})" if unit else "")]
        head += [self.summary.model.metric.name] if differs else []
        head += ["Released", "To each hypothesis" if self.k <= _MOST_GROUPS else "Hypotheses trained"]
        head += ["Least distance"] if self.k > 1 else []
        head += ["Nodes lost", "Seconds"]
        rows, marked = [], None
        for i, entry in enumerate(entries):
            if entry.number == self.state.best_round:
                marked = i
            loss = None if entry.loss is None else entry.loss * (factor or 1.0)
            row = [str(entry.number) if entry.asked else "end"]
            row.append("" if loss is None else f"{loss:,.1f}" if factor else f"{loss:.4f}")
            row += ["" if entry.metric is None else f"{entry.metric:.4f}"] if differs else []
            if not entry.asked:
                row += ["", ""]
            else:
                went = " + ".join(map(str, entry.groups))
                if self.k > _MOST_GROUPS:
                    went = f"{sum(count > 0 for count in entry.groups)} of {self.k}"
                row += [f"{entry.releases} of {entry.asked}", went if entry.moved else "too few"]
            row += [number(min(entry.nearest))] if self.k > 1 else []
            row += [str(entry.lost_nodes or ""), f"{entry.seconds:.2f}"]
            rows.append(row)
        note = "Loss and distances are of the hypotheses that a round started from."
        if every > 1:
            note += f" Every {every}th round; history.jsonl has all {len(self.history):,}."
        return Table(head, rows, marked, note)

    # --- small things

    def _spent(self) -> tuple[float, float]:
        """Return the median and the largest spend of a training client."""
        if not len(self.participations):
            return 0.0, 0.0
        median, most = float(np.median(self.participations)), int(self.participations.max())
        return self.summary.release.spend(median), self.summary.release.spend(most)

    def _multiplier(self) -> str:
        cost = self.summary.release.cost
        return number(float(self.n / cost)) if cost else "0"

    def _kind(self) -> str:
        if not self.sanitised:
            return "unsanitised: no noise"
        return (
            "heuristic, no guarantee"
            if self.summary.release.radius_mode is RadiusMode.UPDATE
            else "guarantee, one radius apart"
        )

    def _metric_differs(self) -> bool:
        return self.summary.model.metric.name.lower() != self.summary.loss_name.lower()

    def _best_when(self) -> str:
        done = self.state.best_round - 1
        return f"after {count_of(done, 'round')} of training" if done else "before any training"


def _numbers(entries: Sequence[Round]) -> list[int]:
    return [entry.number for entry in entries]


def _curve_alt(label: str, entries: Sequence[Round], values: Sequence[float]) -> str:
    ends = f"{number(values[0])} in round {entries[0].number}, {number(values[-1])} in round {entries[-1].number}"
    return f"Line of the {label} over rounds: {ends}, least {number(min(values))}, most {number(max(values))}."


def _text(value: Any) -> str:
    """Return a value of the run config much as one writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'
