"""Three sites, a server and a relay as processes. The relay dies in a run, and comes back."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.deploy.conftest import CLIENTS, SHORT, write_site
from tests.deploy.processes import RUN_S, START_S, STOP_S, Deployment, wait_until
from tests.helpers.paper import ACCEPTED
from tests.strategies.test_secure_average import keys
from umbel.deploy import certs
from umbel.privacy.anonymous.link import RelayLink
from umbel.protocol.errors import RelayError
from umbel.simulation.superlink import free_port

pytestmark = [pytest.mark.rest, pytest.mark.timeout(5400)]

NAMES = ("bern", "kiel", "york")
ALL = 3 * (CLIENTS - 1)
_ANSWERS = """
    SELECT answer.src_node_id, part.object_id, part.content FROM message_res AS answer
    JOIN object_children ON object_children.parent_id = answer.message_id
    JOIN objects AS part ON part.object_id = object_children.child_id
    WHERE answer.message_type = 'train' AND part.is_available
"""


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
            command = [sys.executable, "-m", "umbel", "relay", "start", *words]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
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


def answers_in(database: Path) -> set[tuple[int, str, bytes]]:
    """Return the answers to training that a server's database holds: node, digest of the content, and content."""
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return {*connection.execute(_ANSWERS)}
    except sqlite3.OperationalError:  # another process writes
        return set()


def test_a_relay_that_dies_stops_no_run(tmp_path: Path) -> None:
    """Nor does the server's database, while the run trains and afterwards, tell who released what."""
    paths, listed = keys(tmp_path / "keys", *NAMES)
    relay = Relay(tmp_path / "relay", listed)
    try:
        with Deployment(tmp_path / "deployment", database=True) as deployment:
            for name in NAMES:
                policy = ACCEPTED | {
                    "data-path": write_site(tmp_path / "data" / name, len(name)), "release": "anonymous",
                    "parties": listed, "party-key": paths[name], "relay": relay.url, "relay-ca": relay.ca,
                    "anonymous-least": ALL,
                }  # fmt: skip
                deployment.start_node(name, **policy)
            deployment.wait_until_online()
            config = SHORT | {
                "clipping": "public", "choice_epsilon": 1.0, "rounds": 12, "clients_per_round": ALL,
                "anonymous_least": ALL, "relay": relay.url, "relay_ca": relay.ca,
            }  # fmt: skip
            run = deployment.submit(**config)
            database = deployment.superlink.folder / "state.db"
            answers = set[tuple[int, str, bytes]]()

            def watched() -> bool:
                answers.update(answers_in(database))
                return len({node for node, *_ in answers}) == len(NAMES) and bool(run.history)

            wait_until("a first round", watched, RUN_S, 0.02)
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
            # All answers of all sites were the same few bytes. Deleted ones are still in the files.
            assert len({(digest, content) for _, digest, content in answers}) == 1
            left = b"".join(file.read_bytes() for file in database.parent.glob("state.db*"))
            assert next(iter(answers))[2] in left
            first = load_file(run.folder / "releases.safetensors")
            groups = first["first.groups"]
            # The mean of a single release is the next hypothesis, which the server sends to all.
            rows = first["first.releases"][np.bincount(groups)[groups] > 1]
            rows = rows[rows.all(1)]
            assert len(rows)
            for row in rows:
                assert not any(row.astype(kind).tobytes() in left for kind in (np.float32, np.float64))
            # What the relay has said names no site, no run and no address.
            for word in (*NAMES, run.id, "127.0.0.1:5"):
                assert word not in relay.log
            assert relay.log.count(f"handed on a batch of {ALL} releases") == sum(entry["moved"] for entry in trained)
    finally:
        relay.kill()
