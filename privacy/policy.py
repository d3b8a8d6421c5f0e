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
from functools import cache
from pathlib import Path
from typing import Any

from privacy.ledger import Limits
from privacy.site import DATA_PATH, GEONAMES_PATH, INSECURE_SEED, KEEP_MODEL, PLACE, Site
from protocol.errors import Refused, SiteError
from protocol.home import umbel_home
from protocol.messages import MAX_HYPOTHESES, Demand

ROLES = ("train", "validation", "split")
MODES = ("any", "public")


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
    most_hypotheses : int
        The largest k it accepts. Which hypothesis a client chose is not hidden by the noise on
        its update, so only k = 1 leaves nothing outside the formal guarantee.
    limits : Limits
        The most a client may spend, and the most often it may release.
    allow_unsanitised : bool
        Whether nu = 0, and the disclosure of the chosen hypothesis, are accepted at all.
    ledger_path : Path or None
        Where charges are kept; None, for the run's memory alone, in simulation.
    report_noise_multiplier : float
        Above 0, training clients also report: loss and metric with Laplace noise of this scale.
    report_bound : float
        Numbers reported with noise are clipped to between 0 and this.
    tripwire : bool
        Refuse to train models that an honest server would not send: degenerate or sent before.
    noise_all_items : bool
        Where the run adds noise to items that changed (`Demand.message_noise`), add it to all.
    balanced_batches : bool
        Fill a factor model's minibatches with as many liked items as others.
    """

    role: str
    least_noise_multiplier: float
    radius_mode: str
    radius_floor: float
    most_hypotheses: int
    limits: Limits
    allow_unsanitised: bool
    ledger_path: Path | None
    report_noise_multiplier: float
    report_bound: float
    tripwire: bool
    noise_all_items: bool
    balanced_batches: bool

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
        participations = read.number("most-participations", math.inf, least=0, infinite=True)
        ledger = Path(read.text("ledger-path", str(umbel_home() / "ledger.sqlite") if own else "")).expanduser()
        if own and not ledger.is_absolute():
            # Empty or relative, it would be another ledger, or none, in every process.
            raise SiteError(f"ledger-path must be an absolute path, got {str(ledger)!r}")
        role = read.choice("role", "train" if own else "split", ROLES)
        if own and site.placed and role != "split":
            raise SiteError(
                f"place is for role split, where clients are numbered over the whole federation; not {role}"
            )
        report_noise_multiplier = read.number("report-noise-multiplier", 0.0, least=0)
        if report_noise_multiplier > 0 and role != "train":
            raise SiteError(f"report-noise-multiplier is for role train; role {role} reports without noise")
        policy = cls(
            role=role,
            least_noise_multiplier=read.number("least-noise-multiplier", 1.0 if own else 0.0, least=0, above=own),
            radius_mode=read.choice("radius-mode", "any", MODES),
            radius_floor=read.number("radius-floor", 0.01 if own else 0.0, least=0, above=own),
            most_hypotheses=int(read.number("most-hypotheses", MAX_HYPOTHESES, least=1)),
            limits=Limits(
                None if math.isinf(budget) else Fraction(budget),
                None if math.isinf(participations) else int(participations),
            ),
            allow_unsanitised=allow_unsanitised,
            ledger_path=ledger if ledger.is_absolute() else None,
            report_noise_multiplier=report_noise_multiplier,
            report_bound=read.number("report-bound", 1.0, least=0, above=True),
            tripwire=read.flag("tripwire", False),
            noise_all_items=read.flag("noise-all-items", False),
            balanced_batches=read.flag("balanced-batches", False),
        )
        if own:
            read.refuse_unknown()
        return policy

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
        self._read: list[str] = []

    def _get(self, key: str, default: Any) -> Any:
        self._read.append(key)
        if key in self._config:
            return self._config[key]
        variable = _variable(key)
        return os.environ[variable] if variable in os.environ else default  # noqa: SIM401 (get() raises and catches)

    def refuse_unknown(self) -> None:
        """Raise for an entry that nothing has read: it may be a limit, misspelt."""
        known = {
            DATA_PATH,
            GEONAMES_PATH,
            PLACE,
            INSECURE_SEED,
            KEEP_MODEL,
            "partition-id",
            "num-partitions",
            *self._read,
        }
        variables = {"UMBEL_HOME", *(_variable(key) for key in self._read)}
        unknown = sorted(set(self._config) - known)
        unknown += sorted(name for name in os.environ if name.startswith("UMBEL_") and name not in variables)
        if unknown:
            raise SiteError(f"unknown entries {', '.join(unknown)}; a policy may set {', '.join(self._read)}")

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


@cache
def _variable(key: str) -> str:
    return "UMBEL_" + key.replace("-", "_").upper()
