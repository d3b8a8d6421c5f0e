"""The results of an experiment's runs in one small file, without their arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from umbel.protocol.errors import SweepError
from umbel.protocol.home import write_atomically
from umbel.simulation.sweep import HISTORY, RESULT

_PACKED = ("number", "asked", "loss", "metric", "groups")  # of each validated round


def pack(folder: Path) -> Iterator[str]:
    """Yield a line of JSON for each finished run of a sweep: everything except its arrays."""
    for file in sorted(folder.glob(f"runs/*/{RESULT}")):
        history = file.with_name(HISTORY)
        lines = history.read_text(encoding="utf-8").splitlines() if history.exists() else []
        entries = [
            {key: entry[key] for key in _PACKED} for entry in map(json.loads, lines) if entry["loss"] is not None
        ]
        yield json.dumps({"name": file.parent.name, **json.loads(file.read_text(encoding="utf-8")), "history": entries})


def unpack(lines: Iterable[str], folder: Path) -> list[str]:
    """Put runs from `pack` where a sweep finds them, unless they are there; return their names."""
    names = []
    try:
        runs = [(doc.pop("name"), list(doc.pop("history")), doc) for doc in map(json.loads, lines)]
        outside = [name for name, *_ in runs if not name.isprintable() or not name or "/" in name or name[0] == "."]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as broken:
        raise SweepError(f"no runs that umbel experiment pack wrote: {broken!r}", code="sweep.not-packed") from broken
    if outside:
        text = f"{outside[0]!r} is not the name of a run; unpack only files that umbel experiment pack wrote"
        raise SweepError(text, code="sweep.not-packed")
    for name, history, document in runs:
        path = folder / "runs" / name
        if not (path / RESULT).exists():
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / HISTORY, "".join(f"{json.dumps(entry)}\n" for entry in history).encode())
            write_atomically(path / RESULT, json.dumps(document, indent=1).encode())
            names.append(path.name)
    return names
