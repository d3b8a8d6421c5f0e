"""Runs in Weights & Biases: on its servers or, with ``WANDB_MODE=offline``, in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from umbel.server.observer import Run
from umbel.server.tracking.tracker import Tracker, Values


@dataclass(frozen=True)
class WandBOptions:
    """Where runs go; the rest is for wandb's own environment variables.

    Attributes
    ----------
    project : str
    """

    project: str = "umbel"


class WandB(Tracker):
    """Tells Weights & Biases of the run, and nothing of the machine, the code or its output."""

    tool = "Weights & Biases"
    Options = WandBOptions
    options: WandBOptions

    def open(self, run: Run, told: Mapping[str, Any]) -> None:
        """Make a run, or go on with the one of this name."""
        import wandb

        self._run = wandb.init(
            project=self.options.project,
            id=run.name or None,
            name=run.name or None,
            resume="allow" if run.name else None,
            dir=str(run.folder.path) if run.folder is not None else None,
            config=dict(told),
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_job_creation=True,
                save_code=False,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )

    def send(self, rounds: Sequence[tuple[int, Values]]) -> None:
        """Send the values of rounds."""
        for step, values in rounds:
            self._run.log(dict(values), step=step)

    def close(self, stopped: str) -> None:
        """Say why the run ended."""
        self._run.summary["stopped"] = stopped
        self._run.finish()
