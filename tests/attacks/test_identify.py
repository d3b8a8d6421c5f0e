"""The identification audit: what is stolen at which price, behind the policy that each defence is."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attacks.__main__ import app
from attacks.identify import Defence, Stolen, attack, audit, cell, defences, summary, write
from attacks.pac_attack import theorem_1
from privacy.policy import Policy
from protocol.errors import FederationError

FEW: dict[str, Any] = {"victims": 6, "after": 5, "interactions": 48}


@cache
def without(multipliers: str) -> list[Stolen]:
    """What is stolen without any defence."""
    return attack("preferences", {}, FEW | {"multipliers": multipliers})


@cache
def behind(name: str, **options: Any) -> list[Stolen]:
    """What is stolen at nu = 1 behind the defence whose name begins like this."""
    defence = next(defence for defence in defences(5) if defence.name.startswith(name))
    own = {"multipliers": "1"} | FEW | dict(defence.options) | options
    return attack("preferences", defence.policy, own, **defence.run)


def stolen(found: list[Stolen]) -> int:
    return sum(one.enough is not None for one in found)


def test_without_noise_all_local_parameters_are_stolen_within_the_bound_of_theorem_1_or_two() -> None:
    found = without("0")
    assert stolen(found) == 6
    # A bound that holds with probability .9: of six clients, three or more beyond it have a chance below .02.
    assert sum((one.enough or 0) > (one.bound or 0) for one in found) <= 2
    assert all(one.spent is None for one in found), "nothing bounds what an unsanitised release tells"


def test_noise_makes_a_theft_take_longer_and_each_interaction_costs_n_by_nu() -> None:
    found = behind("none")
    assert all(one.spent == one.interactions * 800 / 1.0 for one in found)
    assert summary(found)["enough"] > summary(without("0"))["enough"]


def test_the_bound_of_theorem_1_is_that_of_the_paper() -> None:
    assert [theorem_1(p, 10, 0.1) for p in (0.1, 0.3, 0.4, 0.45)] == [1, 3, 12, 47]
    assert theorem_1(0.5, 10, 0.1) is None


# --- defences


def test_a_budget_caps_the_interactions() -> None:
    # Whoever sat out an honest round has one more left.
    found = behind("budget", multipliers="3")
    assert max(one.interactions for one in found) <= 8 + 5
    assert stolen(found) < 6


def test_a_tripwire_stops_zeros_and_nobody_who_knows_of_it() -> None:
    assert [one.interactions for one in behind("tripwire")] == [0] * 6
    assert all(one.error is None for one in behind("tripwire"))
    assert stolen(behind("tripwire, and the attack")) == 6


def test_balanced_batches_leave_the_zeroing_attack_a_guess() -> None:
    # A guess errs on one half; that all six lie below .2 by chance happens less than once in 10,000.
    assert min(one.error or 0 for one in behind("balanced batches")) > 0
    assert stolen(behind("balanced batches")) < 2


def test_noise_on_all_items_hides_more_than_noise_on_those_that_changed() -> None:
    changed, everywhere = (summary(behind(f"Eq. 3, sigma = 0.1, noise on {which}"))["error"] for which in ("ch", "all"))
    assert changed < everywhere


def test_a_public_radius_larger_than_updates_are_makes_a_theft_take_longer() -> None:
    assert summary(behind("public"))["error"] > summary(behind("none"))["error"]


def test_every_defence_is_a_policy_that_a_site_can_set() -> None:
    named = {key for defence in defences(5) for key in defence.policy}
    assert named == {"max-participations", "radius-mode", "noise-all-items", "tripwire", "balanced-batches"}
    assert named <= set(Policy.names())
    assert isinstance(defences(5)[0], Defence)


# --- tables


def test_a_summary_counts_and_takes_medians_of_what_was_stolen() -> None:
    found = [
        Stolen(client=1, interactions=10, error=0.0, enough=2, spent=100.0, bound=3),
        Stolen(client=2, interactions=10, error=0.04, enough=6, spent=100.0, bound=3),
        Stolen(client=3, interactions=10, error=0.4, enough=None, spent=100.0, bound=None),
    ]
    assert summary(found) == {
        "stolen": "2 of 3", "enough": 4.0, "maximum": 6, "asked": 10, "error": 0.04, "spent": 40.0
    }  # fmt: skip
    nothing = summary([Stolen(client=1, interactions=0, error=None, enough=None, spent=0.0, bound=1)])
    assert (nothing["stolen"], nothing["enough"], nothing["error"]) == ("0 of 1", None, None)


def test_an_audit_leaves_a_page_and_a_row_a_client(tmp_path: Path) -> None:
    done = audit("preferences", (0.0, 1.0), False, FEW)
    write(tmp_path, done)
    page = (tmp_path / "table.md").read_text()
    assert "| 0 | 6 of 6 | " in page
    assert "| 1 | " in page
    assert "by Theorem 1" in page
    assert len((tmp_path / "clients.csv").read_text().splitlines()) == 1 + 2 * 6
    again = audit("preferences", (0.0, 1.0), False, FEW)
    assert again == done, "the same seed gives the same audit"


@pytest.mark.parametrize(("value", "text"), [(None, ""), (3, "3"), (0.02, "0.02"), (21333.3, "21,333"), ("a", "a")])
def test_cells(value: Any, text: str) -> None:
    assert cell(value) == text


# --- the command


def test_the_command_prints_what_it_wrote(tmp_path: Path) -> None:
    line = ["identify", "--victims", "3", "--after", "2", "--interactions", "4", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*line, "--noise-multiplier", "0"])
    assert result.exit_code == 0, result.output
    assert "behind defences of the site" in result.output
    assert (tmp_path / "out" / "table.md").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--federation", "nowhere"], "no federation 'nowhere'"),
        (["--federation", "synthetic"], "identify attacks preferences"),
        (["--attack", "steal"], "attack must be 'zero', 'jitter' or 'spectral', got 'steal'"),
        (["--noise-multiplier", "-1"], "multipliers must be different numbers of at least 0"),
        (["--noise-per", "item"], "noise-per must be one of vector, layer, row"),
    ],
)
def test_bad_input_is_named_before_anything_is_attacked(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["identify", "--no-defences", "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())


def test_only_preferences_are_attacked() -> None:
    with pytest.raises(FederationError, match="build some"):
        attack("synthetic", {}, {})
