"""The checks of ``umbel site check``: a site's files, its disk, and its way to the server.

Each check returns what it found as text, or raises an error that names the remedy. Nothing here connects the node. The
server gets two questions: for its health, and whether it has the node's key.
"""

from __future__ import annotations

import math
import re
import shutil
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from click import ClickException
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from umbel.client.readiness import check_usable
from umbel.privacy.site.config import Site
from umbel.privacy.site.journal import Journal, may_begin
from umbel.protocol.errors import SiteError
from umbel.protocol.flower import parse_config_args
from umbel.protocol.home import umbel_home
from umbel.protocol.words import count_of

Check = tuple[str, Callable[[], str]]
"""Its name, and a function that returns what it found."""

_TIMEOUT_S = 10.0
_AHEAD_S, _BEHIND_S = 4.0, 290.0  # Flower refuses a clock that is more than 5 s ahead or 305 s behind
_SOON_DAYS = 14
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED
_LEAST_FREE = 256 << 20  # bytes on the ledger's disk
_PAIR = re.compile(r"(\S+?)=(\'[^\']*\'|\"[^\"]*\"|\S+)")  # as Flower finds pairs in a text


def entries_of(node_config: str) -> dict[str, Any]:
    """Return the entries in the text of a node's configuration, or in the TOML file that it names.

    Raises
    ------
    SiteError
        If a part of the text is no pair. Flower would skip ``budget = 4``, and the site would have the default.
    """
    wrong = "=" in node_config if node_config.endswith(".toml") else _PAIR.sub("", node_config).strip()
    if wrong:
        raise _bad_pairs(node_config)
    try:
        return dict(parse_config_args([node_config] if node_config.strip() else None))
    except (ValueError, ClickException):
        raise _bad_pairs(node_config) from None


def _bad_pairs(node_config: str) -> SiteError:
    text = "must be name=value pairs, separated by spaces, with quotes around text and no space around ="
    return SiteError(f"NODE_CONFIG {text}, got {node_config!r}", code="site.bad-pairs")


def own_checks(site: Site) -> Iterator[Check]:
    """Yield the checks of a site's journal, permissions and disk; none in simulation."""
    if site.ledger_path is None:
        return
    path = site.ledger_path
    journal = Journal(path, witness=site.witness_folder, opened=False)
    yield "ledger", lambda: _ledger(site, path)
    yield "permissions", lambda: _permissions([path, journal.index, journal.witness.path])
    yield "disk", lambda: _disk(path)


def server_checks(address: str, ca: Path | None, key: Path | None) -> Iterator[Check]:
    """Yield the checks of a site's key, of the server and its certificate, and of the clock.

    Parameters
    ----------
    address : str
        ``HOST:PORT`` of the server.
    ca : Path, optional
        The certificate authority's certificate; without one the connection is not encrypted.
    key : Path, optional
        The node's private key.
    """
    yield from file_checks(ca, key)
    health = cache(lambda: _health(address, ca))  # both checks are of one reply
    yield "server", lambda: _server(address, health())
    yield "clock", lambda: _clock(health())


def file_checks(ca: Path | None, key: Path | None) -> Iterator[Check]:
    """Yield the checks of a site's key and of the certificate authority, if they are named."""
    if key is not None:
        yield "key", lambda: _key(key)
    if ca is not None:
        yield "certificate authority", lambda: _authority(ca)


def _ledger(site: Site, path: Path) -> str:
    if not path.exists() and may_begin(site):
        if not (path.parent.is_dir() or path.parent == umbel_home()):
            raise SiteError(f"there is no folder for the ledger {path}; make it", code="site.no-folder")
        return f"made when it is first needed: {path}"
    lines = sum(1 for _ in Journal(path, witness=site.witness_folder).lines())
    return f"intact, {count_of(lines, 'line')}: {path}"


def _permissions(paths: list[Path]) -> str:
    check_usable(*paths)
    for path in (one for one in paths if one.exists()):
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise SiteError(f"other users can read {path}; close it: chmod 600 {path}", code="site.permissions")
    return "journal, index and witness are this user's alone"


def _disk(ledger: Path) -> str:
    there = next(folder for folder in ledger.absolute().parents if folder.exists())
    free = shutil.disk_usage(there).free
    if free < _LEAST_FREE:
        raise SiteError(
            f"the disk of {ledger} has {free >> 20} MiB left, and the journal grows; make room for "
            f"{_LEAST_FREE >> 20} MiB",
            code="site.disk",
        )
    return f"{free / 2**30:.1f} GiB free for the journal"


