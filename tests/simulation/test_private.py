"""What a simulation leaves open: nothing in process, and no more with Ray than the docs say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.flower import end, started
from tests.deploy.processes import wait_until
from tests.helpers.commands import blocks
from tests.helpers.ports import free_port
from tests.helpers.sources import ROOT

COMMAND = [str(Path(sys.executable).parent / "umbel"), "run", "rounds=100000", "restarts=1"]
OWN = """
import torch


def model():
    from beside import width
    return torch.nn.Linear(2, width, bias=False)
"""


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Return the addresses at which a process and all that it started listen."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        try:
            found |= {tuple(line.laddr) for line in one.net_connections("inet") if line.status == psutil.CONN_LISTEN}
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


def is_loopback(address: str) -> bool:
    found = ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def heeds_interrupts() -> None:
    """What is started in the background of a shell's script ignores them, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def running(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Yield a run that has done a round, and its lines so far; end it with the block."""
    run = subprocess.Popen(
        [*COMMAND, *options], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, preexec_fn=heeds_interrupts,
    )  # fmt: skip
    try:
        assert run.stdout is not None
        lines: list[str] = []
        for line in run.stdout:
            lines.append(line.rstrip())
            if line.startswith("round "):
                break
        assert lines[-1].startswith("round "), lines
        yield run, lines
    finally:
        run.kill()
        run.wait()


@pytest.mark.slow
def test_a_run_in_process_listens_to_nobody(tmp_path: Path) -> None:
    with running(tmp_path, "clients-per-round=2") as (run, _):
        assert listening(psutil.Process(run.pid)) == set()


@pytest.mark.rest
def test_a_run_of_a_users_own_model_says_at_once_how_to_go_on_when_it_is_stopped(
    tmp_path: Path, umbel_home: Path
) -> None:
    """The model lies where the user is, in a folder with names that umbel's own packages have."""
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "__init__.py").write_text("raise ImportError('the user has a client, too')")
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "beside.py").write_text("width = 1")
    with running(tmp_path, "model=mine:model", "loss=mse") as (run, lines):
        (folder,) = (umbel_home / "runs").iterdir()
        wait_until("first round", lambda: (folder / "latest.safetensors").exists() or None, 1200)
        run.send_signal(signal.SIGINT)
        assert run.stdout is not None
        lines += [line.rstrip() for line in run.stdout]
        assert run.wait() == 130, lines
    assert lines[-2:] == [
        f"Stopped. The finished rounds are kept in {folder}",
        f"Resume it with: umbel run {folder.name} --resume",
    ]
    assert not any("Warning" in line for line in lines)


@pytest.mark.rest(twin="tests/simulation/test_private.py::test_a_run_in_process_listens_to_nobody")
def test_what_flower_starts_by_itself_listens_as_the_docs_say(tmp_path: Path) -> None:
    """To this machine alone, with the page's variables; its Ray asks for a token, and its SuperLink for nothing."""
    page = (ROOT / "docs" / "guides" / "scale.md").read_text(encoding="utf-8")
    shown = next(block for block in blocks(page, "bash") if "flwr run . " in block)
    script = "\n".join(line for line in shown.splitlines() if line.startswith(("export ", "flwr ")))
    script = f"{script.partition(' #')[0]} -c 'clients-per-round=2 {' '.join(COMMAND[2:])}'"
    port, home = free_port(), tmp_path / "flwr"
    variables = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    run = subprocess.Popen(["bash", "-ec", script], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        next(line for line in run.stdout if " round " in line)
        [link] = [one for one in started(str(home)) if "--simulation" in one.cmdline()]
        found = listening(link)
        assert all(is_loopback(address) for address, _ in found), found
        answers = ask(port)
        assert answers
        assert 403 not in answers, "every user of this machine starts runs"
        assert os_token(link)
    finally:
        end(str(home))
        run.wait()


def ask(port: int) -> list[int]:
    """Return what a stranger's requests to start and to list runs are answered; nothing where HTTP is not spoken."""
    try:
        if not httpx.get(f"http://127.0.0.1:{port}/health").is_success:
            return []
        paths = ("start-run", "list-runs", "register-node")
        return [httpx.post(f"http://127.0.0.1:{port}/v1/control/{path}").status_code for path in paths]
    except httpx.HTTPError:
        return []


def os_token(process: psutil.Process) -> bool:
    """Return whether every process of Ray's was started with a token that it asks for."""
    of_ray = [one for one in process.children(recursive=True) if "raylet" in one.name() or "gcs" in one.name()]
    modes = [one.environ().get("RAY_AUTH_MODE") for one in of_ray]
    return bool(modes) and set(modes) == {"token"} and all(one.environ().get("RAY_AUTH_TOKEN") for one in of_ray)
