"""The identification audit: what is stolen at which price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from umbel.data import find_dataset, open_dataset, write_dataset
from umbel_lab.attacks.__main__ import app
from umbel_lab.attacks.identify import ATTACKS, PAPER, Attacked, attack, audit, strongest
from umbel_lab.attacks.pac_attack import theorem_1

pytestmark = pytest.mark.rest

Row = dict[str, Any]

FEW: Row = {"victims": 6, "after": 5, "interactions": 48}


def row(found: list[Row]) -> Row:
    return Attacked(1.0, PAPER, found, 0.05).row


def test_without_noise_all_local_parameters_are_stolen_and_noise_makes_a_theft_take_longer() -> None:
    """Within the bound of theorem 1 or two; who reads the direction needs fewer interactions than the paper."""

    def stolen(nu: float, name: str = PAPER) -> list[Row]:
        return attack("preferences", nu, FEW | ATTACKS[name])

    bare, papers, spectral = stolen(0.0), stolen(1.0), stolen(1.0, "spectral")
    for found in (bare, spectral):
        assert sum(victim["enough"] is not None for victim in found) == 6
    # A bound that holds with probability .9: of six clients, three or more beyond it have a chance below .02.
    assert sum((victim["enough"] or 0) > (victim["bound"] or 0) for victim in bare) <= 2
    assert all(victim["spent"] is None for victim in bare), "nothing bounds what an unsanitised release tells"
    assert all(victim["spent"] == victim["interactions"] * 800 / 1.0 for victim in papers), "n / nu"
    assert row(papers)["enough"] > row(bare)["enough"]
    assert row(spectral)["enough"] < row(papers)["enough"]


def test_the_bound_of_theorem_1_is_that_of_the_paper() -> None:
    assert [theorem_1(p, 10, 0.1) for p in (0.1, 0.3, 0.4, 0.45)] == [1, 3, 12, 47]
    assert theorem_1(0.5, 10, 0.1) is None


def one(client: int, error: float | None, enough: int | None, by_rate: Any, by_items: Any, likes: float) -> Row:
    return {
        "client": client, "interactions": 10 if error is not None else 0, "likes": likes, "enough": enough,
        "spent": 100.0, "bound": 3, "error": error, "by_rate": by_rate, "by_items": by_items,
    }  # fmt: skip


FOUND = [one(1, 0.0, 2, 0.0, 0.0, 0.4), one(2, 0.04, 6, 0.96, 0.04, 0.5), one(3, 0.4, None, 0.4, 0.6, 0.7)]


def test_a_row_counts_directions_and_beside_them_signs_and_takes_medians_of_what_was_stolen() -> None:
    assert row(FOUND) == {
        "nu": 1.0, "attack": PAPER, "stolen": "2 of 3", "sign by rate": 1, "by items": 2, "enough": 4.0, "maximum": 6,
        "asked": 10, "error": 0.04, "spent": 40.0,
    }  # fmt: skip
    nothing = row([one(1, None, None, None, None, 0.4)])
    assert (nothing["stolen"], nothing["enough"], nothing["error"]) == ("0 of 1", None, None)
    open_sign = row([one(1, 0.0, 1, None, None, 0.4)])
    assert (open_sign["stolen"], open_sign["sign by rate"], open_sign["by items"]) == ("1 of 1", None, None)


def test_the_strongest_attack_steals_most_and_of_these_the_fastest() -> None:
    slow, fast = [one(1, 0.0, 9, 0, 0, 0.4)], [one(1, 0.0, 2, 0, 0, 0.4)]
    made = [(1.0, "a", slow), (1.0, "b", fast), (1.0, "c", FOUND[2:]), (3.0, "c", FOUND), (3.0, "a", slow)]
    attacks = [Attacked(*one, 0.05) for one in made]
    assert [(found.nu, found.attack) for found in strongest(attacks)] == [(1.0, "b"), (3.0, "c")]


@pytest.mark.rest
def test_who_likes_most_items_is_stolen_too(tmp_path: Path) -> None:
    """Against Assumption 1: everybody's labels turned round are the same theft with the other sign."""
    source = open_dataset(find_dataset("preferences"))
    turned = tmp_path / "turned"
    write_dataset(turned, source.manifest, source.features, -np.asarray(source.targets), source.offsets)
    done = audit(str(turned), (0.0,), FEW)
    assert done.lean == "likes"
    assert [found.row["stolen"] for found in done.attacked] == ["6 of 6"] * 3
    assert done.attacked[0].row["sign by rate"] == 6
    assert all(victim["bound"] is None for victim in done.attacked[0].stolen)
    biased = attack(str(turned), 0.0, FEW | ATTACKS["spectral"], model="biased-factors")
    assert all(victim["by_rate"] == victim["error"] for victim in biased)


def test_the_command_prints_what_it_wrote_and_names_bad_input_before_anything_is_attacked(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    line = ["identify", "--victims", "3", "--after", "2", "--interactions", "4", *out]
    result = CliRunner().invoke(app, [*line, "--noise-multiplier", "0"])
    assert result.exit_code == 0, result.output
    assert "the strongest attack" in result.output
    assert (tmp_path / "out" / "table.md").exists()
    for option, value, part in (
        ("--dataset", "nowhere", "'nowhere'"),
        ("--dataset", "synthetic", "[data.no-preferences]"),
        ("--model", "steal", "'steal'"),
        ("--noise-multiplier", "-1", "noise-multiplier"),
    ):
        result = CliRunner().invoke(app, ["identify", *out, option, value])
        assert result.exit_code in (2, 3)
        assert part in " ".join(result.output.split())
