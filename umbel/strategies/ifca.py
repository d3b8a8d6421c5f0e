"""Iterative federated clustering (Ghosh et al., 2020), with model averaging; for comparison."""

from __future__ import annotations

from umbel.protocol.arrays import Labels, Matrix, Vectors
from umbel.strategies.base import HypothesisStrategy


class IFCA(HypothesisStrategy):
    """Groups releases by the hypotheses that clients say they chose.

    A site that sanitises refuses to tell, so this runs only where unsanitised releases are allowed.
    """

    discloses_choice = True

    def assign(self, releases: Vectors, hypotheses: Matrix, choices: Labels | None) -> Labels:
        """Return the disclosed choices."""
        assert choices is not None
        return choices
