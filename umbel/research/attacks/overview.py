"""All attacks on images in all modes of release, each beside what guessing finds: one table.

Victims are clients of the real app behind its own gate, in sites of ten whose rows are drawn from a dataset's
training clients; the attacker knows rows of the others. Each attack is made as strong as it is elsewhere in this
package, by a server that may ask nothing else of these clients.
"""

from __future__ import annotations

import csv
import io
import math
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from umbel import models
from umbel.data import find_dataset, open_dataset
from umbel.privacy.accounting.guarantee import DELTA
from umbel.protocol.errors import ConfigError, NotApplicableError
from umbel.protocol.home import write_atomically
from umbel.research.attacks.modes import NO_NOISE, NU, compared
from umbel.research.attacks.on_images import ATTACKS, FURTHER, GUESSING, TIMES, Finding
from umbel.research.attacks.quality import FULL_PSNR
from umbel.research.attacks.reconstruct import LOSS, check_images
from umbel.research.attacks.scene import Scene, Setting


def overview(setting: Setting) -> list[Finding]:
    """Make every attack in every mode.

    One thread computes, so that the digits do not depend on the number of cores.

    Raises
    ------
    UmbelError
        Before any work, when something about the setting cannot be; `FleetError` when the gate refuses what it should
        allow, as it does where the environment holds a stricter policy.
    """
    path = Path(setting.dataset)
    path = find_dataset(str(path.absolute()) if path.exists() else setting.dataset)
    dataset = open_dataset(path)
    for name in (setting.model, setting.smooth_model):
        check_images(path, dataset, models.load(name, LOSS))
    torch.set_num_threads(1)
    if unknown := set(setting.attacks) - ATTACKS.keys():
        raise ConfigError(f"unknown attack {min(unknown)!r}; choose from {', '.join(ATTACKS)}")
    steps = {name: step for name, step in ATTACKS.items() if name in (setting.attacks or ATTACKS)}
    found: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="umbel-attacks-") as scratch:
        scene = Scene(setting, dataset, Path(scratch))
        for name in track(steps, "attacks", console=Console(stderr=True), transient=True):
            try:
                found += steps[name](scene)
            except NotApplicableError as error:
                found.append(Finding(name, GUESSING, 0, 0, math.nan, math.nan, note=f"not applicable: {error}"))
    return found


def table(findings: Sequence[Finding]) -> list[tuple[str, ...]]:
    """Return the table: a heading, and a row for each attack."""
    order = [GUESSING, NO_NOISE, *(mode.name for mode in compared())]
    columns = sorted({one.mode for one in findings}, key=order.index)
    rows: list[tuple[str, ...]] = [("attack", *columns)]
    for attack in dict.fromkeys(one.attack for one in findings):
        own = {one.mode: one.cell() for one in findings if one.attack == attack}
        rows.append((attack, *(own.get(column, "") for column in columns)))
    return rows


def notes(setting: Setting) -> list[str]:
    """Return the sentences that belong under the table."""
    return [
        f"An image is shown from {FULL_PSNR:g} dB, if it comes {FURTHER:g} dB closer than the mean image, which is "
        f"what guessing answers; dB are means over images. DLG is made on {setting.smooth_model}, all others on "
        f"{setting.model}. Averaging takes the mean of {TIMES} releases of a client, or as many as its budget answers.",
        f"ε is for any two data sets of a client, at δ = {DELTA:g}, for one participation; at ν = {NU:g} nothing "
        "useful is guaranteed. Membership: the pure ε below which so many right guesses have a probability under 5 %. "
        "table.csv has 95 % intervals (Clopper and Pearson). An attack that fails proves nothing.",
    ]


def write(folder: Path, setting: Setting, findings: Sequence[Finding]) -> None:
    """Write ``table.md`` and ``table.csv``."""
    head, *rows = table(findings)
    lines = [head, ["---"] * len(head), *rows]
    page = [
        f"# Attacks by mode of release ({Path(setting.dataset).name}, {setting.images} images, seed {setting.seed})\n",
        "".join(f"| {' | '.join(line)} |\n" for line in lines),
        *(f"{note}\n" for note in notes(setting)),
    ]
    write_atomically(folder / "table.md", "\n".join(page).encode())
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    names = [entry.name for entry in fields(Finding)]
    writer.writerow(names)
    for one in findings:
        values = (getattr(one, name) for name in names)
        writer.writerow(f"{value:.6g}" if isinstance(value, float) else value for value in values)
    write_atomically(folder / "table.csv", buffer.getvalue().encode())
