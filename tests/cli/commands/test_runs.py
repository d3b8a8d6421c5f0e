"""`umbel runs` and `umbel config`: what is there, by name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.helpers.errors import raises
from umbel.cli.main import app
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig
from umbel.server.run_folder import RunFolder
from umbel.server.runs import find_run


@pytest.fixture
def runs(umbel_home: Path, kept: Path) -> list[str]:
    """Two runs, of which one was interrupted before it had finished a round."""
    for name in ("20260101-100000-one", "20260102-100000-two"):
        shutil.copytree(kept, umbel_home / "runs" / name)
    begun = umbel_home / "runs" / "20260103-100000-begun"
    begun.mkdir()
    shutil.copy(kept / "config.toml", begun)
    return sorted(path.name for path in (umbel_home / "runs").iterdir())


def umbel(*words: str, code: int = 0) -> str:
    told = CliRunner(env={"COLUMNS": "120"}).invoke(app, list(words), prog_name="umbel")
    assert told.exit_code == code, told.output
    return told.output


def test_they_are_listed_by_when_they_began(runs: list[str]) -> None:
    lines = umbel("runs", "list").splitlines()
    places = [next(i for i, line in enumerate(lines) if name in line) for name in runs]
    assert places == sorted(places)
    assert "all 3 rounds done" in lines[places[0]]
    assert "interrupted" in " ".join(lines[places[2] :])


def test_the_loss_listed_is_that_of_the_hypotheses_that_are_kept(runs: list[str], umbel_home: Path) -> None:
    file = umbel_home / "runs" / runs[0] / "history.jsonl"
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    entries[0] |= {"loss": 0.0625, "groups": [4, 8, 8], "nearest": [1.0, 1.0, 1.0]}  # of more hypotheses
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    best = f"{entries[entries[-1]['best_round']]['loss']:.6g}"
    listed = umbel("runs", "list")
    assert best in listed
    assert "0.0625" not in listed


def test_losses_are_listed_in_the_unit_of_the_target_as_they_are_shown(runs: list[str], umbel_home: Path) -> None:
    file = umbel_home / "runs" / runs[0] / "dataset.json"
    manifest = json.loads(file.read_text())
    manifest["units"] = {"target": {"name": "cost", "unit": "dollars", "scale": 1000.0}}
    file.write_text(json.dumps(manifest))
    shown = re.findall(r"(?:last|best) loss \W*([\d.]+ dollars)", umbel("runs", "show", runs[0]))
    assert len(shown) == 2
    listed = next(line for line in umbel("runs", "list").splitlines() if runs[0] in line)
    assert re.findall(r"[\d.]+ dollars", listed) == shown
    config = umbel_home / "runs" / runs[0] / "config.toml"
    config.write_text(re.sub('model = ".*"', 'model = "not_here:net"', config.read_text()))
    listed = next(line for line in umbel("runs", "list").splitlines() if runs[0] in line)
    assert listed.count("as stored") == 2


def test_a_line_that_a_killed_run_left_half_is_no_round(runs: list[str], umbel_home: Path) -> None:
    shown = umbel("runs", "show", runs[0])
    with (umbel_home / "runs" / runs[0] / "history.jsonl").open("a") as file:
        file.write('{"number": 5, "lo')
    assert umbel("runs", "show", runs[0]) == shown


def test_redirected_tables_are_not_cut_at_a_terminals_width(runs: list[str]) -> None:
    told = CliRunner(env={"COLUMNS": "60"}).invoke(app, ["runs", "list"], prog_name="umbel").output
    assert "\u2026" not in told
    assert "all 3 rounds done" in told


def test_one_is_shown_with_what_it_was_asked_and_what_it_cost(runs: list[str]) -> None:
    told = umbel("runs", "show", "20260101")
    for text in (runs[0], "all 3 rounds done", "noise-multiplier", "5.0", "Guarantee: none"):
        assert text in told
    assert "interrupted" in umbel("runs", "show", "last"), "of which nothing else is known"


def test_two_are_compared_where_they_differ(runs: list[str], umbel_home: Path) -> None:
    file = umbel_home / "runs" / runs[1] / "config.toml"
    file.write_text(file.read_text().replace("seed = 3", "seed = 4"))
    told = umbel("runs", "show", *runs[:2])
    assert "seed" in told
    assert not {"step-size", "digest"} & set(told.split())
    assert umbel("runs", "show", *runs[:2], runs[0]) == told, "named twice, it has one column"
    file.write_text(re.sub('(?m)^data = ".*"$', 'data = "0123456789abcdef"', file.read_text()))
    assert "0123456789abcdef" in umbel("runs", "show", *runs[:2]), "of other rows under the same name"


def test_a_run_without_validation_has_no_loss_that_is_not_a_number(runs: list[str], umbel_home: Path) -> None:
    file = umbel_home / "runs" / runs[0] / "history.jsonl"
    entries = [json.loads(line) | {"loss": None, "metric": None} for line in file.open()]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    for words in (("show", runs[0]), ("show", *runs[:2])):
        told = umbel("runs", *words)
        assert told.count("none was reported") == 2
        assert " nan" not in told


def test_brackets_in_a_runs_files_are_text(runs: list[str], umbel_home: Path) -> None:
    file = umbel_home / "runs" / runs[0] / "dataset.json"
    said = "estimated from the training clients' rows with epsilon [/4] a client"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"provenance": said}))
    assert "epsilon [/4]" in umbel("runs", "show", *runs[:2])


def test_one_is_removed_when_that_is_meant(runs: list[str], umbel_home: Path) -> None:
    told = CliRunner().invoke(app, ["runs", "rm", runs[0]], input="n\n")
    assert told.exit_code == 0
    assert (umbel_home / "runs" / runs[0]).exists()
    umbel("runs", "rm", runs[0], "--yes")
    assert sorted(path.name for path in (umbel_home / "runs").iterdir()) == runs[1:]
    assert "there is no run" in umbel("runs", "rm", runs[0], "-y", code=2)


def test_a_run_that_goes_on_is_not_removed(runs: list[str], umbel_home: Path) -> None:
    path = umbel_home / "runs" / runs[1]
    with RunFolder(path).held():
        assert "config.run-held" in umbel("runs", "rm", *runs[:2], "-y", code=2)
    assert path.is_dir()
    assert (umbel_home / "runs" / runs[0]).is_dir()


def test_a_run_does_not_resume_while_it_is_removed(
    runs: list[str], umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [umbel_home / "runs" / run for run in runs[:2]]

    def resumes(_: str) -> bool:
        for path in filter(Path.exists, paths):
            with raises(ConfigError, "config.run-held", path), RunFolder(path).held():
                pass
        return True

    monkeypatch.setattr("umbel.cli.commands.runs.typer.confirm", resumes)
    umbel("runs", "rm", *runs[:2], runs[0])
    assert [path.name for path in (umbel_home / "runs").iterdir()] == runs[2:]


def test_a_folder_with_more_than_a_run_is_not_removed(runs: list[str], umbel_home: Path) -> None:
    """Such as a home in which a run's config.toml lies."""
    path = umbel_home / "runs" / runs[0]
    (path / "letters").mkdir()
    assert "config.not-a-run-alone" in umbel("runs", "rm", runs[0], runs[1], "-y", code=2)
    assert path.is_dir()
    assert (umbel_home / "runs" / runs[1]).is_dir(), "nothing is removed where something is wrong"


