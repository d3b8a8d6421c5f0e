"""Prometheus metrics: series in its text format, printed once or served on an address of this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import typer
from cryptography import x509

from umbel.protocol.errors import MetricsError
from umbel.protocol.home import free_space

_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATH = "/metrics"
_IDLE_S = 10.0
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Series:
    """One metric: its name, what it tells, and its values by labels. Those that only grow end in ``_total``."""

    name: str
    help: str
    values: Mapping[Labels, float] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, help: str, values: Mapping[str, float] | float, label: str = "") -> Series:
        """Return a metric of one value, or of one for each value of a label."""
        if isinstance(values, Mapping):
            return cls(name, help, {((label, key),): value for key, value in values.items()})
        return cls(name, help, {(): values})


def exposition(series: Iterable[Series]) -> str:
    """Return series in Prometheus's text format."""
    lines = []
    for one in series:
        kind = "counter" if one.name.endswith("_total") else "gauge"
        lines += [f"# HELP {one.name} {one.help}", f"# TYPE {one.name} {kind}"]
        for labels, value in one.values.items():
            inner = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels)
            lines.append(f"{one.name}{f'{{{inner}}}' if inner else ''} {_number(value)}")
    return "\n".join([*lines, ""])


def publish(collect: Callable[[], Sequence[Series]], listen: str) -> None:
    """Print the metrics, or serve them at ``HOST:PORT`` until the process is stopped."""
    if not listen:
        typer.echo(exposition(collect()), nl=False)
        return
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        text = f"give an address as HOST:PORT, such as 127.0.0.1:9465, got {listen!r}"
        raise MetricsError(text, code="metrics.address")

    class Handler(BaseHTTPRequestHandler):
        timeout = _IDLE_S

        def do_GET(self) -> None:
            if self.path != _PATH:
                self.send_error(404)
                return
            body = exposition(collect()).encode()
            self.send_response(200)
            self.send_header("Content-Type", _TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Log nothing: a scrape every few seconds would fill the log."""

    try:
        server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
    except (OSError, OverflowError) as error:
        raise MetricsError(f"nothing can listen at {listen}: {error}", code="metrics.address") from None
    with server:
        typer.echo(f"http://{listen}{_PATH}", err=True)
        server.serve_forever()


def machine(folder: Path, certificates: Mapping[str, Path], words: Sequence[str], prefix: str) -> list[Series]:
    """Return disk, memory and certificates.

    Parameters
    ----------
    folder : Path
        On the disk that fills up.
    certificates : mapping of str to Path
        Certificates in PEM format, by name.
    words : sequence of str
        A process belongs to this side if its command line has one of them.
    """
    days = {name: _days_left(path) for name, path in certificates.items()}
    return [
        Series.of(f"{prefix}_disk_free_bytes", "Free space where this side writes.", free_space(folder)),
        Series.of(f"{prefix}_memory_bytes", "Resident memory of this side's processes.", _memory(words)),
        Series.of(f"{prefix}_certificate_days_left", "Days until a certificate expires.", days, "certificate"),
    ]


def _days_left(path: Path) -> float:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise MetricsError(f"{path} is no certificate that can be read: {error}", code="metrics.certificate") from None
    return (certificate.not_valid_after_utc - datetime.now(UTC)).total_seconds() / 86_400


def _memory(words: Sequence[str]) -> int:
    """Return the resident memory of this user's processes whose command line has one of these words."""
    total, me = 0, psutil.Process().username()
    for process in psutil.process_iter(["cmdline", "memory_info", "username"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.info["username"] == me and any(word in line for word in words) and process.info["memory_info"]:
            total += process.info["memory_info"].rss
    return total


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else f"{value:.10g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
