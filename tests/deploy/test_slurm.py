"""The Slurm script of a site, run by bash with stand-ins for umbel and Slurm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import commands
from umbel.protocol.project import PACKAGE

SCRIPT = PACKAGE / "deploy" / "site.sbatch"
# It says that it runs, and ends once it is asked to.
STAYS = """
trap 'echo left >> "$OUT/calls"; exit 0' TERM
echo "$@" >> "$OUT/calls"; echo > "$OUT/started"
while :; do sleep 0.05; done
"""
pytestmark = pytest.mark.skipif(
    not (shutil.which("bash") and shutil.which("flock")), reason="bash and flock are missing"
)

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the script with a program in umbel's place, which writes to the pipe "started"."""
    begun: list[subprocess.Popen[str]] = []
    os.mkfifo(tmp_path / "started")

    def run(umbel: str, **more: str) -> subprocess.Popen[str]:
        for name, text in (("umbel", umbel), ("scontrol", 'echo "$@" >> "$OUT/requeued"')):
            (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / name).chmod(0o755)
        said = {"SERVER": "s.example.org:8000", "CERTS": "/certs", "KEY": "/key", "SLURM_JOB_ID": "41"}
        own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path), "UMBEL_HOME": str(tmp_path / "home")}
        job = subprocess.Popen(
            ["bash", str(SCRIPT)], env=said | own | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        begun.append(job)
        return job

    yield run
    for job in begun:
        job.kill()


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_the_site_leaves_before_the_job_ends(start: Start, tmp_path: Path, number: int, requeued: bool) -> None:
    job = start(STAYS)
    (tmp_path / "started").read_text()
    job.send_signal(number)
    output, _ = job.communicate()
    assert (job.returncode, output) == (0, "the site has left\n")
    called, left = (tmp_path / "calls").read_text().splitlines()
    assert called.split() == [
        "site", "start", "--superlink", "s.example.org:8000", "--root-certificates", "/certs/ca.crt",
        "--auth-supernode-private-key", "/key", "--port", "20041",
        "--node-config", 'policy-file="/etc/umbel/policy.toml"',
    ]  # fmt: skip
    commands.check(["umbel", *called.split()])
    assert left == "left", "the site ended by itself"
    assert (tmp_path / "requeued").exists() == requeued


def test_a_site_that_ends_is_started_again(start: Start, tmp_path: Path) -> None:
    job = start('[ -e "$OUT/second" ] || { touch "$OUT/second"; exit 1; }' + STAYS, PAUSE="0")
    (tmp_path / "started").read_text()
    job.terminate()
    assert job.wait() == 0


def test_wrong_options_end_the_job(start: Start) -> None:
    job = start("exit 2")
    assert job.wait() == 2


def test_two_jobs_never_share_a_ledger(start: Start, tmp_path: Path) -> None:
    first = start(STAYS)
    (tmp_path / "started").read_text()
    output, _ = start(STAYS).communicate()
    assert "another job runs this site" in output
    first.terminate()
    first.wait()


def test_what_is_missing_is_named(start: Start) -> None:
    job = start(STAYS, SERVER="")
    assert "set SERVER" in job.communicate()[0]
    assert job.returncode != 0


def test_shellcheck_finds_no_fault() -> None:
    if not (shellcheck := shutil.which("shellcheck")):
        pytest.skip("there is no shellcheck")
    done = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
