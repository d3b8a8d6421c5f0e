"""What a site's policy accepts and what it refuses; how its entries are read, `test_site.py` sees."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.errors import raises
from tests.helpers.messages import task_of
from tests.helpers.sites import own, simulated
from umbel.protocol.errors import Refused, SiteError

FORMAL: dict[str, Any] = {"clipping": "public"}
BOTH: dict[str, Any] = {"mechanisms": "laplace gaussian"}


@pytest.mark.parametrize(
    ("changes", "hypotheses"),
    [
        *(({name: value}, 2) for name, value in (("noise_multiplier", 0.0), ("disclose_choice", True))),
        *(({name: 2**31}, 2) for name in ("local_epochs", "local_steps")),
        ({"clip_norm": 1e-9}, 2),
        ({"mechanism": "own.code:Noise"}, 1000),
    ],
)
def test_a_simulated_node_accepts_anything(changes: dict[str, Any], hypotheses: int) -> None:
    simulated().policy.check(task_of(**changes), hypotheses)


@pytest.mark.parametrize(
    ("entries", "accepted", "hypotheses"),
    [
        *(({}, {"noise_multiplier": nu}, 2) for nu in (1, 1.0, 5.0, 1e9)),
        ({}, {"local_epochs": 100, "local_steps": 1000}, 2),
        (FORMAL, FORMAL, 2),
        ({"max_choice_epsilon": 1.0}, {"choice_epsilon": 1.0}, 2),
        ({"max_choice_epsilon": 1.0}, {}, 1),  # there is nothing to choose
        (BOTH, {"mechanism": "gaussian"}, 2),
    ],
)
def test_a_site_accepts_what_its_policy_allows(
    entries: dict[str, Any], accepted: dict[str, Any], hypotheses: int
) -> None:
    own(**entries).policy.check(task_of(**accepted), hypotheses)


@pytest.mark.parametrize(
    ("entries", "asked", "code", "parts"),
    [
        ({}, {"noise_multiplier": 0.0}, "unsanitised", ()),
        *(({}, {"noise_multiplier": nu}, "noise", (1.0,)) for nu in (5e-324, 0.1, 0.9999999)),
        ({}, {"local_epochs": 101}, "work", ("local-epochs", 101, 100)),
        ({}, {"local_steps": 1001}, "work", ("local-steps", 1001, 1000)),
        ({"max_work": "epochs=3"}, {"local_epochs": 4}, "work", (3,)),
        ({"max_work": "steps=3"}, {"local_steps": 4}, "work", (3,)),
        ({}, {"disclose_choice": True}, "disclose-choice", ()),
        (FORMAL, {"clipping": "update"}, "clipping", ("update", "public")),
        ({"max_choice_epsilon": 1.0}, {}, "choice", ("2 hypotheses",)),
        ({"max_choice_epsilon": 1.0}, {"choice_epsilon": 1.5}, "choice", (1.5,)),
        ({}, {"mechanism": "gaussian"}, "mechanism", ("gaussian", "laplace")),
        (BOTH, {"mechanism": "own.code:Noise"}, "mechanism", ("own.code:Noise",)),
        ({"mechanisms": "discrete-gaussian"}, {"mechanism": "gaussian"}, "mechanism", ()),
    ],
)
def test_a_site_refuses_what_goes_below_its_policy(
    entries: dict[str, Any], asked: dict[str, Any], code: str, parts: tuple[object, ...]
) -> None:
    with raises(Refused, f"refused.{code}", *parts):
        own(**entries).policy.check(task_of(**asked), 2)


def test_a_site_that_allows_unsanitised_releases_may_still_set_a_lowest_noise() -> None:
    policy = simulated(min_noise_multiplier=2.0).policy
    policy.check(task_of(noise_multiplier=2.0), 2)
    with raises(Refused, "refused.noise", 2):
        policy.check(task_of(noise_multiplier=0.0), 2)


@pytest.mark.parametrize("names", ["laplace gausian", "laplace, gaussian", ""])
def test_a_mechanism_that_there_is_none_of_closes_the_site(names: str) -> None:
    with raises(SiteError, "site.conflict", "mechanisms"):
        own(mechanisms=names)
