"""Install projects of a checkout into the environment whose Python runs this: by uv in seconds, or else by pip.

    .venv/bin/python tools/install.py ".[dev]" lab

Flower needs uv in any case. On Linux, the package index's own PyTorch brings gigabytes of CUDA, so a machine without an
NVIDIA GPU takes the CPU build where PyTorch's own index can be reached. ``TORCH=`` (empty) takes the package index's.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

PIP = [sys.executable, "-m", "pip", "install", "--constraint", "constraints.txt", "--no-compile"]
CPU = "https://download.pytorch.org/whl/cpu"
# What pip calls a setting, what uv calls it, and how uv parts several values.
SETTINGS = {
    "cert": ("SSL_CERT_FILE", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
}


def takes_cpu_build() -> bool:
    """Return whether PyTorch comes from its index for the CPU."""
    if os.environ.get("TORCH", "cpu") != "cpu" or sys.platform != "linux" or shutil.which("nvidia-smi"):
        return False
    try:
        with urlopen(f"{CPU}/torch/", timeout=10):
            return True
    except (URLError, OSError):
        print(f"{CPU} cannot be reached: PyTorch comes from the package index")
        return False


def settings_of_pip(listed: str) -> dict[str, str]:
    """Return what ``pip config list`` says of indexes, as uv's environment; what is set for uv itself wins."""
    found: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if (name := key.rpartition(".")[2]) in SETTINGS:
            variable, separator = SETTINGS[name]
            found[variable] = separator.join(ast.literal_eval(value).split())
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip's: the best version of any index
    return found | {name: value for name, value in os.environ.items() if name in {*found, "UV_INDEX_STRATEGY"}}


def editable(targets: Sequence[str]) -> list[str]:
    """Return the words by which uv and pip install projects where they are."""
    return [word for target in targets for word in ("--editable", target)]


def by_uv(targets: Sequence[str], cpu: bool) -> bool:
    """Install by uv, and return whether that worked."""
    own = Path(sys.executable).with_name("uv")
    uv = shutil.which("uv") or str(own)
    if not Path(uv).exists() and subprocess.run([*PIP, "--quiet", "uv"], check=False).returncode:
        return False
    config = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(config, capture_output=True, text=True, check=False)
    backend = ["--torch-backend", "cpu"] if cpu else []
    # It does not see that an editable install itself needs this.
    command = [uv, "pip", "install", "--python", sys.executable, *backend, *editable(targets), "editables"]
    environment = os.environ | settings_of_pip(listed.stdout)
    return not subprocess.run([*command, "--constraint", "constraints.txt"], env=environment, check=False).returncode


def by_pip(targets: Sequence[str], cpu: bool) -> bool:
    """Install by pip, and return whether that worked."""
    # Both have to come from one index: a CPU build of one does not fit a CUDA build of the other.
    builds = [*PIP, "--no-deps", "--extra-index-url", CPU, "torch", "torchvision"]
    commands: Sequence[Sequence[str]] = [*([builds] if cpu else []), [*PIP, *editable(targets)]]
    return not any(subprocess.run(command, check=False).returncode for command in commands)


if __name__ == "__main__":
    projects, cpu_build = sys.argv[1:], takes_cpu_build()
    sys.exit(None if by_uv(projects, cpu_build) or by_pip(projects, cpu_build) else 1)
