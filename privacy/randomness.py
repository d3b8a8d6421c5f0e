"""Where random draws of a client come from.

In simulation every client has streams of its own, keyed by seed, round and client, so that a
result does not depend on which node computes it. Where the data are a site's own there is no
seed: whoever knows it could predict the noise and subtract it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from privacy.entropy import SecureGenerator
from privacy.laplace import NoiseSource


def noise(seed: int | None, round: int, clients: Sequence[int], purpose: str = "noise") -> Sequence[NoiseSource]:
    """Return what each client's noise is drawn from; without a seed, a `SecureGenerator` each."""
    if seed is None:
        return [SecureGenerator() for _ in clients]
    return streams(seed, purpose, round, clients)


def streams(seed: int | None, purpose: str, round: int, clients: Iterable[int]) -> list[np.random.Generator]:
    """Return a generator for each client; not for noise, see `noise`.

    Parameters
    ----------
    seed : int or None
        Of the run, 0 or more; None draws from the operating system's entropy.
    purpose : str
        Draws for different purposes are independent.
    round : int
        Round of training.
    clients : iterable of int
        Clients, counted over the whole federation.
    """
    if seed is None:
        return [np.random.Generator(np.random.PCG64()) for _ in clients]
    key = np.random.SeedSequence([seed, zlib.crc32(purpose.encode())]).generate_state(2, np.uint64)
    # Philox computes each block from key and counter alone: the low half of the counter runs
    # within a stream, the high half tells the streams apart.
    return [np.random.Generator(np.random.Philox(key=key, counter=[0, 0, round, client])) for client in clients]
