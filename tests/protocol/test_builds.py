"""Builds of PyTorch and torchvision that do not fit each other are named, with the command that mends them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.errors import raises
from umbel import models
from umbel.protocol import builds
from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import import_by_name

Install = Callable[..., None]
BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put libraries with these versions before the installed ones."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def put(torchvision: str, code: str = BROKEN, torch: str = "2.13.0+cpu") -> None:
        for name, version in (("torch", torch), ("torchvision", torchvision)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "version.py").write_text(f"__version__ = '{version}'\n")
            (tmp_path / name / "__init__.py").write_text(code)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "own_of_a_user")]:
            monkeypatch.delitem(sys.modules, name)

    return put


@pytest.mark.parametrize(
    ("torch", "torchvision", "index"),
    [
        ("2.13.0+cpu", "0.28.0+cu130", "--index-url https://download.pytorch.org/whl/cpu"),
        ("2.13.0+cu130", "0.28.0+cpu", "--index-url https://download.pytorch.org/whl/cu130"),
        ("2.13.0", "0.28.0+cpu", "torchvision==0.28.0"),
    ],
)
def test_the_advice_is_torchvision_for_the_build_of_torch(
    install: Install, torch: str, torchvision: str, index: str
) -> None:
    install(torchvision, torch=torch)
    assert builds.advice().endswith(index)
    assert "pip install --force-reinstall --no-deps torchvision==0.28.0" in builds.advice()


def test_builds_that_fit_get_none(install: Install) -> None:
    install("0.28.0+cpu")
    assert builds.advice() == ""


def test_without_torchvision_there_is_nothing_to_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert builds.version("torchvision") == ""
    assert builds.advice() == ""


def test_a_library_model_and_a_users_module_that_fail_from_it_say_so(install: Install, tmp_path: Path) -> None:
    install("0.28.0+cu130")
    models._load.cache_clear()
    with raises(ConfigError, "config.mixed-builds", "torchvision.models:resnet18", "pip install --force-reinstall"):
        models.load("torchvision.models:resnet18", "mse")
    lazily = (
        "try:\n    import torchvision\nexcept RuntimeError as e:\n    raise ImportError('Could not import Bert') from e"
    )
    (tmp_path / "own_of_a_user.py").write_text(lazily)
    with raises(ConfigError, "config.mixed-builds", "own_of_a_user", "pip install --force-reinstall"):
        import_by_name("own_of_a_user:net")


def test_a_library_that_imports_torchvision_only_for_a_model_says_so(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("0.28.0+cu130")
    lazy = (
        "def __getattr__(name):\n    try:\n        import torchvision\n    except RuntimeError as error:\n"
        "        raise ModuleNotFoundError(f'Could not import module {name!r}.') from error\n"
    )
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(lazy)
    monkeypatch.setitem(sys.modules, "transformers", sys)  # so that it is as before, afterwards
    del sys.modules["transformers"]
    models._load.cache_clear()
    (tmp_path / "own_of_a_user.py").write_text("def net():\n    from transformers import BertModel\n")
    with raises(ConfigError, "config.mixed-builds", "own_of_a_user:net"):
        models.load("own_of_a_user:net", "mse")


def test_another_error_is_told_as_it_is(install: Install, tmp_path: Path) -> None:
    install("0.28.0+cu130")
    (tmp_path / "own_of_a_user.py").write_text("raise ValueError('width is 0')")
    with raises(ConfigError, "config.import", "width is 0"):
        import_by_name("own_of_a_user:net")
