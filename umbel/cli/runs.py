"""Runs from Python: do one, or load what one has left behind."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import safetensors.numpy
import torch
from numpy.typing import NDArray

from umbel.cli.configs import read_values
from umbel.cli.prediction import predictions, read_run, table
from umbel.cli.simulated import in_this_process, launched
from umbel.data import Dataset, find_typed, open_dataset
from umbel.models.model import Model
from umbel.protocol.errors import ConfigError
from umbel.server.run_folder import RunFolder
from umbel.server.runs import find_run
from umbel.server.setup import Setup
from umbel.server.summary import Summary
from umbel.simulation.relay import Relay


class Run:
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
        config: dict[str, Any] = RunFolder(self.path).read_config()["config"]
        return config

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
        found["loss"] = found["loss"].astype(float) * (factor or 1.0)
        found["metric"] = found["metric"].astype(float) * (factor or 1.0)
        return found

    @property
    def unit(self) -> str:
        """The unit of the loss and of what is predicted; empty for none."""
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
        """What the clients have given away, in words: what is guaranteed, and the paper's budget, a heuristic."""
        last = self.history.iloc[-1]
        return self._summary.privacy_lines(float(last["median_participations"]), int(last["max_participations"]))

    @property
    def parameters(self) -> dict[str, NDArray[np.float32]]:
        r"""The best hypotheses: each shared parameter by its name, (k, \*shape)."""
        stored = safetensors.numpy.load_file(self.path / "hypotheses.safetensors")
        return {name: stored[name] for name in self.model.shapes}

    @cached_property
    def hypotheses(self) -> list[torch.nn.Module]:
        """The best hypotheses as networks of their own, in evaluation mode.

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

    def predict(self, dataset: str | Path | Dataset, clients: Sequence[int] | None = None) -> pd.DataFrame:
        """Let clients pick the hypothesis that fits their labelled rows best, and predict with it.

        Parameters
        ----------
        dataset : str, Path or Dataset
            Of clients that need not have taken part.
        clients : sequence of int, optional
            All of them, if not given.

        Returns
        -------
        DataFrame
            client, its name if it has one, row, hypothesis, prediction and target, in the target's unit.
        """
        data = dataset if isinstance(dataset, Dataset) else open_dataset(find_typed(dataset))
        model, hypotheses = read_run(self.path, data)
        chosen = list(range(data.manifest.clients)) if clients is None else list(clients)
        return table(list(predictions(model, hypotheses, data, chosen)), data)

    @cached_property
    def _setup(self) -> Setup:
        return Setup.parse(self.config | {"resume": ""})

    @cached_property
    def _summary(self) -> Summary:
        return Summary(self._setup.model, self._setup.manifest, self._setup.release)


def load(run: str | Path = "last") -> Run:
    """Return what a run has left behind.

    Parameters
    ----------
    run : str or Path
        Its name, the beginning of its name, its path, or "last".

    Raises
    ------
    ConfigError
        When there is none.
    """
    return Run(find_run(str(run)))


def run(
    config: str | Path | Mapping[str, Any] | None = None, *, nodes: int = 0, ray: bool = False, **values: Any
) -> Run:
    """Do a run in simulation, and return what it has left behind.

    Parameters
    ----------
    config : str, Path or mapping, optional
        A configuration by its name in configs/, a TOML file, or run-config values; the demo, if not given.
    nodes : int
        Simulated nodes; 0 for as many as suit this machine. Only where sites release sums does what is
        learnt depend on it, by more than rounding.
    ray : bool
        Whether to run it in processes of its own instead of in this one: in Flower's own simulation, or on the Ray
        cluster that ``RAY_ADDRESS`` names.
    **values
        Run-config values, with underscores for hyphens, which win over those of `config`.

    Raises
    ------
    ConfigError
        For the first value that cannot be used, before anything starts.

    Examples
    --------
    >>> import umbel
    >>> found = umbel.run("synthetic", rounds=20, seed=1)  # doctest: +SKIP
    >>> found.history["loss"].plot()  # doctest: +SKIP
    """
    own = {key.replace("_", "-"): value for key, value in values.items()}
    given = (
        read_values("", {**(config or {}), **own}) if isinstance(config, Mapping | None) else read_values(config, own)
    )
    return Run(launched(given, nodes, Relay()) if ray else in_this_process(given, nodes))
