"""The amount of work to measure a run's worth, decided from the run's own work before anything is done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from umbel.client.learner import Learner
from umbel.client.loop import LoopLearner
from umbel.data import Dataset
from umbel.models.fit import look
from umbel.models.model import Model
from umbel.privacy.gate.policy import Personal
from umbel.protocol.run_config import RunConfig
from umbel.server.history import State
from umbel.server.setup import Setup
from umbel.server.worth import Way
from umbel.simulation.baselines import LOCAL_EPOCHS

SHARE = 0.25
"""Maximum work of all baselines together, relative to the run's."""
MOST_CLIENTS = 1000
"""Maximum number of measured clients; of more, so many are drawn by the run's seed."""
BATCH = 32
"""Batch size for pooled rows, if clients take all theirs at once."""

# Work is counted in floating point operations. Other work counts as many as fit into its time: the start of
# a command and its report (4 s), a round's messages (10 ms), a step of training (150 us), a row (.25 us).
_START, _ROUND, _STEP, _ROW = 8e9, 2e7, 3e5, 500.0
_NEWTON_PARAMETERS, _NEWTON_NUMBERS = 10_000, 2**28  # above, L-BFGS takes too long or too much memory
NEWTON_STEPS = 100
"""Maximum number of steps of a fit by L-BFGS."""
_NEWTON_STARTS = 8
_NEWTON_PASSES = 3 * NEWTON_STEPS
_EPOCHS, _MIN_PASSES, _MIN_ROUNDS = 50, 3, 5
_BY_CLIENTS = 0.6  # share of the budget for the measured clients' own work
_TOO_MUCH = "which would take more than a quarter of the run's work"
_LOCAL = "since each client has its own local parameters"
# In order of decreasing work: step sizes and epochs of clients that train alone, their method to personalise the run's
# hypotheses, its work (in trainings of a client alone), and the minimum number of clients in the budget.
_CHOICES = (
    (4, LOCAL_EPOCHS, Personal.AUTO, 5, 100),
    (4, LOCAL_EPOCHS, Personal.MIXTURE, 0, 100),
    (1, LOCAL_EPOCHS, Personal.AUTO, 5, 50),
    (1, LOCAL_EPOCHS, Personal.MIXTURE, 0, 50),
    (1, LOCAL_EPOCHS * 2 // 5, Personal.MIXTURE, 0, 10),
    (0, 0, Personal.MIXTURE, 0, 1),
)


@dataclass(frozen=True)
class Plan:
    """The amount of work.

    Attributes
    ----------
    budget : float
        Maximum work of all baselines together.
    clients : int
        Number of measured clients.
    sizes, epochs : int
        Step sizes and epochs that clients try who train alone; 0 for none.
    how : Personal
        The method with which they personalise the run's hypotheses; `Personal.NO` if that is left out.
    newton : bool
        Whether pooled rows are fitted by L-BFGS, and otherwise by epochs of gradient descent.
    starts, passes : int
        Maximum number of models that are fitted to pooled rows, and of steps of L-BFGS or epochs of all these; 0 for
        none.
    rounds : int
        Of one model; 0 for none.
    left_out : mapping
        Reasons for each way that is left out.
    work, share : float
        Total planned work, and its ratio to the run's own work.
    """

    budget: float
    clients: int
    sizes: int
    epochs: int
    how: Personal
    newton: bool
    starts: int
    passes: int
    rounds: int
    left_out: Mapping[Way, str]
    work: float
    share: float

    @classmethod
    def of(
        cls,
        setup: Setup,
        learner: Learner,
        dataset: Dataset,
        state: State,
        training: NDArray[np.int64],
        measured: NDArray[np.int64],
    ) -> Plan:
        """Return the plan for a finished run; the clients to measure are the first ones."""
        run, model, meter, rows = setup.config, setup.model, _Meter(learner, dataset), np.diff(dataset.offsets)
        whole = meter.run(run, state, rows[: dataset.manifest.train], rows[dataset.manifest.train :])
        budget, left_out = SHARE * whole, dict[Way, str]()
        k = len(next(iter(state.hypotheses.values())))
        clients, sizes, epochs, how, work = _by_clients(
            meter, run, k, rows[measured[:MOST_CLIENTS]], _BY_CLIENTS * budget, bool(model.local_shapes)
        )
        if not sizes:
            left_out[Way.ALONE] = _TOO_MUCH
        if how is Personal.NO:
            left_out[Way.OWN] = _LOCAL if model.local_shapes else _TOO_MUCH
        newton, starts, passes, rounds = False, 0, 0, 0
        if model.local_shapes:
            left_out |= dict.fromkeys((Way.POOLED, Way.ONE_MODEL), _LOCAL)
        else:
            newton, every = _fits_newton(model, dataset, rows[training]), rows[training].sum(keepdims=True)
            batch = 0 if newton else run.batch_size or BATCH
            a_pass, a_round = (
                (1.25 if newton else 1) * meter.training(every, 1, batch),
                meter.round(run, rows[training]),
            )
            wanted, left = sum(1 for entry in state.history if entry.asked), budget - work
            enough = min(_MIN_ROUNDS, wanted) * a_round
            most = max(left / 2, left - wanted * a_round) if left >= 2 * enough else left
            # Epochs of two fits, whose loss is looked at three times each, as that of the hypotheses is once.
            starts, looks = (_NEWTON_STARTS, 0) if newton else (2, (6 + k) / 3)
            passes = min(_NEWTON_PASSES if newton else 2 * _EPOCHS, int(most / a_pass - looks))
            if passes < _MIN_PASSES * (1 if newton else 2):
                starts, passes, looks, left_out[Way.POOLED] = 0, 0, 0, _TOO_MUCH
            work += (passes + looks) * a_pass
            rounds = min(wanted, int((budget - work) / a_round))
            if rounds < min(_MIN_ROUNDS, wanted):
                rounds, left_out[Way.ONE_MODEL] = 0, _TOO_MUCH
            work += rounds * a_round
        share = work / whole
        return cls(budget, clients, sizes, epochs, how, newton, starts, passes, rounds, left_out, work, share)


def _by_clients(
    meter: _Meter, run: RunConfig, k: int, rows: NDArray[np.int64], budget: float, local: bool
) -> tuple[int, int, int, Personal, float]:
    """Return the number of measured clients, the work of each (see `_CHOICES`), and its total."""
    for sizes, epochs, how, trainings, least in _CHOICES:
        clients = len(rows)
        while clients >= min(least, len(rows)):
            support = -(-rows[:clients] // 2)
            work = sizes * meter.training(support, epochs, run.batch_size)
            if not local:
                # For the run, and for untrained hypotheses, of clients that are alone.
                work += 2 * trainings * meter.training(support, LOCAL_EPOCHS, run.batch_size)
                work += meter.scoring(6 * (k + 1) * int(support.sum()))
            if work <= budget:
                return clients, sizes, epochs, Personal.NO if local else how, work
            clients = min(clients - 1, clients * 3 // 4)
    return len(rows), 0, 0, Personal.NO, 0.0


def _fits_newton(model: Model, dataset: Dataset, rows: NDArray[np.int64]) -> bool:
    shown = look(model, dataset.features.shape[1:])
    small = model.num_parameters <= _NEWTON_PARAMETERS and int(rows.sum()) * shown.activations <= _NEWTON_NUMBERS
    return small and not shown.draws and not model.batch_dependent


class _Meter:
    """Counts work in the units of `_START` and the constants beside it."""

    def __init__(self, learner: Learner, dataset: Dataset) -> None:
        self._row = _ROW + _operations(learner.model, dataset)
        self._one_by_one = isinstance(learner, LoopLearner)

    def training(self, lengths: NDArray[np.int64], epochs: int, batch: int) -> float:
        """Return the work of clients of so many rows."""
        steps = -(-lengths // (batch or np.maximum(lengths, 1)))
        return epochs * (3 * self._row * float(lengths.sum()) + _STEP * float(self._steps(steps)))

    def _steps(self, steps: NDArray[np.int64]) -> float:
        return float(steps.sum() if self._one_by_one else steps.max(initial=0))

    def scoring(self, rows: int) -> float:
        """Return the work of scoring so many rows, once for each hypothesis."""
        return self._row * rows

    def round(self, run: RunConfig, lengths: NDArray[np.int64]) -> float:
        """Return the work of training in a round with average clients, without messages."""
        asked, rows = min(run.clients_per_round, len(lengths)), float(lengths.mean()) if len(lengths) else 0.0
        batch = min(run.batch_size or rows, rows)
        passes, steps = run.local_epochs, math.ceil(rows / max(batch, 1))
        examples = run.local_steps * batch if run.local_steps else passes * rows
        done = (run.local_steps or passes * steps) * (asked if self._one_by_one else 1)
        return asked * 3 * self._row * examples + _STEP * done

    def run(self, run: RunConfig, state: State, training: NDArray[np.int64], validation: NDArray[np.int64]) -> float:
        """Return the work of a finished run."""
        k, trained = len(next(iter(state.hypotheses.values()))), [one for one in state.history if one.asked]
        validations = sum(1 for one in state.history if one.loss is not None) + (run.restarts > 1) * run.restarts
        asked = min(run.validation_clients_per_round or len(validation), len(validation))
        scored = validations * asked * float(validation.mean()) if len(validation) else 0.0
        chosen = sum(one.asked for one in trained) * float(training.mean()) * (k > 1)
        return (
            _START
            + _ROUND * len(state.history)
            + len(trained) * self.round(run, training)
            + k * self._row * (scored + chosen)
        )


def _operations(model: Model, dataset: Dataset) -> float:
    """Return the floating point operations of a row's forward pass: each weight counts each time that it is used."""
    shape = dataset.features.shape[1:]
    row, operations = torch.zeros(1, *shape, dtype=torch.long if look(model, shape).tokens else torch.float32), 0.0

    def count(layer: nn.Module, _inputs: Any, outputs: Any) -> None:
        nonlocal operations
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and isinstance(outputs, Tensor):
            operations += 2 * weight.numel() * outputs.numel() / len(weight)

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        hooks = [layer.register_forward_hook(count) for layer in model.module.modules()]
        try:
            model.apply({}, row)
        finally:
            for hook in hooks:
                hook.remove()
    return operations
