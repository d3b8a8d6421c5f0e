"""Secure sums under attack: local vectors and images that a server reads from sums of 1 to 100 clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from umbel.data import find_dataset
from umbel.simulation.measured import Finished, Spec
from umbel.simulation.sweep import FIRST_SEED, Result
from umbel_lab.attacks import sums
from umbel_lab.experiments.tables import good, page

SEEDS = 1
CODE = (str(Path(__file__).resolve().parents[1] / "attacks"),)

_PREFERENCES, _IMAGES = "preferences-112", "femnist"
_TITLES = {_PREFERENCES: "Local vectors", _IMAGES: "Images"}
_VICTIMS = {_PREFERENCES: sums.VICTIMS, _IMAGES: 4}


def specs(folder: Path, seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return one part for each dataset, number of clients in a sum, and seed."""
    sizes = (2,) if quick else sums.SIZES
    nus = (0.0, 1.0) if quick else sums.MULTIPLIERS
    return [
        Spec.of(
            (dataset, f"{size} clients"),
            {"dataset": dataset, "model": "cnn" if dataset == _IMAGES else "", "strategy": "sums", "observers": "",
             "seed": seed, "size": size, "noise_multipliers": list(nus), "victims": 2 if quick else victims},
        )
        for seed in range(first, first + seeds)
        for dataset, victims in _VICTIMS.items()
        for size in sizes
    ]  # fmt: skip


def play(config: Mapping[str, Any]) -> Finished:
    """Make one of the attacks of `specs`."""
    dataset, nus = str(find_dataset(config["dataset"])), tuple(config["noise_multipliers"])
    setting = sums.Setting(
        dataset, config["model"], (config["size"],), nus, victims=config["victims"], seed=config["seed"]
    )
    return Finished({"found": [asdict(one) for one in sums.audit(setting)]})


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write a table for each dataset; the seeds are added up."""
    sections, rows = [], []
    for dataset, title in _TITLES.items():
        cases: dict[tuple[Any, ...], list[sums.Found]] = {}
        for result in good(results):
            if result.spec.arm[0] == dataset:
                for row in result.measures["found"]:
                    rows.append({"part": result.spec.name, **row})
                    one = sums.Found(**row)
                    cases.setdefault((one.clients, one.members, one.noise_multiplier), []).append(one)
        if cases:
            text = sums.notes(sums.INTERACTIONS, dataset == _PREFERENCES)
            sections.append(sums.table([sums.Found.sum(several) for several in cases.values()], title, text))
    page("Secure sums under attack", sections, rows, results).write(folder)
