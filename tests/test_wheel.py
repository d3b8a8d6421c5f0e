"""What is installed: one name, the same by each way of installing, and whole outside a checkout."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import tomli_w
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.flower import simulation
from tests.deploy.conftest import SHORT, write_site
from tests.deploy.processes import Deployment
from tests.helpers.paper import ACCEPTED, PAPER
from tests.helpers.ports import free_port
from tests.helpers.sources import LAB, ROOT, packages_imported
from umbel.client.bundle import Bundle
from umbel.protocol.flower import build_bundle

pytestmark = pytest.mark.rest

LINKS = ("client", "datasets", "privacy", "server", "strategies")
OTHERS = ("benchmarks", "configs", "hatch_build", "models", "protocol", "simulation", "tests", "tools")
"""What lies beside ``umbel`` in a checkout, or was installed once."""
PROJECT_OF_UMBEL = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def build(target: str, out: Path, source: Path = ROOT) -> Path:
    """Build a wheel, an sdist or an editable one, from a checkout or an unpacked sdist, and return the file."""
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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel, an editable one, an sdist, and a wheel made of that."""
    folder = tmp_path_factory.mktemp("built")
    made = {target: build(target, folder / target) for target in ("wheel", "editable", "sdist")}
    with tarfile.open(made["sdist"]) as archive:
        archive.extractall(folder, filter="data")
    made["wheel of sdist"] = build("wheel", folder / "again", folder / made["sdist"].name.removesuffix(".tar.gz"))
    return made


