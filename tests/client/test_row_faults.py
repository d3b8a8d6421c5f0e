"""Where rows are protected, a release shows nothing of who failed, and nothing that meets every client is charged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from numpy.typing import NDArray

from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from tests.helpers.messages import asked, refused, releases, task_of
from tests.helpers.nodes import ask, serving
from tests.helpers.sites import own, simulated
from umbel.client import dp_sgd, node, trial
from umbel.client.cohort import Cohort
from umbel.client.local import LocalParameters
from umbel.client.node import Node
from umbel.client.trial import try_training
from umbel.privacy.channels import Place, load
from umbel.privacy.mechanisms.randomness import row_sources
from umbel.privacy.mechanisms.sampled_gaussian import most_drawn
from umbel.privacy.site.journal import Journal
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import ModelError, OutOfTime, Refused, SiteError
from umbel.protocol.release import ReleaseBy
from umbel.simulation.grid import InProcessGrid

FEW, MANY = 20, 300
"""Numbers of rows of a client; those of many fail."""
SIZES, INPUTS = [FEW, MANY, FEW], 6
ROWS: dict[str, Any] = {
    "noise_multiplier": 0.0, "clipping": "public", "clip_norm": 1e9, "local_epochs": 0, "local_steps": 2,
    "step_size": 1.0, "row_clip_norm": 1.0, "row_rate": 0.5, "row_batch": 1.0, "row_noise_multiplier": 1e5,
}  # fmt: skip
HEADED = "mlp inputs=6 hidden=3 outputs=1"
PLAIN = "linear inputs=6 outputs=1"
START = {"1.weight": np.zeros((1, 1, INPUTS), np.float32), "1.bias": np.zeros((1, 1), np.float32)}
Grid = Callable[..., InProcessGrid]


def open_site(
    folder: Path, run_config: dict[str, Any], sizes: list[int] = SIZES, model: str = PLAIN, **policy: Any
) -> InProcessGrid:
    """Open a site with clients of such sizes, whose rows are protected."""
    rows, local = np.tile(np.eye(INPUTS, dtype=np.float32)[:1], (sum(sizes), 1)), model == HEADED
    about = manifest(len(sizes), model=model, loss="mse", **({"local": "3.*"} if local else {}))
    protects: Any = {"protect": "rows", "budget": "inf", "row_budget": "1e6 delta=1e-5"}
    return serving(folder, run_config, about, rows, np.full(sum(sizes), 9, np.float32), sizes, **protects | policy)


def node_of(grid: InProcessGrid) -> Node:
    [context] = grid.contexts.values()
    return Node.of(context.node_config, context.run_config)


@pytest.fixture
def site(tmp_path: Path, run_config: dict[str, Any]) -> Grid:
    """Return what opens a site with a policy."""
    return partial(open_site, tmp_path, run_config)


def train(grid: InProcessGrid, start: Any = START, clients: int = len(SIZES), **changes: Any) -> Message:
    return ask(grid, asked(start, task_of(tuple(range(clients)), **ROWS | changes)))


def moved(reply: Message) -> NDArray[np.float64]:
    """Return how far each client's release is from the hypothesis."""
    every = [value.reshape(len(value), -1).astype(np.float64) for value in releases(reply).values()]
    return np.linalg.norm(np.concatenate(every, axis=1), axis=1)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, fault: str) -> Iterator[None]:
    """Let clients of many rows fail inside, at the start or in the middle of their training."""
    gather, sums, calls = Cohort.gather, dp_sgd._sums, []

    def no_memory(dataset: Any, clients: Any, device: Any) -> Cohort:
        found = gather(dataset, clients, device)
        if found.lengths.max() == MANY:
            raise MemoryError
        return found

    def no_time(gradients: Any, parameters: Any, cohort: Cohort, *others: Any) -> Any:
        calls.append(len(cohort.features))
        if len(cohort.features) == MANY and calls.count(MANY) == 2:
            raise OutOfTime("over", code="time.over")
        return sums(gradients, parameters, cohort, *others)

    with monkeypatch.context() as inside:
        if fault == "memory":
            inside.setattr(Cohort, "gather", no_memory)
        else:
            inside.setattr(dp_sgd, "_sums", no_time)
        yield


