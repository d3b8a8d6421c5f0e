"""Runs from Python: do one, or load, use and export what one has left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from umbel.client.exports import write_networks
from umbel.client.prediction import predictions, read_run, table
from umbel.data import Dataset, find_typed, open_dataset
from umbel.server.result import Result
from umbel.server.runs import find_run
from umbel.simulation.relay import Relay
from umbel.simulation.start import in_this_process, launched, read_values


class Run(Result):
    """What a run has left behind, and what can be done with it."""

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


def export(run: Run, folder: Path, form: str = "safetensors") -> list[Path]:
    """Write the best hypotheses of a run, and return the files.

    Parameters
    ----------
    run : Run
    folder : Path
        Made where there is none.
    form : str
        "state-dict" (.pt, for ``torch.load``), "safetensors", or "onnx", which takes ``pip install umbel[onnx]`` and
        rows as the model sees them: bytes divided by 255.

    Raises
    ------
    ConfigError
        For another form, when ONNX is not installed, or when there can be no such folder.
    ModelError
        When the network cannot be written so, or what is read again is not the same.
    """
    return write_networks(run.hypotheses, folder, form, run.model, run.dataset)
