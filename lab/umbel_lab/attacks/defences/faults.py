"""The faults that an audit finds, each by a separate probe, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass

MENDS = {
    "too-little-noise": "Calibrate for the distance of any two clipped updates, which is two clip norms.",
    "no-pure-epsilon": "Claim a delta above 0, or add noise with a pure epsilon, such as Laplace noise.",
    "other-deviation": "Draw the noise that the attributes promise.",
    "no-noise": "Add noise, or claim nothing.",
    "no-composition": "Count releases: multiply noise by the root of the rounds, or refuse once a budget is spent.",
    "delta-too-large": "Take a delta far below one over the number of clients.",
    "clip-per-array": "Take one norm over all arrays together, then scale all of them by the same factor.",
    "unclipped": "Scale each update to at most the clip norm before the noise is added.",
    "clip-follows-data": "Fix the clip norm and the deviation in public, before any client's data is seen.",
    "seeded-noise": "Draw noise from the operating system's entropy: numpy.random.default_rng() without a seed.",
    "shared-noise": "Draw separate noise for each value.",
    "global-generator": "Draw from a generator that the target makes for itself, without a seed.",
    "bare-arrays": "Add noise to each array.",
    "integers-pass": "Refuse integer arrays, or return those that the server sent.",
    "records-pass": "Drop other records, or add noise to their numbers and count it.",
    "weights-from-data": "Give all clients the same weight.",
    "low-bits": "Round releases to a fixed public grid, such as a power of two below the deviation over 1000.",
    "scalars-pass": "Treat 0-d arrays as arrays of one value: numpy.atleast_1d.",
    "nan-opens": "Refuse, or replace the update by 0, unless all its values are finite.",
    "nan-passes": "Refuse, or replace the update by 0, unless all its values are finite.",
    "zero-update": "Divide by the larger of norm and clip norm: update / max(1, norm / clip_norm).",
    "zero-epsilon": "Refuse an epsilon of 0 when the target is made.",
    "zero-delta": "Refuse a delta of 0 when the target is made, or use noise with a pure epsilon.",
}
"""How to mend each fault, by code."""


@dataclass(frozen=True)
class Fault:
    """A fault that a probe found.

    Attributes
    ----------
    code : str
        The kind, a key of `MENDS`.
    text : str
        The observation.
    """

    code: str
    text: str

    @property
    def mend(self) -> str:
        """How to mend it."""
        return MENDS[self.code]
