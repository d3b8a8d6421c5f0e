"""All that is public, as CONTRIBUTING.md says, and the list of it that a release keeps.

    python -m tests.helpers.public_api

writes the list. It refuses to drop what a release had, unless the version allows that.
"""

from __future__ import annotations

import inspect
import json
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import click
import typer

import umbel
from tests.helpers.codes import made
from tests.helpers.sources import ROOT
from umbel.cli.main import app
from umbel.privacy.site.policy import Policy
from umbel.protocol import errors
from umbel.protocol.errors import UmbelError
from umbel.protocol.run_config import RunConfig

FILE = ROOT / "tests" / "public_api.json"
CHANGES = ROOT / "CHANGELOG.md"
Api = dict[str, Any]
_ORDERED = {"POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD"}


def current() -> Api:
    """Return what is public now."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        "version": project["version"],
        "names": dict(sorted(_names())),
        "commands": {name: sorted(options) for name, options in sorted(_commands(typer.main.get_command(app), ""))},
        "settings": sorted(RunConfig.names()),
        "site policy": sorted(Policy.names()),
        "errors": sorted({code for place in made() for code in place.codes}),
        "exit codes": {
            one.kind: one.exit_code
            for one in vars(errors).values()
            if isinstance(one, type) and issubclass(one, UmbelError)
        },
        "extras": sorted(project["optional-dependencies"]),
    }


def _names() -> Iterator[tuple[str, list[list[Any]]]]:
    for name in umbel.__all__:
        found = getattr(umbel, name)
        yield name, _parameters(found)
        for member, method in inspect.getmembers(found, inspect.isfunction) if inspect.isclass(found) else ():
            if not member.startswith("_") and method.__module__.startswith("umbel."):
                yield f"{name}.{member}", _parameters(method)


def _parameters(found: Any) -> list[list[Any]]:
    """Return name, kind and whether it must be given, of each parameter."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return []
    return [[one.name, one.kind.name, one.default is one.empty] for one in parameters]


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, list[str]]]:
    yield path, [option for one in command.params if isinstance(one, click.Option) for option in one.opts]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            _, inner, _ = command.resolve_command(context, [name])
            assert inner is not None, name
            if not inner.hidden:
                yield from _commands(inner, f"{path} {name}".strip())


def missing(old: Api, new: Api) -> list[str]:
    """Return what was public and is so no more, or takes other parameters."""
    gone = [
        f"{kind}: {name}"
        for kind in ("settings", "site policy", "errors", "extras")
        for name in sorted({*old[kind]} - {*new[kind]})
    ]
    gone += [f"exit code: {kind}" for kind, code in old["exit codes"].items() if new["exit codes"].get(kind) != code]
    for path, options in old["commands"].items():
        there = new["commands"].get(path)
        gone += [f"command: {path}"] if there is None else [f"{path} {one}" for one in options if one not in there]
    for name, parameters in old["names"].items():
        there = new["names"].get(name)
        if there is None:
            gone.append(f"umbel.{name}")
        elif not _fits(parameters, there):
            gone.append(f"umbel.{name} with {', '.join(one[0] for one in parameters)}")
    return gone


def _fits(old: list[list[Any]], new: list[list[Any]]) -> bool:
    """Return whether every call that was understood still is: parameters in their order, and no new one required."""
    known, order = {one[0]: one for one in new}, [one[0] for one in new if one[1] in _ORDERED]
    kept = [one[0] for one in old if one[1] in _ORDERED]
    same = all(name in known and known[name][1] == kind and known[name][2] <= must for name, kind, must in old)
    return same and order[: len(kept)] == kept and not any(one[2] for one in new if one[0] not in {o[0] for o in old})


def may_remove(old: str, new: str, changes: str) -> bool:
    """Return whether the `new` version may lack what the `old` one had: before its release, any may."""
    before, after = ([int(part) for part in version.split(".")] for version in (old, new))
    return f"## [{old}]" not in changes or after[0] > before[0] or (before[0] == 0 and after[1] > before[1])


def main() -> None:
    """Write the list."""
    now = current()
    if FILE.exists():
        kept = json.loads(FILE.read_text(encoding="utf-8"))
        gone = missing(kept, now)
        if gone and not may_remove(kept["version"], now["version"], CHANGES.read_text(encoding="utf-8")):
            sys.exit("A release had these; keep them, with a FutureWarning: " + "; ".join(gone))
    FILE.write_text(_written(now), encoding="utf-8")


def _written(api: Api) -> str:
    """Return JSON with a line for each name, so that a change shows as a line."""

    def block(value: Any) -> str:
        if isinstance(value, dict):
            return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items()) + "\n }"
        return (
            "[\n" + ",\n".join(f"  {json.dumps(one)}" for one in value) + "\n ]"
            if isinstance(value, list)
            else json.dumps(value)
        )

    return "{\n" + ",\n".join(f" {json.dumps(key)}: {block(value)}" for key, value in api.items()) + "\n}\n"


if __name__ == "__main__":
    main()
