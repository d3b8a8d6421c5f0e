"""An audit: the claim for a setting, beside the smallest epsilon that its canaries prove.

The scores of one canary in four decide how many coins to guess; the bound uses only the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from umbel.privacy.accounting.guarantee import DELTA, amount, guarantee, site_release
from umbel.privacy.mechanisms import Gaussian
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import LAPLACE, Clipping, Kind, Release
from umbel_lab.attacks.audit.bounds import CONFIDENCE, PILOTS, Bound, Verdict, best_guesses, prove
from umbel_lab.attacks.audit.canaries import Herd, Seen, Setting, watch
from umbel_lab.attacks.audit.site import SiteHerd
from umbel_lab.output import Page, Section

CANARIES = 50_000

_FEWEST = 100  # canaries
_NUMBERS = 200_000_000  # that all canaries of a setting release at most, for the time that takes
_TRAINED, _NUMBERS_OF_SITE = 10_000, 20_000_000  # that a site trains, one client at a time, and their data
_MESSAGES, _MESSAGES_OF_SITE = 4_000, 1_000  # of canaries in separate sites, each of which takes a message each time
_ALL_NOISE = 1e6  # nu a parameter, beside which a choice is all that a release tells


@dataclass(frozen=True)
class Finding:
    """A setting, and the bounds at delta = 0 and at the given delta."""

    setting: Setting
    pure: Bound
    at_delta: Bound

    @property
    def verdict(self) -> Verdict:
        """The worse of the two."""
        return max(self.pure.verdict, self.at_delta.verdict, key=list(Verdict).index)


def page(findings: Sequence[Finding], delta: float, confidence: float) -> Page:
    """Return a table of findings."""
    columns = ("setting", "claimed, pure", "shown", f"claimed at {delta:g}", "shown", "guessed right", "verdict")
    rows = []
    for finding in findings:
        pure, other = finding.pure, finding.at_delta
        figures = (amount(pure.claimed), f"{pure.shown:.3g}", amount(other.claimed), f"{other.shown:.3g}")
        right = f"{other.right:,} of {other.guesses:,}"
        rows.append((finding.setting.name, *figures, right, str(finding.verdict)))
    title = f"Claimed epsilon, and shown at a confidence of {confidence:.4g}"
    return Page(title, [Section("", "", columns, rows)], [])


def audit(
    setting: Setting,
    canaries: int = CANARIES,
    seed: int = 0,
    delta: float = DELTA,
    confidence: float = CONFIDENCE,
    as_site: bool = False,
) -> Finding:
    """Send canaries through the gate, and return the findings.

    Fewer canaries than `canaries` take part if they would release too many values. The seed is that of all draws, the
    gate's too, unless the canaries are a deployed site's clients (`as_site`). The confidence is that of each lower
    bound.
    """
    if not 0 < delta < 1 or not 0 < confidence < 1:
        text = f"delta and confidence must lie between 0 and 1, got {delta:g} and {confidence:g}"
        raise ConfigError(text, code="config.out-of-range")
    if canaries < _FEWEST:
        raise ConfigError(f"an audit needs at least {_FEWEST} canaries, got {canaries}", code="config.too-few-canaries")
    seen = watch(setting, affordable(setting, canaries, as_site), seed, SiteHerd if as_site else Herd)
    claimed = guarantee(seen.account, delta)
    assert claimed is not None, "no setting is without a guarantee"
    return Finding(
        setting,
        _bound(seen, claimed.pure, 0.0, confidence),
        _bound(seen, claimed.epsilon, delta, confidence),
    )


def affordable(setting: Setting, canaries: int, as_site: bool = False) -> int:
    """Return how many of the canaries can take part in a reasonable time."""
    limit = _NUMBERS // (setting.numbers * setting.times)
    if as_site:
        limit = min(_TRAINED // setting.times, _NUMBERS_OF_SITE // setting.numbers)
    if setting.by_site:
        limit = min(limit, (_MESSAGES_OF_SITE if as_site else _MESSAGES) // setting.times)
    return min(canaries, max(_FEWEST, limit))


def _bound(seen: Seen, claimed: float, delta: float, confidence: float) -> Bound:
    pilots = len(seen.coins) // PILOTS
    guesses = best_guesses(seen.scores[:pilots], len(seen.coins) - pilots, delta, confidence)
    return prove(seen.scores[pilots:], seen.coins[pilots:], guesses, claimed, delta, confidence)


def training(n: int, nu: float, k: int = 1, choice_epsilon: float = 0.0, mechanism: str = LAPLACE) -> Release:
    """Return a training release with a public clip norm."""
    return Release(Kind.TRAIN, n, nu, Clipping.PUBLIC, mechanism=mechanism, hypotheses=k, choice_epsilon=choice_epsilon)


@dataclass(frozen=True)
class SettingOptions:
    """A setting of the user's: n, nu, what the clients of umbel release, and how often."""

    parameters: Annotated[int, Field(ge=1)]
    noise_multiplier: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    mechanism: str = LAPLACE
    hypotheses: Annotated[int, Field(ge=1)] = 1
    choice_epsilon: Annotated[float, Field(ge=0)] = 0.0
    release: Literal["client", "site"] = "client"
    participations: Annotated[int, Field(ge=1)] = 1

    def settings(self) -> list[Setting]:
        """Return the settings to audit, once and several times."""
        n, times = self.parameters, self.participations
        release = training(n, self.noise_multiplier, self.hypotheses, self.choice_epsilon, self.mechanism)
        release = site_release(release) if self.release == "site" else release
        found, what = [], "update and choice" if release.chooses else "update"
        if release.choice_epsilon:
            # The sum of both is audited below; the cost of the choice alone must not exceed its share.
            hidden = replace(release, noise_multiplier=_ALL_NOISE * n, mechanism=LAPLACE)
            found.append(Setting("choice alone", hidden, moves=False))
        found.append(Setting(what, release))
        if n > 1:
            found.append(Setting(f"{what}, random directions", release, random=True))
        if times > 1:
            found.append(Setting(f"{what}, {times} times", release, times))
        return found


