"""The releases of simulated clients, made chunk by chunk on the GPU that trains them.

The steps are those of `umbel.privacy.mechanisms.sanitise`, and the noise has the same law; it is drawn by PyTorch,
seeded for each client and round. A site's noise is not drawn here: it comes from the operating system's entropy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from umbel.privacy.channels import Flags, Ids
from umbel.privacy.channels.client import ClientSanitiser, Released, blocks
from umbel.privacy.mechanisms.base import Mechanism
from umbel.privacy.mechanisms.gaussian import Gaussian
from umbel.privacy.mechanisms.laplace import Laplace
from umbel.privacy.mechanisms.randomness import streams
from umbel.privacy.mechanisms.sanitise import LARGEST, grid_step
from umbel.protocol.arrays import Arrays, Labels, Packed
from umbel.protocol.release import Clipping, NoisePer

_DRAWN = (Laplace, Gaussian, type(None))
_AT_ONCE = 1 << 22  # numbers that are released together, in 64 bits
_LEAST = 4096  # numbers of a model; a smaller one the host releases faster than a GPU is asked to


@dataclass(frozen=True)
class ReleasesOnGpu:
    """See `umbel.privacy.site.work.OnGpu`.

    Attributes
    ----------
    sanitiser : ClientSanitiser
    seeds : sequence of int
        The seed of each client's noise in this round.
    matrix : Tensor, shape (m, n)
        The releases, in the host's pinned memory.
    arrays : Packed
        The same.
    """

    sanitiser: ClientSanitiser
    seeds: Sequence[int]
    matrix: Tensor
    arrays: Packed

    @classmethod
    def of(
        cls, sanitiser: ClientSanitiser, clients: Ids, shapes: Mapping[str, tuple[int, ...]]
    ) -> ReleasesOnGpu | None:
        """Return what releases clients; None unless they are simulated with a seed, and a GPU can draw their noise.

        A site's noise comes from its operating system. Noise for each row of each array has too many parts.
        """
        seed, task, n = sanitiser.place.seed, sanitiser.task, sanitiser.hypotheses.shape[1]
        drawn = type(sanitiser.mechanism) in _DRAWN and task.noise_per is not NoisePer.ROW and n >= _LEAST
        if seed is None or not (sanitiser.place.site.simulated and drawn):
            return None
        seeds = [int(own.integers(2**63)) for own in streams(seed, "noise on a GPU", task.round, clients)]
        matrix = torch.empty(len(clients), n).pin_memory()
        return cls(sanitiser, seeds, matrix, Packed(matrix.numpy(), shapes))

    def release(self, part: slice, trained: Tensor, start: Tensor) -> None:
        """See `umbel.privacy.site.work.OnGpu.release`."""
        sanitiser, public = self.sanitiser, self.sanitiser.task.clipping is Clipping.PUBLIC
        for block in blocks(len(trained), trained.shape[1], _AT_ONCE):
            trained[block] = release(
                sanitiser.mechanism, trained[block], start[block], sanitiser.radius, public, self.seeds[part][block],
                sanitiser.parts, sanitiser.finest,
            )  # fmt: skip
        self.matrix[part].copy_(trained, non_blocking=True)

    def leave(self, clients: Ids, results: Arrays, chosen: Labels, paid: Flags) -> Released:
        """See `umbel.privacy.channels.Sanitiser.leave`; `results` are the releases already."""
        return self.sanitiser.released(self.arrays, chosen, paid)


def release(
    mechanism: Mechanism | None,
    trained: Tensor,
    start: Tensor,
    radius: float,
    public: bool,
    seeds: Sequence[int],
    parts: Sequence[slice] | None,
    finest: float,
) -> Tensor:
    """Return the releases (m, n) of clients that trained from `start` (m, n), a seed for each; the host never waits.

    For the other arguments see `umbel.privacy.mechanisms.sanitise.release_in_place`. As there, training that diverged
    counts as no update. Large models are changed in place, since in 64 bits few copies fit.
    """
    updates = trained.double().sub_(start)
    updates.masked_fill_(~updates.isfinite().all(1, keepdim=True), 0.0)
    generators = [torch.Generator(trained.device).manual_seed(seed) for seed in seeds]
    for own in parts or [slice(0, updates.shape[1])]:
        part = updates[:, own]
        radii = torch.linalg.vector_norm(part, dim=1, keepdim=True).clamp(min=radius)
        if public:
            part *= radius / radii
            radii = torch.full_like(radii, radius)
        if mechanism:
            part += _noise(mechanism, part.shape[1], radii, generators)
    updates.add_(start)
    if mechanism:
        step = grid_step(mechanism.deviation(updates.shape[1]) * radius, finest)
        updates.div_(step).round_().mul_(step)
    return updates.clamp_(-LARGEST, LARGEST).float()


def _noise(mechanism: Mechanism, n: int, radii: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Return noise of n components for each of some radii (m, 1), as `Laplace.noise` and `Gaussian.noise` do."""
    laplace = isinstance(mechanism, Laplace)
    normals, scale = radii.new_empty(len(radii), 2 * n + 1 if laplace else n), mechanism.noise_multiplier * radii
    for row, generator in zip(normals, generators, strict=True):
        row.normal_(generator=generator)
    if laplace:  # the squared norm of n + 1 normals is twice a Gamma((n+1)/2)
        scale = scale / n * torch.linalg.vector_norm(normals[:, n:], dim=1, keepdim=True)
    return normals[:, :n].mul_(scale)
