"""A model: a network with its loss and its metric, and the kind of each of its parameters.

There are three kinds of parameters. *Frozen* ones are part of the model: never trained and never sent; both sides
compare a digest of them. *Shared* ones make up a hypothesis and a release, and n counts them. *Local* ones belong to
each client: they are trained and never leave its node.

Buffers are never shared. The running statistics of batch normalisation are local (FedBN: Li et al., ICLR
2021), other buffers are frozen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from umbel.models.hooks import Arrays, Hooks
from umbel.models.losses import Loss, Score
from umbel.protocol.errors import ConfigError, ModelError
from umbel.protocol.home import umbel_home
from umbel.protocol.log import log

Parameters = dict[str, Tensor]

_FROZEN_SEED = 0  # for parameters that are neither trained nor sent
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Kind(StrEnum):
    """The kind of a parameter: who trains it, and whether it travels."""

    FROZEN = "frozen"
    SHARED = "shared"
    LOCAL = "local"


@dataclass(frozen=True)
class _Network:
    """The network in use.

    ``changing`` are the layers that behave differently in training: not those in evaluation mode, nor those with frozen
    statistics.
    """

    module: nn.Module
    kinds: dict[str, Kind]
    changing: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Model:
    """A network with its loss and metric.

    A parameter with several names, such as tied weights, counts once, under the first name.

    A network may declare more (`umbel.models.hooks.Hooks`). A parameter with ``requires_grad=False`` is frozen. A layer
    that the network puts in evaluation mode stays in it.

    Attributes
    ----------
    name : str
        Its name as in the run config.
    network : callable
        Builds the network, a ``torch.nn.Module`` with floating point parameters.
    loss : Loss
        The loss that a client minimises and reports.
    metric : Score
        The value that a validation client reports beside the loss.
    frozen, local : tuple of str
        Patterns on the names of parameters that are frozen or local, such as ``backbone.*``, in addition to those
        of the network itself. A parameter that the network makes local stays local.
    pretrained : str
        File of initial weights (`find_weights`); empty to draw all. Parameters that the file lacks, or has in
        another shape, are drawn.
    stamp : tuple of int
        That file's size and time (`stamp_of`): with other content, it is another model.
    """

    name: str
    network: Callable[[], nn.Module]
    loss: Loss
    metric: Score
    frozen: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    pretrained: str = ""
    stamp: tuple[int, ...] = ()

    @property
    def module(self) -> nn.Module:
        """The network for the forward pass; only its frozen parameters are used."""
        return self._network.module

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kind of each parameter and buffer."""
        return self._network.kinds

    @cached_property
    def _network(self) -> _Network:
        module = self._build(_FROZEN_SEED)
        # A library's pretrained network comes in evaluation mode as a whole: this says nothing about single layers.
        module = module if module.training else module.train()
        kinds = _kinds(module, self.frozen, self.local)
        first = {name: names[0] for names in _names(module).values() for name in names}
        for prefix, layer in _with_statistics(module):
            if kinds[first[_inside(prefix, "running_mean")]] is Kind.FROZEN:
                layer.training = False  # frozen statistics must not change
        return _Network(module, kinds, tuple(layer for layer in module.modules() if layer.training))

    @cached_property
    def names(self) -> dict[str, tuple[str, ...]]:
        """All names of each parameter and buffer, under the first of them, in the order of the state dict."""
        return _names(self.module)

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Names of the buffers; gradients do not train them."""
        return frozenset(name for name, _ in self.module.named_buffers())

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each shared parameter."""
        return self._shapes(Kind.SHARED)

    @cached_property
    def local_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each local parameter; empty for a model that has none."""
        return self._shapes(Kind.LOCAL)

    @cached_property
    def frozen_values(self) -> Parameters:
        """The frozen parameters and buffers; empty for a model that has none."""
        state = _tensors(self.module)
        return {name: state[name].detach() for name, kind in self.kinds.items() if kind is Kind.FROZEN}

    @cached_property
    def frozen_digest(self) -> str:
        """SHA-256 of the frozen parameters and their names, and of the file of weights; empty if there are none."""
        digest = hashlib.sha256()
        if self.pretrained:
            digest.update(hashlib.sha256(find_weights(self.pretrained).read_bytes()).hexdigest().encode())
        for name, value in self.frozen_values.items():
            digest.update(f"{name} {tuple(value.shape)} ".encode())
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest() if self.frozen_values or self.pretrained else ""

    def check_frozen(self, saved: Mapping[str, Any], run: object) -> None:
        """Raise `ConfigError` if a run, of which `saved` is the config.toml, had other frozen parameters."""
        if saved.get("frozen", self.frozen_digest) != self.frozen_digest:
            text = f"the hypotheses of {run} belong to other frozen parameters than model {self.name!r} has"
            raise ConfigError(f"{text}; restore the file that pretrained names", code="config.other-frozen")

    @cached_property
    def _weights(self) -> Parameters:
        return read_weights(find_weights(self.pretrained)) if self.pretrained else {}

    @cached_property
    def hooks(self) -> Hooks:
        """The network's declarations about itself."""
        return Hooks.of(self.module)

    @cached_property
    def summed(self) -> frozenset[str]:
        """See `umbel.models.hooks.Hooks`."""
        return frozenset(self.hooks.summed_parameters)

    @cached_property
    def decays(self) -> dict[str, NDArray[np.float32]]:
        """See `umbel.models.hooks.Hooks`."""
        return {name: np.asarray(value, np.float32) for name, value in self.hooks.decays.items()}

    @cached_property
    def num_parameters(self) -> int:
        """Number of shared parameters, the papers' n."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    @cached_property
    def linear(self) -> bool:
        """Whether the model is one dense layer with drawn weights, and nothing else in it is trained."""
        trained = [layer for layer in self.module.modules() if layer._parameters]
        plain = type(self.module) is nn.Sequential and [type(layer) for layer in trained] == [nn.Linear]
        return plain and not (self.pretrained or self.frozen or self.local)

    @cached_property
    def batch_dependent(self) -> bool:
        """Whether a row's outputs in training depend on the other rows of its batch, as in batch normalisation."""
        return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in self._network.changing)

    @cached_property
    def convolves(self) -> bool:
        """Whether a layer is a convolution."""
        return any(isinstance(layer, nn.modules.conv._ConvNd) for layer in self.module.modules())

    @cached_property
    def local_statistics(self) -> bool:
        """Whether all local parameters are running statistics of batch normalisation, which training does not read."""
        statistics = {
            _inside(prefix, name)
            for prefix, layer in _with_statistics(self.module)
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer in self._network.changing
            for name in _STATISTICS
        }
        return bool(self.local_shapes) and self.local_shapes.keys() <= statistics

    @contextmanager
    def last_statistics(self) -> Iterator[None]:
        """Have running statistics be those of the last rows that a layer sees in training, and of no rows before."""
        layers: list[Any] = [layer for _, layer in _with_statistics(self.module) if layer.momentum != 0]
        momenta = [layer.momentum for layer in layers]
        try:
            for layer in layers:
                layer.momentum = 1.0
            yield
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum

    def apply(self, parameters: Parameters, inputs: Tensor, training: bool = False) -> Tensor:
        """Return the outputs ``(batch, ...)`` for inputs ``(batch, *row shape)`` with the given parameters.

        Frozen parameters may be left out. In training, dropout is on, batch statistics are used, and the buffers among
        the parameters change.
        """
        if self.module.training is not training:
            for layer in self._network.changing:
                layer.training = training
        outputs = functional_call(self.module, parameters, (inputs,))
        # Models of Hugging Face's transformers return a record.
        found: Tensor = getattr(outputs, "logits", outputs)
        return found

    def initial(self, seed: int) -> Arrays:
        """Draw initial shared parameters."""
        return self._values(self.module if seed == _FROZEN_SEED else self._build(seed), Kind.SHARED)

    def initial_local(self, generators: Sequence[np.random.Generator]) -> Arrays:
        """Draw initial local parameters, each (clients, \\*shape), from one generator for each client."""
        if not self.local_shapes:
            return {}
        if self.local_statistics:  # which are no draw
            start = self._values(self.module, Kind.LOCAL)
            return {name: np.repeat(value[None], len(generators), axis=0) for name, value in start.items()}
        draw = self.hooks.draw_local or self._draw_local
        drawn = [draw(generators[i]) for i in range(len(generators))]
        return {
            name: np.array([one[name] for one in drawn], np.float32).reshape(len(drawn), *shape)
            for name, shape in self.local_shapes.items()
        }

    def _draw_local(self, generator: np.random.Generator) -> Arrays:
        return self._values(self._build(int(generator.integers(2**63))), Kind.LOCAL)

    def _build(self, seed: int) -> nn.Module:
        """Build the network. PyTorch's initialisers use only the global generator, whose state is restored
        afterwards."""
        with torch.random.fork_rng(devices=[]):
            # `torch.manual_seed` also seeds accelerators, and before their first use it stores a stack trace for each
            # call.
            torch.default_generator.manual_seed(seed)
            network = self.network()
        state = _tensors(network)
        with torch.no_grad():
            for name, value in self._starts(network).items():
                state[name].copy_(value)
        return network

    def _starts(self, network: nn.Module) -> Parameters:
        """Return the weights in the file that have the same shape in the network."""
        if not self._weights:
            return {}
        shapes = {name: value.shape for name, value in _tensors(network).items()}
        return {name: value for name, value in self._weights.items() if shapes.get(name) == value.shape}

    def _shapes(self, kind: Kind) -> dict[str, tuple[int, ...]]:
        state = _tensors(self.module)
        return {name: tuple(state[name].shape) for name, own in self.kinds.items() if own is kind}

    def _values(self, network: nn.Module, kind: Kind) -> Arrays:
        state = _tensors(network)
        return {name: state[name].detach().numpy().copy() for name, own in self.kinds.items() if own is kind}


