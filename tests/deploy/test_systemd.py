"""The systemd units of a site and a server: what they run, what they may write, and what is refused before."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.helpers.errors import ended
from umbel.cli.main import app
from umbel.deploy import systemd

SITE = ["site", "install", "--systemd", "--superlink", "s.example.org:8000", "--root-certificates", "/etc/umbel/ca.crt"]
SERVER = ["server", "install", "--systemd", "--host", "0.0.0.0", "--control-secret", "/etc/umbel/control.secret"]


@pytest.fixture(autouse=True)
def homes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may themselves run in a home."""
    hidden = [one for one in systemd._HIDDEN if one not in (Path("/home"), Path("/root"), Path("/tmp"))]
    monkeypatch.setattr(systemd, "_HIDDEN", (Path("/home/ann"), *hidden))


@pytest.fixture
def policy(tmp_path: Path) -> Callable[..., list[str]]:
    def write(**entries: str) -> list[str]:
        file = tmp_path / "policy.toml"
        said = {"data-path": "/srv/hospital"} | {name.replace("_", "-"): value for name, value in entries.items()}
        file.write_text("".join(f'{name} = "{value}"\n' for name, value in said.items()) + "# end\n")
        file.chmod(0o644)
        return ["--node-config", f'policy-file="{file}"']

    return write


def install(*words: str) -> tuple[str, str]:
    """Return the unit, and the commands that are printed beside it."""
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


def settings(unit: str, name: str) -> list[str]:
    return [line.partition("=")[2] for line in unit.splitlines() if line.startswith(f"{name}=")]


def command(unit: str) -> list[str]:
    [line] = settings(unit, "ExecStart")
    words = shlex.split(line)[4:]
    return [word.replace("%%", "%").replace("$$", "$") for word in words]


def test_a_site_runs_with_the_policy_of_a_file_and_writes_its_state_alone(policy: Callable[..., list[str]]) -> None:
    options = policy(budget="4.0", ledger_path="/var/lib/umbel-site/ledger.sqlite")
    unit, told = install(*SITE, "--auth-supernode-private-key", "/etc/umbel/site-1", *options)
    assert command(unit) == [
        "site", "start", *SITE[3:], "--auth-supernode-private-key", "/etc/umbel/site-1", *options,
    ]  # fmt: skip
    assert settings(unit, "User") == settings(unit, "StateDirectory") == ["umbel-site"]
    assert settings(unit, "ReadWritePaths") == []
    assert settings(unit, "RequiresMountsFor") == ["/srv/hospital", options[1].split('"')[1]]
    for line in (
        "NoNewPrivileges=yes", "CapabilityBoundingSet=", "ProtectSystem=strict", "ProtectHome=yes", "PrivateTmp=yes",
        "PrivateDevices=yes", "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX", "SystemCallFilter=@system-service",
        "MemoryMax=4G", "TasksMax=512", "Restart=always", "StartLimitIntervalSec=0", "RestartPreventExitStatus=2",
        "Environment=UMBEL_HOME=/var/lib/umbel-site",
    ):  # fmt: skip
        assert line in unit.splitlines()
    for step in (
        "useradd --system --home-dir /var/lib/umbel-site", "chown umbel-site /etc/umbel/site-1",
        "systemctl enable --now umbel-site", "umbel ledger create /var/lib/umbel-site/ledger.sqlite",
    ):  # fmt: skip
        assert step in told


def test_the_folders_that_a_policy_names_are_writable_too(policy: Callable[..., list[str]]) -> None:
    options = policy(ledger_path="/srv/umbel/ledger.sqlite", keep_model="/srv/kept")
    unit, told = install(*SITE, *options, "--name", "ward-3", "--memory", "16", "--gpu")
    assert settings(unit, "ReadWritePaths") == ["/srv/umbel", "/srv/kept"]
    assert settings(unit, "MemoryMax") == ["16G"]
    # Only a command has variables, where $$ stands for $.
    dollars, _ = install(*SITE, *policy(ledger_path="/srv/$umbel/ledger.sqlite"))
    assert settings(dollars, "ReadWritePaths") == ["/srv/$umbel"]
    assert settings(unit, "DeviceAllow") == ["char-nvidia* rw"]
    assert not settings(unit, "PrivateDevices")
    assert "install -d -m 700 -o ward-3 /srv/umbel" in told