@pytest.mark.parametrize("fault", ["memory", "time"])
@pytest.mark.parametrize("k", [1, 2])
def test_a_client_that_fails_sends_what_a_client_without_rows_would_send(
    site: Grid, monkeypatch: pytest.MonkeyPatch, fault: str, k: int
) -> None:
    """Noise of 1e5 in each of two steps: whoever sent the bare hypothesis would be seen at once."""
    start = {name: np.repeat(value, k, axis=0) for name, value in START.items()}
    with failing(monkeypatch, fault):
        reply = train(site(), start, choice_epsilon=1.0 if k > 1 else 0.0)
    found = moved(reply)
    assert ((found > 1e4) & (found < 1e6)).all()


@pytest.mark.parametrize("step", [{"step_size": 1.0}, {"step_size": 1e-3}])
@pytest.mark.parametrize("options", [{}, {"optimizer": "adam"}, {"optimizer": "momentum"}])
def test_without_rows_each_step_is_its_noise_alone(
    run_config: dict[str, Any], site: Grid, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], step: Any
) -> None:
    run_config.update(options)
    with failing(monkeypatch, "memory"):
        ones = moved(train(site(), **step))
        others = moved(train(site(), round=2, **step))
    assert (ones != others).all(), "drawn afresh each time"
    assert (ones > 0).all()