def check(model: Model) -> None:
    """Raise `ModelError` for a network that umbel cannot train; the text names the layer or parameter and the fix."""
    module, name = model.module, model.name
    values = dict(module.named_parameters())
    if not values:
        raise ModelError(
            f"model {name!r} has no parameters, so there is nothing to train; name another", code="model.no-parameters"
        )
    if lazy := [key for key, value in _tensors(module).items() if is_lazy(value)]:
        wrong = f"parameters {lazy} of model {name!r} have no shape before its first rows"
        raise ModelError(f"{wrong}; use layers that are not lazy", code="model.lazy")
    if odd := [key for key, value in values.items() if value.dtype != torch.float32]:
        raise ModelError(f"model {name!r} has parameters that are not float32: {odd}", code="model.not-float")
    every = [one for names in model.names.values() for one in names]
    for kind, patterns in (("frozen", model.frozen), ("local", model.local)):
        if idle := [pattern for pattern in patterns if not any(fnmatchcase(key, pattern) for key in every)]:
            wrong = f"{kind} = {idle[0]!r} matches no parameter of model {name!r}"
            raise ModelError(f"{wrong}; it has {', '.join(every)}", code="model.no-match")
    frozen = {key for key, names in model.names.items() if _matches(names, model.frozen)}
    if both := [key for key, names in model.names.items() if key in frozen and _matches(names, model.local)]:
        wrong = f"parameters {both} of model {name!r} are both frozen and local"
        raise ModelError(f"{wrong}; choose one", code="model.two-kinds")
    if model.pretrained:
        found = model._starts(module)
        missing = [key for key, names in model.names.items() if not found.keys() & {*names}]
        if not found or (lost := [key for key in missing if key in model.frozen_values and key in values]):
            none = f"{f'frozen parameters {lost}' if found else 'parameters'} of model {name!r} in the right shape"
            wrong = f"pretrained = {model.pretrained!r} has none of the {none}"
            raise ModelError(f"{wrong}; the model has {', '.join(model.names)}", code="model.pretrained")
        log(INFO, "Model %s starts from %s, except for %s", name, model.pretrained, ", ".join(missing) or "nothing")
    if not model.shapes:
        fix = f"let frozen and local match fewer of {', '.join(every)}"
        raise ModelError(f"model {name!r} has no shared parameters left; {fix}", code="model.nothing-shared")


