"""What a site allows: a simulated node follows the experiment, a site with data of its own is strict."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from privacy.ledger import Limits
from privacy.policy import Policy
from privacy.site import Site
from protocol.errors import Refused, SiteError
from protocol.messages import Demand

SIMULATED = Policy.of(Site(None, first=0, step=1), {})
STRICT = Policy.of(Site(Path("/data/hospital")), {})


def demand(**changes: Any) -> Demand:
    """A demand that every site accepts, with changes."""
    accepted = {
        "round": 1,
        "clients": (0,),
        "local_epochs": 1,
        "step_size": 0.1,
        "batch_size": 10,
        "noise_multiplier": 5.0,
        "radius_mode": "update",
        "radius": 0.01,
    }
    return Demand(**(accepted | changes))


def test_the_limits_of_a_simulated_node() -> None:
    assert (SIMULATED.least_noise_multiplier, SIMULATED.radius_floor, SIMULATED.limits) == (0.0, 0.0, Limits())
    assert (SIMULATED.role, SIMULATED.radius_mode) == ("split", "any")
    assert SIMULATED.allow_unsanitised
    assert SIMULATED.ledger_path is None, "what it spends is kept in memory"


def test_the_limits_of_a_site_that_sets_nothing_but_its_data(umbel_home: Path) -> None:
    strict = Policy.of(Site(Path("/data/hospital")), {})
    assert (strict.least_noise_multiplier, strict.radius_floor, strict.limits) == (1.0, 0.01, Limits())
    assert (strict.role, strict.radius_mode, strict.report_noise_multiplier) == ("train", "any", 0.0)
    assert not strict.allow_unsanitised
    assert strict.ledger_path == umbel_home / "ledger.sqlite"


def test_a_budget_is_kept_exactly() -> None:
    assert Policy.of(Site(Path("/data")), {"budget": 0.1}).limits == Limits(Fraction(0.1))
    assert Policy.of(Site(Path("/data")), {"budget": "40", "most-participations": 9}).limits == Limits(Fraction(40), 9)


def test_the_node_configuration_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_BUDGET", "7")
    monkeypatch.setenv("UMBEL_ROLE", "validation")
    policy = Policy.of(Site(Path("/data")), {"budget": 9})
    assert (policy.limits.budget, policy.role) == (9, "validation")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"role": "both"}, "role must be one of train, validation, split, got 'both'"),
        ({"least-noise-multiplier": 0}, "least-noise-multiplier must be a number above 0, got 0"),
        ({"radius-floor": "small"}, "radius-floor must be a number above 0, got 'small'"),
        ({"budget": -1}, "budget must be a number of at least 0, got -1"),
        ({"report-bound": float("inf")}, "report-bound must be a number above 0, got inf"),
        ({"allow-unsanitised": "perhaps"}, "allow-unsanitised must be true or false, got 'perhaps'"),
        ({"allow-unsanitised": True}, "allow-unsanitised is for simulation"),
        ({"tripwire": 1}, "tripwire must be true or false, got '1'"),
        ({"noise-all-items": "yes"}, "noise-all-items must be true or false, got 'yes'"),
        ({"balanced-batches": 0.5}, "balanced-batches must be true or false, got '0.5'"),
        (
            {"trip-wire": True},
            "unknown entries trip-wire; a policy may set .*tripwire, noise-all-items, balanced-batches",
        ),
    ],
)
def test_an_entry_that_cannot_be_used_is_named(entry: dict[str, Any], reason: str) -> None:
    with pytest.raises(SiteError, match=reason):
        Policy.of(Site(Path("/data")), entry)


@pytest.mark.parametrize("changes", [{}, {"noise_multiplier": 0.0}, {"disclose_choice": True}, {"radius": 1e-9}])
def test_a_simulated_node_accepts_anything(changes: dict[str, Any]) -> None:
    SIMULATED.check(demand(**changes))


@pytest.mark.parametrize("nu", [1, 1.0, 5.0, 1e9])
def test_a_site_accepts_its_least_noise_and_more(nu: float) -> None:
    STRICT.check(demand(noise_multiplier=nu))


def test_a_site_refuses_an_unsanitised_release() -> None:
    with pytest.raises(Refused, match=r"unsanitised release \(noise multiplier 0\); this site allows none"):
        STRICT.check(demand(noise_multiplier=0.0))


@pytest.mark.parametrize("nu", [5e-324, 0.1, 0.9999999])
def test_a_site_refuses_less_noise_than_its_least(nu: float) -> None:
    with pytest.raises(Refused, match=r"noise multiplier .*; this site accepts no less than 1\.0"):
        STRICT.check(demand(noise_multiplier=nu))


def test_a_site_does_not_tell_which_hypothesis_a_client_chose() -> None:
    with pytest.raises(Refused, match="which hypothesis each client chose; this site does not tell"):
        STRICT.check(demand(disclose_choice=True))


def test_a_site_that_allows_unsanitised_releases_may_still_set_a_least_noise() -> None:
    policy = Policy.of(Site(None, first=0, step=1), {"least-noise-multiplier": 2.0})
    policy.check(demand(noise_multiplier=2.0))
    with pytest.raises(Refused, match="no less than 2"):
        policy.check(demand(noise_multiplier=0.0))


def test_a_site_may_accept_nothing_but_a_formal_guarantee() -> None:
    policy = Policy.of(Site(Path("/data")), {"radius-mode": "public"})
    policy.check(demand(radius_mode="public"))
    with pytest.raises(Refused, match="this site accepts a public radius alone"):
        policy.check(demand(radius_mode="update"))


GUARDS = ("tripwire", "noise-all-items", "balanced-batches")


@pytest.mark.parametrize("site", [Site(None, first=0, step=1), Site(Path("/data"))], ids=["simulated", "own data"])
def test_what_guards_local_models_is_off_until_a_site_sets_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def guards(**entries: Any) -> list[bool]:
        policy = Policy.of(site, entries)
        return [policy.tripwire, policy.noise_all_items, policy.balanced_batches]

    assert guards() == [False, False, False]
    for position, name in enumerate(GUARDS):
        assert guards(**{name: True}) == [position == other for other in range(3)]
    monkeypatch.setenv("UMBEL_BALANCED_BATCHES", "true")
    assert guards() == [False, False, True]
