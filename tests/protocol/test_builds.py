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
MIXED = ("0.28.0+cu130", "2.13.0+cpu")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put libraries with these versions before the installed ones."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    models._load.cache_clear()

    def put(torchvision: str, torch: str) -> None:
        for name, version in (("torch", torch), ("torchvision", torchvision)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "version.py").write_text(f"__version__ = '{version}'\n")
            (tmp_path / name / "__init__.py").write_text(BROKEN)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "own_of_a_user")]:
            monkeypatch.delitem(sys.modules, name)

    return put


@pytest.mark.parametrize(
    ("torch", "torchvision", "index"),
    [
        ("2.13.0+cpu", "0.28.0+cu130", "--index-url https://download.pytorch.org/whl/cpu"),
        ("2.13.0+cu130", "0.28.0+cpu", "--index-url https://download.pytorch.org/whl/cu130"),
        ("2.13.0", "0.28.0+cpu", "torchvision==0.28.0"),
        ("2.13.0+cpu", "0.28.0+cpu", ""),
    ],
)
def test_the_advice_is_torchvision_for_the_build_of_torch(
    install: Install, torch: str, torchvision: str, index: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(torchvision, torch)
    assert builds.advice().endswith(index)
    assert ("pip install --force-reinstall --no-deps torchvision==0.28.0" in builds.advice()) is bool(index)
    # Without torchvision there is nothing to mend.
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nothing")])
    assert builds.version("torchvision") == builds.advice() == ""


LAZILY = (
    "try:\n    import torchvision\nexcept RuntimeError as e:\n    raise ImportError('Could not import Bert') from e"
)
ONLY_FOR_A_MODEL = """
def __getattr__(name):
    try:
        import torchvision
    except RuntimeError as error:
        raise ModuleNotFoundError(f'Could not import module {name!r}.') from error
"""


@pytest.mark.parametrize(
    ("own", "code"),
    [
        ("", "config.mixed-builds"),
        (LAZILY, "config.mixed-builds"),
        ("def net():\n    from transformers import BertModel\n", "config.mixed-builds"),
        ("raise ValueError('width is 0')", "config.import"),
    ],
)
def test_a_library_and_a_users_module_that_fail_from_it_say_so(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, code: str
) -> None:
    install(*MIXED)
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(ONLY_FOR_A_MODEL)
    monkeypatch.setitem(sys.modules, "transformers", sys)  # so that it is as before, afterwards
    del sys.modules["transformers"]
    (tmp_path / "own_of_a_user.py").write_text(own)
    name = "own_of_a_user:net" if own else "torchvision.models:resnet18"
    mend = "pip install --force-reinstall" if "mixed" in code else "width is 0"
    with raises(ConfigError, code, name.partition(":")[0], mend):
        models.load(name, "mse")
    if own == LAZILY:
        with raises(ConfigError, code, "own_of_a_user", mend):
            import_by_name(name)
