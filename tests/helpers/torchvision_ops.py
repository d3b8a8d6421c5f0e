"""Lets torchvision be imported beside a PyTorch that its compiled operators do not fit. Import this first.

torchvision says at import how its operators behave, and fails for one that was not loaded. Here each has a
name and nothing else; networks for classification call none.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import torch

_LIBRARIES = []  # an operator lives as long as the library that it is in


def _name_operators() -> None:
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent
    try:
        for file in folder.glob("_C*.so"):
            torch.ops.load_library(file)
            return  # they fit
    except OSError:
        pass
    said = (folder / "_meta_registrations.py").read_text(encoding="utf-8")
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted({*re.findall(r'(?:torchvision::|register_meta\(")(\w+)', said)}):
        library.define(f"{name}(Tensor rows) -> Tensor")
    _LIBRARIES.append(library)


_name_operators()
