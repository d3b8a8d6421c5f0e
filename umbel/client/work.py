"""A node's clients, as the gate calls them: what each computes on its data for a task.

A learner (`umbel.client.learner`) chooses, trains and scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from logging import ERROR

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from umbel.client.cohort import Cohort
from umbel.client.learner import Learner, Turns, arrays_of, best_hypothesis
from umbel.client.local import LocalParameters
from umbel.client.node import Node
from umbel.models.model import Parameters
from umbel.privacy.mechanisms.base import NoiseSource
from umbel.privacy.mechanisms.choice import OWN
from umbel.privacy.mechanisms.randomness import noise_sources, row_sources, streams
from umbel.privacy.site.config import Site
from umbel.privacy.site.work import OnGpu, Places, Results, Work
from umbel.protocol.arrays import Arrays
from umbel.protocol.clients import ClientInDataset, ClientOnNode
from umbel.protocol.log import log
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec


@dataclass(frozen=True)
class NodeClients:
    """The clients of a site's node in a run; `state` is the node's ``context.state``.

    See `umbel.privacy.site.answer.Clients`.
    """

    site: Site
    run: RunConfig
    state: RecordDict

    @cached_property
    def node(self) -> Node:
        """The node, whose data are opened for the first task that the site accepts."""
        return Node.at(self.site, self.run)

    def check(self, task: TrainingSpec | EvaluationSpec, hypotheses: Arrays) -> Sequence[ClientOnNode]:
        """Return the numbers under which clients are charged; raise if the node cannot carry out the task."""
        if isinstance(task, TrainingSpec):
            self.node.check_training(hypotheses, task)
            return task.clients
        self.node.check(hypotheses, task.frozen_digest)
        # Those of training clients that report: they have one account.
        return self.site.local_ids(self.node.validation_clients(task.clients))

    def train(self, task: TrainingSpec, hypotheses: Arrays, assigned: NDArray[np.int64]) -> Work:
        """Return how clients train from their best hypotheses, or those assigned (Algorithm 1, lines 5 and 6)."""
        node, clients = self.node, self.node.training_clients(task.clients)
        update, names, numbers = node.update(task), list(node.model.shapes), np.asarray(clients)
        kept, hidden = self._kept(task), task.hides_rows(len(hypotheses[names[0]]))
        before = kept.read(clients, hidden)
        after = {name: value.copy() for name, value in before.items()}
        turns, starts = self._turns(clients, update.rows is None), node.learner.tensors(hypotheses)

        def train(
            places: Places,
            cohort: Cohort,
            learner: Learner,
            chosen: Tensor,
            local: Parameters,
            releases: OnGpu | None = None,
        ) -> Results:
            asked, seed, round = numbers[places].tolist(), node.seed, task.round
            draws = row_sources(seed, round, asked) if update.rows else streams(seed, "shuffle", round, asked)
            if releases:
                learner.train(starts, chosen, cohort, update, draws, release=releases.release)
                return [chosen.numpy(), *(releases.arrays[name] for name in names)]
            trained, own = learner.train(starts, chosen, cohort, update, draws, local)
            for name, value in own.items():
                after[name][places] = value
            which, shared = chosen.numpy(), arrays_of(trained)
            if task.message_noise:
                sources = noise_sources(seed, round, asked, "message")
                # Noise only on the changed rows would show which rows those are.
                everywhere = not node.site.simulated
                shared = noisy_messages(shared, hypotheses, which, task.message_noise, sources, everywhere)
            return [which, *(shared[name] for name in names)]

        def compute(places: Places, releases: OnGpu | None = None) -> Results:
            cohort, told = self._cohort(numbers[places]), torch.from_numpy(assigned[places])
            local = node.learner.tensors({name: value[places] for name, value in before.items()})
            with turns.learner() as learner:
                chosen = torch.where(told == OWN, learner.choose(starts, cohort, local), told)
                return train(places, cohort, learner, chosen, local, releases)

        def without_rows(places: Places) -> Results:
            chosen = torch.from_numpy(np.maximum(assigned[places], 0))
            local = node.learner.tensors({name: value[places] for name, value in before.items()})
            cohort = Cohort.without_rows(len(chosen), node.dataset.features.shape[1:], node.learner.device)
            return train(places, cohort, node.learner, chosen, local)

        def keep(results: Results) -> None:
            try:
                kept.write(clients, after, dict(zip(names, results[1:], strict=True)), hidden)
            except OSError as error:
                # The clients have been charged, and so their releases leave. A full disk says nothing about their data.
                log(
                    ERROR,
                    "the local parameters of round %d are lost, so clients keep their earlier ones: %s",
                    task.round,
                    error,
                )

        # Local parameters are kept only where training was finite, and messages have noise of their own: on the host.
        on_gpu = node.site.simulated and node.learner.device.type == "cuda" and not (before or task.message_noise)
        return Work(
            compute, turns.batches, turns.size, turns.threads, rows=update.rows, keep=keep,
            without_rows=without_rows if update.rows else None,
            on_gpu=compute if on_gpu else None,
        )  # fmt: skip

    def score(self, task: EvaluationSpec, hypotheses: Arrays) -> Work:
        """Return how clients score their best hypothesis."""
        node, clients = self.node, self.node.validation_clients(task.clients)
        kept, turns, numbers = self._kept(task), self._turns(clients), np.asarray(clients)
        scored = node.learner.tensors(hypotheses)

        def compute(places: Places) -> Results:
            own, cohort = numbers[places].tolist(), self._cohort(numbers[places])
            with turns.learner() as learner:
                if node.model.local_shapes and not self.site.policy.trainers_report:
                    fresh = learner.tensors(kept.fresh(own))
                    losses, metrics = learner.score_newcomers(scored, cohort, fresh, task.step_size)
                else:
                    losses, metrics = learner.score(scored, cohort, learner.tensors(kept.read(own)))
            best = best_hypothesis(losses), np.arange(len(own))
            scores = np.stack([losses[best], metrics[best]], axis=1)
            # To the server, NaN means that a client did not reply; here it means a diverged model.
            return [np.where(np.isnan(scores), np.inf, scores)]

        return Work(compute, turns.batches, turns.size, turns.threads)

    def _turns(self, clients: Sequence[ClientInDataset], together: bool = True) -> Turns:
        """Return how a task's clients are divided."""
        node = self.node
        if node.site.simulated:
            return Turns(node.learner)
        offsets, asked = node.dataset.offsets, np.asarray(clients, np.int64)
        lengths, hosted = offsets[asked + 1] - offsets[asked], max(len(node.training), len(node.validation))
        return Turns(node.learner, lengths.tolist(), hosted, node.dataset.features.shape[1:], together)

    def _cohort(self, clients: NDArray[np.int64]) -> Cohort:
        return Cohort.gather(self.node.dataset, clients, self.node.learner.device)

    def _kept(self, task: TrainingSpec | EvaluationSpec) -> LocalParameters:
        """Return the clients' local parameters."""
        return LocalParameters(self.node.site, self.state, self.node.model, task.run, self.node.seed)


def noisy_messages(
    trained: Arrays,
    hypotheses: Arrays,
    chosen: NDArray[np.int64],
    sigma: float,
    sources: Iterable[NoiseSource],
    everywhere: bool,
) -> Arrays:
    """Return clients' trained arrays (clients, \\*shape), from hypotheses (k, \\*shape), with noise of deviation sigma.

    These are the noisy messages of the PAC paper (Eq. 3), a defence which the gate does not count: no ledger knows it.
    It is on the changed rows of each array, or on all rows. In the first case the noise shows which rows changed: in a
    recommender, the items that a client labelled.
    """
    noisy = {name: value.copy() for name, value in trained.items()}
    for c, source in zip(range(len(chosen)), sources, strict=True):
        for name, value in noisy.items():
            rows = value[c : c + 1].reshape(value.shape[1] if value.ndim > 1 else 1, -1)
            before = hypotheses[name][chosen[c]].reshape(rows.shape)
            changed = np.full(len(rows), True) if everywhere else (rows != before).any(axis=1)
            drawn = source.standard_normal(int(changed.sum()) * rows.shape[1])
            rows[changed] += sigma * drawn.reshape(-1, rows.shape[1])
    return noisy
