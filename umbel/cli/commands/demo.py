"""``umbel demo``: a hospital's results alone, without privacy, and with a guarantee, in half a minute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from umbel.protocol.cli import command_line

if TYPE_CHECKING:
    from umbel.server.worth import Worth

CONFIG = "hospital-services"
OPEN, ONE, SEVERAL = "one model, no privacy", "one model, pure epsilon 4", "three hypotheses, pure epsilon 4"
RUNS: Mapping[str, Mapping[str, Any]] = {
    OPEN: {"noise-multiplier": 0.0},
    ONE: {},
    # Algorithm 1. Of epsilon 4, .75 go to the choice of a hypothesis, and 2 n / nu = 3.25 to the update.
    SEVERAL: {
        "hypotheses": 3, "noise-multiplier": 4.3077, "choice-epsilon": 0.75, "strategy": "group-privacy respawn=3",
    },
}  # fmt: skip
"""Changes of `CONFIG`, by the table's name of the run."""


@command_line
def app() -> None:
    """Learn hospital payments from 2,062 hospitals in several ways, and measure each way on other hospitals."""
    # These imports load PyTorch; --help need not wait for it.
    from umbel.cli.runs import Run
    from umbel.protocol.logs import printed
    from umbel.server.run_folder import RunFolder
    from umbel.simulation.start import in_this_process, read_values

    typer.echo("The data are Medicare's payments to 2,947 hospitals for four services. Each hospital is a client.")
    found: dict[str, Worth] = {}
    folders: dict[str, Path] = {}
    for what, changes in RUNS.items():
        typer.echo(f"Learning: {what} ...")
        with printed(lambda _: None):
            folders[what] = in_this_process(read_values(CONFIG, changes))
        worth = RunFolder(folders[what]).read_worth()
        assert worth is not None, "the run measures it at its end"
        found[what] = worth
    for line in [*table(found), *Run(folders[ONE]).guarantee]:
        typer.echo(line)
    typer.echo("Each run left a folder. Open its report.html:")
    for folder in folders.values():
        typer.echo(folder)


def table(found: Mapping[str, Worth]) -> list[str]:
    """Return the lines of the demo's table, from the worth of its runs."""
    from umbel.server.worth import STAYS, Way, rows_of

    first = found[OPEN]
    rows = [(arm.label, arm) for arm in first.arms if arm.way in (Way.CONSTANT, Way.ALONE, Way.POOLED)]
    for what, worth in found.items():
        rows += [(what, worth.arm(Way.LAST)), ("  made each hospital's own", worth.arm(Way.OWN))]
    hint = "If groups of clients differ by more than a factor, use several hypotheses: see umbel run synthetic."
    return [f"\n{first.heading}:", *rows_of(rows), hint, STAYS]
