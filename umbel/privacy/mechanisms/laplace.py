"""The Laplace mechanism under Euclidean distance (group privacy paper, Lemma 4.1 and Algorithm 2).

The noise rho in R^n has density proportional to exp(-epsilon |rho|), epsilon = n / (nu r) for a radius r.
Its norm is Gamma(n, 1/epsilon), its direction uniform, its components have variance (n + 1)/epsilon^2
(Lemma 4.3). All arithmetic is in float64.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from umbel.privacy.mechanisms.base import Matrix, Mechanism, NoiseSource, each, stacked
from umbel.protocol.errors import Refused
from umbel.protocol.release import quotient

if TYPE_CHECKING:
    from umbel.privacy.mechanisms.base import Loss


@dataclass(frozen=True)
class Laplace(Mechanism):
    """Noise of scale epsilon = n / (nu r): one unit of epsilon is spread over nu components."""

    name: ClassVar[str] = "laplace"

    def noise(self, sizes: Sequence[int], radii: Matrix, generators: Iterator[NoiseSource]) -> Matrix:
        """Draw noise as a scale mixture of Gaussians.

        ``sqrt(W) g`` with W ~ Gamma((n+1)/2, scale 2/epsilon^2) and g ~ N(0, I_n) has the distribution of the paper's
        norm and direction (Sec. 4.2) without a normalisation, so there is no zero norm to divide by. The gammas of all
        parts are drawn first, then the row's normals; the same seed requires the same order.
        """
        n, shapes = sum(sizes), [(size + 1) / 2 for size in sizes]
        mixing, normals = list[float](), list[Matrix]()
        for generator in each(generators, len(radii)):
            mixing += map(generator.standard_gamma, shapes)
            normals.append(generator.standard_normal(n))
        noise = stacked(normals, n)
        epsilons = np.asarray(sizes) / (self.noise_multiplier * radii)
        scales = np.sqrt(np.array(mixing).reshape(radii.shape) * 2.0) / epsilons
        noise *= scales if len(sizes) == 1 else np.repeat(scales, sizes, axis=1)
        return noise

    def deviation(self, n: int) -> float:
        return self.noise_multiplier * math.sqrt(n + 1) / n

    def longest(self, n: int, rare: float) -> float:
        """Return the bound for a gamma variate, whose tail is sub-gamma (Boucheron, Lugosi and Massart, Sec. 2.4)."""
        return self.noise_multiplier * (1 + math.sqrt(2 * rare / n) + rare / n)

    def count_radius(self, choice_epsilon: float) -> float:
        """Return the radius at which two counts that move by 1 each cost `choice_epsilon` together.

        The sums cost as much as the total distance by which they move, which is at most 2 radii.
        """
        if not choice_epsilon > 0:
            raise Refused(
                "with several hypotheses, a site's Laplace release needs a choice-epsilon to hide how many clients "
                "chose each; ask for a choice-epsilon above 0, for 1 hypothesis, or for mechanism gaussian",
                code="refused.open-choice",
            )
        return 2.0 / (self.noise_multiplier * choice_epsilon)

    def pure(self, n: int, distance: int) -> Fraction | None:
        return quotient(distance * n, self.noise_multiplier)

    def loss(self, n: int, distance: float) -> Loss:
        from umbel.privacy.mechanisms.laplace_loss import LaplaceLoss  # here, since noise alone needs no quadrature

        # If the noise is so small that its price overflows, the largest loss is the largest float.
        return LaplaceLoss(n, min(distance * n / self.noise_multiplier, sys.float_info.max))
