"""The scaffold of experiments: their runs by seed, how a run may be done, and the page that the results make.

An experiment is a module with ``SEEDS``, the number of its seeds; ``arms``, the run config of each arm, or ``specs``,
its runs; ``page``, which makes a page of their results; ``play``, if a run is not `finish`; and ``draw_data``, if a
seed draws other data than `draw_data`. A module without ``SEEDS`` has no runs: its ``page`` does the work.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from umbel.data import Dataset, Manifest, find_dataset, offsets_of, open_dataset, write_dataset
from umbel.privacy.site.policy import Personal
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import SweepError
from umbel.protocol.home import make_folder, umbel_home, write_atomically
from umbel.server.history import State
from umbel.server.run_folder import RunFolder, versions
from umbel.server.setup import Setup
from umbel.simulation import sweep
from umbel.simulation.baselines import LOCAL_EPOCHS, local_only, personalised
from umbel.simulation.in_process import play
from umbel.simulation.sweep import LOCAL_ONLY, STATES, Finished, Result, Spec, dataset_of, made_by
from umbel.strategies.differences import prior_of
from umbel_lab.output import Page, Row, Section, plus_minus

FINE_TUNE, INTERPOLATE = Personal.FINE_TUNE.value, Personal.INTERPOLATE.value
HELD_OUT_ALONE = (LOCAL_ONLY, FINE_TUNE, INTERPOLATE)
"""Further values of ``strategy``: validation clients train alone, or personalise the hypotheses of `group-privacy`."""

_PACKED = ("number", "loss", "metric")  # of each validated round


def read(name: str) -> dict[str, Any]:
    """Return an experiment's arms and texts, from the file NAME.toml beside this one."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


_DATA = read("scaffold")
WORDS: Mapping[str, str] = _DATA["words"]


# --- runs


def specs(module: ModuleType, folder: Path, seeds: Iterable[int], quick: bool = False, of: str = "") -> list[Spec]:
    """Return an experiment's runs, each arm for each seed; `of` names the dataset or task of an experiment of several.

    Data that a seed draws are written to `folder`.
    """
    if hasattr(module, "specs"):
        found: list[Spec] = module.specs(folder, seeds, quick, of)
        return found
    arms = module.arms(quick, of)
    draw = getattr(module, "draw_data", draw_data)
    found = []
    for seed in seeds:
        paths = {name: draw(name, folder, seed) for name in {config["dataset"] for config in arms.values()}}
        found += [
            Spec.of(arm, config | {"dataset": paths[config["dataset"]], "seed": seed}) for arm, config in arms.items()
        ]
    return found


def draw_data(name: str, folder: Path, seed: int) -> str:
    """Return the path of a run config's dataset: split by the seed where clients are hospitals, else as it is."""
    return split_by_seed(name, folder, seed) if name.startswith("hospital") else name


def split_by_seed(name: str, folder: Path, seed: int) -> str:
    """Write a run config's dataset to FOLDER/data, with its clients in the seed's order; return the path."""
    split = shuffled(open_dataset(find_dataset(name)), seed)
    path = folder / "data" / f"{split.manifest.name}-{seed}"
    write_dataset(path, split.manifest, split.features, split.targets, split.offsets, split.names)
    return str(path)


def shuffled(dataset: Dataset, seed: int) -> Dataset:
    """Return a dataset with its clients in random order, with as many training clients as before."""
    manifest = dataset.manifest
    order = np.random.default_rng(seed).permutation(manifest.clients)
    lengths = np.diff(dataset.offsets)[order]
    offsets = offsets_of(lengths)
    rows = np.arange(offsets[-1]) + np.repeat(dataset.offsets[order] - offsets[:-1], lengths)
    changes = {
        "groups": [manifest.groups[client] for client in order] if manifest.groups else [],
        "provenance": f"{manifest.provenance} Clients put in random order with seed {seed}.".strip(),
    }
    names = [dataset.names[client] for client in order] if len(dataset.names) else ()
    return Dataset(manifest.model_copy(update=changes), dataset.features[rows], dataset.targets[rows], offsets, names)


