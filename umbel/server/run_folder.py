"""The folder of a run.

Files are replaced completely or not at all. The two that grow with the rounds are appended to, so that each round
writes the same amount. An incomplete last line, from a killed run, does not count.
"""

from __future__ import annotations

import fcntl
import json
import math
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache, partial
from hashlib import blake2b
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import numpy as np
import safetensors
import safetensors.numpy
import tomli_w
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from umbel.data import Manifest
from umbel.data.files import OF_RUN, read_manifest_of_run
from umbel.privacy.accounting.guarantee import pure_cost
from umbel.protocol.arrays import Arrays, all_finite
from umbel.protocol.clients import ClientInRun
from umbel.protocol.errors import ConfigError
from umbel.protocol.home import append, make_folder, write_atomically
from umbel.protocol.release import Release
from umbel.protocol.run_config import FOLDER_VERSION, MAX_HYPOTHESES, read_saved
from umbel.protocol.tasks import Hosting
from umbel.server.history import Round, State
from umbel.server.status import FILE as status_file
from umbel.server.status import Status
from umbel.server.worth import FILE as worth_file
from umbel.server.worth import Worth

T = TypeVar("T")

_STRATEGY = "strategy/"
_ROUND = TypeAdapter(Round)
_TIMES = TypeAdapter(dict[Annotated[int, Field(ge=0, lt=10**8)], Annotated[int, Field(ge=1, lt=2**32)]])
"""Maximum number of clients; a folder that was sent may name any, and a report makes room for all up to the highest."""
_MODE = 0o700  # at any umask: a run may hold exact losses and releases without noise
_LONGEST = 200  # characters of an error
_BEHIND = 10  # during a run, ledger.csv may lack fewer than one release for so many of its rows
_PACKAGES = ("flwr", "torch", "numpy", "safetensors")


