"""Two linear models in the plane (group privacy paper, Sec. 5.1): figures 1 and 2, and how typical they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from umbel.data import write_leaf
from umbel.data.find import load_recipe
from umbel.protocol.arrays import flatten
from umbel.simulation.in_process import run_config
from umbel.simulation.sweep import STATES, Result
from umbel_lab import output
from umbel_lab.experiments import scaffold
from umbel_lab.experiments.scaffold import by_arm, by_seed
from umbel_lab.output import COLOURS, MARKERS, Page, Section, figure, mean, numbers, rate

SEEDS = 100
NEAR = 1.0  # an optimum counts as found when a hypothesis is this near to it
TOLD_APART = 0.5  # the adjusted Rand index below which choices do not tell the distributions apart
PRINTED_LEAKAGE = 2.4  # the highest in figure 2
HOLDS = 0.95  # a claim holds if it is true of this share of all runs

_DATA = scaffold.read("synthetic")
SETTINGS, METHODS = _DATA["settings"], _DATA["methods"]
PAPER, LONG, RESTARTS = SETTINGS
TRIO = ("FedAvg", "IFCA", "Algorithm 1")
NOISY = ("Algorithm 1", "Algorithm 1, relocated")
CFL = "CFL, k ≤ 2"


def arms(quick: bool, _of: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the arms, each a method and its setting."""
    settings = [PAPER] if quick else SETTINGS
    base = run_config("synthetic")
    wanted = {(arm, setting): keys for setting in settings for arm, keys in METHODS.items()}
    wanted |= {(other, LONG): keys for other, keys in _DATA["others"].items()}
    return {arm: base | SETTINGS[arm[1]] | keys for arm, keys in wanted.items()}


def draw_data(_name: str, folder: Path, seed: int) -> str:
    """Write data that the seed draws under `folder`; return the path."""
    path = folder / "data" / f"synthetic-{seed}.json"
    write_leaf(path, *load_recipe("synthetic").make(seed))
    return str(path)


def page(results: Sequence[Result]) -> Page:
    """Return tables and figures of the runs of `arms`."""
    arms = by_arm(results)
    learnt = {key: runs for key, runs in arms.items() if key[0] in (*METHODS, CFL)}
    rows = [_row(arm, setting, runs) for (arm, setting), runs in learnt.items()]
    others = {key: runs for key, runs in arms.items() if key not in learnt}
    named = [(", ".join(key), runs) for key, runs in (others | learnt).items()]
    displayed = [
        row | {"leakage_text": "no bound" if row["leakage"] is None else output.spread(row, "leakage", 2)}
        for row in rows
    ]
    outcomes = scaffold.section("What comes out", _DATA, "outcomes", displayed, near=NEAR, apart=TOLD_APART)
    gets = scaffold.what_a_client_gets("RMSE", named, 3)
    sections = [*(claims(arms, noisy) for noisy in NOISY), outcomes, gets]

    def draw(folder: Path) -> None:
        seed = min(result.spec.config["seed"] for result in results)
        first = {key: by_seed(runs)[seed] for key, runs in arms.items() if seed in by_seed(runs)}
        for setting, ending in ((PAPER, ""), (RESTARTS, "-long")):
            shown = [first[arm, setting] for arm in TRIO if (arm, setting) in first]
            if len(shown) == len(TRIO):
                _figure_1(shown, folder, f"figure-1{ending}")
            if ("Algorithm 1", setting) in first:
                _figure_2(first["Algorithm 1", setting], folder, f"figure-2{ending}")

    return scaffold.page("Two linear models", sections, rows, results, draw)


def _found(result: Result, state: str) -> bool:
    return float(max(result.measures[state]["to_truth"])) <= NEAR


def _collapsed(result: Result, state: str) -> bool:
    """Return whether what clients pick does not tell the two distributions apart."""
    measures = result.measures[state]
    return len(measures["chosen"]) > 1 and measures["rand_index"] < TOLD_APART


def _as_printed(result: Result, state: str) -> bool:
    return _found(result, state) and float(result.measures["max_budget"]) <= PRINTED_LEAKAGE + 1e-9


def _loss(result: Result, state: str) -> float:
    return float(result.measures[state]["mean"])


def _row(arm: str, setting: str, runs: Sequence[Result]) -> dict[str, Any]:
    private, several = runs[0].measures["max_budget"] is not None, arm != "FedAvg"
    leakage = numbers("leakage", (run.measures["max_budget"] for run in runs)) if private else {"leakage": None}
    losses, best_losses = ([_loss(run, state) for run in runs] for state in STATES)

    def often(holds: Callable[[Result, str], bool], state: str) -> int | None:
        return sum(holds(run, state) for run in runs) if several else None

    return {
        "who": arm,
        "setting": setting,
        "runs": len(runs),
        **numbers("rmse", losses),
        "rmse_median": float(np.median(losses)),
        **numbers("rmse_best", best_losses),
        "rounds": mean(run.measures["rounds"] for run in runs),
        "optima_found": often(_found, "last"),
        "optima_found_best": often(_found, "best"),
        "collapsed": often(_collapsed, "last"),
        **leakage,
    }


