"""What a run was worth: each way to serve clients, and each verdict, on data small enough to work out by hand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import umbel
from tests.helpers.datasets import manifest
from tests.helpers.history import a_round, a_validation
from tests.helpers.paper import paper_run
from umbel import models
from umbel.client.trial import try_out
from umbel.data import Dataset, offsets_of, write_dataset
from umbel.privacy.gate.policy import Personal
from umbel.server.history import State
from umbel.server.observer import Observer, Run
from umbel.server.setup import Setup
from umbel.server.worth import FILE, LABELS, LeftOut, Level, Way, Worth
from umbel.simulation import in_process
from umbel.simulation.baselines import halves, validation_cohort
from umbel.simulation.worth import Appraisal, _measured, appraise
from umbel.simulation.worth.plan import SHARE, Plan
from umbel.simulation.worth.pooled import Pooled, fit_pooled
from umbel.simulation.worth.verdict import as_it_is, by_another, judge, too_unlike, tries, within_chance
from umbel.simulation.worth.ways import Ways

BASE = {"strategy": "fedavg", "hypotheses": 1, "noise-multiplier": 0.0, "clipping": "update", "choice-epsilon": 0.0}


def write(folder: Path, *clients: tuple[Any, Any], train: int, model: str = "linear", **entries: Any) -> Path:
    """Write a dataset of clients (x, y), the first of which train."""
    x = np.concatenate([np.asarray(rows, np.float32) for rows, _ in clients])
    y = np.concatenate([np.asarray(values) for _, values in clients])
    own = manifest(train, len(clients) - train, model=model, **entries)
    write_dataset(folder, own, x, y if y.dtype.kind == "i" else y.astype(np.float32), offsets_of(
        len(values) for _, values in clients))  # fmt: skip
    return folder


def a_run(folder: Path, ended: Any = None, history: Any = None, **changes: Any) -> tuple[Setup, State]:
    """Return a run of a dataset that ended with some hypotheses."""
    setup = Setup.parse(in_process.run_config("synthetic") | BASE | {"dataset": str(folder)} | changes)
    last = setup.model.initial(0) if ended is None else ended
    last = {name: value[None] for name, value in last.items()} if ended is None else last
    rounds = [a_round(1), a_round(2), a_validation(3)] if history is None else history
    rounds = [replace(one, nearest=[], groups=[10] if one.asked else []) for one in rounds]
    return setup, State(last, last, 0.5, 3, 0, rounds, "done")


def ways(setup: Setup, state: State) -> Ways:
    dataset = setup.open_dataset()
    assert dataset is not None
    learner = try_out(setup.model, dataset)
    train = np.arange(dataset.manifest.train)
    return Ways(setup, learner, dataset, state, train, *halves(validation_cohort(dataset, learner), 0))


def theta(*rows: tuple[float, float]) -> dict[str, Any]:
    return {"weight": np.array(rows, np.float32)[:, None, :]}


ONES = [[1.0, 0.0]] * 4


# --- the constant


def test_the_constant_is_the_mean_of_all_training_rows(tmp_path: Path) -> None:
    """Rows of 0, 0, 0 and 4 have the mean 1, whatever the clients' own means; a validation client of 3s is 2 away."""
    folder = write(tmp_path / "d", ([[1, 0]] * 3, [0.0] * 3), ([[1, 0]], [4.0]), (ONES, [3.0] * 4), train=2, loss="mse")
    one = ways(*a_run(folder))
    np.testing.assert_allclose(one.constant(), [2.0])
    assert one.remarks[Way.CONSTANT] == "the mean"


def test_of_classes_it_is_the_most_frequent_and_of_likes_the_most_frequent_sign(tmp_path: Path) -> None:
    images = np.zeros((4, 2), np.float32)
    softmax = {"model": "softmax features=2 classes=3", "loss": "cross-entropy"}
    mine = np.array([2, 2, 2, 0])
    folder = write(tmp_path / "d", (images, np.array([2, 2, 1, 0])), (images, mine), train=1, **softmax)
    one = ways(*a_run(folder))
    right = [(one.query.targets == 2).double().mean().item()]
    np.testing.assert_allclose(one.constant(), right)
    assert one.remarks[Way.CONSTANT] == "the most frequent class"


