"""Metrics for Prometheus, printed once or served on an address of this machine by ``prometheus_client``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import typer
from cryptography import x509
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from umbel.protocol import logs
from umbel.protocol.errors import MetricsError
from umbel.protocol.home import free_space

Labels = tuple[str, ...]
Collect = Callable[[], Sequence[Metric]]
_IDLE_S = 10.0
"""Seconds after which a silent connection is closed."""


def metric(
    name: str, help: str, values: Mapping[Labels, float] | Mapping[str, float] | float, *labels: str
) -> GaugeMetricFamily | CounterMetricFamily:
    """Return a metric with its value, or its values by labels. A series that only grows is named ``…_total``."""
    made = (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(name, help, labels=labels)
    for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
        made.add_metric((key,) if isinstance(key, str) else key, value)
    return made


class _Collected(Collector):
    """The metrics that a function returns, called for each look at them."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def exposition(collect: Collect) -> bytes:
    """Return metrics in Prometheus's text format."""
    return generate_latest(_registry(collect))


def _registry(collect: Collect) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Collected(collect))
    return registry


def publish(collect: Collect, listen: str) -> None:
    """Print the metrics, or serve them at ``HOST:PORT``, by default of the loopback, until the process is stopped."""
    logs.configure()
    if not listen:
        typer.echo(exposition(collect), nl=False)
        return
    host, _, port = listen.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal():
        text = f"give an address as HOST:PORT, such as 127.0.0.1:9465, got {listen!r}"
        raise MetricsError(text, code="metrics.address")
    try:
        server, thread = start_http_server(int(port), host, _registry(collect))
    except (OSError, OverflowError) as error:
        raise MetricsError(f"nothing can listen at {listen}: {error}", code="metrics.address") from None
    handler: Any = server.RequestHandlerClass
    handler.timeout = _IDLE_S
    typer.echo(f"http://{listen if ':' in listen else f'{host}:{port}'}/metrics", err=True)
    thread.join()


def machine(folder: Path, certificates: Mapping[str, Path], words: Sequence[str], prefix: str) -> list[Metric]:
    """Return disk, memory and certificates; no memory without words.

    Parameters
    ----------
    folder : Path
        On the disk that fills up.
    certificates : mapping of str to Path
        Certificates in PEM format, by name.
    words : sequence of str
        A process belongs to this side if its command line has one of them.
    """
    told = "Resident memory of this side's processes."
    memory = [metric(f"{prefix}_memory_bytes", told, _memory(words))] if words else []
    days = {name: _days_left(path) for name, path in certificates.items()}
    return [
        metric(f"{prefix}_disk_free_bytes", "Free space where this side writes.", free_space(folder)),
        *memory,
        metric(
            f"{prefix}_certificate_days_left", "Days until a certificate expires; 0 if it is gone.", days, "certificate"
        ),
    ]


def watched(certificates: Sequence[Path]) -> dict[str, Path]:
    """Return certificates by name, or by path where two have the same name; raise unless each can be read."""
    for path in certificates:
        try:
            _until(path)
        except (OSError, ValueError) as error:
            text = f"{path} is no certificate that can be read: {error}"
            raise MetricsError(text, code="metrics.certificate") from None
    names = Counter(path.name for path in {*certificates})
    return {path.name if names[path.name] == 1 else str(path): path for path in certificates}


def _until(path: Path) -> datetime:
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def _days_left(path: Path) -> float:
    try:
        return (_until(path) - datetime.now(UTC)).total_seconds() / 86_400
    except (OSError, ValueError):  # it was removed since
        return 0.0


def _memory(words: Sequence[str]) -> int:
    """Return the resident memory of this user's processes whose command line has one of these words."""
    total, me = 0, psutil.Process().username()
    for process in psutil.process_iter(["cmdline", "memory_info", "username"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.info["username"] == me and any(word in line for word in words) and process.info["memory_info"]:
            total += process.info["memory_info"].rss
    return total
