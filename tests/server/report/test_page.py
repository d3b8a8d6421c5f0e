"""The report: what it says of hand-made runs, and what a browser makes of it."""

from __future__ import annotations

import html as entities
import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.ImageStat import Stat

import models
from federation import Manifest
from mechanisms.guarantee import site_release
from protocol.release import Kind, RadiusMode, Release
from server.history import Round, State
from server.observer import Section
from server.report import figures, render
from server.snapshots import Snapshot, Snapshots
from server.summary import Summary
from tests.helpers.drawing import leave_blank
from tests.helpers.history import a_round, a_validation

SYNTHETIC = Manifest(name="synthetic", clients=7, split={"train": 4, "validation": 3}, truth=[[5.0, 6.0], [4.0, -4.5]])
HOSPITAL = Manifest(
    name="hospital",
    clients=7,
    split={"train": 4, "validation": 3},
    units={"target": {"name": "payment", "unit": "dollars", "scale": 10_000}},
)
CONFIG = {"strategy": "group-privacy", "noise-multiplier": 5.0, "seed": 3, "validate-every": 1, "model": ""}
VERSIONS = {"flwr": "1.41.0", "python": "3.11.7"}
# Four training clients, who took part so often: the median is 2, and at 2/5 each the paper's budget .8 and at most 2.
PARTICIPATIONS = np.array([0, 1, 3, 5])
VOID = {"meta", "br", "link", "img", "input", "hr", "base", "source", "embed"}


