"""A trial step on artificial rows: it finds problems of a model before anything else starts.

It also decides which of the two learners computes the model: the loop, if the batched one cannot, or computes
something else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.dp_sgd import AT_ONCE
from umbel.client.learner import BATCHED, LOOP, SITE, Learner, arrays_of, engine_asked, learner_for, one_thread
from umbel.data import Dataset
from umbel.models import load
from umbel.models.fit import misfit, one_line, traits_of
from umbel.models.losses import SLOPES, Score
from umbel.models.model import Kind, Model, Parameters
from umbel.models.optimizers import Adam, descent_of
from umbel.privacy.mechanisms.randomness import row_sources, streams
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.errors import DatasetError, ModelError
from umbel.protocol.release import RowPrivacy
from umbel.protocol.run_config import RunConfig

Form = tuple[tuple[int, ...], str, tuple[int, ...]]
"""The shape of a row, and the kind and shape of a target."""
_LENGTHS = (3, 2)  # rows of the artificial clients; unequal, so that one of them is padded
_SCORES = ("the loss", "the metric")
_STEP = LocalUpdate(local_epochs=1, step_size=0.01, batch_size=0)
_LONG_S = 0.05  # seconds whose measurement tells how long more of the same takes
_SAME, _ROUNDING = 1e-3, 1e-6  # relative to a step, and to the numbers: far below the effect of another computation


def try_out(
    model: Model,
    dataset: Dataset,
    device: str = "auto",
    engine: str = "auto",
    hypotheses: int = 1,
    precision: str = "float32",
) -> Learner:
    """Return the learner that computes a model on data like a dataset's, after one trial step.

    It uses only the dataset's shapes and types, and `umbel.models.fit.misfit`: a refusal must not reveal clients' data.
    With engine ``auto``, unless the environment names one (`umbel.client.learner.engine_asked`), the loop computes a
    model that cannot be computed in batches. `hypotheses` is their number, if known.

    Raises
    ------
    ModelError
        The problem in one line, with the parameter or layer, and the fix.
    ConfigError
        If the device does not exist here.
    """
    engine = engine_asked() if engine == "auto" else engine
    if reason := misfit(model, dataset):
        raise ModelError(f"model {model.name!r} {reason}; name another model or repair the data", code="model.misfit")
    if hypotheses > 1 and _same(model, 0, 1):
        text = f"model {model.name!r} always starts with the same parameters, so {hypotheses} hypotheses stay equal"
        fix = "draw some of its parameters at random, or set hypotheses = 1"
        raise ModelError(f"{text}; {fix}", code="model.same-start")
    tried = _tried(model, _form_of(dataset), learner_for(model, device, LOOP).device.type, engine)
    if precision == tried.precision:
        return tried
    return _tried_in(precision, model, _form_of(dataset), tried.device.type, tried.engine)


def _form_of(dataset: Dataset) -> Form:
    return dataset.features.shape[1:], dataset.targets.dtype.kind, dataset.targets.shape[1:]


@lru_cache(maxsize=16)
def _tried(model: Model, form: Form, device: str, engine: str) -> Learner:
    """Return the learner of a model after a trial step on made-up rows of a form; a large model takes a while."""
    cohort = _made_up(form, model)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # so that a network that draws is refused every time, or never
        _check_network(model, cohort)
    loop, picked = learner_for(model, device, LOOP), learner_for(model, device, engine)
    if picked is loop and loop.device.type == "cpu":
        return loop  # which has just been checked
    cohort = cohort.to(loop.device)
    try:
        expected = _step(loop, cohort)
    except Exception as error:
        raise ModelError(f"model {model.name!r} fails when tried: {one_line(error)}", code="model.trial") from error
    reason = "" if picked is loop else _unlike_alone(picked, cohort, expected)
    if reason and engine == BATCHED:
        raise ModelError(f'model {model.name!r} {reason}; set engine = "auto"', code="model.batches")
    return loop if reason else picked


@lru_cache(maxsize=16)
def _tried_in(precision: str, model: Model, form: Form, device: str, engine: str) -> Learner:
    """Return the learner of a lower precision, after a trial step in it."""
    learner = learner_for(model, device, engine, precision)
    try:
        _step(learner, _made_up(form, model).to(learner.device))
    except Exception as error:
        text = f"model {model.name!r} fails with precision = {precision!r}: {one_line(error)}"
        raise ModelError(f"{text}; leave precision out", code="model.trial") from error
    return learner


def try_training(learner: Learner, dataset: Dataset, hypotheses: int, update: LocalUpdate, rows: int) -> float:
    """Try a learner's training step on made-up rows; return how long a client of `rows` rows needs to hide them.

    That is 0 for an update that hides no rows. A first step also loads much of PyTorch, which takes seconds, so it must
    not be in the time of a client.

    Raises
    ------
    ModelError
        If the step fails, or leaves numbers without noise.
    """
    step = replace(_STEP, step_size=update.step_size, descent=update.descent)
    if update.rows is None:
        _seconds(learner, _form_of(dataset), 1, step, rows)  # one hypothesis takes least memory
        return 0.0
    step = replace(step, rows=replace(update.rows, steps=1), most_drawn=update.most_drawn)
    choosing, training = _seconds(learner, _form_of(dataset), hypotheses, step, rows)
    return choosing + training * update.rows.steps


def try_engines() -> None:
    """Try a step of each engine of a site on a made-up model, so that a process and its children have loaded all."""
    model = load("linear inputs=2 outputs=1")
    hides_rows = replace(_STEP, rows=RowPrivacy(1.0, 1.0, 1.0, 1.0, 1), most_drawn=2)
    with one_thread():
        for engine in (LOOP, SITE):
            for update in (hides_rows, replace(_STEP, descent=Adam())):
                _seconds(learner_for(model, "cpu", engine), ((2,), "f", ()), 1, update, 2)


@lru_cache(maxsize=64)
def _seconds(learner: Learner, form: Form, hypotheses: int, update: LocalUpdate, rows: int) -> tuple[float, float]:
    """Return the seconds for a choice and for a step of a made-up client of so many rows; 0 if it hides none."""
    model, device = learner.model, learner.device
    few = _made_up(form, model)
    starts = learner.tensors({name: np.stack([value] * hypotheses) for name, value in model.initial(0).items()})
    local = learner.tensors(model.initial_local([np.random.default_rng(0)]))
    features, targets = few.features[:1].to(device), few.targets[:1].to(device)

    def client_of(length: int) -> Cohort:
        """Return a client that has the same row many times, which takes the memory of one."""
        repeated = (one.expand(length, *one.shape[1:]) for one in (features, targets))
        return Cohort(next(repeated), next(repeated), np.array([length]))

    def train(size: int) -> float:
        """Return the seconds of a step on so many rows."""
        begin, chosen = time.thread_time(), torch.zeros(1, dtype=torch.int64)
        if update.rows is None:
            learner.train(starts, chosen, client_of(2), update, streams(0, "shuffle", 0, [0]), local)
        else:
            how = replace(update, rows=replace(update.rows, rate=size / rows))
            trained, own = learner.train(starts, chosen, client_of(rows), how, row_sources(None, 0, [0]), local)
            if not all(bool(value.isfinite().all()) for value in (trained | own).values()):
                raise ArithmeticError("its numbers overflow")
        return time.thread_time() - begin

    def choose() -> float:
        begin = time.thread_time()
        learner.choose(starts, client_of(min(rows, AT_ONCE)), local)
        return time.thread_time() - begin

    try:
        with torch.random.fork_rng(devices=[]):
            most = update.most_drawn
            size = min(AT_ONCE, most)
            train(size), choose()  # the first call loads what later calls have
            if update.rows is None:
                return 0.0, 0.0
            seconds = train(size)
            while size < most and seconds < _LONG_S:
                size = min(2 * size, most)
                seconds = train(size)
            return choose() * max(1.0, rows / AT_ONCE), seconds * most / size
    except Exception as error:
        raise ModelError(f"model {model.name!r} fails when tried: {one_line(error)}", code="model.trial") from error


def check_fit(data: Dataset) -> None:
    """Raise `DatasetError` unless the model and the loss that a dataset names take its data."""
    manifest = data.manifest
    if reason := misfit(load(manifest.model, manifest.loss), data):
        text = f"model {manifest.model!r} {reason}; give another model or loss, or leave both out"
        raise DatasetError(text, code="data.unfit-model")


def first_update(run: RunConfig, model: Model, dataset: Dataset) -> float:
    """Return the median norm of the first updates of a dataset's training clients."""
    learner, clients = try_out(model, dataset, run.device), range(dataset.manifest.train)
    cohort = Cohort.gather(dataset, clients, learner.device)
    start = learner.tensors({name: value[None] for name, value in model.initial(0).items()})
    steps = run.local_epochs, run.step_size, run.batch_size, run.local_steps
    update = LocalUpdate(*steps, descent=descent_of(run.optimizer))
    local, shuffles = model.initial_local(streams(0, "local", 0, clients)), streams(0, "shuffle", 1, clients)
    chosen = torch.zeros(len(cohort), dtype=torch.int64)
    trained, _ = learner.train(start, chosen, cohort, update, shuffles, learner.tensors(local))
    ends, begin = (flatten(arrays_of(one), np.float64) for one in (trained, start))
    return float(np.median(np.linalg.norm(ends - begin, axis=1)))


