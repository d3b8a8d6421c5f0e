"""Exit with 0 if a process reports that it is healthy, for the containers' health checks.

python umbel/deploy/health.py https://localhost:8000/health /run/secrets/ca.crt
python umbel/deploy/health.py 127.0.0.1:9095
"""

from __future__ import annotations

import ssl
import sys
import urllib.request

_TIMEOUT_S = 5.0


def healthy(address: str, ca: str | None = None) -> bool:
    """Return whether a Flower process is healthy, at a URL or at ``HOST:PORT`` of an executor's gRPC health service.

    The certificate authority in the file `ca` verifies an https URL.
    """
    if "://" in address:
        context = ssl.create_default_context(cafile=ca) if ca else None
        try:
            with urllib.request.urlopen(address, timeout=_TIMEOUT_S, context=context) as response:
                return bool(response.status == 200)
        except OSError:
            return False
    # Imported only here: a URL does not need it, and is checked every few seconds.
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    try:
        with grpc.insecure_channel(address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(not healthy(*sys.argv[1:]))
