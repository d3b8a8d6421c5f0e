"""Plans of runs: the guarantee that is wanted, what is public, and what suits one's own data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import umbel
from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from tests.helpers.examples import examples
from tests.helpers.ledgers import proven
from umbel.data import Column, Schema, offsets_of, open_dataset, write_dataset
from umbel.data.importers import from_dataframe
from umbel.models import load
from umbel.privacy.accounting.plan import Task
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.server.setup import Setup
from umbel.simulation import client_planner
from umbel.simulation.client_planner import Goal, schedule
from umbel.simulation.facts import Span, feature_spans, made_up, target_span
from umbel.simulation.in_process import play
from umbel.simulation.local_training import step_size
from umbel.simulation.start import read_values, values_of
from umbel.simulation.wanted import PlannedRun, Wanted

ROWS, NOISE = 6, 0.1
HIDDEN: dict[str, Any] = {
    "protect": "rows", "noise-multiplier": 0.0, "rows": "clip=1 noise=2 rate=0.2 batch=10",
}  # fmt: skip
"""Settings of training that hides rows."""


@pytest.fixture
def undrowned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse no plan for its noise."""
    monkeypatch.setattr(client_planner, "DROWNED", (math.inf, math.inf))


def save(
    home: Path, name: str = "mine", train: int = 600, validation: int = 5, seed: int = 0, **changes: dict[str, Any]
) -> None:
    """Write clients of y = 2 + .01 x - z + noise, with x from 0 to 200 and z 0 or 1, and what a schema says of them."""
    generator, count = np.random.default_rng(seed), (train + validation) * ROWS
    x = np.stack([generator.uniform(0, 200, count), generator.integers(2, size=count)], axis=1).astype(np.float32)
    y = (2 + 0.01 * x[:, 0] - x[:, 1] + generator.normal(0, NOISE, count)).astype(np.float32)
    columns: dict[str, dict[str, Any]] = {
        "x": {"type": "number", "minimum": 0, "maximum": 200},
        "z": {"type": "boolean"},
        "y": {"type": "number", "minimum": 0, "maximum": 5},
    }
    x_, z_, y_ = (Column(name=key, **one | changes.get(key, {})) for key, one in columns.items())
    layout = Schema(target=y_, features=[x_, z_], model="linear inputs=2 outputs=1", loss="mse")
    told = {"name": name, **layout.said}
    write_dataset(
        home / "data" / name,
        manifest(train, validation, **told | {"layout": layout}),
        x,
        y,
        offsets_of([ROWS] * (train + validation)),
    )


def spent(values: dict[str, Any], delta: float) -> tuple[float, float]:
    """Return the pure epsilon and that at delta of a run config, each client taking part as often as it may."""
    setup = Setup.parse(values)
    found = proven({setup.release: setup.config.max_participations}, delta)
    return found.pure, found.epsilon


def last_loss(values: dict[str, Any]) -> float:
    """Return the loss with which a run ends."""
    loss = play(RunConfig().entries() | values).state.history[-1].loss
    assert loss is not None
    return loss


def imported(columns: dict[str, Any] | None = None, target: str = "y", seed: int = 0, **data: Any) -> None:
    """Make a dataset of a table with a column of clients."""
    from_dataframe(pd.DataFrame(data), client="who", target=target, columns=columns, seed=seed).write("mine")


@pytest.mark.rest
def test_one_knob_plans_a_pure_guarantee_with_which_a_run_learns(umbel_home: Path) -> None:
    """n = 3, each client once, epsilon 6: nu = 2 * 3 / 6. The constant is .77 off: .58 by x, and .5 by z."""
    save(umbel_home)
    planned = values_of("mine", wanted=Wanted(epsilon=6, delta=0.0))
    run = RunConfig.parse(planned.values)
    assert (run.noise_multiplier, run.mechanism, run.max_participations, run.hypotheses) == (1.0, "laplace", 1, 1)
    assert run.rounds * run.clients_per_round <= 600
    assert spent(planned.values, 0.0) == (6.0, 6.0)
    assert "pure epsilon 6" in planned.words[0]
    assert "try hypotheses=2" in planned.words[2]
    assert "offset=100,0 scale=57.7,1" in run.model, "the declared range, in units"
    assert last_loss(values_of("mine", {"validation": "clients=5"}, Wanted(epsilon=8)).values) < 0.4


