"""Prometheus metrics: series in its text format, printed once or served on an address of this machine."""

from __future__ import annotations

import math
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from logging import ERROR
from pathlib import Path
from threading import BoundedSemaphore, Lock, Timer
from typing import Any

import psutil
import typer
from cryptography import x509

from umbel.protocol import logs
from umbel.protocol.errors import MetricsError, UmbelError
from umbel.protocol.flower import log
from umbel.protocol.home import free_space

_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATH = "/metrics"
_IDLE_S = 10.0
"""Seconds for a request, and for taking the response."""
_CONNECTIONS = 16
_FRESH_S = 1.0
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Series:
    """One metric: its name, its meaning, and its values by labels. Those that only grow end in ``_total``."""

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


def _encoded(series: Iterable[Series]) -> bytes:
    # The name of a run's folder may be no text.
    return exposition(series).encode(errors="backslashreplace")


def publish(collect: Callable[[], Sequence[Series]], listen: str) -> None:
    """Print the metrics, or serve them at ``HOST:PORT`` until the process is stopped."""
    logs.configure()
    if not listen:
        typer.echo(_encoded(collect()), nl=False)
        return
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        text = f"give an address as HOST:PORT, such as 127.0.0.1:9465, got {listen!r}"
        raise MetricsError(text, code="metrics.address")
    try:
        server = _Server(host.strip("[]"), int(port), collect)
    except (OSError, OverflowError) as error:
        raise MetricsError(f"nothing can listen at {listen}: {error}", code="metrics.address") from None
    with server:
        typer.echo(f"http://{listen}{_PATH}", err=True)
        server.serve_forever()


class _Server(ThreadingHTTPServer):
    """Serves a few connections at once, each for seconds: who connects may be a stranger, and others work here."""

    def __init__(self, host: str, port: int, collect: Callable[[], Sequence[Series]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._collect, self._lock, self._free = collect, Lock(), BoundedSemaphore(_CONNECTIONS)
        self._body, self._until = b"", -math.inf
        super().__init__((host, port), _Handler)

    def body(self) -> bytes:
        """Return the metrics, which are collected at most once a second."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._body = _encoded(self._collect())
                self._until = time.monotonic() + _FRESH_S
            return self._body

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # a caller that has gone
            log(ERROR, "the metrics cannot be served", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _IDLE_S

    def setup(self) -> None:
        super().setup()
        self._end = Timer(_IDLE_S, self._hang_up)
        self._end.daemon = True
        self._end.start()

    def finish(self) -> None:
        self._end.cancel()
        super().finish()

    def do_GET(self) -> None:
        self._end.cancel()
        if self.path != _PATH:
            self.send_error(404)
            return
        try:
            body = self.server.body()
        except (UmbelError, OSError) as error:
            log(ERROR, "the metrics cannot be collected: %s", error)
            self.send_error(503)
            return
        self.send_response(200)
        self.send_header("Content-Type", _TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: a scrape every few seconds would fill the log."""

    def _hang_up(self) -> None:
        """End a connection whose request takes too long: one byte at a time would never be idle."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def machine(folder: Path, certificates: Mapping[str, Path], words: Sequence[str], prefix: str) -> list[Series]:
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
    memory = [Series.of(f"{prefix}_memory_bytes", told, _memory(words))] if words else []
    days = {name: _days_left(path) for name, path in certificates.items()}
    return [
        Series.of(f"{prefix}_disk_free_bytes", "Free space where this side writes.", free_space(folder)),
        *memory,
        Series.of(
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


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else f"{value:.10g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
