"""The membership audit: which rows did a client train on, before and after rows are protected?

Clients train the same hypothesis, each on other rows of a dataset. The server reads their releases, and guesses for
each row and client whether the client had the row. It compares the row's loss under the client's release with its
losses under the releases of clients that do not have it: a likelihood ratio with a normal law (LiRA without shadow
models that have the row; Carlini et al., *Membership inference attacks from first principles*, S&P 2022, Sec. V-B).
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from umbel import models
from umbel.client.cohort import Cohort
from umbel.data import find_typed, open_dataset
from umbel.models.fit import look
from umbel.models.losses import TINY
from umbel.models.model import Model
from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.accounting.row_plan import RowTask, row_plan_for
from umbel.privacy.accounting.rows import row_guarantee
from umbel.privacy.gate.memory_ledger import MemoryLedger
from umbel.protocol.arrays import Arrays, Matrix
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import ConfigError, DatasetError, NotApplicableError
from umbel.protocol.release import Clipping
from umbel.protocol.run_config import RunConfig
from umbel_lab.attacks.victims import NO_NOISE, Mode, Victims, write_victims
from umbel_lab.output import Page, Section

EPSILONS = (8.0, 1.0)
"""Of a row, at `DELTA`."""
FALSE_ALARMS = 0.01
"""Share of the rows that a client does not have of which the server says that it has them."""
RATE = 0.5
"""q: each step draws half of a client's rows, on average."""
_FEWEST = 10  # clients; each row is judged by the others
_UNCLIPPED = 1e3


@dataclass(frozen=True)
class Setting:
    """The subject of an audit. An empty model is that of the dataset; `epsilons` are those of a row at `DELTA`."""

    dataset: str
    model: str = ""
    clients: int = 100
    rows: int = 20
    epochs: int = 20
    step_size: float = 0.1
    row_clip_norm: float = 1.0
    epsilons: tuple[float, ...] = EPSILONS
    seed: int = 0


@dataclass(frozen=True)
class Finding:
    """How well the server tells members from other rows after one kind of training.

    `auc` is the probability that a client's row looks more like one than another row does, `found` the share of
    clients' rows that are found at `FALSE_ALARMS`; both are means over clients, with half of a 95 % interval. `claimed`
    is the epsilon of a row by the node's own ledger, None without a guarantee, and `at_most` the share that it allows.
    `metric` is that of rows that a client does not have.
    """

    training: str
    claimed: float | None
    auc: float
    auc_half: float
    found: float
    found_half: float
    at_most: float
    metric: float


def audit(setting: Setting) -> list[Finding]:
    """Have clients train without protection of rows, and with each epsilon, behind the app's own gate; attack both.

    Raises
    ------
    UmbelError
        Before any work, if the setting is impossible, or the dataset too small.
    """
    if setting.clients < _FEWEST or setting.rows < 2:
        text = f"{setting.clients} clients of {setting.rows} rows; the audit takes {_FEWEST} clients of 2 rows at least"
        raise ConfigError(text, code="config.out-of-range")
    dataset = open_dataset(find_typed(setting.dataset))
    model = models.load_for(RunConfig(model=setting.model), dataset.manifest)
    if model.local_shapes:
        text = f"model {model.name!r} has local parameters, which no release shows; choose another"
        raise NotApplicableError(text, code="attack.local-parameters")
    wanted = setting.clients * setting.rows
    if wanted > (there := int(dataset.offsets[dataset.manifest.train])):
        text = f"{setting.dataset}: {there:,} rows of training clients, but {wanted:,} are wanted; ask for fewer"
        raise DatasetError(text, code="data.too-few-rows")
    generator = np.random.default_rng(setting.seed)
    own = np.sort(generator.choice(there, wanted, replace=False))
    rows = generator.permutation(own).reshape(setting.clients, setting.rows)
    steps = math.ceil(setting.epochs / RATE)
    found = []
    with tempfile.TemporaryDirectory(prefix="umbel-members-") as scratch:
        folder = Path(scratch)
        write_victims(folder, dataset, [*rows])
        config = {"model": model.name, "loss": model.loss.name, "metric": model.metric.name}
        cohort = Cohort.gather(open_dataset(folder), range(setting.clients), torch.device("cpu"))
        hypothesis = {name: value[None] for name, value in model.initial(setting.seed).items()}
        how = {"local_epochs": 0, "local_steps": steps, "step_size": setting.step_size, "clip_norm": _UNCLIPPED}
        for training, policy, asked in _kinds(setting, steps):
            victims, mode = Victims(folder, policy, setting.seed, config), Mode(training, 0.0, clipping=Clipping.PUBLIC)
            released, _ = victims.ask(mode, hypothesis, range(setting.clients), **how, **asked)
            spent = row_guarantee(MemoryLedger(victims.context.state).account(ClientInDataset(0)), DELTA)
            found.append(_finding(training, spent.epsilon if spent else None, *_scores(cohort, model, released)))
    return found


