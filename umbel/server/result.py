"""The result of a run, from its folder."""

from __future__ import annotations

import copy
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from umbel.data import Dataset
from umbel.models.model import Model
from umbel.models.prior import Prior
from umbel.protocol.errors import ConfigError
from umbel.server.history import Round, shares_of
from umbel.server.run_folder import RunFolder, hypotheses_in, kept_in, number_of
from umbel.server.setup import Setup
from umbel.server.summary import Summary
from umbel.server.worth import Worth
from umbel.strategies.differences import prior_of

if TYPE_CHECKING:
    import pandas as pd


class Result:
    """The result of a run, from the path of its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = RunFolder(path)

    def __repr__(self) -> str:
        return f"<umbel run {self.name}: {self.outcome or 'interrupted'}>"

    @property
    def name(self) -> str:
        """The run's name, which every command accepts."""
        return self.path.name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The complete run config."""
        return self._folder.read_run_config()

    @property
    def outcome(self) -> str:
        """Why the run ended; empty for an interrupted run."""
        return self._folder.read_outcome()

    @cached_property
    def history(self) -> pd.DataFrame:
        """One row for each round, indexed by its number: validation loss and metric after it, and their quantiles over
        clients, in the data's units; releases, seconds. Round 0 is before the first.

        See `umbel.server.history.Round` for the columns.
        """
        import pandas as pd

        table = pd.DataFrame(map(asdict, self._rounds())).set_index("number")
        factor, measured = self._summary.factor, ["loss", "metric"]
        table[measured] = table[measured].astype(float) * factor
        for spread in ("loss_spread", "metric_spread"):
            table[spread] = [[value * factor for value in values] for values in table[spread]]
        return table

    @property
    def unit(self) -> str:
        """The unit of the loss and of the predictions; empty for none."""
        return self._summary.scale[1]

    @property
    def loss(self) -> float:
        """The validation loss of the kept hypotheses, in the data's unit; NaN if there is none.

        It is the lowest of all rounds with as many hypotheses.
        """
        return float(self.history["loss"][self.history["best_round"].iloc[-1]])

    @property
    def last_loss(self) -> float:
        """The loss of the last validation, in the data's unit; NaN if there is none."""
        losses = self.history["loss"].dropna()
        return float(losses.iloc[-1]) if len(losses) else float("nan")

    @property
    def shares(self) -> NDArray[np.float64]:
        """The share of the releases (k,) of each of the best hypotheses, in the last ten rounds that made them.

        Equal shares if there were no releases.
        """
        rounds = self._folder.read_history()
        return shares_of(rounds, rounds[-1].best_round if rounds else 0, number_of(self._folder.read_best()))

    @property
    def prior(self) -> Prior | None:
        """The differences of clients around each hypothesis, after the last round; None if they are unknown."""
        kept = kept_in(self._folder.read_latest()) if (self.path / "latest.safetensors").exists() else {}
        return prior_of(kept, number_of(self._folder.read_best()))

    @cached_property
    def _worth(self) -> Worth:
        worth = self._folder.read_worth()
        if worth is None:
            text = f"the worth of {self.name} was not measured; where its data are, run umbel runs report {self.name}"
            raise ConfigError(text, code="config.no-worth")
        return worth

    @property
    def worth(self) -> pd.DataFrame:
        """Results for clients of the run and of simpler ways, on held-out rows: one row for each
        (`umbel.server.worth`).

        The columns are ``way``, ``mean`` and ``worst_decile`` of the metric in the data's unit, and ``remark``; the
        index has the labels. Raises `ConfigError` if it was not measured.
        """
        import pandas as pd

        columns = ["label", "way", "mean", "worst_decile", "remark"]
        table = pd.DataFrame([asdict(arm) for arm in self._worth.arms], columns=columns).set_index("label")
        return table.astype({"way": str, "mean": float, "worst_decile": float})

    @property
    def verdict(self) -> str:
        """Whether the run was worth it, in a sentence; errors as for `worth`."""
        return self._worth.verdict

    @property
    def guarantee(self) -> list[str]:
        """The run's guarantee to a client, in words, and the clients outside it."""
        return self._summary.guarantee_lines(*self._often)

    @property
    def privacy(self) -> list[str]:
        """The cost to clients, in words: the guarantee, what it means, and what comes on top."""
        return self._summary.privacy_lines(*self._often)

    def _rounds(self) -> list[Round]:
        rounds = self._folder.read_history()
        if not rounds:
            raise ConfigError(f"{self.path} holds no run that finished a round", code="config.no-run")
        return rounds

    @property
    def _often(self) -> tuple[int, int, int]:
        spent, rounds = self._folder.read_participations(), self._rounds()
        last, exact = rounds[-1], max(entry.exact_reports for entry in rounds)
        # A run saves them before the round.
        if (more := max(spent.values(), default=0)) > (most := last.max_participations) + 1:
            raise ValueError(f"a client released {more} times by participations.jsonl, and {most} by history.jsonl")
        return max(most, more), exact, self._summary.left(rounds)

    @property
    def parameters(self) -> dict[str, NDArray[np.float32]]:
        r"""The best round's hypotheses: each shared parameter by its name, (k, \*shape)."""
        return hypotheses_in(self._folder.read_best(), self.model.shapes)

    @property
    def last_parameters(self) -> dict[str, NDArray[np.float32]]:
        r"""The last round's hypotheses: each shared parameter by its name, (k, \*shape)."""
        return hypotheses_in(self._folder.read_latest(), self.model.shapes)

    @cached_property
    def hypotheses(self) -> list[torch.nn.Module]:
        """The best hypotheses, each as a network in evaluation mode.

        Local parameters have their initial values: only the clients have theirs.
        """
        self.model.check_frozen(self._folder.read_config(), self.name)
        networks, parameters = [], self.parameters
        for j in range(number_of(parameters)):
            network = copy.deepcopy(self.model.module)
            state = {name: torch.from_numpy(value[j].copy()) for name, value in parameters.items()}
            network.load_state_dict(state, strict=False)
            networks.append(network.eval())
        return networks

    @property
    def model(self) -> Model:
        """The model of these hypotheses."""
        return self._setup.model

    @property
    def dataset(self) -> Dataset | None:
        """The data of the run, if they are on this machine."""
        return self._setup.open_dataset()

    @cached_property
    def _setup(self) -> Setup:
        return Setup.of_run(self._folder)

    @cached_property
    def _summary(self) -> Summary:
        return Summary.of(self._setup)
