"""Commands: ``python -m privacy.attacks reconstruct``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from federation import umbel_home
from privacy.attacks.reconstruct import NOISE_MULTIPLIERS, Setting, audit
from privacy.attacks.reconstruction_report import COLUMNS, notes, rows_of, title, write

# Without locals: they hold clients' data.
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback(help="Attack releases, to see what they show. An attack that fails proves nothing.")
def main() -> None:
    """Keep the name of a command, even of the only one."""


@app.command()
def reconstruct(
    federation: Annotated[str, typer.Option(help="Name or path of a federation of 28x28 images.")],
    model: Annotated[str, typer.Option(help="cnn, cnn10, lenet, lenet10, or package.module:factory.")],
    noise_multiplier: Annotated[
        list[float], typer.Option(help="nu; give it once for each.", show_default="the paper's nine")
    ] = list(NOISE_MULTIPLIERS),  # noqa: B006
    per_layer: Annotated[
        bool, typer.Option("--per-layer/--whole", help="Noise each layer by itself, as the paper does here.")
    ] = True,
    images: Annotated[int, typer.Option(min=1, help="Clients to attack, each with one image.")] = 8,
    restarts: Annotated[int, typer.Option(min=1, help="Starts of DLG; the best counts.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every draw.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for tables and picture.", show_default="$UMBEL_HOME/audits/reconstruct-…"),
    ] = None,
) -> None:
    """Reconstruct single images from one step of training, behind the app's own gate."""
    setting = Setting(federation, model, tuple(dict.fromkeys(noise_multiplier)), per_layer, images, restarts, seed)
    name = re.sub(r"[^\w.-]+", "-", f"reconstruct-{Path(federation).name}-{model}" + ("" if per_layer else "-whole"))
    try:
        folder = out.expanduser().absolute() if out else umbel_home() / "audits" / name
        folder.mkdir(parents=True, exist_ok=True)
        done = audit(setting)
        rows = rows_of(done)
        write(folder, done, rows)
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    table = Table(*COLUMNS, "s an image", title=title(done))
    for row in rows:
        table.add_row(*row.cells(), f"{row.seconds:.1f}" if row.seconds >= 0.05 else "")
    console = Console()
    console.print(table)
    for note in notes(rows):
        console.print(note, soft_wrap=True)
    typer.echo(folder / "table.md")


if __name__ == "__main__":
    app()
