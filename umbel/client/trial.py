"""A trial step on made-up rows: what does not work with a model is found before anything else starts.

It also says which of the two learners computes the model: what the batched one cannot do, or does
otherwise, is left to the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.engines import learner_for
from umbel.client.learner import Learner
from umbel.data import Dataset
from umbel.models import load
from umbel.models.fit import Look, look, misfit, one_line
from umbel.models.losses import SLOPES
from umbel.models.model import Kind, Model, Parameters
from umbel.models.optimizers import LocalOptimizer
from umbel.privacy.gate.randomness import streams
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.errors import DatasetError, ModelError
from umbel.protocol.run_config import RunConfig

_LENGTHS = (3, 2)  # rows of the made-up clients; unlike, so that one of them is padded
_MEASURED = 200  # clients, by whose first updates a clip norm is guessed
_STEP = LocalUpdate(local_epochs=1, step_size=0.01, batch_size=0)
_SAME, _ROUNDING = 1e-3, 1e-6  # of a step, and of the numbers themselves: far below what another computation gives


def try_out(model: Model, dataset: Dataset, device: str = "auto", engine: str = "auto", hypotheses: int = 1) -> Learner:
    """Return the learner that computes a model on data like a dataset's, after one trial step.

    It uses only the dataset's shapes and kinds of number, and `umbel.models.fit.misfit`: a refusal must not tell about
    clients' data. With engine ``auto`` (`umbel.client.engines.learner_for`), the loop computes a model that cannot be
    computed in batches. `hypotheses` is how many will be learnt at once, where that is known.

    Raises
    ------
    ModelError
        In one line: what does not work, at which parameter or layer, and what to do.
    ConfigError
        When there is no such device here.
    """
    if reason := misfit(model, dataset):
        raise ModelError(f"model {model.name!r} {reason}; name another model or repair the data", code="model.misfit")
    if hypotheses > 1 and _same(model):
        told = f"model {model.name!r} starts the same each time, and {hypotheses} hypotheses would stay the same"
        fix = "let it draw some of its parameters, or set hypotheses = 1"
        raise ModelError(f"{told}; {fix}", code="model.same-start")
    cohort = _made_up(dataset, look(model, dataset.features.shape[1:]), model)
    with torch.random.fork_rng(devices=[]):
        _check_network(model, cohort.part(slice(1, 2)))
    loop, picked = learner_for(model, device, "loop"), learner_for(model, device, engine)
    if picked is loop and loop.device.type == "cpu":
        return loop  # which does nothing else than what was just checked
    cohort = Cohort(cohort.features.to(loop.device), cohort.targets.to(loop.device), cohort.lengths)
    reason = "" if picked is loop else _unlike_alone(model, cohort)
    if not reason:
        try:
            expected = _step(loop, cohort)
        except Exception as error:
            raise ModelError(f"model {model.name!r} fails when tried: {one_line(error)}", code="model.trial") from error
        reason = "" if picked is loop else _against_batches(picked, cohort, expected)
    if reason and engine == "batched":
        raise ModelError(f'model {model.name!r} {reason}; set engine = "auto"', code="model.batches")
    return loop if reason else picked


def check_fit(data: Dataset) -> None:
    """Raise `DatasetError` unless the model and the loss that a dataset names take it."""
    manifest = data.manifest
    if reason := misfit(load(manifest.model, manifest.loss), data):
        text = f"model {manifest.model!r} {reason}; give another --model or --loss, or leave both out"
        raise DatasetError(text, code="data.unfit-model")


def first_update(run: RunConfig, model: Model, dataset: Dataset, hypotheses: Arrays) -> float:
    """Return the median norm of a client's first update, over some training clients.

    Nothing has been learnt before it, so that it is a first guess of the clip norm.
    """
    learner = try_out(model, dataset, run.device, run.engine)
    some = range(0, dataset.manifest.train, -(-dataset.manifest.train // _MEASURED))
    cohort = Cohort.gather(dataset, some, learner.device)
    local = model.initial_local(streams(run.seed, "local", 0, some))
    chosen = learner.choose(hypotheses, cohort, local)
    steps = run.local_epochs, run.step_size, run.batch_size, run.local_steps
    update = LocalUpdate(*steps, descent=LocalOptimizer.of(run))
    trained, _ = learner.train(hypotheses, chosen, cohort, update, streams(run.seed, "shuffle", 1, some), local)
    moved = flatten(trained, np.float64) - flatten(hypotheses, np.float64)[chosen]
    return float(np.median(np.linalg.norm(moved, axis=1)))


def _check_network(model: Model, cohort: Cohort) -> None:
    """Raise unless the network scores without chance, and a step of its loss reaches all that is to be trained."""
    name, rows, targets = model.name, cohort.features, cohort.targets
    with torch.no_grad():
        first, second = model.apply({}, rows), model.apply({}, rows)
    if not _alike(first, second):
        raise ModelError(
            f"model {name!r} gives the same rows other outputs each time that they are scored; "
            "drop out in training alone, as with nn.Dropout or F.dropout(..., training=self.training)",
            code="model.random-score",
        )
    for score in (model.loss, model.metric):
        try:
            values = score.of_rows(first, targets)
        except Exception as error:
            text = f"{score.name} cannot be computed of what model {name!r} gives: {one_line(error)}"
            raise ModelError(text, code="model.score") from error
        if values.shape != targets.shape[:1]:
            shape, count = tuple(values.shape), len(targets)
            text = f"{score.name} of model {name!r} is of shape {shape} for {count} rows; return one a row"
            raise ModelError(text, code="model.score")
    parameters = {key: value.detach().clone() for key, value in model.module.named_parameters()}
    trained = {key: value.requires_grad_() for key, value in parameters.items() if model.kinds[key] is not Kind.FROZEN}
    start, after, outputs = dict(model.module.named_buffers()), Parameters(), []
    for _ in range(2):
        torch.manual_seed(0)
        after = parameters | {key: value.clone() for key, value in start.items()}
        outputs.append(model.apply(after, rows, training=True))
    if not _alike(outputs[0], outputs[1]):
        text = (
            f"model {name!r} draws in training from a generator that is not PyTorch's own; use torch.rand and the like"
        )
        raise ModelError(text, code="model.own-generator")
    changed = [
        key for key, value in start.items() if model.kinds[key] is Kind.FROZEN and not torch.equal(after[key], value)
    ]
    if changed:
        raise ModelError(
            f"buffers {sorted(changed)} of model {name!r} change in training, and would be lost; "
            'name them in local = "...", or leave them as they are',
            code="model.lost-buffers",
        )
    _check_gradients(model, trained, model.loss.objective(model.loss.of_rows(outputs[0], targets).mean()))


def _check_gradients(model: Model, trained: Parameters, loss: Tensor) -> None:
    name, told = model.name, f"loss {model.loss.name!r} of model {model.name!r}"
    if not torch.isfinite(loss):
        text = f"{told} is {loss.item()} on made-up rows; start from smaller weights, or take another loss"
        raise ModelError(text, code="model.not-finite")
    if not loss.requires_grad:
        raise ModelError(f"{told} has no gradient; take one that can be descended", code="model.no-gradient")
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    found = dict(zip(trained, gradients, strict=True))
    if idle := [key for key, gradient in found.items() if gradient is None]:
        raise ModelError(
            f"parameters {idle} of model {name!r} get no gradient, since its outputs do not hang on them; "
            f'set frozen = "{" ".join(idle)}"',
            code="model.no-gradient",
        )
    if odd := [key for key, gradient in found.items() if gradient is not None and not gradient.isfinite().all()]:
        text = f"parameters {odd} of model {name!r} have no finite gradient on made-up rows; start from smaller weights"
        raise ModelError(text, code="model.not-finite")


def _unlike_alone(model: Model, cohort: Cohort) -> str:
    """Return why, in batches, clients could not be what they are alone, for the middle of a sentence."""
    if look(model, tuple(cohort.features.shape[1:])).draws:
        return "draws in training, as in dropout, which in batches would not be each client's own draw"
    if model.batch_dependent:
        return "takes the statistics of its batch, in which padding would count"
    return ""


def _against_batches(learner: Learner, cohort: Cohort, expected: Arrays) -> str:
    """Return what the batched learner makes otherwise, for the middle of a sentence; empty if nothing."""
    model = learner.model
    try:
        found = _step(learner, cohort)
    except Exception as error:
        return f"cannot be computed in batches: {one_line(error)}"
    start = {key: value[None] for key, value in model.initial(0).items()}
    for key, value in expected.items():
        moved = np.abs(value - start.get(key, 0)).max(initial=0)
        allowed = _SAME * moved + _ROUNDING * (1 + np.abs(value).max(initial=0))
        if not np.abs(found[key] - value).max(initial=0) <= allowed:
            return f"is computed otherwise in batches than by itself, as seen in {key}"
    return ""


@contextmanager
def _to_the_last_bits() -> Iterator[None]:
    """Have a GPU compute in 32 bits: by default it convolves in fewer, and rounding would look like something else."""
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [one.allow_tf32 for one in backends]
    try:
        for one in backends:
            one.allow_tf32 = False
        yield
    finally:
        for one, allowed in zip(backends, before, strict=True):
            one.allow_tf32 = allowed


@_to_the_last_bits()
def _step(learner: Learner, cohort: Cohort) -> Arrays:
    """Return what a learner makes of made-up clients: how the model scores, and all parameters after a step."""
    model = learner.model
    hypotheses = {key: value[None] for key, value in model.initial(0).items()}
    local = model.initial_local([np.random.default_rng(c) for c in range(len(cohort))])
    loss, metric = learner.score(hypotheses, cohort, local)
    chosen = np.zeros(len(cohort), np.int64)
    shuffles = [np.random.default_rng(c) for c in range(len(cohort))]
    shared, own = learner.train(hypotheses, chosen, cohort, _STEP, shuffles, local)
    return {"the loss": loss, "the metric": metric} | shared | own


def _made_up(dataset: Dataset, seen: Look, model: Model) -> Cohort:
    """Return clients with rows of a dataset's shapes, tokens 0 and 1 or numbers between them."""
    generator, count = np.random.default_rng(0), sum(_LENGTHS)
    shape, targets = (count, *dataset.features.shape[1:]), dataset.targets
    features = torch.from_numpy(generator.uniform(size=shape).astype(np.float32))
    if seen.tokens:
        features = features.round().long()
    if model.hooks.misfit is not None:
        features = torch.zeros_like(features)  # the network takes no rows but those that it has looked at
    if model.loss.name in SLOPES:
        drawn = generator.choice([-1, 1], count)
    elif targets.dtype.kind in "iu":
        drawn = generator.integers(0, 2, (count, *targets.shape[1:]))
    else:
        drawn = generator.uniform(size=(count, *targets.shape[1:])).astype(np.float32)
    return Cohort(features, torch.from_numpy(drawn), np.array(_LENGTHS))


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def _same(model: Model) -> bool:
    first, other = model.initial(0), model.initial(1)
    return all(np.array_equal(value, other[key]) for key, value in first.items())
