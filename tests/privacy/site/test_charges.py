"""What a client may still give."""

from __future__ import annotations

from fractions import Fraction

from umbel.privacy.site.charges import Limits, priced
from umbel.protocol.release import Clipping, Kind, Release


def test_a_client_with_a_limit_makes_so_many_kinds_of_release_and_no_more() -> None:
    """Noise near 10^12, another each time, costs nothing; the ledger would grow by each for ever."""
    limits = Limits(budget=Fraction(1))
    account: dict[Release, int] = {}
    for number in range(300):
        release = Release(Kind.TRAIN, 11, 1e12 + number, Clipping.PUBLIC)
        if limits.allow(account, release):
            account[priced(release)] = 1
    assert len(account) == 256
    assert limits.allow(account, next(iter(account))), "what it has made before it may make again"
    assert Limits().allow(account, Release(Kind.TRAIN, 11, 7.0, Clipping.PUBLIC)), "without a limit nothing is one"
