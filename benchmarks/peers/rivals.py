"""The peers: how they are installed, started and asked to go."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.measure import Reading
from benchmarks.peers.brief import GO
from umbel.protocol.errors import UmbelError
from umbel.protocol.home import umbel_home, write_atomically

ROOT = Path(__file__).resolve().parents[2]


class Absent(UmbelError, kind="peer"):
    """A peer cannot take part in a comparison of speed; the text says why."""


@dataclass(frozen=True)
class Peer:
    """Another simulator, by the versions of Python that it can run on.

    `contestants` are the variants it plays: what each is called, and the contestant of ours that does the same. `lacks`
    says what it leaves out of umbel's work; then what it does differently.
    """

    name: str
    pythons: tuple[str, ...]
    contestants: dict[str, tuple[str, str]]
    lacks: str

    @property
    def file(self) -> Path:
        """Requirements of the peer for pip, itself first."""
        return Path(__file__).parent / "requirements" / f"{self.name}.txt"

    @property
    def requirements(self) -> list[str]:
        """The same without comments."""
        lines = self.file.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if not line.startswith("#")]

    @property
    def version(self) -> str:
        """Its name and version."""
        return self.requirements[0].replace("==", " ")


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "fedjax",
            ("3.11", "3.12", "3.13"),
            {"ifca": ("FedJAX, hyp_cluster", "umbel, IFCA, no noise")},
            "noise, ledger and k-means: clients tell the server which hypothesis they chose. It weights clients by "
            "their rows and fills each minibatch by repeating rows",
        ),
        Peer(
            "pfl",
            ("3.11", "3.12"),
            {"laplace": ("pfl, FedAvg, Laplace", "umbel, FedAvg"), "": ("pfl, FedAvg", "umbel, FedAvg, no noise")},
            "hypotheses, choice and clusters, as it has one model, and the ledger. Its Laplace noise is for a bound "
            "set beforehand, to which clients clip, not for each update's own norm; a client's rows keep their order",
        ),
        Peer(
            "blazefl",
            ("3.12", "3.13"),
            {"": ("BlazeFL, FedAvg", "umbel, FedAvg, no noise")},
            "hypotheses, choice and clusters, as it has one model, noise, ledger, and validation by clients: its "
            "server has their rows. It weights clients by their rows",
        ),
    )
}


def find_python(versions: tuple[str, ...]) -> str:
    """Return an interpreter of one of the versions, this one if it will do."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for version in versions:
        # pyenv hides all versions but the chosen one behind commands that fail.
        candidates = [sys.executable, shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
        for candidate in filter(None, candidates):
            ask = [str(candidate), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            if subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() == version:
                return str(candidate)
    raise Absent(f"needs Python {' or '.join(versions)}, which is not on this machine", code="peer.no-python")


def environment(peer: Peer) -> Path:
    """Return the interpreter of a peer's virtual environment, made the first time under $UMBEL_HOME.

    Where this process's own environment has all that the peer needs, it is that.
    """
    if all(map(_is_here, peer.requirements)):
        return Path(sys.executable)
    folder = umbel_home() / "peers" / peer.name
    python, ready, wanted = folder / "bin" / "python", folder / "umbel-ready", peer.file.read_bytes()
    if not ready.exists() or ready.read_bytes() != wanted:
        base = find_python(peer.pythons)
        print(f"installing {peer.version} in {folder}", flush=True)
        _call(base, "-m", "venv", "--clear", str(folder))
        _call(str(python), "-m", "pip", "install", "--quiet", "--requirement", str(peer.file))
        write_atomically(ready, wanted)
    return python


def _is_here(requirement: str) -> bool:
    wanted = Requirement(requirement)
    try:
        return wanted.specifier.contains(metadata.version(wanted.name))
    except metadata.PackageNotFoundError:
        return False


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Absent(f"does not install: {_last_line(done.stderr)}", code="peer.does-not-install")


def _last_line(text: str) -> str:
    """Return what went wrong: the last error that is named, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|ERROR|Exception)\b", line)]
    return (named or lines or ["it does not say why"])[-1]


class Rival:
    """A peer in a separate process, which has prepared the task in `folder` and waits; its log goes there as well."""

    def __init__(self, python: Path, name: str, variant: str, folder: Path, cores: int) -> None:
        self._log = folder / f"{name}-{variant}.log"
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(cores), "JAX_PLATFORMS": "cpu"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.peers.play_{name}", folder, variant], cwd=folder, env=variables,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def go(self) -> Reading:
        """Have it do the whole task once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(GO)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._process.wait()
            said = self._log.read_text(encoding="utf-8", errors="replace")
            raise Absent(f"does not run: {_last_line(said)}", code="peer.does-not-run")
        return Reading(**json.loads(answer))

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
