"""When a run is worth it: linear regression of many sizes, by clients, parameters and epsilon.

Clients have a common direction each times a separate factor, and ten rows. Each draws its data from the seed, so
seeds are independent data sets. Each client takes part once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from umbel.client.trial import try_out
from umbel.data import Dataset, Manifest, offsets_of, write_dataset
from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.gate.policy import Personal
from umbel.privacy.mechanisms.gaussian import calibrate
from umbel.protocol.run_config import RunConfig
from umbel.server.setup import Setup
from umbel.simulation.baselines import halves, personalised, validation_cohort
from umbel.simulation.in_process import run_config
from umbel.simulation.measured import Finished, Spec, dataset_of, finish, made_own
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments.tables import by_arm, page
from umbel_lab.output import Section, mean, numbers

SEEDS = 5
CLIENTS, PARAMETERS, EPSILONS = (30, 300, 3000), (7, 50, 1000), (1, 4, 8)
ROWS, VALIDATION = 10, 100  # rows of a client, and clients that are measured
FACTORS, NOISE = (0.5, 1.5), 0.3  # of clients, uniform; the standard deviation of the noise on targets
ROUNDS = (1, 3, 10)
"""Of which each setting takes the better on the seeds `TUNING`."""
TUNING = (100, 101)
CLIENT, SUM, ALONE, POOLED, PLAIN = "client release", "one trusted sum", "by itself", "pooled", "no noise"

Floats = NDArray[np.float64]


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs of every size; the data of each size and seed are written under `folder`, 1.4 GB in all."""
    found = []
    for m, n in product(CLIENTS[:1], PARAMETERS[:1]) if quick else product(CLIENTS, PARAMETERS):
        for seed in dict.fromkeys([*TUNING, *range(first, first + seeds)]):
            _write(path := folder / "data" / f"{m}-{n}-{seed}", m, n, seed)
            own = {"dataset": str(path), "seed": seed}
            for rounds in ROUNDS:
                base = _base(m, n, rounds) | own
                found.append(Spec.of((m, n, PLAIN, 0, rounds), base))
                for epsilon in EPSILONS:
                    client = {"noise-multiplier": 2 * n / epsilon}
                    found.append(Spec.of((m, n, CLIENT, epsilon, rounds), base | client))
                    nu = math.ceil(1000 * calibrate(epsilon, DELTA, 2.0)) / 1000
                    central = {"strategy": "site-average", "mechanism": "gaussian", "noise-multiplier": nu}
                    found.append(Spec.of((m, n, SUM, epsilon, rounds), base | central))
            found += [Spec.of((m, n, who, 0, 0), _base(m, n, 1) | own | {"strategy": who}) for who in (ALONE, POOLED)]
    return found


def _base(m: int, n: int, rounds: int) -> dict[str, Any]:
    """Return settings without noise: one step on all rows, of the length that solves least squares for all together.

    The clip norm is about that of a first update.
    """
    return run_config(
        "synthetic", hypotheses=1, restarts=1, choice_epsilon=0.0, noise_multiplier=0.0, max_participations=1,
        rounds=rounds, clients_per_round=m // rounds, local_epochs=1, batch_size=0, step_size=0.5,
        clipping="public", clip_norm=math.sqrt(n / ROWS), clip_norm_decay=0.7,
    )  # fmt: skip


def _write(path: Path, m: int, n: int, seed: int) -> None:
    """Write the data of a size and a seed, unless they are there."""
    if path.exists():
        return
    generator = np.random.default_rng([seed, m, n])
    # One of n parameters is the bias. Inputs and targets have variance 1.
    clients, d = m + VALIDATION, n - 1
    direction = generator.normal(size=d)
    direction /= np.linalg.norm(direction)
    features = generator.normal(size=(clients * ROWS, d)).astype(np.float32)
    factors = np.repeat(generator.uniform(*FACTORS, clients), ROWS)
    targets = factors * (features @ direction) + NOISE * generator.normal(size=clients * ROWS)
    kind: Any = {"name": "when", "model": f"linear inputs={d} outputs=1", "loss": "mse"}
    manifest = Manifest(**kind, clients=clients, split={"train": m, "validation": VALIDATION})
    write_dataset(path, manifest, features, targets.astype(np.float32), offsets_of([ROWS] * clients))


def play(config: Mapping[str, Any]) -> Finished:
    """Do a run and make what it learnt each client's own, or fit ridge regressions in its place.

    The measures hold for ``last`` the held-out error ``own``.
    """
    torch.set_num_threads(1)
    if config["strategy"] not in (ALONE, POOLED):
        finished = finish(config)
        assert finished.state is not None
        own = made_own(Setup.parse(dict(config)), finished.state, Personal.CALIBRATE)["last"]
        return Finished({"last": {"own": own}, "pure_epsilon": finished.measures["pure_epsilon"]})
    setup = Setup.parse({**config, "strategy": "fedavg"})
    fit = _alone if config["strategy"] == ALONE else _pooled
    return Finished({"last": {"own": fit(setup, dataset_of(setup), setup.config)}})


