"""What is public stays, and what goes away is told first: the policy in CONTRIBUTING.md."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest

from tests.helpers.public_api import FILE, Api, current, may_remove, missing


@pytest.fixture(scope="module")
def now() -> Api:
    return current()


def test_all_that_was_public_is_still_there(now: Api) -> None:
    """If this fails, bring it back, or (before it was released) run python -m tests.helpers.public_api."""
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    assert missing(kept, now) == []
    assert kept["version"] == now["version"], "write the list for a new version"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"settings": lambda names: names.append("new")}, ""),
        ({"commands": lambda commands: commands["run"].append("--new")}, ""),
        ({"names": lambda names: names["run"].append(["new", "KEYWORD_ONLY", False])}, ""),
        ({"settings": lambda names: names.remove("rounds")}, "settings: rounds"),
        ({"errors": lambda names: names.remove("config.unknown-key")}, "errors: config.unknown-key"),
        ({"exit codes": lambda codes: codes.update(worth=1)}, "exit code: worth"),
        ({"commands": lambda commands: commands.pop("demo")}, "command: demo"),
        ({"commands": lambda commands: commands["run"].remove("--epsilon")}, "run --epsilon"),
        ({"names": lambda names: names.pop("Run.predict")}, "umbel.Run.predict"),
        ({"names": lambda names: names["run"].pop(0)}, "umbel.run with"),
        ({"names": lambda names: names["run"].append(["must", "KEYWORD_ONLY", True])}, "umbel.run with"),
        ({"names": lambda names: names["Run.predict"].reverse()}, "umbel.Run.predict with"),
    ],
)
def test_a_removal_is_found_and_an_addition_is_none(now: Api, changes: dict[str, Any], told: str) -> None:
    api = deepcopy(now)
    for key, change in changes.items():
        change(api[key])
    gone = missing(now, api)
    assert len(gone) == bool(told)
    assert "".join(gone).startswith(told)


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        ("1.2.0", "1.3.0", False), ("1.2.0", "2.0.0", True), ("1.2.0", "1.2.1", False),
        ("0.1.0", "0.1.1", False), ("0.1.0", "0.2.0", True),
    ],
)  # fmt: skip
def test_only_a_major_version_drops_what_was_released_and_before_1_a_minor_one(
    old: str, new: str, allowed: bool
) -> None:
    assert may_remove(old, new, f"## [{old}] - 2030-01-01") is allowed
    assert may_remove(old, new, "## [Unreleased]"), "it was not released"
