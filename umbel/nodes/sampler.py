"""The clients that a round asks, drawn over all nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from umbel.nodes.roster import TRAIN, Roster


def draw(
    roster: Roster, role: str, round: int, seed: Sequence[int], size: int, max_share: float = 1.0
) -> NDArray[np.int64]:
    """Draw `size` clients (size,) of a role whose nodes can be asked, or all of them if they are fewer.

    They are counted over all nodes, in increasing order. If `max_share` limits a node's share of them, fewer may be
    drawn: a node that has its share is skipped. In simulation it is not.
    """
    if max_share < 1 and not roster.simulated:
        return _draw_shared(roster, role, round, seed, size, max_share)
    if not roster.gone(round):
        # The same draw without a list of all clients, perhaps a million.
        total = int(roster.counts[role].sum())
        return sample(seed, total, min(size, total))
    there = roster.present(role, round)
    return there[sample(seed, len(there), min(size, len(there)))]


def draw_in_turn(
    roster: Roster, round: int, seed: Sequence[int], size: int, turns: NDArray[np.int64], most: int
) -> NDArray[np.int64]:
    """Draw `size` training clients, or fewer, among those with the fewest turns (clients,), which must be below `most`.

    If none of these clients' nodes can be asked, they are drawn among all of these.
    """
    willing = np.flatnonzero(turns < most)
    there = np.intersect1d(willing, roster.present(TRAIN, round))
    there = there if len(there) else willing
    chance = np.random.default_rng(seed).random(len(there))
    first = np.lexsort((chance, turns[there]))[:size]
    return np.sort(there[first]).astype(np.int64)


def _draw_shared(
    roster: Roster, role: str, round: int, seed: Sequence[int], size: int, max_share: float
) -> NDArray[np.int64]:
    """Draw clients in turn and skip those whose node has its share.

    Each client has a time from an exponential distribution, and the earliest are drawn. For a node only as many times
    are drawn as it may have clients, namely its earliest (Renyi, 1953).
    """
    counts, gone = roster.counts[role], roster.gone(round)
    first = np.cumsum(counts) - counts
    there = [i for i, (node, _) in enumerate(roster.nodes) if counts[i] and node not in gone]
    if not there and roster.asks_absent(role):
        there = np.flatnonzero(counts).tolist()
    most = largest_share(counts[there].tolist(), size, max_share)
    generator = np.random.default_rng(seed)
    times, owners = [np.zeros(0)], [np.zeros(0, np.int64)]
    for i in there:
        few = min(int(counts[i]), most)
        times.append(np.cumsum(generator.standard_exponential(few) / (counts[i] - np.arange(few))))
        owners.append(np.full(few, i))
    come = np.concatenate(owners)[np.argsort(np.concatenate(times), kind="stable")[:size]]
    taken = np.bincount(come, minlength=len(counts))
    drawn = [first[i] + generator.choice(counts[i], taken[i], replace=False) for i in np.flatnonzero(taken)]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *drawn]))


def largest_share(counts: Sequence[int], size: int, share: float) -> int:
    """Return how many clients each node may have in a round so that none has more than its share of them.

    With too few nodes for that share, it becomes the share for one node less: nodes with almost no clients must not
    make a round small.

    Parameters
    ----------
    counts : sequence of int
        Number of clients on each node.
    size : int
        Number of clients that the round asks.
    """
    share = max(share, 1 / max(1, len(counts) - 1))
    low, high = 1, max(counts, default=1)
    while low < high:
        middle = (low + high + 1) // 2
        fits = middle <= share * min(size, sum(min(count, middle) for count in counts)) * (1 + 1e-9)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def sample(seed: Sequence[int], population: int, size: int) -> NDArray[np.int64]:
    """Draw `size` of `population` clients without replacement, in increasing order."""
    # The same result as from a list, which NumPy would convert element by element.
    words = np.array(seed, np.uint32) if max(seed) < 2**32 else seed
    return np.sort(np.random.default_rng(words).choice(population, size, replace=False)).astype(np.int64, copy=False)