def test_a_sites_user_owns_its_key_in_parties(policy: Callable[..., list[str]]) -> None:
    _, told = install(*SITE, *policy(party_key="/etc/umbel/party"))
    assert "chown umbel-site /etc/umbel/party" in told
    done = CliRunner().invoke(app, [*SITE, *policy(party_key="/home/ann/party")])
    ended(done.exit_code, done.output, "unit.in-home", "/home/ann/party")


def test_a_server_keeps_its_database(tmp_path: Path) -> None:
    unit, _ = install(*SERVER)
    assert command(unit) == ["server", "start", *SERVER[3:], "--database", "/var/lib/umbel-server/state.db"]
    unit, told = install(*SERVER, "--database", "/srv/flower/state.db", "--ssl-keyfile", "/etc/umbel/server.key")
    assert settings(unit, "ReadWritePaths") == ["/srv/flower"]
    assert "chown umbel-server /etc/umbel/server.key" in told
    assert "chown umbel-server /etc/umbel/control.secret" in told


def test_a_file_is_written_and_not_copied_again(tmp_path: Path) -> None:
    unit, told = install(*SERVER, "--out", str(tmp_path / "umbel.service"))
    assert unit == ""
    assert (tmp_path / "umbel.service").read_text().startswith("[Unit]")
    assert f"cp {tmp_path}/umbel.service /etc/systemd/system/umbel-server.service" in told


@pytest.mark.parametrize("word", ["plain", 'a="b c"', "100%", "$HOME", "back\\slash", "", "é"])
def test_systemd_reads_a_word_back(word: str) -> None:
    [read] = shlex.split(systemd.quoted(word))
    assert read.replace("%%", "%").replace("$$", "$") == word


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--root-certificates", "certs/ca.crt"], "unit.relative-path", "--root-certificates"),
        (["--root-certificates", "/home/ann/ca.crt"], "unit.in-home", "/home/ann/ca.crt"),
        (["--name", "../x"], "unit.bad-name", "../x"),
        (["--node-config", 'data-path="/srv/hospital" budget=4.0'], "unit.no-policy-file", "policy-file"),
        (["--node-config", "nonsense"], "site.bad-pairs", "nonsense"),
        (["--node-config", 'policy-file="/etc/umbel/none.toml"'], "site.policy-file", "/etc/umbel/none.toml"),
    ],
)
def test_what_would_fail_later_is_told_now(
    policy: Callable[..., list[str]], words: list[str], code: str, part: str
) -> None:
    done = CliRunner().invoke(app, [*SITE, *policy(), *words])
    ended(done.exit_code, done.output, code, part)


def test_a_ledger_that_would_end_with_the_service_is_refused(policy: Callable[..., list[str]]) -> None:
    """In the service /var/tmp is another folder, which is empty at each start."""
    done = CliRunner().invoke(app, [*SITE, *policy(ledger_path="/var/tmp/ledger.sqlite")])
    ended(done.exit_code, done.output, "unit.in-home", "/var/tmp")


def test_the_data_are_never_writable(policy: Callable[..., list[str]]) -> None:
    done = CliRunner().invoke(app, [*SITE, *policy(ledger_path="/srv/ledger.sqlite")])
    ended(done.exit_code, done.output, "unit.data-writable", "/srv/hospital")


@pytest.mark.parametrize("words", [[*SITE, "--typo"], [*SERVER, "--typo"], ["site", "install"]])
def test_options_that_do_not_exist_are_refused(policy: Callable[..., list[str]], words: list[str]) -> None:
    assert CliRunner().invoke(app, [*words, *(policy() if "--typo" in words else [])]).exit_code == 2


def test_systemd_finds_no_fault(policy: Callable[..., list[str]], tmp_path: Path) -> None:
    if not (analyze := shutil.which("systemd-analyze")):
        pytest.skip("there is no systemd-analyze")
    units = [tmp_path / f"umbel-{name}.service" for name in ("site", "server")]
    install(*SITE, *policy(ledger_path="/srv/umbel/ledger.sqlite"), "--out", str(units[0]))
    install(*SERVER, "--out", str(units[1]))
    for unit in units:
        done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
        # It also looks at this machine's own units.
        assert not [line for line in done.stderr.splitlines() if unit.stem in line]
