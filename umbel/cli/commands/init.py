"""``umbel init``: a Flower app in a new folder, with a model of the user's and a test, which runs as it is."""

from __future__ import annotations

import importlib.util
import keyword
import re
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from umbel.protocol.cli import command_line
from umbel.protocol.errors import ConfigError
from umbel.protocol.project import APP, PACKAGE, described

_MAX_LENGTH = 32
"""Of a Flower app's name."""


@command_line
def app(
    folder: Annotated[Path, typer.Argument(help="A new folder, or an empty one. Its name is the project's.")],
    flower: Annotated[
        bool,
        typer.Option("--flower", help="Write an ordinary Flower app, with umbel's strategy and Mods and its own rows."),
    ] = False,
) -> None:
    """Write a Flower app in a new folder. It runs at once, with a model that you can replace."""
    folder = folder.expanduser().absolute()
    package = package_of(folder.name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already; give a new folder", code="config.project-exists")
    for path, text in (flower_files() if flower else files()).items():
        file = folder / path.replace("my_project", package)
        file.parent.mkdir(parents=True, exist_ok=True)
        filled = text.replace("my_project", package).replace("my-project", folder.name)
        file.write_text(filled.replace(">=VERSION", f">={described()['version']}"), encoding="utf-8")
    typer.echo(f"Wrote {folder}. Next:")
    export = "export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"  # umbel is on no package index
    by_flower = "flwr run . --stream" + (' --federation-config "num-supernodes=20"' if flower else "")
    for line in (f"cd {folder.name}", *([] if flower else ["umbel run ."]), export, by_flower):
        typer.echo(f"  {line}")


def files() -> dict[str, str]:
    """Return the files of a project called my-project, by path."""
    return tomllib.loads((PACKAGE / "cli" / "commands" / "init.toml").read_text(encoding="utf-8"))


def flower_files() -> dict[str, str]:
    """Return the files of ``examples/flower_app`` by path, under the name my-project."""
    example = APP / "examples" / "flower_app"
    names = ("pyproject.toml", *(f"flower_app/{name}.py" for name in ("__init__", "server_app", "client_app", "data")))
    texts = {name: (example / name).read_text(encoding="utf-8") for name in names}
    others = re.compile(r" +# or flower_app\.sklearn_client.*")
    return {
        name.replace("flower_app", "my_project"): others.sub("", text)
        .replace("flower_app", "my_project")
        .replace("flower-app", "my-project")
        for name, text in texts.items()
    }


def package_of(name: str) -> str:
    """Return the name of a project's package.

    Raises
    ------
    ConfigError
        When Flower does not take the project's name, or a module of that name is installed.
    """
    if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9-]*", name) or len(name) > _MAX_LENGTH:
        rule = f"letters, digits and hyphens, at most {_MAX_LENGTH}"
        raise ConfigError(f"a Flower app's name has {rule}; got {name!r}", code="config.project-name")
    package = name.replace("-", "_").lower()
    if not package.isidentifier() or keyword.iskeyword(package) or importlib.util.find_spec(package) is not None:
        text = f"{package!r} cannot be the package of {name!r}: it is a module or keyword of Python, or no name"
        raise ConfigError(f"{text}; choose another name", code="config.project-name")
    return package