def standard() -> list[Setting]:
    """Return the settings that are audited by default: small models with meaningful claims."""
    joint, often = training(2, 4, 2, 1.0), training(2, 16, 2, 0.25)
    return [
        *(Setting(f"laplace, n = {n}, nu = {nu:g}", training(n, nu)) for n, nu in _LAPLACE),
        Setting("laplace, n = 11, nu = 5.5, random directions", training(11, 5.5), random=True),
        *(Setting(f"gaussian, n = {n}, nu = {nu:g}", training(n, nu, mechanism=Gaussian.name)) for n, nu in _GAUSSIAN),
        *(
            Setting(f"choice of {k}, choice-epsilon {epsilon:g}", training(1, _ALL_NOISE, k, epsilon), moves=False)
            for k, epsilon in _CHOICES
        ),
        Setting("update and choice, n = 2, nu = 4, k = 2, choice-epsilon 1", joint),
        Setting("the same with nu = 16, choice-epsilon 0.25, 8 times", often, times=8),
        Setting("site, laplace, n = 1, nu = 1", site_release(training(1, 1.0))),
        Setting("site, laplace, n = 2, nu = 4, k = 2, choice-epsilon 1", site_release(joint)),
        Setting("site, gaussian, n = 2, nu = 2.5, k = 2", site_release(training(2, 2.5, 2, mechanism=Gaussian.name))),
    ]


def deployed() -> list[Setting]:
    """Return the settings that are audited at a deployed site by default: fewer, since it trains its clients."""
    joint = training(2, 4, 2, 1.0)
    return [
        Setting("laplace, n = 1, nu = 1", training(1, 1.0)),
        Setting("laplace, n = 11, nu = 5.5, random directions", training(11, 5.5), random=True),
        Setting("gaussian, n = 2, nu = 2.5", training(2, 2.5, mechanism=Gaussian.name)),
        Setting("choice of 2, choice-epsilon 1", training(1, _ALL_NOISE, 2, 1.0), moves=False),
        Setting("update and choice, n = 2, nu = 4, k = 2, choice-epsilon 1, twice", joint, times=2),
        Setting("site, laplace, n = 1, nu = 1", site_release(training(1, 1.0))),
    ]


_LAPLACE = ((1, 2.0), (1, 0.5), (2, 2.0), (4, 4.0), (11, 11.0), (11, 5.5))
_GAUSSIAN = ((2, 8.0), (11, 4.0), (11, 2.5))
_CHOICES = ((2, 1.0), (10, 2.0))
