"""Commands: ``umbel attack reconstruct | identify | audit``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from umbel.privacy.accounting.guarantee import DELTA
from umbel.protocol.cli import command_group, errors_in_one_line
from umbel.protocol.home import umbel_home
from umbel.protocol.options import parse_options
from umbel_lab.attacks import identify, reconstruct
from umbel_lab.attacks.audit import bounds, findings
from umbel_lab.output import Page

app = command_group("Attack releases, to see what they reveal. An attack that fails proves nothing.")

Seed = Annotated[int, typer.Option(min=0, help="Seed of every draw.")]
Out = Annotated[Path | None, typer.Option(help="Folder for tables.", show_default="$UMBEL_HOME/audits/ATTACK-…")]


def _leave(out: Path | None, name: str, attack: Callable[[], Page]) -> None:
    """Run an attack, write its page to a folder, by default NAME under ``$UMBEL_HOME/audits``, and print it."""
    with errors_in_one_line():
        folder = out.expanduser().absolute() if out else umbel_home() / "audits" / re.sub(r"[^\w.-]+", "-", name)
        page = attack()
        page.write(folder)
    page.show()
    typer.echo(folder / "table.md")


@app.command("reconstruct")
def reconstruct_command(
    dataset: Annotated[str, typer.Option(help="Name or path of a dataset of 28x28 images.")],
    model: Annotated[
        str, typer.Option(help="cnn, cnn-sigmoid, lenet, each with 10 for digits only, or package.module:factory.")
    ],
    noise_multiplier: Annotated[
        list[float], typer.Option(help="nu. May be repeated.", show_default="the paper's nine")
    ] = list(reconstruct.NOISE_MULTIPLIERS),  # noqa: B006
    count: Annotated[int, typer.Option("--images", min=1, help="Clients to attack, each with one image.")] = 8,
    restarts: Annotated[int, typer.Option(min=1, help="Starts of DLG; the best counts.")] = 2,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Reconstruct an image from a release of one training step, behind the app's own gate."""
    multipliers = tuple(dict.fromkeys(noise_multiplier))
    setting = reconstruct.Setting(dataset, model, multipliers, count, restarts, seed)
    name = f"reconstruct-{Path(dataset).name}-{model}"
    _leave(out, name, lambda: reconstruct.page(reconstruct.audit(setting)))


@app.command("identify")
def identify_command(
    dataset: Annotated[str, typer.Option(help="Name or path of a dataset of preferences.")] = "preferences",
    noise_multiplier: Annotated[
        list[float], typer.Option(help="nu. May be repeated.", show_default="0, 1 and 3")
    ] = list(identify.NOISE_MULTIPLIERS),  # noqa: B006
    model: Annotated[
        str, typer.Option(help="biased-factors for the recommender with biases.", show_default="the dataset's")
    ] = "",
    victims: Annotated[int, typer.Option(min=1, help="Clients to attack.")] = 20,
    after: Annotated[int, typer.Option(min=0, help="Rounds of honest training first.")] = 30,
    interactions: Annotated[int, typer.Option(min=1, help="Maximum requests to each client.")] = 500,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Steal clients' local parameters from their updates, behind the app's own gate."""
    options = {"victims": victims, "after": after, "interactions": interactions}
    changes = {"model": model, "seed": seed}
    multipliers = tuple(dict.fromkeys(noise_multiplier))
    name = f"identify-{Path(dataset).name}-{model or 'factors'}"
    _leave(out, name, lambda: identify.audit(dataset, multipliers, options, **changes).page())


@app.command("audit")
def audit_command(
    setting: Annotated[
        str,
        typer.Argument(
            help="Such as 'parameters=7 noise-multiplier=20', and: mechanism=laplace, gaussian, discrete-gaussian, or "
            "package.module:Class; hypotheses=k and choice-epsilon; release=client or site; participations of each "
            "canary.",
            show_default="standard settings",
        ),
    ] = "",
    canaries: Annotated[
        int, typer.Option(min=100, help="Canaries of each setting. One in four only fixes the number of guesses.")
    ] = findings.CANARIES,
    delta: Annotated[float, typer.Option(help="Delta of the (epsilon, delta) claim.")] = DELTA,
    confidence: Annotated[float, typer.Option(help="Confidence of each lower bound.")] = bounds.CONFIDENCE,
    as_site: Annotated[
        bool,
        typer.Option(
            "--as-site/--simulated",
            help="Ask a deployed site through its own executor: data and ledger on disk, noise without a seed. "
            "At most 10,000 canaries.",
        ),
    ] = False,
    seed: Seed = 0,
) -> None:
    """Bound epsilon from below with canary clients, behind the app's own gate, and compare with the claim.

    Exits with 1 if the canaries exceed a claim beyond chance.
    """
    with errors_in_one_line():
        settings = findings.deployed() if as_site else findings.standard()
        if setting:
            settings = parse_options(findings.SettingOptions, setting, "setting").settings()
        results = [findings.audit(each, canaries, seed, delta, confidence, as_site) for each in settings]
    findings.page(results, delta, confidence).show()
    if any(finding.verdict is bounds.Verdict.EXCEEDS for finding in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
