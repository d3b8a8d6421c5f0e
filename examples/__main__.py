"""Run the examples, and draw their pictures into docs/pictures/gallery.

python -m examples
python -m examples table lora
"""

import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
PICTURES = HERE.parent / "docs" / "pictures" / "gallery"
OTHERS = ("__init__", "__main__", "algorithm")  # algorithm.py has no picture: it is the oracle of the tests
NAMES = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in OTHERS)


def draw(name, home):
    """Run an example where its picture belongs; its runs lie in a folder `home`."""
    own = {"MPLBACKEND": "agg", "MATPLOTLIBRC": str(HERE / "matplotlibrc"), "SOURCE_DATE_EPOCH": "0"}
    environment = os.environ | own | {"UMBEL_HOME": home, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, HERE / f"{name}.py"], cwd=PICTURES, env=environment, check=True, capture_output=True
    )


def draw_site(folder):
    """Run examples/site.sh, and draw the terminal."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PATH": path, "UMBEL_HOME": folder, "FOLDER": folder, "COLUMNS": "110"}
    done = subprocess.run(["sh", HERE / "site.sh"], env=environment, check=True, capture_output=True, text=True)
    width = max(map(len, done.stdout.splitlines()))  # no terminal cuts the lines of a table
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(Text(done.stdout.rstrip()))
    console.save_svg(str(PICTURES / "site.svg"), title="sh examples/site.sh", unique_id="site")


def main(names):
    """Draw the pictures of some examples, or of all."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in names or [*NAMES, "site"]:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as home:
            draw_site(home) if name == "site" else draw(name, home)
        print(f"{name}.svg: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