def test_of_next_tokens_it_is_the_most_frequent_of_all_places(tmp_path: Path) -> None:
    """Of twelve targets of the training client seven are 2, which half of the validation client's are."""
    tokens, mine = np.array([[0, 1, 2]] * 8), [[2, 1, 2], [2, 2, 0], [2, 0, 1], [1, 2, 2]]
    entries: dict[str, Any] = {"loss": "cross-entropy", "metric": "accuracy", "tokens": 3, "validation": ["b"]}
    folder = umbel.from_arrays(
        tokens, [*mine, *[[2, 2, 2], [0, 1, 0]] * 2], client=[*"aaaabbbb"],
        model="tests.helpers.strangers:TiedWriter words=3", **entries,
    ).write(tmp_path / "d")  # fmt: skip
    one = ways(*a_run(folder))
    np.testing.assert_allclose(one.constant(), [(one.query.targets == 2).double().mean().item()])


# --- pooled rows, one model, alone


def test_pooled_rows_are_fitted_by_least_squares(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 2)).astype(np.float32)
    y = x @ [2.0, -1.0] + generator.normal(size=60)
    parts = [(x[i : i + 20], y[i : i + 20]) for i in (0, 20, 40)]
    setup, state = a_run(write(tmp_path / "d", *parts, train=2, loss="mse"))
    one = ways(setup, state)
    plan = _plan(setup, state)
    assert (plan.newton, plan.passes > 0) == (True, True)
    best = np.linalg.lstsq(x[:40], y[:40], rcond=None)[0]
    fitted = fit_pooled(one.learner, one.rows, setup.config, plan, state.hypotheses)
    np.testing.assert_allclose(fitted.model["weight"].ravel(), best, atol=1e-3)
    assert (fitted.remark, fitted.doubt) == ("fitted by L-BFGS", "")


