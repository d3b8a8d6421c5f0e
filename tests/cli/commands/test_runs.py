"""`umbel runs` and `umbel config`: what is there, by name; `umbel server status`: what the operator of a run sees."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.helpers.cli import refused, said
from tests.helpers.errors import raises
from umbel.cli.main import app
from umbel.protocol.errors import ConfigError
from umbel.protocol.presence import Presence
from umbel.protocol.run_config import RunConfig
from umbel.server.run_folder import RunFolder
from umbel.server.runs import find_run
from umbel.server.status import SiteStatus, Status


@pytest.fixture
def runs(umbel_home: Path, kept: Path) -> list[Path]:
    """Two runs, and one that was interrupted before it had finished a round."""
    home = umbel_home / "runs"
    for name in ("20260101-100000-one", "20260102-100000-two"):
        shutil.copytree(kept, home / name)
    (home / "20260103-100000-begun").mkdir()
    shutil.copy(kept / "config.toml", home / "20260103-100000-begun")
    return sorted(home.iterdir())


def change(file: Path, changed: Callable[[Any], Any]) -> list[Any]:
    """Change the rounds of a history, or the entries of a manifest, and return them."""
    entries = [json.loads(line) for line in file.read_text().splitlines()] if file.suffix == ".jsonl" else [
        json.loads(file.read_text())
    ]  # fmt: skip
    changed(entries)
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return entries


def in_unit(unit: str) -> Callable[[Any], Any]:
    target = {"name": "cost", "unit": unit, "scale": 1000.0}
    return lambda entries: entries[0].update(units={"target": target})


def listed(run: Path) -> str:
    return next(line for line in said("runs", "list").splitlines() if run.name in line)


def test_they_are_listed_by_when_they_began(runs: list[Path]) -> None:
    lines = said("runs", "list").splitlines()
    places = [next(i for i, line in enumerate(lines) if run.name in line) for run in runs]
    assert places == sorted(places)
    assert "all 3 rounds done" in listed(runs[0])
    assert "interrupted" in listed(runs[2])
    narrow = CliRunner(env={"COLUMNS": "60"}).invoke(app, ["runs", "list"], prog_name="umbel").output
    assert narrow.splitlines() == lines, "redirected output has no width"
    assert said("runs", "rm", *runs, "-y").count("is deleted") == 3
    assert "there are no runs" in said("runs", "list")


def test_the_loss_listed_is_that_of_the_hypotheses_that_are_kept(runs: list[Path]) -> None:
    more = {"loss": 0.0625, "groups": [4, 8, 8], "nearest": [1.0, 1.0, 1.0]}
    entries = change(runs[0] / "history.jsonl", lambda entries: entries[0].update(more))
    assert f"{entries[entries[-1]['best_round']]['loss']:.6g}" in listed(runs[0])
    assert "0.0625" not in listed(runs[0])


def test_losses_are_listed_in_the_unit_of_the_target_as_they_are_shown(runs: list[Path]) -> None:
    change(runs[0] / "dataset.json", in_unit("dollars"))
    shown = re.findall(r"(?:last|best) loss \W*([\d.]+ dollars)", said("runs", "show", runs[0].name))
    assert len(shown) == 2
    assert re.findall(r"[\d.]+ dollars", listed(runs[0])) == shown
    config = runs[0] / "config.toml"
    config.write_text(re.sub('model = ".*"', 'model = "not_here:net"', config.read_text()))
    assert listed(runs[0]).count("as stored") == 2
    change(runs[1] / "dataset.json", in_unit("[/4]"))
    assert " [/4]" in said("runs", "show", *runs[1:]), "brackets are text"


def test_one_is_shown_with_what_it_was_asked_and_what_it_cost(runs: list[Path]) -> None:
    told = said("runs", "show", "20260101")
    for text in (runs[0].name, "all 3 rounds done", "noise-multiplier", "5.0", "Guarantee: none"):
        assert text in told
    assert "interrupted" in said("runs", "show", "last"), "of which nothing else is known"
    with (runs[0] / "history.jsonl").open("a") as file:
        file.write('{"number": 5, "lo')  # as a killed run leaves it
    assert said("runs", "show", "20260101") == told


def test_two_are_compared_where_they_differ(runs: list[Path]) -> None:
    config = runs[1] / "config.toml"
    config.write_text(config.read_text().replace("seed = 3", "seed = 4"))
    told = said("runs", "show", *runs[:2])
    assert {"seed", "step-size", "digest"} & set(told.split()) == {"seed"}
    assert said("runs", "show", *runs[:2], runs[0]) == told, "named twice, it has one column"
    config.write_text(re.sub('(?m)^data = ".*"$', 'data = "0123456789abcdef"', config.read_text()))
    assert "0123456789abcdef" in said("runs", "show", *runs[:2]), "of other rows under the same name"


def test_a_run_without_validation_has_no_loss_that_is_not_a_number(runs: list[Path]) -> None:
    change(runs[0] / "history.jsonl", lambda all: [entry.update(loss=None, metric=None) for entry in all])
    for words in (runs[:1], runs[:2]):
        told = said("runs", "show", *words)
        assert told.count("none was reported") == 2
        assert " nan" not in told


# --- removal


def test_one_is_removed_when_that_is_meant(runs: list[Path]) -> None:
    one, *_ = runs
    told = CliRunner().invoke(app, ["runs", "rm", one.name], input="n\n")
    assert (told.exit_code, one.exists()) == (0, True)
    (one / "tensorboard" / "more").mkdir(parents=True)
    (one / "tensorboard" / "events.out.tfevents.1").touch()
    said("runs", "rm", one.name, "--yes")
    assert [run.exists() for run in runs] == [False, True, True]
    refused("config.no-run", "runs", "rm", one.name, "-y")


def test_what_holds_more_than_a_run_or_goes_on_is_not_removed_nor_what_is_named_beside_it(
    runs: list[Path], umbel_home: Path
) -> None:
    """Such as a home in which a run's config.toml lies, or a link to what is elsewhere."""
    one, other, _ = runs
    with RunFolder(other).held():
        refused("config.run-held", "runs", "rm", one, other, "-y")
    (elsewhere := umbel_home / "elsewhere").mkdir()
    (other / "tensorboard").symlink_to(elsewhere)
    refused("config.not-a-run-alone", "runs", "rm", one, other, "-y", parts=("tensorboard",))
    (other / "tensorboard").unlink()
    (other / "letters").mkdir()
    refused("config.not-a-run-alone", "runs", "rm", one, other, "-y")
    assert all(path.is_dir() for path in (one, other, elsewhere))


