"""Public tables that ship with Python packages, as an analyst uses them: commands of the shell, and default settings.

`umbel data import` makes a dataset of each table, with the scales and ranges that a first import of it prints. `umbel
run` then runs it without noise, and with a guarantee. No setting was chosen for these tables. plotly and statsmodels,
which hold some of them, are not among umbel's dependencies.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

from umbel.data import open_dataset
from umbel.protocol.errors import ConfigError, SweepError, WorthError
from umbel.protocol.home import umbel_home
from umbel.server.run_folder import RunFolder
from umbel.server.worth import LABELS, Level, Way, figure
from umbel.simulation.measured import Finished, Spec
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.experiments.tables import by_arm, page
from umbel_lab.output import Row, Section, mean

SEEDS = 3
EPSILON = 8.0
TABLES: Mapping[str, tuple[str, str, str]] = {
    "gapminder": ("plotly", "data.gapminder", "--client country --target lifeExp"),
    "modechoice": ("statsmodels", "datasets.modechoice.load_pandas", "--client individual --target choice"),
    "fair": ("statsmodels", "datasets.fair.load_pandas", "--clients 300 --alpha 0.5 --target rate_marriage"),
    "breast-cancer": ("sklearn", "datasets.load_breast_cancer", "--clients 30 --alpha 0.5 --target target"),
    "grunfeld": ("statsmodels", "datasets.grunfeld.load_pandas", "--client firm --target invest"),
    "grunfeld, year as a number": (
        "statsmodels", "datasets.grunfeld.load_pandas", "--client firm --target invest --set year.type=number",
    ),
}  # fmt: skip
"""By name: the package, its function, and the flags of the import. The last follows the advice on the one before."""
CODE = ("umbel/simulation", "umbel/cli/commands/data.py", "umbel/cli/commands/run.py")
"""Code that makes results, besides that of every experiment."""

_ROWS_OF = {"load_breast_cancer": "frame", "load_pandas": "data"}
_SETTING = re.compile(r"--set ('[^']*'|\S+)")
_SCALES, _RANGES = "Models learn best", "A run with --epsilon"
"""The beginnings of an import's advice."""
_REFUSED, _PROPOSED = "[config.in-vain]", "strategy=site-average"
_WAYS = (Way.CONSTANT, Way.ALONE, Way.POOLED, Way.LAST, Way.OWN)


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return the runs; the table and the dataset of each seed are written under `folder`."""
    found = []
    for name in ["breast-cancer"] if quick else TABLES:
        for seed in range(first, first + seeds):
            path = str(imported(name, seed, folder / "data"))
            # A dataset and these keys are what a sweep looks up.
            config = {"dataset": path, "seed": seed, "strategy": "group-privacy", "model": "", "observers": ""}
            found += [Spec.of((name, epsilon), config | {"epsilon": epsilon}) for epsilon in (0.0, EPSILON)]
    return found


def imported(name: str, seed: int, folder: Path) -> Path:
    """Write a table's dataset, unless it is there: imported twice, the second time with the first one's advice."""
    words = "-".join(re.findall(r"\w+", name))
    path = folder / f"{words}-{seed}"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{words}.csv"
    _write(name, file)
    command = ["data", "import", str(file), *shlex.split(TABLES[name][2]), "--seed", str(seed)]
    status, told = _umbel([*command, "--replace", "--name", str(folder / "first" / path.name)])
    advice = [line for line in told.splitlines() if line.startswith((_SCALES, _RANGES))]
    added = [word.rstrip(".") for line in advice for flag in _SETTING.findall(line) for word in shlex.split(flag)]
    if not status:
        status, told = _umbel([*command, *(word for one in added for word in ("--set", one)), "--name", str(path)])
    if status:
        raise SweepError(f"{shlex.join(command)}: {told.splitlines()[-1]}", code="sweep.failed")
    return path


def _write(name: str, file: Path) -> None:
    """Write a table that ships with a package as a CSV file."""
    package, function, _ = TABLES[name]
    where, _, called = f"{package}.{function}".rpartition(".")
    try:
        found = getattr(import_module(where), called)(**{"as_frame": True} if package == "sklearn" else {})
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed: pip install plotly statsmodels scikit-learn"
        raise ConfigError(text, code="config.not-installed") from None
    rows = getattr(found, _ROWS_OF[called]) if called in _ROWS_OF else found
    # Codes of the country tell a model nothing that its name does not.
    rows.drop(columns=["iso_alpha", "iso_num"], errors="ignore").to_csv(file, index=False)


def _umbel(words: Sequence[str], home: Path | None = None) -> tuple[int, str]:
    """Run a command of the shell; return its exit code, and what it printed."""
    environment = os.environ | {"UMBEL_HOME": str(home or umbel_home()), "COLUMNS": "200"}
    told = subprocess.run(
        [sys.executable, "-m", "umbel", *words], env=environment, check=False, capture_output=True, text=True
    )
    return told.returncode, told.stdout + told.stderr


def play(config: Mapping[str, Any]) -> Finished:
    """Run the command of a table, an epsilon (0 for none) and a seed.

    If the run is refused with the proposal to trust a site, that is run too.

    The measures are ``status``, the exit codes under ``--strict``; ``seconds``; ``told``, the refusal; and of the last
    run `umbel.server.worth.Worth`'s ``level``, ``verdict`` and ``metric``, and by way the mean and the worst tenth.
    """
    words = ["run", str(config["dataset"]), f"seed={config['seed']}", "--strict"]
    words += ["--epsilon", f"{config['epsilon']:g}"] if config["epsilon"] else []
    with tempfile.TemporaryDirectory() as scratch:
        began = monotonic()
        status, told = _umbel(words, Path(scratch))
        measures: dict[str, Any] = {"status": [status], "seconds": round(monotonic() - began, 1)}
        if status == 2 and _REFUSED in told:
            measures["told"] = told.splitlines()[-1]
            if _PROPOSED not in told:
                return Finished(measures)
            status, told = _umbel([*words, _PROPOSED], Path(scratch))
            measures["status"].append(status)
        if status not in (0, WorthError.exit_code):
            raise SweepError(f"{shlex.join(words)}: {told.splitlines()[-1]}", code="sweep.failed")
        (folder,) = Path(scratch, "runs").iterdir()
        worth = RunFolder(folder).read_worth()
    assert worth is not None, "a simulated run measures it"
    by_way = {arm.way.value: [arm.mean, arm.worst_decile] for arm in worth.arms}
    kept = {"level": worth.level.value, "verdict": worth.verdict, "metric": worth.metric, "ways": by_way}
    return Finished(measures | kept)


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the tables of the runs of `specs`: what a client gets, and the commands."""
    shown, rows = list[list[str]](), list[Row]()
    for (name, epsilon), runs in by_arm(results).items():
        data = open_dataset(Path(runs[0].spec.config["dataset"]))
        manifest, measured = data.manifest, [run.measures for run in runs]
        levels = Counter(_levels(one) for one in measured)
        cells = [name, f"{manifest.train}", f"{len(data.targets):,}", f"{epsilon:g}" if epsilon else "none"]
        cells += [_cell(measured, way) for way in _WAYS]
        verdict = "; ".join(f"{level}{f' ({many})' if len(levels) > 1 else ''}" for level, many in levels.items())
        cells += [verdict, "; ".join(", then ".join(map(str, one["status"])) for one in measured)]
        cells.append(f"{mean(one['seconds'] for one in measured):.0f} s")
        shown.append(cells)
        rows += [
            {"table": name, "epsilon": epsilon, "seed": run.spec.config["seed"]}
            | {"status": one["status"][-1]}
            | {key: one.get(key) for key in ("seconds", "level", "metric", "verdict", "told")}
            | {way.value: (one.get("ways", {}).get(way.value) or [None])[0] for way in LABELS}
            for run, one in zip(runs, measured, strict=True)
        ]
    learnt = Counter(_learnt(row) for row in rows)
    text = (
        "Held-out RMSE in the target's unit for gapminder (years of life) and grunfeld (million dollars); share of "
        "right labels for the others, where higher is better. Mean over clients, and in brackets over the tenth that "
        f"fares worst; the mean of {len({row['seed'] for row in rows})} seeds, which deal rows, draw validation "
        f"clients and train. Verdicts are levels, with the seeds of each. If a refusal proposed `{_PROPOSED}`, "
        f"figures are of that run. {_sentence(learnt, rows)}"
    )
    columns = (
        "table",
        "training clients",
        "rows",
        "ε",
        *(LABELS[way] for way in _WAYS),
        "verdict",
        "exit codes",
        "time",
    )
    short = [0, 1, 3, 4, 5, 8, 9, 10]
    refusals = dict.fromkeys(f"- {row['table']}: {row['told']}" for row in rows if row["told"])
    sections = [
        Section("Verdicts", text, [columns[i] for i in short], [[line[i] for i in short] for line in shown]),
        Section("What a client gets", "Columns as in the table of a run.", columns, shown),
        Section("Refusals", "\n".join(refusals) or "None."),
        Section(
            "Commands",
            "A first import with these flags, and a second one with the scales and ranges that it prints. Then "
            f"`umbel run NAME --strict`, and the same with `--epsilon {EPSILON:g}`.",
            ("table", "from", "umbel data import, with"),
            [[name, f"`{package}.{function}`", f"`{flags}`"] for name, (package, function, flags) in TABLES.items()],
        ),
    ]
    page("Public tables", sections, rows, results).write(folder)