def test_a_run_is_removed_with_the_events_that_followed_it(runs: list[str], umbel_home: Path) -> None:
    events = umbel_home / "runs" / runs[0] / "tensorboard"
    (events / "more").mkdir(parents=True)
    (events / "events.out.tfevents.1").touch()
    umbel("runs", "rm", runs[0], "-y")
    assert not events.parent.exists()
    elsewhere = umbel_home / "elsewhere"
    elsewhere.mkdir()
    (umbel_home / "runs" / runs[1] / "tensorboard").symlink_to(elsewhere)
    assert "tensorboard" in umbel("runs", "rm", runs[1], "-y", code=2)
    assert elsewhere.is_dir()


def test_commands_take_a_runs_name_its_beginning_and_its_path(
    runs: list[str], umbel_home: Path, tmp_path: Path
) -> None:
    for name in (runs[0], "20260101", str(umbel_home / "runs" / runs[0])):
        assert umbel("runs", "report", name).endswith(f"{runs[0]}/report.html\n")
        assert umbel("runs", "export", name, str(tmp_path)).splitlines()[0] == str(
            tmp_path / "hypothesis-0.safetensors"
        )
        assert umbel("predict", name, "synthetic", "--client", "0").startswith(
            "client,name,row,hypothesis,prediction,target"
        )
    assert "2 runs begin with '2026010'" not in umbel("runs", "report", "2026010", code=2)
    assert "3 runs begin with '2026010'" in umbel("runs", "report", "2026010", code=2)
    assert "holds no run that finished a round" in umbel("runs", "report", "last", code=2)


def test_without_runs_it_says_so(umbel_home: Path) -> None:
    assert umbel("runs", "list") == f"there are no runs in {umbel_home / 'runs'}\n"


def test_keys_are_all_there_and_found_by_a_word() -> None:
    told = umbel("config")
    assert all(name in told for name in RunConfig.names())
    found = umbel("config", "patience")
    assert "stop after this many validations" in found
    assert "a whole number of at least 0" in found
    assert "step-size" not in found
    assert "clients-per-round" in umbel("config", "clients_per_round")
    assert "did you mean patience?" in umbel("config", "patiance", code=2)
    assert "min-noise-multiplier" in umbel("config", "--site")


def test_a_name_that_no_file_can_have_is_no_run(runs: list[str]) -> None:
    """As in a folder that this user cannot read, the file system answers with an error."""
    with raises(ConfigError, "config.no-run"):
        find_run("a" * 5000)