def finish(config: Mapping[str, Any], nodes: int = 1, saved_in: Path | None = None) -> Finished:
    """Do a run and measure it, as `umbel.simulation.sweep.finish`.

    For `HELD_OUT_ALONE` there is only ``held_out`` of each state, and for clients that train alone only that of the
    ``last``.
    """
    torch.set_num_threads(1)
    if config["strategy"] == LOCAL_ONLY:
        setup = Setup.parse({**config, "strategy": "fedavg"})
        return Finished({"last": {"held_out": local_only(setup.model, dataset_of(setup), setup.config)}})
    if config["strategy"] in HELD_OUT_ALONE:
        run = play({**config, "strategy": "group-privacy"}, nodes=nodes)
        personal = personalise(run.setup, run.state, config["strategy"])
        return Finished({state: {"held_out": measures} for state, measures in personal.items()})
    return sweep.finish(config, nodes, saved_in)


def personalise(setup: Setup, state: State, how: str, kept: Arrays | None = None) -> dict[str, dict[str, float]]:
    """Return the held-out metric of validation clients that personalise a run's hypotheses, by `STATES`.

    `kept` is the strategy's state, from which the server estimates how clients differ.
    """
    hypotheses = state.hypotheses, state.best
    prior = prior_of(kept or {}, len(next(iter(state.hypotheses.values()))))
    measures = [personalised(setup.model, dataset_of(setup), h, setup.config, how, prior=prior) for h in hypotheses]
    return dict(zip(STATES, measures, strict=True))


def resumable(config: Mapping[str, Any]) -> Finished:
    """Do a long run, or the rest of a stopped one; see `finish`. It could resume until its sweep has saved it."""
    what = json.dumps([dict(config), made_by(config, resumable)], sort_keys=True)
    folder = umbel_home() / "experiments" / "unfinished" / hashlib.sha256(what.encode()).hexdigest()[:16]
    make_folder(folder.parent)
    with sweep.alone(RunFolder(folder).path):
        return finish(config, saved_in=folder)


def pack(folder: Path) -> Iterator[str]:
    """Yield a line of JSON for each finished run of a sweep: everything except its arrays."""
    for file in sorted(folder.glob(f"runs/*/{sweep.RESULT}")):
        history = file.with_name(sweep.HISTORY)
        lines = history.read_text(encoding="utf-8").splitlines() if history.exists() else []
        entries = [
            {key: entry[key] for key in _PACKED} for entry in map(json.loads, lines) if entry["loss"] is not None
        ]
        yield json.dumps({"name": file.parent.name, **json.loads(file.read_text(encoding="utf-8")), "history": entries})


def unpack(lines: Iterable[str], folder: Path) -> list[str]:
    """Put runs from `pack` where a sweep finds them, unless they are there; return their names."""
    names = []
    try:
        runs = [(doc.pop("name"), list(doc.pop("history")), doc) for doc in map(json.loads, lines)]
        outside = [name for name, *_ in runs if not name.isprintable() or not name or "/" in name or name[0] == "."]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as broken:
        raise SweepError(f"no runs that umbel experiment pack wrote: {broken!r}", code="sweep.not-packed") from broken
    if outside:
        text = f"{outside[0]!r} is not the name of a run; unpack only files that umbel experiment pack wrote"
        raise SweepError(text, code="sweep.not-packed")
    for name, history, document in runs:
        path = folder / "runs" / name
        if not (path / sweep.RESULT).exists():
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / sweep.HISTORY, "".join(f"{json.dumps(entry)}\n" for entry in history).encode())
            write_atomically(path / sweep.RESULT, json.dumps(document, indent=1).encode())
            names.append(path.name)
    return names


# --- pages


def say(data: Mapping[str, Any], key: str, **words: Any) -> str:
    """Return a text of an experiment, with words and numbers, and `WORDS`, in their places."""
    text: str = data["text"][key]
    return text.format(**WORDS, **words)


def section(title: str, data: Mapping[str, Any], key: str, rows: Iterable[Row], **words: Any) -> Section:
    """Return a section with a text of an experiment, and its columns of that name (`Section.of`)."""
    columns = {name.format(**words): how.format(**words) for name, how in data["columns"][key].items()}
    return Section.of(title, say(data, key, **words), columns, rows)


def page(
    title: str,
    sections: Iterable[Section],
    rows: Sequence[Row],
    results: Sequence[Result],
    draw: Callable[[Path], None] | None = None,
) -> Page:
    """Return the page of a sweep, with what is true of all runs: the bad ones, their code and their configurations."""
    first, *others = [one.spec.config for one in results]
    common = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    runs = {one.spec.name: {k: v for k, v in one.spec.config.items() if k not in common} for one in results}
    document = {"versions": versions(sweep.PACKAGES), "common": common, "runs": runs}
    return Page(title, [*sections, _bad_runs(results), *_code(results)], rows, document, draw=draw)


