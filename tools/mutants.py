"""Check that `make test` notices plausible mistakes in what guards privacy: python tools/mutants.py, or some NAMES.

`mutants.toml` beside it lists the mistakes. Each is made in a copy of the tree, where the tests named for it run. It is
killed if one of them fails. One that survives shows a promise that no test of the first tier holds umbel to.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "mutants.toml"
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "_build", "build", "dist")
_FAILED = re.compile(r"^FAILED ([^\s\[]+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A mistake in the code.

    Attributes
    ----------
    name : str
        What is wrong with it.
    file : str
        Path in the tree.
    old, new : str
        A text that occurs once in the file, and the one in its place.
    tests : list of str
        Tests of the first tier, as FILE::TEST, of which one has to fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def made_in(self, text: str) -> str:
        """Return a file's text with the mistake in it; raise `ValueError` unless the text is there exactly once."""
        if (times := text.count(self.old)) != 1 or self.new == self.old:
            raise ValueError(f"{self.name}: {self.file} has its old text {times} times, not once, or it is the new one")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """Return all mutants of the list."""
    return [Mutant(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]]


class Copy:
    """A copy of the tree, from which its tests and the processes that they start import umbel."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.copytree(ROOT, path, symlinks=True, ignore=_LEFT_OUT)
        # "CI" makes property tests draw the same examples each time.
        self.environment = os.environ | {"PYTHONPATH": str(path), "CI": "1"}
        found = self._python("-c", "import umbel; print(umbel.__file__)", folder=path.parent).stdout.strip()
        if Path(found) != path / "umbel" / "__init__.py":
            raise RuntimeError(f"tests would import umbel from {found}, not from its copy in {path}")

    def test(self, tests: Iterable[str]) -> str:
        """Run tests, and return the first that fails, or an empty name; raise `RuntimeError` if they cannot be run."""
        options = ("-x", "-q", "-m", "not rest", "-p", "no:cacheprovider", "--timeout", "600")
        done = self._python("-m", "pytest", *options, *tests, folder=self.path)
        failed = _FAILED.findall(done.stdout)
        if done.returncode not in (0, 1) or bool(failed) != bool(done.returncode):
            raise RuntimeError("\n".join([*(done.stdout + done.stderr).splitlines()[-20:], "the tests cannot be run"]))
        return failed[0] if failed else ""

    def killer_of(self, mutant: Mutant) -> str:
        """Make a mistake, return the first of its tests that fails, if one does, and undo it."""
        original, file = ROOT / mutant.file, self.path / mutant.file
        file.write_text(mutant.made_in(original.read_text(encoding="utf-8")), encoding="utf-8")
        try:
            return self.test(mutant.tests)
        finally:
            shutil.copy2(original, file)  # with its time, by which Python tells whether it is compiled

    def _python(self, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True)


def main(names: list[str]) -> int:
    """Print which test kills each mutant; return 1 if one survives, or if the tests fail without any."""
    chosen = [mutant for mutant in mutants() if not names or mutant.name in names]
    if unknown := {*names} - {mutant.name for mutant in chosen}:
        raise SystemExit(f"no such mutant: {', '.join(sorted(unknown))}")
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder) / "tree")
        if failed := copy.test(sorted({test for mutant in chosen for test in mutant.tests})):
            print(f"without any mutant, this test fails: {failed}")
            return 1
        for mutant in chosen:
            killer = copy.killer_of(mutant)
            killed += bool(killer)
            print(f"killed: {mutant.name}\n    by {killer}" if killer else f"SURVIVED: {mutant.name}", flush=True)
    print(f"{killed} of {len(chosen)} mutants were killed")
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
