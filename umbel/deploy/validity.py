"""Whether a certificate is valid for long enough to start with."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from logging import WARNING
from pathlib import Path

from cryptography import x509

from umbel.deploy.certs import RENEW_DAYS
from umbel.protocol.errors import CertificateError
from umbel.protocol.flower import log
from umbel.protocol.words import count_of


def check_validity(file: Path, fix: str = "renew it: umbel certs") -> None:
    """Warn if a certificate in a PEM file expires within `RENEW_DAYS`; errors and warning end with the fix.

    Raises
    ------
    CertificateError
        If it has expired, since no site would accept it, or if the file holds none.
    """
    try:
        ends = min(one.not_valid_after_utc for one in x509.load_pem_x509_certificates(file.read_bytes()))
    except (OSError, ValueError) as error:
        text = f"{file} cannot be read as a certificate: {error}; {fix}"
        raise CertificateError(text, code="certificate.unreadable") from None
    days = (ends - datetime.now(UTC)).total_seconds() / 86_400
    if days < 0:
        text = f"{file} has expired on {ends:%d %B %Y}, so no site would connect; {fix}"
        raise CertificateError(text, code="certificate.expired")
    if days < RENEW_DAYS:
        log(WARNING, "%s expires in %s; %s", file, count_of(math.ceil(days), "day"), fix)
