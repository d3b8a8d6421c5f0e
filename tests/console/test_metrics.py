"""A site's metrics: what was asked, decided and charged, and nothing that depends on a client's data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client.metrics_core import Metric
from typer.testing import CliRunner

from tests.cli.commands.test_requests import Site
from tests.console.conftest import PUBLIC, books
from tests.helpers.errors import ended
from tests.helpers.series import values_of
from umbel.cli.main import parts
from umbel.client.readiness import Readiness
from umbel.console.books import Books
from umbel.console.metrics import Reading, series
from umbel.privacy.site.entry import Entry
from umbel.privacy.site.journal import Journal
from umbel.protocol.metrics import Labels, exposition

WHY_PUBLIC = {
    "umbel_site_ready": "depends on the ledger's and the log's files",
    "umbel_site_messages_total": "the server sent them, and read the decisions",
    "umbel_site_refusals_total": "codes of messages, policy and participations, which the server reads too",
    "umbel_site_releases_total": "the server asked for them and got them",
    "umbel_site_clients": "the server chose them",
    "umbel_site_requests": "the site's people decided them",
    "umbel_site_runs_total": "the server started them",
    "umbel_site_budget_left_ratio": "follows from the participations that the server chose",
    "umbel_site_last_message_timestamp_seconds": "the server sent it",
    "umbel_site_disk_free_bytes": "depends on the machine",
    "umbel_site_certificate_days_left": "certificates are public",
}


def of_all(site: Site) -> list[Metric]:
    return series(Reading(lambda: books(site)), Readiness(site.ledger), {})


def of(site: Site) -> dict[str, dict[Labels, float]]:
    return values_of(of_all(site))


def test_they_count_what_the_log_and_the_ledger_hold_and_every_series_is_public_for_a_reason(site: Site) -> None:
    found = of(site)
    assert found.keys() == WHY_PUBLIC.keys()
    assert found["umbel_site_releases_total"] == {(): 3}
    assert found["umbel_site_clients"] == {(): 2}
    assert found["umbel_site_messages_total"]["train", "answered"] == 2
    assert found["umbel_site_refusals_total"] == {("refused.waits",): 2}
    assert found["umbel_site_requests"][("waiting",)] == 1
    # Of a budget of 8, client 0 spent 3.6 and client 1 spent 1.8.
    left = found["umbel_site_budget_left_ratio"]
    assert [left["0",], left["1",]] == pytest.approx([1 - 3.6 / 8, 1 - 1.8 / 8], abs=1e-5)


def test_two_sites_with_other_data_have_the_same_metrics(tmp_path: Path, run_config: dict[str, Any]) -> None:
    """Only requests, decisions and charges count, and the data do not."""
    import numpy as np

    texts = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        Journal.create(folder / "ledger.jsonl")
        own = Site(folder, run_config, approve="policy")
        file = folder / "own" / "targets.npy"
        np.save(file, np.random.default_rng(seed).normal(size=np.load(file).shape).astype(np.float32) * 10**seed)
        own.train()
        own.evaluate()
        told = exposition(lambda own=own: of_all(own)).decode()
        texts.append([line for line in told.splitlines() if not re.search("bytes|timestamp", line)])
    assert texts[0] == texts[1]
    # Nor is a code told that may depend on data.
    (folder / "own" / "features.npy").write_bytes(b"broken")
    own.train()
    assert of(own)["umbel_site_refusals_total"] == {("other",): 1}


def test_a_server_cannot_make_series_with_other_types_of_messages(site: Site) -> None:
    log = Journal(site.ledger)
    for number in range(3):
        log.record(Entry("9", f"train.x{number}"), False)
    found = of(site)["umbel_site_messages_total"]
    assert found["other", "refused"] == 3
    assert {message for message, _ in found} == {"approval", "other", "query", "train"}


def test_a_full_disk_and_unreadable_files_make_the_site_not_ready(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
        found = of(site)
        assert found["umbel_site_ready"] == {(): 0}
        assert found["umbel_site_releases_total"] == {(): 3}, "its ledger can still be read"
    # A node reads the policy's file for each message.
    file, own = site.ledger.parent / "policy.toml", site.ledger.parent / "own"
    policy = f'data-path = "{own}"\nledger-path = "{site.ledger}"\nrole = "split"\nbudget = '
    file.write_text(f"{policy}9.0\n# end\n")
    reading, readiness = Reading(lambda: Books.of(f'policy-file="{file}"')), Readiness(site.ledger)
    for budget in ("7.5", "5.0", "nothing"):
        file.write_text(f"{policy}{budget}\n# end\n")
        found = values_of(series(reading, readiness, {}))
        if budget == "nothing":
            assert found["umbel_site_ready"] == {(): 0}
        else:
            left = 1 - 3.6 / float(budget)
            assert found["umbel_site_budget_left_ratio"]["0",] == pytest.approx(left, abs=1e-5)
    site.ledger.write_bytes(site.ledger.read_bytes()[:-3] + b"x\n")
    assert of(site)["umbel_site_ready"] == {(): 0}


def test_the_command_prints_them_and_writes_nothing(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty log would make the site refuse: its ledger would count as lost."""

    def printed(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(parts, ["metrics", *words])
        return done.exit_code, done.output

    words = f'data-path="{site.ledger.parent / "own"}" ledger-path="{site.ledger}" role="split"'
    assert "\numbel_site_releases_total 3.0\n" in printed(words)[1]
    ended(*printed(words, "--listen", "nowhere"), "metrics.address")
    reading = Reading(lambda: books(site))
    found = reading.series()
    assert reading.series() is found, "the books are read again only after a change"
    site.train(clients=(1,), **PUBLIC)
    assert reading.series() != found
    (new := tmp_path / "new").mkdir()
    monkeypatch.setenv("UMBEL_HOME", str(new))
    assert "\numbel_site_ready 1.0\n" in printed(f'data-path="{new}"')[1]
    assert list(new.iterdir()) == []