def _check_network(model: Model, cohort: Cohort) -> None:
    """Raise unless the network scores without randomness, and a step of its loss reaches all trained parameters."""
    name = f"model {model.name!r}"
    if not _same(model, 1, 1):
        fix = "draw them with PyTorch, as torch.rand and torch.nn.init do"
        raise ModelError(
            f"{name} starts with other parameters each time, at the same seed; {fix}", code="model.own-generator"
        )
    alone = cohort.part(slice(1, 2))
    rows, targets = alone.features, alone.targets
    before = rows._version
    with torch.no_grad():
        first, second = model.apply({}, rows), model.apply({}, rows)
    if rows._version != before:  # also where made-up rows keep their values, as under ReLU
        fix = "write x = 2 * x, not x *= 2, and let the first layers have inplace=False"
        raise ModelError(
            f"{name} changes its rows in place, so the next hypothesis would see other rows; {fix}",
            code="model.in-place",
        )
    if not _alike(first, second):
        fix = "use dropout only in training, with nn.Dropout or F.dropout(..., training=self.training)"
        raise ModelError(
            f"{name} gives different outputs each time it scores the same rows; {fix}", code="model.random-score"
        )
    for score in (model.loss, model.metric):
        try:
            values = score.of_rows(first, targets)
        except Exception as error:
            raise ModelError(
                f"{name} gives outputs from which {score.name} cannot be computed: {one_line(error)}",
                code="model.score",
            ) from error
        if values.shape != targets.shape[:1]:
            text = f"{score.name} is of shape {tuple(values.shape)} for {len(targets)} rows"
            raise ModelError(f"{name} cannot be trained, since {text}; return one value a row", code="model.score")
    _check_training(model, rows, targets)
    if model.metric.of_rows(first, targets).isnan().any():
        text = f"has a metric {model.metric.name!r} that is not a number on artificial rows"
        raise ModelError(f"{name} {text}; let it be one for every row", code="model.not-finite")
    for score in (model.loss, model.metric):
        if score.by_row and (reason := _unlike_mean(model, score, cohort)):
            fix = "umbel computes each row by itself, and takes the mean: return a value for each row"
            raise ModelError(f"{name} cannot be scored, since {reason}; {fix}", code="model.score-of-rows")


