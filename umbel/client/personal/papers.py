"""Personal models of five papers, made at the node after the run, by the clients' steps for a final global model.

Other steps of a paper's rounds are not included. Each docstring says which part is the paper's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from umbel.client.personal.calibrate import numbers
from umbel.client.personal.memory import Memory, as_outputs, by_key, check_memory, representations
from umbel.client.personal.own import Own, row_scores, sums, with_share
from umbel.client.personal.task import Task
from umbel.client.personal.tune import tuned, wide

PROXIMAL = 0.1
"""lambda of Ditto, and of MR-MTL if the run sets no ``proximal``."""
SHARE = 0.5
"""Initial alpha of APFL."""
SHARES = np.append(np.linspace(0, 0.9, 10), 0.99)
"""Shares lambda that kNN-Per may choose; at 1, classes that no neighbour has would be impossible."""


def ditto(task: Task) -> Own:
    """Return ``argmin F_c(v) + lambda/2 |v - w|^2``, by gradient descent from the hypothesis w.

    Li, Hu, Beirami and Smith, *Ditto: Fair and robust federated learning through personalization*, ICML 2021. In the
    paper v is trained beside w in each round; w does not depend on it, so the result is the same.
    """
    return _held(task, PROXIMAL)


def mr_mtl(task: Task) -> Own:
    """Return the same, with the run's ``proximal`` as lambda.

    Liu, Hu, Wu and Smith, *On privacy and personalization in cross-silo federated learning*, NeurIPS 2022: mean-
    regularised multi-task learning, whose w is the mean of the personal models. A run with ``proximal`` trains that
    mean, but each client starts its rounds from the mean and not from its own last model.
    """
    return _held(task, task.update.descent.proximal or PROXIMAL)


def apfl(task: Task) -> Own:
    """Return ``alpha v + (1 - alpha) w``; v and alpha minimise the client's loss, and w is the hypothesis.

    Deng, Kamani and Mahdavi, *Adaptive personalized federated learning*, 2020, Algorithm 1 with the final w: in the
    paper v and alpha are kept from round to round. Here alpha moves once an epoch, along the epoch's whole step.
    """
    start = task.start
    own, share = dict(start), np.full(len(task.cohort), SHARE)
    generators = list(task.generators())  # each epoch continues the shuffling
    epoch = replace(task, update=replace(task.update, local_epochs=1), generators=lambda: generators)
    for _ in range(task.update.local_epochs):
        now = {name: value + wide(share, value) * (own[name] - value) for name, value in start.items()}
        now = {name: value.astype(np.float32) for name, value in now.items()}
        moved = tuned(epoch, now)
        step = {name: moved[name] - value for name, value in now.items()}
        along = [((own[name] - start[name]) * value).reshape(len(share), -1).sum(1) for name, value in step.items()]
        own = {name: value + wide(share, value) * step[name] for name, value in own.items()}
        share = np.clip(share + sum(along), 0.0, 1.0)
    mixed = {name: value + wide(share, value) * (own[name] - value) for name, value in start.items()}
    return task.networks({name: value.astype(np.float32) for name, value in mixed.items()})


def fedrep(task: Task) -> Own:
    """Return the hypothesis with a head that the client trained on its rows, and an unchanged body.

    Collins, Hassani, Mokhtari and Shakkottai, *Exploiting shared representations for personalized federated learning*,
    ICML 2021, Algorithm 1, lines 6 to 8. The head is the last layer with parameters. In the paper's rounds a client
    trains its head first and then the body: a run with ``local = "head.*"`` trains both at once, which is FedPer
    (Arivazhagan et al., 2019).
    """
    last = next(reversed(task.hypotheses)).rpartition(".")[0]
    head = frozenset(name for name in task.hypotheses if name.rpartition(".")[0] == last)
    return task.networks(tuned(task, task.start, head))


def knn_per(task: Task) -> Own:
    """Return ``lambda kNN(x) + (1 - lambda) w(x)``: the hypothesis w, and a mean of the targets of the nearest rows.

    Marfoq, Neglia, Kameni and Vidal, *Personalized federated learning through local memorization*, ICML 2022: `Memory`
    keeps a client's rows as their representations under w. Classes are mixed as probabilities. Lambda is the best of
    `SHARES` if each row is left out of the memory once; the paper takes rows for validation. A client of a single row
    gets 0, the hypothesis alone.
    """
    model, cohort, outputs = task.learner.model, task.cohort, task.best_outputs.double()
    check_memory(model, cohort.features, cohort.targets)
    own = task.networks(task.start)
    if not len(outputs):
        return own
    keys = by_key(representations(task.learner, task.start, cohort), outputs)
    of_a_row = len(keys) // len(outputs)
    values = numbers(outputs, cohort).reshape(len(keys), -1)
    memory = Memory(keys.cpu().numpy(), values, cohort.lengths * of_a_row, np.zeros(len(cohort)))
    ones = [memory.part(slice(c, c + 1)) for c in np.flatnonzero(cohort.lengths)]
    means = torch.cat([one.nearest(torch.from_numpy(one.keys).to(keys.device), of_a_row) for one in ones])
    told, losses = as_outputs(model.loss, means.reshape(outputs.shape)), []
    for share in SHARES:
        both = with_share(model.loss, outputs, told, outputs.new_full((len(outputs),), share))
        losses.append(sums(row_scores(model.loss, both.float()[None], cohort)[0], cohort.lengths))
    best = SHARES[np.where(np.isnan(losses), np.inf, losses).argmin(0)]
    return replace(own, memory=replace(memory, shares=np.where(cohort.lengths > 1, best, 0.0)))


def _held(task: Task, proximal: float) -> Own:
    update = replace(task.update, descent=replace(task.update.descent, proximal=proximal))
    return task.networks(tuned(replace(task, update=update), task.start))