def _kinds(setting: Setting, steps: int) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return each kind of training with the policy of a site that permits it, and its entries of the task."""
    batch = max(1, round(RATE * setting.rows))
    found: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (NO_NOISE, {"allow-unsanitised": True}, {"batch_size": batch})
    ]
    for epsilon in setting.epsilons:
        plan = row_plan_for(RowTask(setting.rows, RATE, steps, 1), epsilon)
        # A site's budget holds for all later tasks as well, so it counts this one as more than its epsilon.
        policy = {
            "protect": "rows", "row-budget": "inf",
            "min-row-noise-multiplier": plan.noise_multiplier,
        }  # fmt: skip
        asked = {
            "row_clip_norm": setting.row_clip_norm, "row_noise_multiplier": plan.noise_multiplier, "row_rate": RATE,
            "row_batch": plan.task.batch,
        }  # fmt: skip
        found.append((f"rows, ε = {epsilon:g}", policy, asked))
    return found


def _scores(cohort: Cohort, model: Model, released: Arrays) -> tuple[Matrix, float]:
    """Return how much each row looks like a member of each client, (clients, clients, rows), and the others' metric."""
    clients = len(cohort)
    shape = tuple(cohort.features.shape[1:])
    features = cohort.features.long() if look(model, shape).tokens else cohort.features
    losses, metrics = [], []
    with torch.inference_mode():
        for client in range(clients):
            values = {name: torch.from_numpy(value[client].astype(np.float32)) for name, value in released.items()}
            outputs = model.apply(model.frozen_values | values, features)
            losses.append(model.loss.of_rows(outputs, cohort.targets).double().numpy())
            metrics.append(model.metric.of_rows(outputs, cohort.targets).double().numpy())
    # The log of the odds of the right class, or what is near to normal for other losses.
    surprise = np.expm1(losses) if model.loss.name == "cross-entropy" else np.asarray(losses)
    scores = likelihood_ratios(-np.log(surprise + TINY).reshape(clients, clients, -1))
    others = ~np.eye(clients, dtype=bool)
    mean = torch.tensor(np.asarray(metrics).reshape(clients, clients, -1)[others].mean())
    return scores, float(model.metric.report(mean))


def likelihood_ratios(confidence: Matrix) -> Matrix:
    """Return scores (clients, clients, rows) from the confidence of client i's release in the rows of client j.

    A score is the distance, in standard deviations, to the confidence of the clients that do not have the row. The
    judged release itself is none of them.
    """
    m = len(confidence)
    others = ~np.eye(m, dtype=bool)[:, :, None]
    judges = np.where(others, m - 2, m - 1)
    without = np.where(others, confidence, 0.0)
    mean = (without.sum(0) - without) / judges
    variance = (np.square(without).sum(0) - np.square(without)) / judges - np.square(mean)
    found: Matrix = (confidence - mean) / np.sqrt(np.maximum(variance, 1e-12))
    return found


def _finding(training: str, claimed: float | None, scores: Matrix, metric: float) -> Finding:
    """Return what a server finds by scores (clients, clients, rows)."""
    m = len(scores)
    own = np.eye(m, dtype=bool)
    threshold = np.quantile(scores[~own], 1 - FALSE_ALARMS)
    aucs, shares = [], []
    for client in range(m):
        members, rest = scores[client, client], scores[client, ~own[client]].ravel()
        aucs.append(float(stats.mannwhitneyu(members, rest).statistic) / (len(members) * len(rest)))
        shares.append(float((members > threshold).mean()))
    return Finding(training, claimed, *_interval(aucs), *_interval(shares), allowed(claimed), metric)


def allowed(claimed: float | None) -> float:
    """Return the largest share of rows that can be found at `FALSE_ALARMS`, given the epsilon of a row at `DELTA`.

    Clients have equally many rows. So a client with a row has it in the place of another: one is removed and one added.
    """
    if claimed is None:
        return 1.0
    more = math.exp(min(claimed, 50.0))
    return min(1.0, more * (more * FALSE_ALARMS + DELTA) + DELTA)


def _interval(values: list[float]) -> tuple[float, float]:
    return float(np.mean(values)), 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def page(setting: Setting, findings: list[Finding]) -> Page:
    """Return the table of an audit."""
    text = (
        f"{setting.clients} clients of {setting.rows} rows train for {setting.epochs} epochs. AUC: the probability "
        f"that a row that a client has looks more like one than a row that it does not have; .5 is a guess. Found: the "
        f"share of clients' rows that are found when {FALSE_ALARMS:.0%} of the other rows are taken for theirs. At "
        f"most: what the claimed epsilon, at delta {DELTA:g} for one row more or less, allows if a row takes the place "
        "of another. ±: 95 % over clients. An attack that fails proves nothing."
    )
    columns: dict[str, Any] = {
        "training": "training",
        "claimed ε of a row": lambda row: "none" if row["claimed"] is None else f"{row['claimed']:.3g}",
        "AUC": lambda row: f"{row['auc']:.3f} ± {row['auc_half']:.3f}",
        "found": lambda row: f"{row['found']:.1%} ± {row['found_half']:.1%}",
        "at most": lambda row: f"{row['at_most']:.1%}",
        "metric of other rows": "metric:.3f",
    }
    rows = [asdict(finding) for finding in findings]
    return Page("Which rows a client trained on", [Section.of("", text, columns, rows)], rows, asdict(setting))