def _key(path: Path) -> str:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise SiteError(f"the key {path} cannot be read: {error.strerror}", code="site.key") from None
    except (ValueError, TypeError):
        raise SiteError(
            f"{path} is not a private key without a passphrase; make one: umbel certs --node NAME", code="site.key"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SiteError(f"{path} is no key of an elliptic curve; make one: umbel certs --node NAME", code="site.key")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise SiteError(f"other users can read the key {path}; close it: chmod 600 {path}", code="site.permissions")
    return f"a private key; its public half is in {path}.pub"


def _authority(path: Path) -> str:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise SiteError(f"the certificate {path} cannot be read: {error.strerror}", code="site.certificate") from None
    except ValueError:
        raise SiteError(f"{path} holds no certificate; get ca.crt from the operator", code="site.certificate") from None
    return f"valid for {_days_left(certificate, str(path))}"


def _days_left(certificate: x509.Certificate, whose: str) -> str:
    days = (certificate.not_valid_after_utc - datetime.now(UTC)).total_seconds() / 86400
    if days < 0:
        raise SiteError(f"the certificate of {whose} has expired; the operator makes another", code="site.certificate")
    soon = "; renew it soon" if days < _SOON_DAYS else ""
    return f"{count_of(math.floor(days), 'day')}{soon}"


@dataclass(frozen=True)
class _Health:
    """The server's reply to a question for its health, and the seconds by which this clock is ahead of the server's."""

    status: int
    certificate: bytes | None
    ahead: float | None


def _health(address: str, ca: Path | None) -> _Health:
    """Ask the server for its health on the node's way to it: past or through the same proxy, to no other address."""
    scheme, verify = ("https", _context(ca)) if ca else ("http", True)
    before = time.time()
    try:
        with (
            httpx.Client(verify=verify, timeout=_TIMEOUT_S, follow_redirects=False) as client,
            client.stream("GET", f"{scheme}://{address}/health") as reply,
        ):
            encrypted = reply.extensions["network_stream"].get_extra_info("ssl_object")
            ahead = ahead_of(reply, (before + time.time()) / 2)
            return _Health(reply.status_code, encrypted.getpeercert(True) if encrypted else None, ahead)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise connection_fault(address, error) from None


def connection_fault(address: str, error: Exception) -> SiteError:
    """Return the error for a server that cannot be reached."""
    cause: BaseException = error
    while before := cause.__cause__ or cause.__context__:
        cause = before
    if isinstance(cause, ssl.SSLCertVerificationError):
        remedy = "use the operator's ca.crt and a name that the certificate has"
        if cause.verify_code == _EXPIRED:
            remedy = "check this machine's clock, and have the operator renew it: umbel certs, then restart the server"
        text = f"the server's certificate is refused: {cause.verify_message}; {remedy}"
        return SiteError(text, code="site.certificate")
    return SiteError(
        f"no server can be reached at {address} ({error}); check HOST:PORT, the firewall, and that the server runs",
        code="site.no-server",
    )


def _context(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError:  # an error of SSL is one too
        raise SiteError(f"{ca} holds no certificate; get ca.crt from the operator", code="site.certificate") from None


def _server(address: str, health: _Health) -> str:
    if health.status != httpx.codes.OK:
        raise SiteError(
            f"the program at {address} replied {health.status} to /health; check the address, and the server's log",
            code="site.no-server",
        )
    if health.certificate is None:
        return f"answers at {address}, without encryption"
    left = _days_left(x509.load_der_x509_certificate(health.certificate), "the server")
    return f"answers at {address}; its certificate is valid for {left}"


def _clock(health: _Health) -> str:
    if health.ahead is None:
        return "not checked: the server's reply has no time"
    if fault := clock_fault(health.ahead):
        raise fault
    return f"within {max(1, math.ceil(abs(health.ahead)))} s of the server's"


def ahead_of(response: httpx.Response, now: float) -> float | None:
    """Return the seconds by which a clock that says `now` is ahead of the server's; None if the server has no clock."""
    said = response.headers.get("date")
    # The server tells whole seconds.
    return now - parsedate_to_datetime(said).timestamp() - 0.5 if said else None


def clock_fault(ahead: float) -> SiteError | None:
    """Return the error for a clock that is so many seconds ahead of the server's; None if the server accepts it."""
    if -_BEHIND_S <= ahead <= _AHEAD_S:
        return None
    way = "ahead of" if ahead > 0 else "behind"
    return SiteError(
        f"this clock is {abs(ahead):.0f} s {way} the server's, and the server refuses such a site; switch NTP on",
        code="site.clock",
    )