def _cell(measured: Sequence[Mapping[str, Any]], way: Way) -> str:
    pairs = [one["ways"][way.value] for one in measured if way.value in one.get("ways", {})]
    if not pairs:
        return ""
    if any(value is None for pair in pairs for value in pair):
        return "not finite"
    middle, worst = (figure(float(f"{mean(pair[i] for pair in pairs):.3g}")) for i in range(2))
    return f"{middle} ({worst})"


def _levels(measures: Mapping[str, Any]) -> str:
    return ", then ".join(filter(None, ["refused" if "told" in measures else "", measures.get("level")]))


def _learnt(row: Row) -> str:
    if row["told"]:
        return "refused"
    if row["level"] in (Level.DIVERGED, Level.NOT_BETTER_THAN_CONSTANT):
        return "constant"
    return "alone" if row["level"] == Level.NOT_BETTER_THAN_ALONE else "worth"


def _sentence(learnt: Mapping[str, int], rows: Sequence[Row]) -> str:
    """Return the counts of runs, and how many of those without gain ended with exit code 0."""
    silent = sum(row["status"] == 0 and not Level(row["level"]).worth_it for row in rows)
    return (
        f"Of {len(rows)} runs {learnt.get('refused', 0)} were refused, {learnt.get('constant', 0)} were not shown to "
        f"be better than a constant, {learnt.get('alone', 0)} better than that but not than each client alone, and "
        f"{learnt.get('worth', 0)} better than both. {silent} runs that gained nothing ended with exit code 0 under "
        "`--strict`."
    )
