"""The parts of the site that come from umbel itself: commands, settings, strategies, errors, the API, benchmarks.

A page says ``<!-- commands -->`` where the table of commands belongs, and so on: see `PARTS`.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import pydoc
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import typer
from docutils import nodes

from tests.helpers import codes
from umbel import strategies
from umbel.cli.main import app as command
from umbel.privacy.site.policy import Bounds, Policy
from umbel.protocol.rules import Settings
from umbel.protocol.run_config import RunConfig
from umbel_lab.attacks.defences.probes import MENDS

HERE = Path(__file__).resolve().parent

LIMITS: Mapping[str, str] = {
    mark.key: name
    for name, field in zip(Policy.names(), Policy.model_fields.values(), strict=True)
    for mark in field.metadata
    if isinstance(mark, Bounds)
}
"""By a key of the run config: the entry of a site's policy that bounds it."""

ASIDE = ("start/first-hour", "papers/others", "project/flower")
"""Pages to which others lead, and which the sidebar leaves out."""


def commands() -> str:
    """Return every command with its arguments and options, as its ``--help`` has them."""
    root: Any = typer.main.get_command(command)
    return "\n".join(
        line for name, command in _subcommands(root, None) for line in _command(f"umbel {name}", command, 3)
    )


def _subcommands(group: Any, parent: click.Context | None) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands of a group; a lazy one imports each."""
    context = click.Context(group, parent, info_name="umbel")
    for name in group.list_commands(context):
        _, command, _ = group.resolve_command(context, [name])
        assert command is not None, name
        yield name, command


def _command(path: str, command: click.Command, level: int) -> Iterator[str]:
    yield from (f"{'#' * min(level, 4)} {path}", "", _text(command.help or ""), "")
    if isinstance(command, click.Group):
        for name, inner in _subcommands(command, None):
            yield from _command(f"{path} {name}", inner, level + 1)
        return
    given = [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    words = [_usage(one) for one in given if isinstance(one, click.Argument)]
    options = ["[OPTIONS]"] if any(isinstance(one, click.Option) for one in given) else []
    yield from ("```text", " ".join([path, *options, *words]), "```", "")
    if given:
        yield from ("| argument or option | meaning | default |", "|---|---|---|")
        yield from (f"| {_names(one)} | {_meaning(one)} | {_default(one)} |" for one in given)
        yield ""


def _usage(argument: click.Argument) -> str:
    name = argument.metavar or argument.human_readable_name
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _names(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Argument):
        return _code(_usage(parameter))
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    takes = (
        "" if getattr(parameter, "is_flag", False) else f" {parameter.make_metavar(click.Context(click.Command('')))}"
    )
    return _code(f"{names}{takes}")


def _meaning(parameter: click.Parameter) -> str:
    return _cell(_text(getattr(parameter, "help", "") or ""))


def _default(parameter: click.Parameter) -> str:
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str):
        return _cell(shown)
    if parameter.required:
        return "required"
    found = parameter.default
    if parameter.secondary_opts:  # --this, or --no-this
        return _code([*parameter.secondary_opts, *parameter.opts][bool(found) * len(parameter.secondary_opts)])
    if found is None or callable(found) or found in ((), [], False, ""):
        return ""
    return _code(str(getattr(found, "value", found)))


def run_config() -> str:
    """Return every key of the run config, by its sections, with default, range and the site's entry that bounds it."""
    lines: list[str] = []
    for name, default, rule, meaning in RunConfig.table():
        if title := RunConfig.SECTIONS.get(name):
            lines += [
                "",
                f"### {title}",
                "",
                "| key | default | range | bound in a site's policy | meaning |",
                "|---|---|---|---|---|",
            ]
        bound = _code(LIMITS[name]) if name in LIMITS else ""
        lines.append(f"| {_code(name)} | {_code(default)} | {_cell(rule)} | {bound} | {_cell(meaning)} |")
    return "\n".join(lines)


def policy() -> str:
    """Return every entry of a site's policy, with default and range."""
    return _table(Policy)


def _table(kind: type[Settings]) -> str:
    lines = ["| entry | default | range | meaning |", "|---|---|---|---|"]
    for name, default, rule, meaning in kind.table():
        lines.append(f"| {_code(name)} | {_code(default)} | {_cell(rule)} | {_cell(meaning)} |")
    return "\n".join(lines)


