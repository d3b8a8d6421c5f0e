"""The commands in a page of Markdown, and whether they would be understood: parsed as they would be, but not run."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import runpy
import shlex
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from tests.helpers.sources import ROOT
from umbel.cli.commands.run import pairs
from umbel.protocol.cli import command_line

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?:\.venv/bin/)?(?:umbel|python3?|make|flwr|flower-\w+|docker|docker-compose|pip|ray) \S")
_LOGGED = "umbel refused"
"""How a line of a node's log begins, which is no command."""
_ENDS = {"&&", "||", "|", ";", "&"}
_PLACEHOLDER = re.compile(r"[A-Z][A-Z-]*(/\w+)?|<.*>|last(/\w+)?")
"""Words that stand for another: a run, a folder, a number."""
_PLAIN = (
    "cd", "chown", "cp", "export", "helm", "install", "kubectl", "mkdir", "runuser", "sha256sum", "source",
    "ssh-keygen", "systemctl", "tensorboard", "useradd",
)  # fmt: skip
"""Programs whose words are not looked at."""
_FLOWER = {
    "flower-supernode": ("flwr.supernode.cli.flower_supernode", "_parse_args_run_supernode"),
    "flower-superlink": ("flwr.superlink.cli.flower_superlink", "_parse_args_run_superlink"),
    "flower-superexec": ("flwr.supercore.cli.flower_superexec", "_parse_args"),
}
"""The parsers of Flower's programs, by module and function."""


def blocks(text: str, *languages: str) -> Iterator[str]:
    """Yield the fenced blocks of these languages."""
    for indent, language, block in _FENCE.findall(text):
        if language in languages:
            yield re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)


def documented(file: Path) -> Iterator[list[str]]:
    """Yield the commands in a module's docstring: the indented blocks that begin with one."""
    told = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    for block in re.findall(r"(?:^ {4}.*\n?)+", told, re.MULTILINE):
        # Each line is a command, or continues the one before.
        for line in re.split(rf"\n +(?={_INLINE.pattern})", block.strip()):
            if _INLINE.match(line):
                yield from _simple(" ".join(line.replace("\\\n", " ").split()))


def inline(text: str) -> Iterator[str]:
    """Yield what stands between backticks outside of blocks, each on one line."""
    for words in re.findall(r"`([^`]+)`", _FENCE.sub("", text)):
        yield " ".join(words.split())


def commands(text: str) -> Iterator[list[str]]:
    """Yield every command of a page as words: of shell blocks, and of inline code that begins as a command does."""
    found = [line for block in blocks(text, "bash", "sh", "shell", "console") for line in _lines(block)]
    found += [code for code in inline(text) if _INLINE.match(code) and not code.startswith(_LOGGED)]
    for line in found:
        yield from _simple(line)


def _lines(block: str) -> Iterator[str]:
    """Yield the commands of a block, each of which may take several lines."""
    said = ""
    for line in block.splitlines():
        said += line
        if said.endswith("\\"):
            said = said[:-1]
        elif said.count('"') % 2 == 0:  # a text may go on over lines
            yield said
            said = ""
    assert not said, f"a command without an end: {said}"


def _simple(line: str) -> Iterator[list[str]]:
    """Yield the commands of a line: one for each alternative (a|b), and with what is optional ([a])."""
    line = re.sub(r"(?<!\S)\[([^\]]+)\](?!\S)", r"\1", line)
    either = [choice.split("|") for choice in re.split(r"((?<!\S)[\w-]+(?:\|[\w-]+)+(?!\S))", line)[1::2]]
    plain = re.split(r"(?<!\S)[\w-]+(?:\|[\w-]+)+(?!\S)", line)
    for choice in itertools.product(*either):
        said = "".join(itertools.chain(*itertools.zip_longest(plain, choice, fillvalue="")))
        lexer = shlex.shlex(said, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in _ENDS:
                while words and re.match(r"[A-Z_]+=", words[0]):  # a variable for this command alone
                    words.pop(0)
                if words:
                    yield words
                words = []
            elif word not in ("…", "..."):
                words.append(word)


def check(words: Sequence[str]) -> None:
    """Fail where a command would not be understood, or names a file, target or key that is not there.

    Raises
    ------
    AssertionError
    """
    program, *rest = words
    if ">" in rest:
        rest = rest[: rest.index(">")]
    match Path(program).name:
        case "umbel":
            _parse(_main(), rest)
        case "flwr":
            _parse(typer.main.get_command(importlib.import_module("flwr.cli.app").app), rest)
        case "ray":
            _parse(importlib.import_module("ray.scripts.scripts").cli, rest)
        case "python" | "python3":
            _python(rest)
        case "make":
            _make(rest)
        case "docker" | "docker-compose" as docker:
            if docker == "docker-compose" or rest[0] == "compose":
                _compose(rest[rest[0] == "compose" :])
        case "pip":
            _pip(rest)
        case "xargs":
            check(rest)
        case other:
            assert other in _PLAIN or not _understood(_flower(other), rest), f"what is {other!r}?"
            assert other != "cp" or (ROOT / rest[0]).exists(), f"there is no {rest[0]}"


@cache
def _main() -> click.Command:
    return typer.main.get_command(importlib.import_module("umbel.cli.main").app)


def _parse(command: click.Command, words: Sequence[str], parent: click.Context | None = None) -> None:
    """Fail unless a command takes these words. A command alone is a name of it, and need not be complete."""
    if not words:
        return
    try:
        with redirect_stdout(StringIO()):
            context = command.make_context(command.name or "umbel", [*words], parent)
    except click.exceptions.Exit as end:
        if end.exit_code == 0:  # --help
            return
        raise AssertionError(f"{' '.join(words)} ends with {end.exit_code}") from None
    except click.UsageError as error:
        wrong = isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter)
        if wrong and any(_PLACEHOLDER.fullmatch(word) for word in words):
            return
        raise AssertionError(f"{' '.join(words)}: {error.format_message()}") from None
    if isinstance(command, click.Group):
        left = [*context._protected_args, *context.args]
        try:
            _, chosen, others = command.resolve_command(context, left)
        except click.UsageError as error:
            raise AssertionError(f"{' '.join(words)}: {error.format_message()}") from None
        assert chosen is not None, f"there is no {left[0]}"
        _parse(chosen, others, context)
    elif context.ignore_unknown_options:
        # It hands them on to Flower's own program.
        unknown = [_understood(_flower(name), context.args) for name in _FLOWER]
        assert [] in unknown, f"neither umbel nor Flower knows {min(unknown, key=len)}"
    for given in ("what", "run_config_overrides"):
        _run_config(command, context.params.get(given) or ())


