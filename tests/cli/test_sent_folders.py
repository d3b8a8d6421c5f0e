"""A dataset, a run or a ledger that somebody was sent is data: no command runs what it names."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tomli_w
from typer.testing import CliRunner

from tests.helpers.errors import ended
from umbel.cli.main import app
from umbel.console.books import Books
from umbel.data import find_dataset, open_dataset, write_dataset
from umbel.privacy.site.charges import Charge
from umbel.privacy.site.config import Site
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.policy import Policy
from umbel.protocol import plugins
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.project import OWN_PATH
from umbel.protocol.release import Clipping, Kind, Release

MECHANISM = "from umbel.privacy.mechanisms import Gaussian\nclass Own(Gaussian): pass\n"
PLANTED = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\ndef boom(**_): pass\n"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of the person's own folder that says when it runs; the file that says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(OWN_PATH, str(tmp_path))
    (tmp_path / "planted.py").write_text(PLANTED)
    yield tmp_path / "ran"
    sys.modules.pop("planted", None)


def umbel(*words: str) -> tuple[int, str]:
    told = CliRunner().invoke(app, list(words), prog_name="umbel")
    return told.exit_code, told.output


def sent_run(kept: Path, at: Path, key: str, name: str) -> Path:
    shutil.copytree(kept, at)
    saved = tomllib.loads((at / "config.toml").read_text())
    saved["config"][key] = name
    (at / "config.toml").write_text(tomli_w.dumps(saved))
    return at


@pytest.mark.parametrize("key", ["model", "loss", "metric", "strategy", "observers"])
def test_what_a_run_names_is_not_imported(key: str, kept: Path, planted: Path, tmp_path: Path) -> None:
    run = str(sent_run(kept, tmp_path / "sent", key, "planted:boom"))
    ended(*umbel("run", run, "--resume", "rounds=9"), "config.untrusted-code", "planted:boom", "--trust")
    ended(*umbel("run", f"{run}/config.toml"), "config.untrusted-code", "planted:boom")
    assert not planted.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("runs", "report", "{run}"),
        ("runs", "show", "{run}"),
        ("runs", "show", "{run}", "{run}"),
        ("runs", "export", "{run}", "out"),
        ("predict", "{run}", "synthetic"),
        ("run", "start-from={run}"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", ["planted:boom", "os:system command=true"])
def test_no_command_runs_what_a_run_names(
    words: tuple[str, ...], name: str, kept: Path, planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.system", lambda command: planted.touch())
    run = sent_run(kept, tmp_path / "sent", "model", name)
    code, output = umbel(*(word.format(run=run) for word in words))
    assert not planted.exists()
    if code:
        assert "config.untrusted-code" in output, output


@pytest.mark.parametrize(
    "words",
    [
        ("run", "dataset={data}", "rounds=1", "clients-per-round=1", "validation=clients=1"),
        ("site", "check", 'data-path="{data}"'),
        ("data", "show"),
        ("predict", "last", "{data}"),
    ],
    ids=" ".join,
)
def test_no_command_runs_what_a_dataset_names(words: tuple[str, ...], planted: Path, tmp_path: Path) -> None:
    opened, sent = open_dataset(find_dataset("synthetic")), tmp_path / "sent"
    write_dataset(sent, opened.manifest, opened.features, opened.targets, opened.offsets)
    manifest = json.loads((sent / "manifest.json").read_text())
    (sent / "manifest.json").write_text(json.dumps(manifest | {"model": "planted:boom", "loss": "mse"}))
    code, output = umbel(*(word.format(data=sent) for word in words))
    assert not planted.exists()
    assert code == 0 or "config.untrusted-code" in output or "config.no-run" in output, output


def test_no_command_runs_the_mechanism_that_a_ledger_names(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The person may trust it; a site's own policy is its word."""
    (tmp_path / "planted.py").write_text(PLANTED + MECHANISM)
    ledger = Journal.create(tmp_path / "sent.jsonl")
    release = Release(Kind.TRAIN, 3, 5.0, Clipping.PUBLIC, mechanism="planted:Own")
    ledger.charge(Charge("7", 1, release), [ClientInDataset(0)])
    reading: list[tuple[str, ...]] = [(), ("--to-date",), ("--json",)]
    for words in reading:
        ended(*umbel("site", "journal", *words, str(ledger.path)), "config.untrusted-code", "planted:Own", "--trust")
    assert not planted.exists()
    site = Site.serving(Policy(data_path=str(tmp_path), ledger_path=str(ledger.path), mechanisms="planted:Own"))
    monkeypatch.setattr(plugins, "_distrusted", set())
    assert Books(ledger.path, site).clients[0].epsilon_at_delta != "none"
    assert planted.exists()
    for words in reading:
        code, output = umbel("--trust", "planted:Own", "site", "journal", *words, str(ledger.path))
        assert code == 0, output