def test_a_pooled_model_that_may_be_a_bad_fit_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is concluded from it, as that clients differ."""
    parts = [(ONES, [value] * 4) for value in (0.0, 1.0, 2.0, 3.0)]
    setup, state = a_run(write(tmp_path / "d", *parts, train=2, loss="mse"))
    assert Way.POOLED in {arm.way for arm in appraise(setup, state, np.ones(2, int), {}).arms}
    fitted = Pooled({name: value + 1e6 for name, value in state.hypotheses.items()}, "fitted", "since it is bad")
    monkeypatch.setattr("umbel.simulation.worth.ways.fit_pooled", lambda *_: fitted)
    worth = appraise(setup, state, np.ones(2, int), {})
    assert Way.POOLED not in {arm.way for arm in worth.arms}
    assert LeftOut(LABELS[Way.POOLED], "since it is bad") in worth.left_out
    assert "pooled" not in worth.verdict


def _plan(setup: Setup, state: State) -> Plan:
    dataset = setup.open_dataset()
    assert dataset is not None
    train, clients = dataset.manifest.train, dataset.manifest.clients
    learner = try_out(setup.model, dataset)
    return Plan.of(setup, learner, dataset, state, np.arange(train), np.arange(train, clients))


def test_one_model_is_the_mean_of_what_clients_train(tmp_path: Path) -> None:
    """From w, a step of .5 on rows (1, 0) with y = 2 goes to w + (2 - w), with y = 0 to w - w: the mean is 1."""
    folder = write(tmp_path / "d", (ONES, [2.0] * 4), (ONES, [0.0] * 4), (ONES, [0.0] * 4), train=2, loss="mse")
    settings: dict[str, Any] = {"step-size": 0.5, "batch-size": 0, "local-epochs": 1, "clients-per-round": 2}
    one = ways(*a_run(folder, **settings))
    assert one.one_model(1)["weight"][0, 0, 0] == pytest.approx(1.0)


def test_clients_alone_have_the_step_size_that_serves_them_best(tmp_path: Path) -> None:
    """y = 3 x at x = 1 and 2: the curvature is 5, so steps of 3.2 and .8 diverge, and one of .2 arrives."""
    rows, targets = [[1.0, 0.0], [2.0, 0.0]] * 2, [3.0, 6.0] * 2
    folder = write(tmp_path / "d", (rows, targets), (rows, targets), train=1, loss="mse")
    setup, state = a_run(folder, **{"step-size": 3.2, "batch-size": 0})
    one = ways(setup, state)
    np.testing.assert_allclose(one.alone(_plan(setup, state), one.constant())[0], [0.0], atol=1e-4)
    assert one.remarks[Way.ALONE] == "50 epochs of step size 0.2, the best of 7 ways"


@pytest.mark.parametrize(
    ("step_size", "error", "remark", "doubt"),
    [
        (0.15, 0.0, "100 epochs of step size 0.15", ""),
        (0.03, 4.2, "", "since they still improved after 200 epochs"),
    ],
)
def test_clients_alone_train_until_more_epochs_add_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_size: float, error: float, remark: str, doubt: str
) -> None:
    """y = 9 x at x = 1 and -1: an epoch adds the step size to the weight, as the slope of the RMSE is 1."""
    rows, targets = [[1.0, 0.0], [-1.0, 0.0]] * 4, [9.0, -9.0] * 4
    folder = write(tmp_path / "d", (rows, targets), (rows, targets), train=1, loss="rmse")
    setup, state = a_run(folder, **{"step-size": step_size, "batch-size": 0, "rounds": 1})
    one, plan = ways(setup, state), replace(_plan(setup, state), sizes=1, epochs=50, how=Personal.NO)
    monkeypatch.setattr("umbel.simulation.worth.ways.ridge", lambda *_: None)
    metrics, why = one.alone(plan, one.constant())
    assert (metrics.item(), why) == (pytest.approx(error, abs=0.2), doubt)
    assert one.remarks[Way.ALONE].startswith(remark)


def test_clients_alone_that_have_not_settled_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [(ONES, [value] * 4) for value in (0.0, 1.0, 2.0, 3.0)]
    setup, state = a_run(write(tmp_path / "d", *parts, train=2, loss="mse"))
    monkeypatch.setattr(Ways, "alone", lambda self, _plan, constant: (constant - 1, "since they still improved"))
    worth = appraise(setup, state, np.ones(2, int), {})
    assert LeftOut(LABELS[Way.ALONE], "since they still improved") in worth.left_out
    assert Way.ALONE not in {arm.way for arm in worth.arms}


def test_a_client_alone_may_do_best_with_the_mean_of_its_own_rows(tmp_path: Path) -> None:
    """The features are 0, so that a linear model says 0 after any training; all targets are 3."""
    nothing = [[0.0, 0.0]] * 40
    folder = write(tmp_path / "d", (nothing, [9.0] * 40), (nothing, [3.0] * 40), train=1, loss="mse")
    setup, state = a_run(folder, **{"step-size": 0.1})
    one = ways(setup, state)
    np.testing.assert_allclose(one.alone(_plan(setup, state), one.constant())[0], [0.0], atol=1e-5)
    assert one.remarks[Way.ALONE] == "the mean of the client's rows, the best of 7 ways"


# --- the run


def test_clients_pick_on_one_half_of_their_rows_and_are_measured_on_the_other(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", (ONES, [1.0] * 4), (ONES, [1.0] * 4), (ONES, [5.0] * 4), train=1, loss="mse")
    setup, state = a_run(folder, theta((1, 0), (4, 0)), hypotheses=2, strategy="ifca")
    worth = appraise(setup, state, np.array([1]), {})
    (mine,) = [arm for arm in worth.arms if arm.way is Way.LAST]
    assert (mine.mean, mine.worst_decile) == (0.5, 1.0)
    assert (worth.clients, worth.whose) == (2, "validation clients")
    assert not any(arm.way is Way.BEST for arm in worth.arms), "the last round is the best"


def test_the_best_round_stands_beside_the_last_and_says_who_chose_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", (ONES, [1.0] * 4), (ONES, [1.0] * 4), train=1, loss="mse")
    exact = [a_round(1), a_round(2, exact_reports=1), a_validation(3, exact_reports=1)]
    setup, state = a_run(folder, theta((3, 0)), history=exact)
    state.best, state.best_round = theta((1, 0)), 2
    worth = appraise(setup, state, np.array([1]), {})
    found = {arm.way: arm for arm in worth.arms}
    assert (found[Way.LAST].mean, found[Way.BEST].mean) == (2.0, 0.0)
    assert found[Way.BEST].remark.startswith("after 1 round,")
    assert "exact losses" in found[Way.BEST].remark


def test_a_worth_in_a_long_unit_is_read_back(tmp_path: Path) -> None:
    units = {"target": {"name": "price", "unit": "thousands of dollars a year and a member of the household " * 4}}
    units["target"] |= {"scale": 100.0}
    folder = write(tmp_path / "d", (ONES, [1.0] * 4), (ONES, [1.0] * 4), train=1, loss="mse", units=units)
    worth = appraise(*a_run(folder, theta((3, 0))), np.array([1]), {})
    assert Worth.read(worth.content) == worth


@pytest.mark.parametrize("scale", [100.0, 1.0])
def test_figures_are_in_the_unit_of_the_target(tmp_path: Path, scale: float) -> None:
    units = {"target": {"name": "price", "unit": "dollars", "scale": scale}}
    folder = write(tmp_path / "d", (ONES, [1.0] * 4), (ONES, [1.0] * 4), train=1, loss="mse", units=units)
    worth = appraise(*a_run(folder, theta((3, 0))), np.array([1]), {})
    assert (worth.metric, worth.unit) == ("RMSE", "dollars")
    assert [arm.mean for arm in worth.arms if arm.way is Way.LAST] == [2 * scale]


# --- whom it may measure


def few(lengths: list[int], train: int) -> Dataset:
    rows = sum(lengths)
    own = manifest(train, len(lengths) - train, model="linear")
    return Dataset(own, np.zeros((rows, 2), np.float32), np.zeros(rows, np.float32), offsets_of(lengths))


def test_nobody_is_measured_on_rows_that_the_run_trained_on() -> None:
    validating, told = _measured(few([4, 4, 4, 1, 4], 2), np.array([1, 0]), 0)
    assert (sorted(validating.tolist()), told) == ([2, 4], "validation clients"), "one row cannot be halved"
    never, told = _measured(few([4, 4, 1], 3), np.array([1, 0, 0]), 0)
    assert (never.tolist(), told) == ([1], "training clients that never took part")
    assert not len(_measured(few([4, 4], 2), np.array([1, 1]), 0)[0])
    validating, told = _measured(few([4, 4, 4], 2), np.array([1, 0]), 0, starts_from=True)
    assert (validating.tolist(), told) == ([2], "validation clients")


def test_where_a_run_starts_from_one_that_may_have_trained_on_all_nothing_is_measured(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", (ONES, [1.0] * 4), (ONES, [9.0] * 4), train=2, loss="mse")
    worth = appraise(*a_run(folder, **{"start-from": "earlier"}), np.array([1, 0]), {})
    assert worth.level is Level.NOT_MEASURED
    assert "from which it starts" in worth.verdict


def test_where_all_took_part_nothing_is_measured_and_the_reason_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", (ONES, [1.0] * 4), train=1, loss="mse")
    worth = appraise(*a_run(folder), np.array([3]), {})
    assert (worth.level, worth.arms) == (Level.NOT_MEASURED, [])
    assert worth.lines() == [f"Worth it? {worth.verdict}"]
    assert "Give the dataset validation clients" in worth.verdict


def test_where_each_client_has_one_row_the_reason_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", (ONES[:1], [1.0]), (ONES[:1], [1.0]), train=1, loss="mse")
    worth = appraise(*a_run(folder), np.array([1]), {})
    assert worth.level is Level.NOT_MEASURED
    assert "Each validation client has a single row" in worth.verdict


def test_clients_that_are_measured_are_in_no_baseline(tmp_path: Path) -> None:
    """The one client that never took part has 9s, which the constant does not know."""
    folder = write(tmp_path / "d", (ONES, [1.0] * 4), (ONES, [9.0] * 4), train=2, loss="mse")
    worth = appraise(*a_run(folder), np.array([1, 0]), {})
    assert [arm.mean for arm in worth.arms if arm.way is Way.CONSTANT] == [8.0]


# --- the work


@pytest.mark.parametrize("rounds", [1, 10, 300])
@pytest.mark.parametrize(("lengths", "clients"), [([2] * 40, 5), ([400] * 40, 20), ([3000] * 400, 2)], ids=str)
@pytest.mark.parametrize("model", ["linear", "mlp inputs=2 hidden=200 outputs=1"])
def test_baselines_take_a_quarter_of_the_runs_work_at_most(
    rounds: int, lengths: list[int], clients: int, model: str, tmp_path: Path
) -> None:
    parts = [(np.zeros((size, 2), np.float32), np.zeros(size)) for size in lengths]
    folder = write(tmp_path / "d", *parts, train=len(lengths) * 3 // 4, model=model, loss="mse")
    history = [a_round(number + 1) for number in range(rounds)]
    setup, state = a_run(folder, history=history, **{"clients-per-round": clients, "rounds": rounds})
    plan = _plan(setup, state)
    assert 0 < plan.share <= SHARE
    assert plan.work <= plan.budget
    skipped = {
        Way.ALONE: not plan.sizes,
        Way.OWN: plan.how is Personal.NO,
        Way.POOLED: not plan.passes,
        Way.ONE_MODEL: not plan.rounds,
    }
    assert set(plan.left_out) == {way for way, left in skipped.items() if left}, "by name"


def test_what_does_not_fit_is_left_out_by_name(tmp_path: Path) -> None:
    big = [(np.zeros((30_000, 2), np.float32), np.zeros(30_000))] * 8
    folder = write(tmp_path / "d", *big, train=4, loss="mse", model="mlp inputs=2 hidden=100 outputs=1")
    history = [a_round(1, asked=1, releases=1)]
    setup, state = a_run(folder, history=history, **{"clients-per-round": 1, "rounds": 1, "local-epochs": 1})
    worth = appraise(setup, state, np.array([1, 0, 0, 0]), {})
    assert {one.label for one in worth.left_out} >= {LABELS[Way.ALONE], LABELS[Way.POOLED]}
    assert not {Way.ALONE, Way.POOLED} & {arm.way for arm in worth.arms}


# --- the verdict: gains of 8 clients, more is better, so that only the mean decides


def gains(**means: float) -> dict[Way, Any]:
    return {Way(name.replace("_", "-")): np.full(8, mean) for name, mean in means.items()}


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        (gains(constant=2, last_round=1), Level.NOT_BETTER_THAN_CONSTANT, "worse than a constant"),
        (gains(constant=1, last_round=1), Level.NOT_BETTER_THAN_CONSTANT, "not clearly better than a constant"),
        (gains(constant=0, alone=2, last_round=1), Level.NOT_BETTER_THAN_ALONE, "worse than each client alone"),
        (
            gains(constant=0, alone=1, last_round=1),
            Level.NOT_BETTER_THAN_ALONE,
            "not clearly better than each client alone",
        ),
        (gains(constant=0, alone=0, pooled=2, last_round=1), Level.BETTER_THAN_ALONE, "behind all rows pooled"),
        (gains(constant=0, alone=0, pooled=1, last_round=0.95), Level.CLOSE_TO_POOLED, "close to all rows pooled"),
        (gains(constant=0, alone=0, pooled=1, last_round=2), Level.CLOSE_TO_POOLED, "better than all rows pooled"),
        (
            gains(constant=0, alone=0, last_round=1),
            Level.BETTER_THAN_ALONE,
            "Yes: it is better than each client alone.",
        ),
        (gains(constant=0, last_round=1), Level.BETTER_THAN_CONSTANT, "better than a constant"),
        (
            gains(constant=0, alone=1, last_round=0, made_own=2),
            Level.BETTER_THAN_ALONE,
            "better than each client alone",
        ),
        (gains(constant=0, last_round=float("nan")), Level.DIVERGED, "diverged"),
    ],
)
def test_each_level(found: dict[Way, Any], level: Level, words: str) -> None:
    told = judge(found, False)
    assert told[0] is level
    assert words in told[1]


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (0, "Before clients adjust the model to their rows, it is worse than a constant."),
        (1, "Before clients adjust the model to their rows, it is not clearly better than a constant."),
        (2, ""),
    ],
)
def test_a_model_that_is_good_for_nothing_until_it_is_made_ones_own_is_told(last: float, words: str) -> None:
    found = gains(constant=1, alone=1, last_round=last, made_own=3)
    assert as_it_is(Level.BETTER_THAN_ALONE, found).strip() == words
    assert as_it_is(Level.NOT_BETTER_THAN_CONSTANT, found) == "", "the verdict says so"


def test_epsilon_at_delta_is_doubled_and_not_the_larger_pure_one(tmp_path: Path) -> None:
    """A plan for epsilon 8 at delta 1e-5 has a pure epsilon of 11.5, 70 / 6.083; who asked for 8 may try 16."""
    folder = write(tmp_path / "d", (np.ones((4, 34)), [0.0] * 4), (np.ones((4, 34)), [0.0] * 4), train=1, loss="mse",
                   model="linear inputs=34 outputs=1")  # fmt: skip
    entries = {"clients-per-round": 1, "noise-multiplier": 6.083, "clipping": "public"}
    setup, _ = a_run(folder, **entries)
    once = [replace(a_round(1), max_participations=1)]
    assert tries(Level.NOT_BETTER_THAN_ALONE, setup, once, gains(constant=0, last_round=1)) == ["--epsilon 16"]


def test_a_gain_that_so_few_clients_do_not_show_is_told() -> None:
    apart = gains(constant=0, last_round=0)
    apart[Way.CONSTANT], apart[Way.LAST] = np.zeros(4), np.array([3.0, -1.0, 0.0, 0.0])
    assert "4 clients" in within_chance(Level.NOT_BETTER_THAN_CONSTANT, apart)
    assert within_chance(Level.BETTER_THAN_CONSTANT, apart) == ""
    apart[Way.LAST] = -apart[Way.LAST]
    assert within_chance(Level.NOT_BETTER_THAN_CONSTANT, apart) == ""


def test_an_epsilon_that_says_nothing_is_not_proposed(tmp_path: Path) -> None:
    """2 n / nu = 11 for the one participation; twice that is above 20."""
    folder = write(tmp_path / "d", (np.ones((4, 10)), [0.0] * 4), (np.ones((4, 10)), [0.0] * 4), train=1, loss="mse",
                   model="linear inputs=10 outputs=1")  # fmt: skip
    once = [replace(a_round(1), max_participations=1)]
    found = gains(constant=0, last_round=1)
    for noise, told in ((2.0, []), (2.5, ["--epsilon 16"])):
        setup, _ = a_run(folder, **{"clients-per-round": 1, "noise-multiplier": noise, "clipping": "public"})
        assert tries(Level.NOT_BETTER_THAN_ALONE, setup, once, found) == told


def test_where_clients_differ_too_much_for_one_model_less_noise_is_not_proposed() -> None:
    setup = Setup.parse(in_process.run_config("synthetic") | BASE | FORMAL | {"hypotheses": 1})
    behind, ahead = (gains(constant=0, alone=3, pooled=pooled, last_round=1) for pooled in (2, 4))
    assert (too_unlike(behind), too_unlike(ahead)) == (True, False)
    assert tries(Level.NOT_BETTER_THAN_ALONE, setup, FLAT, behind) == []
    assert tries(Level.NOT_BETTER_THAN_ALONE, setup, FLAT, ahead)
    # Worse than a constant, several models may do what one cannot.
    assert tries(Level.NOT_BETTER_THAN_CONSTANT, setup, FLAT, behind)[-1] == "hypotheses=2"


def test_where_one_model_is_as_exact_as_clients_alone_clients_do_not_differ() -> None:
    """As where a column gives the target away, and pooled rows are fitted to a few millionths."""
    assert not too_unlike(gains(constant=-0.9, alone=-1e-7, pooled=-2e-6, last_round=-1e-7))
    assert too_unlike(gains(constant=-0.9, alone=-0.1, pooled=-0.2, last_round=-0.1))


@pytest.mark.parametrize(("how", "told"), [(Personal.MIXTURE, '"mixture"'), (Personal.AUTO, "")])
def test_a_method_that_predictions_do_not_have_is_named(how: Personal, told: str) -> None:
    assert (told in by_another(gains(constant=0, last_round=1, made_own=2), how)) is True
    assert bool(by_another(gains(constant=0, last_round=1, made_own=2), how)) is bool(told)
    assert by_another(gains(constant=0, last_round=1), how) == "", "the model is judged as it is"


def test_rounds_that_led_away_have_diverged_however_well_they_ended() -> None:
    assert judge(gains(constant=0, alone=0, last_round=1), True)[0] is Level.DIVERGED


@pytest.mark.usefixtures("umbel_home")
def test_where_training_diverges_at_every_client_the_run_is_not_worth_it(tmp_path: Path) -> None:
    """Such clients release what they got. Made each client's own, even hypotheses that no round changed do well."""
    draw = np.random.default_rng(0)
    x = draw.normal(0, 1e4, (12, 8, 2))
    folder = write(tmp_path / "d", *((rows, rows @ [1e-4, 2e-4]) for rows in x), train=8, loss="mse")
    told = {"dataset": str(folder), "rounds": 2, "restarts": 1, "step-size": 0.3, "clients-per-round": 8}
    told |= {"validation-clients-per-round": 4}
    run = umbel.load(in_process.run(in_process.run_config("synthetic") | BASE | told, 1, [Appraisal()]))
    assert run.history["loss"].nunique() == 1
    assert run.verdict.startswith("No: no round changed the hypotheses")
    assert "step-size=0.075" in run.verdict


