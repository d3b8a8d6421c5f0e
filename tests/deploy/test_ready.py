"""Readiness, apart from liveness."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from umbel.client.readiness import Readiness
from umbel.deploy.ready import Ready
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.site_log import Entry, SiteLog
from umbel.privacy.gate.store import beside
from umbel.protocol.errors import DiskError


async def own(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"own"})


@pytest.mark.parametrize(
    ("fault", "path", "expected"),
    [
        (None, "/ready", (200, '{"ready": true}')),
        (
            DiskError("full, in /a/secret/folder", code="disk.full"),
            "/ready",
            (503, '{"ready": false, "code": "disk.full"}'),
        ),
        (DiskError("full", code="disk.full"), "/health", (200, "own")),
    ],
)
def test_the_code_of_a_fault_is_told_and_the_process_is_alive(fault: Any, path: str, expected: tuple[int, str]) -> None:
    async def ask() -> tuple[int, str]:
        transport = httpx.ASGITransport(Ready(own, lambda: fault))
        async with httpx.AsyncClient(transport=transport, base_url="http://site") as asking:
            answer = await asking.get(path)
            return answer.status_code, answer.text

    assert asyncio.run(ask()) == expected


def test_a_ledger_that_is_gone_after_the_first_message_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path))
    readiness = Readiness.of({"data-path": str(tmp_path)})
    assert readiness
    assert readiness.fault() is None
    ledger = Ledger.create(tmp_path / "ledger.sqlite").path
    SiteLog(beside(ledger)).answered(Entry("7", "train"), True)
    assert readiness.fault() is None
    ledger.unlink()
    fault = readiness.fault()
    assert fault
    assert fault.code == "ledger.missing"
