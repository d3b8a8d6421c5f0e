"""What a simulation leaves open: nothing in process, and with Ray loopback alone, behind a secret each."""

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

from tests.deploy.processes import wait_until

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


@pytest.mark.slow
def test_a_run_of_a_users_own_model_listens_to_nobody_else_and_says_at_once_how_to_go_on_when_it_is_stopped(
    tmp_path: Path, umbel_home: Path
) -> None:
    """With Ray. The model lies where the user is, in a folder with names that umbel's own packages have."""
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "__init__.py").write_text("raise ImportError('the user has a client, too')")
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "beside.py").write_text("width = 1")
    with running(tmp_path, "--ray", "--nodes=1", "model=mine:model", "loss=mse") as (run, lines):
        (folder,) = (umbel_home / "runs").iterdir()
        found = listening(psutil.Process(run.pid))
        assert all(is_loopback(address) for address, _ in found)
        doors = {port: ask(port) for _, port in found}
        served = [port for port, answer in doors.items() if answer]
        assert len(served) == 1, "the SuperLink speaks HTTP, and Ray another language"
        assert set(doors[served[0]]) == {403}, "who has no secret starts no run"
        assert os_token(psutil.Process(run.pid))
        wait_until("first round", lambda: (folder / "latest.safetensors").exists() or None, 1200)
        run.send_signal(signal.SIGINT)
        assert run.stdout is not None
        lines += [line.rstrip() for line in run.stdout]
        assert run.wait() == 130, lines
    wait_until("end of all that was started", lambda: not started(umbel_home) or None, 600)
    assert lines[-2:] == [
        f"Stopped. The finished rounds are kept in {folder}",
        f"Go on with: umbel run {folder.name} --resume",
    ]
    assert (folder / "latest.safetensors").exists()
    assert not any("Warning" in line for line in lines)


def started(home: Path) -> list[psutil.Process]:
    """Return the processes that inherited a home: other tests may run the same programs at the same time."""
    running = psutil.process_iter(["environ"])
    return [one for one in running if (one.info["environ"] or {}).get("UMBEL_HOME") == str(home)]


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