@pytest.mark.usefixtures("umbel_home")
def test_rows_that_changed_during_the_run_measure_nothing(tmp_path: Path) -> None:
    class Swap(Observer):
        def at_end(self, run: Run) -> None:
            shutil.rmtree(tmp_path / "d")
            write(tmp_path / "d", *[(ONES, [9.0] * 4)] * 4, train=2, loss="mse")

    write(tmp_path / "d", *[(ONES, [1.0] * 4)] * 4, train=2, loss="mse")
    told = {"dataset": str(tmp_path / "d"), "rounds": 1, "restarts": 1, "clients-per-round": 2}
    config = in_process.run_config("synthetic") | BASE | told | {"validation-clients-per-round": 2}
    assert not (in_process.run(config, 1, [Swap(), Appraisal()]) / FILE).exists()


def test_a_difference_within_chance_is_none() -> None:
    """Means of .5 with standard errors of .5 (differences 3, -1, 0, 0) and .1 are no more, and more, than none."""
    apart = gains(constant=0, last_round=0)
    apart[Way.CONSTANT], apart[Way.LAST] = np.zeros(4), np.array([3.0, -1.0, 0.0, 0.0])
    assert judge(apart, False)[0] is Level.NOT_BETTER_THAN_CONSTANT
    apart[Way.LAST] = np.array([0.6, 0.4, 0.6, 0.4])
    assert judge(apart, False)[0] is Level.BETTER_THAN_CONSTANT


