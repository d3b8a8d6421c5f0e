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

from tests.helpers.cli import refused, said, umbel
from tests.helpers.datasets import save_manifest
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


@pytest.fixture
def sent(kept: Path, tmp_path: Path) -> Path:
    """The folder of a run that somebody else did."""
    return Path(shutil.copytree(kept, tmp_path / "sent"))


def naming(run: Path, key: str, name: str) -> str:
    """Change an entry of a run's config, and return the run."""
    saved = tomllib.loads((run / "config.toml").read_text())
    saved["config"][key] = name
    (run / "config.toml").write_text(tomli_w.dumps(saved))
    return str(run)


def sent_dataset(at: Path, **entries: str) -> Path:
    """Write a dataset whose manifest has other entries."""
    opened = open_dataset(find_dataset("synthetic"))
    write_dataset(at, opened.manifest, opened.features, opened.targets, opened.offsets)
    save_manifest(at, **entries)
    return at


def each(template: str, **places: object) -> list[str]:
    """Return the words of a command with folders in it."""
    return [word.format(**places) for word in template.split()]


@pytest.mark.parametrize("key", ["model", "loss", "metric", "strategy", "observers"])
def test_what_a_run_names_is_not_imported(key: str, planted: Path, sent: Path) -> None:
    run = naming(sent, key, "planted:boom")
    refused("config.untrusted-code", "run", run, "--resume", "rounds=9", parts=("planted:boom", "--trust"))
    refused("config.untrusted-code", "run", f"{run}/config.toml", parts=("planted:boom",))
    assert not planted.exists()