def test_local_parameters_of_a_client_that_fails_get_the_noise_too(site: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a later release, trained from the old ones, would show the failure."""
    grid = site(model=HEADED)
    [context] = grid.contexts.values()
    here = Node.of(context.node_config, context.run_config)
    start = {name: np.zeros((1, *shape), np.float32) for name, shape in here.model.shapes.items()}

    def heads() -> NDArray[np.float32]:
        kept = LocalParameters(here.site, context.state, here.model, task_of().run, None)
        return kept.read([ClientInDataset(c) for c in range(len(SIZES))], hidden=True)["3.weight"]

    assert not train(grid, start).has_error()
    before = heads()
    with failing(monkeypatch, "memory"):
        assert not train(grid, start, round=2).has_error()
    assert (np.abs(heads() - before).max(axis=(1, 2)) > 1).all()


# --- the public bound


def test_a_step_takes_no_more_rows_than_everybody_knows() -> None:
    """Bernstein: 500 + t with t^2 = 2 L (250 + t/3), L = log 1e60 = 138.2; a smaller client takes all its rows."""
    t = 138.155 / 3 + ((138.155 / 3) ** 2 + 2 * 138.155 * 250) ** 0.5
    assert most_drawn(1000, 0.5) == int(500 + t) + 1 == 813
    assert most_drawn(100, 0.5) == 100
    assert most_drawn(1000, 1.0) == 1000


def test_rows_beyond_the_bound_are_left_out() -> None:
    lengths = np.array([50, 3])
    rows = replace(task_of(**ROWS | {"row_rate": 1.0}).row_privacy, steps=1)  # type: ignore[type-var]
    sources = [dp_sgd.RowSource(np.random.default_rng(0), np.random.default_rng(0)) for _ in lengths]
    [drawn] = dp_sgd._samples(lengths, rows, sources, 10)
    assert [one.tolist() for one in drawn] == [list(range(10)), [50, 51, 52]]


@pytest.mark.parametrize(
    ("policy", "starts"),
    [
        ({"rows": f"largest={MANY}"}, True),
        ({"rows": f"largest={MANY - 1}"}, False),
        ({"rows": f"largest={MANY - 1}", "protect": "both", "budget": 8, "row_budget": "inf"}, False),
        ({"rows": f"largest={MANY - 1}", "protect": "clients", "budget": 8}, False),
        ({"rows": f"largest={MANY - 1}", "protect": "clients", "budget": 8, "row_budget": "inf"}, False),
        ({"protect": "clients", "budget": 8, "row_budget": "inf"}, True),
    ],
)
def test_a_site_that_protects_rows_does_not_start_with_a_larger_client_than_it_declares(
    site: Grid, policy: dict[str, Any], starts: bool
) -> None:
    with nullcontext() if starts else raises(SiteError, "site.max-rows"):
        node_of(site(**policy))


# --- before a charge


def test_what_might_take_too_long_is_refused_before_any_charge(
    site: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clients that need a second each, twice."""
    monkeypatch.setattr(node, "try_training", lambda *_: 1.0)
    reply = train(site(max_seconds=5.9))
    assert reply.error.reason.endswith("[refused.work]")
    assert not Journal(tmp_path / "ledger.jsonl").accounts()
    assert not train(site(max_seconds=6)).has_error()


def test_a_made_up_client_takes_the_time_of_the_largest(monkeypatch: pytest.MonkeyPatch, site: Grid) -> None:
    """A clock that counts the rows of sums, and those of scores: .001 seconds each. Samples have a seed: of about a
    hundred rows, the system's entropy would draw an eighth more or less now and then."""
    here, clock = node_of(site(rows="largest=2000")), [0.0]
    sums, score = dp_sgd._sums, type(here.learner).score

    def counted(gradients: Any, parameters: Any, cohort: Any, drawn: Any, *others: Any) -> Any:
        clock[0] += 1e-3 * sum(map(len, drawn)) if len(others) < 2 else 0
        return sums(gradients, parameters, cohort, drawn, *others)

    def scored(self: Any, hypotheses: Any, cohort: Any, *others: Any) -> Any:
        clock[0] += 1e-3 * len(cohort.features)
        return score(self, hypotheses, cohort, *others)

    trial._seconds.cache_clear()
    monkeypatch.setattr(trial, "row_sources", lambda _, *others: row_sources(0, *others))
    monkeypatch.setattr(trial.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(dp_sgd, "_sums", counted)
    monkeypatch.setattr(type(here.learner), "score", scored)
    task = task_of(**ROWS)
    seconds = [try_training(here.learner, here.dataset, k, here.update(task), 2000) for k in (1, 2)]
    step = 1e-3 * most_drawn(2000, 0.5)
    assert seconds == pytest.approx([2 * step, 2 * step + 2.0], rel=0.15)
    hides_nothing = task_of(step_size=1.0)
    assert try_training(here.learner, here.dataset, 2, here.update(hides_nothing), 2000) == 0


def test_a_training_that_fails_on_made_up_rows_is_charged_to_nobody(
    site: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    grid = site()
    trial._seconds.cache_clear()
    monkeypatch.setattr("umbel.client.learner.gradients_of", broken)
    assert refused(train(grid))
    assert not Journal(tmp_path / "ledger.jsonl").accounts()
    with raises(ModelError, "model.trial", "no such kernel"):
        node_of(grid).check_training(START, task_of(**ROWS))


@pytest.mark.parametrize("some", [[*START], [*START][:1]])
def test_what_was_trained_without_a_finite_number_does_not_leave(
    some: list[str], site: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would leave as the bare hypothesis. No trial on made-up rows has shown it, so the clients have paid."""
    grid = site()
    monkeypatch.setattr(Node, "_try_training", lambda *_: None)
    monkeypatch.setattr(dp_sgd, "descend", lambda _, start, *__: start | {name: start[name] * np.nan for name in some})
    assert refused(train(grid))
    assert len(Journal(tmp_path / "ledger.jsonl").accounts()) == len(SIZES)


@pytest.mark.parametrize("by", [ReleaseBy.CLIENT, ReleaseBy.SITE])
def test_a_site_makes_no_release_without_any_noise(by: ReleaseBy) -> None:
    """Whatever its policy lets pass."""
    task = task_of(clipping="public", noise_multiplier=0.0, release_by=by)
    sanitiser = load(by).sanitiser
    sanitiser.of(Place(simulated()), START, task)
    with raises(Refused, "refused.unsanitised"):
        sanitiser.of(Place(own()), START, task)


FIRST = """
import sys
from pathlib import Path
from tests.client import test_row_faults as cases
from umbel.protocol.run_config import RunConfig
grid = cases.open_site(Path(sys.argv[1]), RunConfig().entries(), [20] * 10, max_seconds=1)
print("torch._dynamo" in sys.modules, bool((cases.moved(cases.train(grid, clients=10)) > 0).all()))
"""


@pytest.mark.slow
def test_the_first_training_of_a_process_has_its_whole_time(tmp_path: Path) -> None:
    """PyTorch loads for seconds what training uses. A client has a tenth of a second."""
    done = subprocess.run([sys.executable, "-c", FIRST, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
