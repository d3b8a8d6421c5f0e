"""Readiness, apart from liveness."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from umbel.client.readiness import Readiness
from umbel.deploy import flower
from umbel.privacy.site.entry import Entry
from umbel.privacy.site.journal import Journal
from umbel.protocol.errors import DiskError


@pytest.mark.parametrize(
    ("fault", "status", "content"),
    [
        (None, 200, {"ready": True}),
        (DiskError("full, in /a/secret/folder", code="disk.full"), 503, {"ready": False, "code": "disk.full"}),
    ],
)
def test_the_code_of_a_fault_is_told_beside_whether_the_process_is_alive(
    monkeypatch: pytest.MonkeyPatch, fault: Any, status: int, content: dict[str, Any]
) -> None:
    health = importlib.import_module("flwr.supercore.routers.health").router
    monkeypatch.setattr(health, "routes", [*health.routes])
    flower._say_ready(lambda: fault)
    app = importlib.import_module("flwr.supernode.main").create_app()

    async def ask(path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://site") as asking:
            return await asking.get(path)

    ready = asyncio.run(ask("/ready"))
    assert (ready.status_code, ready.json()) == (status, content)
    assert asyncio.run(ask("/health")).status_code == 200


def test_a_ledger_that_is_gone_after_the_first_message_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path))
    readiness = Readiness.of({"data-path": str(tmp_path)})
    assert readiness
    assert readiness.fault() is None
    ledger = Journal.create(tmp_path / "ledger.jsonl").path
    Journal(ledger).record(Entry("7", "train"), True)
    assert readiness.fault() is None
    ledger.unlink()
    fault = readiness.fault()
    assert fault
    assert fault.code == "ledger.behind"