# --- what to try


FALLING = [a_round(i + 1, loss=1 - i / 20, releases=1) for i in range(11)]
FLAT = [a_round(i + 1, loss=0.5, releases=1) for i in range(11)]
LEVEL = [a_round(i + 1, loss=0.5 + 0.1**i, releases=1) for i in range(11)]  # falls by rounding errors in the end
NOISY = {"noise-multiplier": 4.0}
FORMAL = NOISY | {"clipping": "public"}
TWO = {"strategy": "ifca", "hypotheses": 2}


@pytest.mark.parametrize(
    ("level", "history", "changes", "found"),
    [
        (Level.DIVERGED, FLAT, {}, ["step-size=0.025"]),
        (Level.DIVERGED, [replace(one, moved=False, groups=[3]) for one in FLAT], {}, []),
        (Level.DIVERGED, FLAT, NOISY, ["step-size=0.025", "clients-per-round=80"]),
        (Level.NOT_BETTER_THAN_CONSTANT, FLAT, {}, ["step-size=0.025"]),
        (Level.NOT_BETTER_THAN_CONSTANT, FALLING, {}, ["rounds=400"]),
        (Level.NOT_BETTER_THAN_CONSTANT, FLAT, NOISY, ["clients-per-round=80", "noise-multiplier=2"]),
        # 2 n / nu = 1 a participation, of which the busiest client has 3.
        (Level.NOT_BETTER_THAN_CONSTANT, FLAT, FORMAL, ["clients-per-round=80", "--epsilon 5.9"]),
        # Each of 100 clients once, in 5 rounds of 20: none is left for larger rounds.
        (Level.NOT_BETTER_THAN_ALONE, FLAT, FORMAL | {"max-participations": 1, "rounds": 5}, ["--epsilon 2"]),
        (Level.NOT_BETTER_THAN_ALONE, FLAT, NOISY | {"clients-per-round": 100}, ["noise-multiplier=2"]),
        (Level.NOT_BETTER_THAN_ALONE, FALLING, {}, ["rounds=400"]),
        (Level.NOT_BETTER_THAN_ALONE, FLAT, {}, ["hypotheses=2"]),
        (Level.NOT_BETTER_THAN_ALONE, LEVEL, {}, ["hypotheses=2"]),
        (Level.NOT_BETTER_THAN_ALONE, FLAT, TWO, ["hypotheses=1"]),
        (Level.BETTER_THAN_ALONE, FLAT, TWO, ["hypotheses=1"]),
        (Level.CLOSE_TO_POOLED, FLAT, NOISY, []),
        (Level.NOT_MEASURED, FLAT, NOISY, []),
    ],
)
def test_what_to_try_is_a_setting(level: Level, history: Any, changes: dict[str, Any], found: list[str]) -> None:
    """Of the demo's 100 training clients 20 train a round, with step size .1; one model alone does better."""
    setup = Setup.parse(
        in_process.run_config("synthetic") | BASE | {"step-size": 0.1, "clients-per-round": 20} | changes
    )
    constant = 2 if level is Level.NOT_BETTER_THAN_CONSTANT else 0
    assert tries(level, setup, history, gains(constant=constant, one_model=2, last_round=1)) == found