def by_arm(results: Sequence[Result]) -> dict[Any, list[Result]]:
    """Return the good runs of each arm that has any, in the order of `results`."""
    arms: dict[Any, list[Result]] = {result.spec.arm: [] for result in results}
    for result in good(results):
        arms[result.spec.arm].append(result)
    return {arm: runs for arm, runs in arms.items() if runs}


def by_seed(runs: Iterable[Result]) -> dict[int, Result]:
    """Return the runs of an arm by their seeds."""
    return {run.spec.config["seed"]: run for run in runs}


def manifest_of(result: Result) -> Manifest:
    """Return the manifest of a run's dataset."""
    return open_dataset(find_dataset(result.spec.config["dataset"])).manifest


def seeds_won(own: Mapping[int, Mapping[str, float]], other: Mapping[int, Mapping[str, float]]) -> str:
    """Return in how many seeds that both have one is below the other, in mean and in worst decile; "" for none."""
    both = own.keys() & other.keys()
    wins = [sum(own[seed][what] < other[seed][what] for seed in both) for what in ("mean", "worst_decile")]
    return f"{wins[0]}, {wins[1]} of {len(both)}" if both else ""


def what_a_client_gets(
    metric: str,
    arms: Iterable[tuple[str, Sequence[Result]]],
    digits: int,
    scale: float = 1.0,
    note: str = "",
    states: Sequence[str] = STATES,
) -> Section:
    """Compare runs by the measures of `umbel.simulation.baselines` on validation clients.

    `metric` is its name and unit, for the text, and `note` ends it. Each arm is a name with its seeds. Numbers are
    multiplied by `scale`, and shown with `digits` digits after the point. The first of `states` leads.
    """

    def shown(runs: Sequence[Result], state: str, name: str) -> str:
        led = [result.measures.get(state, result.measures["last"] if state == states[0] else None) for result in runs]
        values = [one["held_out"][name] for one in led if one]
        return plus_minus((scale * value for value in values), digits) if values else ""

    rows = []
    for name, runs in arms:
        # Clients that train alone have no rounds, and so no best one.
        led = [result.measures.get(states[0], result.measures["last"]) for result in runs]
        rand = [one["rand_index"] for one in led if one.get("rand_index") is not None]
        same = plus_minus((scale * one["mean"] for one in led), digits) if all("mean" in one for one in led) else ""
        held_out = [shown(runs, state, what) for state in states for what in ("mean", "worst_decile")]
        rows.append([name, *held_out, same, plus_minus(rand, 2) if rand else ""])
    which = "The last round leads, and the best stands beside it." if len(states) > 1 else "All are of the best round."
    words = {"metric": metric, "which": which, "state": states[0], "epochs": LOCAL_EPOCHS, "note": note}
    beside = ("best round: mean", "best round: worst decile") * (len(states) > 1)
    columns = ("who", "mean", "worst decile", *beside, "same rows: mean", "Rand index")
    return Section("What a client gets", say(_DATA, "gets", **words).strip(), columns, rows)


def good(results: Iterable[Result]) -> list[Result]:
    """Return the finished runs with a finite loss."""
    return [result for result in results if _trouble(result) is None]


def _trouble(result: Result) -> str | None:
    if result.error:
        return f"failed: {result.error.strip().splitlines()[-1]}"
    numbers = (result.measures.get("best_loss", 0.0), result.measures.get("last", {}).get("mean", 0.0))
    return None if all(map(math.isfinite, numbers)) else "diverged: the loss became infinite"


def _bad_runs(results: Sequence[Result]) -> Section:
    bad = [(result.spec.name, trouble) for result in results if (trouble := _trouble(result))]
    if not bad:
        return Section("Bad runs", f"None of {len(results)} runs failed or diverged.")
    text = f"{len(bad)} of {len(results)} runs failed or diverged; they are left out of the figures above."
    return Section("Bad runs", text, ("run", "what happened"), bad)


def _code(results: Sequence[Result]) -> list[Section]:
    """Return what to say if different versions of the code made the runs."""
    made = Counter(result.code for result in results if not result.error)
    if len(made) < 2:
        return []
    text = f"{len(made)} versions of the code made these runs, from the same data and with the same settings."
    rows = [(code, str(runs)) for code, runs in sorted(made.items())]
    return [Section("Code", text, ("digest of the code", "runs"), rows)]