@pytest.mark.parametrize(
    "words",
    [("runs", "report", "{run}"), ("run", "{run}", "--resume", "rounds=9"), ("site", "check", 'data-path="{data}"')],
    ids=" ".join,
)
def test_no_library_finds_modules_in_the_folder_of_the_person(
    words: tuple[str, ...], kept: Path, planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent may lie there, beside modules that pandas, say, imports where it finds them."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = sent_run(kept, tmp_path / "sent", "model", "umbel.protocol.tasks:TrainingSpec")
    umbel(*(word.format(run=run, data=find_dataset("synthetic")) for word in words))
    assert str(planted.parent) not in sys.path


def test_what_a_person_names_runs_and_is_remembered(kept: Path, planted: Path, tmp_path: Path) -> None:
    run = str(sent_run(kept, tmp_path / "sent", "strategy", "planted:boom"))
    ended(*umbel("--trust", "planted", "run", run, "--resume", "rounds=9"), "config.not-built-on", "planted:boom")
    assert planted.exists()
    ended(*umbel("run", run, "--resume", "rounds=9"), "config.not-built-on", "planted:boom")
    ended(*umbel("run", "strategy=planted:boom"), "config.not-built-on", "planted:boom")


def test_a_function_is_a_factory_only_of_the_module_that_was_named(planted: Path) -> None:
    ended(*umbel("run", "model=os:system command=true", "loss=mse"), "model.factory", "os:system")


ESCAPE = "nice\x1b]0;owned\x07\x1b[2J"


def test_what_a_terminal_would_act_on_is_not_printed(kept: Path, tmp_path: Path) -> None:
    opened, sent = open_dataset(find_dataset("synthetic")), tmp_path / "data"
    write_dataset(sent, opened.manifest, opened.features, opened.targets, opened.offsets)
    manifest = json.loads((sent / "manifest.json").read_text())
    (sent / "manifest.json").write_text(json.dumps(manifest | {"name": ESCAPE}))
    code, output = umbel("run", f"dataset={sent}")
    assert (code, "\x1b" in output, "data.unprintable" in output) == (3, False, True)
    for key, value in (("dataset", ESCAPE), (ESCAPE, "synthetic")):
        run = sent_run(kept, tmp_path / "runs" / key[:4], key, value)
        (run / "history.jsonl").write_text("")  # without a round, nothing else reads the keys
        code, output = umbel("runs", "show", str(run))
        assert (code, "\x1b" in output, "config.unprintable" in output) == (2, False, True)


def test_names_of_folders_are_printed_without_escapes(kept: Path, umbel_home: Path) -> None:
    shutil.copytree(kept, umbel_home / "runs" / ESCAPE)
    for words in (("runs", "list"), ("runs", "show", "nosuch\x1b[2J")):
        assert "\x1b[2J" not in umbel(*words)[1]


@pytest.mark.parametrize("name", ["planted:a=b", "planted: boom", "planted:a;b", "flower:planted:Boom"])
def test_no_way_of_writing_a_name_gets_past(name: str, kept: Path, planted: Path, tmp_path: Path) -> None:
    run = str(sent_run(kept, tmp_path / "sent", "strategy", name))
    for words in (("runs", "report", run), ("run", run, "--resume", "rounds=9")):
        ended(*umbel(*words), "config.untrusted-code", "planted")
    assert not planted.exists()


def test_a_run_without_its_table_names_nothing(kept: Path, planted: Path, tmp_path: Path) -> None:
    shutil.copytree(kept, tmp_path / "sent")
    (tmp_path / "sent" / "config.toml").write_text('model = "planted:boom"\nloss = "mse"\n')
    for words in (("run", "{}", "--resume"), ("runs", "show", "{}"), ("runs", "report", "{}")):
        run = str(tmp_path / "sent")
        ended(*umbel(*(word.format(run) for word in words)), "config.no-run", "config.toml")
    assert not planted.exists()


@pytest.mark.parametrize("command", ["run", "price"])
def test_a_file_of_settings_names_only_code_that_lies_where_the_person_works(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sent.toml").write_text('model = "planted:boom"\nloss = "mse"\n')
    sent, work = str(tmp_path / "sent.toml"), tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "planted.py").write_text("raise SystemExit(99)")
    ended(*umbel(command, sent), "config.untrusted-code", "planted:boom")
    (work / "planted.py").write_text("raise ImportError('it is read')")
    ended(*umbel(command, sent), "config.import", "it is read")


def test_a_link_in_a_run_leads_no_writing_out_of_it(kept: Path, tmp_path: Path) -> None:
    run, outside = tmp_path / "sent", tmp_path / "outside"
    shutil.copytree(kept, run)
    outside.write_text("mine")
    (run / f".report.html.{os.getpid()}.tmp").symlink_to(outside)
    (run / "report.html").unlink(missing_ok=True)
    code, output = umbel("runs", "report", str(run))
    assert (code, outside.read_text()) == (0, "mine"), output
    assert (run / "report.html").is_file()


@pytest.mark.parametrize("file", ["history.jsonl", "nodes.json"])
def test_a_device_in_a_run_is_not_read(file: str, kept: Path, tmp_path: Path) -> None:
    run = tmp_path / "sent"
    shutil.copytree(kept, run)
    (run / file).unlink(missing_ok=True)
    (run / file).symlink_to(os.devnull)  # one that ends, should it be read
    for words in (("runs", "report", str(run)), ("runs", "show", str(run))):
        ended(*umbel(*words), "config.special-file", file)


def test_a_device_in_a_dataset_is_not_read(tmp_path: Path) -> None:
    opened, sent = open_dataset(find_dataset("synthetic")), tmp_path / "data"
    write_dataset(sent, opened.manifest, opened.features, opened.targets, opened.offsets)
    (sent / "clients.json").symlink_to(os.devnull)
    ended(*umbel("run", f"dataset={sent}"), "data.unreadable", "clients.json is not a file")


DEEP = "[" * 100_000
NO_NUMBERS = safetensors.numpy.save({"weight": np.zeros((2, 0), np.float32)})
DAMAGED = {
    "a header of 9 EB": ("hypotheses.safetensors", b"\xff" * 7 + b"\x7f{}"),
    "a deep config": ("config.toml", f"x = {DEEP}".encode()),
    "deep rounds": ("history.jsonl", f"{DEEP}\n{{}}\n".encode()),
    "a reason that is a list": ("outcome.json", b"[]"),
    "a deep reason": ("outcome.json", DEEP.encode()),
    "clients without end": ("participations.jsonl", b'{"4000000000": 1}\n{}\n'),
    "hypotheses without numbers": ("hypotheses.safetensors", NO_NUMBERS),
    "a client too far": ("participations.jsonl", b'{"4000": 1}\n{}\n'),
    "nodes of another kind": ("nodes.json", b"[3]"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_run_is_told_in_one_line(what: str, kept: Path, umbel_home: Path) -> None:
    run = umbel_home / "runs" / "sent"
    shutil.copytree(kept, run)
    file, content = DAMAGED[what]
    (run / file).write_bytes(content)
    commands = ["runs report {0}", "runs show {0}", "runs show {0} {0}", "runs export {0} {0}/out"]
    commands += ["predict {0} synthetic", "run {0} --resume rounds=9"]
    told = [umbel(*command.format(run).split()) for command in commands]
    failed = [output for code, output in told if code]
    assert failed
    for output in failed:
        assert output.startswith("Error: "), output
        assert output.endswith("]\n"), output
        assert output.count("\n") == 1, output
    assert umbel("runs", "list")[0] == 0


def test_a_guarantee_is_told_only_for_the_releases_of_a_runs_rounds(kept: Path, tmp_path: Path) -> None:
    run = tmp_path / "sent"
    shutil.copytree(kept, run)
    (run / "participations.jsonl").write_text('{"0": 1}\n{}\n')
    ended(*umbel("runs", "report", str(run)), "config.run-damaged", "1 releases", "history.jsonl")
    (run / "participations.jsonl").write_text('{"0": 100}\n{}\n')
    for words in (("runs", "report"), ("runs", "show")):
        ended(*umbel(*words, str(run)), "config.run-damaged", "100", "history.jsonl")


def test_why_a_run_ended_is_only_text(kept: Path, tmp_path: Path) -> None:
    run = tmp_path / "sent"
    shutil.copytree(kept, run)
    (run / "outcome.json").write_text(json.dumps({"stopped": "\x1b]0;owned\x07[/bold]"}))
    code, output = umbel("runs", "show", str(run))
    assert (code, "\x1b" in output, "[/bold]" in output) == (0, False, True), output
