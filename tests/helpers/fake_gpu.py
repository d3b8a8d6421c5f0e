"""A GPU that is not there: tensors that say they are on one, and whose numbers are on the CPU.

PyTorch's fake tensors hold no numbers, and its CPU build can neither send them to a GPU nor take their gradient. Here
everything is computed on the CPU, so what comes back can be compared with what the CPU gives; but where tensors of
both meet it is an error, as on a GPU. An index or a mask must be there as well: PyTorch would send it by itself, and
wait for it each time.

Its memory is what tensors there hold. What it computes otherwise, and how fast, does not show here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
_INSIDE = torch.device("meta")
"""Where PyTorch itself believes the GPU's tensors to be: of a device that it was not built for it takes no gradient."""
_COPIES = ("aten::_to_copy", "aten::copy_")
_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")
"""Operations for whose result the host waits."""
_MASKED = ("aten::index", "aten::index_put_", "aten::index_put")
"""And these if they are given a mask."""


class _Storage:
    """Memory on the GPU, as long as a tensor holds it."""

    def __init__(self, numbers: Tensor) -> None:
        self.place, self.size = numbers.untyped_storage().data_ptr(), numbers.untyped_storage().nbytes()


class OnGpu(Tensor):
    """A tensor on the GPU."""

    numbers: Tensor
    storage_there: _Storage

    @staticmethod
    def __new__(cls, numbers: Tensor) -> OnGpu:
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls, numbers.shape, numbers.stride(), numbers.storage_offset(), dtype=numbers.dtype, device=_INSIDE
        )
        made.numbers, made.storage_there = numbers, _Storage(numbers)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The GPU, for whoever asks."""
        return GPU

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a tensor on a GPU that is no longer there: `fake_gpu` was left")


class _OnCpu(torch.Generator):
    """A generator that is asked for on the GPU, and draws on the CPU."""

    def __new__(cls, device: torch.device = CPU) -> _OnCpu:
        return super().__new__(cls, CPU)


class _Sent(TorchFunctionMode):
    """Has what is asked for on the GPU be made where PyTorch believes it to be."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inside(asked: torch.device) -> torch.device:
            return _INSIDE if asked.type == "cuda" else asked

        kwargs = kwargs or {}
        if any(isinstance(one, torch.device) for one in (*args, *kwargs.values())):
            args, kwargs = tree_map_only(torch.device, inside, (args, kwargs))
        return func(*args, **kwargs)


class _Computed(TorchDispatchMode):
    """Computes each operation on the CPU, and raises if its tensors are in two places or do not fit.

    It counts in bytes: the `memory` there is, the `peak` that was held at once, and those `left` each time that what is
    not needed was to be freed. And it counts what the host gives and takes: copies that were `sent` there, and what it
    `fetched`, for each of which it waits until the GPU has done all before.
    """

    def __init__(self, memory: float) -> None:
        super().__init__()
        self.memory, self.peak = memory, 0
        self.left: list[int] = []
        self.sent, self.fetched = 0, 0
        self._held: WeakSet[_Storage] = WeakSet()

    @property
    def used(self) -> int:
        """Bytes that are held."""
        return sum({one.place: one.size for one in self._held}.values())

    def _put(self, numbers: Tensor) -> OnGpu:
        made = OnGpu(numbers)
        self._held.add(made.storage_there)
        used = self.used
        if used > self.memory:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {used} bytes of {self.memory}")
        self.peak = max(self.peak, used)
        return made

    def _count(self, name: str, args: Any, given: list[Tensor], there: bool) -> None:
        on_gpu = [isinstance(one, OnGpu) for one in given]
        if name in _COPIES:
            source = on_gpu[-1] if name == "aten::copy_" else on_gpu[0]
            self.sent += there and not source
            self.fetched += source and not there
        elif any(on_gpu):
            masked = name in _MASKED and any(one.dtype == torch.bool for one in tree_leaves(args[1]) if one is not None)
            self.fetched += name in _WAITS or masked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose():  # in inference mode, what is made of several operations
            with self:
                return func.decompose(*args, **kwargs)
        name = func._schema.name
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        there = any(isinstance(one, OnGpu) for one in given)
        # Of a single number PyTorch does not mind where it is.
        here = any(not isinstance(one, OnGpu) and one.ndim for one in given)
        if there and here and name not in _COPIES:
            raise RuntimeError(f"expected all tensors to be on the same device, but {name} got some of cuda and of cpu")
        numbers, options = tree_map_only(OnGpu, lambda one: one.numbers, (args, kwargs)) if there else (args, kwargs)
        if name == "aten::copy_":
            there = isinstance(args[0], OnGpu)
        if (asked := kwargs.get("device")) is not None:
            there, options = asked == _INSIDE, options | {"device": CPU}
        if name == "aten::_pin_memory":
            return numbers[0].clone()
        self._count(name, args, given, there)
        if not there:
            return func(*numbers, **options)
        with torch.inference_mode(False):  # in which there are no views of what was made before
            found = tree_map_only(Tensor, self._put, func(*numbers, **options))
            return return_and_correct_aliasing(func, args, kwargs, found)


@contextmanager
def fake_gpu(memory: float = math.inf, said_free: int = 1 << 30) -> Iterator[_Computed]:
    """Have a GPU in the block, of which ``torch.cuda`` knows as well, and which says that so many bytes are free."""
    with pytest.MonkeyPatch.context() as patch, _Sent(), _Computed(memory) as gpu:
        for name, answer in {
            "is_available": lambda: True,
            "get_device_properties": lambda _: SimpleNamespace(total_memory=1 << 32),
            "mem_get_info": lambda _: (said_free, 1 << 32),
            "memory_reserved": lambda _: 0,
            "memory_allocated": lambda _: 0,
            "empty_cache": lambda: gpu.left.append(gpu.used),
            "synchronize": lambda _=None: None,
            "reset_peak_memory_stats": lambda: setattr(gpu, "peak", 0),
            "max_memory_allocated": lambda: gpu.peak,
            # Its draws are the CPU's.
            "get_rng_state": lambda _: torch.get_rng_state(),
            "set_rng_state": lambda state, _: torch.set_rng_state(state),
        }.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch, "Generator", _OnCpu)
        # Built for CUDA, PyTorch would ask the GPU for its stream.
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        yield gpu