class Page(HTMLParser):
    """What a page says and what it is made of."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        if not {"style", "svg"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.tags if name == tag]


def entry(number: int, **changes: Any) -> Round:
    """A round in which all ten clients released and the hypotheses became better than ever."""
    values = {"loss": 1 / number, "metric": 1 / number, "nearest": [5.0, 5.0], "best_round": number}
    return a_round(number, **values | {"median_participations": 1.0, "max_participations": 2} | changes)


def state(rounds: int = 20, final: bool = True, **changes: Any) -> State:
    """A run in which the loss of theta(t) is 1/t."""
    history = [entry(t) for t in range(1, rounds + 1)]
    if final:
        last = rounds + 1
        history.append(a_validation(last, loss=1 / last, metric=1 / last, nearest=[5.0, 5.0], best_round=last))
    best = {"weight": np.array([[[5.0, 6.5]], [[4.0, -4.0]]], np.float32)}
    values: dict[str, Any] = {
        "hypotheses": best,
        "best": best,
        "best_loss": 1 / max(1, len(history)),
        "best_round": len(history),
        "history": history,
        "stopped": f"all {rounds} rounds done",
    }
    return State(**values | changes)


def snapshots(first: Snapshot | None = None, best: Snapshot | None = None) -> Snapshots:
    kept = Snapshots(state(0, final=False))
    kept.first, kept.best = first, best
    return kept


def report(
    run: State | None = None,
    *,
    model: str = "linear",
    manifest: Manifest | None = SYNTHETIC,
    noise: float = 5.0,
    mode: str = "update",
    mechanism: str = "laplace",
    hypotheses: int = 2,
    choice: float = 0.0,
    by_site: bool = False,
    participations: Any = PARTICIPATIONS,
    kept: Snapshots | None = None,
    config: dict[str, Any] = CONFIG,
    name: str = "a-run",
    sections: Sequence[Section] = (),
    drawn: bool = False,
) -> Page:
    """Return the page of a run; what is drawn takes most of the time, and most tests look at words."""
    network = models.load(model)
    release = Release(
        Kind.TRAIN,
        network.num_parameters,
        noise,
        RadiusMode(mode),
        mechanism=mechanism,
        hypotheses=hypotheses,
        choice_epsilon=choice,
    )
    release = site_release(release) if by_site else release
    told = Summary(network, manifest, release), run or state(), np.asarray(participations), kept or snapshots()
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            leave_blank(patch)
        return Page(render(name, *told, config | {"noise-multiplier": noise}, VERSIONS, sections))


def snapshot(round: int = 1, m: int = 6) -> Snapshot:
    rng = np.random.default_rng(round)
    return Snapshot(round, rng.normal(size=(m, 2)), np.arange(m) % 2, rng.normal(size=(2, 2)))


@cache
def watched() -> Section:
    """What an observer adds."""
    series = {"choice": [1.0, 1.0, 1.0], "norm": [0.5, 0.1, 0.06], "labels": [-0.5, math.nan, -0.5]}
    picture = figures.lines("watched", "What somebody saw, over three rounds.", [1, 5, 9], series, {}, [0.4, 2.0, 3.6])
    return Section("Watched by somebody", ("It saw all.", "Nothing was <b>hidden</b> from it."), str(picture))


@cache
def plain() -> Page:
    return report()


@cache
def formal() -> Page:
    """Of a run with a guarantee: a pure epsilon of 2 n / nu + 1/2 = .51 a participation."""
    return report(mode="public", noise=400.0, choice=0.5)


@cache
def full() -> Page:
    return report(kept=snapshots(snapshot(1), snapshot(20)), sections=[watched()], drawn=True)


# --- what it says


def test_two_sentences_say_what_came_out_and_explain_their_words() -> None:
    text = plain().text
    assert (
        "In 20 rounds, 10 clients at a time (a client is one owner of data, such as a hospital) trained 2 hypotheses "
        "(versions of one model, of which each client uses the one that fits its own data best); they did best after "
        "20 rounds of training, with RMSE 0.0476 (the lower, the better) on validation clients, whose data were not "
        "used for training."
    ) in text
    assert (
        "Noise was added, but nothing is guaranteed to the 3 clients that took part, because the radius is the norm of "
        "the client's own update."
    ) in text


def test_a_loss_is_in_the_unit_of_the_target() -> None:
    page = report(model="mlp", manifest=HOSPITAL, drawn=True)
    assert "with RMSE 476.2 dollars (the lower" in page.text
    assert "validation RMSE (dollars)" in page.html
    assert "RMSE (dollars)" in page.text


def test_one_hypothesis_is_spoken_of_as_one() -> None:
    one = {"weight": np.ones((1, 1, 2), np.float32)}
    history = [entry(t, groups=[10], nearest=[]) for t in range(1, 8)]
    page = report(state(best=one, hypotheses=one, history=history, best_round=7, best_loss=1 / 7))
    assert "trained one hypothesis (a single model for all clients); it did best after 6 rounds" in page.text
    assert "How far apart" not in page.text
    assert "No alarms." in page.text


def test_what_was_run_is_told() -> None:
    text = plain().text
    for words in (
        "Data synthetic", "Clients 4 train, 3 validate", "Model linear, 2 parameters, loss mse",
        "Strategy group-privacy, 2 hypotheses", "Rounds 20: all 20 rounds done", "Seed 3",
        "Noise laplace, multiplier 5, within the norm of each client's update", "Choice open", "flwr 1.41.0",
    ):  # fmt: skip
        assert words in text
    assert "Data each node's own Clients 4 train Model" in report(manifest=None).text
    assert "Noise laplace, multiplier 400, within a radius that everybody knows" in formal().text
    assert "Choice randomised, epsilon 0.5" in formal().text
    assert "Choice none to make" in report(hypotheses=1).text
    assert "Noise gaussian, multiplier 5" in report(mechanism="gaussian").text


def test_the_run_config_is_a_table() -> None:
    text = report(config=CONFIG | {"noise-per": "vector", "min-nodes": 3}).text
    assert "strategy group-privacy noise-multiplier 5.0 seed 3" in text
    assert 'model ""' in text
    assert "noise-per vector min-nodes 3" in text


def test_the_truth_is_compared_with_what_was_found() -> None:
    text = plain().text
    assert "True parameters (5, 6): hypothesis 0 is 0.500 away." in text
    assert "True parameters (4, -4.5): hypothesis 1 is 0.500 away." in text
    assert "True parameters" not in report(manifest=HOSPITAL).text


def test_every_round_has_a_row_and_the_best_is_marked() -> None:
    page = report()
    rows = re.findall(r"<tr( class=\"best\")?><th scope=\"row\">(\d+|end)( \(best\))?</th>", page.html)
    assert [number for _, number, _ in rows] == [*map(str, range(1, 21)), "end"]
    assert [number for best, number, _ in rows if best] == ["end"]
    assert "7 0.1429 10 of 10 4 + 6 5 0.25" in page.text


def test_a_metric_beside_the_loss_has_a_figure_a_tile_and_a_column() -> None:
    page = report(model="cnn", manifest=None)
    assert "Validation accuracy" in page.text
    assert "Validation accuracy in that round" in page.text
    assert 'scope="col">accuracy<' in page.html
    assert "accuracy" not in plain().text


# --- what is guaranteed, and what is not

NU = "\N{GREEK SMALL LETTER NU}"


def test_a_heuristic_is_called_one_everywhere() -> None:
    text = plain().text
    assert (
        f"The paper's budget counts n/{NU} = 2/5 = 0.4 a participation (parameters over noise multiplier): 0.8 for the "
        "median client, 2 at most. It is a heuristic and guarantees nothing."
    ) in text
    assert f"Paper's budget, maximum 2 n/{NU} in all, a heuristic" in text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "the radius is the norm of the client's own update"),
        ({"choice": 1.0}, "the radius is the norm of the client's own update"),
        ({"hypotheses": 1}, "the radius is the norm of the client's own update"),
        ({"mode": "public"}, "the choice among 2 hypotheses is open"),
        ({"mode": "public", "mechanism": "gaussian"}, "the choice among 2 hypotheses is open"),
    ],
    ids=str,
)
def test_where_there_is_no_guarantee_the_reason_is_told(changes: dict[str, Any], why: str) -> None:
    text = report(**changes).text
    assert f"nothing is guaranteed to the 3 clients that took part, because {why}." in text
    assert f'There is no guarantee, because {why}. For one, set radius = "public"' in text
    assert "Epsilon, median client none no guarantee Epsilon, maximum none no guarantee" in text
    assert "Between any two data sets" not in text


def test_a_guarantee_is_called_one_and_says_of_what() -> None:
    text = formal().text
    # Two participations of .51 each; five compose to a little less than 2.55 at a delta.
    assert (
        "What a client's releases tell about its data is bounded: but for a chance of 1e-05, all of them together are "
        "at most e to the power of epsilon times as likely as if its data were any others. Epsilon is 1.02 for the "
        "median client and 2.535 for the one that took part most often (the lower, the better; above 20 it promises "
        "next to nothing)."
    ) in text
    assert (
        "Between any two data sets that a client may have, whatever hypotheses the server sent, all its releases "
        "together are at most e to the power of epsilon times as likely under one as under the other, but for a chance "
        "of 1e-05. One participation has epsilon 0.51, or 0.51 without that chance. Which hypothesis a client trained "
        "is covered: by randomised response of epsilon 0.5."
    ) in text
    assert "Epsilon, maximum 2.535 between any two data sets, at delta 1e-05" in text
    assert "no guarantee" not in text
    assert "It is a heuristic and guarantees nothing." in text, "the paper's budget is told all the same"


def test_of_one_hypothesis_no_choice_is_covered() -> None:
    text = report(mode="public", noise=400.0, hypotheses=1).text
    assert "One participation has epsilon 0.009778, or 0.01 without that chance." in text
    assert "randomised response" not in text


def test_gaussian_noise_has_no_pure_epsilon_and_no_papers_budget() -> None:
    text = report(mode="public", mechanism="gaussian", choice=0.5).text
    assert re.search(r"One participation has epsilon [\d.]+; without that chance, none\.", text)
    assert "The paper's budget counts nothing here: it knows the paper's noise alone, vector Laplace noise." in text
    assert "Paper's budget, maximum" not in text


@pytest.mark.parametrize(
    ("mechanism", "choice"), [("laplace", "hidden by noise on each site's counts, epsilon 0.5"),
                              ("gaussian", "hidden by noise on each site's counts Seed")]
)  # fmt: skip
def test_of_a_sites_sums_it_is_told_whom_clients_trust(mechanism: str, choice: str) -> None:
    text = report(mode="public", mechanism=mechanism, choice=0.5, by_site=True).text
    assert (
        "Which hypothesis a client trained is covered: of that only counts left its site, with noise. Clients trust "
        "their site, which sees their updates and adds the noise."
    ) in text
    assert f"Choice {choice}" in text
    assert f"Noise {mechanism}, multiplier 5, within a radius that everybody knows, on each site's sums" in text
    assert "A release is one client's part in the sums that its site sent, with noise" in text
    assert not re.search("randomised|a trained model that a client sent", text)


def test_of_a_sites_sums_without_noise_nothing_is_hidden() -> None:
    text = report(mode="public", noise=0.0, choice=0.5, by_site=True).text
    assert "sites released sums of updates as they were. Nothing bounds what these tell" in text
    assert "Choice open" in text
    assert "with noise" not in text


@pytest.mark.parametrize("unit", ["layer", "row"])
def test_noise_on_each_part_is_told(unit: str) -> None:
    assert f"norm of each client's update, {unit} by {unit}" in report(config=CONFIG | {"noise-per": unit}).text
    assert f"{unit} by {unit}" not in plain().text


@pytest.mark.parametrize("mode", ["update", "public"])
def test_an_unsanitised_run_says_that_nothing_bounds_what_was_told(mode: str) -> None:
    page = report(noise=0.0, mode=mode, choice=1.0, drawn=mode == "public")
    assert (
        "No noise was added, so nothing bounds what the releases told about the data of the 3 clients that took part."
    ) in page.text
    assert "This run was unsanitised" in page.text
    assert "Noise none" in page.text
    assert "Epsilon, maximum none no guarantee" in page.text
    assert not re.search("heuristic|with noise|is bounded|at delta", page.text)
    if mode == "public":
        assert ">participations</text>" in page.html


def test_the_histogram_marks_median_and_maximum_and_counts_everybody() -> None:
    page = full()
    assert ">median 2</text>" in page.html
    assert ">maximum 5</text>" in page.html
    assert (
        "Participations, by client Number of training clients by how often they took part, of 4 in all; 1 never took "
        "part."
    ) in page.text


def test_the_histogram_tells_epsilon_where_there_is_one() -> None:
    page = report(mode="public", noise=400.0, choice=0.5, drawn=True)
    assert ">median 2, epsilon 1.02</text>" in page.html
    assert ">maximum 5, epsilon 2.535</text>" in page.html
    assert "Histogram over 4 training clients: median 2, epsilon 1.02, maximum 5, epsilon 2.535." in page.html


@pytest.mark.parametrize(("times", "warned"), [(39, False), (10_000, True)])
def test_an_epsilon_over_all_participations_that_says_nothing_is_told_to(times: int, warned: bool) -> None:
    text = report(mode="public", noise=400.0, choice=0.5, participations=[0, 0, 0, times]).text
    assert ("An epsilon above 20 promises next to nothing; docs/privacy.md says" in text) is warned


def test_when_nobody_released_nothing_was_given_away() -> None:
    run = state()
    run.history = [replace(one, releases=0, groups=[0, 0], moved=False) for one in run.history[:20]]
    for changes in ({}, {"mode": "public", "choice": 1.0}):
        page = report(run, participations=[0, 0, 0, 0], **changes)
        assert "No client released anything." in page.text
        assert "Epsilon, maximum 0 between any two data sets, at delta 1e-05" in page.text
        assert "Too few releases." in page.text


# --- alarms


def test_without_an_alarm_there_is_no_box() -> None:
    page = report()
    assert "No alarms." in page.text
    assert not any(attrs.get("class") == "alarms" for attrs in page.of("section"))
    assert "Here that is the last 5 of these rounds." in page.text


def test_an_alarm_stands_before_the_outcome() -> None:
    run = state()
    run.history = [replace(one, groups=[10, 0] if one.asked else []) for one in run.history]
    page = report(run)
    assert any(attrs.get("class") == "alarms" for attrs in page.of("section"))
    assert page.text.index("Clusters collapsed into one.") < page.text.index("In 20 rounds, 10 clients")
    assert "No alarms." not in page.text


def test_the_servers_own_data_say_whether_anybody_should_have_validated() -> None:
    run = state(final=False, best_round=0, best_loss=math.inf)
    run.history = [replace(one, loss=None, metric=None, best_round=0) for one in run.history]
    assert "Validation loss not finite." in report(run).text
    assert "No alarms." in report(run, manifest=None).text


# --- what observers add


def test_a_section_stands_under_its_title_with_its_words_and_its_picture() -> None:
    page = full()
    titles = [attrs["aria-labelledby"] for attrs in page.of("section")]
    assert "added-1" in titles
    assert "Watched by somebody It saw all. Nothing was <b>hidden</b> from it. Privacy Participations" in page.text
    assert "<b>hidden" not in page.html, "all text is shown as text"
    assert "What somebody saw, over three rounds." in [attrs.get("aria-label") for attrs in page.of("svg")]
    assert len(page.of("figure")) == 1 + len(report(kept=snapshots(snapshot(1), snapshot(20))).of("figure"))


def test_sections_come_in_order_and_a_picture_is_not_needed() -> None:
    page = report(sections=[Section("First"), Section("Second", ("With words.",))])
    assert page.text.index("First") < page.text.index("Second With words.")
    assert [attrs["id"] for attrs in page.of("h2") if attrs["id"].startswith("added")] == ["added-1", "added-2"]


def test_without_observers_there_is_nothing_of_theirs() -> None:
    assert "added-" not in plain().html


# --- any run can be told


def without_validation() -> State:
    run = state(final=False, best_round=0, best_loss=math.inf)
    run.history = [replace(one, loss=None, metric=None, best_round=0) for one in run.history]
    return run


def infinite_losses() -> State:
    run = state(final=False, best_round=0, best_loss=math.inf)
    run.history = [replace(one, loss=math.inf, metric=math.inf, best_round=0) for one in run.history]
    return run


def diverged() -> State:
    run = state()
    run.history = [replace(one, nearest=[math.nan, math.inf]) for one in run.history]
    run.best = run.hypotheses = {"weight": np.full((2, 1, 2), np.nan, np.float32)}
    return run


def many(k: int = 1000, rounds: int = 40) -> State:
    best = {"weight": np.zeros((k, 1, 2), np.float32)}
    groups = np.random.default_rng(0).multinomial(100, np.ones(k) / k, rounds)
    history = [
        entry(t, groups=row.tolist(), nearest=[1.0] * k, asked=100, releases=100) for t, row in enumerate(groups, 1)
    ]
    return state(best=best, hypotheses=best, history=history, best_round=rounds)


ODD_RUNS = {
    "one round": lambda: state(1),
    "one round and no evaluation": lambda: state(1, final=False, best_round=1, best_loss=1.0),
    "no validation": without_validation,
    "infinite losses": infinite_losses,
    "diverged": diverged,
    "a thousand hypotheses": many,
    "no round at all": lambda: state(0, final=False, best_round=0, best_loss=math.inf),
    "nobody validated now and then": lambda: state(
        history=[entry(t, loss=1.0 if t % 5 == 1 else None, metric=None, best_round=1) for t in range(1, 20)],
        best_round=1,
    ),
}


@pytest.mark.parametrize(("mode", "noise", "choice"), [("update", 0.0, 0.0), ("public", 5.0, 1.0)])
@pytest.mark.parametrize("run", ODD_RUNS.values(), ids=ODD_RUNS.keys())
def test_any_run_can_be_told(run: Any, noise: float, mode: str, choice: float) -> None:
    # What is drawn without noise differs in the words on one histogram alone.
    page = report(run(), noise=noise, mode=mode, choice=choice, participations=[0, 0, 1, 1], drawn=noise > 0)
    assert "What was run" in page.text
    assert "None" not in page.text.replace("None of", "")


def test_without_validation_no_best_is_claimed() -> None:
    page = report(without_validation(), manifest=None)
    assert "no client reported how well that went, so the newest state is kept." in page.text
    assert "best)" not in page.text.replace("data best)", "")
    assert "Validation loss" not in page.text.replace("validation that gave", "")


def test_of_many_hypotheses_the_most_trained_are_shown() -> None:
    run = many(12)
    totals = np.sum([one.groups for one in run.history], axis=0)
    page = report(run, participations=[1] * 4, drawn=True)
    shown = [int(j) for j in re.findall(r">hypothesis (\d+)</text>", page.html)]
    assert len(shown) == 8
    assert totals[shown].min() >= np.delete(totals, shown).max()
    assert "4 others" in page.text


@pytest.mark.parametrize(("rounds", "rows"), [(1000, 1000), (1001, 502), (4000, 1002)])
def test_thousands_of_rounds_are_thinned_in_the_table(rounds: int, rows: int) -> None:
    page = report(state(rounds, final=False, best_round=2, best_loss=0.5))
    assert page.html.count("10 of 10") == rows
    assert ("history.jsonl has all" in page.text) == (rounds > 1000)
    assert "2 (best)" in page.text


def test_a_large_run_gives_a_page_of_reasonable_size() -> None:
    rng = np.random.default_rng(0)
    best = {"weight": np.zeros((7, 1, 2), np.float32)}
    history = [
        entry(t, loss=float(rng.random()), groups=rng.multinomial(100, [1 / 7] * 7).tolist(), asked=100,
              nearest=rng.random(7).tolist())
        for t in range(1, 501)
    ]  # fmt: skip
    both = [Snapshot(t, rng.normal(size=(100, 2)), rng.integers(0, 7, 100), rng.normal(size=(7, 2))) for t in (1, 9)]
    page = report(
        state(best=best, hypotheses=best, history=history, best_round=9), kept=snapshots(*both),
        participations=rng.poisson(25, 2062), drawn=True,
    )  # fmt: skip
    assert len(page.html.encode()) < 1_000_000
    assert len(report(many(1000, 1000), drawn=True).html.encode()) < 1_000_000


def test_a_model_of_a_million_parameters_is_no_trouble() -> None:
    best = {"weight": np.zeros((2, 600_000), np.float32)}
    page = report(state(best=best, hypotheses=best), model="cnn", manifest=None, drawn=True)
    assert len(page.html) < 200_000


# --- releases in the plane


def test_two_rounds_are_drawn_in_the_plane() -> None:
    page = full()
    assert "Round 1, the first" in page.text
    assert "Round 20, the last" in page.text
    assert "The hypotheses that it produced did best." in page.text
    labels = [attrs["aria-label"] for attrs in page.of("svg") if "aria-label" in attrs]
    assert "Round 1: 6 releases in the plane of the two parameters, 3 to hypothesis 0, 3 to hypothesis 1." in labels


def test_a_best_round_is_called_best_and_a_first_one_drawn_once() -> None:
    assert "Round 7, the best" in report(state(best_round=7), kept=snapshots(snapshot(1), snapshot(7))).text
    page = report(state(best_round=1), kept=snapshots(snapshot(1), snapshot(1)))
    assert "Round 1, the first and the best" in page.text
    assert page.text.count("releases, each in the colour and shape") == 1


def test_releases_that_were_too_few_are_drawn_all_the_same() -> None:
    few = Snapshot(1, np.ones((2, 2)), np.array([-1, -1]), np.zeros((2, 2)))
    none = Snapshot(2, np.zeros((0, 2)), np.zeros(0, np.int64), np.zeros((2, 2)))
    text = report(state(best_round=2), kept=snapshots(few, none), drawn=True).text
    assert "2 releases, each in the colour" in text
    assert "These were too few to move the hypotheses." in text
    assert "0 releases" in text


# --- one file, for everybody


def test_the_page_needs_nothing_from_outside() -> None:
    page = full()
    for _, attrs in page.tags:
        for name, value in attrs.items():
            if name in ("src", "srcset", "action", "data", "poster") or name.endswith("href"):
                assert value.startswith("#"), value
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not re.search(r"https?:|file:|@import|@font-face", page.html)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", page.html))
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)


def test_all_text_is_shown_as_text() -> None:
    evil = "</svg><script>alert('1 & 2')</script>{{ 7 * 7 }}<b title=\"x\">"
    units = {"target": {"name": evil, "unit": evil, "scale": 2}}
    manifest = Manifest(name=evil, clients=2, split={"train": 1, "validation": 1}, units=units)
    config = CONFIG | {evil: evil, "strategy": evil, "seed": evil}
    page = report(
        state(stopped=evil), manifest=manifest, config=config, name=evil, kept=snapshots(snapshot(), snapshot()),
        sections=[Section(evil, (evil, evil))], drawn=True,
    )  # fmt: skip
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    assert evil not in page.html
    assert page.text.count(evil) >= 11, "name, data, strategy, seed, how it ended, unit, in the config, and added"


def test_the_same_run_gives_the_same_file() -> None:
    assert full.__wrapped__().html == full().html


def test_ids_are_unique_and_references_lead_somewhere() -> None:
    page = full()
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in page.tags:
        for name, value in attrs.items():
            if name.endswith("href"):
                assert value[1:] in ids
            if name == "aria-labelledby":
                assert value in ids


def test_figures_tables_and_headings_are_for_everybody() -> None:
    page = full()
    drawings = [attrs for attrs in page.of("svg") if attrs.get("class") != "key"]
    assert len(drawings) == 7
    assert all(attrs["role"] == "img" and len(attrs["aria-label"]) > 20 for attrs in drawings)
    assert all(attrs.get("aria-hidden") == "true" for attrs in page.of("svg") if attrs.get("class") == "key")
    assert all(attrs.get("scope") in ("row", "col") for attrs in page.of("th"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.of("html") == [{"lang": "en"}]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_stand_out_from_the_paper(theme: int) -> None:
    blocks = re.findall(r":root \{([^}]*--paper[^}]*)\}", plain().html)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[theme]))
    for name in ("ink", "muted", "good"):
        assert contrast(colours[name], colours["paper"]) >= 4.5, name
    assert contrast(colours["ink"], colours["alarm"]) >= 4.5
    for name in ("rest", *(f"series-{j}" for j in range(1, 9))):
        assert contrast(colours[name], colours["paper"]) >= 3, name


# --- in a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
WIDTHS = {"desktop": 1280, "phone": 390}
PROBE = """<script>
addEventListener("load", () => {
  const out = {
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - innerWidth,
    figures: [...document.querySelectorAll("figure svg")].map(svg => {
      const box = svg.getBoundingClientRect();
      const spill = [...svg.querySelectorAll("text")].map(text => {
        const at = text.getBoundingClientRect();
        return Math.max(box.left - at.left, at.right - box.right, box.top - at.top, at.bottom - box.bottom);
      });
      return [box.left, box.top + scrollY, box.right, box.bottom + scrollY, Math.max(...spill)];
    }),
  };
  parent.postMessage(JSON.stringify(out), "*");
});
</script></body>"""
# A window is at least 500 wide, a frame in it as wide as one likes.
FRAME = """<!doctype html><title></title><body style="margin: 0"><script>
addEventListener("message", event => { document.title = event.data; });
</script><iframe src="probe.html" width="%d" height="4000" style="border: 0"></iframe>"""
browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium or Chrome on this machine")


def chromium(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", *options,
        ],
        capture_output=True, text=True, check=True, timeout=900, cwd=folder,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wide() -> str:
    """A run of seven hypotheses with an alarm, long names and a large table."""
    rng = np.random.default_rng(0)
    best = {"weight": rng.normal(size=(7, 1, 2)).astype(np.float32)}
    history = [
        entry(t, loss=float(rng.random()) + 1 / t, groups=[*rng.multinomial(100, [1 / 6] * 6).tolist(), 0], asked=100,
              nearest=rng.random(7).tolist(), lost_nodes=int(t == 3))
        for t in range(1, 101)
    ]  # fmt: skip
    both = [Snapshot(t, rng.normal(size=(100, 2)), rng.integers(0, 7, 100), rng.normal(size=(7, 2))) for t in (1, 9)]
    return report(
        state(best=best, hypotheses=best, history=history, best_round=9), sections=[watched()], kept=snapshots(*both),
        participations=rng.poisson(25, 500), name="20260101-000000-" + "long" * 20,
        config=CONFIG | {"model": "a.long.package:" + "Name" * 20}, drawn=True,
    ).html  # fmt: skip


def measure(folder: Path, html: str, width: int) -> dict[str, Any]:
    (folder / "probe.html").write_text(html.replace("</body>", PROBE), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME % width, encoding="utf-8")
    done = chromium(folder, "--window-size=1280,4000", "--dump-dom", f"file://{folder / 'frame.html'}")
    assert "CONSOLE" not in done.stderr, "the browser complains"
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title
    measured: dict[str, Any] = json.loads(entities.unescape(title[1]))
    return measured


@browser
@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
def test_it_fits_the_window_and_every_figure_holds_its_words(tmp_path: Path, wide: str, width: int) -> None:
    measured = measure(tmp_path, wide, width)
    assert measured["width"] == width
    assert measured["overflow"] <= 0
    assert len(measured["figures"]) == 7
    for left, _, right, _, spill in measured["figures"]:
        assert 0 <= left < right <= width
        assert spill < 2


@browser
@pytest.mark.slow
def test_it_is_light_or_dark_as_the_reader_likes_and_no_figure_is_blank(tmp_path: Path, wide: str) -> None:
    (tmp_path / "page.html").write_text(wide, encoding="utf-8")
    figures = measure(tmp_path, wide, 1280)["figures"]
    brightness = {}
    # Chromium's setting: 0 is dark, 1 is light.
    for theme, setting in (("light", 1), ("dark", 0)):
        picture = tmp_path / f"{theme}.png"
        chromium(
            tmp_path, f"--blink-settings=preferredColorScheme={setting}", "--window-size=1280,4000",
            f"--screenshot={picture}", f"file://{tmp_path / 'page.html'}",
        )  # fmt: skip
        with Image.open(picture) as image:
            grey = image.convert("L")
            brightness[theme] = grey.getpixel((5, 5))
            for left, top, right, bottom, _ in figures:
                part = grey.crop((int(left), int(top), int(right), int(bottom)))
                assert Stat(part).stddev[0] > 5, "a figure is blank"
    assert brightness["light"] > 240
    assert brightness["dark"] < 40


@browser
@pytest.mark.slow
def test_it_prints(tmp_path: Path, wide: str) -> None:
    (tmp_path / "page.html").write_text(wide, encoding="utf-8")
    chromium(tmp_path, f"--print-to-pdf={tmp_path / 'page.pdf'}", f"file://{tmp_path / 'page.html'}")
    content = (tmp_path / "page.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", content)) in range(3, 9)