class RunFolder:
    r"""The folder of one run.

    ==========================  ==========================================================
    ``hypotheses.safetensors``  the best hypotheses so far, each array (k, \*shape)
    ``latest.safetensors``      the hypotheses for the next round; under ``strategy/`` the state that the
                                strategy keeps; metadata ``rounds``: their number, a digest of all
                                that, one of the best hypotheses, "new" if their loss is unknown, and
                                during a run the last round's line, which lacks its validation
    ``nodes.json``              the nodes in the order in which their clients are numbered
    ``history.jsonl``           a line a round, from round 0 (`umbel.server.history.Round`)
    ``participations.jsonl``    a line a round: how often each client released in it; the first line of a
                                run that resumed covers all rounds before
    ``outcome.json``            why the run ended
    ``worth.json``              for a simulation: its worth (`umbel.server.worth`)
    ``status.json``             for real sites: which of them are there (`umbel.server.status`)
    ``ledger.csv``              clients that released: participations, the pure epsilon between any
                                two data sets ("none" if there is none), and n/nu in all; during a run up to a tenth
                                of the releases may be only in ``participations.jsonl``
    ``config.toml``             the folder's version, the run config, the versions it ran with, digests of data and
                                frozen parameters
    ``dataset.json``            the dataset's manifest at the start: a dataset of that name may change later; for real
                                sites none
    ``report.html``             the outcome for people
    ==========================  ==========================================================
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The latest files of this object.
        self._best: tuple[Arrays, str] | None = None  # and their digest
        self._written: dict[str, str] = {}  # texts by file, and what stands for latest.safetensors
        self._rounds = 0
        self._counts = np.zeros(0, np.int64)
        self._rows = 0  # of ledger.csv
        self._untold = 0  # releases that it lacks
        path.mkdir(mode=_MODE, parents=True, exist_ok=True)

    @classmethod
    def make(cls, parent: Path, name: str) -> RunFolder:
        """Make a folder called `name`, with a number appended if another run has that name."""
        try:
            make_folder(parent)
            for number in count(1):
                path = parent / (name if number == 1 else f"{name}-{number}")
                with suppress(FileExistsError):
                    path.mkdir(mode=_MODE)
                    break
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            text = f"{error.filename} cannot be made: {error.strerror}; set UMBEL_HOME to a folder of yours"
            raise ConfigError(text, code="config.home") from None
        return cls(path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Prevent others from resuming the run meanwhile: two processes would mix their files in the folder.

        Raises
        ------
        ConfigError
            If another process holds it.
        """
        # This file exists in every run and is never replaced; a lock on it ends with the process.
        with (self.path / "config.toml").open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process has the run in {self.path}; wait for it, or stop it",
                    code="config.run-held",
                ) from None
            yield

    def write_config(self, run_config: Mapping[str, Any], **digests: str) -> None:
        """Save the run's configuration, versions of the folder and of packages, and digests of what else it depends on.

        The digests are ``data``, of the dataset's files, and ``frozen``, of the frozen parameters.
        """
        content = {"version": FOLDER_VERSION, **digests, "config": dict(run_config), "versions": versions()}
        self._write("config.toml", tomli_w.dumps(content))

    def write_manifest(self, manifest: Manifest | None) -> None:
        """Save the manifest of the run's dataset, if the server has one."""
        if manifest is not None:
            self._write(OF_RUN, json.dumps(manifest.entries(), ensure_ascii=False) + "\n")

    def read_manifest(self) -> Manifest | None:
        """Return what `write_manifest` saved; None and errors as of `umbel.data.files.read_manifest_of_run`."""
        return read_manifest_of_run(self.path)

    def write_round(
        self, state: State, participations: NDArray[np.int64], release: Release, kept: Mapping[str, NDArray[Any]]
    ) -> None:
        """Save the state of the run, each client's releases (clients,), of a kind, and what the strategy keeps."""
        if self._best is None or self._best[0] is not state.best:
            self._write("hypotheses.safetensors", _to_bytes(state.best))
            self._best = state.best, _digest(state.best, "")
        self._write_new_rounds(state.history if state.stopped else state.history[:-1], participations)
        self._write("outcome.json", json.dumps({"stopped": state.stopped}) + "\n")
        # Writing the table whenever it has grown by a tenth costs a constant amount for each release.
        if self._untold * _BEHIND >= self._rows or (state.stopped and self._untold):
            self._write_ledger(participations, release)
        # Last, and with its number of rounds: a killed run repeats rounds that it does not cover.
        self.write_latest(state, kept)

    def _write_new_rounds(self, history: Sequence[Round], participations: NDArray[np.int64]) -> None:
        """Append new rounds; the first time, replace both files, without rounds that a killed run had begun."""
        done, counts = self._rounds, self._counts
        self._rounds, self._counts = 0, np.zeros(0, np.int64)  # until all is written: no line may follow half a line
        write = append if done else partial(write_atomically, private=True)
        lines = "".join(entry.line + "\n" for entry in history[done:])
        if lines or not done:
            write(self.path / "history.jsonl", lines.encode())
        if len(counts) < len(participations):  # clients of nodes that joined later come last
            counts = np.pad(counts, (0, len(participations) - len(counts)))
        clients = np.flatnonzero(participations != counts)
        times = participations[clients] - counts[clients]
        if len(clients) or not done:
            line = json.dumps(dict(zip(clients.tolist(), times.tolist(), strict=True))) + "\n"
            write(self.path / "participations.jsonl", line.encode())
        counts[clients] = participations[clients]
        self._rounds, self._counts = len(history), counts
        self._untold += int(times.sum())

    def _write_ledger(self, participations: NDArray[np.int64], release: Release) -> None:
        # The comparison makes this quick if few of very many clients have released.
        clients = np.flatnonzero(participations != 0)
        often = participations[clients].tolist()
        cost, spent = pure_cost(release), {}
        for times in set(often):
            figures = (cost * times, release.paper_spend(times))
            words = ("none" if value == math.inf else f"{float(value):.10g}" for value in figures)
            spent[times] = f"{times},{','.join(words)}"
        rows = "".join(f"{client},{spent[times]}\n" for client, times in zip(clients.tolist(), often, strict=True))
        self._write("ledger.csv", f"client,participations,epsilon,paper_budget\n{rows}")
        self._rows, self._untold = len(often), 0

    def write_latest(self, state: State, kept: Mapping[str, NDArray[Any]]) -> None:
        """Save the hypotheses for the next round; arguments as for `write_round`, which calls this last."""
        latest = state.hypotheses | {_STRATEGY + name: value for name, value in kept.items()}
        rounds, line = str(state.history[-1].number), "" if state.stopped else state.history[-1].line
        self._best = self._best or (state.best, _digest(state.best, ""))
        # Hypotheses without a known loss have none after reading either.
        best = self._best[1] if math.isfinite(state.best_loss) else "new"
        # One entry: safetensors writes several in any order, and the same run should give the same bytes.
        standing = f"{rounds} {_digest(latest, rounds)} {best} {line}"
        if standing != self._written.get("latest"):
            self._write("latest.safetensors", _to_bytes(latest, {"rounds": standing}))
            self._written["latest"] = standing

    def write_worth(self, worth: Worth | None) -> None:
        """Save the worth of the run; None removes an outdated one."""
        if worth is None:
            (self.path / worth_file).unlink(missing_ok=True)
        else:
            self._write(worth_file, worth.content)

    def read_worth(self) -> Worth | None:
        """Return the worth that `write_worth` saved, if any; raise `ConfigError` if umbel did not write the file."""
        try:
            return Worth.read(self._text(worth_file))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            text = f"{worth_file} in {self.path} cannot be used: {_brief(error)}; delete it, and write the report again"
            raise ConfigError(text, code="config.worth") from None

    def write_status(self, status: Status) -> None:
        """Save which sites are there."""
        self._write(status_file, status.model_dump_json(indent=1) + "\n")

    def read_status(self) -> Status:
        """Return what `write_status` saved.

        Raises
        ------
        ConfigError
            If there is none, as in a simulation, or umbel did not write it.
        """
        try:
            return Status.model_validate_json(self._text(status_file))
        except FileNotFoundError:
            text = f"{self.path} has no {status_file}: it is a simulation's, or has not begun"
        except (OSError, ValueError) as error:
            text = f"{status_file} in {self.path} cannot be used: {_brief(error)}; restore an intact copy"
        raise ConfigError(text, code="config.status")

    def write_report(self, html: str) -> None:
        """Save the report."""
        self._write("report.html", html)

    def read_config(self) -> dict[str, Any]:
        """Return the content of `write_config`: ``version``, ``config``, ``versions``, and digests by name."""
        return read_saved(self._text("config.toml"))

    def read_run_config(self) -> dict[str, Any]:
        """Return the run's config."""
        config = self.read_config().get("config")
        if not isinstance(config, dict):
            raise ConfigError(
                f"config.toml in {self.path} has no table config; it is not a run's", code="config.no-run"
            )
        return config

    def read(
        self, shapes: Mapping[str, tuple[int, ...]], most: int = MAX_HYPOTHESES
    ) -> tuple[State, dict[ClientInRun, int], Arrays]:
        """Return the state, the number of releases of each client that released, and the strategy's state.

        `shapes` are those of the model's shared parameters in order, which a file does not keep; `most` is the maximum
        number of hypotheses. Raises `FileNotFoundError` if the folder holds no run with a finished round, and
        `ValueError` if its files do not match, or hold no hypotheses of the model.
        """
        (latest, metadata), best = self._opened("latest"), self.read_best()
        number, digest, digest_of_best, line = metadata["rounds"].split(" ", 3)
        if digest != _digest(latest, number):
            raise ValueError("latest.safetensors has been changed")
        complete = int(number) + (not line)
        history = _read_lines(self.path / "history.jsonl", _round, complete)
        if not 1 <= complete <= len(history):
            raise ValueError(f"latest.safetensors is of round {number}, but history.jsonl has {len(history)} lines")
        # A run that was killed may have written rounds that it repeats.
        history = [*history[:complete], *([_round(line, complete)] if line else ())]
        best_round = history[-1].best_round
        outcome = json.loads(self._text("outcome.json"))
        if not isinstance(outcome, dict) or "stopped" not in outcome:
            raise ValueError("outcome.json does not say why the run ended")
        losses = {entry.number: entry.loss for entry in history if entry.loss is not None}
        hypotheses, kept_best = hypotheses_in(latest, shapes, most), hypotheses_in(best, shapes, most)
        # If an unfinished round had found better hypotheses, these are not the best: the run scores them again.
        same = digest_of_best == _digest(best, "")
        state = State(
            hypotheses=hypotheses,
            best=kept_best,
            best_loss=losses.get(best_round, math.inf) if same else math.inf,
            best_round=best_round,
            stale=sum(1 for number in losses if number > best_round) if same else 0,
            history=history,
            stopped="" if line else outcome["stopped"],
        )
        return state, self.read_participations(1), kept_in(latest)

    def check_releases(self, spent: Mapping[ClientInRun, int], history: Sequence[Round]) -> None:
        """Raise `ValueError` unless participations fit the finished rounds: the guarantee follows from them."""
        total, most = sum(spent.values()), max(spent.values(), default=0)
        released, known = sum(entry.releases for entry in history), history[-1].max_participations
        # Or one more, of a round that a killed run repeats.
        if total < released or not known <= most <= known + 1:
            raise ValueError(
                f"participations.jsonl says that there were {total} releases, {most} of one client, and history.jsonl "
                f"{released}, {known} of one client"
            )

    def read_outcome(self) -> str:
        """Return why the run ended; empty while it runs, or if it was interrupted."""
        file = self.path / "outcome.json"
        return str(json.loads(self._text(file.name))["stopped"] or "") if file.exists() else ""

    def read_history(self) -> list[Round]:
        """Return all saved rounds, also those that a killed run repeats; none before the first. Errors as for `read`.

        The last one may lack its validation.
        """
        history = _read_lines(self.path / "history.jsonl", _round)
        if (latest := self.path / "latest.safetensors").exists():
            with safetensors.safe_open(latest, "numpy") as file:
                number, _, _, line = file.metadata()["rounds"].split(" ", 3)
            history += [_round(line, len(history))] if line and int(number) == len(history) else []
        return history

    def read_participations(self, finished: int = 0) -> dict[ClientInRun, int]:
        """Return the number of releases of each client that released, also in repeated rounds; errors as for `read`.

        So many lines as are `finished` must be complete; the last line after them may be incomplete.
        """
        spent = Counter[ClientInRun]()
        for line in _read_lines(self.path / "participations.jsonl", _participations, finished):
            spent.update(line)
        return dict(sorted(spent.items()))

    def read_latest(self) -> Arrays:
        """Return the hypotheses after the last round, and the strategy's state; errors as for `read`."""
        return self._opened("latest")[0]

    def read_best(self) -> Arrays:
        """Return the best hypotheses; errors as for `read`."""
        return self._opened("hypotheses")[0]

    def write_nodes(self, nodes: Sequence[tuple[int, Hosting]]) -> None:
        """Save the nodes and their accounts, in the order in which their clients are numbered."""
        self._write("nodes.json", json.dumps([{"node": node, **asdict(hosting)} for node, hosting in nodes]) + "\n")

    def read_nodes(self) -> list[tuple[int, Hosting]]:
        """Return the nodes that `write_nodes` saved."""
        return [(row.pop("node"), Hosting(**row)) for row in json.loads(self._text("nodes.json"))]

    def _write(self, name: str, content: str | bytes) -> None:
        """Replace a file, unless it holds the text already."""
        if isinstance(content, str):
            if self._written.get(name) != content:
                write_atomically(self.path / name, content.encode(), private=True)
                self._written[name] = content
        else:
            write_atomically(self.path / name, content, private=True)

    def _text(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")

    def _opened(self, name: str) -> tuple[Arrays, dict[str, str]]:
        """Return arrays and metadata of the same version of a file: a run replaces it while others read."""
        path = self.path / f"{name}.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing")
        with safetensors.safe_open(path, "numpy") as file:
            names = file.keys()
            arrays, metadata = {name: file.get_tensor(name) for name in names}, file.metadata() or {}
        # NumPy has some kinds, such as bfloat16, only where another package adds them.
        if lacking := [name for name, value in arrays.items() if value.dtype.kind == "V"]:
            raise ValueError(f"{lacking[0]} in {path.name} is of a kind that NumPy lacks")
        return arrays, metadata


