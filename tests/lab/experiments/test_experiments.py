"""The experiments: which runs they are, and what their tables make of results worked out by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import umbel.simulation.sweep
from tests.helpers.datasets import manifest
from tests.lab.experiments.conftest import read_csv
from umbel.data import offsets_of, write_dataset
from umbel.simulation import baselines
from umbel.simulation.sweep import Result, Spec, _save
from umbel_lab.attacks import reconstruct
from umbel_lab.experiments import femnist_full, handwriting, hospital, scaffold, synthetic
from umbel_lab.experiments.__main__ import app, shortened
from umbel_lab.experiments.scaffold import by_arm, finish
from umbel_lab.output import interval, verdict

pytestmark = pytest.mark.rest

OWN: dict[str, Any] = {
    "mean": 0.1, "worst_decile": 0.2, "chosen": [1, 1], "rand_index": 0.5, "to_truth": [0.1, 0.2],
    "held_out": {"mean": 0.3, "worst_decile": 0.4, "clients": 2},
}  # fmt: skip


def specs_of(
    module: ModuleType, folder: Path, seeds: int = 0, first: int = 2000, quick: bool = False, of: str = "qmnist"
) -> list[Spec]:
    """Return an experiment's runs, by default of as many seeds as its command does."""
    return scaffold.specs(module, folder, range(first, first + (seeds or module.SEEDS)), quick, of)


FULL = femnist_full.specs(Path(), range(2000, 2003), False, "")


