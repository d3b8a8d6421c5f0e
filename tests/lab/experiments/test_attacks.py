"""The headlines of the attacks: one command does every part, and adds up what seeds find."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.lab.attacks.conftest import write_strokes
from tests.lab.experiments.conftest import read_csv
from umbel.data import BUNDLED
from umbel.simulation.sweep import Result
from umbel_lab.attacks import reconstruct
from umbel_lab.attacks.quality import VERDICTS
from umbel_lab.experiments import attacks, scaffold
from umbel_lab.experiments.__main__ import app

pytestmark = pytest.mark.rest


@pytest.mark.slow
def test_the_attacks_command(umbel_home: Path, in_process: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # A few steps tell as well that an attack is made; how far they come is tested elsewhere.
    monkeypatch.setattr(reconstruct, "invert_first_layer", partial(reconstruct.invert_first_layer, iterations=2))
    monkeypatch.setattr(reconstruct, "deep_leakage", partial(reconstruct.deep_leakage, iterations=5))
    write_strokes(umbel_home / "data" / "femnist", "femnist")
    shutil.copy(BUNDLED / "preferences.json", umbel_home / "data" / "movielens")
    done = CliRunner().invoke(app, ["attacks", "--quick"])
    assert done.exit_code == 0, done.output
    assert in_process == ["one-image-lenet-seed2000", "identify-nu0-seed2000"]
    folder = umbel_home / "experiments" / "attacks-quick"
    rows = {(row["part"], row["attack"], row["noise multiplier"] or row["nu"]): row for row in read_csv(folder)}
    assert rows["one-image-lenet-seed2000", "DLG", "0"]["PSNR"]
    assert rows["identify-nu0-seed2000", "spectral", "0"]["stolen"] == "2 of 2"
    page = (folder / "table.md").read_text()
    assert "| 0 | spectral | 2 of 2 |" in page
    assert page.startswith("# What releases show\n\n**A quick look** (`--quick`): ")


def test_every_attack_is_made_for_each_seed(tmp_path: Path) -> None:
    specs = scaffold.specs(attacks, tmp_path, [5, 6])
    assert len({spec.name for spec in specs}) == len(specs) == 2 * (2 + 3)
    assert {spec.config["seed"] for spec in specs} == {5, 6}


def test_what_seeds_find_is_added_up(tmp_path: Path) -> None:
    specs = scaffold.specs(attacks, tmp_path, [2000, 2001])
    specs = [spec for spec in specs if spec.name.startswith("identify-nu1")]

    def made_up(seed: int) -> list[dict[str, Any]]:
        row = {"attack": "spectral", "stolen": f"{90 + seed} of 100", "sign by rate": 1, "by items": None}
        return [row | {"nu": 1.0, "enough": 1.0 + 2 * seed, "against": 60 + seed}]

    found = [made_up(spec.config["seed"] - 2000) for spec in specs]
    results = [Result(spec, {"found": one}, tmp_path / spec.name) for spec, one in zip(specs, found, strict=True)]
    attacks.page(results).write(tmp_path)
    page = (tmp_path / "table.md").read_text()
    assert "| 1 | spectral | 90 of 100, 91 of 100 | 1, 1 | none, none | 2 |" in page
    assert "against Assumption 1: 60, 61." in page


def test_images_of_two_seeds_stand_in_one_row(tmp_path: Path) -> None:
    specs = [
        spec for spec in scaffold.specs(attacks, tmp_path, [2000, 2001]) if spec.name.startswith("one-image-lenet")
    ]

    def row(nu: float | None, attack: str, psnr: float | None, label: float | None, *verdicts: int) -> dict[str, Any]:
        counts = dict(zip(VERDICTS, verdicts or (None,) * 3, strict=True))
        return {"noise multiplier": nu, "attack": attack, "PSNR": psnr, "label": label, **counts}

    mean = row(None, "mean image", 17.0, None, 0, 1, 1)
    both = [
        [mean, row(0.0, "DLG", 30.0, 0.5, 2, 0, 0), row(0.0, "last bias", None, 1.0)],
        [mean, row(0.0, "DLG", 20.0, 1.0, 1, 1, 0)],
    ]
    results = [Result(spec, {"found": one}, tmp_path) for spec, one in zip(specs, both, strict=True)]
    attacks.page(results).write(tmp_path)
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert "| `lenet` |  | mean image | 17.0 |  | 0 of 4 |" in lines
    assert "| `lenet` | 0 | DLG | 25.0 | 0.75 | 3 of 4 |" in lines
    assert not any("last bias" in line for line in lines)