@settings(max_examples=examples(25))
@given(
    epsilon=st.floats(0.05, 30),
    delta=st.sampled_from([0.0, 1e-5]),
    asked=st.fixed_dictionaries(
        {"hypotheses": st.integers(1, 4), "strategy": st.sampled_from(["group-privacy", "site-average"])},
        optional={"max-participations": st.integers(1, 3), "mechanism": st.sampled_from(["laplace", "gaussian"])},
    ),
)
def test_no_plan_costs_more_than_was_wanted(
    tmp_path_factory: pytest.TempPathFactory, epsilon: float, delta: float, asked: dict[str, Any]
) -> None:
    home = tmp_path_factory.getbasetemp() / "planned"
    if asked.get("mechanism") == "gaussian" and not delta:
        delta = 1e-6
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UMBEL_HOME", str(home))
        patch.setattr(client_planner, "DROWNED", (math.inf, math.inf))
        if not home.exists():
            save(home)
        planned = values_of("mine", asked, Wanted(epsilon, delta))
        assert spent(planned.values, delta)[1] <= epsilon * (1 + 1e-9)


def test_where_the_choices_take_a_pure_epsilon_there_is_one_at_delta(umbel_home: Path, undrowned: None) -> None:
    """Forty choices of epsilon .22 cost 8.8 in all, and 6.1 at delta 1e-5."""
    save(umbel_home)
    given = {"hypotheses": 2, "choice-epsilon": 0.22, "clipping": "public norm=0.5"}
    given |= {"max-participations": 40, "rounds": 40}
    planned = values_of("mine", given, Wanted(8.0, 1e-5))
    assert spent(planned.values, 1e-5)[1] <= 8
    with raises(ConfigError, "config.unreachable-epsilon"):
        values_of("mine", given, Wanted(8.0, 0.0))


def test_rows_play_no_part_in_a_plan(umbel_home: Path) -> None:
    save(umbel_home, "mine", seed=0)
    first = values_of("mine", wanted=Wanted(epsilon=4))
    save(umbel_home, "mine", seed=1)
    assert values_of("mine", wanted=Wanted(epsilon=4)) == first


def test_what_the_user_gives_wins(umbel_home: Path) -> None:
    save(umbel_home)
    given = {"rounds": 7, "clipping": "public norm=0.5", "step-size": 0.01, "model": "linear inputs=2 outputs=1"}
    values = values_of("mine", given, Wanted(epsilon=4)).values
    assert values | given == values


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"noise-multiplier": 0.1}, "noise-multiplier"),
        ({"noise-multiplier": 1.5, "max-participations": 3}, "3 participations cost"),
        ({"noise-multiplier": 1.5, "max-participations": 0, "rounds": 5}, "5 participations cost"),
        ({"noise-multiplier": 100.0, "hypotheses": 2, "choice-epsilon": 0.0}, "open"),
        ({"clipping": "update"}, "clipping"),
        ({"strategy": "ifca", "hypotheses": 2}, "discloses"),
        ({"noise-multiplier": 0.0}, "noise-multiplier"),
        (HIDDEN, "--row-epsilon"),
    ],
)
def test_what_breaks_the_guarantee_is_refused(umbel_home: Path, given: dict[str, Any], part: str) -> None:
    save(umbel_home)
    with raises(ConfigError, "config.breaks-epsilon", part):
        values_of("mine", given, Wanted(epsilon=4, delta=0.0))


def test_impossible_figures_are_refused_also_beside_the_users_own_noise(umbel_home: Path) -> None:
    save(umbel_home)
    for wanted in ((math.nan,), (math.inf,), (0.0,), (4.0, 2.0), (4.0, -1.0), (4.0, math.nan)):
        with raises(ConfigError, "config.impossible-figure"):
            values_of("mine", {"noise-multiplier": 100.0}, Wanted(*wanted))


def test_where_nothing_would_be_learnt_the_proposals_lead_to_a_plan(umbel_home: Path) -> None:
    """Three parameters at nu = 2: noise of 2 sqrt(4 / 3) clip norms a client, and of .67 steps in the whole run."""
    save(umbel_home, train=12)
    ways = "site-average", "epsilon of 6", "--row-epsilon 3 --rows N", "about 22 clients"
    with raises(ConfigError, "config.in-vain", "12 clients", "0.67", *ways):
        values_of("mine", wanted=Wanted(epsilon=3))
    save(umbel_home, "more", train=22)
    proposed = (
        values_of("mine", {"strategy": "site-average"}, Wanted(epsilon=3)),
        values_of("mine", wanted=Wanted(epsilon=6)),
        values_of("mine", wanted=Wanted(epsilon=3, rows=1000)),
    )
    assert all(plan.words for plan in (*proposed, values_of("more", wanted=Wanted(epsilon=3))))
    with raises(ConfigError, "config.in-vain") as caught:
        values_of("mine", wanted=Wanted(epsilon=0.1))
    assert "site-average" not in caught.value.text