def _read_lines(path: Path, read: Callable[[str, int], T], finished: int = 0) -> list[T]:
    """Return the content of each line; the last may be incomplete after a kill, unless so many are finished."""
    if not (finished or path.exists()):
        return []
    lines, contents = path.read_text(encoding="utf-8", errors="replace").splitlines(), []
    for number, line in enumerate(lines):
        try:
            contents.append(read(line, number))
        except ValueError:
            if number < finished or number + 1 < len(lines):
                raise
    return contents


def _participations(line: str, number: int) -> dict[ClientInRun, int]:
    try:
        return cast(dict[ClientInRun, int], _TIMES.validate_json(line, strict=True))
    except ValueError as error:
        raise ValueError(f"line {number + 1} of participations.jsonl does not say who released") from error


def _round(line: str, number: int) -> Round:
    try:
        _ROUND.validate_json(line, strict=True)
        entry = Round(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise ValueError(f"line {number + 1} of history.jsonl is not a round") from error
    if entry.number != number or not 0 <= entry.best_round <= number:
        raise ValueError(f"line {number + 1} of history.jsonl is of round {entry.number}, the best {entry.best_round}")
    return entry


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:_LONGEST]


def number_of(hypotheses: Arrays) -> int:
    """Return how many hypotheses these are."""
    return len(next(iter(hypotheses.values())))


