"""Clients that change (the group privacy paper's future work): rows drift, clients change sides, come and go.

Seven phases on linear models in the plane, each a run on the same nodes, which keep their ledgers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from umbel.data import Manifest, open_dataset, write_leaf
from umbel.data.find import load_recipe
from umbel.privacy.accounting.guarantee import DELTA, guarantee
from umbel.privacy.gate.memory_ledger import MemoryLedger
from umbel.protocol.clients import ClientInDataset
from umbel.server.observer import Run
from umbel.server.run_folder import RunFolder
from umbel.simulation import in_process
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.measured import Finished, Spec, Trace
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments.tables import by_arm, page
from umbel_lab.output import COLOURS, Section, Value, figure, plus_minus

SEEDS = 20
ROUNDS = 30  # of a phase
# Training clients, those that come, and rows of each; there are as many validation clients of each kind.
CLIENTS, NEWCOMERS, ROWS = 100, 50, 10
_DECIMALS = 6  # so that files stay small
_CHANGE_SIDES = 0.3
_STEPS, _STEP_ROUNDS = 5, 4
_FAR = 6.0  # between optima, and from where one was to where it goes
_REACH = 8.0  # no optimum is further from the origin
NEAR = 1.1  # errors up to so many times that of the true parameters count as found again
_IN_A_ROW = 3  # rounds
FRESH, BEFORE = "", "the run before"  # a phase starts from newly drawn hypotheses, or from those of the phase before
SPARE = "a spare from"  # no key of the run config: the phase that brings one hypothesis more, 0 for none

Clients = dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]


@dataclass(frozen=True)
class Phase:
    """A part of the time line; `steps` are the rounds before the rows change again, within the phase."""

    name: str
    steps: tuple[int, ...] = (ROUNDS,)


_GRADUAL = (*[_STEP_ROUNDS] * (_STEPS - 1), ROUNDS - _STEP_ROUNDS * (_STEPS - 1))
PHASES = (
    Phase("start"),
    Phase("one optimum jumps"),
    Phase("the other drifts", _GRADUAL),
    Phase("clients change sides"),
    Phase("a third group comes"),
    Phase("it leaves"),
    Phase("it is back"),
)

GUARANTEED = "k = 3, kept, guaranteed"
_FORMAL = {
    "clipping": "public", "clip-norm": 0.5, "clip-norm-decay": 1.0, "noise-multiplier": 1.5, "choice-epsilon": 2.0,
    "local-epochs": 10,
}  # fmt: skip
ARMS: Mapping[str, dict[str, Any]] = {
    "k = 1, kept": {"hypotheses": 1, "start-from": BEFORE},
    "k = 2, kept": {"hypotheses": 2, "start-from": BEFORE},
    "k = 2, drawn anew": {"hypotheses": 2, "start-from": FRESH},
    "k = 2, kept, a spare": {"hypotheses": 2, "start-from": BEFORE, SPARE: 4},
    "k = 3, kept": {"hypotheses": 3, "start-from": BEFORE},
    "k = 3, drawn anew": {"hypotheses": 3, "start-from": FRESH},
    GUARANTEED: {"hypotheses": 3, "start-from": BEFORE, **_FORMAL},
}


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs of every arm, and write the data of each seed, a file a step, under `folder`."""
    arms = {arm: ARMS[arm] for arm in ("k = 2, kept", "k = 2, drawn anew")} if quick else ARMS
    runs = []
    for seed in range(first, first + seeds):
        data = folder / "data" / f"drift-{seed}"
        for file, (manifest, clients) in zip(_files(), _world(seed), strict=True):
            write_leaf(data / file, manifest, clients)
        own = {"dataset": str(data), "model": "linear", "seed": seed, "step-size": 0.3}
        common = in_process.run_config("synthetic", clients_per_round=30, noise_multiplier=3.0) | own | {SPARE: 0}
        runs += [Spec.of((arm,), common | changes) for arm, changes in arms.items()]
    return runs


def _files() -> list[str]:
    return [f"{p}-{s}.json" for p, phase in enumerate(PHASES) for s in range(len(phase.steps))]


