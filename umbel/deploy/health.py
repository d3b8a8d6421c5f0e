"""Exit with 0 if a process answers that it is well: what the health checks of the containers ask.

python umbel/deploy/health.py https://localhost:8000/health /run/secrets/ca.crt
python umbel/deploy/health.py 127.0.0.1:9095
"""

from __future__ import annotations

import ssl
import sys
import urllib.request

_TIMEOUT_S = 5.0


def healthy(address: str, ca: str | None = None) -> bool:
    """Return whether a Flower process is well, at a URL or at ``HOST:PORT`` of an executor's gRPC health service.

    A https URL is checked against the certificate authority in the file `ca`.
    """
    if "://" in address:
        context = ssl.create_default_context(cafile=ca) if ca else None
        try:
            with urllib.request.urlopen(address, timeout=_TIMEOUT_S, context=context) as response:
                return bool(response.status == 200)
        except OSError:
            return False
    # Imported here, because a URL needs neither and is asked for every few seconds.
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
