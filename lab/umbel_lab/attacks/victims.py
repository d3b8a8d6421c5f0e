"""The attacked clients: clients of the real app behind their own gate, under the policy of a site.

Each mode of release has the policy of a site that permits exactly this mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from torch import Tensor

import umbel.client.app
from umbel.data import Dataset, Manifest, offsets_of, write_dataset
from umbel.models.model import Parameters
from umbel.privacy.accounting.guarantee import DELTA, Guarantee, guarantee
from umbel.privacy.accounting.plan import Task, plan_for
from umbel.privacy.gate.memory_ledger import MemoryLedger
from umbel.privacy.mechanisms import Gaussian
from umbel.protocol.arrays import Arrays, flatten, mean_of, unflatten
from umbel.protocol.clients import ClientInDataset, ClientOnNode
from umbel.protocol.errors import FleetError
from umbel.protocol.messages import released_in, round_request, site_sums_in
from umbel.protocol.records import pack
from umbel.protocol.release import LAPLACE, Clipping, NoisePer, ReleaseBy
from umbel.protocol.tasks import TrainingSpec
from umbel.simulation.grid import InProcessGrid

SITE = 10
"""Clients of a site's sums; the policy's ``min-clients``, since a malicious server asks the minimum."""

NU, CHOICE_EPSILON, EPSILON = 3.0, 1.0, 8.0
"""Of the compared modes: the paper's noise multiplier, a private choice, and a guarantee at `DELTA`."""

PAPER, CHOICE, FORMAL, SUMS, FORMAL_SUMS = (
    f"paper's, ν = {NU:g}",
    f"paper's, choice-ε = {CHOICE_EPSILON:g}",
    f"formal, ε = {EPSILON:g}",
    f"site's sums, ν = {NU:g}",
    f"site's sums, ε = {EPSILON:g}",
)
NO_NOISE = "no noise"

STEP = 1.0
"""The requested step size. A long step loses little of the gradient to the rounding of 32-bit numbers."""
FLOOR = 1e-6
"""If the clip norm is the norm of the update: a floor so small that it never applies, as in the paper."""
CLIP_NORM = 0.1
"""If the clip norm is public. Longer updates are clipped to it, so that noise hides no more than it must."""


@dataclass(frozen=True)
class Mode:
    """A mode of release, with the entries of the site's policy that permit it.

    A choice-epsilon of 0 is an open choice. The attack uses `releases` releases of each client together. With
    `others_known` the server knows all clients of a site's sums except the attacked one.
    """

    name: str
    noise_multiplier: float
    choice_epsilon: float = 0.0
    clipping: Clipping = Clipping.UPDATE
    release_by: ReleaseBy = ReleaseBy.CLIENT
    mechanism: str = LAPLACE
    noise_per: NoisePer = NoisePer.VECTOR
    releases: int = 1
    others_known: bool = False
    policy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def by_site(self) -> bool:
        """Whether a site adds the noise, to sums."""
        return self.release_by is ReleaseBy.SITE

    @property
    def public(self) -> bool:
        """Whether the clip norm is public."""
        return self.clipping is Clipping.PUBLIC


def open_() -> Mode:
    """Return the mode that hides nothing, which a simulation permits."""
    return Mode(NO_NOISE, 0.0, policy={"allow-unsanitised": True})


def compared(choosing: bool = False) -> tuple[Mode, ...]:
    """Return the modes that all attacks are tried on.

    These are: the paper's, with noise on each layer as in its own attack (Sec. 5.3); the same with a private choice; a
    client's release with (`EPSILON`, `DELTA`) for one participation, by Gaussian noise, which does as well as any for
    many parameters; a site's sums at the paper's noise multiplier; and a site's sums with the same guarantee. With
    `choosing`, the server spends a part of a guarantee on a client's choice between two hypotheses.
    """
    task = Task(1, 2 if choosing else 1, 1, 1, Gaussian.name)
    formal = plan_for(task, EPSILON, DELTA, 1, CHOICE_EPSILON if choosing else 0).release.noise_multiplier
    papers = {"min-noise-multiplier": NU}
    kept = {
        "clipping": "public",
        "mechanisms": Gaussian.name,
        "min-noise-multiplier": formal,
        "max-choice-epsilon": CHOICE_EPSILON,
        "budget": f"{EPSILON!r} delta={DELTA!r}",
    }
    public, by_site = Clipping.PUBLIC, ReleaseBy.SITE
    sums = {"release": "site", "min-clients": SITE}
    chosen = {**papers, "max-choice-epsilon": 1.0}
    return (
        Mode(PAPER, NU, noise_per=NoisePer.LAYER, policy=papers),
        Mode(CHOICE, NU, CHOICE_EPSILON, noise_per=NoisePer.LAYER, policy=chosen),
        Mode(FORMAL, formal, CHOICE_EPSILON, public, mechanism=Gaussian.name, policy=kept),
        Mode(SUMS, NU, CHOICE_EPSILON, public, by_site, policy={**papers, **sums}),
        Mode(FORMAL_SUMS, formal, CHOICE_EPSILON, public, by_site, Gaussian.name, policy={**kept, **sums}),
    )