def test_no_setting_is_proposed_where_more_clients_would_show_the_gain() -> None:
    setup = Setup.parse(in_process.run_config("synthetic") | BASE)
    ahead = gains(constant=0, last_round=1)
    assert tries(Level.NOT_BETTER_THAN_CONSTANT, setup, FLAT, ahead) == []
    assert tries(Level.NOT_BETTER_THAN_CONSTANT, setup, FALLING, ahead) == ["rounds=400"]


# --- whole runs


@pytest.mark.rest
@pytest.mark.usefixtures("blank_figures", "umbel_home", "looped")
def test_the_same_seed_has_the_same_worth_on_one_node_and_on_three() -> None:
    config = paper_run() | {"rounds": 4, "restarts": 1}
    one, other = (in_process.run(config, nodes, [Appraisal()]) / FILE for nodes in (1, 3))
    assert one.read_bytes() == other.read_bytes()
    found = json.loads(one.read_text())
    assert {arm["way"] for arm in found["arms"]} >= {"constant", "alone", "pooled", "one-model", "last-round"}


@pytest.mark.usefixtures("blank_figures", "umbel_home")
def test_a_recommenders_own_rules_stand_in_the_table() -> None:
    config = in_process.run_config("recommender", rounds=3, restarts=1)
    found = json.loads((in_process.run(config, 1, [Appraisal()]) / FILE).read_text())
    labels = {arm["label"] for arm in found["arms"]}
    assert {"rule: all liked", "rule: item and user bias", "each client alone", "this run, last round"} <= labels
    assert {one["label"] for one in found["left_out"]} == {LABELS[one] for one in (Way.OWN, Way.POOLED, Way.ONE_MODEL)}
    assert found["metric"] == "right-sign"


def test_random_numbers_elsewhere_are_left_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", (ONES, [1.0] * 4), (ONES, [1.0] * 4), train=1, loss="mse")
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    appraise(*a_run(folder), np.array([1]), {})
    assert torch.equal(before, torch.random.get_rng_state())
    assert models.load("linear").local_shapes == {}


def test_a_single_client_shows_nothing_and_few_clients_must_agree_more() -> None:
    """Student's t: of two clients, a gain must be 13.97 standard errors, of five 2.87, of very many 2."""
    for gains, ahead in (
        ([5.0], False), ([1.0, 1.3], False), ([1.0, 1.1], True), ([1.0, 2.0, 3.0, 2.0, 4.2], True),
        ([1.0, 2.0, 3.0, -1.0, 4.2], False),
    ):  # fmt: skip
        found = {Way.CONSTANT: np.zeros(len(gains)), Way.LAST: np.array(gains)}
        assert (judge(found, False)[0] is Level.BETTER_THAN_CONSTANT) == ahead, gains
