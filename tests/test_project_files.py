"""Files beside the code: workflows call what is there, and all tell one version."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tests.helpers.sources import ROOT
from tools import install
from umbel.cli.main import app

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BIN = Path(sys.executable).parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def load(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return found


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_calls_targets_and_commands_that_exist(file: Path) -> None:
    known = typer.main.get_command(app).list_commands(None)  # type: ignore[attr-defined, arg-type]
    lines = [line.strip() for step in steps(load(file)) for line in step.get("run", "").splitlines()]
    for line in lines:
        for target in re.findall(r"^make (\S+)", line):
            assert target.startswith(".venv/") or re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
        for command in re.findall(r"^umbel (\S+)", line):
            assert command in known, command


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_may_write_only_where_it_says_so(file: Path) -> None:
    workflow = load(file)
    assert workflow["permissions"] == {"contents": "read"}
    for step in steps(workflow):
        # By its digest: a tag may be moved.
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{40 * '0'}"))
        # An expression in a script would run what a title or a branch is called.
        assert "${{" not in step.get("run", "")


@pytest.mark.rest
@pytest.mark.parametrize(
    ("file", "right", "wrong", "found"),
    [
        (None, "", "", []),
        ("workflows/release.yml", "needs: build", "needed: build", ["vendor.github-workflows"]),
        ("workflows/tests.yml", "    timeout-minutes: 120", "", ["custom.github-workflows-require-timeout"]),
        ("workflows/docs.yml", "3d3c42e5aac5ba805825da76410c181273ba90b1", "v7", ["zizmor"]),
        ("workflows/docs.yml", "run: make docs", "run: echo ${{ github.head_ref }}", ["zizmor"]),
        ("ISSUE_TEMPLATE/bug.yml", "body:", "bodies:", ["vendor.github-issue-forms"]),
        ("dependabot.yml", "weekly", "often", ["vendor.dependabot"]),
    ],
)
def test_make_check_finds_what_is_wrong_in_these_files(
    tmp_path: Path, file: str | None, right: str, wrong: str, found: list[str]
) -> None:
    shutil.copytree(GITHUB, tmp_path / ".github")
    shutil.copy(ROOT / "CITATION.cff", tmp_path)
    if file:
        text = (tmp_path / ".github" / file).read_text(encoding="utf-8")
        assert right in text
        (tmp_path / ".github" / file).write_text(text.replace(right, wrong, 1), encoding="utf-8")
    lines = re.findall(r"^\.venv/bin/((?:check-jsonschema|zizmor) .*)$", make("check"), re.MULTILINE)
    assert len(lines) == 6
    failed = [
        line for line in lines if subprocess.run(f"{BIN}/{line}", shell=True, cwd=tmp_path, check=False).returncode
    ]
    assert [next((name for name in found if name in line), line) for line in failed] == found


def test_the_tests_run_on_all_pythons_that_are_promised() -> None:
    matrix = load(GITHUB / "workflows" / "tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    promised = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    assert matrix["python"] == promised == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos"}


def test_publishing_needs_no_token() -> None:
    workflow = load(GITHUB / "workflows" / "release.yml")
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"]["id-token"] == "write"
    assert publish["needs"] == "empty", "the wheel was tried"
    assert "secrets." not in (GITHUB / "workflows" / "release.yml").read_text(encoding="utf-8")


def test_all_tell_one_version() -> None:
    assert load(ROOT / "CITATION.cff")["version"] == PROJECT["version"]
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert lab["version"] == PROJECT["version"]
    assert lab["dependencies"] == [f"umbel=={PROJECT['version']}"]
    assert lab["requires-python"] == PROJECT["requires-python"]
    label = f'org.opencontainers.image.version="{PROJECT["version"]}"'
    assert label in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in changes
    assert PROJECT["version"] in changes
    kinds = set(re.findall(r"^### (.*)", changes, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_table_of_flowers_versions_is_that_of_the_bounds() -> None:
    (bounds,) = [one for one in PROJECT["dependencies"] if one.startswith("flwr")]
    assert bounds == "flwr[simulation]>=1.42.0,<1.43"
    assert "| 1.42 | yes |" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def make(*words: str) -> str:
    return subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_demo_installs_no_development_tools_and_the_tests_do() -> None:
    always = ["--always-make"]
    assert "tools/install.py .\n" in make("demo", *always)
    assert "[dev]" not in make("demo", *always)
    assert '".[dev]" lab\n' in make("test", *always)


def test_settings_of_pip_hold_for_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_INDEX", "UV_FIND_LINKS", "UV_DEFAULT_INDEX", "SSL_CERT_FILE", "UV_INDEX_STRATEGY"):
        monkeypatch.delenv(name, raising=False)
    listed = (
        "global.find-links='/a /b'\n:env:.index-url='https://one.example'\n"
        "global.extra-index-url='https://two.example'\nglobal.timeout='5'\n"
    )
    found = install.settings_of_pip(listed)
    assert found == {
        "UV_DEFAULT_INDEX": "https://one.example", "UV_FIND_LINKS": "/a,/b", "UV_INDEX": "https://two.example",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }  # fmt: skip
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own.example")
    assert install.settings_of_pip(listed)["UV_DEFAULT_INDEX"] == "https://own.example"
    assert install.settings_of_pip("") == {}


@pytest.mark.parametrize(
    ("platform", "torch", "smi", "reached", "cpu"),
    [
        ("linux", None, None, True, True), ("linux", None, None, False, False),
        ("linux", None, "/usr/bin/nvidia-smi", True, False),
        ("linux", "", None, True, False), ("linux", "cpu", None, True, True), ("darwin", None, None, True, False),
    ],
)  # fmt: skip
def test_only_a_linux_machine_without_a_gpu_takes_the_cpu_build(
    monkeypatch: pytest.MonkeyPatch, platform: str, torch: str | None, smi: str | None, reached: bool, cpu: bool
) -> None:
    def answer(*_: object, **__: object) -> Any:
        if not reached:
            raise OSError("no such host")
        return (ROOT / "Makefile").open("rb")

    monkeypatch.delenv("TORCH", raising=False)
    if torch is not None:
        monkeypatch.setenv("TORCH", torch)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(install.shutil, "which", lambda _: smi)
    monkeypatch.setattr(install, "urlopen", answer)
    assert install.takes_cpu_build() is cpu


def test_pip_takes_over_where_uv_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        done.append(command)
        return subprocess.CompletedProcess(command, 1 if command[1:3] == ["pip", "install"] else 0, "")

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install.shutil, "which", lambda _: "/usr/bin/uv")
    monkeypatch.setattr(Path, "exists", lambda _: True)
    assert not install.by_uv(["."], cpu=True)
    assert install.by_pip([".", "lab"], cpu=True)
    assert [command[-2:] for command in done[-2:]] == [["torch", "torchvision"], ["--editable", "lab"]]
