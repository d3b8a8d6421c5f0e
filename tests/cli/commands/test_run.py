"""`umbel run`: what it takes, what it refuses before anything starts, and what it says when it is stopped."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from typer.testing import CliRunner

from tests.helpers.datasets import manifest
from tests.helpers.errors import ended, raises
from umbel.cli.commands.run import asked
from umbel.cli.main import app
from umbel.data import offsets_of, write_dataset
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import FOLDER_VERSION, RunConfig
from umbel.simulation import in_process


def umbel(*words: str) -> tuple[int, str]:
    told = CliRunner().invoke(app, list(words), prog_name="umbel")
    return told.exit_code, told.output


def test_values_come_from_a_file_and_from_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text('rounds = 3\nstrategy = "ifca"\n')
    values = {"rounds": 7, "strategy": "fedavg", "clipping": "public floor=0.5"}
    words = ["rounds=7", "strategy=fedavg", "clipping=public floor=0.5"]
    assert asked([str(config), *words]) == (values, [])


@pytest.mark.parametrize(("text", "number"), [(".5", 0.5), ("5.", 5.0), ("+.5", 0.5), (".5e-1", 0.05)])
def test_a_number_may_be_short(text: str, number: float) -> None:
    assert asked([f"step-size={text}"])[0] == {"step-size": number}


def test_a_configuration_goes_by_its_name() -> None:
    assert asked(["hospital", "rounds=2"])[0]["dataset"] == "hospital"


def test_a_run_goes_on_with_all_that_it_was_asked(umbel_home: Path) -> None:
    folder = umbel_home / "runs" / "20260101-120000-synthetic"
    folder.mkdir(parents=True)
    was = RunConfig().entries() | {"seed": 7, "hypotheses": 3}
    (folder / "config.toml").write_text(tomli_w.dumps({"version": FOLDER_VERSION, "config": was, "versions": {}}))
    for name in (folder.name, "20260101", "last", str(folder)):
        values, _ = asked([name, "rounds=200"], resume=True)
        assert values == was | {"rounds": 200, "resume": str(folder)}
    with raises(ConfigError, "config.is-a-run", "20260101-120000-synthetic", "--resume"):
        asked(["last"])


@pytest.mark.parametrize("name", ["stays.csv", "my stays.CSV.gz", "stays.tsv", "stays.parquet", "stays.xlsx"])
def test_a_table_is_answered_with_the_command_that_imports_it(umbel_home: Path, tmp_path: Path, name: str) -> None:
    table = tmp_path / name
    table.write_text("hospital,cost\nnorth,1\n")
    command = f"umbel data import {shlex.quote(str(table))} --client COLUMN --target COLUMN"
    for asking in ("run", "plan"):
        status, told = umbel(asking, str(table))
        ended(status, told, "config.is-a-table", command)
        assert "--replace" not in told
    (umbel_home / "data" / name.split(".")[0]).mkdir(parents=True)
    ended(*umbel("run", str(table)), "config.is-a-table", f"{command} --replace")


def test_a_run_to_start_from_is_found_from_where_the_user_is(
    umbel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (umbel_home / "runs" / "20260101-120000-synthetic", tmp_path / "mine"):
        folder.mkdir(parents=True)
        (folder / "config.toml").touch()
        assert asked([f"start-from={folder.name}"])[0]["start-from"] == str(folder)
    with raises(ConfigError, "config.no-run", "start-from", "'nowhere'"):
        asked(["start-from=nowhere"])


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["ronds=3"], "config", "did you mean rounds?"),
        (["rounds=0"], "config", "rounds"),
        (["hosptal"], "config.unknown-configuration", "configurations: hospital,"),
        (["--resume", "last", "--epsilon", "4"], "config.resumed-epsilon", "--epsilon"),
        (["--resume", "last", "--rows", "4"], "config.resumed-epsilon", "--rows"),
        (["synthetic", "--row-epsilon", "4"], "config.missing-figure", "rows"),
        (["--delta", "0"], "config.delta-alone", "--epsilon"),
        (["dataset=", "--epsilon", "4"], "config.no-dataset", "name a dataset"),
        (["nothing-like-it"], "config.unknown-configuration", "synthetic"),
        (["hospital", "qmnist"], "config.two-configurations", "'qmnist'"),
        (["--resume"], "config.no-run", "umbel run RUN --resume"),
        (["nowhere", "--resume"], "config.no-run", "'nowhere'"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, words: list[str], code: str, part: str
) -> None:
    monkeypatch.setattr("umbel.simulation.in_process.run", lambda *_: pytest.fail("it was started"))
    ended(*umbel("run", *words), code, part)


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["dataset=nowhere"], "data", "'nowhere'"),
        (["dataset="], "config.no-dataset", "dataset"),
        (["clients-per-round=101"], "config.too-few-clients", "clients-per-round=100"),
        (["validation=clients=101"], "config.too-few-clients", 'validation="clients=100"'),
        (["model=mlp"], "model", "'mlp'"),
        (["strategy=fedavgg"], "config", "'fedavgg'"),
        (["loss=cross-entropy"], "model", "classes"),
    ],
)
def test_what_does_not_fit_together_is_told_while_the_superlink_starts(
    monkeypatch: pytest.MonkeyPatch, words: list[str], code: str, part: str
) -> None:
    monkeypatch.setattr("umbel.simulation.in_process.run", lambda *_: pytest.fail("it was started"))
    ended(*umbel("run", *words), code, part)


@pytest.mark.parametrize(
    ("words", "history", "part"),
    [
        (["{run}", "--resume"], "", "1 rounds"),
        (["{run}", "--resume", "rounds=2", "seed=9"], "", "seed"),
        (["resume={run}", "rounds=1", "restarts=1"], "", "1 rounds"),
        (["{run}", "--resume", "rounds=2"], "[]\n", "line 1 of history.jsonl"),
    ],
)
def test_a_run_that_cannot_go_on_is_told_before_it_is_submitted(
    monkeypatch: pytest.MonkeyPatch, umbel_home: Path, words: list[str], history: str, part: str
) -> None:
    folder = in_process.run({"rounds": 1, "restarts": 1})
    if history:
        (folder / "history.jsonl").write_text(history)
    monkeypatch.setattr("umbel.simulation.in_process.run", lambda *_: pytest.fail("it was started"))
    ended(*umbel("run", *(word.format(run=folder) for word in words)), "config", "resume", part)


def test_a_home_that_cannot_be_made_is_told_before_the_first_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "file" / "home"):
        monkeypatch.setenv("UMBEL_HOME", str(home))
        code, told = umbel("run")
        assert (code, "[config.home]" in told, "round " in told) == (2, True, False), told


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
    status, told = umbel("run", *words)
    assert status == 0
    assert "Worth it? No: it is worse than a constant" in told
    status, told = umbel("run", *words, "--strict")
    assert status == 5
    assert "Error: the run is not shown to be worth it: No: it is worse than a constant" in told
    assert "[worth.not-shown]" in told
    status, told = umbel("run", "rounds=8", "restarts=2", "--strict")
    assert status == 0, told


@pytest.mark.usefixtures("blank_figures")
def test_a_run_ends_with_the_verdict_the_table_the_guarantee_and_its_folder(umbel_home: Path) -> None:
    _, told = umbel("run", "rounds=8", "restarts=2")
    (folder,) = (umbel_home / "runs").iterdir()
    places = [told.index(words) for words in (
        "Worth it?", "the best constant", "The run ended", "Guarantee", f"umbel predict {folder.name}",
    )]  # fmt: skip
    assert places == sorted(places)
    assert told.rstrip().endswith(str(folder))
    assert not re.search("n/nu|Eq[.]|heuristic", told)
    page = (folder / "report.html").read_text()
    assert page.index("Was it worth it?") < page.index("Privacy, between any two data sets")
    status, told = umbel("run", "rounds=1", "restarts=1", "--no-baselines")
    assert status == 0
    assert "Worth it?" not in told
    assert len([*(umbel_home / "runs").glob("*/worth.json")]) == 1


def test_a_verdict_that_is_not_measured_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, umbel_home: Path
) -> None:
    monkeypatch.setattr("umbel.simulation.in_process.run", lambda *_: pytest.fail("it was started"))
    ended(*umbel("run", "--strict", "--no-baselines"), "config.strict-alone", "--no-baselines")


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
    words = ["run", "rounds=1", "restarts=1", "clients-per-round=5", "--no-baselines"]
    assert "RAY_ADDRESS" not in umbel(*words)[1]
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    status, told = umbel(*words)
    assert status == 0, told
    assert told.count("RAY_ADDRESS") == 1
