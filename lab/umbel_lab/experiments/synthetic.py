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
from umbel.simulation.measured import LOCAL_ONLY, STATES, Spec
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments.fairness import Grouping, group_fairness
from umbel_lab.experiments.runs import FINE_TUNE, INTERPOLATE
from umbel_lab.experiments.tables import BEST_ROUND, by_arm, page, what_a_client_gets
from umbel_lab.output import (
    COLOURS,
    MARKERS,
    Columns,
    Row,
    Section,
    figure,
    interval,
    mean,
    numbers,
    rate,
    spread,
    verdict,
)

SEEDS = 100
NEAR = 1.0  # an optimum counts as found when a hypothesis is this near to it
TOLD_APART = 0.5  # the adjusted Rand index below which choices do not tell the distributions apart
PRINTED_LEAKAGE = 2.4  # the highest in figure 2
HOLDS = 0.95  # a claim holds if it is true of this share of all runs

ARMS: Mapping[str, dict[str, Any]] = {
    "FedAvg": {"strategy": "fedavg", "hypotheses": 1, "noise_multiplier": 0.0},
    "IFCA": {"strategy": "ifca", "hypotheses": 2, "noise_multiplier": 0.0},
    "Algorithm 1": {"strategy": "group-privacy", "hypotheses": 2, "noise_multiplier": 5.0},
}
RELOCATED = "Algorithm 1, relocated"
"""Algorithm 1 if k-means moves the centre of an empty cluster, as scikit-learn does; the paper does not say."""
NOISY: Mapping[str, dict[str, Any]] = {
    "Algorithm 1": ARMS["Algorithm 1"],
    RELOCATED: ARMS["Algorithm 1"] | {"strategy": "group-privacy empty=relocate"},
}
# The paper's setting, one that finds the optima, and that with umbel's cure for collapse.
PAPER, LONG, RESTARTS = "patience 6", "100 rounds", "100 rounds, 5 restarts"
SETTINGS: Mapping[str, dict[str, Any]] = {
    PAPER: {"rounds": 500, "patience": 6, "restarts": 1},
    LONG: {"rounds": 100, "patience": 0, "restarts": 1},
    RESTARTS: {"rounds": 100, "patience": 0, "restarts": 5},
}
CFL = "CFL, k ≤ 2"
# Results of clients that personalise a hypothesis.
OWN: Mapping[str, dict[str, Any]] = {
    "FedAvg, fine-tuned": {"strategy": FINE_TUNE, "hypotheses": 1, "noise_multiplier": 0.0},
    "FedAvg, interpolated": {"strategy": INTERPOLATE, "hypotheses": 1, "noise_multiplier": 0.0},
    "k = 1, ν = 5, fine-tuned": {"strategy": FINE_TUNE, "hypotheses": 1, "noise_multiplier": 5.0},
    "k = 1, ν = 5, interpolated": {"strategy": INTERPOLATE, "hypotheses": 1, "noise_multiplier": 5.0},
    "Algorithm 1, fine-tuned": {"strategy": FINE_TUNE, "hypotheses": 2, "noise_multiplier": 5.0},
}
# What else there is for every client to have a model that fits it; each with the setting `LONG`.
OTHERS: Mapping[str, dict[str, Any]] = {
    CFL: {"strategy": "umbel_lab.strategies:ClusteredFL", "hypotheses": 2, "noise_multiplier": 0.0},
    "by itself": {"strategy": LOCAL_ONLY},
    **OWN,
}

TRUE_GROUPS = Grouping(("first", "second"), lambda dataset: np.array(dataset.manifest.groups), 0.5)


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs, and write the data that each seed draws under `folder`."""
    settings = [PAPER] if quick else SETTINGS
    wanted = {(arm, setting): keys for setting in settings for arm, keys in {**ARMS, **NOISY}.items()}
    wanted |= {(other, LONG): keys for other, keys in OTHERS.items()}
    found = []
    for seed in range(first, first + seeds):
        path = folder / "data" / f"synthetic-{seed}.json"
        write_leaf(path, *load_recipe("synthetic").make(seed))
        for (arm, setting), keys in wanted.items():
            config = run_config("synthetic", dataset=str(path), seed=seed, **SETTINGS[setting] | keys)
            found.append(Spec.of((arm, setting), config))
    return found


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write tables and figures of the runs of `specs`."""
    arms = by_arm(results)
    learnt = {key: runs for key, runs in arms.items() if key[0] in (*ARMS, *NOISY, CFL)}
    rows = [_row(arm, setting, runs) for (arm, setting), runs in learnt.items()]
    named = {", ".join(key): runs for key, runs in learnt.items()}
    others = {", ".join(key): runs for key, runs in arms.items() if key not in learnt}
    gets = what_a_client_gets("RMSE", [*others.items(), *named.items()], 3)
    text = (
        "Groups of clients are the two distributions. Losses are RMSE; what is decided of a row is whether its target "
        f"is above {TRUE_GROUPS.threshold:g}, which half of the rows of both are."
    )
    sections = [
        *(claims(arms, noisy) for noisy in NOISY),
        _outcomes(rows),
        gets,
        group_fairness(named, TRUE_GROUPS, text, 3),
    ]
    page("Two linear models", sections, rows, results).write(folder)
    seed = min(result.spec.config["seed"] for result in results)
    first = {key: [run for run in runs if run.spec.config["seed"] == seed] for key, runs in arms.items()}
    for setting, ending in ((PAPER, ""), (RESTARTS, "-long")):
        shown = [run for arm in ARMS for run in first.get((arm, setting), [])]
        if len(shown) == len(ARMS):
            _figure_1(shown, folder, f"figure-1{ending}")
        for run in first.get(("Algorithm 1", setting), []):
            _figure_2(run, folder, f"figure-2{ending}")


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
    printed = PRINTED_LEAKAGE if private and setting == PAPER else None
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
        "as_printed": sum(_as_printed(run, "last") for run in runs) if private else None,
        **leakage,
        "leakage_printed": printed,
        "leakage_difference": leakage["leakage"] / printed - 1 if printed and leakage["leakage"] else None,
    }


