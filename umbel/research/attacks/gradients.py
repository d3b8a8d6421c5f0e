"""What a server takes for the gradient of a client's loss, by what leaves the node after one step of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from umbel.models.model import Parameters
from umbel.protocol.arrays import Arrays
from umbel.research.attacks.behind_the_gate import Victims
from umbel.research.attacks.modes import Mode

STEP = 1.0
"""The step size that is asked for. A long step leaves little of the gradient to the rounding of 32-bit numbers."""

FLOOR = 1e-6
"""Where the radius is the norm of the update: so small a floor that it is, as in the paper."""

RADIUS = 0.1
"""Where the radius is public. Updates are longer and are clipped to it, so that noise hides no more than it must."""


def gradients(victims: Victims, mode: Mode, hypothesis: Arrays, sites: Sequence[Sequence[int]]) -> list[Parameters]:
    r"""Return for each site what the server takes for the gradient of its first client.

    A client's release less the hypothesis is minus its gradient with noise. Of a site's sums, that is minus the sum of
    its clients' gradients, each clipped.

    Parameters
    ----------
    victims : Victims
    mode : Mode
    hypothesis : dict of ndarray, each of its own \*shape
    sites : sequence of sequences of int
        Clients. Only the first of each is asked, unless the site releases.
    """
    if not mode.by_site:
        found = victims.releases(mode, sent(mode, hypothesis), [site[0] for site in sites], **asked(mode))
        return [_difference(hypothesis, found, i) for i in range(len(sites))]
    every = []
    for site in sites:
        sums, _ = victims.site_sums(mode, sent(mode, hypothesis), site, **asked(mode))
        every.append({name: torch.from_numpy(-value[0].astype(np.float64) / STEP) for name, value in sums.items()})
    return every


def asked(mode: Mode) -> dict[str, Any]:
    """Return what is asked besides: one step on all rows."""
    return {"local_epochs": 1, "step_size": STEP, "batch_size": 0, "radius": RADIUS if mode.public else FLOOR}


def sent(mode: Mode, hypothesis: Arrays) -> Arrays:
    r"""Return what is sent, each array (k, \*shape): the hypothesis, and again where a choice is hidden.

    Of two hypotheses that are alike it does not matter which one a client trains.
    """
    k = 2 if mode.choice_epsilon and not mode.public else 1
    return {name: np.repeat(value[None], k, axis=0) for name, value in hypothesis.items()}


def _difference(hypothesis: Arrays, releases: Arrays, i: int) -> Parameters:
    return {
        name: torch.from_numpy((value.astype(np.float64) - releases[name][i]) / STEP)
        for name, value in hypothesis.items()
    }