class Victims:
    """Clients of the dataset in a folder that carry out one task after the other, behind a site's policy.

    The seed is that of the gate's draws; `config` has further entries of the run config.
    """

    def __init__(self, folder: Path, policy: Mapping[str, Any], seed: int, config: Mapping[str, Any] | None = None):
        run = {"dataset": str(folder), "seed": seed, "device": "cpu", **(config or {})}
        node = {"partition-id": 0, "num-partitions": 1, **policy}
        self._grid = InProcessGrid(umbel.client.app.app, run, node_configs=[node])
        self._round = 0

    def ask(
        self, mode: Mode, hypotheses: Arrays, clients: Sequence[int], **asked: Any
    ) -> tuple[Arrays, NDArray[np.float64]]:
        r"""Return clients' releases from hypotheses, each array (k, \*shape); `asked` are further entries of the task.

        The arrays are each (m, \*shape), one row for each client, with empty counts; if a site releases, its sums, each
        (k,
        \*shape), and counts (k,). Raises `FleetError` if the gate refuses.
        """
        self._round += 1
        task = TrainingSpec(
            round=self._round,
            clients=tuple(ClientOnNode(int(client)) for client in clients),
            noise_multiplier=mode.noise_multiplier,
            clipping=mode.clipping,
            noise_per=mode.noise_per,
            mechanism=mode.mechanism,
            choice_epsilon=mode.choice_epsilon if len(next(iter(hypotheses.values()))) > 1 else 0.0,
            release_by=mode.release_by,
            **asked,
        )
        return what_left(answer(self._grid, round_request(pack(hypotheses), task)), len(clients), mode.by_site)

    def claimed(self, client: int) -> Guarantee | None:
        """Return the guarantee to a client by the node's own ledger; None if there is none."""
        return guarantee(MemoryLedger(self.context.state).account(ClientInDataset(client)), DELTA)

    @property
    def context(self) -> Context:
        """The node's own state, which no server can read."""
        (context,) = self._grid.contexts.values()
        return context


def answer(grid: InProcessGrid, content: RecordDict) -> RecordDict:
    """Return the reply of a grid's only node to a round's message; raise `FleetError` if its gate refuses."""
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([grid.create_message(content, "train", node, "1")])
    if reply.has_error():
        raise FleetError("the gate refused; its reason is in the log above", code="nodes.refused")
    return reply.content


def what_left(content: RecordDict, asked: int, by_site: bool) -> tuple[Arrays, NDArray[np.float64]]:
    """Return the arrays and counts in a reply about so many clients, as `Victims.ask` does; `FleetError` unless of
    all."""
    counts = np.empty(0)
    if by_site:
        arrays, counts, released = site_sums_in(content, asked)
    else:
        arrays, released, _ = released_in(content, asked)
    if not released.all():
        raise FleetError("some clients are over budget: an environment variable sets a limit", code="nodes.budget")
    return arrays, counts


def write_victims(folder: Path, dataset: Dataset, rows: Sequence[NDArray[np.int64]]) -> None:
    """Write a dataset of training clients with these rows of another dataset."""
    every, split = np.concatenate(rows), {"train": len(rows), "validation": 0}
    manifest = Manifest(name="victims", clients=len(rows), split=split, feature_scale=dataset.manifest.feature_scale)
    write_dataset(
        folder, manifest, dataset.features[every], dataset.targets[every], offsets_of([len(own) for own in rows])
    )


