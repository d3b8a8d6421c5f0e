"""Many runs on all cores, each measured and saved when it is done, so that a stopped sweep can resume."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from umbel.data import Dataset, digest_of, find_dataset, read_manifest
from umbel.models.model import find_weights
from umbel.privacy.accounting.guarantee import guarantee, with_before
from umbel.protocol.arrays import Arrays
from umbel.protocol.cores import cores
from umbel.protocol.errors import ConfigError, SweepError
from umbel.protocol.home import make_folder, write_atomically
from umbel.protocol.plugins import names_in, own_path
from umbel.protocol.project import OWN_PATH, PACKAGE, source
from umbel.protocol.release import Release
from umbel.protocol.run_config import RunConfig
from umbel.server.history import State
from umbel.server.run import Run
from umbel.server.run_folder import RunFolder, versions
from umbel.server.setup import Setup
from umbel.simulation.baselines import measure
from umbel.simulation.in_process import play
from umbel.strategies import Callback

LOCAL_ONLY = "local-only"
"""The name, beside those of strategies, of clients that train alone."""

STATES = ("last", "best")
"""The measured hypotheses: those of the last round, and those of the round of lowest validation loss."""


FIRST_SEED = 2000
"""Runs in results have seeds from here on; settings were chosen with lower ones."""

# Inputs of a result besides its configuration.
_CODE = (
    "umbel/protocol", "umbel/data", "umbel/client", "umbel/models", "umbel/privacy", "umbel/strategies",
    "umbel/nodes", "umbel/server/setup.py", "umbel/server/run.py", "umbel/server/history.py",
    "umbel/server/callbacks.py", "umbel/server/run_folder.py", "umbel/simulation/grid.py",
    "umbel/simulation/in_process.py", "umbel/simulation/sweep.py", "umbel/simulation/baselines.py",
)  # fmt: skip
PACKAGES = ("umbel", "flwr", "numpy", "torch")
# One thread for each worker. Workers also keep the memory that they free: returning it and taking it again
# costs a third of a round's time for models with a million parameters.
_WORKER = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 33), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
RESULT, _TRACE, HISTORY = "result.json", "trace.npz", "history.jsonl"


@dataclass(frozen=True)
class Spec:
    """A run to do, with a complete run config."""

    name: str  # unique in a sweep; also the name of its folder
    config: dict[str, Any]
    arm: tuple[Any, ...] = ()  # the same for the runs from other seeds

    @classmethod
    def of(cls, arm: tuple[Any, ...], config: dict[str, Any]) -> Spec:
        """Return a run of an arm, named after the arm and the seed."""
        words = f"{' '.join(map(str, arm))} seed{config['seed']}".lower().replace("ν", "nu")
        return cls("-".join(re.sub(r"[^\w.\s-]", "", words).split()), config, arm)


@dataclass(frozen=True)
class Finished:
    """The result of a run: numbers by name (see `finish`), and the folder of a run of several rounds."""

    measures: dict[str, Any]
    state: State | None = None  # None for clients that train alone
    participations: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # (training clients,)
    release: Release | None = None  # a client's, in each participation
    kept: Arrays = field(default_factory=dict)  # the strategy's state
    trace: Arrays = field(default_factory=dict)  # see `Trace.arrays`
    saved_in: Path | None = None  # the folder from which it would resume


class Trace(Callback):
    """Keeps the releases of each round that trained, for models of two parameters."""

    run: Run

    def __init__(self) -> None:
        self.rounds: list[Arrays] = []

    def after_exchange(self, round: int, stages: dict[str, float]) -> None:
        """Keep the round's releases."""
        if (one := self.run.outcome) is not None and one.releases is not None:
            rounds = np.full(len(one.clients), one.round)
            self.rounds.append(
                {"rounds": rounds, "clients": one.clients, "groups": one.groups, "releases": one.releases}
            )

    @property
    def arrays(self) -> Arrays:
        """One row for each release: ``rounds``, ``clients``, ``groups``, ``releases``; empty without any."""
        names = self.rounds[0] if self.rounds else ()
        return {name: np.concatenate([one[name] for one in self.rounds]) for name in names}


