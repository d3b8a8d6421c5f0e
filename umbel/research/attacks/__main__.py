"""Commands: ``umbel attack all | reconstruct | identify | rows | audit``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from click.core import ParameterSource
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umbel.privacy.accounting.guarantee import DELTA, site_release
from umbel.protocol.cli import errors_in_one_line
from umbel.protocol.errors import ConfigError
from umbel.protocol.home import umbel_home
from umbel.protocol.release import LAPLACE
from umbel.research.attacks import identify, on_images, overview, scene
from umbel.research.attacks.audit import findings
from umbel.research.attacks.reconstruct import NOISE_MULTIPLIERS, Setting, audit
from umbel.research.attacks.reconstruction_report import COLUMNS, notes, rows_of, title, write
from umbel.research.attacks.rows import audit as table_audit
from umbel.research.attacks.rows import report

# Without locals: they hold clients' data.
app = typer.Typer(
    add_completion=False,
    suggest_commands=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Attack releases, to see what they show. An attack that fails proves nothing.",
)


@app.command("all")
def all_command(
    dataset: Annotated[str, typer.Option(help="Name or path of a dataset of 28x28 images.")] = "femnist",
    model: Annotated[str, typer.Option(help="Of all attacks but DLG.")] = "cnn",
    smooth_model: Annotated[str, typer.Option(help="Of DLG: one that is twice differentiable.")] = "lenet",
    attack: Annotated[
        list[str] | None, typer.Option(help="One of " + ", ".join(on_images.ATTACKS) + ".", show_default="all")
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Images to attack; ten times as many clients for yes or no.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every draw.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables.", show_default="$UMBEL_HOME/audits/all-…")
    ] = None,
) -> None:
    """Make every attack on images in every mode of release, behind the app's own gate, and print one table."""
    setting = scene.Setting(dataset, model, smooth_model, images, seed, tuple(attack or ()))
    name = "-".join(["all", Path(dataset).name, model, f"{images}-images", f"seed{seed}", *setting.attacks])
    name = re.sub(r"[^\w.-]+", "-", name)
    with errors_in_one_line():
        folder = out.expanduser().absolute() if out else umbel_home() / "audits" / name
        found = overview.overview(setting)
        folder.mkdir(parents=True, exist_ok=True)
        overview.write(folder, setting, found)
    head, *rows = overview.table(found)
    table = Table(*head, title="Attacks by mode of release")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console()
    console.print(table)
    for note in overview.notes(setting):
        console.print(note, soft_wrap=True)
    typer.echo(folder / "table.md")


@app.command()
def reconstruct(
    dataset: Annotated[str, typer.Option(help="Name or path of a dataset of 28x28 images.")],
    model: Annotated[
        str, typer.Option(help="cnn, cnn-sigmoid, lenet, each with 10 for digits alone, or package.module:factory.")
    ],
    noise_multiplier: Annotated[
        list[float], typer.Option(help="nu; give it once for each.", show_default="the paper's nine")
    ] = list(NOISE_MULTIPLIERS),  # noqa: B006
    per_layer: Annotated[
        bool, typer.Option("--per-layer/--whole", help="Noise each layer by itself, as the paper does here.")
    ] = True,
    images: Annotated[int, typer.Option(min=1, help="Clients to attack, each with one image.")] = 8,
    restarts: Annotated[int, typer.Option(min=1, help="Starts of DLG; the best counts.")] = 2,
    releases: Annotated[int, typer.Option(min=1, help="Of each client, whose mean is attacked.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every draw.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for tables and picture.", show_default="$UMBEL_HOME/audits/reconstruct-…"),
    ] = None,
) -> None:
    """Reconstruct single images from one step of training, behind the app's own gate."""
    setting = Setting(
        dataset, model, tuple(dict.fromkeys(noise_multiplier)), per_layer, images, restarts, seed, releases
    )
    name = re.sub(
        r"[^\w.-]+",
        "-",
        f"reconstruct-{Path(dataset).name}-{model}"
        + ("" if per_layer else "-whole")
        + (f"-{releases}-releases" if releases > 1 else ""),
    )
    with errors_in_one_line():
        folder = out.expanduser().absolute() if out else umbel_home() / "audits" / name
        done = audit(setting)
        folder.mkdir(parents=True, exist_ok=True)
        rows = rows_of(done)
        write(folder, done, rows)
    table = Table(*COLUMNS, "s an image", title=title(done))
    for row in rows:
        table.add_row(*row.cells(), f"{row.seconds:.1f}" if row.seconds >= 0.05 else "")
    console = Console()
    console.print(table)
    for note in notes(rows):
        console.print(note, soft_wrap=True)
    typer.echo(folder / "table.md")


