"""The containers of the Compose file, against a server that ships code of its own; an honest run follows.

They take a container engine: without one, these tests are skipped. `tests/deploy/test_processes.py` shows what the
same code does to a site with Flower's own executor.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.deploy.conftest import SHORT, TRAIN, write_site
from tests.deploy.processes import RUN_S, START_S, wait_until
from tests.deploy.thief import write_thief
from tools import compose_demo as demo
from umbel.client.bundle import Bundle
from umbel.deploy import certs
from umbel.protocol.flower import build_bundle

pytestmark = [
    pytest.mark.rest(twin="tests/deploy/test_executor.py::test_all_else_is_refused"),
    pytest.mark.timeout(5400),
]

CHARGES = f"""
import json
from collections import Counter
from pathlib import Path
from umbel.privacy.site.journal import Journal
print(json.dumps(Counter(row["kind"] for row in Journal(Path("{demo.LEDGER}")).rows())))
"""


class Stack(NamedTuple):
    """A server and three sites in containers, with the two commands that reach them."""

    compose: demo.Run
    flwr: demo.Run

    def run(self, app: Path, **run_config: Any) -> None:
        """Run an app until it has completed."""
        pairs = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in run_config.items())
        self.flwr("run", str(app), "demo", "--run-config", pairs)

        def ended() -> dict[str, Any] | None:
            newest: dict[str, Any] = json.loads(self.flwr("list", "demo", "--format", "json", capture=True))["runs"][0]
            return newest if newest["status"].startswith("finished") else None

        run = wait_until("end of the run", ended, RUN_S, pause=1.0)
        if run["status"] != "finished:completed":
            self.compose("logs", "--tail", "60")
            pytest.fail(f"{run['status']}: {run.get('status-details')}")

    def charges(self) -> list[dict[str, int]]:
        """Return how many releases of each kind each site has charged."""
        execute = ["exec", "-T"]
        return [
            json.loads(self.compose(*execute, f"{site}-app", "python", "-c", CHARGES, capture=True))
            for site in demo.SITES
        ]


def online(flwr: demo.Run) -> list[str]:
    """Return the numbers of the nodes that are online."""
    nodes = json.loads(flwr("supernode", "list", "demo", "--format", "json", capture=True))["nodes"]
    return [node["node-id"] for node in nodes if node["status"] == "online"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("containers")
    # The image's user reads them.
    home.chmod(0o755)
    compose = demo.composer(home, project="umbel-test")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("there is no container engine")
    for slope, site in enumerate(demo.SITES, 1):
        write_site(home / site, float(slope))
    keys = home / "certs"
    certs.make(keys, [], list(demo.SITES), owner=int(os.environ.get("IMAGE_UID", "1000")))
    compose("build", "image")
    try:
        with demo.started(compose, keys) as flwr:
            wait_until("sites online", lambda: len(online(flwr)) == len(demo.SITES), START_S, pause=1.0)
            yield Stack(compose, flwr)
    except demo.DemoError:
        compose("logs", "--tail", "40")
        raise
    finally:
        compose("down", "--volumes")


def test_a_gateless_bundle_is_refused_and_takes_nothing(stack: Stack, tmp_path: Path) -> None:
    thief, own = write_thief(tmp_path / "umbel"), Bundle.installed()
    assert own
    names = " ".join(online(stack.flwr))
    stack.run(thief, out="/umbel/loot.json", nodes=names)
    loot = json.loads(stack.compose("exec", "-T", "serverapp", "cat", "/umbel/loot.json", capture=True))
    sent = hashlib.sha256(build_bundle(thief)).hexdigest()
    reason = f"this site runs {own}; it has not reviewed bundle {sent}, which the server sent"
    assert loot == {node: reason for node in names.split()}
    assert stack.charges() == [{}, {}, {}]


def test_an_honest_run_completes_right_after(stack: Stack) -> None:
    # What the sites of the demonstration accept.
    accepted = SHORT | {"noise_multiplier": 10.0, "clipping": "public", "choice_epsilon": 1.0}
    stack.run(demo.APP, **accepted, rounds=1, clients_per_round=3 * TRAIN)
    # The validation client reports in the round, and once more at the end.
    assert stack.charges() == [{"train": TRAIN, "report": 2}] * 3
