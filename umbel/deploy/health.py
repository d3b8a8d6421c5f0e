"""Exit with 0 if a process reports that it is ready, for the containers' health checks; otherwise print why.

python umbel/deploy/health.py https://localhost:8000/ready /run/secrets/ca.crt
python umbel/deploy/health.py 127.0.0.1:9095
python umbel/deploy/health.py 127.0.0.1:9095/health
"""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request
from http.client import HTTPException

_TIMEOUT_S = 5.0
_LONGEST = 1000  # bytes of a reason


def healthy(address: str, ca: str | None = None) -> bool:
    """Return whether a process is ready, at a URL or at ``HOST:PORT`` of an executor's gRPC health service.

    ``HOST:PORT/health`` asks only whether the executor is alive. The certificate authority in the file `ca` verifies an
    https URL.
    """
    if "://" in address:
        context = ssl.create_default_context(cafile=ca) if ca else None
        # No proxy of the organisation's reaches this process.
        handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        try:
            with urllib.request.build_opener(*handlers).open(address, timeout=_TIMEOUT_S) as response:
                return bool(response.status == 200)
        except (OSError, HTTPException) as error:
            said = error.read(_LONGEST) if isinstance(error, urllib.error.HTTPError) else b""
            print(error, said.decode(errors="replace"))
            return False
    # Imported only here: a URL does not need it, and is checked every few seconds.
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    host, _, path = address.partition("/")
    service = "" if path == "health" else "ready"
    try:
        with grpc.insecure_channel(host, [("grpc.enable_http_proxy", 0)]) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S
            )
    except grpc.RpcError as error:
        print(error.code())
        return False
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        print("not ready; the log says why")
        return False
    return True


if __name__ == "__main__":
    sys.exit(not healthy(*sys.argv[1:]))