def _check_training(model: Model, rows: Tensor, targets: Tensor) -> None:
    name = f"model {model.name!r}"
    parameters = {key: value.detach().clone() for key, value in model.module.named_parameters()}
    trained = {key: value.requires_grad_() for key, value in parameters.items() if model.kinds[key] is not Kind.FROZEN}
    start, after, outputs = dict(model.module.named_buffers()), Parameters(), []
    for _ in range(2):
        torch.manual_seed(0)
        after = parameters | {key: value.clone() for key, value in start.items()}
        outputs.append(model.apply(after, rows, training=True))
    if not _alike(outputs[0], outputs[1]):
        text = "draws in training from a generator other than PyTorch's; use torch.rand and the like"
        raise ModelError(f"{name} {text}", code="model.own-generator")
    frozen = {key: value for key, value in start.items() if model.kinds[key] is Kind.FROZEN}
    if changed := [key for key, value in frozen.items() if not torch.equal(after[key], value)]:
        fix = 'name them in local = "...", or leave them as they are'
        raise ModelError(
            f"{name} has buffers {sorted(changed)} that change in training, and would be lost; {fix}",
            code="model.lost-buffers",
        )
    loss = model.loss.objective(model.loss.of_rows(outputs[0], targets).mean())
    if not torch.isfinite(loss):
        text = f"has a loss {model.loss.name!r} of {loss.item()} on artificial rows"
        raise ModelError(f"{name} {text}; start from smaller weights, or use another loss", code="model.not-finite")
    if not loss.requires_grad:
        raise ModelError(
            f"{name} has a loss {model.loss.name!r} without a gradient; use a differentiable one",
            code="model.no-gradient",
        )
    try:
        slopes = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    except Exception as error:  # such as that of a layer that changes outputs in place
        raise ModelError(
            f"{name} has a loss {model.loss.name!r} without a gradient: {one_line(error)}", code="model.no-gradient"
        ) from error
    gradients = dict(zip(trained, slopes, strict=True))
    if idle := [key for key, gradient in gradients.items() if gradient is None]:
        text = f"has parameters {idle} that get no gradient, since its outputs do not depend on them"
        raise ModelError(f'{name} {text}; set frozen = "{" ".join(idle)}"', code="model.no-gradient")
    if odd := [key for key, slope in gradients.items() if slope is not None and not slope.isfinite().all()]:
        text = f"has parameters {odd} without a finite gradient on artificial rows"
        raise ModelError(f"{name} {text}; start from smaller weights", code="model.not-finite")