def _world(seed: int) -> Iterator[tuple[Manifest, Clients]]:
    """Yield the data of each step: all rows are new, drawn from where the client's group is then."""
    generator = np.random.default_rng(seed)
    optima = [np.array(one) for one in load_recipe("synthetic").OPTIMA]
    trains, validates = generator.integers(2, size=(2, CLIENTS))
    yield _rows(generator, optima, trains, validates)
    optima[0] = _elsewhere(generator, optima)
    yield _rows(generator, optima, trains, validates)
    start, end = optima[1], _elsewhere(generator, optima)
    for step in range(1, _STEPS + 1):
        optima[1] = start + (end - start) * step / _STEPS
        yield _rows(generator, optima, trains, validates)
    trains, validates = (groups ^ (generator.random(CLIENTS) < _CHANGE_SIDES) for groups in (trains, validates))
    yield _rows(generator, optima, trains, validates)
    optima.append(_elsewhere(generator, optima))
    # The last of each kind, so that all others keep the numbers by which ledgers know them.
    more = [np.append(groups, np.full(NEWCOMERS, 2)) for groups in (trains, validates)]
    yield _rows(generator, optima, *more)
    yield _rows(generator, optima[:2], trains, validates)
    yield _rows(generator, optima, *more)


def _elsewhere(generator: np.random.Generator, optima: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Draw a place for an optimum, far from all there are; uniform over the disc otherwise."""
    while True:
        place = generator.uniform(-_REACH, _REACH, 2).round(3)
        if np.linalg.norm(place) <= _REACH and min(np.linalg.norm(place - one) for one in optima) >= _FAR:
            return place


def _rows(
    generator: np.random.Generator,
    optima: Sequence[NDArray[np.float64]],
    trains: NDArray[np.int64],
    validates: NDArray[np.int64],
) -> tuple[Manifest, Clients]:
    """Draw rows as ``datasets/synthetic.py`` does, for clients of given groups."""
    groups = np.concatenate([trains, validates]).tolist()
    clients: Clients = {}
    for client, group in enumerate(groups):
        x = generator.uniform(-1, 1, (ROWS, 2)).round(_DECIMALS)
        y = (x * optima[group]).sum(axis=1) + generator.uniform(0, 1, ROWS)
        clients[str(client)] = x, y.round(_DECIMALS)
    split, truth = {"train": len(trains), "validation": len(validates)}, [one.tolist() for one in optima]
    kind: Any = {"name": "drift", "model": "linear", "loss": "mse"}
    return Manifest(**kind, clients=len(groups), split=split, truth=truth, groups=groups), clients


def play(config: Mapping[str, Any]) -> Finished:
    """Do the phases one after the other, on nodes that keep their ledgers.

    The config is a run config and `SPARE`. Its dataset is a folder with the data of each step, and it starts from
    `FRESH` or `BEFORE`. Each step has another seed, made of the config's: the same would draw the same noise again.

    The measures hold for each round ``error``, the mean RMSE of the validation clients under its first hypotheses;
    ``least``, that of the true parameters; and how often clients have released by its end: ``most`` and ``mean`` of
    those that are there from the start, ``newcomers`` for the busiest newcomer. Then ``price`` and ``pure``, the
    paper's budget and the pure epsilon of a participation (None without one); ``epsilon`` of the busiest client in the
    end, at `DELTA`; and ``charged``, how often the node's ledger charged each client.
    """
    torch.set_num_threads(1)
    config, spare = dict(config), config[SPARE]
    del config[SPARE]
    often = np.zeros(CLIENTS + NEWCOMERS, np.int64)
    errors, leasts, counts = [], [], []
    before, found, files = None, FRESH, iter(_files())
    with TemporaryDirectory() as scratch:
        for number, phase in enumerate(PHASES):
            k = config["hypotheses"] + int(0 < spare <= number)
            found = found if config["start-from"] == BEFORE else FRESH
            for step, rounds in enumerate(phase.steps):
                data = Path(config["dataset"]) / next(files)
                seed = int(np.random.SeedSequence([config["seed"], number, step]).generate_state(1)[0])
                own = {"dataset": str(data), "rounds": rounds, "seed": seed, "start-from": found, "hypotheses": k}
                trace, least = Trace(), _least(data)
                before = in_process.play(config | own, observers=[trace], before=before)
                found = _kept(before, config | own, Path(scratch) / data.stem)
                # The last entry evaluates what the last round left, as the next step's first one does.
                for entry, released in zip(before.state.history, trace.rounds, strict=False):
                    often[released["clients"]] += 1
                    errors.append(entry.metric)
                    leasts.append(least)
                    counts.append(often.copy())
    assert before is not None
    assert isinstance(before.grid, InProcessGrid)
    (node,) = before.grid.contexts.values()
    ledger, release = MemoryLedger(node.state), before.setup.release
    first, new = np.split(np.array(counts), [CLIENTS], axis=1)
    once, most = guarantee({release: 1}), guarantee({release: int(often.max())})
    measures = {
        "error": errors,
        "least": leasts,
        "most": first.max(axis=1).tolist(),
        "mean": first.mean(axis=1).tolist(),
        "newcomers": new.max(axis=1).tolist(),
        "price": release.paper_spend(1),
        "pure": once.pure if once else None,
        "epsilon": most.epsilon if most else None,
        "charged": [sum(ledger.account(ClientInDataset(client)).values()) for client in range(len(often))],
    }
    return Finished(measures, participations=often)


def _kept(run: Run, config: Mapping[str, Any], folder: Path) -> str:
    """Leave what a run has found behind, for another to start from, and return where."""
    kept = RunFolder(folder)
    kept.write_config(config)
    kept.write_round(run.state, run.fleet.participations, run.setup.release, run.strategy.state)
    return str(kept.path)


def _least(path: Path) -> float:
    """Return the mean RMSE of a dataset's validation clients under the true parameters of their groups."""
    dataset = open_dataset(path)
    truth, groups = np.array(dataset.manifest.truth), dataset.manifest.groups
    rows = {client: dataset.client(client) for client in range(dataset.manifest.train, dataset.manifest.clients)}
    return float(np.mean([math.sqrt(np.square(x @ truth[groups[c]] - y).mean()) for c, (x, y) in rows.items()]))


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write tables and the picture of the runs of `specs`."""
    groups = {arm: runs for (arm,), runs in by_arm(results).items()}
    rows = [_row(arm, number, runs) for arm, runs in groups.items() for number in range(len(PHASES))]
    page("Clients that change", _sections(rows, groups), rows, results).write(folder)
    _picture(groups, folder)


def back_after(errors: Sequence[float], least: Sequence[float], changed: int) -> float:
    """Return after how many rounds of a phase errors are near the least, and stay there for some; infinite if never.

    `errors` and `least` are of each round. Rows went on changing in the first `changed` rounds, which count too.
    """
    near: NDArray[np.bool_] = np.less_equal(errors, NEAR * np.asarray(least))
    rows = np.all(np.lib.stride_tricks.sliding_window_view(near, _IN_A_ROW), axis=1)
    found = np.flatnonzero(rows[changed:])
    return float(changed + found[0]) if len(found) else math.inf


def _row(arm: str, number: int, runs: Sequence[Result]) -> dict[str, Value]:
    phase, part = PHASES[number], slice(number * ROUNDS, (number + 1) * ROUNDS)
    steps = np.cumsum([0, *phase.steps[:-1]])
    measured = [run.measures for run in runs]
    errors, least = (np.array([one[name][part] for one in measured]) for name in ("error", "least"))
    most = np.array([[0, *one["most"]] for one in measured])[:, part.start : part.stop + 1]
    back = [back_after(*one, int(steps[-1])) for one in zip(errors, least, strict=True)]
    price = measured[0][_price(arm)]
    spent = [price * (own[int(b)] - own[0]) for own, b in zip(most, back, strict=True) if b < math.inf]
    median = float(np.median(back))
    return {
        "arm": arm,
        "phase": phase.name,
        "runs": len(runs),
        "after_the_change": float(np.median(errors[:, steps].max(axis=1))),
        "in_the_end": float(np.median(errors[:, -1])),
        "back": sum(b < math.inf for b in back),
        "rounds": median if math.isfinite(median) else None,
        "spent": float(np.median(spent)) if spent else None,
    }


def _price(arm: str) -> str:
    return "pure" if arm == GUARANTEED else "price"


def _sections(rows: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[Result]]) -> list[Section]:
    def table(title: str, text: str, cell: Callable[[Mapping[str, Any]], str]) -> Section:
        lines = [[arm, *(cell(row) for row in rows if row["arm"] == arm)] for arm in groups]
        return Section(title, text, ("hypotheses", *(phase.name for phase in PHASES)), lines)

    def rounds(row: Mapping[str, Any]) -> str:
        median = "never" if row["rounds"] is None else f"{row['rounds']:g}"
        return median if row["back"] == row["runs"] else f"{median} ({row['back']} of {row['runs']})"

    def spent(arm: str, measured: Sequence[Mapping[str, Any]]) -> list[str]:
        spending = ([one[name][-1] * one[_price(arm)] for one in measured] for name in ("mean", "most", "newcomers"))
        sure = f"{np.median([one['epsilon'] for one in measured]):.1f}" if arm == GUARANTEED else "no guarantee"
        return [arm, *(plus_minus(values, 1) for values in spending), sure]

    near = f"within {100 * (NEAR - 1):.0f} % of that of the true parameters"
    return [
        table(
            "Rounds until the models fit again",
            f"Rounds of {ROUNDS} until the validation clients' mean RMSE is {near} for {_IN_A_ROW} rounds in a row: "
            "median over seeds; in how many of them, where it is not in all. The drift itself takes "
            f"{sum(_GRADUAL[:-1])} rounds.",
            rounds,
        ),
        table(
            "Error right after the change",
            "RMSE in the round in which rows have just changed (of a drift, in the worst of these); median over seeds. "
            "The least there is, is about .577.",
            lambda row: f"{row['after_the_change']:.2f}",
        ),
        table(
            "Error in the end of the phase",
            "RMSE before the last round; median over seeds.",
            lambda row: f"{row['in_the_end']:.2f}",
        ),
        table(
            "Spent until the models fit again",
            "By how much the highest spending of a client that was there from the start grows in the phase, until "
            "then: the paper's heuristic, n/ν a participation, and with a guarantee the pure "
            "epsilon. Median over seeds in which they do.",
            lambda row: "" if row["spent"] is None else f"{row['spent']:.1f}",
        ),
        Section(
            "Spent in the end",
            "In all phases together, by client: the mean and the busiest of those that were there from the start, and "
            f"the busiest newcomer; in the same units. Mean ± standard deviation over seeds. Last, "
            f"the busiest client's epsilon at delta {DELTA:g}.",
            ("hypotheses", "mean", "busiest", "busiest newcomer", "epsilon"),
            [spent(arm, [run.measures for run in runs]) for arm, runs in groups.items()],
        ),
    ]


_SHOWN = ("k = 1, kept", "k = 2, kept", "k = 2, drawn anew", "k = 2, kept, a spare", "k = 3, kept", GUARANTEED)
_TICKS = (0.6, 1, 2, 3, 4)


def _picture(groups: Mapping[str, Sequence[Result]], folder: Path) -> None:
    """Draw the error by round, with the changes marked, and below it what is spent."""
    rounds = np.arange(1, len(PHASES) * ROUNDS + 1)

    def median(runs: Sequence[Result], name: str) -> NDArray[np.float64]:
        return np.asarray(np.median([run.measures[name] for run in runs], axis=0))

    with figure(folder, "drift", 2, 1, (10, 6)) as axes:
        top, below = axes[:, 0]
        for i, arm in enumerate(arm for arm in _SHOWN if arm in groups):
            top.plot(rounds, median(groups[arm], "error"), color=COLOURS[i], linewidth=1.2, label=arm)
        top.set(ylabel="RMSE, median over seeds", yscale="log")
        top.set_yticks(_TICKS, _TICKS)
        top.set_yticks([], minor=True)
        top.legend(ncols=3, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1.1))
        # The sample depends only on the seed, and not on the results.
        runs = next(iter(groups.values()))
        lines = {"busiest client": "most", "mean client": "mean", "busiest newcomer": "newcomers"}
        for (label, name), style in zip(lines.items(), ("-", "--", ":"), strict=True):
            below.plot(rounds, median(runs, name), color="black", linestyle=style, linewidth=1.2, label=label)
        prices = [f"n/\N{GREEK SMALL LETTER NU} = {runs[0].measures['price']:.2g} of the paper's budget, a heuristic"]
        if GUARANTEED in groups:
            prices.append(f"where it is guaranteed, a pure epsilon of {groups[GUARANTEED][0].measures['pure']:.3g}")
        below.set(xlabel="round", ylabel="participations so far")
        below.set_title("each costs " + "; ".join(prices), fontsize=9)
        below.legend(fontsize=8)
        changes = [1 + number * ROUNDS for number in range(len(PHASES))]
        for ax in (top, below):
            ax.set(xlim=(1, len(rounds)), xticks=changes)
            ax.grid(visible=False, axis="x")
            for change in changes[1:]:
                ax.axvline(change, color="grey", linewidth=0.8, linestyle=":")
        for number, phase in enumerate(PHASES):
            top.text((number + 0.5) / len(PHASES), 1.02, phase.name, transform=top.transAxes, ha="center", fontsize=8)