def built_in() -> str:
    """Return every strategy with its options, their defaults, and the first sentence of its class."""
    lines = ["| strategy | options and defaults | what it is |", "|---|---|---|"]
    for name in strategies.STRATEGIES:
        found = strategies.load(name)
        options = " ".join(f"{field.name}={field.default}" for field in dataclasses.fields(found.Options))
        lines.append(f"| {_code(name)} | {_code(options) if options else ''} | {_cell(_first(found))} |")
    return "\n".join(lines)


def _first(found: type) -> str:
    """Return the first sentence of a class's docstring."""
    return " ".join(str(found.__doc__).split("\n\n")[0].split())


def errors() -> str:
    """Return every code of an error with its exit code, its cause, and the remedy."""
    lines = ["| code | exit | what is wrong | what to do |", "|---|---|---|---|"]
    lines += [
        f"| {_code(code)} | {status} | {_cell(cause)} | {_cell(remedy)} |"
        for code, status, cause, remedy in codes.rows()
    ]
    return "\n".join(lines)


def faults() -> str:
    """Return every fault that an audit finds, with the way to mend it."""
    rows = [f"| {_code(name)} | {_cell(mend)} |" for name, mend in MENDS.items()]
    return "\n".join(["| fault | how to mend it |", "|---|---|", *rows])


def benchmark(file: Path) -> str:
    """Return what a benchmark printed, as a block."""
    return f"```text\n{file.read_text(encoding='utf-8').rstrip()}\n```"


def api(*names: str) -> str:
    """Return what documents public names of umbel, from their docstrings."""
    lines = ["```{eval-rst}"]
    for name in names:
        if inspect.isclass(pydoc.locate(f"umbel.{name}")):
            inherited = ":inherited-members: object,BaseModel,Strategy,Module,BaseEstimator"
            lines += [f".. autoclass:: umbel.{name}", "   :members:", f"   {inherited}", ""]
        else:
            lines += [f".. autofunction:: umbel.{name}", ""]
    return "\n".join([*lines, "```"])


PARTS: Mapping[str, Callable[..., str]] = {
    "api": api,
    **{
        f"benchmark-{file.stem.replace('_', '-')}": partial(benchmark, file)
        for file in (HERE.parent / "benchmarks" / "tables").glob("*.txt")
    },
    "commands": commands,
    "run-config": run_config,
    "policy": policy,
    "strategies": built_in,
    "errors": errors,
    "faults": faults,
}


def _text(markup: str) -> str:
    """Return help as Markdown: without the terminal's markup, a paragraph a block."""
    plain = re.sub(r"\[/?[a-z]+( [a-z]+)*\]", "", markup)
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n|\x08", plain) if part.strip())


def _cell(text: str) -> str:
    """Return text that stays in one cell of a table; what looks like code or markup is shown as it is."""
    return re.sub(r"([|<>*_`$\\\[\]{}])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _part(found: re.Match[str]) -> str:
    name, *words = found[1].split()
    return PARTS[name](*words)


def _fill(app: Any, docname: str, source: list[str]) -> None:
    """Put the parts where a page names them, and turn links to folders, which a site has not, into their text."""
    if docname in ASIDE or docname.startswith("results/"):
        app.env.metadata[docname]["orphan"] = True
    if app.env.doc2path(docname).suffix != ".md":
        return
    folder = Path(app.env.doc2path(docname)).parent
    text = re.sub(r"^<!-- ([a-z-]+|api [\w. ]+) -->$", _part, source[0], flags=re.MULTILINE)

    def link(found: re.Match[str]) -> str:
        target = (folder / found[2].partition("#")[0]).resolve()
        outside = not target.is_relative_to(app.srcdir) and target.suffix == ".md"
        return found[1] if target.is_dir() or outside else found[0]

    source[0] = re.sub(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)", link, text)


def _skip(app: Any, what: str, name: str, found: object, skip: bool, options: object) -> bool | None:
    """Leave out scikit-learn's own methods for the routing of metadata, whose docs refer to its pages."""
    return True if re.fullmatch(r"[gs]et_metadata_routing|set_\w+_request", name) else None


def _at_home(app: Any, doctree: nodes.document) -> None:
    """Show the folder in which the notebook ran as a reader's own."""
    for block in doctree.findall(nodes.literal_block):
        if (home := os.environ["UMBEL_HOME"]) in block.astext():
            block.children = [nodes.Text(block.astext().replace(home, "~/umbel"))]


def setup(app: Any) -> dict[str, Any]:
    """Have Sphinx fill pages as it reads them."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("source-read", _fill)
    app.connect("autodoc-skip-member", _skip)
    app.connect("doctree-read", _at_home)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
