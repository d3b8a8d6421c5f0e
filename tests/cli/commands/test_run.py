"""`umbel run`: what it takes, what it refuses before anything starts, and what it says at its end."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from tests.helpers.cli import refused, said, umbel
from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from umbel.cli.commands.run import asked
from umbel.data import offsets_of, write_dataset
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import FOLDER_VERSION, RunConfig
from umbel.simulation import in_process

SHORT = ("rounds=1", "restarts=1", "clients-per-round=5", "--no-baselines")


@pytest.fixture
def earlier(umbel_home: Path) -> Path:
    """The folder of a run of before, with seed 7 and three hypotheses."""
    folder = umbel_home / "runs" / "20260101-120000-synthetic"
    folder.mkdir(parents=True)
    was = RunConfig().entries() | {"seed": 7, "hypotheses": 3}
    (folder / "config.toml").write_text(tomli_w.dumps({"version": FOLDER_VERSION, "config": was, "versions": {}}))
    return folder


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.simulation.in_process.run", lambda *_: pytest.fail("it was started"))


def test_values_come_from_a_file_and_from_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text('rounds = 3\nstrategy = "ifca"\n')
    values = {"rounds": 7, "strategy": "fedavg", "clipping": "public floor=0.5"}
    assert asked([str(config), *(f"{key}={value}" for key, value in values.items())]) == (values, [])
    assert asked(["hospital", "rounds=2"])[0]["dataset"] == "hospital"


@pytest.mark.parametrize(("text", "number"), [(".5", 0.5), ("5.", 5.0), ("+.5", 0.5), (".5e-1", 0.05)])
def test_a_number_may_be_short(text: str, number: float) -> None:
    assert asked([f"step-size={text}"])[0] == {"step-size": number}


def test_a_run_goes_on_with_all_that_it_was_asked(earlier: Path) -> None:
    for name in (earlier.name, "20260101", "last", str(earlier)):
        values, _ = asked([name, "rounds=200"], resume=True)
        assert values == RunConfig().entries() | {"seed": 7, "hypotheses": 3, "rounds": 200, "resume": str(earlier)}
    with raises(ConfigError, "config.is-a-run", "20260101-120000-synthetic", "--resume"):
        asked(["last"])


@pytest.mark.parametrize("name", ["stays.csv", "my stays.CSV.gz", "stays.tsv", "stays.parquet", "stays.xlsx"])
def test_a_table_is_answered_with_the_command_that_imports_it(umbel_home: Path, tmp_path: Path, name: str) -> None:
    table = tmp_path / name
    table.write_text("hospital,cost\nnorth,1\n")
    command = f"umbel data import {shlex.quote(str(table))} --client COLUMN --target COLUMN"
    for asking in ("run", "plan"):
        assert "--replace" not in refused("config.is-a-table", asking, table, parts=(command,))
    (umbel_home / "data" / name.split(".")[0]).mkdir(parents=True)
    refused("config.is-a-table", "run", table, parts=(f"{command} --replace",))


def test_a_run_to_start_from_is_found_from_where_the_user_is(
    earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (mine := tmp_path / "mine").mkdir()
    (mine / "config.toml").touch()
    for folder in (earlier, mine):
        assert asked([f"start-from={folder.name}"])[0]["start-from"] == str(folder)
    with raises(ConfigError, "config.no-run", "start-from", "'nowhere'"):
        asked(["start-from=nowhere"])


@pytest.mark.usefixtures("unstarted")
@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("ronds=3", "config", "did you mean rounds?"),
        ("rounds=0", "config", "rounds"),
        ("hosptal", "config.unknown-configuration", "configurations: hospital,"),
        ("nothing-like-it", "config.unknown-configuration", "synthetic"),
        ("hospital qmnist", "config.two-configurations", "'qmnist'"),
        ("--resume last --epsilon 4", "config.resumed-epsilon", "--epsilon"),
        ("--resume last --rows 4", "config.resumed-epsilon", "--rows"),
        ("--resume", "config.no-run", "umbel run RUN --resume"),
        ("nowhere --resume", "config.no-run", "'nowhere'"),
        ("synthetic --row-epsilon 4", "config.missing-figure", "rows"),
        ("--delta 0", "config.delta-alone", "--epsilon"),
        *((f"synthetic {word}", "config.unknown-key", "--epsilon 3") for word in ("epsilon=3", "epsilom=3")),
        ("--strict --no-baselines", "config.strict-alone", "--no-baselines"),
        ("dataset= --epsilon 4", "config.no-dataset", "name a dataset"),
        # What does not fit together.
        ("dataset=", "config.no-dataset", "dataset"),
        ("dataset=nowhere", "data", "'nowhere'"),
        ("clients-per-round=101", "config.too-few-clients", "clients-per-round=100"),
        ("validation=clients=101", "config.too-few-clients", 'validation="clients=100"'),
        ("model=mlp", "model", "'mlp'"),
        ("strategy=fedavgg", "config", "'fedavgg'"),
        ("loss=cross-entropy", "model", "classes"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line_before_anything_starts(words: str, code: str, part: str) -> None:
    refused(code, "run", *words.split(), parts=(part,))


@pytest.mark.parametrize(
    ("words", "history", "part"),
    [
        ("{run} --resume", "", "1 rounds"),
        ("{run} --resume rounds=2 seed=9", "", "seed"),
        ("resume={run} rounds=1 restarts=1", "", "1 rounds"),
        ("{run} --resume rounds=2", "[]\n", "line 1 of history.jsonl"),
    ],
)
def test_a_run_that_cannot_go_on_is_told_before_it_is_submitted(
    request: pytest.FixtureRequest, umbel_home: Path, words: str, history: str, part: str
) -> None:
    folder = in_process.run({"rounds": 1, "restarts": 1})
    if history:
        (folder / "history.jsonl").write_text(history)
    request.getfixturevalue("unstarted")
    refused("config", "run", *words.format(run=folder).split(), parts=("resume", part))


def test_a_home_that_cannot_be_made_is_told_before_the_first_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "file" / "home"):
        monkeypatch.setenv("UMBEL_HOME", str(home))
        code, told = umbel("run")
        assert (code, "[config.home]" in told, "round " in told) == (2, True, False), told


def test_a_flower_app_with_its_own_code_is_not_run_as_umbels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings may be umbel's too, and then umbel's own app would run in its place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.flwr.app.components]\nserverapp = "wave.server:app"\nclientapp = "wave.client:app"\n'
        "[tool.flwr.app.config]\nlocal-epochs = 5\n"
    )
    with raises(ConfigError, "config.other-app", "wave.server:app", "flwr run"):
        asked(["."])


def test_a_run_says_that_it_ignores_a_ray_cluster(umbel_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "RAY_ADDRESS" not in said("run", *SHORT)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert said("run", *SHORT).count("RAY_ADDRESS") == 1


# --- was it worth it?


@pytest.mark.usefixtures("blank_figures")
def test_a_run_that_is_worse_than_a_constant_says_so_and_fails_where_that_is_asked(
    umbel_home: Path, tmp_path: Path
) -> None:
    """Targets are 5 and noise, whatever the features: a line through the origin is worse than a constant."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(160, 2)), 5 + generator.normal(size=160)
    own = manifest(20, 20, model="linear", loss="mse")
    write_dataset(tmp_path / "noise", own, x.astype(np.float32), y.astype(np.float32), offsets_of([4] * 40))
    words = [f"dataset={tmp_path / 'noise'}", "rounds=2", "restarts=1", "noise-multiplier=0", "clients-per-round=20"]
    assert "Worth it? No: it is worse than a constant" in said("run", *words)
    status, told = umbel("run", *words, "--strict")
    assert (status, "[worth.not-shown]" in told) == (5, True), told
    said("run", "rounds=8", "restarts=2", "--strict")