def _alone(setup: Setup, dataset: Dataset, run: RunConfig) -> dict[str, float]:
    learner = try_out(setup.model, dataset)
    support, query = halves(validation_cohort(dataset, learner), run.seed)
    errors, start, end = [], support.starts, query.starts
    for c in range(len(query)):
        mine, other = (slice(at[c], at[c] + cohort.lengths[c]) for at, cohort in ((start, support), (end, query)))
        weights = _ridge(support.features[mine].numpy(), support.targets[mine].numpy())
        wrong = query.features[other].numpy() @ weights - query.targets[other].numpy().reshape(-1)
        errors.append(math.sqrt(np.square(wrong).mean()))
    return {"mean": float(np.mean(errors))}


def _pooled(setup: Setup, dataset: Dataset, run: RunConfig) -> dict[str, float]:
    """Return the error of one model of all training rows, made each client's own."""
    rows = slice(0, int(dataset.offsets[dataset.manifest.train]))
    weights = _ridge(np.asarray(dataset.features[rows]), np.asarray(dataset.targets[rows]))
    # The bias is 0, the weights of the one output are a row.
    fitted = {name: weights if len(shape) > 1 else np.zeros(shape) for name, shape in setup.model.shapes.items()}
    hypothesis = {
        name: value.reshape(1, *setup.model.shapes[name]).astype(np.float32) for name, value in fitted.items()
    }
    return personalised(setup.model, dataset, hypothesis, run, Personal.CALIBRATE)


def _ridge(features: NDArray[np.float32], targets: NDArray[np.float32]) -> Floats:
    """Return the weights of ridge regression with the best penalty: weights are N(0, 1/d), and the noise is known."""
    x, y = features.astype(np.float64), targets.astype(np.float64).reshape(-1)
    penalty = NOISE**2 * x.shape[1]
    if len(x) < x.shape[1]:
        return np.asarray(x.T @ np.linalg.solve(x @ x.T + penalty * np.eye(len(x)), y))
    return np.asarray(np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y))


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the table of the runs of `specs`."""
    arms = by_arm(results)
    columns = [(ALONE, 0), (POOLED, 0), (PLAIN, 0), *product((CLIENT, SUM), EPSILONS)]
    rows, shown = [], []
    for m, n in dict.fromkeys(arm[:2] for arm in arms):
        alone = _errors(arms[m, n, ALONE, 0, 0])
        cells = [f"{m:,}", f"{n:,}"]
        for who, epsilon in columns:
            found = {arm[4]: runs for arm, runs in arms.items() if arm[:4] == (m, n, who, epsilon)}
            rounds = min(found, key=lambda one: mean(_errors(found[one], tuning=True).values()))
            errors = _errors(found[rounds])
            wins = sum(errors[seed] < alone[seed] for seed in errors)
            rows.append(
                {"clients": m, "parameters": n, "who": who, "epsilon": epsilon, "rounds": rounds, "runs": len(errors),
                 "better_than_alone": wins, **numbers("rmse", errors.values())}
            )  # fmt: skip
            value = f"{rows[-1]['rmse']:.2f}"
            cells.append(f"**{value}**" if who not in (ALONE, POOLED) and wins == len(errors) else value)
        shown.append(cells)
    spread = math.sqrt(1 + (FACTORS[1] - FACTORS[0]) ** 2 / 12 + NOISE**2)
    text = (
        f"Held-out RMSE of {VALIDATION} clients that did not train, mean over clients and over {rows[0]['runs']} "
        f"seeds. A constant has {spread:.2f}, and the noise on targets {NOISE:g}. A client has {ROWS} rows, and trains "
        'or makes a model its own ("calibrate") on half of them. By itself: ridge regression with the best penalty. '
        "Pooled: the same on the rows of all training clients, without privacy, made each client's own. All others "
        "are runs of one model, made each client's own, in which each client takes part once. Of "
        f"{', '.join(map(str, ROUNDS))} rounds each setting has what was best on seeds {TUNING[0]} and {TUNING[-1]}. "
        f"Client release: pure epsilon, no one is trusted. One trusted sum: epsilon at delta {DELTA:g}, all trust who "
        "adds up. **Bold**: better than by itself in every seed. Seeds are independent data sets."
    )
    names = [f"{who}, ε {epsilon}" if epsilon else who for who, epsilon in columns]
    section = Section("What to expect", text, ("clients", "parameters", *names), shown)
    page("When a run is worth it", [section], rows, results).write(folder)


def _errors(runs: Sequence[Result], tuning: bool = False) -> dict[int, float]:
    """Return the errors of the seeds that are shown, or of those by which settings are chosen."""
    found = {run.spec.config["seed"]: float(run.measures["last"]["own"]["mean"]) for run in runs}
    return {seed: error for seed, error in found.items() if (seed in TUNING) == tuning}