def finish(config: Mapping[str, Any], nodes: int = 1, saved_in: Path | None = None) -> Finished:
    """Do a run of a complete run config, with its clients on simulated nodes, and measure it.

    With a folder, a stopped run resumes (`umbel.simulation.in_process.play`).

    One thread computes, so that the digits do not depend on the number of cores. `FleetError` if the simulated node
    refuses; the reason is in the log.

    The measures are ``rounds``, ``stopped``, ``best_round``, ``best_loss`` (the lowest validation loss),
    ``median_budget`` and ``max_budget`` (the paper's, over training clients; None without noise),
    ``max_participations``; the guarantee of the client with the most participations as ``pure_epsilon`` and ``epsilon``
    (at `umbel.privacy.accounting.guarantee.DELTA`; None without one); and for the ``last`` and the ``best`` hypotheses
    the result of `umbel.simulation.baselines.measure`.
    """
    torch.set_num_threads(1)
    trace = Trace()
    run = play(config, nodes=nodes, observers=[trace], saved_in=saved_in)
    setup, state, spent = run.setup, run.state, run.fleet.participations
    model, dataset, release = setup.model, dataset_of(setup), setup.release
    bounded = release.paper_cost is not None
    most = guarantee(with_before({release: int(spent.max())}, setup.config.before))
    measures = {
        "rounds": sum(1 for entry in state.history if entry.asked),
        "stopped": state.stopped,
        "best_round": state.best_round,
        "best_loss": state.best_loss,
        "median_budget": release.paper_spend(float(np.median(spent))) if bounded else None,
        "max_budget": release.paper_spend(int(spent.max())) if bounded else None,
        "max_participations": int(spent.max()),
        "pure_epsilon": most.pure if most and math.isfinite(most.pure) else None,
        "epsilon": most.epsilon if most else None,
        "best": measure(model, dataset, state.best, setup.config),
        "last": measure(model, dataset, state.hypotheses, setup.config),
    }
    return Finished(measures, state, spent, release, run.strategy.state, trace.arrays, saved_in)


def dataset_of(setup: Setup) -> Dataset:
    """Return the dataset whose validation clients measure a run; raise `ConfigError` if there is none."""
    dataset = setup.open_dataset()
    if dataset is None:
        text = "an experiment measures on the validation clients of a dataset; name one in dataset"
        raise ConfigError(text, code="config.no-dataset")
    return dataset


Task = Callable[[Mapping[str, Any]], Finished]
Runs = Generator[tuple[Spec, Finished | None, str], None, None]


