"""Secure sums over several sites, beside one sum that all trust and each site's own sum, at the same guarantee."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.accounting.plan import Task, plan_for
from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian
from umbel.server.setup import Setup
from umbel.simulation.in_process import run_config
from umbel.simulation.measured import Finished, Spec
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments.frontier import OWN
from umbel_lab.experiments.runs import drawn, finish, made_own
from umbel_lab.experiments.tables import SAME_CLIENTS, by_arm, manifest_of, page
from umbel_lab.output import Section, plus_minus

SEEDS = 10
SITES = 20
TRUSTED, SECURE, SITE, PLAIN = "one trusted sum", "secure sums", "site release", "no noise"
_STRATEGIES = {TRUSTED: "site-average", SECURE: "secure-average", SITE: "site-average"}


@dataclass(frozen=True)
class Compared:
    """A task: a configuration with changes, its number of parameters, and the epsilons."""

    title: str
    config: str
    parameters: int
    epsilons: tuple[float, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)
    digits: int = 3

    def base(self) -> dict[str, Any]:
        """Return the settings of all arms."""
        return run_config(self.config) | {
            "mechanism": DiscreteGaussian.name, "clipping": "public", "choice-epsilon": 0.0, "restarts": 1,
            **self.changes,
        }  # fmt: skip

    def noise(self, epsilon: float) -> float:
        """Return the noise multiplier for the epsilon of a client over the whole run, in sums of updates."""
        base = self.base()
        times = base["max-participations"] or base["rounds"]
        clients = base["clients-per-round"]
        task = Task(self.parameters, base["hypotheses"], clients, clients, DiscreteGaussian.name, sites=1)
        return plan_for(task, epsilon, DELTA, times, choice_epsilon=0.0).release.noise_multiplier


# Both models are found in the first rounds, where clips are long; every client takes part in each round.
_TWO_MODELS = {
    "rounds": 30, "clients-per-round": 100, "max-participations": 30, "noise-multiplier": 5.0, "clip-norm": 10.0,
    "clip-norm-decay": 0.9,
}  # fmt: skip
TASKS = (
    Compared("hospital services, dollars", "hospital-services", 7, (1.0, 2.0, 4.0), digits=0),
    Compared("handwriting, accuracy", "qmnist-features-epsilon-8", 100, (2.0, 4.0, 8.0)),
    Compared("two linear models, RMSE", "synthetic", 2, (2.0, 4.0, 8.0), _TWO_MODELS),
)


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs; the hospitals' split is drawn by each seed."""
    found = []
    for task in TASKS:
        base = task.base() | ({"rounds": 2} if quick else {})
        arms = dict(_arms(task))
        for seed, path in drawn(base["dataset"], folder, range(first, first + seeds)):
            own = base | {"dataset": path, "seed": seed}
            found += [Spec.of(arm, own | changes) for arm, changes in arms.items()]
    return found


def _arms(task: Compared) -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """Yield each arm of a task, and its settings."""
    for epsilon in task.epsilons:
        noise = task.noise(epsilon)
        for arm, strategy in _STRATEGIES.items():
            nodes = 1 if arm == TRUSTED else SITES
            changes = {"strategy": strategy, "noise-multiplier": noise, "min-nodes": nodes}
            yield (task.title, f"{epsilon:g}", arm), changes
    yield (task.title, "none", PLAIN), {"strategy": "site-average", "noise-multiplier": 0.0, "min-nodes": 1}


def play(config: Mapping[str, Any]) -> Finished:
    """Do a run over as many sites as it waits for, and make the last hypotheses each client's own."""
    finished = finish(config, nodes=config["min-nodes"])
    assert finished.state is not None
    own = made_own(Setup.parse(dict(config)), finished.state, OWN, finished.kept)
    finished.measures["last"]["own"] = own["last"]
    return finished


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the table of the runs of `specs`."""
    rows, shown = [], []
    tasks, arms = {task.title: task for task in TASKS}, by_arm(results)
    for (title, epsilon, arm), runs in arms.items():
        task, scale = tasks[title], manifest_of(runs[0]).error_scale
        values = {run.spec.config["seed"]: scale * run.measures["last"]["own"]["mean"] for run in runs}
        trusted = arms.get((title, epsilon, TRUSTED), ())
        same = {run.spec.config["seed"]: scale * run.measures["last"]["own"]["mean"] for run in trusted}
        # Relative to the mean over seeds: a mean of ratios would be above 1 without any difference.
        away = [100 * (values[seed] - one) / mean(same.values()) for seed, one in same.items() if seed in values]
        row = {"task": title, "epsilon": epsilon, "arm": arm, "value": mean(values.values()), "away": away}
        rows.append(row | {"measured_epsilon": runs[0].measures.get("epsilon"), "runs": len(runs)})
        change = "" if not away or arm == TRUSTED else f"{mean(away):+.2f} ± {_error(away):.2f}"
        shown.append([title, epsilon, arm, plus_minus(values.values(), task.digits), change])
    text = (
        f"The same clients at {SITES} sites, at the same epsilon of a client at delta {DELTA:g} over the whole run, "
        f"with the same mechanism ({DiscreteGaussian.name}) and account. One trusted sum: all clients trust one "
        "server, which adds noise once. Secure sums: the server reads the sum over all sites, and each site adds a "
        "share of the noise. Site release: each site adds the whole noise to its own sum. Last round, made each "
        "client's own "
        f'("{OWN}"): mean over validation clients; ± is the standard deviation over seeds. The last column compares '
        "with one trusted sum seed by seed: mean difference, and its standard error, relative to the mean result of "
        f"one trusted sum. {SAME_CLIENTS}"
    )
    columns = ("task", "epsilon", "who adds the noise", "result", "% away from one trusted sum")
    page("Secure sums", [Section("Beside one trusted sum", text, columns, shown)], rows, results).write(folder)


def _error(values: Sequence[float]) -> float:
    """Return the standard error of a mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