def stamp_of(name: str) -> tuple[int, ...]:
    """Return the size and the time of the file of `find_weights`; nothing without one."""
    path = _path_of(name)
    if not path.is_file():
        return ()
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _path_of(name: str) -> Path:
    return umbel_home() / "models" / Path(name).expanduser()


def find_weights(name: str) -> Path:
    """Return the file for a name, which is an absolute path or lies in ``$UMBEL_HOME/models``; else `ModelError`."""
    path = _path_of(name)
    if not path.is_file():
        raise ModelError(f"pretrained = {name!r}: there is no file {path}; put it there", code="model.pretrained")
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of a state dict from ``torch.save``, without running code in it.

    `ModelError` for any other file.
    """
    try:
        if path.suffix == ".safetensors":
            found: Any = safetensors.torch.load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file may hold anything
        told = " ".join(str(error).split())[:200]
        raise ModelError(f"{path} cannot be read as weights: {told}", code="model.pretrained") from error
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ModelError(f"{path} does not hold a state dict; save model.state_dict()", code="model.pretrained")
    return dict(found)


def _tensors(network: nn.Module) -> Parameters:
    """Return parameters and buffers under each of their names."""
    return dict(network.named_parameters(remove_duplicate=False)) | dict(network.named_buffers(remove_duplicate=False))


def _names(network: nn.Module) -> dict[str, tuple[str, ...]]:
    tensors = _tensors(network)
    # Buffers outside the state dict come last.
    ordered = [name for name in network.state_dict() if name in tensors]
    ordered += [name for name in tensors if name not in {*ordered}]
    names: dict[int, tuple[str, ...]] = {}
    for name in ordered:
        names[id(tensors[name])] = (*names.get(id(tensors[name]), ()), name)
    return {every[0]: every for every in names.values()}


def _kinds(network: nn.Module, frozen: Sequence[str], local: Sequence[str]) -> dict[str, Kind]:
    """Return the kind of each parameter and buffer, given patterns on the names of frozen and of local ones."""
    own = Hooks.of(network).local_parameters
    trained = {name for name, value in network.named_parameters() if value.requires_grad}
    buffers = {name for name, _ in network.named_buffers()}
    statistics = {
        _inside(prefix, name) for prefix, layer in _with_statistics(network) if layer.training for name in _STATISTICS
    }
    kinds = {}
    for name, names in _names(network).items():
        if _matches(names, own):
            kinds[name] = Kind.LOCAL
        elif not {*names} & (trained | buffers) or _matches(names, frozen):
            kinds[name] = Kind.FROZEN
        elif _matches(names, local) or name in statistics:
            kinds[name] = Kind.LOCAL
        else:
            kinds[name] = Kind.FROZEN if name in buffers else Kind.SHARED
    return kinds


def _inside(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _with_statistics(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that keep running statistics, with their names."""
    for name, layer in network.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.running_mean is not None:
            yield name, layer


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
