"""What a site's policy accepts and what it refuses; how its entries are read, `test_site.py` sees."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.errors import raises
from tests.helpers.messages import task_of
from tests.helpers.sites import field, own, simulated
from umbel.protocol.errors import Refused, SiteError


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"noise_multiplier": 0.0},
        {"disclose_choice": True},
        {"clip_norm": 1e-9},
        {"local_epochs": 2**31},
        {"local_steps": 2**31},
    ],
)
def test_a_simulated_node_accepts_anything(changes: dict[str, Any]) -> None:
    simulated().policy.check(task_of(**changes), 2)


@pytest.mark.parametrize("nu", [1, 1.0, 5.0, 1e9])
def test_a_site_accepts_its_lowest_noise_and_more(nu: float) -> None:
    own().policy.check(task_of(noise_multiplier=nu), 2)


def test_a_site_refuses_an_unsanitised_release() -> None:
    with raises(Refused, "refused.unsanitised"):
        own().policy.check(task_of(noise_multiplier=0.0), 2)


@pytest.mark.parametrize("nu", [5e-324, 0.1, 0.9999999])
def test_a_site_refuses_less_noise_than_its_lowest(nu: float) -> None:
    with raises(Refused, "refused.noise", 1.0):
        own().policy.check(task_of(noise_multiplier=nu), 2)


@pytest.mark.parametrize(("key", "most"), [("local_epochs", 100), ("local_steps", 1000)])
def test_a_site_refuses_more_work_than_it_allows(key: str, most: int) -> None:
    policy = own().policy
    policy.check(task_of(**{key: most}), 2)
    name = key.replace("_", "-")
    with raises(Refused, "refused.work", name, most + 1, most):
        policy.check(task_of(**{key: most + 1}), 2)
    with raises(Refused, "refused.work", 3):
        own(**{f"max_{key}": 3}).policy.check(task_of(**{key: 4}), 2)


def test_a_site_does_not_tell_which_hypothesis_a_client_chose() -> None:
    with raises(Refused, "refused.disclose-choice"):
        own().policy.check(task_of(disclose_choice=True), 2)


def test_a_site_that_allows_unsanitised_releases_may_still_set_a_lowest_noise() -> None:
    policy = simulated(min_noise_multiplier=2.0).policy
    policy.check(task_of(noise_multiplier=2.0), 2)
    with raises(Refused, "refused.noise", 2):
        policy.check(task_of(noise_multiplier=0.0), 2)


def test_a_site_may_accept_nothing_but_a_formal_guarantee() -> None:
    policy = own(clipping="public").policy
    policy.check(task_of(clipping="public"), 2)
    with raises(Refused, "refused.clipping", "update", "public"):
        policy.check(task_of(clipping="update"), 2)


def test_a_site_that_limits_the_choice_accepts_no_open_one() -> None:
    policy = own(max_choice_epsilon=1.0).policy
    policy.check(task_of(choice_epsilon=1.0), 2)
    policy.check(task_of(), 1)  # there is nothing to choose
    with raises(Refused, "refused.choice", "2 hypotheses"):
        policy.check(task_of(), 2)
    with raises(Refused, "refused.choice", 1.5):
        policy.check(task_of(choice_epsilon=1.5), 2)


def test_which_mechanism_runs_is_the_sites_to_allow() -> None:
    with raises(Refused, "refused.mechanism", "gaussian", "laplace"):
        own().policy.check(task_of(mechanism="gaussian"), 2)
    own(mechanisms="laplace gaussian").policy.check(task_of(mechanism="gaussian"), 2)
    with raises(Refused, "refused.mechanism", "own.code:Noise"):
        own(mechanisms="laplace gaussian").policy.check(task_of(mechanism="own.code:Noise"), 2)
    simulated().policy.check(task_of(mechanism="own.code:Noise"), 2)


@pytest.mark.parametrize("node", [own, simulated], ids=["own data", "simulated"])
def test_what_guards_local_parameters_is_off_until_a_site_sets_it(node: Any) -> None:
    guards = ("tripwire", "noise-all-items", "balanced-batches")
    assert [field(node().policy, name) for name in guards] == [False] * 3
    for name in guards:
        policy = node(**{name: True}).policy
        assert [other for other in guards if field(policy, other)] == [name]


@pytest.mark.parametrize("names", ["laplace gausian", "laplace, gaussian", ""])
def test_a_mechanism_that_there_is_none_of_closes_the_site(names: str) -> None:
    with raises(SiteError, "site.conflict", "mechanisms"):
        own(mechanisms=names)