@dataclass(frozen=True)
class Result:
    """A finished or failed run."""

    spec: Spec
    measures: dict[str, Any]  # see `finish`; empty for a run that failed
    folder: Path
    error: str = ""  # the reason of a failure
    code: str = ""  # digest of the code that made it

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict for each round, see `umbel.server.history.Round`."""
        lines = (self.folder / HISTORY).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def hypotheses(self) -> Arrays:
        """The best hypotheses, each array (k, \\*shape)."""
        return safetensors.numpy.load_file(self.folder / "hypotheses.safetensors")

    @property
    def trace(self) -> dict[str, NDArray[Any]]:
        """See `Trace.arrays`."""
        with np.load(self.folder / _TRACE) as arrays:
            return dict(arrays)


def sweep(
    specs: Sequence[Spec], folder: Path, task: Task = finish, workers: int | None = None, keep: bool = False
) -> list[Result]:
    """Do all runs that are not done yet, and return the results of all in the order of `specs`.

    `workers` runs are parallel, by default as many as there are cores.

    A run is done if its folder ``runs/NAME`` holds the result of the same configuration, made from the same data by the
    same code and versions. With `keep`, code and versions may be others, and settings that the run did not know must
    have their defaults. A failed run does not stop the others, and is tried again the next time.
    """
    names = Counter(spec.name for spec in specs)
    if twice := [name for name, times in names.items() if times > 1]:
        text = f"{names[twice[0]]} runs of the sweep would be called {twice[0]!r}"
        text += "; give each value once, and values that differ in letters or digits"
        raise SweepError(text, code="sweep.same-name")
    for known in (_named_by, _fingerprint, _digest):
        known.cache_clear()  # files may have changed since an earlier sweep in this process
    make_folder(folder)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True))
    with alone(folder), progress:
        results = {result.spec.name: result for result in done(specs, folder, task, keep)}
        missing = [spec for spec in specs if spec.name not in results]
        bar = progress.add_task(folder.name, total=len(specs), completed=len(results))
        if missing:
            with closing(_each(missing, task, workers)) as runs:
                for spec, finished, error in runs:
                    results[spec.name] = _save(spec, finished, error, folder, task)
                    progress.advance(bar)
                    if error:
                        progress.console.print(f"[red]{spec.name} failed:[/red] {error.strip().splitlines()[-1]}")
    return [results[spec.name] for spec in specs]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder, which only one sweep at a time may write to."""
    try:
        lock = FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout:
        raise SweepError(f"another sweep is running in {folder}; wait until it ends", code="sweep.running") from None
    with lock:
        yield


def done(specs: Sequence[Spec], folder: Path, task: Task = finish, keep: bool = False) -> list[Result]:
    """Return the results of finished runs, in the order of `specs`, also while others are running; see `sweep`."""
    return [result for spec in specs if (result := _read(spec, folder, task, keep)) is not None]


def _each(specs: Sequence[Spec], task: Task, workers: int | None = None) -> Runs:
    """Yield each run with its result or the reason of its failure, in the order in which they end."""
    started = [_Worker(number) for number in range(min(workers or cores(), len(specs)))]
    idle = SimpleQueue[_Worker]()
    for worker in started:
        idle.put(worker)

    def attempt(spec: Spec) -> tuple[Spec, Finished | None, str]:
        worker = idle.get()
        try:
            return spec, *worker.do(task, spec.config)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(len(started)) as threads:
        try:
            yield from (ended.result() for ended in as_completed([threads.submit(attempt, spec) for spec in specs]))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in started:
                worker.end()


class _Worker:
    """A process for one run after another, from the first on, and a new one after one that died.

    It imports nothing from the working folder, which somebody may have sent. The GPUs are shared out among the workers.
    """

    def __init__(self, number: int) -> None:
        paths = os.pathsep.join([str(PACKAGE.parent), *sys.path[1:]])
        self._environment = os.environ | _WORKER | {"PYTHONPATH": paths, OWN_PATH: own_path()}
        if (gpus := torch.cuda.device_count()) > 1:
            names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
            self._environment["CUDA_VISIBLE_DEVICES"] = names.split(",")[number % gpus]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def do(self, task: Task, config: Mapping[str, Any]) -> tuple[Finished | None, str]:
        """Do a run; return its result, or the reason of its failure."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            # In a separate session: an interrupt is for the sweep, which ends its workers.
            self._process = subprocess.Popen(command, env=self._environment, start_new_session=True, **pipes)
        process = self._process
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            pickle.dump((task, dict(config)), process.stdin)
            process.stdin.flush()
            found: tuple[Finished | None, str] = pickle.load(process.stdout)
            return found
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            self.end()
            return None, f"the process of the run died, with exit code {process.returncode}; it may have lacked memory"

    def end(self) -> None:
        """End the process, and the run that it does."""
        with self._lock:  # whoever waits for its result ends it, too
            if self._process is not None:
                self._process.kill()
                self._process.communicate()


def serve() -> None:
    """Do the runs that a sweep sends to this process. Flower's log, and all that a run prints, go nowhere."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    while True:
        try:
            task, config = pickle.load(asked)
        except EOFError:  # the sweep is over
            return
        pickle.dump(_attempt(task, config), answers)
        answers.flush()


