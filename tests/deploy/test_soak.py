"""A year of a federation in minutes: sites come, go, fill their disks and restore old backups, and no charge is lost.

Time is simulated where the sites read it. Every day the server does a signed run over the sites that are there.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from flwr.app import Error, Message

import umbel.privacy.site.consent
import umbel.privacy.site.journal
from tests.helpers.datasets import manifest
from tests.helpers.keys import pair
from tests.helpers.ledgers import forget
from tests.helpers.runs import run_app
from umbel.client.app import app
from umbel.data import offsets_of, write_dataset
from umbel.deploy import certs
from umbel.privacy.accounting.guarantee import pure_spent
from umbel.privacy.site.charges import read
from umbel.privacy.site.config import SERVER_CA
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.policy import Policy
from umbel.privacy.site.totals import from_ranges
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import FleetError
from umbel.protocol.release import Kind
from umbel.protocol.run_config import RunConfig
from umbel.protocol.signatures import server_of, sign
from umbel.simulation.grid import InProcessGrid

pytestmark = [
    pytest.mark.rest(
        twin="tests/privacy/site/test_journal_restored.py::test_what_left_is_paid_for_whenever_the_process_is_killed"
    ),
    pytest.mark.timeout(7200),
]

DAYS, SITES, CLIENTS, SEED = int(os.environ.get("SOAK_DAYS", 400)), 20, 6, 7
BUDGET = 40.0
START = datetime(2026, 1, 1, 22, tzinfo=UTC)
RUN: dict[str, Any] = {
    "dataset": "", "model": "linear", "loss": "mse", "rounds": 2, "clients-per-round": 20, "min-releases": 1,
    "noise-multiplier": 10.0, "clipping": "public norm=1.0", "choice-epsilon": 0.2, "restarts": 1,
    "wait": "seconds=3.0",
    "device": "cpu", "max-participations": 2, "local-epochs": 1,
}  # fmt: skip
GROWTH, EARLY = 1.1, 20
"""Most growth of memory after the first days, of which the journals that are open keep a part."""


@dataclass
class Year:
    """The state of the simulated world."""

    now: datetime = START
    gone: dict[int, int] = field(default_factory=dict)  # site -> the day of its return
    full: set[int] = field(default_factory=set)  # sites whose disk is full
    behind: set[int] = field(default_factory=set)  # sites that restored an old backup
    events: Counter[str] = field(default_factory=Counter)


class Sites(InProcessGrid):
    """The sites that are there; the journal of one whose disk is full does not grow."""

    def __init__(self, configs: list[dict[str, Any]], run_config: dict[str, Any], year: Year) -> None:
        super().__init__(app, run_config, node_configs=configs)
        self.year = year

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.contexts if node - 100 not in self.year.gone]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id - 100
        if node in self.year.gone:  # it left during the run
            reply = Message(Error(3, "gone"), reply_to=message)
            self.numbered(reply)
            return reply
        with pytest.MonkeyPatch.context() as patch:
            if node in self.year.full:
                patch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
            return super()._answer(message)


def test_a_year_loses_no_charge_and_leaves_no_site_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path / "server"))
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest would keep a year's lines in memory
    rng, year = np.random.default_rng(SEED), Year()

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls.fromtimestamp(year.now.timestamp(), tz)

    for module in (umbel.privacy.site.consent, umbel.privacy.site.journal):
        monkeypatch.setattr(module, "datetime", Clock)
    certs.make(tmp_path / "certs", [], [])
    monkeypatch.setenv(SERVER_CA, str(authority := tmp_path / "certs" / "ca.crt"))
    key, public = pair(tmp_path / "ann")
    configs = [_site(tmp_path / f"site-{i}", i, public) for i in range(SITES)]
    ledgers = [Path(config["ledger-path"]) for config in configs]
    grid = Sites(configs, RUN, year)
    released = memory = 0
    for day in range(DAYS):
        year.now = START + timedelta(days=day)
        _events(day, rng, year, ledgers)
        config = RunConfig.parse(RUN | {"seed": day}).unsigned()
        config["signature"] = sign(config, key, year.now + timedelta(days=1), server_of(authority))
        for context in grid.contexts.values():
            context.run_config, context.run_id = config, 1000 + day
        before, releases = [_charges(ledger) for ledger in ledgers], 0
        try:
            run = run_app(config, grid)
            releases = sum(entry["releases"] for entry in run.history)
            shutil.rmtree(run.folder)
        except FleetError:
            year.events["days without a round"] += 1
            shutil.rmtree(tmp_path / "server" / "runs", ignore_errors=True)
        after = [_charges(ledger) for ledger in ledgers]
        # Here, since a journal that is restored and repaired knows totals, but no longer which run asked.
        charged = sum(charges[str(1000 + day), Kind.TRAIN] for charges in after)
        assert charged >= releases, f"day {day}: the server counted {releases} releases, and sites {charged} charges"
        released += releases
        for i, charges in enumerate(after):
            assert i not in year.full | year.behind or charges == before[i], "no charge without an answer"
        if day == EARLY:
            gc.collect()
            memory = psutil.Process().memory_info().rss
        if day % 50 == 49:
            _check(ledgers, year)
    _restore(year, ledgers)  # also after the last day
    _check(ledgers, year)
    gc.collect()
    now = psutil.Process().memory_info().rss
    told = f"{DAYS} days: {dict(year.events)}; {released} releases"
    print(f"\n{told}; memory {memory >> 20} -> {now >> 20} MiB")
    accounts = [account for ledger in ledgers for account in Journal(ledger).accounts().values()]
    charged = sum(times for account in accounts for release, times in account.items() if release.kind is Kind.TRAIN)
    assert charged >= released > 10 * DAYS
    assert DAYS <= EARLY or now < GROWTH * memory


def _site(folder: Path, i: int, public: str) -> dict[str, Any]:
    features = np.random.default_rng(i).uniform(-1, 1, (3 * CLIENTS, 2)).astype(np.float32)
    targets = (features @ np.array([1, 2])).astype(np.float32)
    data, ledger, policy = folder / "own", folder / "ledger.jsonl", folder / "policy.toml"
    write_dataset(data, manifest(CLIENTS - 1, 1, model="linear"), features, targets, offsets_of([3] * CLIENTS))
    Journal.create(ledger)
    policy.write_text(
        f'data-path = "{data}"\nledger-path = "{ledger}"\nrole = "split"\nbudget = {BUDGET}\n'
        f'[researchers]\nann = "{public}"\n# end\n'
    )
    policy.chmod(0o600)
    return {"policy-file": str(policy), "ledger-path": str(ledger), "data-path": str(data)}


def _events(day: int, rng: np.random.Generator, year: Year, ledgers: list[Path]) -> None:
    """Let a day's accidents happen, and the operators mend those of the days before."""
    year.gone = {site: back for site, back in year.gone.items() if back > day}
    year.full.clear()
    _restore(year, ledgers)
    for site, ledger in enumerate(ledgers):
        if rng.random() < 0.02 and site not in year.gone:
            year.gone[site] = day + int(rng.integers(1, 20))
            year.events["sites that left"] += 1
        if rng.random() < 0.01:
            year.full.add(site)
            year.events["full disks"] += 1
        backup = ledger.with_suffix(".backup")
        if day % 30 == site:
            shutil.copy(ledger, backup)
        if rng.random() < 0.01 and backup.exists():
            if backup.stat().st_size < ledger.stat().st_size:
                year.behind.add(site)
            shutil.copy(backup, ledger)
            forget()
            year.events["old backups"] += 1


