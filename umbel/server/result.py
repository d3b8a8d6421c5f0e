"""What a run has left behind, from its folder."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import safetensors.numpy
import torch
from numpy.typing import NDArray

from umbel.data import Dataset
from umbel.models.model import Model
from umbel.protocol.errors import ConfigError
from umbel.server.run_folder import RunFolder
from umbel.server.setup import Setup
from umbel.server.summary import Summary


class Result:
    """What a run has left behind.

    Parameters
    ----------
    path : Path
        Its folder.

    Attributes
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<umbel run {self.name}: {self.outcome or 'interrupted'}>"

    @property
    def name(self) -> str:
        """The name by which every command finds it."""
        return self.path.name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The whole run config that it ran with."""
        return RunFolder(self.path).read_run_config()

    @property
    def outcome(self) -> str:
        """Why it ended; empty for one that was interrupted."""
        file = self.path / "outcome.json"
        return str(json.loads(file.read_text(encoding="utf-8"))["stopped"]) if file.exists() else ""

    @cached_property
    def history(self) -> pd.DataFrame:
        """A row a round, indexed by its number: validation loss and metric in the data's units, releases, seconds.

        See `umbel.server.history.Round` for the columns.
        """
        rounds = RunFolder(self.path).read_history() if (self.path / "history.jsonl").exists() else []
        if not rounds:
            raise ConfigError(f"{self.path} holds no run that finished a round", code="config.no-run")
        found = pd.DataFrame(map(asdict, rounds)).set_index("number")
        factor, _ = self._summary.scale
        measured = ["loss", "metric"]
        found[measured] = found[measured].astype(float) * (factor or 1.0)
        return found

    @property
    def unit(self) -> str:
        """The unit of the loss and of the predictions; empty for none."""
        return self._summary.scale[1]

    @property
    def loss(self) -> float:
        """The validation loss of the hypotheses that are kept, in the data's unit; NaN without one.

        It is the lowest of all rounds that had as many hypotheses.
        """
        best = int(self.history["best_round"].iloc[-1])
        return float(self.history["loss"][best]) if best else float("nan")

    @property
    def privacy(self) -> list[str]:
        """What the clients have given away, in words: the guarantee, and the paper's budget, a heuristic."""
        last = self.history.iloc[-1]
        often = float(last["median_participations"]), int(last["max_participations"])
        return self._summary.privacy_lines(*often, int(self.history["exact_reports"].max()))

    @property
    def parameters(self) -> dict[str, NDArray[np.float32]]:
        r"""The best hypotheses: each shared parameter by its name, (k, \*shape)."""
        stored = safetensors.numpy.load_file(self.path / "hypotheses.safetensors")
        return {name: stored[name] for name in self.model.shapes}

    @cached_property
    def hypotheses(self) -> list[torch.nn.Module]:
        """The best hypotheses, each as a network in evaluation mode.

        Local parameters are as the network was built: only the clients have theirs.
        """
        made = []
        for j in range(len(next(iter(self.parameters.values())))):
            network = copy.deepcopy(self.model.module)
            state = {name: torch.from_numpy(value[j].copy()) for name, value in self.parameters.items()}
            network.load_state_dict(state, strict=False)
            made.append(network.eval())
        return made

    @property
    def model(self) -> Model:
        """The model, whose hypotheses these are."""
        return self._setup.model

    @property
    def dataset(self) -> Dataset | None:
        """The data that it learnt from, where they are on this machine."""
        return self._setup.open_dataset()

    @cached_property
    def _setup(self) -> Setup:
        return Setup.parse(self.config | {"resume": ""})

    @cached_property
    def _summary(self) -> Summary:
        return Summary(self._setup.model, self._setup.manifest, self._setup.release)
