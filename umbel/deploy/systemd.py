"""A hardened systemd unit for a site or a server without containers.

    umbel site install --systemd --superlink HOST:PORT --root-certificates /etc/umbel/ca.crt \\
        --auth-supernode-private-key /etc/umbel/site-1

prints a unit whose command is ``umbel site start`` with these options, and the commands that put it to work. The
service has its own user. It can write only its state directory and, if the policy names others, the folders of
the ledger and the kept models.
"""

from __future__ import annotations

import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from umbel.client.checks import entries_of
from umbel.deploy import server as guarded
from umbel.privacy.gate.policy import Policy
from umbel.privacy.gate.policy_file import POLICY_FILE, policy_of
from umbel.protocol.cli import PASSES_ON, command_line, errors_in_one_line
from umbel.protocol.errors import UnitError
from umbel.protocol.flower import parse_options
from umbel.protocol.home import write_atomically
from umbel.protocol.project import PACKAGE

POLICY = Path("/etc/umbel/policy.toml")
_STATE = Path("/var/lib")
_UNITS = Path("/etc/systemd/system")
_HIDDEN = tuple(map(Path, ("/home", "/root", "/run/user", "/tmp", "/var/tmp")))  # by ProtectHome and PrivateTmp
_UMBEL = (sys.executable, "-P", "-m", "umbel")
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
_FILES = (
    "root_certificates", "auth_supernode_private_key", "trusted_entities", "ssl_certfile", "ssl_keyfile",
    "ssl_ca_certfile", "superexec_auth_secret_file", "database", "log_file", "control_secret", "sites", "certificate",
    "key",
)  # fmt: skip
"""The options that are files."""
_PRIVATE = ("auth_supernode_private_key", "ssl_keyfile", "superexec_auth_secret_file", "control_secret", "key")

_CONFINED = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
KeyringMode=private
RemoveIPC=yes
UMask=0077
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
"""
_NO_DEVICES = "PrivateDevices=yes\n"
_GPU = "DevicePolicy=closed\nDeviceAllow=char-nvidia* rw\n"
_NO_DISK = "LimitCORE=0\nMemorySwapMax=0\n"


@dataclass(frozen=True)
class Unit:
    """A service of umbel.

    Parameters
    ----------
    name : str
        Name of the unit, its user, and its state directory in ``/var/lib`` if it `keeps` data.
    what : str
        Its description.
    command : sequence of str
        The words after ``umbel``.
    writes, reads : sequence of Path
        Folders that it writes besides its state directory, and paths that may be on another file system.
    private : sequence of Path
        Files that only its user may read.
    memory : int
        Maximum memory in GiB, for all its processes together.
    gpu : bool
        Whether it may use NVIDIA's GPUs.
    ledger : Path, optional
        A site's ledger.
    keeps : bool
        Whether it keeps data. If not, nothing that it holds reaches a disk.
    """

    name: str
    what: str
    command: Sequence[str]
    writes: Sequence[Path]
    reads: Sequence[Path]
    private: Sequence[Path]
    memory: int
    gpu: bool = False
    ledger: Path | None = None
    keeps: bool = True

    @property
    def home(self) -> Path:
        """Its folder for data that it keeps, or a private one, which ends with it."""
        return _STATE / self.name if self.keeps else Path("/tmp")

    def text(self) -> str:
        """Return the unit's file."""
        environment = {
            "HOME": self.home,
            "UMBEL_HOME": self.home,
            "FLWR_HOME": self.home / "flwr",
            "FLWR_TELEMETRY_ENABLED": 0,
            "FLWR_DISABLE_UPDATE_CHECK": 1,
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": 1,
            "PYTHONUNBUFFERED": 1,
        }
        lines = [
            "[Unit]",
            f"Description={self.what}",
            "Wants=network-online.target",
            "After=network-online.target time-sync.target",
            *(f"RequiresMountsFor={_path(path)}" for path in dict.fromkeys([*self.writes, *self.reads])),
            "# A server may be away for days, and a site's key may be registered later: it is tried without end.",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={' '.join(map(quoted, [*_UMBEL, *self.command]))}",
            "# Also after success: Flower ends with 0 when its executor dies. `systemctl stop` still stops it.",
            "Restart=always",
            "RestartSec=30",
            "# Wrong options, which do not get better by themselves.",
            "RestartPreventExitStatus=2",
            "# If the kernel kills the process of one message, the others continue.",
            "OOMPolicy=continue",
            f"User={self.name}",
            *((f"StateDirectory={self.name}", "StateDirectoryMode=0700") if self.keeps else _NO_DISK.splitlines()),
            f"WorkingDirectory={self.home}",
            *(f"Environment={name}={value}" for name, value in environment.items()),
            *(f"ReadWritePaths={_path(path)}" for path in self.writes),
            f"MemoryMax={self.memory}G",
            "TasksMax=512",
            *((_GPU if self.gpu else _NO_DEVICES) + _CONFINED).splitlines(),
            "",
            "[Install]",
            "WantedBy=multi-user.target",
        ]
        return "\n".join(lines) + "\n"

    def steps(self, out: Path | None) -> Iterator[str]:
        """Yield the commands by which root puts the unit to work."""
        yield f"useradd --system --home-dir {self.home} --shell /usr/sbin/nologin {self.name}"
        for folder in [self.home, *self.writes]:
            if not folder.exists():
                yield shlex.join(["install", "-d", "-m", "700", "-o", self.name, str(folder)])
        if self.ledger and not self.ledger.exists():
            create = [*_UMBEL, "ledger", "create", str(self.ledger)]
            yield shlex.join(["runuser", "-u", self.name, "--", *create])
        for file in self.private:
            yield shlex.join(["chown", self.name, str(file)])
        if out is None or out.absolute().parent != _UNITS:
            yield shlex.join(["cp", str(out or f"{self.name}.service"), f"{_UNITS}/{self.name}.service"])
        yield "systemctl daemon-reload"
        yield f"systemctl enable --now {self.name}"


