"""Readiness, apart from liveness."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from umbel.deploy.ready import Ready
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
