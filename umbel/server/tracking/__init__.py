"""Experiment trackers for runs: ``track = "mlflow"``, ``"tensorboard"`` or ``"wandb"``."""

from __future__ import annotations

import difflib
from importlib.util import find_spec

from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import import_by_name, parse_options
from umbel.server.tracking.tracker import Tracker

__all__ = ["TRACKERS", "Tracker", "load_tracker"]

TRACKERS = {
    "mlflow": "umbel.server.tracking.tools:MLflow",
    "tensorboard": "umbel.server.tracking.tools:TensorBoard",
    "wandb": "umbel.server.tracking.tools:WandB",
}
"""Trackers by name; a module is imported on first use."""


def load_tracker(track: str) -> tuple[Tracker, ...]:
    """Return the tracker in the run config, as an observer; none if it names none.

    Raises
    ------
    ConfigError
        If there is no such tool, its library is missing, or it has other options.
    """
    name, _, options = track.partition(" ")
    if not name:
        return ()
    if name not in TRACKERS:
        near = difflib.get_close_matches(name, TRACKERS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"track must be one of {', '.join(TRACKERS)}, got {name!r}{hint}", code="config.unknown-name")
    spec = find_spec(name)
    if spec is None or spec.origin is None:  # a folder of that name, which wandb leaves behind, is no library
        raise ConfigError(
            f"track = {name!r} needs a library that is not installed: pip install 'umbel[{name}]'",
            code="config.missing-library",
        )
    kind: type[Tracker] = import_by_name(TRACKERS[name])
    return (kind(parse_options(kind.Options, options, "track")),)