def _outcomes(rows: Sequence[Row]) -> Section:
    def often(name: str) -> Callable[[Row], str]:
        return lambda row: "" if row[name] is None else rate(row[name], row["runs"])

    text = (
        "Validation RMSE (mean ± standard deviation over seeds, and median); runs in which both optima have a "
        f"hypothesis within {NEAR:g}, and runs in which what validation clients pick does not "
        f"tell the two distributions apart (adjusted Rand index below {TOLD_APART:g}), each with a 95 % interval; "
        "highest privacy leakage of a client. All are of the last round but where a column says otherwise. "
        f"{BEST_ROUND} Without noise nothing bounds the leakage. The irreducible RMSE is √(1/3) = .577."
    )
    columns: Columns = {
        "who": "who",
        "setting": "setting",
        "RMSE": lambda row: spread(row, "rmse", 3),
        "median": "rmse_median:.3f",
        "rounds": "rounds:.0f",
        "RMSE, best round": lambda row: spread(row, "rmse_best", 3),
        "optima found": often("optima_found"),
        "best round": often("optima_found_best"),
        "not told apart": often("collapsed"),
        "leakage": lambda row: "no bound" if row["leakage"] is None else spread(row, "leakage", 2),
    }
    return Section.of("What comes out", text, columns, rows)


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
"""The paper's claims about figures 1 and 2, for the runs of `ARMS` from one seed and the state of their hypotheses."""


def claims(arms: Mapping[tuple[str, str], Sequence[Result]], noisy: str) -> Section:
    """Count the seeds for which what the paper says of its figures is true, with a variant of `NOISY`."""
    trios: dict[str, list[tuple[Result, Result, Result]]] = {}
    for setting in SETTINGS:
        trio = ("FedAvg", "IFCA", noisy)
        by_seed = [{run.spec.config["seed"]: run for run in arms.get((arm, setting), ())} for arm in trio]
        if seeds := set.intersection(*map(set, by_seed)):
            one, two, three = by_seed
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
                cells += [verdict(*interval(often, len(runs)), HOLDS)] * (setting == PAPER)
        rows.append(cells)
    text = (
        "The paper shows one run of each kind. Here are the runs, with a 95 % interval, for which what it says of its "
        f"figures is true. An optimum is found when a hypothesis is within {NEAR:g} of it. A claim is that something "
        f"is true of {100 * HOLDS:.0f} % of all runs with the paper's setting, {PAPER}. The answer is yes if the whole "
        "interval is above that, no if it is below, and open if the interval holds it. The last round leads; "
        f"longer settings have it alone. {BEST_ROUND}"
    )
    variant = ", empty clusters relocated" * (noisy == RELOCATED)
    return Section(f"The paper's claims{variant}", text, columns, rows)


def _figure_1(results: Sequence[Result], folder: Path, name: str) -> None:
    """Draw figures 1a to 1i: releases in the first and in the best round, and the loss, a row a strategy."""
    optima = np.array(load_recipe("synthetic").OPTIMA)
    releases = np.concatenate([result.trace["releases"] for result in results])
    # Noise now and then throws a release far out of the frame, which holds all others and the optima.
    low = np.minimum(np.quantile(releases, 0.01, axis=0), optima.min(axis=0)) - 1
    high = np.maximum(np.quantile(releases, 0.99, axis=0), optima.max(axis=0)) + 1
    with figure(folder, name, len(results), 3, (10, 3 * len(results))) as axes:
        for row, (arm, result) in enumerate(zip(ARMS, results, strict=True)):
            trace, best = result.trace, result.measures["best_round"]
            trained = int(trace["rounds"].max())
            for column, (round, what) in enumerate(((1, "first round"), (min(best, trained), "best round"))):
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
