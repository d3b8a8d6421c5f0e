"""What the tests share: the app's own defaults, and a home for data and runs."""

from __future__ import annotations

import gc
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.examples import examples

# How long an example takes says how busy the machine is. Elsewhere than in CI each run draws other examples.
settings.register_profile(
    "umbel",
    max_examples=examples(50),
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("umbel")

# Before PyTorch is imported, and for processes that tests start: threads beyond the cores do nothing but wait, busily.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HOMES = itertools.count()


REST = re.compile(r"^pytestmark = (?:\[\s*)?pytest\.mark\.rest\b", re.MULTILINE)
"""What a module begins with whose tests are all of the rest."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module whose tests would all be deselected."""
    if config.option.markexpr != "not rest" or collection_path.suffix != ".py":
        return None
    return bool(REST.search(collection_path.read_text(encoding="utf-8"))) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with files that start processes: one of a minute at the end keeps the other worker waiting."""
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("rest")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what imports and collection made: it lives as long as the process."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def shared_homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What fixtures of a module, and processes that they start, write is in no user's home either."""
    folder = tmp_path_factory.mktemp("homes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UMBEL_HOME", str(folder / "umbel"))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        yield


@pytest.fixture(autouse=True)
def umbel_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty $UMBEL_HOME, so that no test reads or writes the user's; it is made by who writes there first."""
    home = tmp_path_factory.getbasetemp() / f"umbel-home-{next(HOMES)}"
    monkeypatch.setenv("UMBEL_HOME", str(home))
    monkeypatch.setenv("XDG_STATE_HOME", f"{home}-state")
    # The tests' own networks, which their datasets name.
    monkeypatch.setenv("UMBEL_TRUST", "tests.helpers.models")
    return home


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """The user's own, also after a command that sets another for its process."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(autouse=True, scope="session")
def flower_process() -> None:
    """Say who this process is, as Flower's own do: without that no Message can be made."""
    from umbel.protocol.flower import identify

    identify()


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute clients one by one: the bits do not depend on the number of nodes and clients."""
    from umbel.protocol.project import ENGINE

    monkeypatch.setenv(ENGINE, "loop")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread: sums have one order, and small networks do not wait for busy cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures of reports blank."""
    from tests.helpers.drawing import leave_blank

    leave_blank(monkeypatch)


@pytest.fixture
def run_config() -> dict[str, Any]:
    """The paper's run config, as Flower hands it to the app."""
    from tests.helpers.paper import paper_run

    return paper_run()
