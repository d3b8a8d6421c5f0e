"""Runs in TensorBoard: an event file in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbel.protocol.errors import ConfigError
from umbel.server.observer import Run
from umbel.server.tracking.tracker import Tracker, Values


@dataclass(frozen=True)
class TensorBoardOptions:
    """Where event files go.

    Attributes
    ----------
    folder : str
        In which each run has a folder of its name; by default ``tensorboard`` in the run's own folder.
    """

    folder: str = ""


class TensorBoard(Tracker):
    """Writes an event file; of a run that goes on, the rounds that come again replace those of before."""

    tool = "TensorBoard"
    Options = TensorBoardOptions
    options: TensorBoardOptions

    def open(self, run: Run, told: Mapping[str, Any]) -> None:
        """Open the event file, and write down what was set."""
        from torch.utils.tensorboard import SummaryWriter

        if self.options.folder:
            given = Path(self.options.folder).expanduser()
            if not given.is_absolute():
                raise ConfigError(
                    f"track-options: folder must be an absolute path, got {self.options.folder!r}",
                    code="config.track-options",
                )
            folder = given / run.name
        elif run.folder is not None:
            folder = run.folder.path / "tensorboard"
        else:
            raise ConfigError(
                'track = "tensorboard": this run leaves no folder; set track-options = "folder=/PATH"',
                code="config.track-options",
            )
        self._writer = SummaryWriter(str(folder), purge_step=len(run.state.history) + 1)
        rows = "\n".join(f"| {name} | {value} |" for name, value in told.items())
        self._writer.add_text("run config", f"| key | value |\n|---|---|\n{rows}")

    def send(self, rounds: Sequence[tuple[int, Values]]) -> None:
        """Write the values of rounds."""
        for step, values in rounds:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, stopped: str) -> None:
        """Say why the run ended."""
        self._writer.add_text("stopped", stopped)
        self._writer.close()
