"""One image read from releases under more and more noise: figure 5 of the group privacy paper's ICISSP version."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from umbel_lab.attacks import reconstruct
from umbel_lab.output import Page, Section

MODEL = "cnn-sigmoid"  # the paper's network, which DLG needs smooth
RESTARTS = 2


def page(seed: int, _folder: Path, quick: bool = False) -> Page:
    """Return the table and the figure of plain DLG, and of the rank-one attack, on one image of dataset ``femnist``."""
    nus = reconstruct.NOISE_MULTIPLIERS[:1] if quick else reconstruct.NOISE_MULTIPLIERS
    model, restarts = ("lenet", 1) if quick else (MODEL, RESTARTS)
    audit = reconstruct.audit(reconstruct.Setting("femnist", model, nus, images=1, restarts=restarts, seed=seed))
    whole = reconstruct.page(audit)
    table, notes = whole.sections
    text = "Clients of one image, one step, noise on each layer by itself; PSNR in dB."
    named = Section("One image by noise", text, table.columns, table.rows)
    draw = partial(reconstruct.draw, audit, name="figure-5")
    return replace(whole, sections=[named, notes], draw=draw)
