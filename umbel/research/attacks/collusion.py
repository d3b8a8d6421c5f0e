"""All clients but one tell what they know: what is left of a mean, or of a site's sums, is the last one's.

A site's sums have noise once, for all clients together. Whoever knows the updates of the others subtracts them and
holds the last client's, with that noise: as much as a client's own release would have had at the same noise
multiplier, and no more. The sum hides a client among the others only from those who do not know them.

The mean of a cluster is public: the server broadcasts it. Clients that know each other's releases subtract those, and
hold the release of the last one. It has had its own noise, and they see what the server saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from umbel.models.model import Parameters
from umbel.protocol.arrays import Arrays, flatten, unflatten
from umbel.research.attacks.victims import STEP, Mode, Victims, asked, sent
from umbel.server.nodes.fleet import Fleet
from umbel.strategies.group_privacy import GroupPrivacy


def last_of_sums(victims: Victims, told: Victims, mode: Mode, hypothesis: Arrays, site: Sequence[int]) -> Parameters:
    r"""Return what server and clients of a site take for the gradient of the first, of which they know nothing.

    Parameters
    ----------
    victims : Victims
    told : Victims
        The same clients without a policy: the others are asked there for what they sum up to without noise.
    mode : Mode
        Of a site's sums.
    hypothesis : dict of ndarray, each of its own \*shape
    site : sequence of int
        Clients.
    """
    known = replace(mode, noise_multiplier=0.0)
    everybody, _ = victims.site_sums(mode, sent(mode, hypothesis), site, **asked(mode))
    others, _ = told.site_sums(known, sent(known, hypothesis), site[1:], **asked(mode))
    return {
        name: torch.from_numpy((others[name][0].astype(np.float64) - value[0]) / STEP)
        for name, value in everybody.items()
    }


def last_of_cluster(victims: Victims, mode: Mode, hypothesis: Arrays, clients: Sequence[int]) -> Parameters:
    r"""Return what clients take for the gradient of the first, by the next hypothesis and their own releases.

    Parameters
    ----------
    victims : Victims
    mode : Mode
        Of a client's release.
    hypothesis : dict of ndarray, each of its own \*shape
    clients : sequence of int
        Of one cluster.
    """
    releases = flatten(victims.releases(mode, sent(mode, hypothesis), clients, **asked(mode)))
    mean = cluster_mean(hypothesis, releases)
    left = len(releases) * mean - releases[1:].sum(axis=0)
    start = {name: value[None].astype(np.float64) for name, value in hypothesis.items()}
    found = unflatten((flatten(start) - left) / STEP, start)
    return {name: torch.from_numpy(value[0]) for name, value in found.items()}


def cluster_mean(hypothesis: Arrays, releases: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what the server broadcasts next, as one vector, of releases (m, n) that are one cluster."""
    (start,) = flatten({name: value[None] for name, value in hypothesis.items()})
    # In 32 bits, as it travels.
    return GroupPrivacy(Fleet(), hypotheses=1).combine(releases, start, 0).astype(np.float32).astype(np.float64)
