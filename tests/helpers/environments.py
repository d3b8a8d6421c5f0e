"""Environments with a built umbel in them, and of all else what this one has."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.helpers.sources import ROOT


def build(target: str, out: Path, source: Path = ROOT) -> Path:
    """Build what ``pip`` builds, from a checkout or an unpacked sdist, and return the file.

    Parameters
    ----------
    target : str
        "wheel", "sdist" or "editable".
    out : Path
        An empty folder.
    source : Path
    """
    out.mkdir(parents=True)
    code = f"from hatchling.build import build_{target} as build; print(build({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True)
    return out / done.stdout.splitlines()[-1]


def install(python: Path, wheel: Path) -> None:
    """Install a wheel alone into the environment of a Python."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)


def environment(folder: Path, wheel: Path) -> Path:
    """Make an environment with a wheel of umbel's in it, and return its Python.

    It finds all other packages where this environment has them, but not the umbel that is editable there.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site_packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # Folders that a .pth file names are searched for modules, and not for further .pth files.
    (site_packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    install(python, wheel)
    here = Path(sysconfig.get_path("scripts"))
    for script in (*here.glob("flwr*"), *here.glob("flower-*")):
        copy = folder / "bin" / script.name
        copy.write_text(script.read_text().replace(str(here), str(copy.parent)))
        copy.chmod(0o755)
    return python
