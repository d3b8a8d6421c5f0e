"""The built-in mechanisms by name, and the import of any other."""

from __future__ import annotations

from umbel.privacy.mechanisms.base import Mechanism
from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian
from umbel.privacy.mechanisms.gaussian import Gaussian
from umbel.privacy.mechanisms.laplace import Laplace
from umbel.protocol.plugins import load_class, refuse_uncalled

MECHANISMS: dict[str, type[Mechanism]] = {kind.name: kind for kind in (Laplace, Gaussian, DiscreteGaussian)}


def load(name: str) -> type[Mechanism]:
    """Return the mechanism class `name`.

    Raises
    ------
    ConfigError
        If there is none, or it is not a `Mechanism`; the text lists the choices. Also if it has a public method that
        nothing calls.
    """
    kind = load_class("mechanism", name, MECHANISMS, Mechanism)
    refuse_uncalled("mechanism", kind, Mechanism)
    return kind
