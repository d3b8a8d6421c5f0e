"""Whether PyTorch and torchvision were built for the same device.

pip installs a CPU build of one beside a CUDA build of the other without a warning. Then torchvision cannot be imported,
nor can transformers or peft, which import it.
"""

from __future__ import annotations

import re
from importlib.machinery import PathFinder
from pathlib import Path

INDEX = "https://download.pytorch.org/whl"
"""The index that holds the builds, each in a folder of its name: ``cpu``, ``cu130``."""


def version(library: str) -> str:
    """Return the version of a library of PyTorch's with its build, as ``2.13.0+cpu``; empty where there is none.

    It is read from a file: the library may be the one that cannot be imported.
    """
    spec = PathFinder.find_spec(library)
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return ""
    found = re.search(r"^__version__\s*=\s*['\"](.+?)['\"]", file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def advice() -> str:
    """Return in one line how to mend builds that do not fit each other; empty where they do."""
    torch, (release, _, other) = version("torch"), version("torchvision").partition("+")
    build = torch.partition("+")[2]
    if not release or build == other:
        return ""
    index = f" --index-url {INDEX}/{build}" if build else ""
    return (
        f"torch is built for {build or 'the default device'} and torchvision for {other or 'the default device'}, so "
        "neither torchvision nor transformers nor peft can be imported: "
        f"pip install --force-reinstall --no-deps torchvision=={release}{index}"
    )


def hint(error: BaseException) -> str:
    """Return `advice` for an import that failed in torchvision; empty for any other error."""
    seen: list[BaseException] = []
    while error not in seen:
        if "torchvision" in str(error):
            return advice()
        seen.append(error)
        error = error.__cause__ or error.__context__ or error
    return ""
