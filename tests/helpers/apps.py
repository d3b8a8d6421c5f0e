"""Small Flower Apps, as files."""

from __future__ import annotations

from pathlib import Path

PROJECT = """[project]
name = "app"
version = "1.0.0"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.42,<1.43"]
[tool.flwr.app]
publisher = "umbel"
fab-format-version = 1
flwr-version-target = "1.42.0"
fab-include = ["**/*.py", "LICENSE"]
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
"""


def write_app(folder: Path, project: str = PROJECT) -> None:
    """Write an app, and beside its files some that are no part of it."""
    for name, text in {"pyproject.toml": project, "LICENSE": "own"}.items():
        (folder / name).write_text(text)
    for name in ("app.py", "inner/module.py", "private/b.py", "README.md", "build/module.txt"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
