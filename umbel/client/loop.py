"""The reference: one client, and one hypothesis, after the other."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from umbel.client.cohort import Cohort, Schedule, Steps, seeded
from umbel.client.engines import Engine, arrangement
from umbel.models.model import Parameters
from umbel.privacy.gate.time_limit import check_time


class Loop(Engine):
    """Computes one client after the other."""

    def sums(self, hypotheses: Parameters, cohort: Cohort, local: Parameters) -> Tensor:
        """See `Engine.sums`."""
        model, k = self.model, len(next(iter(hypotheses.values())))
        sums = torch.empty(2, k, len(cohort), dtype=torch.float64)
        arrange = arrangement(model, tuple(cohort.features.shape[1:]))
        networks = [{name: arrange(value[j]) for name, value in hypotheses.items()} for j in range(k)]
        for c in range(len(cohort)):
            rows = cohort.part(slice(c, c + 1))
            own = {name: arrange(value[c]) for name, value in local.items()}
            for j, network in enumerate(networks):
                check_time()
                outputs = self.apply(network | own, rows.features)
                for i, score in enumerate((model.loss, model.metric)):
                    sums[i, j, c] = score.of_rows(outputs, rows.targets).double().sum()
        return sums

    def outputs(self, parameters: Parameters, cohort: Cohort) -> Tensor:
        """See `Engine.outputs`."""
        arrange, outputs = arrangement(self.model, tuple(cohort.features.shape[1:])), []
        for c in np.flatnonzero(cohort.lengths).tolist():  # many networks do not take no rows
            check_time()
            own = {name: arrange(value[c]) for name, value in parameters.items()}
            outputs.append(self.apply(own, cohort.part(slice(c, c + 1)).features))
        return torch.cat(outputs)

    def descend(self, start: Parameters, cohort: Cohort, schedule: Schedule, names: frozenset[str]) -> Parameters:
        """See `Engine.descend`."""
        arrange = arrangement(self.model, tuple(cohort.features.shape[1:]))
        for c in range(len(cohort)):
            # Steps are made in place: a copy of a large model takes as long as a step.
            own = {name: value[c] for name, value in start.items()}
            values = {name: arrange(value).detach() for name, value in own.items()}
            with seeded(schedule.seeds[c], self.device) if schedule.seeds else nullcontext():
                self._descend_one(values, cohort, schedule, c, names)
            for name, value in values.items():
                own[name].copy_(value.detach())  # where it is not the same memory anyway
        return start

    def _descend_one(
        self, values: Parameters, cohort: Cohort, schedule: Schedule, client: int, names: frozenset[str]
    ) -> None:
        """Train the named parameters of one client in place."""
        model, update, length = self.model, schedule.update, int(cohort.lengths[client])
        parameters = {name: value.requires_grad_() for name, value in values.items() if name in names}
        changing = [name for name in values if name in model.buffers]
        steps = None
        if parameters and not update.descent.plain:
            steps = Steps(update.descent, update.step_size, [parameters], model.shapes)
        for order in schedule.passes(client):
            rows = torch.from_numpy(order).to(self.device)
            for begin in update.batches(len(rows)):
                check_time()
                batch = rows[begin : begin + update.size(len(rows))]
                if len(batch) == 1 and model.batch_dependent:
                    continue  # a single row has no statistics
                whole = self.frozen | values
                outputs = model.apply(whole, cohort.features[batch], training=True)
                for name in changing:
                    values[name] = whole[name].detach()
                if not parameters:
                    continue
                loss = model.loss.objective(model.loss.of_rows(outputs, cohort.targets[batch]).mean())
                # Rows may decide which parameters are used, as in a mixture of experts: others get 0, as in batches.
                found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
                gradients = dict(zip(parameters, found, strict=True))
                with torch.no_grad():
                    for name in self.decays.keys() & gradients.keys():
                        gradients[name] = gradients[name] + self.decays[name] / length * parameters[name]
                    if steps:
                        for name in model.summed & gradients.keys():
                            gradients[name] = gradients[name] * len(batch)
                        steps.step([gradients])
                        continue
                    for name, value in parameters.items():
                        step = update.step_size * (len(batch) if name in model.summed else 1)
                        value.sub_(gradients[name], alpha=step)