def test_a_run_does_not_resume_while_it_is_removed(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def resumes(_: str) -> bool:
        for path in filter(Path.exists, runs[:2]):
            with raises(ConfigError, "config.run-held", path), RunFolder(path).held():
                pass
        return True

    monkeypatch.setattr("umbel.cli.commands.runs.typer.confirm", resumes)
    said("runs", "rm", *runs[:2], runs[0])
    assert [run.exists() for run in runs] == [False, False, True]


# --- names


def test_commands_take_a_runs_name_its_beginning_and_its_path(runs: list[Path], tmp_path: Path) -> None:
    for name in (runs[0].name, "20260101", runs[0]):
        assert said("runs", "report", name).endswith(f"{runs[0].name}/report.html\n")
        assert str(tmp_path / "hypothesis-0.safetensors") in said("runs", "export", name, tmp_path)
        assert said("predict", name, "synthetic", "--client", "0").startswith("client,name,row,hypothesis,prediction")
    refused("config", "runs", "report", "2026010", parts=("3 runs begin with '2026010'",))
    refused("config", "runs", "report", "last")
    with raises(ConfigError, "config.no-run"):
        find_run("a" * 5000)  # which no file can have: the file system answers with an error


def test_keys_are_all_there_and_found_by_a_word() -> None:
    told = said("config")
    assert all(name in told for name in RunConfig.names())
    found = said("config", "patience")
    assert ("a whole number of at least 0" in found, "step-size" in found) == (True, False)
    assert "clients-per-round" in said("config", "clients_per_round")
    refused("config", "config", "patiance", parts=("did you mean patience?",))
    assert "min-noise-multiplier" in said("config", "--site")


# --- the status of a run at real sites, of which `tests/server/test_status.py` tells more

NOON = 1_790_000_000.0


def test_the_status_lists_sites_and_says_what_a_run_waits_for_and_why_it_ended(runs: list[Path]) -> None:
    folder, south = (
        RunFolder(runs[0]),
        {"presence": Presence.REFUSED, "since": NOON, "refusals": {"refused.noise": 2, "": 1}},
    )
    same = {"seen": NOON, "training": 206, "validation": 12, "releases": 41}
    sites = [
        SiteStatus(**same | {"name": name, "presence": Presence.ONLINE, "since": 0, "refusals": {}} | own)
        for name, own in (("north", {}), ("south\x1b[31m", south))
    ]
    for ended, paused, parts, left in (
        (
            "",
            NOON,
            ("3 of 20 done", "1 of 2 can be asked; a round needs 2 sites", "paused", "2 x refused.noise"),
            False,
        ),
        ("", 0, ("206", "41", "online", "1 x no reason told"), True),
        ("all 20 rounds done", 0, ("all 20 rounds done",), False),
    ):
        (folder.path / "outcome.json").write_text(json.dumps({"stopped": ended}))
        folder.write_status(Status(round=4, rounds=20, pause_below=2, written=NOON, sites=sites, paused=paused))
        text = " ".join(said("server", "status", folder.path).split())
        assert not [part for part in parts if part not in text], text
        assert ("time left" in text, "\x1b" in text) == (left, False)


def test_a_simulation_has_no_sites(runs: list[Path]) -> None:
    refused("config.status", "server", "status", runs[0])