CLAIMS: Mapping[str, Callable[[Result, Result, Result, str], bool]] = {
    "one hypothesis has the highest loss of the three": lambda one, ifca, noisy, state: (
        _loss(one, state) > max(_loss(ifca, state), _loss(noisy, state))
    ),
    "two without noise have the lowest": lambda one, ifca, noisy, state: (
        _loss(ifca, state) < min(_loss(one, state), _loss(noisy, state))
    ),
    "two without noise find both optima": lambda one, ifca, noisy, state: _found(ifca, state),
    "two with ν = 5 find both optima": lambda one, ifca, noisy, state: _found(noisy, state),
    f"and their highest leakage is at most {PRINTED_LEAKAGE}": lambda one, ifca, noisy, state: _as_printed(
        noisy, state
    ),
}
"""The paper's claims about figures 1 and 2, for the runs of `TRIO` from one seed and the state of their hypotheses."""


def claims(arms: Mapping[tuple[str, str], Sequence[Result]], noisy: str) -> Section:
    """Count the seeds for which what the paper says of its figures is true, with a variant of `NOISY`."""
    trios: dict[str, list[tuple[Result, Result, Result]]] = {}
    for setting in SETTINGS:
        one, two, three = (by_seed(arms.get((arm, setting), ())) for arm in ("FedAvg", "IFCA", noisy))
        if seeds := one.keys() & two.keys() & three.keys():
            trios[setting] = [(one[seed], two[seed], three[seed]) for seed in sorted(seeds)]
    rows, columns = [], ["the paper says"]
    for setting in trios:
        columns += [f"{setting}: last round", "so here?", "best round", "so here?"] if setting == PAPER else [setting]
    for claim, holds in CLAIMS.items():
        cells = [claim]
        for setting, runs in trios.items():
            for state in STATES if setting == PAPER else STATES[:1]:
                often = sum(holds(*trio, state) for trio in runs)
                cells.append(rate(often, len(runs)))
                cells += [output.verdict(*output.interval(often, len(runs)), HOLDS)] * (setting == PAPER)
        rows.append(cells)
    words = {"near": NEAR, "holds": 100 * HOLDS, "paper": PAPER}
    variant = ", empty clusters relocated" * (noisy == NOISY[1])
    return Section(f"The paper's claims{variant}", scaffold.say(_DATA, "claims", **words), columns, rows)


def _figure_1(results: Sequence[Result], folder: Path, name: str) -> None:
    """Draw figures 1a to 1i: releases in the first and in the best round, and the loss, a row a strategy."""
    optima = np.array(load_recipe("synthetic").OPTIMA)
    releases = np.concatenate([result.trace["releases"] for result in results])
    # Noise now and then throws a release far out of the frame, which holds all others and the optima.
    low = np.minimum(np.quantile(releases, 0.01, axis=0), optima.min(axis=0)) - 1
    high = np.maximum(np.quantile(releases, 0.99, axis=0), optima.max(axis=0)) + 1
    with figure(folder, name, len(results), 3, (10, 3 * len(results))) as axes:
        for row, (arm, result) in enumerate(zip(TRIO, results, strict=True)):
            trace, best = result.trace, result.measures["best_round"]
            trained = int(trace["rounds"].max())
            for column, (round, what) in enumerate(((1, "first round"), (min(best + 1, trained), "best round"))):
                ax = axes[row, column]
                here = trace["rounds"] == round
                for j in np.unique(trace["groups"][here]):
                    points = trace["releases"][here & (trace["groups"] == j)]
                    ax.scatter(*points.T, color=COLOURS[j], marker=MARKERS[j], s=28, label=f"released, group {j}")
                ax.scatter(*optima.T, color="black", marker="x", s=50, label="optima")
                frame = {"xlim": (low[0], high[0]), "ylim": (low[1], high[1])}
                ax.set(title=f"{arm}, {what} ({round})", xlabel="first parameter", ylabel="second parameter", **frame)
            ring = {"facecolors": "none", "edgecolors": "black", "s": 90, "label": "best hypotheses"}
            axes[row, 1].scatter(*flatten(result.hypotheses).T, **ring)
            axes[row, 1].legend(fontsize=7)
            ax = axes[row, 2]
            points = [(entry["number"], entry["loss"]) for entry in result.history if entry["loss"] is not None]
            ax.plot(*zip(*points, strict=True), color=COLOURS[0])
            ax.axvline(best, color="grey", linewidth=0.8, linestyle=":")
            ax.set(title=f"{arm}, validation", xlabel="round", ylabel="RMSE", ylim=(0, None))


def _figure_2(result: Result, folder: Path, name: str) -> None:
    """Draw figure 2: the highest leakage over the clients of each cluster, by round."""
    trace, config = result.trace, result.spec.config
    price, rounds = 2 / config["noise-multiplier"], np.arange(1, trace["rounds"].max() + 1)
    times = np.zeros(trace["clients"].max() + 1, int)
    cluster, highest = np.full(len(times), -1), np.zeros((config["hypotheses"], len(rounds)))
    for column, round in enumerate(rounds):
        here = trace["rounds"] == round
        clients = trace["clients"][here]
        times[clients] += 1
        cluster[clients] = trace["groups"][here]  # a client's is that of its last release
        highest[:, column] = [price * times[cluster == j].max(initial=0) for j in range(len(highest))]
    with figure(folder, name) as ax:
        for j, line in enumerate(highest):
            ax.step(rounds, line, where="post", color=COLOURS[j], linestyle=("-", "--")[j % 2], label=f"cluster {j}")
        ax.set(xlabel="round", ylabel="highest privacy leakage of a client", ylim=(0, None))
        ax.legend()