def _unlike_mean(model: Model, score: Score, cohort: Cohort) -> str:
    """Return why a function is no mean over rows, as which umbel takes it; empty if it is.

    A root of a mean, a sum, a mean that class weights normalise, or the area under a curve is none.
    """
    targets, together = cohort.targets, 0.0
    with torch.no_grad():
        outputs = model.apply({}, cohort.features)
        mean = score.of_rows(outputs, targets).double().mean()
        shapes = [targets.shape] if targets.numel() != outputs.numel() else [outputs.shape, targets.shape]
        for shape in shapes:
            try:
                several = score.per_sample(outputs, targets.reshape(shape)).double()
            except Exception:
                return ""  # it takes one row at a time
            if several.numel() > 1 or _alike(several.reshape(()), mean):
                return ""
            together = several.item()
    value = f"{score.name} is {together:.4g} for {len(targets)} rows together"
    return f"{value}, but the mean over single rows is {mean:.4g}"


def _unlike_alone(learner: Learner, cohort: Cohort, expected: Arrays) -> str:
    """Return why batches would not compute clients as they are alone, to complete a sentence; empty if they would.

    `expected` is the loop's step. Where several clients are exact, not a bit may differ from a client alone, whatever
    the others have: a processor or a GPU of another kind may compute otherwise.
    """
    model, told = learner.model, "is computed differently in batches than alone, as seen in"
    if traits_of(model, cohort.shape).draws:
        return "draws in training, as in dropout, and batches would mix the clients' draws"
    if model.batch_dependent:
        return "uses statistics of its batch, which would include padding"
    try:
        found = _step(learner, cohort)
        first = cohort.part(slice(0, 1))
        alone = _step(learner, first) if learner.engine == SITE else {}
        crowded = _step(learner, _crowded(first)) if alone else {}
    except Exception as error:
        return f"cannot be computed in batches: {one_line(error)}"
    start = {key: value[None] for key, value in model.initial(0).items()}
    for key, value in expected.items():
        moved = np.abs(value - start.get(key, 0)).max(initial=0)
        allowed = _SAME * moved + _ROUNDING * (1 + np.abs(value).max(initial=0))
        if not np.abs(found[key] - value).max(initial=0) <= allowed:
            return f"{told} {key}"
        for several, place in ((found, slice(0, 1)), (crowded, slice(-1, None))) if alone else ():
            bits = several[key][..., place] if key in _SCORES else several[key][place]
            if bits.tobytes() != alone[key].tobytes():
                return f"{told} {key}"
    return ""


def _crowded(client: Cohort) -> Cohort:
    """Return a client after others whose rows no network expects."""
    wild = [torch.full_like(client.features, value) for value in (torch.inf, torch.nan, 1e30)]
    lengths = np.repeat(client.lengths, len(wild) + 1)
    return Cohort(torch.cat([*wild, client.features]), torch.cat([client.targets] * len(lengths)), lengths)


@contextmanager
def _to_the_last_bits() -> Iterator[None]:
    """Make a GPU compute in 32 bits: by default it convolves in fewer, and rounding would look like an error."""
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
    """Return a learner's results for artificial clients: the scores, and all parameters after a step."""
    model = learner.model
    hypotheses = learner.tensors({key: value[None] for key, value in model.initial(0).items()})
    local = learner.tensors(model.initial_local([np.random.default_rng(c) for c in range(len(cohort))]))
    loss, metric = learner.score(hypotheses, cohort, local)
    chosen = torch.zeros(len(cohort), dtype=torch.int64)
    shuffles = [np.random.default_rng(c) for c in range(len(cohort))]
    shared, own = learner.train(hypotheses, chosen, cohort, _STEP, shuffles, local)
    return dict(zip(_SCORES, (loss, metric), strict=True)) | arrays_of(shared | own)


def _made_up(form: Form, model: Model) -> Cohort:
    """Return clients with rows of a form, tokens 0 and 1 or numbers between them."""
    (shape, kind, target), generator, count = form, np.random.default_rng(0), sum(_LENGTHS)
    features = torch.from_numpy(generator.uniform(size=(count, *shape)).astype(np.float32))
    if traits_of(model, shape).tokens:
        features = features.round().long()
    if model.hooks.misfit is not None:
        features = torch.zeros_like(features)  # the network only takes rows that it has seen before
    if model.loss.name in SLOPES:
        drawn = generator.choice([-1, 1], count)
    elif kind in "iu":
        drawn = generator.integers(0, 2, (count, *target))
    else:
        drawn = generator.uniform(size=(count, *target)).astype(np.float32)
    return Cohort(features, torch.from_numpy(drawn), np.array(_LENGTHS))


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def _same(model: Model, seed: int, other: int) -> bool:
    """Return whether a model starts with the same parameters at two seeds."""
    first, second = model.initial(seed), model.initial(other)
    return all(np.array_equal(value, second[key]) for key, value in first.items())