def _restore(year: Year, ledgers: list[Path]) -> None:
    """Repair journals that an old backup replaced."""
    for site in year.behind:
        Journal(ledgers[site], opened=False).repair(Policy(), map(ClientInDataset, range(CLIENTS)))
        year.events["journals repaired"] += 1
    year.behind.clear()


def _check(ledgers: list[Path], year: Year) -> None:
    """Every journal is intact, and no client is above its budget."""
    for ledger in (ledger for i, ledger in enumerate(ledgers) if i not in year.behind):
        accounts = Journal(ledger).accounts()
        assert all(pure_spent(account) <= Fraction(BUDGET) for account in accounts.values())
        forget()
        Journal(ledger).index.unlink(missing_ok=True)
        assert Journal(ledger).accounts() == accounts


def _charges(ledger: Path) -> Counter[tuple[str, Kind]]:
    """Return how many charges the lines of a journal have, by run and kind: it may be one that its site refuses."""
    stat = ledger.stat()
    return _charges_in(ledger, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=2 * SITES)  # most journals are asked about twice between two changes
def _charges_in(ledger: Path, *_version: int) -> Counter[tuple[str, Kind]]:
    """Read only the lines that have charges, since a year's journals are long."""
    charges: Counter[tuple[str, Kind]] = Counter()
    for line in (json.loads(line) for line in ledger.read_bytes().splitlines() if b'"charges"' in line):
        if line["kind"] == "charges":
            charges[line["run"], read(line["release"]).kind] += len(from_ranges(line["clients"]))
    return charges
