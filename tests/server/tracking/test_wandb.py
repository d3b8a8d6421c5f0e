"""Weights & Biases, offline: what its own file in the run's folder holds."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest

import umbel.client.app
from tests.helpers.runs import run_app
from umbel.simulation.grid import InProcessGrid

pytest.importorskip("wandb", reason="wandb is not installed")


def records(content: bytes, block: int = 32768) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format: blocks of parts, each with its checksum, length and kind."""
    at, record = 7, b""  # what comes first says whose file it is
    while at + 7 <= len(content):
        if (left := block - at % block) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


@pytest.mark.slow
@pytest.mark.usefixtures("blank_figures")
def test_a_run_is_kept_in_its_folder(run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    config = run_config | {"rounds": 2, "restarts": 1, "track": "wandb"}
    run = run_app(config, InProcessGrid(umbel.client.app.app, config))

    (file,) = run.folder.glob("wandb/offline-run-*/*.wandb")
    losses, told = {}, {}
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        if "validation_loss" in values:
            losses[values["_step"]] = values["validation_loss"]
        told |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    assert losses == {entry["number"]: pytest.approx(entry["loss"]) for entry in run.history}
    assert told["strategy"] == "group-privacy"