@app.command("identify")
def identify_command(
    dataset: Annotated[str, typer.Option(help="Name or path of a dataset of preferences.")] = "preferences",
    noise_multiplier: Annotated[
        list[float], typer.Option(help="nu; give it once for each.", show_default="0, 1 and 3")
    ] = list(identify.NOISE_MULTIPLIERS),  # noqa: B006
    model: Annotated[
        str, typer.Option(help="biased-factors for the recommender with biases.", show_default="the dataset's")
    ] = "",
    noise_per: Annotated[str, typer.Option(help="vector, or row: each item by itself.")] = "vector",
    victims: Annotated[int, typer.Option(min=1, help="Clients to attack.")] = 20,
    after: Annotated[int, typer.Option(min=0, help="Rounds of honest training first.")] = 30,
    interactions: Annotated[int, typer.Option(min=1, help="The maximum asked of each client.")] = 500,
    defences: Annotated[bool, typer.Option(help="Attack again behind each defence of a site.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every draw.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables.", show_default="$UMBEL_HOME/audits/identify-…")
    ] = None,
) -> None:
    """Steal clients' local parameters from their updates, behind the app's own gate and each defence."""
    name = re.sub(r"[^\w.-]+", "-", f"identify-{Path(dataset).name}-{model or 'factors'}-{noise_per}")
    options = {"victims": victims, "after": after, "interactions": interactions}
    with errors_in_one_line():
        folder = out.expanduser().absolute() if out else umbel_home() / "audits" / name
        multipliers = tuple(dict.fromkeys(noise_multiplier))
        done = identify.audit(dataset, multipliers, defences, options, model=model, noise_per=noise_per, seed=seed)
        folder.mkdir(parents=True, exist_ok=True)
        identify.write(folder, done)
    console = Console()
    for heading, rows in done.tables():
        table = Table(*rows[0], title=heading)
        for row in rows:
            table.add_row(*map(identify.cell, row.values()))
        console.print(table)
    for note in done.notes():
        console.print(note, soft_wrap=True)
    typer.echo(folder / "table.md")


@app.command("rows")
def rows_command(
    dataset: Annotated[
        str, typer.Option(help="Name or path of a dataset of service, place and payment, as hospital.")
    ] = "hospital",
    clients: Annotated[int, typer.Option(min=1, help="Hospitals of each kind to attack, at most.")] = (
        table_audit.CLIENTS
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of every draw.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables.", show_default="$UMBEL_HOME/audits/rows-…")
    ] = None,
) -> None:
    """Reconstruct hospitals' rows from what they release, in each mode of release, behind the app's own gate."""
    setting = table_audit.Setting(dataset, clients, seed)
    with errors_in_one_line():
        folder = out.expanduser().absolute() if out else umbel_home() / "audits" / report.file_name(setting)
        found = table_audit.audit(setting)
        folder.mkdir(parents=True, exist_ok=True)
        report.write(folder, setting, found)
    console = Console()
    for heading, rows in report.tables(found):
        table = Table(*report.COLUMNS, title=heading)
        for row in rows:
            # Brackets are no markup here.
            table.add_row(*map(escape, row))
        console.print(table)
    for note in report.notes():
        console.print(note, soft_wrap=True)
    typer.echo(folder / "table.md")


_COMMANDLINE = ParameterSource.COMMANDLINE
_OF_ONE_SETTING = ("mechanism", "hypotheses", "choice-epsilon", "report-noise-multiplier", "by-site", "participations")


def _given(context: typer.Context, *options: str) -> list[str]:
    """Return those of the options that are on the command line."""
    return [name for name in options if context.get_parameter_source(name.replace("-", "_")) is _COMMANDLINE]


@app.command("audit")
def audit_command(
    context: typer.Context,
    parameters: Annotated[
        int | None, typer.Option(min=1, help="n; with --noise-multiplier, audit this setting alone.")
    ] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="nu; above 0.")] = None,
    mechanism: Annotated[str, typer.Option(help="laplace, gaussian, or package.module:Class.")] = LAPLACE,
    hypotheses: Annotated[int, typer.Option(min=1, help="k.")] = 1,
    choice_epsilon: Annotated[float, typer.Option(min=0, help="Of the private choice among them.")] = 0.0,
    report_noise_multiplier: Annotated[float, typer.Option(min=0, help="Above 0: canaries report as well.")] = 0.0,
    by_site: Annotated[
        bool, typer.Option("--by-site/--by-client", help="Who adds the noise: a site to sums, or each client.")
    ] = False,
    participations: Annotated[int, typer.Option(min=1, help="How often each canary takes part.")] = 1,
    canaries: Annotated[int, typer.Option(min=100, help="Of each setting; one in four is a pilot.")] = (
        findings.CANARIES
    ),
    delta: Annotated[float, typer.Option(help="With which the second claim holds.")] = DELTA,
    confidence: Annotated[float, typer.Option(help="Of each lower bound.")] = findings.CONFIDENCE,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every draw.")] = 0,
) -> None:
    """Bound epsilon from below with canary clients, behind the app's own gate, and compare with what is claimed.

    Exits with 1 where the canaries exceed a claim beyond chance.
    """
    with errors_in_one_line():
        settings = findings.standard()
        if parameters is None and noise_multiplier is None and (idle := _given(context, *_OF_ONE_SETTING)):
            raise ConfigError(f"--{idle[0]} is of one setting: give its --parameters and --noise-multiplier as well")
        if (parameters is None) != (noise_multiplier is None):
            raise ConfigError(
                "give both --parameters and --noise-multiplier, or none of these for the standard settings"
            )
        if parameters is not None and noise_multiplier is not None:
            release = findings.training(parameters, noise_multiplier, hypotheses, choice_epsilon, mechanism)
            settings = findings.settings_of(
                site_release(release) if by_site else release, participations, report_noise_multiplier
            )
        found = [findings.audit(setting, canaries, seed, delta, confidence) for setting in settings]
    table = Table(*findings.columns(delta), title=f"Claimed epsilon, and shown at a confidence of {confidence:.4g}")
    for one in found:
        table.add_row(*one.cells())
    Console().print(table)
    if any(one.verdict is findings.Verdict.EXCEEDS for one in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
