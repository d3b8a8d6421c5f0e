"""The report: what it says of guarantees, that any run can be told, and that it is one file for everybody."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.helpers.reports import CONFIG, HOSPITAL, Page, entry, full, plain, report, state, view
from umbel.data import Column, Manifest, Schema
from umbel.privacy.accounting.guarantee import stated
from umbel.protocol.ranges import RangesBefore
from umbel.protocol.release import ReleaseBy, RowPrivacy
from umbel.server.history import State

# --- its title


@pytest.mark.parametrize(("column", "several"), [("Clinic ID", "7 clinics"), ("facility", "7 facilities"), ("bus", "")])
def test_the_title_is_data_and_target_and_clients_have_the_name_of_their_column(column: str, several: str) -> None:
    target, age = Column(name="readmitted", type="boolean"), Column(name="age", type="number")
    layout = Schema(client=Column(name=column, type="text"), target=target, features=[age])
    page = report(manifest=HOSPITAL.model_copy(update={"layout": layout}))
    assert f"hospital: payment 20 rounds, {several or '7 clients'}, no guarantee a-run" in page.text
    sites = report(manifest=None, mode="public", hypotheses=1, noise=400.0)
    assert "<h1>each site&#39;s own data: linear</h1>" in sites.html
    assert re.search("20 rounds, 4 clients, ε [^ ]* at δ 1e-05 for each client a-run", sites.text)


# --- what is guaranteed, and what is not

ROWS = RowPrivacy(1.0, 1.0, 0.02, 10.0, 50)
GAUSSIAN = {"mode": "public", "mechanism": "gaussian", "noise": 40.0}
RUNS: Mapping[str, Mapping[str, Any]] = {
    "clipped to its own norm": {},
    "open choice": GAUSSIAN,
    "no noise": {"noise": 0.0},
    "no noise, clipped": {"noise": 0.0, "mode": "public", "choice": 1.0},
    "no noise, by site": {"noise": 0.0, "mode": "public", "choice": 1.0, "by_site": True},
    "laplace": {"mode": "public", "noise": 400.0, "choice": 0.5},
    "laplace, often": {"mode": "public", "noise": 400.0, "choice": 0.5, "participations": [0, 0, 0, 10_000]},
    "gaussian": {**GAUSSIAN, "choice": 0.5},
    "by site": {**GAUSSIAN, "choice": 0.5, "by_site": True},
    "one model": {**GAUSSIAN, "hypotheses": 1},
    "ended early": {**GAUSSIAN, "hypotheses": 1, "planned": 50},
    "ranges before": {
        **GAUSSIAN, "hypotheses": 1, "before": RangesBefore(348, 14.08, "gaussian", ReleaseBy.SITE).release,
    },
    "rows": {"mode": "public", "noise": 0.0, "hypotheses": 1, "rows": ROWS},
    "rows and clients": {"mode": "public", "noise": 400.0, "hypotheses": 1, "rows": ROWS},
    "rows, open choice": {"mode": "public", "noise": 0.0, "rows": ROWS},
    "nobody": {"mode": "public", "noise": 400.0, "choice": 0.5, "participations": [0, 0, 0, 0]},
}  # fmt: skip


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_no_figure_stands_without_its_guarantee(changes: Mapping[str, Any]) -> None:
    one, page = view(**changes), report(**changes)
    top = page.text.partition(" Result In ")[0]
    held = {stated(bound) for bound in (one.of_client, one.of_row) if bound and one.took_part}
    assert set(re.findall(r"(?:pure )?epsilon [\d.,e-]*\d(?: at delta [\d.e-]*\d)?", top)) == held
    assert ("no guarantee" in top or "Rows have no guarantee" in top) is bool(
        one.took_part and (one.gap or one.row_gap)
    )
    subtitle = page.text.partition(" a-run ")[0]
    assert ("ε" in subtitle, "no guarantee" in subtitle) == (bool(held), bool(one.took_part and not held))
    weak = bool(one.took_part and one.of_client and one.of_client.epsilon > 20)
    assert ("promises next to nothing" in top) is weak
    verdict = re.search(r'<div class="(\w+)">\s*<h2 id="verdict"', page.html)
    assert verdict
    assert verdict[1] == ("holds" if not one.took_part else "weak" if weak else "holds" if one.of_client else "none")
    # The paper's budget is called a heuristic where it stands.
    budget = one.summary.release.paper_cost is not None
    assert top.count("A heuristic, not a guarantee at most ") == budget
    assert page.text.count("It guarantees nothing.") == 2 * budget
    assert "None" not in page.text


def test_clients_that_reported_exact_losses_and_a_question_before_stand_beside_the_guarantee() -> None:
    exact = [replace(one, exact_reports=10) for one in state().history]
    assert "Outside the guarantee 10 validation clients" in report(state(history=exact)).text
    assert "Outside the guarantee" not in report().text
    assert "In the guarantee the question about ranges" in report(**RUNS["ranges before"]).text
    assert "Clients trust their site" in report(**RUNS["by site"]).text
    assert "30 rounds of the run were not done" in report(**RUNS["ended early"]).text


# --- the result


@pytest.mark.parametrize(("scale", "loss"), [(1.0, "0.143"), (1e-6, "1.43e-07"), (None, "0.1429")])
def test_the_loss_of_a_round_is_no_0_whatever_its_size(scale: float | None, loss: str) -> None:
    units = {"target": {"name": "cost", "unit": "dollars", **({"scale": scale} if scale else {})}}
    assert f"6 {loss} 10 of 10 4 + 6 5 0.25" in report(manifest=HOSPITAL.model_copy(update={"units": units})).text


def test_figures_are_in_the_unit_of_the_target_and_clients_spread_is_told() -> None:
    spread = state()
    quantiles = [0.1, 0.2, 0.3, 0.4, 0.5]
    spread.history = [replace(one, loss_spread=quantiles, metric_spread=quantiles[::-1]) for one in spread.history]
    page = report(spread, model="mlp", manifest=HOSPITAL, drawn=True)
    assert ">RMSE (dollars)</text>" in page.html
    assert "the 10th 1,000 the 25th 2,000 the median 3,000" in page.text
    assert "5,000.0 dollars or more, among validation clients" in page.text
    shares = report(model="cnn", manifest=None, drawn=True).html
    assert ">accuracy (share of rows)</text>" in shares
    assert ">cross-entropy (nats)</text>" in shares


# --- alarms


def test_alarms_are_told_and_the_servers_own_data_say_whether_anybody_should_have_validated() -> None:
    def shown(page: Page) -> bool:
        return any(attrs.get("class") == "alarms" for attrs in page.of("section"))

    assert [shown(page) for page in (plain(), report(losing(None)), report(losing(None), manifest=None))] == [
        False, True, False,
    ]  # fmt: skip


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
    page = report(state(stopped=evil), manifest=manifest, config=config, name=evil, drawn=True)
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    [policy] = [attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy, "no script, and nothing from elsewhere"
    assert evil not in page.html
    assert page.text.count(evil) >= 11, "name, data, strategy, seed, how it ended, unit, in the config, and added"
    signs = report(name="a\x1b[31m\x00\u202eb").html  # on which a terminal or a line would act
    assert "a\ufffd[31m\ufffd\ufffdb" in signs
    assert not {"\x1b", "\x00", "\u202e"} & set(signs)


def test_figures_tables_headings_and_references_are_for_everybody() -> None:
    page = full()
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in page.tags:
        for name, value in attrs.items():
            if name.endswith("href") or name == "aria-labelledby":
                assert value.removeprefix("#") in ids
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