def gradients(victims: Victims, mode: Mode, hypothesis: Arrays, sites: Sequence[Sequence[int]]) -> list[Parameters]:
    """Return for each site the server's estimate of the gradient of its first client.

    A client's release minus the hypothesis is minus its gradient with noise. For a site's sums, that is minus the sum
    of its clients' gradients, each clipped. Only the first client of each site is asked, unless the site releases.
    """
    if mode.by_site:
        every = [victims.ask(mode, sent(mode, hypothesis), site, **asked(mode))[0] for site in sites]
        return [{name: _slope(-value[0].astype(np.float64)) for name, value in sums.items()} for sums in every]
    found, _ = victims.ask(mode, sent(mode, hypothesis), [site[0] for site in sites], **asked(mode))
    return [
        {name: _slope(value.astype(np.float64) - found[name][i]) for name, value in hypothesis.items()}
        for i in range(len(sites))
    ]


def last_of_sums(victims: Victims, told: Victims, mode: Mode, hypothesis: Arrays, site: Sequence[int]) -> Parameters:
    """Return an estimate by server and other clients of a site of the gradient of the first client, unknown to them.

    A site's sums have noise once, for all clients together. If all other updates are known and subtracted, the last
    client's remains with that noise: as much as its own release would have had, and no more. `told` are the same
    clients without a policy: there the others are asked for their sum without noise.
    """
    known = replace(mode, noise_multiplier=0.0)
    everybody, _ = victims.ask(mode, sent(mode, hypothesis), site, **asked(mode))
    others, _ = told.ask(known, sent(known, hypothesis), site[1:], **asked(mode))
    return {name: _slope(others[name][0].astype(np.float64) - value[0]) for name, value in everybody.items()}


def last_of_cluster(victims: Victims, mode: Mode, hypothesis: Arrays, clients: Sequence[int]) -> Parameters:
    """Return an estimate by clients of the gradient of the first, from the next hypothesis and their own releases.

    The server broadcasts the mean of a cluster. Clients that know each other's releases subtract these, and obtain the
    release of the last one. It has its own noise, and they see what the server saw.
    """
    arrays, _ = victims.ask(mode, sent(mode, hypothesis), clients, **asked(mode))
    releases = flatten(arrays)
    # In 32 bits, as it travels.
    mean = mean_of(releases).astype(np.float32).astype(np.float64)
    left = len(releases) * mean - releases[1:].sum(axis=0)
    start = {name: value[None].astype(np.float64) for name, value in hypothesis.items()}
    return {name: _slope(value[0]) for name, value in unflatten(flatten(start) - left, start).items()}


def _slope(moved: NDArray[np.float64]) -> Tensor:
    """Return the gradient, from the displacement by a step against it."""
    return torch.from_numpy(moved / STEP)


def asked(mode: Mode) -> dict[str, Any]:
    """Return the rest of the task: one step on all rows."""
    return {"local_epochs": 1, "step_size": STEP, "batch_size": 0, "clip_norm": CLIP_NORM if mode.public else FLOOR}


def sent(mode: Mode, hypothesis: Arrays) -> Arrays:
    r"""Return the hypotheses to send, each array (k, \*shape): the hypothesis, and once more if a choice is hidden.

    Of two equal hypotheses it does not matter which one a client trains.
    """
    k = 2 if mode.choice_epsilon and not mode.public else 1
    return {name: np.repeat(value[None], k, axis=0) for name, value in hypothesis.items()}


def averaged(ask: Callable[[], Sequence[Parameters]], times: int) -> tuple[list[Parameters], int]:
    """Ask clients so many times; return the mean of the gradients from each, and how often they answer.

    Noise is drawn again each time and the update is the same, so T releases turn nu into nu / sqrt(T), for T n / nu of
    the paper's budget. Only a limit on a client's spending stops it; `FleetError` if the gate refuses the first time.
    With a guarantee, T releases within one budget show no more than one release that spends it all, since each has
    sqrt(T) times the noise.
    """
    total = [dict(one) for one in ask()]
    answered = 1
    while answered < times:
        try:
            following = ask()
        except FleetError:
            break
        for one, other in zip(total, following, strict=True):
            for name, value in other.items():
                one[name] += value
        answered += 1
    return [{name: value / answered for name, value in one.items()} for one in total], answered