def hypotheses_in(arrays: Arrays, shapes: Mapping[str, tuple[int, ...]], most: int = MAX_HYPOTHESES) -> Arrays:
    """Return the hypotheses in a file's arrays, in the model's order; raise `ValueError` unless they are 1 to `most`
    valid ones of the model."""
    if missing := [name for name in shapes if name not in arrays]:
        raise ValueError(f"{missing[0]!r} is missing")
    hypotheses = {name: arrays[name] for name in shapes}
    counts = {len(value) if value.ndim else 0 for value in hypotheses.values()}
    if len(counts) != 1 or not 1 <= min(counts) <= most:
        raise ValueError(f"there are {' or '.join(map(str, sorted(counts)))} hypotheses, not 1 to {most}")
    for name, value in hypotheses.items():
        if value.shape[1:] != shapes[name]:
            raise ValueError(f"{name} of each hypothesis is {value.shape[1:]}, not {shapes[name]}")
        if value.dtype != np.float32:
            raise ValueError(f"{name} of the hypotheses is {value.dtype}, not float32")
        if not all_finite(value):
            raise ValueError(f"{name} of the hypotheses is not finite")
    return hypotheses


def _digest(arrays: Arrays, rounds: str) -> str:
    """Return a digest of arrays after a number of rounds."""
    digest = blake2b(rounds.encode(), digest_size=16)
    for name, value in sorted(arrays.items()):
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()


def kept_in(latest: Arrays) -> Arrays:
    """Return the strategy's part of the arrays that `RunFolder.write_latest` saves."""
    return {name[len(_STRATEGY) :]: value for name, value in latest.items() if name.startswith(_STRATEGY)}


def _to_bytes(arrays: Arrays, metadata: dict[str, str] | None = None) -> bytes:
    # Not `ascontiguousarray`, which adds an axis to a scalar.
    return safetensors.numpy.save({key: np.asarray(value, order="C") for key, value in arrays.items()}, metadata)


@lru_cache
def versions(packages: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """Return the versions of packages and Python that a run depends on."""
    return {package: version(package) for package in packages} | {"python": platform.python_version()}
