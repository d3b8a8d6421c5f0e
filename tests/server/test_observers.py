"""umbel's own observers: patience, the log, and what is saved after each round."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.helpers.scripted import Scripted, run_of, theta
from umbel.data import BUNDLED, open_dataset
from umbel.models.factors import baselines
from umbel.server.history import State
from umbel.server.observer import Observer, Run
from umbel.server.observers import Baselines, Checkpoints, Log, in_time
from umbel.server.rounds import run_rounds
from umbel.server.run_folder import RunFolder
from umbel.server.setup import Setup
from umbel.server.snapshots import Snapshots
from umbel.server.summary import Summary
from umbel.simulation.in_process import play


def scripted(losses: list[float | None], *observers: Observer, **changes: Any) -> State:
    """Return how a run of written down losses ended."""
    run = run_of(Scripted(losses), *observers, **changes)
    run_rounds(run)
    return run.state


# --- patience


@pytest.mark.parametrize(
    ("losses", "validations", "rounds", "reason"),
    [
        ([9, 5, 6, 5, 7, 1], 3, 5, "no better hypotheses in 3 validations"),
        ([9, 9, 9, 9, 9, 9], 1, 2, "no better hypotheses in 1 validations"),
        ([9, 8, 7, 6, 5, 4], 1, 6, "all 5 rounds done"),
        ([9, 9, 9, 9, 9, 9], 0, 6, "all 5 rounds done"),
        ([9, 8, 7, 6, 5, 5], 1, 6, "all 5 rounds done"),
        ([None] * 6, 1, 5, "all 5 rounds done"),
    ],
)
def test_patience_ends_a_run_that_gets_no_better(
    losses: list[float | None], validations: int, rounds: int, reason: str
) -> None:
    state = scripted(losses, patience=validations)
    assert len(state.history) == rounds
    assert state.stopped == reason


# --- the log


def test_a_collapse_is_told_once_in_one_line(run_config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    # All releases of `Scripted` go to hypothesis 0, two a round: ten rounds hold ten releases a hypothesis.
    lines = logged(caplog, run_config, Scripted([1.0] * 41), rounds=40)
    (at,) = (i for i, line in enumerate(lines) if "collapsed" in line)
    assert lines[at - 1].startswith("round 10/40")
    assert lines[at].startswith(
        "Since round 1 nearly all releases have gone to hypothesis 0: the hypotheses have collapsed into one. "
    )
    assert "\n" not in lines[at]


def logged(caplog: pytest.LogCaptureFixture, run_config: dict[str, Any], strategy: Scripted, **changes: Any) -> Any:
    """Return the lines of a scripted run whose rounds take a minute each, and its start four."""
    setup = Setup.parse(run_config)
    times = iter([0.0, *(240.0 + 60 * t for t in range(2000))])
    log = Log(Summary(setup.model, setup.manifest, setup.release), lambda: next(times))
    with caplog.at_level(logging.INFO, "flwr"):
        run_rounds(run_of(strategy, log, **changes))
    return caplog.messages


def test_each_round_gets_a_line_with_the_time_left_from_the_second_on(
    run_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    lines = list(logged(caplog, run_config, Scripted([9, 8, 7, 6, 5]), rounds=4))
    rounds = [f"round {number}/4" for number in range(1, 5)]
    assert [line.split("  ")[0] for line in lines] == [*rounds, "after the last round"]
    assert "validation RMSE 9.0000" in lines[0]
    assert [line.split("  ")[-1] for line in lines] == [
        "4 min 0 s", "5 min 0 s, about 2 min 0 s left", "6 min 0 s, about 1 min 0 s left", "7 min 0 s", "8 min 0 s",
    ]  # fmt: skip
    caplog.clear()
    patient = logged(caplog, run_config, Scripted([9, 8, 7, 6, 5]), rounds=4, patience=3)
    assert patient[1].endswith("5 min 0 s, at most 2 min 0 s left"), "it may end early"


def test_a_long_run_gets_a_hundred_lines_of_rounds_that_were_validated(
    run_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    losses = [1.0] * 1001
    lines = logged(caplog, run_config, Scripted(losses), rounds=1000, **{"validate_every": 5})
    (warned,) = (line for line in lines if "collapsed" in line)
    lines.remove(warned)
    assert len(lines) == 102, "every tenth, the last, and what came of it"
    assert sum("validation" in line for line in lines) >= 100
    assert lines[1].startswith("round   11/1000")
    assert lines[1].endswith("14 min 0 s, about 16 h 29 min left")


def test_what_goes_wrong_is_told_at_once_and_not_again_before_the_next_line(
    run_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    strategy = Scripted([1.0] * 301, stuck={2, 3, 5, 200})
    strategy.lost = 0
    lines = logged(caplog, run_config, strategy, rounds=300)
    short = [line.split()[1].split("/")[0] for line in lines if "TOO FEW" in line]
    assert short == ["2", "5", "200"], "round 3 comes before the line of round 4"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min")]
)
def test_time_is_told_in_its_two_largest_units(seconds: float, words: str) -> None:
    assert in_time(seconds) == words


# --- what is saved


class Looking(Observer):
    """Looks into the folder after each round."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.seen: list[tuple[int, float, str]] = []
        self.folder = folder

    def after_round(self, run: Run) -> None:
        state, _, _ = self.folder.read(["weight"])
        self.seen.append((len(state.history), float(state.hypotheses["weight"][0, 0, 0]), state.stopped))


