"""The report: what it says of hand-made runs."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.helpers.reports import (
    CONFIG,
    HOSPITAL,
    Page,
    entry,
    formal,
    full,
    plain,
    report,
    state,
)
from umbel.data import Manifest
from umbel.protocol.ranges import RangesBefore
from umbel.protocol.release import ReleaseBy, RowPrivacy
from umbel.server.history import State

# --- what it says


def test_a_sentence_says_what_came_out_and_explains_its_words() -> None:
    for words in (
        "In 20 rounds, up to 10 clients at a time trained 2 hypotheses: versions of one model, of which each client "
        "uses the one that fits its data best. A client is one owner of data, such as a hospital.",
        "After 20 rounds of training, the loss on validation clients, whose data were not used for training, was RMSE "
        "0.0476 (the lower, the better).",
    ):
        assert words in plain().text


def test_the_title_is_what_was_learnt_and_when_stands_under_it() -> None:
    page = report(name="20261122-170509-synthetic-group-privacy-000042")
    assert "<h1>synthetic, group-privacy, linear</h1>" in page.html
    assert "22 November 2026, 17:05:09 20261122-170509-synthetic-group-privacy-000042 After 20 rounds" in page.text
    assert "linear a-run After 20 rounds" in plain().text, "a name without a time stamp is told alone"
    assert "linear 99999999-999999-x After 20 rounds" in report(name="99999999-999999-x").text, "and one of no time"
    assert "<h1>each site&#39;s own data, group-privacy, linear</h1>" in report(manifest=None).html


def test_a_page_holds_no_signs_that_a_terminal_or_a_line_would_act_on() -> None:
    page = report(name="a\x1b[31m\x00\u202eb").html
    assert "a\ufffd[31m\ufffd\ufffdb" in page
    assert not {"\x1b", "\x00", "\u202e"} & set(page)


def test_a_loss_is_in_the_unit_of_the_target() -> None:
    page = report(model="mlp", manifest=HOSPITAL, drawn=True)
    assert "was RMSE 476.2 dollars (the lower" in page.text
    assert "validation RMSE (dollars)" in page.html
    assert "RMSE (dollars)" in page.text


def test_what_was_run_is_told() -> None:
    text = plain().text
    for words in (
        "Data synthetic", "Clients 4 train, 3 validate", "Model linear, 2 parameters, loss mse",
        "Strategy group-privacy, 2 hypotheses", "Rounds 20: all 20 rounds done", "Seed 3",
        "Noise laplace, multiplier 5, clipped to the norm of each client's update", "Choice open", "flwr 1.42.0",
    ):  # fmt: skip
        assert words in text
    assert "Data each node's own Clients 4 train Model" in report(manifest=None).text
    assert "Noise laplace, multiplier 400, public clip norm" in formal().text
    assert "Choice randomised, epsilon 0.5" in formal().text
    assert "Choice none Seed" in report(hypotheses=1).text
    assert "Noise gaussian, multiplier 5" in report(mechanism="gaussian").text


def test_of_the_run_config_what_was_set_comes_first_and_defaults_are_folded_away() -> None:
    page = report(noise=2.0, config=CONFIG | {"noise-per": "layer", "wait": "nodes=3", "rounds": 100})
    assert page.text.endswith(
        "Run config Changed keys seed 3 noise-per layer wait nodes=3 5 keys at their defaults Defaults strategy "
        'group-privacy noise-multiplier 2.0 validation clients=0 every=1 by=mean model "" rounds 100'
    )
    (defaults,) = re.findall(r"<details[^>]*>\s*<summary>5 keys", page.html)
    assert "open" not in defaults
    assert "All keys are at their defaults." in report(noise=2.0, config={"strategy": "group-privacy"}).text


def test_the_truth_is_compared_with_what_was_found() -> None:
    text = plain().text
    assert "True parameters (5, 6): hypothesis 0 is 0.500 away." in text
    assert "True parameters (4, -4.5): hypothesis 1 is 0.500 away." in text
    assert "True parameters" not in report(manifest=HOSPITAL).text


def test_every_round_has_a_row_and_the_best_is_marked() -> None:
    page = report()
    rows = re.findall(r"<tr( class=\"best\")?><th scope=\"row\">(\d+)( \(best\))?</th>", page.html)
    assert [number for _, number, _ in rows] == [*map(str, range(21))]
    assert [number for best, number, _ in rows if best] == ["20"]
    assert "6 0.1429 10 of 10 4 + 6 5 0.25" in page.text


@pytest.mark.parametrize(("scale", "loss"), [(1.0, "0.143"), (1e-6, "1.43e-07"), (None, "0.1429")])
def test_the_loss_of_a_round_is_no_0_whatever_its_size(scale: float | None, loss: str) -> None:
    units = {"target": {"name": "cost", "unit": "dollars", **({"scale": scale} if scale else {})}}
    assert f"6 {loss} 10 of 10 4 + 6 5 0.25" in report(manifest=HOSPITAL.model_copy(update={"units": units})).text


def test_a_metric_beside_the_loss_has_a_figure_a_tile_and_a_column() -> None:
    page = report(model="cnn", manifest=None)
    assert "Validation accuracy" in page.text
    assert "Validation accuracy at the end" in page.text
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
    assert f"A heuristic, not a guarantee at most 2 The paper's budget counts n/{NU} for each participation" in text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "each update is clipped to its own norm, which proves nothing"),
        ({"mode": "public", "mechanism": "gaussian"}, "the choice among 2 hypotheses is open"),
    ],
    ids=str,
)
def test_where_there_is_no_guarantee_the_reason_is_told(changes: dict[str, Any], why: str) -> None:
    text = report(**changes).text
    assert f"there is no guarantee for the 3 clients that took part, because {why}." in text
    assert f'There is no guarantee, because {why}. To get one, set clipping = "public"' in text
    assert "Privacy, between any two data sets no guarantee Despite the noise" in text
    assert "at delta" not in text


def test_it_begins_with_the_outcome_in_words() -> None:
    def lead(page: Page) -> str:
        return page.text.partition(" a-run ")[2].partition(" Privacy, between")[0]

    outcome = "After 20 rounds of training, validation clients had RMSE 0.0476 (the lower, the better). "
    why = "each update is clipped to its own norm, which proves nothing"
    assert lead(report()) == f"{outcome}Clients have no guarantee, because {why}."
    assert lead(report(noise=0.0)) == f"{outcome}Clients have no guarantee, because there is no noise."
    assert lead(formal()) == f"{outcome}Each client has a guarantee: epsilon 2.535 at delta 1e-05."


def test_clients_that_reported_exact_losses_stand_outside_the_guarantee() -> None:
    exact = [replace(one, exact_reports=10) for one in state().history]
    assert "Outside the guarantee 10 validation clients They reported exact losses" in report(state(history=exact)).text
    assert "Outside the guarantee" not in report().text


def test_a_question_about_ranges_stands_in_the_guarantee() -> None:
    assert "question about ranges" not in formal().text
    asked = RangesBefore(348, 14.08, "gaussian", ReleaseBy.SITE).release
    assert (
        "In the guarantee the question about ranges"
        in report(mode="public", noise=400.0, choice=0.5, before=asked).text
    )


def test_a_guarantee_is_called_one_and_says_of_what() -> None:
    text = formal().text
    # Five participations of .51 each compose to a little less than 2.55 at a delta.
    for words in (
        "data sets epsilon 2.535 at delta 1e-05 It holds for each client over the whole run. The probability of a "
        "client's releases is at most e to the power of epsilon times that with any other data, plus 1e-05.",
        "One participation alone has pure epsilon 0.51. The guarantee covers the choice of a "
        "hypothesis: it was randomised, with epsilon 0.5.",
    ):
        assert words in text
    assert not re.search("nothing is guaranteed|no guarantee|none", text.partition("Result")[0])
    assert "It is a heuristic and guarantees nothing." in text, "the paper's budget is told all the same"


@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_the_guarantee_of_a_row_stands_beside_the_clients(noise: float) -> None:
    rows = RowPrivacy(1.0, 1.0, 0.02, 10.0, 50)
    text = report(mode="public", hypotheses=1, noise=noise, rows=rows).text
    assert "For each row epsilon " in text
    assert "differ by one row, added or removed" in text
    assert "Each of the 50 training steps" in text
    assert ("no guarantee for clients" in text) is (noise == 0)
    assert "unsanitised" not in text
    open_choice = report(mode="public", noise=noise, rows=rows).text
    assert "Rows have no guarantee, because the choice among 2 hypotheses is open." in open_choice


def test_gaussian_noise_has_no_pure_epsilon_and_no_papers_budget() -> None:
    text = report(mode="public", mechanism="gaussian", choice=0.5).text
    assert re.search(r"One participation alone has epsilon [\d.]+ at delta 1e-05\.", text)
    assert "The paper's budget does not apply here: it covers only vector Laplace noise." in text
    assert "A heuristic" not in text


@pytest.mark.parametrize("planned", [20, 50])
def test_of_a_run_that_ended_early_it_is_told_what_its_epsilon_counts(planned: int) -> None:
    text = report(mode="public", mechanism="gaussian", choice=0.5, planned=planned).text
    assert ("30 rounds of the run were not done" in text) is (planned == 50)


@pytest.mark.parametrize(
    ("mechanism", "choice"), [("laplace", "hidden by noise on each site's counts, epsilon 0.5"),
                              ("gaussian", "hidden by noise on each site's counts Seed")]
)  # fmt: skip
def test_of_a_sites_sums_it_is_told_whom_clients_trust(mechanism: str, choice: str) -> None:
    text = report(mode="public", mechanism=mechanism, choice=0.5, by_site=True).text
    assert (
        "The guarantee covers the choice of a hypothesis: only counts with noise left the site. Clients trust their "
        "site, which sees their updates and adds the noise."
    ) in text
    assert f"Choice {choice}" in text
    assert f"Noise {mechanism}, multiplier 5, public clip norm, on each site's sums" in text
    assert "A release is one client's part in the noisy sums of its site" in text
    assert not re.search("randomised|a client's trained model", text)


def test_of_a_sites_sums_without_noise_nothing_is_hidden() -> None:
    text = report(mode="public", noise=0.0, choice=0.5, by_site=True).text
    assert "sites released sums of updates without noise. These may reveal anything" in text
    assert "Choice open" in text
    assert "with noise" not in text


@pytest.mark.parametrize("mode", ["update", "public"])
def test_an_unsanitised_run_says_that_nothing_bounds_what_was_told(mode: str) -> None:
    page = report(noise=0.0, mode=mode, choice=1.0, drawn=mode == "public")
    assert (
        "No noise was added, so the releases may reveal anything about the data of the 3 clients that took part."
    ) in page.text
    assert "This run was unsanitised" in page.text
    assert "Noise none" in page.text
    assert "Privacy, between any two data sets no guarantee No noise was added" in page.text
    assert not re.search("heuristic|with noise|is bounded|at delta", page.text)
    if mode == "public":
        assert ">participations</text>" in page.html


def test_the_histogram_marks_median_and_maximum_and_counts_everybody() -> None:
    page = full()
    assert ">median 2</text>" in page.html
    assert ">maximum 5</text>" in page.html
    assert "4 training clients, by number of participations; 1 never took part." in page.text
    assert "Histogram over 4 training clients: median 2, maximum 5." in formal().html


def test_an_epsilon_that_promises_nothing_is_no_verdict_to_be_glad_of() -> None:
    def of(times: int) -> Page:
        return report(mode="public", noise=400.0, choice=0.5, participations=[0, 0, 0, times])

    pages = (plain(), of(39), of(10_000))
    kinds = [re.search(r'<div class="(\w+)">\s*<h2 id="verdict"', page.html) for page in pages]
    assert [kind and kind[1] for kind in kinds] == ["none", "holds", "weak"]
    said = "An epsilon above 20 promises next to nothing; docs/papers/group-privacy.md shows"
    warned = [said in page.text for page in pages]
    assert warned == [False, False, True]


def test_when_nobody_released_nothing_was_given_away() -> None:
    run = state()
    run.history = [replace(one, releases=0, groups=[0, 0], moved=False) for one in run.history]
    for changes in ({}, {"mode": "public", "choice": 1.0}):
        page = report(run, participations=[0, 0, 0, 0], **changes)
        assert "data sets nothing released No client released anything." in page.text


# --- alarms


def test_without_an_alarm_there_is_no_box() -> None:
    page = report()
    assert "This run gave no alarm." in page.text
    assert not any(attrs.get("class") == "alarms" for attrs in page.of("section"))
    assert "In this run it is the last 5 rounds." in page.text


def test_an_alarm_stands_after_the_verdict_on_privacy_and_before_the_outcome() -> None:
    run = state()
    run.history = [replace(one, groups=[10, 0] if one.asked else []) for one in run.history]
    page = report(run)
    assert any(attrs.get("class") == "alarms" for attrs in page.of("section"))
    places = [
        page.text.index(words)
        for words in ("any two data sets", "Clusters collapsed", "In 20 rounds, up to 10 clients")
    ]
    assert places == sorted(places)
    assert "This run gave no alarm." not in page.text


def test_the_servers_own_data_say_whether_anybody_should_have_validated() -> None:
    assert "Validation loss not finite." in report(losing(None)).text
    text = report(losing(None), manifest=None).text
    assert "This run gave no alarm." in text
    assert "No client reported a loss, so the newest hypotheses are kept." in text
    assert "best)" not in text.replace("data best)", "")


# --- how clients differ


def spread_out(run: State) -> State:
    quantiles = [0.1, 0.2, 0.3, 0.4, 0.5]
    run.history = [replace(one, loss_spread=quantiles, metric_spread=quantiles[::-1]) for one in run.history]
    return run


def test_the_spread_over_clients_is_told_in_the_unit_of_the_target() -> None:
    page = report(spread_out(state()), model="mlp", manifest=HOSPITAL, drawn=True)
    assert "Of 100 clients RMSE (dollars) the 10th 1,000 the 25th 2,000 the median 3,000" in page.text
    assert "RMSE of the worst tenth 5,000.0 dollars or more, among validation clients" in page.text
    assert ">8 of 10 clients</text>" in page.html


# --- what became of the hypotheses


def test_who_picked_a_hypothesis_is_told_where_it_is_known() -> None:
    assert "Hypothesis Releases" in plain().text
    open_choice = report(config=CONFIG | {"strategy": "ifca"}).text
    assert "Hypothesis Picked in training" in open_choice
    assert "Training clients disclosed their choices." in open_choice


# --- any run can be told


def losing(loss: float | None) -> State:
    run = state(final=False, best_round=0, best_loss=math.inf)
    run.history = [replace(one, loss=loss, metric=loss) for one in run.history]
    return run


def diverged() -> State:
    run = state()
    run.history = [replace(one, nearest=[math.nan, math.inf]) for one in run.history]
    run.best = run.hypotheses = {"weight": np.full((2, 1, 2), np.nan, np.float32)}
    return run


def many(k: int = 1000, rounds: int = 40) -> State:
    best = {"weight": np.zeros((k, 1, 2), np.float32)}
    groups = np.random.default_rng(0).multinomial(100, np.ones(k) / k, rounds)
    trained = [{"groups": row.tolist(), "asked": 100, "releases": 100} for row in groups]
    history = [entry(t, nearest=[1.0] * k, **changes) for t, changes in enumerate([{}, *trained])]
    return state(best=best, hypotheses=best, history=history, best_round=rounds)


ODD_RUNS = {
    "one round": lambda: state(1),
    "one round and no evaluation": lambda: state(1, final=False, best_round=0, best_loss=1.0),
    "no validation": lambda: losing(None),
    "infinite losses": lambda: losing(math.inf),
    "diverged": diverged,
    "a thousand hypotheses": many,
    "no round at all": lambda: state(0, final=False, best_round=0, best_loss=math.inf),
    "nobody validated now and then": lambda: state(
        history=[entry(t, loss=1.0 if t % 5 == 0 else None, metric=None, best_round=0) for t in range(20)],
        best_round=0,
    ),
}


@pytest.mark.parametrize(("mode", "noise", "choice"), [("update", 0.0, 0.0), ("public", 5.0, 1.0)])
@pytest.mark.parametrize("run", ODD_RUNS.values(), ids=ODD_RUNS.keys())
def test_any_run_can_be_told(run: Any, noise: float, mode: str, choice: float) -> None:
    # What is drawn without noise differs in the words on one histogram alone; of many hypotheses see below.
    drawn = noise > 0 and run is not many
    page = report(run(), noise=noise, mode=mode, choice=choice, participations=[0, 0, 1, 1], drawn=drawn)
    assert "What was run" in page.text
    assert "None" not in page.text.replace("None of", "")


def test_of_many_hypotheses_the_most_trained_are_shown() -> None:
    run = many(12)
    totals = np.sum([one.groups for one in run.history[1:]], axis=0)
    page = report(run, participations=[1] * 4, drawn=True)
    shown = [int(j) for j in re.findall(r">hypothesis (\d+)</text>", page.html)]
    assert len(shown) == 8
    assert totals[shown].min() >= np.delete(totals, shown).max()
    assert "4 others" in page.text


@pytest.mark.parametrize(("rounds", "rows"), [(999, 999), (1001, 501)])
def test_thousands_of_rounds_are_thinned_in_the_table(rounds: int, rows: int) -> None:
    page = report(state(rounds, final=False, best_round=2, best_loss=0.5))
    assert page.html.count("10 of 10") == rows
    assert len(page.html) < 300_000, "with figures of their largest size it is less than a megabyte"
    assert ("history.jsonl has all" in page.text) == (rounds > 1000)
    assert "2 (best)" in page.text


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
        state(stopped=evil), manifest=manifest, config=config, name=evil,
        drawn=True,
    )  # fmt: skip
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    [policy] = [attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy, "no script, and nothing from elsewhere"
    assert evil not in page.html
    assert page.text.count(evil) >= 11, "name, data, strategy, seed, how it ended, unit, in the config, and added"


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
    assert len(drawings) == 4
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
    for name in ("ink", "muted"):
        for behind in ("paper", "soft"):
            assert contrast(colours[name], colours[behind]) >= 4.5, (name, behind)
    assert contrast(colours["ink"], colours["alarm"]) >= 4.5
    for name in ("rest", *(f"series-{j}" for j in range(1, 9))):
        assert contrast(colours[name], colours["paper"]) >= 3, name
