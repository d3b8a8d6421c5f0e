"""What releases show: the headlines of the attacks (docs/attacks.md), found again by one command."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from umbel.data import find_dataset
from umbel.research.attacks import identify, on_images, overview, reconstruct, scene
from umbel.research.attacks.quality import FULL_PSNR, VERDICTS
from umbel.research.attacks.reconstruction_report import COLUMNS, rows_of
from umbel.research.experiments.runs import Finished, Spec
from umbel.research.experiments.sweep import FIRST_SEED, Result
from umbel.research.experiments.tables import Section, Value, average, good, write

SEEDS = 2
CODE = ("umbel/research/attacks",)
"""What results depend on besides what all experiments do."""

_ON_IMAGES, _RECONSTRUCT, _IDENTIFY = "on images", "reconstruct", "identify"
_IMAGES, _VICTIMS, _INTERACTIONS = 4, 100, 64
# Networks, nu, and starts of DLG: the paper's network, and the one that DLG was published with.
_NETWORKS: Mapping[str, tuple[tuple[float, ...], int]] = {
    "cnn-sigmoid": ((0.001, 0.1, 1.0), 2),
    "lenet": ((0.0, 0.01, 0.1), 1),
}
_FEW = 2


def specs(seeds: int = SEEDS, first: int = FIRST_SEED, quick: bool = False) -> list[Spec]:
    """Return one part for each attack and seed: images by dataset ``femnist``, local vectors by ``movielens``."""
    runs = []
    networks = {"lenet": ((0.0,), 1)} if quick else _NETWORKS
    for seed in range(first, first + seeds):

        def add(name: str, what: str, dataset: str, seed: int = seed, model: str = "", **more: Any) -> None:
            # A strategy and observers there are none; what a result depends on is read off these keys.
            config = {"dataset": dataset, "strategy": what, "model": model, "observers": "", "seed": seed}
            runs.append(Spec(f"{name.replace(' ', '-')}-seed{seed}", config | more))

        for attack in ("single",) if quick else on_images.ATTACKS:
            add(f"all {attack}", _ON_IMAGES, "femnist", model="cnn", attack=attack, images=1 if quick else _IMAGES)
        for model, (nus, restarts) in networks.items():
            add(
                f"one image {model}", _RECONSTRUCT, "femnist", model=model,
                noise_multipliers=list(nus), restarts=restarts, images=1 if quick else _FEW,
            )  # fmt: skip
        for nu in identify.NOISE_MULTIPLIERS[: 1 if quick else None]:
            victims, interactions = (2, 2) if quick else (_VICTIMS, _INTERACTIONS)
            add(f"identify nu{nu:g}", _IDENTIFY, "movielens", nu=nu, victims=victims, interactions=interactions)
    return runs


def play(config: Mapping[str, Any]) -> Finished:
    """Make one of the attacks of `specs`."""
    dataset = str(find_dataset(config["dataset"]))
    found: list[dict[str, Any]] | list[list[str]]
    if config["strategy"] == _ON_IMAGES:
        setting = scene.Setting(
            dataset, config["model"], images=config["images"], seed=config["seed"], attacks=(config["attack"],)
        )
        found = [asdict(one) for one in overview.overview(setting)]
    elif config["strategy"] == _RECONSTRUCT:
        given = reconstruct.Setting(
            dataset, config["model"], tuple(config["noise_multipliers"]), True, config["images"],
            config["restarts"], config["seed"],
        )  # fmt: skip
        found = [row.cells() for row in rows_of(reconstruct.audit(given))]
    else:
        options = {name: config[name] for name in ("victims", "interactions")} | {"after": 30}
        done = identify.audit(dataset, [config["nu"]], False, options, seed=config["seed"])
        against = sum(one.likes >= 0.5 for one in done.plain[0].stolen)
        found = [one.row | {"against": against} for one in done.plain]
    return Finished({"found": found})


def tables(results: Sequence[Result], folder: Path) -> None:
    """Write the table of each kind of attack."""
    done = good(results)

    def of(kind: str) -> list[Result]:
        return [result for result in done if result.spec.config["strategy"] == kind]

    parts = ((_ON_IMAGES, _on_images), (_RECONSTRUCT, _reconstructed), (_IDENTIFY, _identified))
    sections = [make(own) for kind, make in parts if (own := of(kind))]
    rows: list[dict[str, Value]] = [
        {"part": result.spec.name, **(found if isinstance(found, dict) else dict(zip(COLUMNS, found, strict=True)))}
        for result in done
        for found in result.measures["found"]
    ]
    write(folder, "What releases show", sections, rows, results)


def _on_images(results: Sequence[Result]) -> Section:
    """Add up what one attack finds over seeds; victims of different seeds are independent draws."""
    together: dict[tuple[str, str], list[on_images.Finding]] = {}
    for result in results:
        for one in result.measures["found"]:
            finding = on_images.Finding(**one)
            together.setdefault((finding.attack, finding.mode), []).append(finding)
    head, *rows = overview.table([on_images.Finding.sum(parts) for parts in together.values()])
    config = results[0].spec.config
    setting = scene.Setting(config["dataset"], config["model"], images=config["images"])
    text = " ".join([*overview.notes(setting), "Where seeds have different notes, a semicolon is between them."])
    return Section("All attacks on images", text, head, rows)


def _reconstructed(results: Sequence[Result]) -> Section:
    together: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for result in results:
        for cells in result.measures["found"]:
            row = dict(zip(COLUMNS, cells, strict=True))
            if row["PSNR"]:  # not of the label alone
                together.setdefault((result.spec.config["model"], row["ν"], row["attack"]), []).append(row)
    rows = []
    for key, parts in together.items():
        psnr, label = (average(float(part[name]) for part in parts if part[name])[0] for name in ("PSNR", "label"))
        full, images = (sum(int(part[name]) for part in parts for name in names) for names in (VERDICTS[:1], VERDICTS))
        rows.append(
            [f"`{key[0]}`", *key[1:], f"{psnr:.1f}", "" if math.isnan(label) else f"{label:.2f}", f"{full} of {images}"]
        )
    text = (
        "Clients of one image, one step, noise on each layer by itself. PSNR in dB, mean over images; labels that were "
        f"read; images that are shown in full, from {FULL_PSNR:g} dB. The mean image is what one answers who has seen "
        "no release."
    )
    return Section("One image", text, ("network", "ν", "attack", "PSNR", "labels", "in full"), rows)


def _identified(results: Sequence[Result]) -> Section:
    together: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for result in results:
        for row in result.measures["found"]:
            together.setdefault((row["nu"], row["attack"]), []).append(row)
    rows = []
    for (nu, attack), parts in sorted(together.items(), key=lambda one: one[0][0]):
        enough = [part["enough"] for part in parts if part["enough"] is not None]
        median = f"{np.median(enough):g}" if enough else "never"
        names = ("stolen", "sign by rate", "by items")
        rows.append(
            [
                f"{nu:g}",
                attack,
                *(", ".join(identify.cell(part[name]) or "none" for part in parts) for name in names),
                median,
            ]
        )
    against = {result.spec.config["seed"]: result.measures["found"][0]["against"] for result in results}
    text = (
        "Victims whose vector is stolen up to its sign (at most 5 % of the predictions wrong), how many signs the "
        f"server finds by itself, and the median of interactions needed, at most {_INTERACTIONS}; one number a seed. "
        f"Victims that like half or more, against Assumption 1: {', '.join(map(str, against.values()))}."
    )
    return Section("Identification", text, ("ν", "attack", "stolen", "sign by rate", "by items", "interactions"), rows)
