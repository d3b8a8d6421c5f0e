"""What a site's policy accepts and what it refuses; how its entries are read, `test_config.py` sees."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.errors import raises
from tests.helpers.messages import task_of
from tests.helpers.sites import own, simulated
from umbel.protocol.errors import Refused

FORMAL: dict[str, Any] = {"clipping": "public"}
BOTH: dict[str, Any] = {"mechanisms": "laplace gaussian"}
CHOICE: dict[str, Any] = {"max_choice_epsilon": 1.0}

# What the policy says, what a server asks for with two hypotheses, and the code of the refusal, if it is one.
TABLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(({}, {"noise_multiplier": nu}, "") for nu in (1, 1.0, 5.0, 1e9)),
    *(({}, {"noise_multiplier": nu}, "noise") for nu in (5e-324, 0.1, 0.9999999)),
    ({}, {"noise_multiplier": 0.0}, "unsanitised"),
    ({}, {"local_epochs": 100, "local_steps": 1000}, ""),
    ({}, {"local_epochs": 101}, "work"),
    ({}, {"local_steps": 1001}, "work"),
    ({"max_work": "epochs=3"}, {"local_epochs": 4}, "work"),
    ({"max_work": "steps=3"}, {"local_steps": 4}, "work"),
    ({}, {"disclose_choice": True}, "disclose-choice"),
    (FORMAL, FORMAL, ""),
    (FORMAL, {"clipping": "update"}, "clipping"),
    (CHOICE, {"choice_epsilon": 1.0}, ""),
    (CHOICE, {"choice_epsilon": 1.5}, "choice"),
    (CHOICE, {}, "choice"),
    (BOTH, {"mechanism": "gaussian"}, ""),
    (BOTH, {"mechanism": "own.code:Noise"}, "mechanism"),
    ({}, {"mechanism": "gaussian"}, "mechanism"),
    ({"mechanisms": "discrete-gaussian"}, {"mechanism": "gaussian"}, "mechanism"),
]


@pytest.mark.parametrize(("entries", "asked", "code"), TABLE)
def test_a_site_refuses_what_goes_below_its_policy(entries: dict[str, Any], asked: dict[str, Any], code: str) -> None:
    simulated().policy.check(task_of(**asked), 1000)  # which accepts anything
    if not code:
        own(**entries).policy.check(task_of(**asked), 2)
        return
    with raises(Refused, f"refused.{code}"):
        own(**entries).policy.check(task_of(**asked), 2)


def test_of_one_hypothesis_there_is_nothing_to_choose() -> None:
    own(**CHOICE).policy.check(task_of(), 1)


def test_a_site_that_allows_unsanitised_releases_may_still_set_a_lowest_noise() -> None:
    policy = simulated(min_noise_multiplier=2.0).policy
    policy.check(task_of(noise_multiplier=2.0), 2)
    with raises(Refused, "refused.noise", 2):
        policy.check(task_of(noise_multiplier=0.0), 2)
