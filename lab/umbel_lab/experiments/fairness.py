r"""Group fairness: how differently hypotheses serve groups of clients.

The authors' journal version (Galli, Jung, Biswas, Palamidessi and Cucinotta, 2023, arXiv 2309.00416) says that
personalised models have better group fairness than a single one "under a variety of standard metrics". Only its
abstract could be read when this was written, so these are standard measures, each from its own source, and need
not be theirs:

- *bounded group loss*, max over groups g of E[loss | g], and the *gap*, max less min (Agarwal, Dudík and Wu, 2019);
- *spread*, the standard deviation of the loss over clients (Li, Sanjabi, Beirami and Smith, 2020);
- *Jain's index*, (sum x)^2 / (n sum x^2) of the losses x of n clients: 1 where all fare alike (Jain, Chiu and Hawe,
  1984);
- *accuracy parity*, max less min over groups of P(d = y | g) (Zhao and Gordon, 2019);
- *demographic parity*, the same of P(d = 1 | g) (Dwork et al., 2012); beside it *base rates*, the same of
  P(y = 1 | g), which is what demographic parity is of decisions that are all right;
- *equal opportunity*, the same of P(d = 1 | y = 1, g) (Hardt, Price and Srebro, 2016);
- *equalised odds*, the larger of that and of the same of P(d = 1 | y = 0, g) (there as well).

Here d is what is decided of a row, and y what is true of it. All differences are 0 where groups are served alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from umbel import models
from umbel.client.trial import try_out
from umbel.data import Dataset, find_dataset, open_dataset
from umbel.protocol.run_config import RunConfig
from umbel.simulation.baselines import halves, serve, validation_cohort
from umbel.simulation.sweep import Result
from umbel_lab.output import Section, plus_minus


@dataclass(frozen=True)
class Losses:
    """How clients' losses differ (see the module)."""

    worst_group: float
    gap: float
    spread: float
    jain: float


@dataclass(frozen=True)
class Decisions:
    """How decisions differ between groups (see the module); NaN where no two groups can be compared."""

    accuracy_parity: float
    base_rates: float
    demographic_parity: float
    equal_opportunity: float
    equalised_odds: float


@dataclass(frozen=True)
class Grouping:
    """How clients are grouped, and what is decided of their rows."""

    names: Sequence[str]
    of: Callable[[Dataset], NDArray[np.int64]]  # returns the group of each client, shape (clients,)
    threshold: float  # a row's true decision is 1 where its target, as it is stored, is above this


def of_losses(losses: NDArray[np.float64], groups: NDArray[np.int64]) -> Losses:
    """Return how losses (clients,) differ between the groups (clients,)."""
    means = [float(losses[groups == g].mean()) for g in np.unique(groups)]
    squares = float(np.square(losses).sum())
    jain = float(losses.sum() ** 2 / (len(losses) * squares)) if squares else 1.0
    return Losses(max(means), max(means) - min(means), float(losses.std()), jain)


def of_decisions(decided: NDArray[np.int64], true: NDArray[np.int64], groups: NDArray[np.int64]) -> Decisions:
    """Return how decisions differ between groups, each (rows,).

    Of more than two classes each is in turn the one that counts as 1, and the largest difference is told.
    """
    kinds = np.unique(np.concatenate([decided, true]))
    wanted = kinds[-1:] if len(kinds) <= 2 else kinds

    def apart(outcome: NDArray[np.bool_], among: NDArray[np.bool_] | None = None) -> float:
        """Return by how much the share of `outcome` differs between the groups that have rows `among` theirs."""
        parts = [groups == g if among is None else (groups == g) & among for g in np.unique(groups)]
        shares = [float(outcome[part].mean()) for part in parts if part.any()]
        return max(shares) - min(shares) if len(shares) > 1 else np.nan

    opportunity = _largest(apart(decided == c, true == c) for c in wanted)
    return Decisions(
        accuracy_parity=apart(decided == true),
        base_rates=_largest(apart(true == c) for c in wanted),
        demographic_parity=_largest(apart(decided == c) for c in wanted),
        equal_opportunity=opportunity,
        equalised_odds=_largest([opportunity, *(apart(decided == c, true != c) for c in wanted)]),
    )


def of_run(result: Result, grouping: Grouping, state: str = "last") -> tuple[Losses, Decisions]:
    """Measure the hypotheses of a run's last round, or of its best, on its validation clients.

    Each picks its hypothesis on a random half of its rows, and is measured on the rest.
    """
    config = RunConfig.parse(result.spec.config)
    dataset = open_dataset(find_dataset(config.dataset))
    model = models.load_for(config, dataset.manifest)
    learner = try_out(model, dataset)
    kept = result.latest if state == "last" else result.hypotheses
    hypotheses = {name: kept[name] for name in model.shapes}
    cohort = validation_cohort(dataset, learner)
    support, query = halves(cohort, config.seed)
    groups = grouping.of(dataset)[dataset.manifest.train :][cohort.lengths > 1]
    chosen, losses = serve(learner, hypotheses, support, query)
    k = len(next(iter(hypotheses.values())))
    each = [{name: value[j] for name, value in hypotheses.items()} for j in range(k)]
    outputs = np.stack([learner.outputs(one, query.features).cpu().numpy().reshape(-1) for one in each])
    rows = np.repeat(np.arange(len(query)), query.lengths)
    decided = outputs[chosen[rows], np.arange(len(rows))] > grouping.threshold
    true = query.targets.cpu().numpy() > grouping.threshold
    return of_losses(losses, groups), of_decisions(decided.astype(int), true.astype(int), groups[rows])


def group_fairness(
    arms: Mapping[str, Sequence[Result]],
    grouping: Grouping,
    text: str,
    digits: int,
    scale: float = 1.0,
    state: str = "last",
) -> Section:
    """Compare runs, each name with its seeds, by how differently they serve groups of clients.

    `text` says what the groups are and what is decided. Losses times `scale` are shown with so many digits. `state` is
    the last or the best round.
    """
    rows = []
    for name, runs in arms.items():
        losses, decisions = zip(*(of_run(run, grouping, state) for run in runs), strict=True)
        worst, gap, spread, jain = zip(*map(astuple, losses), strict=True)
        shown = [plus_minus((scale * value for value in values), digits) for values in (worst, gap, spread)]
        parities = [plus_minus(values, 2) for values in zip(*map(astuple, decisions), strict=True)]
        rows.append([name, *shown, plus_minus(jain, 2), *parities])
    columns = [field.name.replace("_", " ") for kind in (Losses, Decisions) for field in fields(kind)]
    columns[columns.index("jain")] = "Jain's index"
    said = (
        f"{text} Validation clients pick their hypothesis of the {state} round on a random half of their rows and are "
        "measured on the rest. Told are "
        "differences between the groups that fare best and worst, 0 where all fare alike; but of losses also the mean "
        "of the worst group, the standard deviation over clients, and Jain's index, 1 where all clients fare alike. "
        "Formulas and sources are in lab/umbel_lab/experiments/fairness.py. Mean ± standard deviation over seeds."
    )
    return Section("Group fairness", said, ("who", *columns), rows)


def _largest(values: Iterable[float]) -> float:
    """Return the largest number that is one; NaN if none is."""
    return max((value for value in values if not np.isnan(value)), default=np.nan)