def quoted(word: str) -> str:
    """Return a word of a command as systemd reads it back."""
    return _quoted(word.replace("$", "$$"))  # a command alone has variables


def _quoted(word: str) -> str:
    """Return a word in quotes where it needs them, without specifiers."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("%", "%%")
    return word if re.fullmatch(r"[\w@%+=:,./$-]+", word, re.ASCII) else f'"{word}"'


def _path(path: Path) -> str:
    return _quoted(str(path))


_Systemd = Annotated[bool, typer.Option("--systemd", help="Write a systemd unit.")]
_Out = Annotated[Path | None, typer.Option(help="The unit's file; by default standard output.")]
_Name = Annotated[str, typer.Option(help="Name of the unit, of its user and of its state directory.")]
_Memory = Annotated[int, typer.Option(min=1, help="Maximum memory of all its processes together, in GiB.")]


def _site(
    context: typer.Context,
    systemd: _Systemd,
    out: _Out = None,
    name: _Name = "umbel-site",
    memory: _Memory = 4,
    gpu: Annotated[bool, typer.Option("--gpu", help="Let it use NVIDIA's GPUs.")] = False,
) -> None:
    """Write a systemd unit for umbel site start. Takes the options of flower-supernode.

    The policy comes from a file, /etc/umbel/policy.toml unless --node-config names another policy-file.
    """
    with errors_in_one_line():
        _write(site_unit(context.args, name, memory, gpu), out)


def _server(
    context: typer.Context,
    systemd: _Systemd,
    out: _Out = None,
    name: _Name = "umbel-server",
    memory: _Memory = 4,
) -> None:
    """Write a systemd unit for umbel server start. Takes that command's options."""
    with errors_in_one_line():
        _write(server_unit(context.args, name, memory), out)