def _attempt(task: Task, config: Mapping[str, Any]) -> tuple[Finished | None, str]:
    """Do a run; return its result, or the reason of its failure."""
    try:
        return task(config), ""
    except Exception:
        return None, traceback.format_exc()


def _save(spec: Spec, finished: Finished | None, error: str, folder: Path, task: Task = finish) -> Result:
    """Save a run, its result last, which marks it as done."""
    path, failure = folder / "runs" / spec.name, folder / "failed" / f"{spec.name}.txt"
    if finished is None:
        failure.parent.mkdir(exist_ok=True)
        write_atomically(failure, error.encode())
        return Result(spec, {}, path, error)
    run = RunFolder(path)
    run.write_config(spec.config)
    if finished.state is not None and finished.release is not None:
        run.write_round(finished.state, finished.participations, finished.release, finished.kept)
    if finished.trace:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **finished.trace)  # type: ignore[arg-type]
        write_atomically(path / _TRACE, buffer.getvalue())
    by = made_by(spec.config, task)
    document = {"made_by": by, "config": spec.config, "measures": finished.measures}
    write_atomically(path / RESULT, json.dumps(document, indent=1).encode())
    failure.unlink(missing_ok=True)
    if finished.saved_in is not None:  # what the run would need to resume
        shutil.rmtree(finished.saved_in, ignore_errors=True)
    return Result(spec, finished.measures, path, code=by["code"])


def _read(spec: Spec, folder: Path, task: Task, keep: bool) -> Result | None:
    """Return an earlier run with the same configuration and data, and by the same code unless `keep`."""
    path = folder / "runs" / spec.name
    try:
        document = json.loads((path / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    config, by, now = document.get("config"), document.get("made_by"), made_by(spec.config, task)
    if keep and isinstance(config, dict) and isinstance(by, dict):
        config, now = RunConfig().entries() | config, {**by, "data": now["data"]}
    if config != spec.config or by != now:
        return None
    return Result(spec, document["measures"], path, code=by.get("code", ""))


def made_by(config: Mapping[str, Any], task: Task = finish) -> dict[str, str]:
    """Return the inputs of a result besides its configuration: versions, data, and code, the user's included.

    The data include the file of initial weights, and the hypotheses of a run to start from.
    """
    path = find_dataset(config["dataset"])
    *texts, pretrained = _named_by(path)
    # An experiment's own task may have few of umbel's settings.
    texts += [config.get(key, "") for key in ("strategy", "model", "loss", "metric", "mechanism", "observers")]
    own = tuple(sorted({name.partition(":")[0] for name in names_in(texts)}))
    more = getattr(sys.modules[task.__module__], "CODE", ())
    files = [path]
    if start := config.get("start-from"):
        files.append(Path(start) / "hypotheses.safetensors")
    if weights := config.get("pretrained") or pretrained:
        files.append(find_weights(weights))
    data = "".join(_fingerprint(file) for file in files if file.exists())
    return {**versions(PACKAGES), "code": _digest((*own, task.__module__), more), "data": data}


@lru_cache
def _named_by(path: Path) -> tuple[str, str, str, str]:
    """Return what a dataset names: model, loss, metric and file of initial weights."""
    manifest = read_manifest(path)
    return manifest.model, manifest.loss, manifest.metric, manifest.pretrained


_fingerprint = lru_cache(digest_of)  # many runs share a dataset, and reading it may take long


@lru_cache
def _digest(modules: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> str:
    """Return a digest of the code that makes results, with additional modules and files or folders."""
    paths = [source(name) for name in (*_CODE, *more)]
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    files += [Path(found.origin) for module in modules if (found := find_spec(module)) and found.origin]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
