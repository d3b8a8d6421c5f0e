"""Findings in releases: the headlines of the attacks (docs/papers/attacks.md), reproduced by one command."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from umbel.data import find_dataset
from umbel.simulation.measured import Finished
from umbel.simulation.sweep import Result
from umbel_lab.attacks import identify, reconstruct
from umbel_lab.attacks.quality import FULL_PSNR, VERDICTS
from umbel_lab.experiments import scaffold
from umbel_lab.output import Page, Section, cell, mean

SEEDS = 2
CODE = (str(Path(__file__).resolve().parents[1] / "attacks"),)  # what results depend on besides what all experiments do

_RECONSTRUCT, _IDENTIFY = "one image", "identify"
_VICTIMS, _INTERACTIONS = 100, 64
# Networks, nu, and starts of DLG: the paper's network, and the one that DLG was published with.
_NETWORKS: Mapping[str, tuple[tuple[float, ...], int]] = {
    "cnn-sigmoid": ((0.001, 0.1, 1.0), 2),
    "lenet": ((0.0, 0.01, 0.1), 1),
}
_FEW = 2
_DATA = scaffold.read("attacks")


def arms(quick: bool, _of: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return one arm for each attack: images by dataset ``femnist``, local vectors by ``movielens``."""
    few = 1 if quick else None
    parts: dict[tuple[str, str], dict[str, Any]] = {}
    for model, (nus, restarts) in ({"lenet": ((0.0,), 1)} if quick else _NETWORKS).items():
        own = {"dataset": "femnist", "model": model, "noise_multipliers": list(nus), "restarts": restarts}
        parts[_RECONSTRUCT, model] = own | {"images": few or _FEW}
    for nu in identify.NOISE_MULTIPLIERS[:few]:
        victims, interactions = (2, 2) if quick else (_VICTIMS, _INTERACTIONS)
        own = {"dataset": "movielens", "model": "", "nu": nu, "victims": victims, "interactions": interactions}
        parts[_IDENTIFY, f"nu{nu:g}"] = own
    # A strategy and observers there are none; the sweep reads off these keys which files a result depends on.
    return {arm: {"strategy": arm[0], "observers": "", "seed": 0, **own} for arm, own in parts.items()}


def play(config: Mapping[str, Any]) -> Finished:
    """Make one of the attacks of `arms`."""
    dataset, model, seed = str(find_dataset(config["dataset"])), config["model"], config["seed"]
    found: list[dict[str, Any]]
    if config["strategy"] == _RECONSTRUCT:
        nus = tuple(config["noise_multipliers"])
        given = reconstruct.Setting(dataset, model, nus, True, config["images"], config["restarts"], seed)
        found = reconstruct.audit(given).rows
    else:
        options = {name: config[name] for name in ("victims", "interactions")} | {"after": 30}
        done = identify.audit(dataset, [config["nu"]], False, options, seed=seed)
        against = sum(victim["likes"] >= 0.5 for victim in done.plain[0].stolen)
        found = [one.row | {"against": against} for one in done.plain]
    return Finished({"found": found})


def page(results: Sequence[Result]) -> Page:
    """Return the table of each kind of attack."""
    done = scaffold.good(results)
    parts = ((_RECONSTRUCT, _reconstructed), (_IDENTIFY, _identified))
    sections = [make(own) for kind, make in parts if (own := [one for one in done if one.spec.arm[0] == kind])]
    rows = [{"part": result.spec.name, **found} for result in done for found in result.measures["found"]]
    return scaffold.page("What releases show", sections, rows, results)


def _together(results: Sequence[Result], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Return what all seeds find, by the arm and these entries."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        for row in result.measures["found"]:
            found.setdefault((result.spec.arm[1], *(row[key] for key in keys)), []).append(row)
    return found


def _reconstructed(results: Sequence[Result]) -> Section:
    rows = []
    for (model, nu, attack), parts in _together(results, "noise multiplier", "attack").items():
        if parts[0]["PSNR"] is None:  # of the label alone, or not applicable
            continue
        psnr = mean(part["PSNR"] for part in parts)
        label = mean(part["label"] for part in parts if part["label"] is not None)
        full, every = (sum(part[name] for part in parts for name in names) for names in (VERDICTS[:1], VERDICTS))
        read = "" if math.isnan(label) else f"{label:.2f}"
        level = "" if nu is None else f"{nu:g}"
        rows.append([f"`{model}`", level, attack, f"{psnr:.1f}", read, f"{full} of {every}"])
    text = scaffold.say(_DATA, "image", full=FULL_PSNR)
    return Section("One image", text, ("network", "ν", "attack", "PSNR", "labels", "in full"), rows)


def _identified(results: Sequence[Result]) -> Section:
    rows = []
    for (_, nu, attack), parts in sorted(_together(results, "nu", "attack").items(), key=lambda one: one[0][1]):
        enough = [part["enough"] for part in parts if part["enough"] is not None]
        names = ("stolen", "sign by rate", "by items")
        counts = (", ".join(cell(part[name]) or "none" for part in parts) for name in names)
        rows.append([f"{nu:g}", attack, *counts, f"{np.median(enough):g}" if enough else "never"])
    against = {result.spec.config["seed"]: result.measures["found"][0]["against"] for result in results}
    text = scaffold.say(_DATA, "identify", most=_INTERACTIONS, against=", ".join(map(str, against.values())))
    return Section("Identification", text, ("ν", "attack", "stolen", "sign by rate", "by items", "interactions"), rows)