@pytest.fixture(scope="module")
def python(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel in it."""
    return environment(tmp_path_factory.mktemp("wheel") / "environment", built["wheel"])


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_wheel_of_the_sdist_is_that_of_the_checkout(built: dict[str, Path]) -> None:
    there = contents(built["wheel"])
    assert contents(built["wheel of sdist"]) == there
    assert {name.partition("/")[0] for name in there} == {
        "umbel",
        f"umbel-{built['wheel'].name.split('-')[1]}.dist-info",
    }
    shipped = {f"umbel/datasets/{name}.json" for name in ("hospital", "hospital-services", "preferences", "synthetic")}
    assert {"umbel/py.typed", "umbel/deploy/gpu.yml"} | shipped <= there.keys()
    [notice] = [text for name, text in there.items() if name.endswith("/NOTICE")]
    assert b"GeoNames" in notice


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_umbel_is_importable_and_nothing_else(built: dict[str, Path], python: Path, kind: str, tmp_path: Path) -> None:
    if kind == "editable":
        python = environment(tmp_path / "environment", built[kind])
    names = [*LINKS, *OTHERS, "umbel"]
    code = f"from importlib.util import find_spec; print([name for name in {names} if find_spec(name)])"
    assert output(python, "-c", code, cwd=tmp_path) == "['umbel']"
    home = {"wheel": python.parents[1], "editable": ROOT / "umbel"}[kind]
    assert Path(output(python, "-c", "import umbel; print(umbel.__file__)", cwd=tmp_path)).is_relative_to(home)


def test_an_index_would_take_what_it_says_of_itself(built: dict[str, Path]) -> None:
    there = contents(built["wheel"])
    [text] = [text for name, text in there.items() if name.endswith("/METADATA")]
    said = Metadata.from_email(text, validate=False)  # of a version newer than this library
    assert said.description_content_type == "text/markdown"
    assert said.requires_python == PROJECT_OF_UMBEL["requires-python"]
    assert set(said.provides_extra or ()) == PROJECT_OF_UMBEL["optional-dependencies"].keys()
    configs = {f"umbel/_app/configs/{file.name}" for file in (ROOT / "configs").iterdir()}
    recipes = {f"umbel/datasets/{file.name}" for file in (ROOT / "umbel" / "datasets").glob("*.py")}
    assert configs | recipes | {"umbel/_app/LICENSE", "umbel/_app/pyproject.toml"} <= there.keys()


TABLE = "site,age,cost\n" + "".join(
    f"{site},{age},{10 * age + 5 * n}\n" for n, site in enumerate("abcdefghij") for age in range(30, 50)
)


@pytest.mark.slow
def test_the_demo_an_own_table_and_a_project_run_in_an_empty_folder(
    python: Path, tmp_path: Path, umbel_home: Path
) -> None:
    umbel = python.with_name("umbel")
    demo = output(umbel, "demo", cwd=tmp_path)
    assert "Guarantee, between any two data sets of a client: pure epsilon 4" in demo
    (tmp_path / "visits.csv").write_text(TABLE)
    output(umbel, "data", "import", "visits.csv", "--client", "site", "--target", "cost", cwd=tmp_path)
    output(umbel, "run", "visits", "rounds=2", cwd=tmp_path)
    output(umbel, "init", "my-study", cwd=tmp_path)
    output(umbel, "run", "pyproject.toml", "rounds=2", "--no-baselines", cwd=tmp_path / "my-study")
    assert len(list((umbel_home / "runs").iterdir())) == 5


def test_its_bundle_is_that_of_the_checkout(python: Path, tmp_path: Path) -> None:
    """A site compares them: it may have installed umbel in another way than the server."""
    assert output(python, "-m", "umbel", "bundle", "--out", "app", cwd=tmp_path) == str(Bundle.installed())
    assert build_bundle(tmp_path / "app") == build_bundle(ROOT)


def test_recipes_configurations_and_datasets_are_found(python: Path, tmp_path: Path) -> None:
    output(python, "-m", "umbel", "data", "make", "synthetic", "--out", "made.json", cwd=tmp_path)
    assert (tmp_path / "made.json").exists()
    code = "from umbel.simulation.start import read_values; print(read_values('hospital')['dataset'])"
    assert output(python, "-c", code, cwd=tmp_path) == "hospital"
    for name in ("hospital", "hospital-services"):
        path = Path(output(python, "-m", "umbel", "data", "show", name, cwd=tmp_path).splitlines()[-1])
        assert path.is_relative_to(python.parents[1])


@pytest.mark.slow
def test_the_lab_comes_as_a_package_of_its_own(built: dict[str, Path], tmp_path: Path) -> None:
    """Its commands stand beside umbel's once it is there; until then a hint names it."""
    wheel = build("wheel", tmp_path / "lab", ROOT / "lab")
    assert {name.partition("/")[0].partition("-")[0] for name in contents(wheel)} == {"umbel_lab"}
    python = environment(tmp_path / "environment", built["wheel"])
    without = [str(python), "-m", "umbel", "audit", "--help"]
    told = subprocess.run(without, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "[config.not-installed]" in told.stderr
    install(python, wheel)
    for name in ("attack", "audit", "experiment"):
        assert f"umbel {name}" in output(python, "-m", "umbel", name, "--help", cwd=tmp_path)
    assert "experiment" in output(python, "-m", "umbel", "--help", cwd=tmp_path)


@cache
def installed_with(*requirements: str) -> set[str]:
    """Return the distributions that come with some, by what those say that are installed here."""
    found: set[str] = set()
    waiting = [Requirement(one) for one in requirements]
    while waiting:
        one = waiting.pop()
        key = f"{canonicalize_name(one.name)}[{','.join(sorted(one.extras))}]"
        if key not in found:
            found |= {key, canonicalize_name(one.name)}
            needed = map(Requirement, metadata.requires(one.name) or [])
            extras = [*one.extras, ""]
            waiting += [
                more for more in needed if not more.marker or any(more.marker.evaluate({"extra": e}) for e in extras)
            ]
    return found


def test_what_umbel_imports_comes_with_it() -> None:
    """Or with the extra of a room; libraries of models and trackers are the user's to install."""
    extras, homes = PROJECT_OF_UMBEL["optional-dependencies"], metadata.packages_distributions()
    optional = {"mlflow", "nvflare", "onnx", "onnxruntime", "onnxscript"}
    for room in [*(ROOT / "umbel").iterdir(), ROOT / LAB]:
        more = {"datasets": extras["recipes"]}.get(room.name, [])
        there = installed_with(*PROJECT_OF_UMBEL["dependencies"], *more)
        scripts = [*(ROOT / "umbel" / "datasets").glob("*.py"), *(ROOT / LAB / "datasets").glob("*.py")]
        own = {"."} | ({file.stem for file in scripts} if room.name in ("datasets", "umbel_lab") else set())
        for file in room.rglob("*.py") if room.is_dir() else [room]:
            for name in packages_imported(file) - sys.stdlib_module_names - {"umbel", "umbel_lab", *optional, *own}:
                assert there & {canonicalize_name(home) for home in homes[name]}, f"{file} imports {name}"


PROXIED, NO_ONE = ("http_proxy", "https_proxy"), "http://127.0.0.1:9"
"""A proxy for all addresses, as many organisations have, which cannot reach this machine's loopback."""
RUDE = "raise RuntimeError('umbel imported the module of another project')"
MODELS = """
import datasets
import torch
from utils import width

assert datasets.FAKE, "Hugging Face's"


def net():
    return torch.nn.Linear(2, width, bias=False)
"""
WATCH = """
from umbel import Callback


class Watch(Callback):
    def after_exchange(self, round, stages):
        (self.run.folder.path / "seen.txt").touch()
"""
SCRIPT = """
import umbel

print(umbel.run(model="models:net", loss="mse", rounds=1, restarts=1, clients_per_round=5).outcome)
"""
PROJECT = {
    "project": {
        "name": "hospital-study",
        "version": "1.0.0",
        "license": {"file": "LICENSE"},
        "dependencies": ["flwr[simulation]>=1.42,<1.43", "umbel"],
    },
    "tool": {
        "flwr": {
            "app": {
                "publisher": "somebody",
                "fab-format-version": 1,
                "flwr-version-target": "1.42.0",
                "fab-include": ["**/*.py", "LICENSE"],
                "components": {"serverapp": "umbel.server.app:app", "clientapp": "umbel.client.app:app"},
                "config": PAPER | {
                    "dataset": "synthetic", "model": "models:net", "loss": "mse", "rounds": 1, "restarts": 1,
                    "clients-per-round": 5, "observers": "", "wait": "nodes=1", "seed": 0,
                },
            }
        }
    },
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, python: Path) -> Path:
    """A Flower app that depends on umbel, with names that umbel's own rooms have, beside Hugging Face's library."""
    library = next((python.parents[1] / "lib").glob("*/site-packages")) / "datasets"
    library.mkdir(exist_ok=True)
    (library / "__init__.py").write_text("FAKE = True\n")
    folder = tmp_path / "hospital-study"
    for name in ("server", "privacy", "simulation"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(RUDE)
    for name in ("protocol", "strategies", "data"):
        (folder / f"{name}.py").write_text(RUDE)
    (folder / "datasets").mkdir()
    (folder / "datasets" / "download.py").write_text(RUDE)
    (folder / "client.py").write_text("from umbel.client.app import app as app\n")
    (folder / "models.py").write_text(MODELS)
    (folder / "watch.py").write_text(WATCH)
    (folder / "utils.py").write_text("width = 1\n")
    (folder / "study.py").write_text(SCRIPT)
    (folder / "LICENSE").touch()
    (folder / "pyproject.toml").write_text(tomli_w.dumps(PROJECT))
    return folder


@pytest.mark.slow
def test_a_project_whose_names_are_those_of_umbels_rooms_runs_it_by_command_script_and_flwr_run(
    project: Path, python: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scheme in PROXIED:
        monkeypatch.setenv(scheme, NO_ONE)
    asked = ["model=models:net", "loss=mse", "rounds=1", "restarts=1", "clients-per-round=5", "observers=watch:Watch"]
    output(python.with_name("umbel"), "run", *asked, cwd=project)
    assert "its only round is done" in output(python, "study.py", cwd=project)
    programs = {"PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]), "UMBEL_HOME": str(umbel_home)}
    with simulation(programs, free_port()) as flower:
        flower.run(project, {"observers": "watch:Watch"}, 1)
    runs = sorted((umbel_home / "runs").iterdir())
    assert len(runs) == 3
    assert [(run / "seen.txt").exists() for run in runs] == [True, False, True]
    assert all((run / "outcome.json").exists() for run in runs)


@pytest.mark.slow
def test_it_is_a_sites_own_app_beside_such_a_project(project: Path, python: Path, tmp_path: Path) -> None:
    """From the wheel, as is the server; the site's app is in a module of the project's that is called ``client``."""
    data = write_site(tmp_path / "data", 2.0)
    own = {"app": "client:app", "bundle": hashlib.sha256(build_bundle(project)).hexdigest(), "data-path": data}
    within = ["env", f"--chdir={project}", *(f"{scheme}={NO_ONE}" for scheme in PROXIED)]
    with Deployment(tmp_path / "deployment", python=python) as deployment:
        node = deployment.start_node("site", within=within, **own, **ACCEPTED, role="split")
        deployment.wait_until_online()
        run = deployment.submit(app=project, **SHORT | {"wait": "nodes=1"}, rounds=1, clients_per_round=3)
        assert deployment.wait(run) == "finished:completed"
        assert node.rounds_paid(run) == [1]


def output(program: Path, *words: str, cwd: Path) -> str:
    """Return what a program prints, away from the checkout and without what the environment says of Python."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(program), *words], cwd=cwd, env=inherited, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()
