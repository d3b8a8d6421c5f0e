"""``umbel init``: a Flower app in a new folder, with a model of the user's and a test, which runs as it is."""

from __future__ import annotations

import importlib.util
import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from umbel.protocol.cli import errors_in_one_line
from umbel.protocol.errors import ConfigError
from umbel.protocol.project import APP, described

app = typer.Typer(add_completion=False)

_MAX_LENGTH = 32
"""Of a Flower app's name."""
_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "my-project"
version = "1.0.0"
description = "Personalised and private federated learning with umbel"
license = "Apache-2.0"  # or yours
requires-python = ">=3.11,<3.14"
dependencies = [
    "flwr[simulation]>=1.42.0,<1.43",
    "umbel>=VERSION",
]

# Flower installs an app's dependencies for each run, except for these two, which are already where the app runs.
[tool.uv]
override-dependencies = ["flwr ; python_version < '3'", "umbel ; python_version < '3'"]

[tool.flwr.app]
publisher = "my-name"
fab-include = ["my_project/**/*.py", "README.md"]

[tool.flwr.app.components]
serverapp = "umbel.server.app:app"
clientapp = "umbel.client.app:app"

# `umbel config` lists all settings. Settings that are missing here have umbel's defaults.
[tool.flwr.app.config]
dataset = "hospital-services"     # comes with umbel; `umbel data import my-table.csv` makes one of your table
model = "my_project.model:net"
loss = "mse"
hypotheses = 1
# The guarantee: epsilon is 4, since each of the 7 parameters costs 2 / noise-multiplier in each participation.
noise-multiplier = 3.5
choice-epsilon = 0.0
max-participations = 1
clipping = "public"
clip-norm = 0.4
clip-norm-decay = 0.8
rounds = 21
clients-per-round = 100
restarts = 1
local-epochs = 20
step-size = 0.2
batch-size = 10
seed = 0

[tool.pytest.ini_options]
pythonpath = ["."]
"""
_MODEL = '''\
"""The model that each client trains: any `torch.nn.Module`, returned by a function or a class."""

from torch import nn


def net(inputs: int = 6, outputs: int = 1) -> nn.Module:
    """Return a linear model. A setting such as model = "my_project.model:net inputs=12" changes its size.

    Fewer parameters need less noise for the same guarantee.
    """
    return nn.Linear(inputs, outputs)
'''
_TEST = '''\
"""The project does two rounds, with its own model."""

import umbel
from my_project.model import net


def test_two_rounds_release_the_projects_model(tmp_path, monkeypatch):
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path))
    run = umbel.run("pyproject.toml", rounds=2)
    assert run.outcome == "all 2 rounds done"
    assert run.hypotheses[0].state_dict().keys() == net().state_dict().keys()
'''
_README = """\
# my-project

A federated learning project with [Flower](https://flower.ai) and umbel. The model is in `my_project/model.py`, the
settings are in `pyproject.toml`.

    umbel run .                   # in one process
    flwr run . --stream           # as a Flower app
    python -m pytest              # pip install pytest

`flwr run` opens Flower's and Ray's ports on this machine. Use it only where you are the only user.

To learn from your own table, make it a dataset, name that in `pyproject.toml`, and set the model's inputs:

    umbel data import my-table.csv --client COLUMN --target COLUMN
"""
FILES: Mapping[str, str] = {
    "pyproject.toml": _PYPROJECT,
    "README.md": _README,
    ".gitignore": ".venv\n__pycache__/\n*.fab\n",
    "my_project/__init__.py": "",
    "my_project/model.py": _MODEL,
    "tests/test_model.py": _TEST,
}
"""By path, the files of a project called my-project."""


@app.command()
def command(
    folder: Annotated[Path, typer.Argument(help="A new folder, or an empty one. Its name is the project's.")],
    flower: Annotated[
        bool,
        typer.Option("--flower", help="Write an ordinary Flower app, with umbel's strategy and Mods and its own rows."),
    ] = False,
) -> None:
    """Write a Flower app in a new folder. It runs at once, with a model that you can replace."""
    with errors_in_one_line():
        folder = folder.expanduser().absolute()
        package = package_of(folder.name)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists already; give a new folder", code="config.project-exists")
        for path, text in (flower_files() if flower else FILES).items():
            file = folder / path.replace("my_project", package)
            file.parent.mkdir(parents=True, exist_ok=True)
            filled = text.replace("my_project", package).replace("my-project", folder.name)
            file.write_text(filled.replace(">=VERSION", f">={described()['version']}"), encoding="utf-8")
        typer.echo(f"Wrote {folder}. Next:")
        by_flower = "flwr run . --stream"
        nodes = ' --federation-config "num-supernodes=20"'
        for line in (f"cd {folder.name}", *([by_flower + nodes] if flower else ["umbel run .", by_flower])):
            typer.echo(f"  {line}")


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
