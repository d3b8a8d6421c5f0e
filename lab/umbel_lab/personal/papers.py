"""Personal models of four papers, made at the node after the run, by the clients' steps for a final global model.

Other steps of a paper's rounds are not included. Each docstring says which part is the paper's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from umbel.client.personal.predictors import Predictors, Task
from umbel.client.personal.tune import tuned, wide

PROXIMAL = 0.1
"""lambda of Ditto, and of MR-MTL if the run sets no ``proximal``."""
SHARE = 0.5
"""Initial alpha of APFL."""


def ditto(task: Task) -> Predictors:
    """Return ``argmin F_c(v) + lambda/2 |v - w|^2``, by gradient descent from the hypothesis w.

    Li, Hu, Beirami and Smith, *Ditto: Fair and robust federated learning through personalization*, ICML 2021. In the
    paper v is trained beside w in each round; w does not depend on it, so the result is the same.
    """
    return _held(task, PROXIMAL)


def mr_mtl(task: Task) -> Predictors:
    """Return the same, with the run's ``proximal`` as lambda.

    Liu, Hu, Wu and Smith, *On privacy and personalization in cross-silo federated learning*, NeurIPS 2022: mean-
    regularised multi-task learning, whose w is the mean of the personal models. A run with ``proximal`` trains that
    mean, but each client starts its rounds from the mean and not from its own last model.
    """
    return _held(task, task.update.descent.proximal or PROXIMAL)


def apfl(task: Task) -> Predictors:
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


def fedrep(task: Task) -> Predictors:
    """Return the hypothesis with a head that the client trained on its rows, and an unchanged body.

    Collins, Hassani, Mokhtari and Shakkottai, *Exploiting shared representations for personalized federated learning*,
    ICML 2021, Algorithm 1, lines 6 to 8. The head is the last layer with parameters. In the paper's rounds a client
    trains its head first and then the body: a run with ``local = "head.*"`` trains both at once, which is FedPer
    (Arivazhagan et al., 2019).
    """
    last = next(reversed(task.hypotheses)).rpartition(".")[0]
    head = frozenset(name for name in task.hypotheses if name.rpartition(".")[0] == last)
    return task.networks(tuned(task, task.start, head))


def _held(task: Task, proximal: float) -> Predictors:
    update = replace(task.update, descent=replace(task.update.descent, proximal=proximal))
    return task.networks(tuned(replace(task, update=update), task.start))
