"""Runs from Python: start one, or load, use and export its result."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import INFO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from umbel.client.personal import method
from umbel.client.prediction import (
    DEFAULT,
    Predicted,
    check_encoding,
    client_in,
    is_table,
    predict_dataset,
    read_run,
)
from umbel.data import Dataset, Schema, digest_of, find_dataset, find_typed, open_dataset
from umbel.data.data import encoded_alike
from umbel.protocol.errors import ConfigError, DatasetError
from umbel.protocol.log import log
from umbel.protocol.plugins import distrust, trust
from umbel.server.result import Result
from umbel.server.run_folder import RunFolder
from umbel.server.runs import find_run, reading
from umbel.simulation.start import in_this_process, values_of
from umbel.simulation.wanted import Wanted

if TYPE_CHECKING:
    import pandas as pd


class Run(Result):
    """The result of a run, with predictions."""

    def predict(
        self,
        rows: str | Path | Dataset | pd.DataFrame,
        clients: Sequence[int | str] | int | str | None = None,
        *,
        personalise: str = DEFAULT,
        schema: Schema | Path | str | None = None,
    ) -> pd.DataFrame:
        """Personalise the hypotheses with clients' labelled rows, and predict. It costs no privacy.

        Parameters
        ----------
        rows : str, Path, Dataset or DataFrame
            A dataset, possibly of new clients; or a table, as a DataFrame, a CSV or a parquet file, in which targets
            may be missing. If the run's dataset knows a client by name, the client's labelled rows come from there,
            otherwise from the table. A client without labelled rows gets the mean of the hypotheses, weighted by their
            releases, with a warning.
        clients : int, str or sequence of these, optional
            Numbers or names in a dataset, only names where these are numbers; or names in a table; by default all. For
            a table without client names, the single client that owns it.
        personalise : str
            How the clients personalise, as in a site's policy: a method by its name, or a function by its import path;
            "no" predicts with the best hypothesis unchanged.
        schema : Schema or path, optional
            Schema of the table; by default that of the run's dataset.

        Returns
        -------
        DataFrame
            Columns for client, its name if it has one, row, hypothesis, and prediction and target in the target's unit.
            For a table, client is the name, and row counts from 1 below the header.
        """
        found = self.predict_with_notes(rows, clients, personalise, schema)
        if found.warning:
            warnings.warn(found.warning, stacklevel=2)
        return found.rows

    def predict_with_notes(
        self,
        rows: str | Path | Dataset | pd.DataFrame,
        clients: Sequence[int | str] | int | str | None = None,
        how: str = DEFAULT,
        schema: Schema | Path | str | None = None,
    ) -> Predicted:
        """Return what `predict` returns, with notes about the prediction.

        Raises
        ------
        DatasetError
            If a table has no schema, or does not fit; the text names the column, the row and the fix.
        """
        trust(how)
        method(how)  # a wrong name is told before rows are read
        named = None if clients is None else [clients] if isinstance(clients, int | str) else list(clients)
        if named == []:
            raise DatasetError("clients names no client; name one, or leave it out for all", code="data.unknown-client")
        if isinstance(rows, str | Path) and not is_table(rows):
            rows = open_dataset(find_typed(rows))
        if isinstance(rows, Dataset):
            chosen = range(rows.manifest.clients) if named is None else [client_in(rows, one) for one in named]
            with reading(self.path):
                learnt = read_run(self.path, rows, self.prior)
            return predict_dataset(learnt, rows, chosen, how)
        from umbel.data.table import read_table  # it imports pandas, which takes half a second

        source = rows if isinstance(rows, str | Path) else "the table"
        frame = read_table(Path(rows).expanduser()) if isinstance(rows, str | Path) else rows
        return self._of_table(frame, source, list(map(str, named or [])), how, schema)

    def _of_table(
        self, frame: pd.DataFrame, source: object, clients: Sequence[str], how: str, schema: Schema | Path | str | None
    ) -> Predicted:
        """Predict for the rows of a table, called `source` in errors."""
        from umbel.client.table_prediction import Table, predict_table

        known, notes, folder = None, [], RunFolder(self.path)
        described = folder.read_manifest()
        if self.config.get("dataset"):
            try:
                path = find_dataset(self.config["dataset"])
                known = open_dataset(path)
            except DatasetError:
                if schema is None:
                    raise
            else:
                described = described or known.manifest
                was, name = folder.read_config().get("data"), known.manifest.name
                if not encoded_alike(described, known.manifest):
                    known = None
                    notes.append(
                        f"Dataset {name} has got other columns or scales since the run, so its rows personalise "
                        "nothing. The table is read with the columns and scales of the run."
                    )
                elif was and digest_of(path) != was:
                    notes.append(f"Dataset {name} has changed since the run; check that its columns are the same.")
        layout = described.layout if described and schema is None else schema
        if layout is None:
            text = f"{self.name}: its dataset has no schema to describe the columns; give one"
            raise DatasetError(text, code="data.no-schema")
        if not isinstance(layout, Schema):
            layout = Schema.read(Path(layout))
            distrust(layout.model, layout.loss, layout.metric)
        asked = Table.of(frame, layout, source, clients, known.names if known else ())
        if known and known.features.shape[1:] != asked.rows.features.shape[1:]:
            both = f"{asked.rows.features.shape[1:]}, but those of {known.manifest.name} {known.features.shape[1:]}"
            raise DatasetError(f"rows of {source} have shape {both}; leave out the schema", code="data.unfit-rows")
        found = predict_table(read_run(self.path, asked.rows, self.prior), asked, known, self.shares, how)
        return replace(found, notes=[*notes, *found.notes])


def load(run: str | Path = "last") -> Run:
    """Return the result of a run.

    Parameters
    ----------
    run : str or Path
        Its name, the beginning of its name, its path, or "last".

    Raises
    ------
    ConfigError
        If there is none.
    """
    return Run(find_run(str(run)))


def run(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    row_epsilon: float | None = None,
    rows: int | None = None,
    nodes: int = 1,
    baselines: bool = True,
    **values: Any,
) -> Run:
    """Run a simulation, and return its result.

    Parameters
    ----------
    config : str, Path or mapping, optional
        A configuration by its name in configs/, a TOML file, a dataset, or run-config values; by default the demo.
    epsilon : float, optional
        The wanted guarantee, between any two data sets of a client over the whole run. Noise, rounds and clip norms
        are planned for it, and `values` override the plan.
    delta : float, optional
        Delta of the guarantee; 0 for a pure epsilon.
    row_epsilon, rows : float, int, optional
        In place of `epsilon`: the wanted guarantee between two data sets of a client that differ by one row, and the
        number of rows of a typical client, which decides the batch. Noise in training is planned for it.
    nodes : int
        Simulated nodes, at least 1. Beyond rounding, the result depends on it only if sites release sums.
    baselines : bool
        Whether to measure the run's worth at the end (`Run.worth`).
    **values
        Run-config values, with underscores for hyphens, which override those of `config`.

    Raises
    ------
    ConfigError
        For the first invalid value, before anything starts; also if `values` break the guarantee, or the run would
        learn nothing with it.

    Examples
    --------
    >>> import umbel
    >>> found = umbel.run("synthetic", rounds=20, seed=1)  # doctest: +SKIP
    >>> found.history["loss"].plot()  # doctest: +SKIP
    """
    own = {key.replace("_", "-"): value for key, value in values.items()}
    wanted = Wanted.of(epsilon, delta, row_epsilon, rows)
    planned = values_of("" if config is None else config, own, wanted, nodes)
    for line in planned.words:
        log(INFO, "%s", line)
    return Run(in_this_process(planned.values, nodes, baselines))


def export(
    run: Run,
    folder: Path,
    form: str = "safetensors",
    *,
    client: int | str | None = None,
    personalise: str = DEFAULT,
) -> list[Path]:
    """Write the best hypotheses of a run, or a client's own predictor, and return the files.

    Parameters
    ----------
    run : Run
    folder : Path
        Made if it does not exist. If the export fails, or is interrupted, all is as it was.
    form : str
        "safetensors", or "onnx" (`umbel.client.exports`), which needs the extra ``export`` and data from a table: an
        ONNX file takes raw columns and gives the target in its unit.
    client : int or str, optional
        A client of the run's dataset, by its number or name: write its own predictor, as ONNX. No guarantee covers that
        file, because the client's rows made it.
    personalise : str
        How the client personalises, as in `Run.predict`; not by a method whose predictor may hold the client's rows.

    Raises
    ------
    ConfigError
        For another format or that method, if ONNX is not installed, or if the folder cannot take the files or has some
        of more hypotheses.
    ModelError
        If the network cannot be written in the format, or the file reads back differently.
    DatasetError
        For ONNX, if the data are from no table, or the model has local parameters: the file would predict with their
        initial values.
    """
    from umbel.client.exports import OwnNetwork, write_networks  # ONNX takes pandas

    data, said = run.dataset, {"run": run.name}
    if form == "onnx" and (local := ", ".join(run.model.local_shapes)):
        text = f"model {run.model.name!r} keeps {local} with each client, so the run's folder lacks them"
        fix = "export the shared parameters as safetensors"
        raise DatasetError(f"{text}, and a file would predict without; {fix}", code="data.local-parameters")
    if form == "onnx" and data is not None:
        check_encoding(run.path, data)
    if client is None:
        if form == "onnx":
            said["guarantee"] = " ".join(run.privacy)
        networks: dict[str, Module] = {f"hypothesis-{j}": one for j, one in enumerate(run.hypotheses)}
        return write_networks(networks, folder, form, run.model, data, said)
    if form != "onnx":
        text = "a client's predictor may have several networks; write it as onnx"
        raise ConfigError(text, code="config.client-form")
    trust(personalise)
    method(personalise)
    if data is None:
        text = "the client's rows are in the run's dataset, which is not on this machine"
        raise ConfigError(text, code="config.no-dataset")
    number = client_in(data, client)
    own = read_run(run.path, data, run.prior).predictor_of(data, number, personalise)
    said |= {"client": data.names[number] if data.names else str(number), "personalise": personalise}
    said["guarantee"] = "None: the client's rows made this file, which must stay where they are."
    networks = {f"client-{number}": OwnNetwork(run.model, own)}
    return write_networks(networks, folder, form, run.model, data, said, private=True)
