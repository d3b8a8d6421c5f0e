"""The best round, chosen by exact losses of validation clients and by sites' means with noise.

Noise in reports changes nothing that is learnt. So the rounds of a run with it are those of the run without it, and the
exact loss of the round that each chose says what the noise costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from umbel.server.history import State
from umbel.simulation import in_process
from umbel.simulation.measured import Finished, Spec, split_by_seed
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments.tables import SAME_CLIENTS, by_arm, manifest_of, page
from umbel_lab.output import Section, plus_minus

SEEDS = 10
EPSILONS = (1.0, 2.0, 4.0)
"""Of a validation client, pure, for all its reports together."""
EVERY = (1, 5)
SITES = 3
BOUND = 0.5
"""To which losses are clipped; those of the rounds among which a run chooses are .08 to .3."""
LAST = "the last round"
_PLENTY = 1e6


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs, each on a split of the hospitals drawn by its seed."""
    runs = []
    for seed, path in split_by_seed("hospital", folder, range(first, first + seeds)):
        for every in EVERY:
            own = {"dataset": path, "seed": seed, "validate_every": every, **({"rounds": 6} if quick else {})}
            runs.append(Spec.of((f"every {every}",), in_process.run_config("hospital-epsilon-4", **own)))
    return runs


def play(config: Mapping[str, Any]) -> Finished:
    """Do one run with exact losses, and one with noise for each epsilon; return the exact losses of what each chose."""
    exact = _choose(config, {})
    losses = {entry.number: entry.loss for entry in exact.history if entry.loss is not None}
    chosen = {"exact": losses[exact.best_round], LAST: losses[max(losses)], "validations": len(losses)}
    for epsilon in EPSILONS:
        # A report of two numbers costs 2 / nu.
        noise = {"report-noise-multiplier": 2 * len(losses) / epsilon, "report-bound": BOUND}
        noisy = _choose(config, noise | {"exact-losses": "no", "budget": _PLENTY})
        assert not any(entry.exact_reports for entry in noisy.history)
        chosen[f"{epsilon:g}"] = losses[noisy.best_round]
    return Finished(chosen)


def _choose(config: Mapping[str, Any], policy: Mapping[str, Any]) -> State:
    sites = [{"partition-id": i, "num-partitions": SITES, **policy} for i in range(SITES)]
    return in_process.play(config, node_configs=sites).state


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the table of the runs of `specs`."""
    rows, shown = [], []
    [scale] = {manifest_of(result).error_scale for result in results}
    for (arm,), runs in by_arm(results).items():
        measured = [run.measures for run in runs]
        for how in ("exact", *(f"{epsilon:g}" for epsilon in EPSILONS), LAST):
            worse = [100 * (one[how] / one["exact"] - 1) for one in measured]
            rows.append({"arm": arm, "by": how, "loss": sum(one[how] for one in measured) / len(runs), "worse": worse})
            names = {"exact": "exact losses", LAST: f"nothing: {LAST}"}
            name = names.get(how, f"means with noise, epsilon {how}")
            number = str(measured[0]["validations"])
            losses = plus_minus((scale * one[how] for one in measured), 0)
            shown.append([arm, number, name, losses, plus_minus(worse, 1), f"{max(worse):.1f}"])
    text = (
        f"Hospital charges at epsilon 4 of a training client, {SITES} sites, losses clipped to {BOUND}. Each "
        "validation client's epsilon is for all its reports of the run. Mean ± standard deviation over seeds. "
        f"{SAME_CLIENTS}"
    )
    columns = ("validation", "times", "chosen by", "RMSE (dollars)", "% worse than by exact losses", "at most")
    page("The round that is chosen", [Section("How much worse", text, columns, shown)], rows, results).write(folder)
