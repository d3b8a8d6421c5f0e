"""What a simulation leaves open: nothing in process, and with Ray loopback alone, behind a secret each.

What Flower starts by itself is as the README says.
"""

from __future__ import annotations

import os
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cli.commands.test_run import environment
from tests.helpers.commands import blocks
from tests.helpers.sources import ROOT
from umbel.simulation.reaper import end, started
from umbel.simulation.superlink import free_port

COMMAND = [str(Path(sys.executable).parent / "umbel"), "run", "rounds=100000", "restarts=1", "clients-per-round=2"]


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


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--ray", "--nodes=1"]], ids=["in process", "ray"])
def test_nobody_else_is_listened_to(options: list[str], tmp_path: Path) -> None:
    run = subprocess.Popen(
        [*COMMAND, *options], cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    )
    try:
        assert run.stdout is not None
        line = next(line for line in run.stdout if line.startswith("round "))
        found = listening(psutil.Process(run.pid))
        assert all(is_loopback(address) for address, _ in found), line
        if not options:
            assert found == set()
            return
        doors = {port: ask(port) for _, port in found}
        served = [port for port, answer in doors.items() if answer]
        assert len(served) == 1, "the SuperLink speaks HTTP, and Ray another language"
        assert set(doors[served[0]]) == {403}, "who has no secret starts no run"
        assert os_token(psutil.Process(run.pid))
    finally:
        run.kill()
        run.wait()


@pytest.mark.slow
def test_what_flower_starts_by_itself_listens_as_the_readme_says(tmp_path: Path) -> None:
    """To this machine alone, with the README's variables; its Ray asks for a token, and its SuperLink for nothing."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = next(block for block in blocks(readme, "bash") if "flwr run . " in block)
    script = "\n".join(line for line in shown.splitlines() if line.startswith(("export ", "flwr ")))
    script = f"{script.partition(' #')[0]} -c '{' '.join(COMMAND[2:])}'"
    port, home = free_port(), tmp_path / "flwr"
    variables = environment(tmp_path) | {
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


SWEEP = """
import os, psutil, ray
from tests.simulation.test_private import is_loopback, listening, os_token
from umbel.research.experiments import sweep
with sweep._cluster():
    assert ray.get(ray.remote(lambda: 3).remote()) == 3
    found = listening(psutil.Process())
    assert found and all(is_loopback(address) for address, _ in found), found
    assert os_token(psutil.Process())
assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & os.environ.keys(), "another cluster has another token"
"""


@pytest.mark.slow
def test_nobody_else_is_listened_to_in_a_sweep(tmp_path: Path) -> None:
    settings = environment(tmp_path) | {"PYTHONPATH": str(ROOT)}
    clean = {name: value for name, value in settings.items() if not name.startswith("RAY_")}
    subprocess.run([sys.executable, "-c", SWEEP], cwd=tmp_path, env=clean, check=True)


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
