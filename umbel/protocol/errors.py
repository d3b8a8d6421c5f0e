"""What can go wrong, as one tree: catch `UmbelError` for all of it.

::

    UmbelError
    ├── ConfigError         the run config cannot be run
    ├── ModelError          a model, or its loss, cannot be used
    ├── DatasetError     the data cannot be used
    ├── ProtocolError       a message is not what the protocol says
    ├── FleetError          the nodes that a run needs are not there
    ├── SiteError           a node is not set up to serve data
    ├── LedgerError         a site's ledger cannot be used
    ├── LogError            a site's log cannot be used
    ├── Refused             a site refuses what a server asks; for the node's own log
    ├── OutOfTime           a node has computed for a message as long as its site lets it
    ├── LaunchError         a simulation does not start, or its run fails
    ├── ClusterError        a Ray cluster cannot be joined, or its machines lack what a run needs
    ├── SweepError          a sweep cannot start
    ├── NotApplicableError  an attack does not fit the model
    ├── CertificateError    certificates or keys cannot be made or used
    ├── GuardError          the guard in front of the server cannot be set up
    ├── DemoError           the demonstration cannot go on
    └── Absent              a peer cannot take part in a comparison of speed

The text of each names the thing (a key, a file, a client) and the fix. Errors of programming stay
Python's own.
"""


class UmbelError(Exception):
    """Anything that umbel itself finds wrong."""


class ConfigError(UmbelError):
    """The run config cannot be run."""


class ModelError(UmbelError):
    """A model, or its loss, cannot be used."""


class DatasetError(UmbelError):
    """The data cannot be used."""


class ProtocolError(UmbelError):
    """A message is not what the protocol says."""


class FleetError(UmbelError):
    """The nodes that a run needs are not there."""


class SiteError(UmbelError):
    """A node is not set up to serve data."""


class LedgerError(UmbelError):
    """A site's ledger cannot be used."""


class LogError(UmbelError):
    """A site's log cannot be used."""


class Refused(UmbelError):
    """A site refuses what a server asks; the text is for the node's own log."""


class OutOfTime(UmbelError):
    """A node has computed for a message as long as its site lets it."""


class LaunchError(UmbelError):
    """A simulation does not start, or its run fails."""


class ClusterError(UmbelError):
    """A Ray cluster cannot be joined, or its machines lack what a run needs."""


class SweepError(UmbelError):
    """A sweep cannot start."""


class NotApplicableError(UmbelError):
    """An attack does not fit the model."""


class CertificateError(UmbelError):
    """Certificates or keys cannot be made or used."""


class GuardError(UmbelError):
    """The guard in front of the server cannot be set up."""


class DemoError(UmbelError):
    """The demonstration cannot go on."""


class Absent(UmbelError):
    """A peer cannot take part in a comparison of speed; the text says why."""
