"""Plans of runs that hide rows: the wanted epsilon is kept, and no row is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.errors import raises
from tests.helpers.examples import examples
from tests.helpers.ledgers import proven_rows
from tests.helpers.sites import own
from tests.simulation.test_planner import HIDDEN, last_loss, save
from umbel.client.checks import entries_of
from umbel.protocol.errors import ConfigError
from umbel.protocol.options import parse_options
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import RowSettings
from umbel.server.setup import Setup
from umbel.simulation.start import values_of
from umbel.simulation.wanted import Wanted

DELTA = 1e-5


def spent(values: dict[str, Any]) -> float:
    """Return the epsilon of a row under a run config, its client taking part as often as it may."""
    setup = Setup.parse(values)
    run = setup.config
    return proven_rows({setup.release: min(run.max_participations or run.rounds, run.rounds)}, DELTA).epsilon


def test_one_knob_plans_the_noise_of_training(umbel_home: Path) -> None:
    """20 rounds of 100 of 600 clients: each takes part in four. Each of its 20 steps is on all of its 40 rows.

    A site with the limits of the plan lets it take part so often, and no oftener.
    """
    save(umbel_home)
    planned = values_of("mine", wanted=Wanted(3, rows=40))
    run = RunConfig.parse(planned.values)
    assert (run.protect, run.noise_multiplier, run.hypotheses, run.restarts) == ("rows", 0, 1, 1)
    assert (run.rounds, run.clients_per_round, run.max_participations) == (20, 100, 4)
    assert run.rows is not None
    assert (run.rows.rate, run.rows.batch, run.local_steps) == (1, 40, 20)
    assert 2.97 < spent(planned.values) <= 3
    next_to_nothing = values_of("mine", wanted=Wanted(25, rows=40))
    assert len(next_to_nothing.words) == len(planned.words) + 1, "a guarantee above 20 comes with a warning"
    [named] = [line for line in planned.words if line.startswith("A site's policy: ")]
    site, release = own(**entries_of(named.partition(": ")[2])), Setup.parse(planned.values).release
    assert [site.limits.allow({release: times}, release) for times in (3, 4)] == [True, False]
    assert spent(planned.values) < site.policy.row_budget.epsilon < 1.02 * spent(planned.values)
    many = RunConfig.parse(values_of("mine", wanted=Wanted(3, rows=10_000)).values).rows
    assert many is not None
    assert (many.rate, many.batch) == (0.026, 260), "clients of many rows train on some of them"


@settings(max_examples=examples(10))
@given(
    # 30 participations have a least price of .177; see below.
    epsilon=st.floats(0.2, 20),
    rows=st.integers(1, 5000),
    hypotheses=st.integers(1, 3),
    changes=st.fixed_dictionaries(
        {},
        optional={
            "rounds": st.integers(1, 30), "clients-per-round": st.integers(1, 30), "local-steps": st.integers(1, 9),
            "max-participations": st.integers(0, 5), "restarts": st.integers(1, 3),
        },
    ),
)  # fmt: skip
def test_no_plan_costs_more_than_was_wanted(
    tmp_path_factory: pytest.TempPathFactory, epsilon: float, rows: int, hypotheses: int, changes: dict[str, Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("UMBEL_HOME", str(home))
        save(home, train=30, validation=2)
        planned = values_of("mine", changes | {"hypotheses": hypotheses}, Wanted(epsilon, rows=rows))
        assert spent(planned.values) <= epsilon
    assert {key: planned.values[key] for key in changes} == changes, "what the user gave stays"


def test_no_plan_costs_less_than_the_least_price(umbel_home: Path) -> None:
    """20 participations of mu = .01 are one of mu = .01 sqrt(20), whose delta is 1e-5 at epsilon .14169:

    Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu).
    """
    save(umbel_home, train=30, validation=2)
    with raises(ConfigError, "config.unreachable-epsilon"):
        values_of("mine", {"max-participations": 20}, Wanted(0.1416, rows=1))
    planned = values_of("mine", {"max-participations": 20}, Wanted(0.1418, rows=1))
    assert 0.1416 < spent(planned.values) <= 0.1418


def test_a_plan_holds_however_many_hypotheses_a_strategy_sends(umbel_home: Path) -> None:
    """It begins with one, and a choice among two reveals more than one among eight."""
    save(umbel_home)
    given = {"strategy": "umbel_lab.strategies:ClusteredFL", "hypotheses": 8, "choice-epsilon": 0.4}
    planned = values_of("mine", given, Wanted(3, rows=40)).values
    setup = Setup.parse(planned)
    for k in (1, 2, 8):
        release = setup.config.release(setup.model.num_parameters, k)
        assert proven_rows({release: setup.config.max_participations}, DELTA).epsilon <= 3


def test_a_plan_reads_no_row(umbel_home: Path) -> None:
    save(umbel_home)
    save(umbel_home, "other", seed=1)
    plans = [values_of(name, wanted=Wanted(3, rows=6)) for name in ("mine", "other")]
    assert plans[0].values | {"dataset": "other"} == plans[1].values
    assert plans[0].words == plans[1].words


def test_a_planned_run_learns(umbel_home: Path) -> None:
    """The constant is .77 off, as in `tests.simulation.test_planner`."""
    save(umbel_home, train=60)
    assert last_loss(values_of("mine", {"validation": "clients=5"}, Wanted(8, rows=6)).values) < 0.4


def test_the_noise_against_the_gradient_is_told(umbel_home: Path) -> None:
    """sigma C / B in each of n = 3 components of a client's mean gradient, averaged over U = 25 clients."""
    save(umbel_home)
    planned = values_of("mine", {"clients-per-round": 25}, Wanted(3, rows=6))
    sigma = parse_options(RowSettings, planned.values["rows"], "rows").noise
    assert f"is {sigma / 6 * math.sqrt(3 / 25):.2g} row clip norms" in planned.words[1]


FIGURES = {"row_epsilon": 3.0, "rows": 6}


@pytest.mark.parametrize(
    ("values", "wanted", "code"),
    [
        ({}, {"rows": None}, "config.missing-figure"),
        ({}, {"row_epsilon": None}, "config.missing-figure"),
        ({}, {"row_epsilon": 0.0}, "config.impossible-figure"),
        ({}, {"row_epsilon": math.nan}, "config.impossible-figure"),
        ({}, {"rows": 0}, "config.impossible-figure"),
        ({}, {"delta": 0.0}, "config.impossible-figure"),
        ({}, {"epsilon": 4.0}, "config.both-ways"),
        (HIDDEN, {}, "config.breaks-epsilon"),
        ({"strategy": "site-average"}, {}, "config.clipping"),
        ({"strategy": "site-average", "clipping": "public"}, {}, "config.rows"),
        ({"protect": "both", "noise-multiplier": 1.0}, {}, "config.breaks-epsilon"),
        ({"strategy": "ifca", "hypotheses": 2}, {}, "config.breaks-epsilon"),
        ({"protect": "clients"}, {}, "config.conflict"),
        ({"noise-multiplier": 1.0}, {}, "config.conflict"),
        ({"hypotheses": 2, "choice-epsilon": 4.0, "max-participations": 1}, {}, "config.unreachable-epsilon"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    umbel_home: Path, values: dict[str, Any], wanted: dict[str, Any], code: str
) -> None:
    save(umbel_home)
    with raises(ConfigError, code):
        values_of("mine", values, Wanted.of(**FIGURES | wanted))
