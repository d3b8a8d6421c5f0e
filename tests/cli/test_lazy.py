"""A command whose library is missing says what to install; any other fault stays a fault."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from tests.helpers.errors import ended
from umbel.cli.lazy import lazy


def group(missing: str) -> typer.Typer:
    """Return a group with a command whose import lacks a module."""

    def load(name: str) -> typer.Typer:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    made = typer.Typer(cls=lazy(lambda: {"rose": "A command."}, load))
    made.callback()(lambda: None)
    return made


@pytest.mark.parametrize(
    ("missing", "package"), [("pgeocode", "pgeocode"), ("pyarrow.parquet", "'pyarrow>=18'"), ("torch", "'torch>=2.6'")]
)
def test_a_missing_library_is_named_with_what_to_install(missing: str, package: str) -> None:
    told = CliRunner().invoke(group(missing), ["rose"])
    ended(told.exit_code, told.output, "config.not-installed", missing, f"pip install {package} ")


@pytest.mark.parametrize("missing", ["umbel.roses", "roses"])
def test_a_module_that_no_package_of_umbels_has_is_no_hint(missing: str) -> None:
    assert isinstance(CliRunner().invoke(group(missing), ["rose"]).exception, ModuleNotFoundError)