def test_a_run_is_saved_after_each_round_and_at_its_end(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    strategy = Scripted([9, 8, 7])
    strategy.state = {"steps": np.array(3)}
    monkeypatch.setattr(strategy.fleet, "roster", lambda grid: type("Nobody", (), {"nodes": []}))
    looking = Looking(folder)
    run = run_of(strategy, rounds=2)
    run.observers = [Checkpoints(Snapshots(run.state)), looking]
    run.folder = folder
    run_rounds(run)
    assert looking.seen == [(1, 1.0, ""), (2, 2.0, ""), (3, 2.0, "all 2 rounds done")]
    state, spent, kept = folder.read(["weight"])
    assert state.stopped == "all 2 rounds done"
    assert spent == {0: 2, 1: 2}
    assert int(kept["steps"]) == 3
    assert not (tmp_path / "run" / "releases.safetensors").exists(), "this strategy draws nothing"


def test_a_run_without_a_folder_saves_nothing(umbel_home: Any) -> None:
    scripted([9, 8, 7], Checkpoints(Snapshots(State(theta(0), theta(0)))), rounds=2)
    assert not umbel_home.exists()


def test_releases_of_two_parameters_are_saved(tmp_path: Any, run_config: dict[str, Any]) -> None:
    class Foldered(Observer):
        """Gives the run a folder, as the app does."""

        def begin(self, run: Run) -> None:
            run.folder = RunFolder(tmp_path / "run")

    start = theta(0)
    state = State(hypotheses=start, best=start)
    play(run_config | {"rounds": 1, "restarts": 1}, observers=[Foldered(), Checkpoints(Snapshots(state))])
    kept = safetensors.numpy.load_file(tmp_path / "run" / "releases.safetensors")
    assert kept["first.releases"].shape == (7, 2)


# --- baselines

RECOMMENDER = {
    "strategy": "recommender", "dataset": "preferences", "noise-multiplier": 0.0, "restarts": 1, "rounds": 2,
    "clients-per-round": 20, "clip-norm-floor": 1e-6,
}  # fmt: skip


def test_the_report_has_the_rules_beside_what_the_items_reach(run_config: dict[str, Any]) -> None:
    observer = Baselines()
    run = play(run_config | RECOMMENDER, observers=[observer])
    section = observer.section()
    assert section is not None
    (text,) = section.paragraphs
    assert text.startswith("Validation right-sign of the best hypotheses ")
    assert f"of the last {run.state.history[-1].metric:.4f}. Baselines on the same rows: all liked" in text
    for name, value in baselines(open_dataset(BUNDLED / "preferences.json")).items():
        assert f"{name} {value:.4f}" in text


def test_of_other_models_nothing_is_said(run_config: dict[str, Any]) -> None:
    observer = Baselines()
    play(run_config | {"rounds": 1, "restarts": 1}, observers=[observer])
    assert observer.section() is None
