"""Readiness over HTTP, apart from liveness: ``GET /ready`` beside Flower's ``GET /health``.

``/health`` answers 200 as long as the process runs. ``/ready`` answers 200 if it can do its work, and otherwise 503
with the code of the reason. The reason in words is in the log: whoever asks may be a stranger.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from umbel.protocol.errors import UmbelError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
Fault = Callable[[], UmbelError | None]
"""Returns why a process is not ready; None if it is."""

PATH = "/ready"


class Ready:
    """An ASGI application that answers `PATH` itself, and passes all else on."""

    def __init__(self, app: Asgi, fault: Fault) -> None:
        self._app, self._fault = app, fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        fault = await asyncio.to_thread(self._fault)
        content = {"ready": fault is None} | ({"code": fault.code} if fault else {})
        await reply(send, 503 if fault else 200, content)


async def reply(send: Send, status: int, content: dict[str, Any]) -> None:
    """Send a reply in JSON."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
