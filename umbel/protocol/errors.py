"""All errors of umbel, as one tree: catch `UmbelError` for any of them.

::

    UmbelError
    ├── ConfigError         the run config cannot be run
    ├── ModelError          a model, or its loss, cannot be used
    ├── DatasetError        the data cannot be used
    ├── ProtocolError       a message does not follow the protocol
    ├── FleetError          the nodes that a run needs are missing
    ├── SiteError           a node is not set up to serve data
    ├── LedgerError         a site's journal cannot be used
    ├── Refused             a site refuses a task; for the node's own log
    ├── OutOfTime           a node has used up the time that its site allows for a message
    ├── SweepError          a sweep cannot start
    ├── NotApplicableError  an attack does not fit the model
    ├── CertificateError    certificates or keys cannot be made or used
    ├── GuardError          the guard in front of the server cannot be set up
    ├── MetricsError        metrics cannot be collected or served
    ├── ServerError         the server cannot start
    ├── DiskError           a file cannot be written, because its disk is full
    └── WorthError          under ``--strict``, a run is not shown to be worth it

The text names the thing (a key, a file, a client) and the fix. Every error ends with a short, stable code, such as
``config.unknown-key``; docs/reference/errors.md lists them all. Sentences may change; codes do not. Programming
errors stay Python's own.
"""

from __future__ import annotations

from typing import ClassVar, Self


class UmbelError(Exception):
    """An error that umbel itself reports.

    The text says what is wrong and how to fix it. The code is the kind, a dot, and a few words with hyphens.
    """

    kind: ClassVar[str] = "umbel"
    """The first part of the code."""
    exit_code: ClassVar[int] = 1
    """Exit code of a command: 2 for a wrong request, 3 for data, 4 for a refusal by sites, 5 for a run that is not
    worth it, 1 for the rest."""

    def __init_subclass__(cls, *, kind: str = "", exit_code: int = 0) -> None:
        cls.kind, cls.exit_code = kind or cls.kind, exit_code or cls.exit_code

    def __init__(self, text: str, *, code: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.code = code or self.kind

    def __str__(self) -> str:
        return f"{self.text} [{self.code}]" if "." in self.code else self.text

    @classmethod
    def of(cls, error: Exception, prefix: str = "") -> Self:
        """Return an error of this class with the text and code of another, after a prefix that says where it
        happened."""
        text = error.text if isinstance(error, UmbelError) else str(error)
        return cls(f"{prefix}{text}", code=error.code if isinstance(error, UmbelError) else "")


class ConfigError(UmbelError, kind="config", exit_code=2):
    """The run config cannot be run."""


class ModelError(UmbelError, kind="model", exit_code=2):
    """A model, or its loss, cannot be used."""


class DatasetError(UmbelError, kind="data", exit_code=3):
    """The data cannot be used."""


class ProtocolError(UmbelError, kind="protocol"):
    """A message does not follow the protocol."""


class FleetError(UmbelError, kind="nodes", exit_code=4):
    """The nodes that a run needs are missing."""


class SiteError(UmbelError, kind="site", exit_code=2):
    """A node is not set up to serve data."""


class LedgerError(UmbelError, kind="ledger"):
    """A site's journal cannot be used."""


class Refused(UmbelError, kind="refused", exit_code=4):
    """A site refuses a task; the text is for the node's own log."""


class OutOfTime(UmbelError, kind="time"):
    """A node has used up the time that its site allows for a message."""


class Interrupted(BaseException):
    """Ends foreign code where that time is over; an `except Exception` in it does not hold this up."""


class SweepError(UmbelError, kind="sweep", exit_code=2):
    """A sweep cannot start."""


class NotApplicableError(UmbelError, kind="attack", exit_code=2):
    """An attack does not fit the model."""


class CertificateError(UmbelError, kind="certificate"):
    """Certificates or keys cannot be made or used."""


class GuardError(UmbelError, kind="guard"):
    """The guard in front of the server cannot be set up."""


class MetricsError(UmbelError, kind="metrics", exit_code=2):
    """Metrics cannot be collected or served."""


class ServerError(UmbelError, kind="server"):
    """The server cannot start."""


class DiskError(UmbelError, OSError, kind="disk"):
    """A file cannot be written, because its disk is full."""


class WorthError(UmbelError, kind="worth", exit_code=5):
    """Under ``--strict``, a run is not shown to be worth it."""
