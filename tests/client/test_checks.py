"""The text of a node's configuration; the checks themselves are tested by the command, ``umbel site check``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.errors import raises
from umbel.client import checks
from umbel.client.checks import entries_of
from umbel.protocol.errors import SiteError
from umbel.protocol.flower import parse_config_args

TEXT = """data-path="/the data" budget=4  min-clients=12\n reports="exact=true" keep-model='/models'"""


def test_pairs_are_read_with_their_types() -> None:
    found = {
        "data-path": "/the data",
        "budget": 4,
        "min-clients": 12,
        "reports": "exact=true",
        "keep-model": "/models",
    }
    assert entries_of(TEXT) == found
    assert entries_of("") == entries_of(" ") == {}


def test_a_file_may_stand_for_them(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text('data-path = "/data"\nbudget = 4\n')
    assert entries_of(str(file)) == {"data-path": "/data", "budget": 4}
    file.write_text("budget = [4]")
    with raises(SiteError, "site.bad-pairs"):
        entries_of(str(file))


@pytest.mark.parametrize(
    "wrong",
    [
        "budget = 4", "budget= 4", "budget =4", "budget", "# budget=4", ", budget=4", "budget=four", "budget=",
        "budget=0.1 budget=0.2", "policy-file=/etc/umbel/policy.toml",
    ],
)  # fmt: skip
def test_a_part_that_flower_would_skip_or_cannot_read_is_refused(wrong: str) -> None:
    """A limit that is left out would be the default's, or none."""
    with raises(SiteError, "site.bad-pairs", wrong):
        entries_of(f'data-path="/data" {wrong}')


def test_flower_finds_pairs_by_the_same_pattern_and_skips_the_rest() -> None:
    assert parse_config_args(["rounds = 5 seed=1"]) == {"seed": 1}
    assert checks._PAIR.pattern in parse_config_args.__code__.co_consts
