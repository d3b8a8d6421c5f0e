"""``umbel run``: a simulation in this process, from its checks to its results."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn

from umbel.privacy.accounting.guarantee import DELTA
from umbel.protocol import logs
from umbel.protocol.cli import command_line, console
from umbel.protocol.errors import ConfigError, WorthError
from umbel.protocol.rules import key_of
from umbel.protocol.run_config import RunConfig
from umbel.server.run_folder import RunFolder
from umbel.simulation.start import in_this_process, resumed, values_of
from umbel.simulation.wanted import Wanted

Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Plan noise, rounds and clip norms for this guarantee, which holds between any two data sets of a client "
        "over the whole run.",
        show_default="the configuration's noise, if any",
    ),
]
Delta = Annotated[
    float | None,
    typer.Option(
        min=0, max=0.999, help="Delta of the guarantee; 0 for a pure epsilon of clients.", show_default=f"{DELTA:g}"
    ),
]
RowEpsilon = Annotated[
    float | None,
    typer.Option(
        help="Plan noise in training (DP-SGD) for this guarantee of each row of a client, with --rows.",
        show_default="none",
    ),
]
Rows = Annotated[
    int | None,
    typer.Option(min=1, help="With --row-epsilon: rows of a typical client. They decide the batch, not the guarantee."),
]


@command_line
def app(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG|DATASET|RUN] [KEY=VALUE...]",
            help="A TOML file with run-config values, its name in configs/, or a dataset; with --resume, a run. "
            "KEY=VALUE overrides a value; umbel config lists the keys.",
            show_default="synthetic data, with a guarantee",
        ),
    ] = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    row_epsilon: RowEpsilon = None,
    rows: Rows = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume RUN after its last finished round.")] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Number of simulated nodes, which share the clients.")] = 1,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines/--no-baselines",
            help="At the end, compare the run with baselines.",
        ),
    ] = True,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with exit code 5 unless the run is shown to be worth it.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Print a line for each round on a terminal, too."),
    ] = False,
) -> None:
    """Run an experiment in simulation, in this process. For Flower's simulation, use flwr run."""
    if strict and not baselines:
        text = "--strict needs the run's worth; leave out --no-baselines"
        raise ConfigError(text, code="config.strict-alone")
    values, words = asked(what or [], resume, (epsilon, delta, row_epsilon, rows), nodes)
    for line in words:
        typer.echo(line)
    try:
        with _printed(verbose):
            folder = in_this_process(values, nodes, baselines)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if strict:
        demand(folder)


@contextmanager
def _printed(verbose: bool) -> Iterator[None]:
    """Inside, print the log; on a terminal, unless `verbose`, a line of progress in place of the rounds."""
    screen = console()
    if verbose or not screen.is_interactive:
        with logs.printed(typer.echo):
            yield
        return
    with Progress(BarColumn(20), TextColumn("{task.description}"), console=screen, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(run: logs.Progress) -> None:
            bar.update(task, description=run.text, completed=run.done, total=run.rounds)

        with logs.printed(partial(screen.print, markup=False, highlight=False, soft_wrap=True), show):
            yield


def demand(folder: Path) -> None:
    """Raise `WorthError` unless a run is shown to be worth it."""
    worth = RunFolder(folder).read_worth()
    if worth is None or not worth.worth_it:
        text = worth.verdict if worth else "the run's worth was not measured"
        raise WorthError(f"the run is not shown to be worth it: {text}", code="worth.not-shown")


_OPTIONS = ("epsilon", "row-epsilon", "delta")
_SHORT = re.compile(r"[+-]?(\.\d+|\d+\.)(e[+-]?\d+)?", re.IGNORECASE)  # TOML does not accept .5 and 5. as numbers


def asked(
    words: list[str],
    resume: bool = False,
    figures: Sequence[Any] = (),
    nodes: int = 1,
) -> tuple[dict[str, Any], list[str]]:
    """Return the run-config values for a command line, and lines that describe them.

    The figures are those of `Wanted.of`. Errors are those of `umbel.simulation.start.values_of`.
    """
    source, some = parted(words)
    given = pairs(some)
    for key, value in given.items():
        near = [] if key_of(key) in RunConfig.names() else difflib.get_close_matches(key_of(key), _OPTIONS, 1, 0.8)
        if near:
            text = f"there is no key {key}; did you mean the option --{near[0]} {value}?"
            raise ConfigError(text, code="config.unknown-key")
    if not resume:
        planned = values_of(source, given, Wanted.of(*figures), nodes)
        return planned.values, planned.words
    if any(figure is not None for figure in figures):
        text = "a resumed run keeps its noise; leave out --epsilon, --row-epsilon, --rows and --delta"
        raise ConfigError(text, code="config.resumed-epsilon")
    if not source:
        raise ConfigError(
            "name the run to resume: umbel run RUN --resume; umbel runs list shows them", code="config.no-run"
        )
    return resumed(source, given), []


def parted(words: list[str]) -> tuple[str, list[str]]:
    """Return the configuration in words of a command line, or nothing, and the ``key=value`` words."""
    named = [word for word in words if "=" not in word]
    if len(named) > 1:
        raise ConfigError(
            f"{named[-1]!r} is not KEY=VALUE, and one configuration is given already", code="config.two-configurations"
        )
    return "".join(named), [word for word in words if "=" in word]


def pairs(words: list[str]) -> dict[str, Any]:
    """Return the values in ``key=value`` words, each as TOML or, without a shell's quotes, plain text."""
    values: dict[str, Any] = {}
    for word in words:
        try:
            values |= tomllib.loads(word)
        except tomllib.TOMLDecodeError:
            key, _, text = word.partition("=")
            values[key.strip()] = float(text) if _SHORT.fullmatch(text.strip()) else text.strip()
    return values
