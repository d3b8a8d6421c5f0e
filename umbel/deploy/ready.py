"""Readiness, apart from liveness: ``GET /ready`` beside Flower's ``GET /health``, and for an executor gRPC's health.

``/health`` answers 200 as long as the process runs. ``/ready`` answers 200 if it can do its work, and otherwise 503
with the code of the reason. The reason in words is in the log: whoever asks may be a stranger.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.responses import JSONResponse

from umbel.protocol.errors import UmbelError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
Fault = Callable[[], UmbelError | None]
"""Returns why a process is not ready; None if it is."""

PATH, READY = "/ready", "ready"
"""Where it is asked for over HTTP, and its name in gRPC's health protocol."""

_THREADS = 2
_serving: list[Any] = []  # a server ends when nothing refers to it


def endpoint(fault: Fault) -> Callable[[], JSONResponse]:
    """Return the function that answers `PATH` in an application."""

    def ready() -> JSONResponse:
        found = fault()
        content = {"ready": found is None} | ({"code": found.code} if found else {})
        return JSONResponse(content, 503 if found else 200)

    return ready


def serve_health(address: str, fault: Fault) -> None:
    """Serve gRPC's health protocol from threads of this process, which is alive under any name but `READY`."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    status = health_pb2.HealthCheckResponse

    class Health(health_pb2_grpc.HealthServicer):
        def Check(self, request: Any, context: Any) -> Any:
            ready = request.service != READY or fault() is None
            return status(status=status.SERVING if ready else status.NOT_SERVING)

    server = grpc.server(ThreadPoolExecutor(_THREADS))
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    server.add_insecure_port(address)
    server.start()
    _serving.append(server)


async def reply(send: Send, status: int, content: dict[str, Any]) -> None:
    """Send a reply in JSON, and close the connection: what is left of the request is not read."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