def test_a_run_whose_noise_is_not_far_from_drowning_it_is_warned_of(umbel_home: Path) -> None:
    """The noise of .67 steps at epsilon 3 is .33 at 6, and .17 at 12."""
    save(umbel_home, train=12)
    near, far = (values_of("mine", wanted=Wanted(epsilon=epsilon)).words for epsilon in (6, 12))
    assert [sum(line.startswith("Warning") for line in lines) for lines in (near, far)] == [1, 0]


def test_an_epsilon_that_says_nothing_is_not_proposed(umbel_home: Path) -> None:
    """20 parameters of 4 clients: noise of 1 clip norm in the mean at epsilon 20."""
    rows, columns = np.arange(100), {"cost": {"scale": 2.0}, "year": {"categories": True}}
    cost = np.random.default_rng(0).normal(size=100)
    imported(columns, "cost", who=rows % 5, year=rows % 19 + 1935, cost=cost)
    with raises(ConfigError, "config.in-vain", "20 parameters", "leave out year, whose categories take 19") as caught:
        values_of("mine", wanted=Wanted(epsilon=8))
    assert "--epsilon" not in caught.value.text


def test_without_declared_ranges_there_is_no_plan_and_every_such_column_is_named(umbel_home: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(6, 200))
    imported({"e": {"scale": 2.0}}, "cost", who=np.arange(200) % 50, **dict(zip([*"abcde", "cost"], rows, strict=True)))
    parts = "a, b, c, d, cost, each", "--replace", "--set a.minimum=NUMBER", "scale other than 1", "umbel ranges"
    with raises(ConfigError, "config.no-range", *parts):
        values_of("mine", wanted=Wanted(epsilon=8), ask=False)


def test_a_configuration_keeps_what_is_no_privacy(umbel_home: Path) -> None:
    own, planned = read_values("synthetic"), values_of("synthetic", wanted=Wanted(epsilon=4)).values
    assert {key for key in own if own[key] != planned[key]} <= {
        "noise-multiplier", "choice-epsilon", "clipping", "rounds", "clients-per-round", "max-participations",
        "restarts",
    }  # fmt: skip
    assert spent(planned, 1e-5)[1] <= 4
    assert values_of("synthetic") == PlannedRun(own, []), "and without an epsilon it is as it was"
    sites = values_of("synthetic", {"strategy": "site-average"}, Wanted(epsilon=8))
    assert spent(sites.values, 1e-5)[1] <= 8


def test_own_data_without_an_epsilon_have_no_noise(umbel_home: Path) -> None:
    save(umbel_home, train=30)
    for planned in (values_of("mine"), values_of("", {"dataset": "mine"})):
        run = RunConfig.parse(planned.values)
        assert (run.noise_multiplier, run.clipping.mode, run.clients_per_round) == (0, "update", 30)
        [line] = planned.words
        assert "guarantees nothing" in line
        assert line.endswith("umbel run mine --epsilon 4")
    assert "respawn=3" in run.strategy
    noisy = values_of("mine", {"noise-multiplier": 3.0})
    assert "clipping" not in noisy.values
    assert not noisy.words


@pytest.mark.parametrize("given", [{"noise-multiplier": 3.0, "clipping": "public"}, HIDDEN])
def test_a_run_with_noise_is_not_fitted_to_rows(umbel_home: Path, given: dict[str, Any]) -> None:
    """Its guarantee covers neither scales nor steps. Data sets with the same declared ranges get the same ones."""
    for seed in (0, 1):
        save(umbel_home, f"mine-{seed}", train=30, seed=seed)
    first, second = (values_of(f"mine-{seed}", given).values for seed in (0, 1))
    assert first["model"] == second["model"]
    assert first["step-size"] == second["step-size"]
    other = values_of("mine-0").values
    assert (other["model"], other["step-size"]) != (first["model"], first["step-size"])


