"""What a site allows. The site's policy wins over the server's demand.

A policy is read from the node's own configuration, and from its environment where that says
nothing: ``least-noise-multiplier`` or ``UMBEL_LEAST_NOISE_MULTIPLIER``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from federation import umbel_home
from privacy.site import Site, SiteError
from protocol import Demand

ROLES = ("train", "validation", "split")
MODES = ("any", "public")


class Refused(Exception):
    """The site refuses a demand; the text is for the node's own log."""


@dataclass(frozen=True)
class Policy:
    """The limits a site sets.

    Attributes
    ----------
    role : str
        ``train``: all clients train and none reports. ``validation``: all report and none
        trains. ``split``: as the data's manifest says.
    least_noise_multiplier : float
        The lowest nu it accepts.
    radius_mode : str
        ``public`` accepts only demands with a formal guarantee, ``any`` the heuristic as well.
    radius_floor : float
        The least radius within which an update is hidden, whatever the server asks.
    budget : Fraction or None
        The most a client may spend, as a sum of n / nu.
    allow_unsanitised : bool
        Whether nu = 0, and the disclosure of the chosen hypothesis, are accepted at all.
    ledger_path : Path or None
        Where charges are kept; None, for the run's memory alone, in simulation.
    report_noise_multiplier : float
        Above 0, training clients also report: loss and metric with Laplace noise of this scale.
    report_bound : float
        Numbers reported with noise are clipped to between 0 and this.
    """

    role: str
    least_noise_multiplier: float
    radius_mode: str
    radius_floor: float
    budget: Fraction | None
    allow_unsanitised: bool
    ledger_path: Path | None
    report_noise_multiplier: float
    report_bound: float

    @classmethod
    def of(cls, site: Site, node_config: Mapping[str, Any]) -> Policy:
        """Read a site's policy; where it says nothing, a site with data of its own is strict.

        Raises
        ------
        SiteError
            When an entry cannot be used, so that a slip of the pen never weakens a policy.
        """
        read = _Reader(node_config)
        own = not site.simulated
        allow_unsanitised = read.flag("allow-unsanitised", not own)
        if own and allow_unsanitised:
            raise SiteError("allow-unsanitised is for simulation; a site with data of its own cannot set it")
        budget = read.number("budget", math.inf, least=0, infinite=True)
        ledger = read.text("ledger-path", str(umbel_home() / "ledger.sqlite") if own else "")
        return cls(
            role=read.choice("role", "train" if own else "split", ROLES),
            least_noise_multiplier=read.number("least-noise-multiplier", 1.0 if own else 0.0, least=0, above=own),
            radius_mode=read.choice("radius-mode", "any", MODES),
            radius_floor=read.number("radius-floor", 0.01 if own else 0.0, least=0, above=own),
            budget=None if math.isinf(budget) else Fraction(budget),
            allow_unsanitised=allow_unsanitised,
            ledger_path=Path(ledger).expanduser() if ledger else None,
            report_noise_multiplier=read.number("report-noise-multiplier", 0.0, least=0),
            report_bound=read.number("report-bound", 1.0, least=0, above=True),
        )

    def check(self, demand: Demand) -> None:
        """Raise `Refused` when the demand goes below the policy."""
        if demand.noise_multiplier == 0 and not self.allow_unsanitised:
            raise Refused("the server asks for an unsanitised release (noise multiplier 0); this site allows none")
        if demand.noise_multiplier < self.least_noise_multiplier:
            raise Refused(
                f"the server asks for noise multiplier {demand.noise_multiplier}; "
                f"this site accepts no less than {self.least_noise_multiplier}"
            )
        if self.radius_mode == "public" and demand.radius_mode != "public":
            raise Refused(f"the server asks for radius {demand.radius_mode!r}; this site accepts a public radius alone")
        if demand.disclose_choice and not self.allow_unsanitised:
            raise Refused("the server asks which hypothesis each client chose; this site does not tell")


class _Reader:
    """Reads a site's entries: what the node configuration says, else the environment, else the default."""

    def __init__(self, node_config: Mapping[str, Any]) -> None:
        self._config = node_config

    def _get(self, key: str, default: Any) -> Any:
        if key in self._config:
            return self._config[key]
        return os.environ.get("UMBEL_" + key.replace("-", "_").upper(), default)

    def text(self, key: str, default: str) -> str:
        return str(self._get(key, default))

    def choice(self, key: str, default: str, options: tuple[str, ...]) -> str:
        value = self.text(key, default)
        if value not in options:
            raise SiteError(f"{key} must be one of {', '.join(options)}, got {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = str(self._get(key, default)).lower()
        if value not in ("true", "false"):
            raise SiteError(f"{key} must be true or false, got {value!r}")
        return value == "true"

    def number(self, key: str, default: float, *, least: float, above: bool = False, infinite: bool = False) -> float:
        given = self._get(key, default)
        try:
            value = float(given) if not isinstance(given, bool) else math.nan
        except (TypeError, ValueError):
            value = math.nan
        fits = value > least if above else value >= least
        if not fits or (math.isinf(value) and not infinite):
            raise SiteError(f"{key} must be a number {'above' if above else 'of at least'} {least:g}, got {given!r}")
        return value