_DATASETS = ("stays", "wards", "mine", "hospital-services")  # that the docs' commands make, and that umbel brings
_FILES = ("private.toml", "question.toml", "plan.toml", ".")  # that they write, and the folder of an app


@cache
def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _run_config(command: click.Command, words: Sequence[str]) -> None:
    """Fail where a run config does not exist, or has keys that no run knows."""
    known = _pyproject()["tool"]["flwr"]["app"]["config"]
    configs = {path.stem for path in (ROOT / "configs").glob("*.toml")}
    values = [word for word in words if "=" in word]
    unknown = pairs([part for word in values for part in shlex.split(word)]).keys() - known.keys()
    assert not unknown, f"no run config has {unknown}"
    for word in {*words} - {*values}:
        there = word in {*configs, *_DATASETS, *_FILES} or (ROOT / word).is_file() or _PLACEHOLDER.fullmatch(word)
        assert there, f"there is no configuration {word}"


def _python(words: Sequence[str]) -> None:
    first, *rest = words
    if first == "-c":
        compile(rest[0], "a page", "exec")
    elif first == "-m":
        name, *rest = rest
        assert name.partition(".")[0] in ("umbel", "umbel_lab", "benchmarks", "examples", "tests"), f"whose is {name}?"
        found = None
        for module in (name, f"{name}.__main__"):
            with suppress(ModuleNotFoundError):
                found = importlib.util.find_spec(module) or found
        assert found is not None, f"python -m {name} runs nothing"
        code = importlib.import_module(found.name)
        assert '__name__ == "__main__"' in Path(str(found.origin)).read_text(encoding="utf-8"), f"{name} is no command"
        _parse(typer.main.get_command(getattr(code, "app", None) or command_line(code.main)), rest)
    else:
        assert (ROOT / first).is_file(), f"there is no {first}"
        with pytest.MonkeyPatch.context() as patch:
            # A script finds modules next to itself.
            patch.setattr(sys, "path", [str((ROOT / first).parent), *sys.path])
            app = runpy.run_path(str(ROOT / first), run_name="recipe").get("app")
            if app is not None:
                _parse(typer.main.get_command(app), rest)


def _make(words: Sequence[str]) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        variable, is_value, _ = word.partition("=")
        if is_value:
            # Used by the Makefile, or handed on by it to what it calls, as its help says.
            assert re.search(rf"\$\({variable}[):]|\b{variable}( \?)?=", text), f"the Makefile has no {variable}"
        else:
            assert word == ".venv/.ready" or re.search(rf"^{word}:", text, re.MULTILINE), f"no target {word}"


def _compose(words: Sequence[str]) -> None:
    with (ROOT / "docker-compose.yml").open("rb") as file:
        services: dict[str, Any] = yaml.safe_load(file)["services"]
    profiles = {name for service in services.values() for name in service.get("profiles", ())}
    left = [*words]
    while left and left[0] == "--profile":
        left = left[2:] if left[1] in profiles else left[1:]  # a page may leave open which
    verb, *rest = left
    assert verb in ("build", "cp", "down", "exec", "logs", "ps", "run", "up"), f"docker compose {verb}?"
    named = [word for word in rest if not word.startswith("-")]
    if verb in ("run", "exec"):
        assert named[0] in services, f"no service {named[0]}"
        check(rest[rest.index(named[0]) + 1 :])
    elif verb == "cp":
        assert any(word.partition(":")[0] in services for word in named)
    else:
        assert {*named} <= services.keys() | {"image"}, f"no service {named}"


def _pip(words: Sequence[str]) -> None:
    extras = _pyproject()["project"]["optional-dependencies"]
    named = {extra for word in words for group in re.findall(r"\[(.*)\]", word) for extra in group.split(",")}
    assert named <= extras.keys(), f"no extra {named - extras.keys()}"
    files = [words[i + 1] for i, word in enumerate(words) if word in ("-c", "-r", "--constraint", "--requirement")]
    assert all((ROOT / file).is_file() for file in files), files


def _flower(program: str) -> ArgumentParser:
    """Return the parser of one of Flower's programs."""
    assert program in _FLOWER, f"what is {program!r}?"
    module, function = _FLOWER[program]
    parser: ArgumentParser = getattr(importlib.import_module(module), function)()
    return parser


def _understood(parser: ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the words that a parser of Flower's does not understand."""
    said = StringIO()
    try:
        with redirect_stderr(said):
            return parser.parse_known_args(words)[1]
    except SystemExit:
        return [said.getvalue()]