def test_numbers_far_from_units_are_learnt_from(umbel_home: Path) -> None:
    """Of 200 times a unit: with the step of numbers near 1 a client's first step would overshoot 10,000 times.

    A feature far from 0 may be constant or vary little: with an offset of three digits it would be 289 in the model's
    units, and no step would be stable.
    """
    save(umbel_home, train=30, x={"minimum": None, "maximum": None})
    assert last_loss(values_of("mine", {"hypotheses": 1, "rounds": 15}).values) == pytest.approx(NOISE, rel=0.2)
    draw = np.random.default_rng(0)
    x, noise, little = draw.normal(size=600), draw.normal(0, NOISE, 600), draw.normal(size=600)
    for name, beside in (("constant", np.full(600, 450_289.0)), ("little", 1_234_560 + 10 * little)):
        table = pd.DataFrame({"who": np.arange(600) // 20, "x": x, "beside": beside, "y": x + noise})
        from_dataframe(table, client="who", target="y").write(name)
        assert last_loss(values_of(name, {"hypotheses": 1, "rounds": 10}).values) == pytest.approx(NOISE, rel=0.2)


@given(loss=st.sampled_from(["mse", "cross-entropy", "log"]), scale=st.floats(0.1, 10), seed=st.integers(0, 1000))
@settings(max_examples=examples(30))
def test_steps_are_stable_at_each_client(loss: str, scale: float, seed: int) -> None:
    """Gradient descent on a loss whose slope has a Lipschitz constant L falls where the step is below 2 / L."""
    generator = np.random.default_rng(seed)
    clients = [scale * generator.standard_normal((rows, 3)) for rows in (1, 5, 40)]
    outputs = 3 if loss == "cross-entropy" else 1
    step = step_size(load(f"linear inputs=3 outputs={outputs}", loss), clients, exact=True)
    link = {"mse": 2.0, "cross-entropy": 0.5, "log": 0.25}[loss]
    for rows in clients:
        wide = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
        curvature = link * np.linalg.eigvalsh(wide.T @ wide / len(rows))[-1]
        assert step * curvature <= 1.05  # two digits


def test_what_is_declared_of_columns(umbel_home: Path) -> None:
    save(umbel_home, x={"scale": 50.0}, y={"maximum": 8})
    found = Setup.parse({"dataset": "mine"}).manifest
    assert found is not None
    assert feature_spans(found, 2) == [Span("x"), Span("z", 0.0, 1.0)]
    assert target_span(found) == Span("y", 0.0, 8.0)
    assert target_span(found).spread == pytest.approx(8 / math.sqrt(12))


def goal(**changes: Any) -> Goal:
    """Return a goal of pure epsilon 8 for a linear model of two parameters, and 1,000 clients that each add noise."""
    own: dict[str, Any] = {
        "wanted": Wanted(8.0, 0.0), "run": RunConfig(), "kept": frozenset(), "linear": True, "hypotheses": 1,
    }  # fmt: skip
    task = {key: changes.pop(key) for key in ("parameters", "clients", "by") if key in changes}
    task = {"parameters": 2, "hypotheses": 1, "clients": 1000, "clients_per_round": 1} | task
    return Goal(**own | changes, task=Task(**task))


def test_rounds_are_by_rule() -> None:
    """A round for each 50 clients of a linear model, 100 of a small and 400 of a large one, within limits."""
    large: dict[str, Any] = {"linear": False, "parameters": 20_000}
    for changes, rounds in (
        ({"clients": 1000}, 20), ({"clients": 300}, 20), ({"clients": 5000}, 40), ({"clients": 5}, 5),
        ({"clients": 1500, "linear": False}, 15), ({"clients": 5000, "linear": False}, 20),
        ({"clients": 8000} | large, 20), ({"clients": 800} | large, 10), ({"clients": 120_000} | large, 120),
    ):  # fmt: skip
        found = schedule(goal(**changes))
        assert (found.rounds, found.clients, found.plan.max_participations) == (rounds, changes["clients"] // rounds, 1)
    given = RunConfig.parse({"rounds": 4, "clients-per-round": 3})
    found = schedule(goal(run=given, kept=frozenset({"rounds"})))
    assert (found.rounds, found.clients) == (4, 250)
    found = schedule(goal(run=given, kept=frozenset({"clients-per-round"}), clients=30))
    assert (found.rounds, found.clients) == (10, 3)


LENGTH = 0.5 * math.sqrt(3 / 2)
"""Of the noise at epsilon 8 on two parameters, in clip norms: nu = 2 * 2 / 8."""


def test_sums_of_sites_take_few_rounds_where_their_noise_matters() -> None:
    """Each round has a site's noise anew."""
    few, some, many = (schedule(goal(by=ReleaseBy.SITE, clients=clients)) for clients in (10, 15, 8000))
    assert (few.rounds, some.rounds, many.rounds) == (3, 5, 40)
    assert many.noise == pytest.approx(LENGTH / 8000 * math.sqrt(40), rel=1e-3)


def test_the_noise_left_is_that_of_as_many_hypotheses_as_there_may_be() -> None:
    """CFL may split into four, though a choice that is open costs nothing among one."""
    found = schedule(goal(hypotheses=4))
    assert found.left == pytest.approx(LENGTH / math.sqrt(50 / 4), rel=1e-3)
    assert found.noise == pytest.approx(LENGTH * 2 / math.sqrt(1000), rel=1e-3)


@pytest.mark.parametrize(
    ("model", "loss", "kind"), [("mlp", "mse", "f"), ("linear inputs=3 outputs=1", "log", "i"), ("cnn", "", "i")]
)
def test_made_up_clients_fit_the_model(umbel_home: Path, model: str, loss: str, kind: str) -> None:
    shape = (1, 28, 28) if model == "cnn" else (3,)
    x, y = np.zeros((4, *shape), np.float32), np.zeros(4, np.float32 if kind == "f" else np.int64) - (loss == "log")
    write_dataset(umbel_home / "data" / "mine", manifest(2, model=model, loss=loss), x, y, offsets_of([2, 2]))
    setup = Setup.parse({"dataset": "mine"})
    dataset = setup.open_dataset()
    assert dataset is not None
    found = made_up(setup.model, dataset)
    assert (found.features.shape[1:], found.targets.dtype.kind) == (shape, kind)
    assert len(np.unique(found.targets)) > 1


def test_models_of_several_outputs_with_local_parameters_and_of_tokens_are_planned(
    umbel_home: Path, undrowned: None
) -> None:
    """Rows of a recommender cannot be made up, so its clip norm is the usual one."""
    planned = values_of("", {"dataset": "preferences"}, Wanted(epsilon=8)).values
    assert RunConfig.parse(planned).clipping.norm == RunConfig().clipping.norm
    draw, clients = np.random.default_rng(0), np.arange(400) // 4
    tied = {"tokens": 11, "model": "tests.helpers.strangers:TiedWriter"}
    umbel.from_arrays(draw.integers(0, 11, (400, 6)), None, client=clients, **tied).write("words")
    x = draw.uniform(-1, 1, (400, 2)).astype(np.float32)
    umbel.from_arrays(x, 2 * x, client=clients, model="linear inputs=2 outputs=2", loss="mse").write("planes")
    for name, values in (("words", {"loss": "cross-entropy"}), ("planes", {})):
        planned = values_of(name, values, Wanted(epsilon=8)).values
        assert RunConfig.parse(planned).clipping.norm > 0
        assert spent(planned, 1e-5)[1] <= 8


def test_a_run_with_a_guarantee_from_python(umbel_home: Path) -> None:
    save(umbel_home, train=100)
    found = umbel.run("mine", epsilon=6, delta=0.0, rounds=3, baselines=False).config
    assert [found[name] for name in ("noise-multiplier", "rounds", "max-participations")] == [1, 3, 1]


def test_a_rare_one_does_not_keep_all_steps_short(umbel_home: Path) -> None:
    """One client of 200 has all the ones of a column: in units of its deviation, .07, they would be 14."""
    draw, who = np.random.default_rng(0), np.repeat(np.arange(200), 5)
    imported(who=who, x=draw.uniform(0, 2000, 1000), rare=who == 7, y=draw.normal(size=1000), seed=3)
    assert values_of("mine").values["step-size"] > 0.02  # 1 / (2 * (1 + 3^2 + ...)), in place of .0025


def test_the_planned_step_is_stable_where_dates_count_from_the_default_date(umbel_home: Path) -> None:
    """Years and days of today's dates are near 2.5 then, and a step for features near 0 would diverge."""
    generator = np.random.default_rng(0)
    day = pd.Timestamp("2025-01-01") + pd.to_timedelta(generator.integers(0, 365, 600), unit="D")
    imported({"y": {"minimum": 0, "maximum": 1}}, who=np.arange(600) // 6, day=day, y=generator.uniform(0, 1, 600))
    step = RunConfig.parse(values_of("mine", wanted=Wanted(epsilon=8)).values).step_size
    features = open_dataset(umbel_home / "data" / "mine").features
    rows = np.concatenate([features, np.ones((600, 1))], axis=1).reshape(100, 6, -1)
    largest = np.linalg.eigvalsh(np.einsum("crf,crg->cfg", rows, rows) / 6)[:, -1].max()
    assert 2 * largest * step < 2, "gradient descent on squares is stable below 2 over its curvature"
