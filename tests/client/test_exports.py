"""Files for other programs are written all together or, if anything fails, not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.errors import raises
from umbel import models
from umbel.client.exports import write_networks
from umbel.protocol.errors import ConfigError, DiskError, ModelError

MODEL = models.load("linear inputs=2 outputs=1", "mse")


def write(folder: Path, form: str = "safetensors", seed: int = 0) -> list[Path]:
    torch.manual_seed(seed)
    networks = {f"hypothesis-{j}": torch.nn.Linear(2, 1) for j in range(2)}
    return write_networks(networks, folder, form, MODEL, None, {})


def tree(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() if one.is_file() else b"" for one in folder.rglob("*")}


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = tree(folder)
    yield
    assert tree(folder) == before


@pytest.fixture(params=["new", "old"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that is absent, as is the one above it, or that holds an older export and a file of somebody else's."""
    folder = tmp_path / "deep" / "models"
    if request.param == "old":
        write(folder, seed=1)
        (folder / "notes.txt").write_text("mine")
    return folder


def interrupting(call: Callable[..., Any], after: int) -> Callable[..., Any]:
    calls = count(1)

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls) == after:
            raise KeyboardInterrupt
        return call(*args, **options)

    return interrupted


@pytest.mark.parametrize("step", ["replace", "mkdir"])
def test_an_export_that_is_interrupted_at_any_step_leaves_all_as_it_was(
    step: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(tmp_path)
    for after in count(1):
        with monkeypatch.context() as patched:
            patched.setattr(Path, step, interrupting(getattr(Path, step), after))
            try:
                write(folder)
            except KeyboardInterrupt:
                assert tree(tmp_path) == before
            else:
                break
    assert after > {"replace": 4, "mkdir": 1}[step]
    assert tree(tmp_path) != before


def test_a_full_disk_leaves_all_as_it_was(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with unchanged(tmp_path), raises(DiskError, "disk.full", "models"):
        write(folder)


def test_a_network_that_onnx_does_not_take_leaves_all_as_it_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(network: Any, model: Any, dataset: Any, metadata: dict[str, str]) -> bytes:
        if metadata["name"] == "hypothesis-1":
            raise ModelError("no", code="model.onnx")
        return b"a file"

    monkeypatch.setattr("umbel.client.exports.to_onnx", refuse)
    with unchanged(tmp_path), raises(ModelError, "model.onnx"):
        write(folder, "onnx")


def test_a_folder_in_the_place_of_a_file_stays(folder: Path, tmp_path: Path) -> None:
    taken = folder / "hypothesis-1.safetensors"
    taken.unlink(missing_ok=True)
    (taken / "inside").mkdir(parents=True)
    with unchanged(tmp_path), raises(ConfigError, "config.no-folder", "models"):
        write(folder)


def test_an_export_takes_the_place_of_an_older_one_and_of_nothing_else(folder: Path) -> None:
    files = write(folder)
    first = tree(folder)
    write(folder, seed=2)
    second = tree(folder)
    assert {*first} == {*second} == {*(file.name for file in files), *({"notes.txt"} & {*second})}
    assert all(first[file.name] != second[file.name] for file in files)
