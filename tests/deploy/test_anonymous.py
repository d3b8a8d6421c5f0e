"""Three sites, a server and a relay as processes. The relay dies in a run, and comes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.conftest import CLIENTS, SHORT, write_site
from tests.deploy.processes import RUN_S, START_S, STOP_S, Deployment, wait_until
from tests.helpers.paper import ACCEPTED
from tests.strategies.test_secure_average import keys
from umbel.deploy import certs
from umbel.privacy.anonymous.link import RelayLink
from umbel.protocol.errors import RelayError
from umbel.simulation.superlink import free_port

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(5400)]

NAMES = ("bern", "kiel", "york")
ALL = 3 * (CLIENTS - 1)


class Relay:
    """A relay as a process, whose certificate its own operator made."""

    def __init__(self, folder: Path, listed: str) -> None:
        certs.make(folder, [], [])
        self.port, self.folder, self.ca = free_port(), folder, str(folder / "ca.crt")
        self.url = f"https://127.0.0.1:{self.port}"
        lines = [f'{name} = "{line}"' for name, line in (pair.split("=", 1) for pair in listed.split())]
        (folder / "sites.toml").write_text("\n".join(["[parties]", *lines]), encoding="utf-8")
        self.start()

    @property
    def log(self) -> str:
        """Its output so far."""
        return (self.folder / "log").read_text(encoding="utf-8")

    def start(self) -> None:
        options = {
            "--sites": self.folder / "sites.toml", "--least": 2, "--certificate": self.folder / "server.crt",
            "--key": self.folder / "server.key", "--host": "127.0.0.1", "--port": self.port,
        }  # fmt: skip
        words = [str(word) for option in options.items() for word in option]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "umbel", "relay", *words], stdout=log, stderr=log)
        wait_until("relay", self._there, START_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_S)

    def _there(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            RelayLink(self.url, self.ca).check()
        except RelayError:
            return False
        return True


def test_a_relay_that_dies_stops_no_run(tmp_path: Path) -> None:
    paths, listed = keys(tmp_path / "keys", *NAMES)
    relay = Relay(tmp_path / "relay", listed)
    try:
        with Deployment(tmp_path / "deployment") as deployment:
            for name in NAMES:
                policy = ACCEPTED | {
                    "data-path": write_site(tmp_path / "data" / name, len(name)), "release": "anonymous",
                    "parties": listed, "party-key": paths[name], "relay": relay.url, "relay-ca": relay.ca,
                    "anonymous-least": ALL,
                }  # fmt: skip
                deployment.start_node(name, **policy)
            deployment.wait_until_online()
            config = SHORT | {
                "clipping": "public", "choice_epsilon": 1.0, "rounds": 6, "clients_per_round": ALL,
                "anonymous_least": ALL, "relay": relay.url, "relay_ca": relay.ca,
            }  # fmt: skip
            run = deployment.submit(**config)
            wait_until("a first round", lambda: run.history, RUN_S)
            relay.kill()
            wait_until("a round without releases", lambda: not run.history[-1]["releases"], RUN_S)
            relay.start()
            assert deployment.wait(run) == "finished:completed"
            trained = [entry for entry in run.history if entry["asked"]]
            assert [entry["moved"] for entry in trained] == [entry["releases"] == ALL for entry in trained]
            assert {entry["releases"] for entry in trained} == {0, ALL}
            assert trained[0]["moved"]
            assert trained[-1]["moved"]
            assert {row["kind"] for row in deployment.nodes["bern"].charges} == {"train"}
            # What the relay has said names no site, no run and no address.
            for word in (*NAMES, run.id, "127.0.0.1:5"):
                assert word not in relay.log
            assert relay.log.count(f"handed on a batch of {ALL} releases") == sum(entry["moved"] for entry in trained)
    finally:
        relay.kill()
