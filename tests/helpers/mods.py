"""Ordinary Flower apps behind umbel's light Mods, on a node in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from tests.helpers.flower_apps import answered
from tests.helpers.messages import arrived
from tests.helpers.nodes import ask
from umbel.protocol.flower import identify
from umbel.simulation.grid import InProcessGrid

Handler = Callable[[Message, Context], Any]


def moved(by: float) -> Handler:
    """Return a train function that adds a number to each parameter."""
    return lambda msg, context: answered(msg, lambda value: value + by, **{"num-examples": 61})


def node(mods: Sequence[Mod], train: Handler | None = None, **config: Any) -> InProcessGrid:
    """Return a grid of one node, whose app answers every type of message by `train`, by default unchanged."""
    app = ClientApp(mods=[*mods])
    for kind in (app.train(), app.train("again"), app.evaluate(), app.query()):
        kind(train or moved(0.0))
    return InProcessGrid(app, config.pop("run_config", {}), node_configs=[{"partition-id": 3} | config])


def message(content: RecordDict) -> Message:
    """Return a message to train, as a Mod gets it."""
    identify(1)
    return Message(content, 100, "train")


def context() -> Context:
    """Return what a Mod gets with a message."""
    return Context(1, 100, {}, RecordDict(), {})


def answer(grid: InProcessGrid, content: RecordDict, kind: str = "train") -> Message:
    """Return a node's reply to a message, as it arrives at the server."""
    return arrived(ask(grid, content, kind))