@pytest.mark.parametrize(
    "words",
    [
        "runs report {run}", "runs show {run}", "runs show {run} {run}", "runs export {run} out",
        "predict {run} synthetic", "run start-from={run}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["planted:boom", "os:system command=true"])
def test_no_command_runs_what_a_run_names(
    words: str, name: str, planted: Path, sent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.system", lambda command: planted.touch())
    code, output = umbel(*each(words, run=naming(sent, "model", name)))
    assert not planted.exists()
    assert code == 0 or "config.untrusted-code" in output, output


@pytest.mark.parametrize(
    "words",
    [
        "run dataset={data} rounds=1 clients-per-round=1 validation=clients=1", 'site check data-path="{data}"',
        "data show", "predict last {data}",
    ],
)  # fmt: skip
def test_no_command_runs_what_a_dataset_names(words: str, planted: Path, tmp_path: Path) -> None:
    data = sent_dataset(tmp_path / "sent", model="planted:boom", loss="mse")
    code, output = umbel(*each(words, data=data))
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
    reading = [("site", "journal", *words, ledger.path) for words in ([], ["--to-date"], ["--json"])]
    for words in reading:
        refused("config.untrusted-code", *words, parts=("planted:Own", "--trust"))
    assert not planted.exists()
    site = Site.serving(Policy(data_path=str(tmp_path), ledger_path=str(ledger.path), mechanisms="planted:Own"))
    monkeypatch.setattr(plugins, "_distrusted", set())
    assert Books(ledger.path, site).clients[0].epsilon_at_delta != "none"
    assert planted.exists()
    for words in reading:
        said("--trust", "planted:Own", *words)


@pytest.mark.parametrize("words", ["runs report {run}", "run {run} --resume rounds=9", 'site check data-path="{data}"'])
def test_no_library_finds_modules_in_the_folder_of_the_person(
    words: str, planted: Path, sent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent may lie there, beside modules that pandas, say, imports where it finds them."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = naming(sent, "model", "umbel.protocol.tasks:TrainingSpec")
    umbel(*each(words, run=run, data=find_dataset("synthetic")))
    assert str(planted.parent) not in sys.path


def test_what_a_person_names_runs_and_is_remembered(planted: Path, sent: Path) -> None:
    resumed = ("run", naming(sent, "strategy", "planted:boom"), "--resume", "rounds=9")
    refused("config.not-built-on", "--trust", "planted", *resumed, parts=("planted:boom",))
    assert planted.exists()
    for words in (resumed, ("run", "strategy=planted:boom")):
        refused("config.not-built-on", *words, parts=("planted:boom",))


def test_a_function_is_a_factory_only_of_the_module_that_was_named(planted: Path) -> None:
    refused("model.factory", "run", "model=os:system command=true", "loss=mse", parts=("os:system",))


@pytest.mark.parametrize("name", ["planted:a=b", "planted: boom", "planted:a;b", "flower:planted:Boom"])
def test_no_way_of_writing_a_name_gets_past(name: str, planted: Path, sent: Path) -> None:
    run = naming(sent, "strategy", name)
    for words in (("runs", "report", run), ("run", run, "--resume", "rounds=9")):
        refused("config.untrusted-code", *words, parts=("planted",))
    assert not planted.exists()


def test_a_run_without_its_table_names_nothing(planted: Path, sent: Path) -> None:
    (sent / "config.toml").write_text('model = "planted:boom"\nloss = "mse"\n')
    for words in ("run {run} --resume", "runs show {run}", "runs report {run}"):
        refused("config.no-run", *each(words, run=sent), parts=("config.toml",))
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
    refused("config.untrusted-code", command, sent, parts=("planted:boom",))
    (work / "planted.py").write_text("raise ImportError('it is read')")
    refused("config.import", command, sent, parts=("it is read",))


# --- what a terminal acts on

ESCAPE = "nice\x1b]0;owned\x07\x1b[2J"


def test_what_a_terminal_would_act_on_is_not_printed(sent: Path, umbel_home: Path, tmp_path: Path) -> None:
    """Neither from a manifest or a config, nor from the name of a folder, nor from why a run ended."""
    refused("data.unprintable", "run", f"dataset={sent_dataset(tmp_path / 'data', name=ESCAPE)}")
    shutil.copytree(sent, umbel_home / "runs" / ESCAPE)
    (sent / "outcome.json").write_text(json.dumps({"stopped": "\x1b]0;owned\x07[/bold]"}))
    told = [said("runs", "show", sent), said("runs", "list"), umbel("runs", "show", "nosuch\x1b[2J")[1]]
    assert "[/bold]" in told[0]
    assert not [one for one in told if "\x1b" in one]
    (sent / "history.jsonl").write_text("")  # without a round, nothing else reads the keys
    config = (sent / "config.toml").read_text()
    for key, value in (("dataset", ESCAPE), (ESCAPE, "synthetic")):
        (sent / "config.toml").write_text(config)
        assert "\x1b" not in refused("config.unprintable", "runs", "show", naming(sent, key, value))


# --- links, devices and damage


def test_a_link_in_a_run_leads_no_writing_out_of_it(sent: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (sent / f".report.html.{os.getpid()}.tmp").symlink_to(outside)
    (sent / "report.html").unlink(missing_ok=True)
    said("runs", "report", sent)
    assert outside.read_text() == "mine"
    assert (sent / "report.html").is_file()


@pytest.mark.parametrize("file", ["history.jsonl", "nodes.json"])
def test_a_device_in_a_run_is_not_read(file: str, sent: Path) -> None:
    (sent / file).unlink(missing_ok=True)
    (sent / file).symlink_to(os.devnull)  # one that ends, should it be read
    for command in ("report", "show"):
        refused("config.special-file", "runs", command, sent, parts=(file,))


def test_a_device_in_a_dataset_is_not_read(tmp_path: Path) -> None:
    data = sent_dataset(tmp_path / "data")
    (data / "clients.json").symlink_to(os.devnull)
    refused("data.unreadable", "run", f"dataset={data}", parts=("clients.json is not a file",))


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
    run = shutil.copytree(kept, umbel_home / "runs" / "sent")
    file, content = DAMAGED[what]
    (run / file).write_bytes(content)
    told = [
        umbel(*each(words, run=run))
        for words in (
            "runs report {run}", "runs show {run}", "runs show {run} {run}", "runs export {run} {run}/out",
            "predict {run} synthetic", "run {run} --resume rounds=9",
        )
    ]  # fmt: skip
    failed = [output for code, output in told if code]
    assert failed
    for output in failed:
        assert (output[:7], output[-2:], output.count("\n")) == ("Error: ", "]\n", 1), output
    said("runs", "list")


@pytest.mark.parametrize(("times", "commands"), [(1, ["report"]), (100, ["report", "show"])])
def test_a_guarantee_is_told_only_for_the_releases_of_a_runs_rounds(
    times: int, commands: list[str], sent: Path
) -> None:
    (sent / "participations.jsonl").write_text(f'{{"0": {times}}}\n{{}}\n')
    for command in commands:
        refused("config.run-damaged", "runs", command, sent, parts=("history.jsonl",))