def site_unit(arguments: Sequence[str], name: str, memory: int, gpu: bool = False) -> Unit:
    """Return the unit of a site that starts with these options."""
    arguments = [*arguments]
    options = parse_options("flower-supernode", arguments)
    if options.node_config is None:
        arguments += ["--node-config", f'{POLICY_FILE}="{POLICY}"']
        options = parse_options("flower-supernode", arguments)
    entries = entries_of(options.node_config)
    if not entries.get(POLICY_FILE):
        # Whoever starts units may change what stands in one.
        text = f"a unit reads its policy from a file: write --node-config '{POLICY_FILE}=\"{POLICY}\"'"
        raise UnitError(text, code="unit.no-policy-file")
    policy = policy_of(Policy.current(entries))
    ledger = Path(policy.ledger_path or _STATE / name / "ledger.sqlite")
    named = [ledger.parent, *([Path(policy.keep_model)] if policy.keep_model else [])]
    writes = [folder for folder in named if _STATE / name not in (folder, *folder.parents)]
    data = Path(policy.data_path)
    for folder in writes:
        if folder in (data, *data.parents):
            raise UnitError(
                f"the service could write {folder}, which holds the data {data}; put ledger and kept models elsewhere, "
                f"such as into {_STATE / name}",
                code="unit.data-writable",
            )
    keys = [Path(policy.party_key)] if policy.party_key else []
    reads = [data, Path(entries[POLICY_FILE]), *keys]
    command = ["site", "start", *arguments]
    unit = _unit(name, "umbel: a site of federated learning", command, options, writes, reads, memory)
    return replace(unit, gpu=gpu, ledger=ledger, private=[*unit.private, *keys])


def server_unit(arguments: Sequence[str], name: str, memory: int) -> Unit:
    """Return the unit of a server that starts with these options."""
    arguments = [*arguments]
    guard = typer.main.get_command(guarded.start).make_context("umbel server start", [*arguments])
    options = parse_options("flower-superlink", guard.args)
    options.control_secret = guard.params["control_secret"]
    if options.database.startswith(":"):
        # In memory, the keys of the sites would be forgotten at each start.
        arguments += ["--database", str(_STATE / name / "state.db")]
    command = ["server", "start", *arguments]
    folders = [Path(file).parent for file in (options.database, options.log_file) if file and not file.startswith(":")]
    writes = [folder for folder in folders if _STATE / name not in (folder, *folder.parents)]
    return _unit(name, "umbel: the server of federated learning", command, options, writes, [], memory)


def _unit(
    name: str,
    what: str,
    command: Sequence[str],
    options: Namespace,
    writes: Iterable[Path],
    reads: Sequence[Path],
    memory: int,
) -> Unit:
    """Return a unit; raise unless it will find all its files."""
    if not _NAME.fullmatch(name):
        raise UnitError(
            f"--name must be at most 31 lower-case letters, digits and hyphens, got {name!r}", code="unit.bad-name"
        )
    found = {key: Path(file) for key in _FILES if (file := getattr(options, key, None))}
    files = {key: file for key, file in found.items() if not str(file).startswith(":")}
    for key, file in files.items():
        if not file.is_absolute():
            text = f"--{key.replace('_', '-')} must be an absolute path in a unit, got {file}"
            raise UnitError(text, code="unit.relative-path")
    writes = [*dict.fromkeys(writes)]
    # The interpreter may be a link into a home.
    program = [Path(sys.executable), Path(sys.executable).resolve(), PACKAGE]
    for file in [*files.values(), *writes, *reads, *program]:
        if any(hidden in (file, *file.parents) for hidden in _HIDDEN):
            text = f"a unit sees no home folders, /tmp or /var/tmp, and {file} is in one"
            raise UnitError(f"{text}; move it to /etc/umbel, /srv or /opt/umbel", code="unit.in-home")
    private = [files[key] for key in _PRIVATE if key in files]
    return Unit(name, what, command, writes, reads, private, memory)


def _write(unit: Unit, out: Path | None) -> None:
    if out is None:
        typer.echo(unit.text(), nl=False)
    else:
        write_atomically(out, unit.text().encode())
    typer.echo("Then, as root:\n" + "\n".join(f"  {step}" for step in unit.steps(out)), err=True)


site, server = (command_line(main, **PASSES_ON) for main in (_site, _server))