def digits(folder: Path, clients: int = 8) -> None:
    """Write made-up images with strokes of four rows for each client."""
    generator = np.random.default_rng(0)
    images = generator.integers(200, 256, (4 * clients, 28, 28)).astype(np.uint8)
    for image in images:
        row, column = generator.integers(2, 18, 2)
        image[row : row + 8, column : column + 3] = generator.integers(0, 120)
    own = manifest(
        clients - 2, 2, name=folder.name, model="cnn10", feature_scale=1 / 255, groups=[0, 1] * (clients // 2)
    )
    write_dataset(folder, own, images, np.arange(4 * clients) % 10, offsets_of([4] * clients))


def made_up(specs: Sequence[Spec], folder: Path, measures: Any) -> Iterator[Result]:
    """Yield results that hold what `measures` makes of each spec, instead of running them.

    A run's validation losses are its ``losses``, or .1 in one round.
    """
    for spec in specs:
        base = {"rounds": 10, "best_round": 1, "best_loss": 0.1, "median_budget": None, "max_budget": None}
        base |= {"best": OWN, "last": OWN}
        path = folder / "runs" / spec.name
        path.mkdir(parents=True, exist_ok=True)
        (path / "ledger.csv").write_text("client,participations,epsilon,paper_budget\n3,2,none,7.3333\n")
        made = base | measures(spec.config)
        rounds = [{"number": at, "loss": loss} for at, loss in enumerate(made.pop("losses", [0.1]), 1)]
        (path / "history.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in rounds))
        yield Result(spec, made, path)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out figures, which take most of the time."""
    for name in ("_figure_3", "_figure_4"):
        monkeypatch.setattr(hospital, name, lambda *_: None)


def grid(configs: Sequence[dict[str, Any]], *keys: str) -> set[tuple[Any, ...]]:
    return {tuple(config[key] for key in keys) for config in configs}


def test_the_grids_are_the_papers(hospitals: Path, tmp_path: Path) -> None:
    """Each run has a name of its own; those of FEMNIST with and without rebirth have fresh seeds, and come first."""
    of = {module: specs_of(module, tmp_path) for module in (hospital, synthetic, handwriting)}
    for specs in (*of.values(), FULL):
        assert len({spec.name for spec in specs}) == len(specs)
    configs = {module: [spec.config for spec in specs] for module, specs in of.items()}
    grouped = [c for c in configs[hospital] if c["strategy"].startswith("group-privacy")]
    nus, seeds = (0, 0.1, 1, 2, 3, 5), range(2000, 2010)
    assert grid(grouped, "loss", "strategy", "hypotheses", "noise-multiplier", "seed") == {
        *product(("", "mse"), ["group-privacy"], (1, 3, 5, 7), nus, seeds),
        *product([""], ["group-privacy empty=relocate"], (3, 5, 7), nus, seeds),
    }
    for c in configs[hospital]:
        assert c["dataset"] == str(tmp_path / "data" / f"hospital-{c['seed']}"), "split anew by each seed"
    papers = [c for c in configs[synthetic] if c["patience"] == 6]
    assert grid(papers, "strategy", "hypotheses", "noise-multiplier", "restarts") == {
        ("fedavg", 1, 0, 1), ("ifca", 2, 0, 1), ("group-privacy", 2, 5, 1), ("group-privacy empty=relocate", 2, 5, 1),
    }  # fmt: skip
    table_2 = [c for c in configs[handwriting] if (c["strategy"], c["hypotheses"]) == ("group-privacy", 2)]
    nus = (0, 0.001, 0.01, 0.1, 1, 3, 5, 10, 15)
    for runs in (table_2, [spec.config for spec in FULL[:54]]):
        assert grid(runs, "loss", "noise-multiplier", "seed") == {
            *product(("cross-entropy", "rmse"), nus, range(2000, 2003))
        }
    assert (len(FULL), grid([spec.config for spec in FULL], "rounds", "patience")) == (62, {(500, 0)})
    femnist = shortened(specs_of(handwriting, tmp_path, of="femnist"), 40)
    assert grid([spec.config for spec in femnist], "dataset", "rounds") == {("femnist", 40)}
    first = [(s.config["seed"], s.config["strategy"]) for s in femnist if s.arm == handwriting.COLLAPSE]
    assert first == [(seed, "group-privacy respawn=3") for seed in range(2000, 2008)]
    assert [(s.config["seed"], s.config["strategy"]) for s in femnist[:8]] == first


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("words", "columns", "rows"),
    [
        (["hospital"], ("loss", "empty", "k", "nu"), [
            *(("rmse", "stay", k, nu) for k in "15" for nu in "03"),
            *(("rmse", "relocate", "5", nu) for nu in "03"),
            *(("mse", "stay", k, nu) for k in "15" for nu in "03"),
        ]),
        (["qmnist", "--rounds", "1"], ("k", "nu"), [("2", "0"), ("1", "0")]),
        (["dlg"], ("attack",), [("mean image",), ("DLG",), ("rank one",), ("last bias",)]),
    ],
    ids=str,
)  # fmt: skip
def test_a_command_leaves_a_table_and_figures(
    words: list[str], columns: tuple[str, ...], rows: list[Any], hospitals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hospital, "_QUICK_ROUNDS", 3)
    monkeypatch.setattr(baselines, "LOCAL_EPOCHS", 2)
    monkeypatch.setattr(reconstruct, "deep_leakage", partial(reconstruct.deep_leakage, iterations=5))
    some = ("CFL, k ≤ 7", "by itself", "FedAvg, fine-tuned")
    monkeypatch.setattr(hospital, "OTHERS", {name: hospital.OTHERS[name] for name in some})
    digits(hospitals / "data" / "qmnist")
    digits(hospitals / "data" / "femnist", clients=40)
    done = CliRunner().invoke(app, [*words, "--quick"])
    assert done.exit_code == 0, done.output
    folder = hospitals / "experiments" / f"{words[0]}-quick"
    assert done.stdout.strip() == str(folder / "table.md")
    assert [tuple(row[column] for column in columns) for row in read_csv(folder)] == rows
    figures = {"hospital": {"figure-3.svg", "figure-3.png", "figure-4.png"}, "dlg": {"figure-5.svg", "figure-5.png"}}
    assert {"table.md"} | figures.get(words[0], set()) <= set(os.listdir(folder))


# --- hospital


def test_a_table_has_the_best_round_the_last_ten_and_the_printed_budgets(
    hospitals: Path, undrawn: None, tmp_path: Path
) -> None:
    def measures(config: dict[str, Any]) -> dict[str, Any]:
        k, nu, seed = config["hypotheses"], config["noise-multiplier"], config["seed"]
        rise = 0.001 * nu * (1 + 0.1 * seed)
        # The best round falls with the noise, and the mean of the last ten rises. What was before does not count.
        found: dict[str, Any] = {"losses": [0.9, 0.1 - rise, *[0.2 + rise] * 9]}
        found |= {"best_loss": 0.1 - rise, "median_budget": 1.0, "max_budget": 1.0}
        if (k, nu) in hospital.PRINTED:
            median, largest = hospital.PRINTED[k, nu]
            # Seeds around the printed median, and a maximum a half too high.
            found |= {"median_budget": median * (1 + 0.1 * (seed - 1)), "max_budget": 1.5 * largest}
        # Under ν = 1, one of three hypotheses serves 995 of 1000.
        lost = (k, nu, seed) == (3, 1.0, 0)
        return found | {"last": {**OWN, "chosen": [995, 5, 0] if lost else [500, 490, 10]}}

    results = list(made_up(specs_of(hospital, tmp_path, seeds=3, first=0), tmp_path, measures))
    hospital.page(results).write(tmp_path)
    rows = {(row["k"], row["nu"]): row for row in read_csv(tmp_path) if (row["loss"], row["empty"]) == ("rmse", "stay")}
    assert rows["7", "0.1"]["median_budget_printed"] == "517"
    assert float(rows["7", "0.1"]["median_budget_difference"]) == pytest.approx(0, abs=1e-9)
    assert float(rows["7", "0.1"]["max_budget_difference"]) == pytest.approx(0.5)
    assert [key for key, row in rows.items() if row["collapsed"] != "0"] == [("3", "1")]
    # (.1 + 9 x .2) / 10 without noise, of 10,000 dollars.
    assert float(rows["1", "0"]["rmse_last_ten"]) == pytest.approx(1900)
    assert float(rows["1", "0"]["rmse_best"]) == pytest.approx(1000)
    page = (tmp_path / "table.md").read_text()
    judged = [line.split(" | ") for line in page.splitlines() if line.startswith("| rises with the noise")]
    assert [(row[2], row[4].strip(" |")) for row in judged] == [("no", "yes")] * 3
    hospital.page([result for result in results if result.spec.config["seed"] == 0]).write(tmp_path)
    assert "## The paper's claims" not in (tmp_path / "table.md").read_text(), "of one seed"


def test_a_claim_of_figure_3_is_true_false_or_open() -> None:
    # 1000, 500, 400, 350 dollars by k and 10 more by unit of noise, less with k; k = 1 and 3 vary more.
    def level(k: int, nu: float) -> float:
        return {1: 1000, 3: 500, 5: 400, 7: 350}[k] + 10 * nu / k

    def varies(k: int, nu: float) -> float:
        return (20 if k < 5 else 10) * (2 if nu >= 2 else 1)

    def judged(level: Any, spread: Any) -> Any:
        """Judge losses (k, ν, seed) around a level, by k and ν, that deviate by `spread` in turn up and down."""
        cells = [(k, nu) for k in hospital.HYPOTHESES for nu in hospital.MULTIPLIERS]
        found = [level(k, nu) + spread(k, nu) * (1 if seed % 2 else -1) for k, nu in cells for seed in range(16)]
        return hospital.judged(np.reshape(found, (len(hospital.HYPOTHESES), len(hospital.MULTIPLIERS), 16)))

    as_said = judged(level, varies)
    assert [answer for *_, answer in as_said] == ["yes"] * 7
    assert as_said[0][1] == "1 to 3: 512, 3 to 5: 102, 5 to 7: 51"
    other_way = judged(lambda k, nu: -level(k, nu), lambda k, nu: 50 - varies(k, nu))
    assert [answer for *_, answer in other_way] == ["no"] * 7
    # An answer that others do not share is open, and a shorter patience cuts a run where it would have ended.
    tables = [[("a", "1", "yes"), ("b", "2", "no")], [("a", "3", "yes"), ("b", "4", "open")]]
    assert hospital.agreed(tables) == [("a", "1", "yes"), ("b", "2", "open")]
    losses = [5.0, 6, 7, 4, 5, 6, 7]
    assert [[*hospital.until(losses, patience)] for patience in (3, 2, 1)] == [losses, losses[:3], losses[:2]]
    assert [*hospital.until(losses[3:], 2)] == [4, 5, 6]


def test_without_data_or_results_there_is_no_table(umbel_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["qmnist", "--quick"])
    assert (done.exit_code, "no dataset 'qmnist'" in done.stderr) == (3, True)
    monkeypatch.setattr(
        "umbel.simulation.sweep._each", lambda specs, *_: ((spec, None, "Traceback\nMemoryError: x") for spec in specs)
    )
    done = CliRunner().invoke(app, ["synthetic", "--quick"])
    assert (done.exit_code, "11 of 11 runs failed; the reasons are in" in done.stderr) == (1, True)
    assert not (umbel_home / "experiments" / "synthetic-quick" / "table.md").exists()


# --- synthetic


def test_success_collapse_and_the_printed_picture_are_counted(tmp_path: Path) -> None:
    def measures(config: dict[str, Any]) -> dict[str, Any]:
        seed = config["seed"]
        best = {"mean": 0.6, "worst_decile": 0.7, "held_out": {"mean": 0.6, "worst_decile": 0.7}}
        # Seed 0 looks as printed, 1 leaks too much, 2 misses an optimum, 3 collapses.
        best["to_truth"] = [0.2, 0.99] if seed < 2 else [0.2, 1.01]
        best["chosen"] = [99, 1] if seed == 3 else [50, 50]
        best["rand_index"] = 0.01 if seed == 3 else 0.9
        private = config["noise-multiplier"] > 0
        # The last round of seed 1 is one after it missed an optimum.
        last = best | {"to_truth": [0.2, 1.2 if seed == 1 else best["to_truth"][1]]}
        return {"best": best, "last": last, "max_budget": ([2.4, 2.8, 2.0, 2.0][seed] if private else None)}

    results = list(made_up(specs_of(synthetic, tmp_path, seeds=4, first=0, quick=True), tmp_path, measures))
    arms = by_arm(results)
    row = synthetic._row("Algorithm 1", synthetic.PAPER, arms["Algorithm 1", synthetic.PAPER])
    assert (row["optima_found"], row["optima_found_best"], row["collapsed"]) == (1, 2, 1)
    assert row["runs"] == 4
    assert row["leakage"] == pytest.approx(2.3)
    alone = synthetic._row("FedAvg", synthetic.PAPER, arms["FedAvg", synthetic.PAPER])
    assert (alone["optima_found"], alone["leakage"]) == (None, None)
    claims = {claim: found for claim, *found in synthetic.claims(arms, "Algorithm 1").rows}
    of_last, of_best = "1 of 4 (5 to 70 %)", "2 of 4 (15 to 85 %)"
    assert claims["two with ν = 5 find both optima"] == [of_last, "no", of_best, "no"]
    assert claims["and their highest leakage is at most 2.4"] == [of_last, "no", of_last, "no"]
    assert claims["one hypothesis has the highest loss of the three"][1] == "no", "all have the same"


def test_a_share_of_runs_is_no_verdict_where_its_interval_holds_what_is_claimed() -> None:
    assert [verdict(*interval(times, 100), 0.95) for times in (89, 90, 91, 94, 99, 100)] == [
        "no", "no", "open", "open", "open", "yes",
    ]  # fmt: skip
    assert interval(94, 100) == pytest.approx((0.875, 0.972), abs=5e-4), "Wilson, by hand"


@pytest.mark.slow
def test_the_synthetic_tables_and_figures_leave_bad_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = specs_of(synthetic, tmp_path / "synthetic", seeds=1, quick=True)
    monkeypatch.setattr(baselines, "LOCAL_EPOCHS", 2)
    # What is compared in the long run is not looked at.
    ended = [(s, finish(s.config | ({"rounds": 3} if s.arm[1] == synthetic.LONG else {}))) for s in specs]
    results = [_save(spec, one, "", tmp_path) for spec, one in ended]
    bad = specs_of(synthetic, tmp_path, seeds=1, first=2001, quick=True)
    synthetic.page([*results, *(_save(spec, None, "Boom: no", tmp_path) for spec in bad)]).write(tmp_path)
    rows = {row["who"]: row for row in read_csv(tmp_path)}
    assert all(row["runs"] == "1" for row in read_csv(tmp_path))
    assert float(rows["FedAvg"]["rmse"]) > 3
    assert float(rows["IFCA"]["rmse"]) == pytest.approx(0.577, abs=0.02)
    assert {"figure-1.svg", "figure-1.png", "figure-2.svg", "figure-2.png"} <= set(os.listdir(tmp_path))


# --- handwriting


def test_an_accuracy_is_compared_with_the_printed_one(tmp_path: Path) -> None:
    specs = [*specs_of(handwriting, tmp_path, of="femnist", seeds=1), *specs_of(handwriting, tmp_path, seeds=2)]
    handwriting.page([*made_up(specs, tmp_path, lambda _: {"best": OWN | {"mean": 0.9}})]).write(tmp_path)
    rows = {(row["loss"], row["k"], row["nu"]): row for row in read_csv(tmp_path)}
    assert rows["cross-entropy", "2", "15"]["printed"] == "0.561"
    assert float(rows["cross-entropy", "2", "15"]["difference"]) == pytest.approx(0.339)
    assert (rows["rmse", "2", "0.001"]["printed"], rows["rmse", "1", "0"]["printed"]) == ("0.813", "")


# --- FEMNIST at full length


def entry(number: int, loss: float | None, metric: float = 0.0) -> dict[str, Any]:
    return {"number": number, "loss": loss, "metric": metric if loss is not None else None}


def test_the_table_has_the_figure_of_a_whole_run_and_that_of_one_which_stops_without_a_lower_loss(
    tmp_path: Path,
) -> None:
    # Validated every second round; the lowest loss so far is that after round 2, and the fifth after it is of round 12.
    losses = [2.0, 1.0, 1.5, 1.0, 1.2, 1.1, 3.0, 0.5]
    history = [entry(2 * i, loss, metric=i / 10) for i, loss in enumerate(losses)]
    history[1:1] = [entry(1, None)]
    assert femnist_full.with_patience(history) == (0.1, 12)
    assert femnist_full.with_patience(history[:6]) == (0.1, 8), "not yet"
    one = {"mean": 0.7, "worst_decile": 0.5, "rand_index": 1.0}
    results = []
    for spec in (FULL[0], FULL[55], FULL[-1]):  # the paper's, one of a larger step, one of many clients
        path = tmp_path / "runs" / spec.name
        path.mkdir(parents=True)
        lines = [json.dumps(entry(5 * i, loss, 0.1 * i)) for i, loss in enumerate([3.0, 2.0, *[2.5] * 5, 1.0])]
        (path / "history.jsonl").write_text("\n".join(lines))
        results.append(Result(spec, {"best": one, "last": one, "best_round": 35}, path))
    femnist_full.page(results[:1]).write(tmp_path)
    (row,) = read_csv(tmp_path)
    assert (row["accuracy"], row["patience"], row["stopped"]) == ("0.7", "0.1", "30")
    assert float(row["difference"]) == pytest.approx(0.7 - 0.835)
    femnist_full.page(results[1:]).write(tmp_path)
    page = (tmp_path / "table.md").read_text()
    assert "| rmse | 15 | 47 | 0.05 | 1 | 0.700 |" in page
    assert "| femnist | rmse | 10 | 10 | 0.2 | 1 | 0.700 |" in page


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_runs_are_packed_and_put_back(umbel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits(umbel_home / "data" / "femnist")
    done = CliRunner().invoke(app, ["femnist-full", "--quick"])
    assert done.exit_code == 0, done.output
    assert not list((umbel_home / "experiments" / "unfinished").iterdir())
    table = (umbel_home / "experiments" / "femnist-full-quick" / "table.md").read_bytes()
    # As on another machine: what was done is put back, and nothing is done again.
    (umbel_home / "experiments" / "femnist-full-quick").rename(umbel_home / "experiments" / "femnist-full")
    packed = tmp_path / "runs.jsonl"
    assert CliRunner().invoke(app, ["pack", "femnist-full", str(packed)]).exit_code == 0
    (umbel_home / "experiments" / "femnist-full").rename(tmp_path / "away")
    assert CliRunner().invoke(app, ["unpack", "femnist-full", str(packed)]).stdout == "1 runs\n"
    assert CliRunner().invoke(app, ["unpack", "femnist-full", str(packed)]).stdout == "0 runs\n"
    monkeypatch.setattr(umbel.simulation.sweep, "_each", None)
    place = ["--out", str(umbel_home / "experiments" / "femnist-full")]
    for command in (["femnist-full", "--quick"], ["femnist-full", "--quick", "--tables"]):
        again = CliRunner().invoke(app, [*command, *place])
        assert again.exit_code == 0, again.output
        assert (umbel_home / "experiments" / "femnist-full" / "table.md").read_bytes() == table
