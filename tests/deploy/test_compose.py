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
PARSERS = {"flower-superlink": superlink, "flower-superexec": superexec, "flower-supernode": supernode}
EXECUTOR = ["python", "-m", "umbel.cli.parts", "executor"]
SERVERS_EXECUTOR = ["python", "-m", "umbel.cli.parts", "server-executor"]
"""Both take the options of Flower's own executor."""
GUARDED = ["umbel", "server", "start"]
"""Takes the options of Flower's own SuperLink, and the guard's."""
PACED = ["python", "-m", "umbel.cli.parts", "supernode"]
"""Takes the options of Flower's own SuperNode."""
SERVER = {"superlink", "serverapp"}
CLIENT = {"supernode", "clientapp"}
DEMO = {*SERVER, *SITES, *(f"{site}-app" for site in SITES)}
NODES = {"supernode", *SITES}
APPS = {"clientapp", *(f"{site}-app" for site in SITES)}


def tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed; pip install -c constraints.txt '.[dev]' brings it")
    return found


def document(profile: str, *overrides: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Return what Compose makes of the file, with no settings but `env`."""
    files = [option for file in ("docker-compose.yml", *overrides) for option in ("--file", str(ROOT / file))]
    command = [tool("docker-compose"), *files, "--env-file", os.devnull, "--profile", profile, "config"]
    environment = {"PATH": os.environ["PATH"]} | (env or {})
    done = subprocess.run([*command, "--format", "json"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(done.stdout)
    return read


def compose(profile: str, *overrides: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the services of `document`."""
    services: dict[str, Any] = document(profile, *overrides, env=env)["services"]
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
    executes = command[:4] in (EXECUTOR, SERVERS_EXECUTOR)
    program, *arguments = ["flower-superexec", *command[4:]] if executes else command
    if command[:4] == PACED:
        program, arguments = "flower-supernode", command[4:]
    if command[:3] == GUARDED:
        program, arguments = "flower-superlink", start_guarded(command)[0]
    PARSERS[program]().parse_args(arguments)


@pytest.mark.parametrize(
    ("profile", "expected"),
    [("server", SERVER), ("client", CLIENT), ("demo", DEMO), ("image", {"image"})],
)
def test_each_profile_is_valid_and_starts_its_own(profile: str, expected: set[str]) -> None:
    assert set(compose(profile)) == expected


def test_flower_takes_every_command(services: dict[str, Any]) -> None:
    for service in services.values():
        parse(service["command"])


def test_sites_run_the_images_own_app(services: dict[str, Any]) -> None:
    assert {name for name, service in services.items() if service["command"][:4] == EXECUTOR} == APPS


def test_only_the_server_publishes_a_port(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    ports = {name: [(port["target"], port["published"]) for port in found] for name, found in published.items()}
    assert ports == {"superlink": [(8000, "8000")]}


def test_an_app_reads_its_key_of_secure_sums_only_where_that_is_asked_for() -> None:
    app = compose("client", "umbel/deploy/parties.yml")["clientapp"]
    assert {*app["networks"]} == {"site"}
    assert {secret["source"] for secret in app["secrets"]} == {"ca.crt", "party.key"}


def test_tls_and_keys_are_the_default(services: dict[str, Any]) -> None:
    assert {"--enable-supernode-auth", "--ssl-keyfile=/run/secrets/server.key"} <= set(services["superlink"]["command"])
    for name in NODES:
        assert "--auth-supernode-private-key=/run/secrets/node.key" in services[name]["command"]
    # Between a SuperNode and its executor, on a network of their own, is no TLS.
    assert {name for name, service in services.items() if "--insecure" in service["command"]} == APPS


def test_a_guard_stands_in_front_of_the_server(services: dict[str, Any]) -> None:
    service = services["superlink"]
    assert service["command"][:3] == GUARDED
    _, rules = start_guarded(service["command"])
    # No address opens anything: behind Docker's network they may all look alike.
    assert rules == Rules(secret=b"/run/secrets/control.secret", runtime_at=frozenset({"inside"}))  # type: ignore[arg-type]
    assert {secret["target"] for secret in service["secrets"]} >= {"/run/secrets/control.secret"}
    holders = {name for name, one in services.items() if "control.secret" in json.dumps(one.get("secrets", []))}
    assert holders == {"superlink"}


def test_the_executor_alone_is_where_its_interface_is_open(services: dict[str, Any]) -> None:
    assert services["superlink"]["networks"]["server"]["aliases"] == ["inside"]
    assert not services["superlink"]["networks"]["front"]
    assert {name for name, service in services.items() if "server" in service["networks"]} == SERVER
    assert document("server")["networks"]["server"]["internal"]


def test_insecure_must_be_asked_for_by_name() -> None:
    for profile in ("server", "client"):
        for service in compose(profile, "umbel/deploy/insecure.yml").values():
            assert "--insecure" in service["command"]
            assert not service.get("secrets")
            parse(service["command"])
    assert compose("client", "umbel/deploy/insecure.yml")["clientapp"]["environment"]["UMBEL_SERVER_CA"] == ""
    _, rules = start_guarded(compose("server", "umbel/deploy/insecure.yml")["superlink"]["command"])
    assert rules.control_from == parse_networks("0.0.0.0/0 ::/0")
    assert rules.runtime_at == {"inside"}


def test_apps_see_no_key_and_no_network_but_their_own(services: dict[str, Any]) -> None:
    for name in APPS:
        [seen] = services[name]["secrets"]
        assert seen["source"] == "ca.crt", "public: it says which server a researcher signed a run for"
        assert services[name]["environment"]["UMBEL_SERVER_CA"] == "/run/secrets/ca.crt"
    for name in (*APPS, "serverapp"):
        assert "front" not in services[name]["networks"]
    for name in APPS:
        mounts = {mount["target"]: mount for mount in services[name]["volumes"]}
        assert mounts["/data"]["read_only"]
        assert set(mounts) == {"/data", "/ledger", "/witness"}
    # A ledger and a network of each site's own.
    for what in ("volumes", "networks"):
        kept = [json.dumps(services[name][what], sort_keys=True) for name in sorted(APPS)]
        assert len(set(kept)) == len(kept)


def test_one_network_alone_leads_out(services: dict[str, Any]) -> None:
    networks = document("*")["networks"]
    used = {network for service in services.values() for network in service["networks"]}
    assert {name for name in used if not networks[name].get("internal")} == {"front"}


def test_all_are_confined_watched_and_restarted(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"][:2] == ["CMD", "python"]
        # Slow is not dead: a program may take 15 minutes to load.
        assert service["healthcheck"]["start_period"] == "15m0s"
        assert service["pull_policy"] == "never"
        assert (service["mem_limit"], service["pids_limit"], service["tmpfs"]) == (
            str((2 if name in SERVER else 4) << 30), 512,
            ["/tmp:size=512m"],
        )  # fmt: skip
        assert service["logging"]["options"] == {"max-file": "3", "max-size": "10m"}
        assert "privileged" not in service


@pytest.mark.parametrize("policy", ["", POLICY, 'role="split" budget=16.0'])
def test_the_site_reads_its_policy(policy: str) -> None:
    service = compose("client", env={"POLICY": policy} if policy else {})["supernode"]
    node_config = parse_config_args([vars(supernode().parse_args(service["command"][4:]))["node_config"]])
    site = Site.of(node_config)
    assert str(site.data_path) == "/data"
    limits = site.limits
    # What Compose says where there is no .env comes on top of what a site has that says nothing.
    assert (limits.budget, limits.participations) == ((16, math.inf) if policy else (8, 30))


def test_a_gpu_goes_to_the_clientapp_alone() -> None:
    services = compose("client", "umbel/deploy/gpu.yml")
    assert services["clientapp"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert "deploy" not in services["supernode"]


def test_the_example_of_an_env_file_is_valid() -> None:
    command = [tool("docker-compose"), "--file", str(ROOT / "docker-compose.yml"), "--profile", "*"]
    command += ["--env-file", str(ROOT / ".env.example"), "config", "--quiet"]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_dockerfile_is_clean() -> None:
    done = subprocess.run([tool("hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_starts_from_the_base_that_env_names() -> None:
    """By its digest, for one: a tag alone may name other bytes tomorrow."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    [start] = [line for line in dockerfile if line.startswith("FROM ")]
    assert start == "FROM $BASE"
    assert f"ARG BASE={base({})}" in dockerfile[: dockerfile.index(start)], "without Compose it is the same"
    pinned = f"python:3.11-slim@sha256:{'0' * 64}"
    assert base({"BASE": pinned}) == pinned


def test_the_image_for_a_gpu_has_a_tag_of_its_own() -> None:
    for env, tag in (({}, "cpu"), ({"TORCH": "cuda"}, "cuda")):
        services = compose("*", env=env)
        assert {service["image"] for service in services.values()} == {f"umbel:{tag}"}
        assert services["image"]["build"]["args"]["TORCH"] == tag


def base(env: dict[str, str]) -> str:
    found: str = compose("image", env=env)["image"]["build"]["args"]["BASE"]
    return found


def test_the_image_holds_the_code_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    assert kept == {
        "pyproject.toml",
        "constraints.txt",
        "requirements",
        "LICENSE",
        "NOTICE",
        "README.md",
        "configs",
        "umbel",
    }
    # Certificates and settings are where Git does not look either.
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert {"/certs/", "/.env"} <= set(ignored)


def test_the_demo_configuration_is_a_run_of_the_app(run_config: dict[str, Any]) -> None:
    values = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    assert set(values) <= set(run_config)
    setup = Setup.parse(run_config | values)
    assert setup.manifest is None
    assert setup.fleet.run.wait.nodes == len(SITES)


def test_the_image_makes_the_bundle_of_the_checkout(tmp_path: Path) -> None:
    """By which a site knows whether a server runs the umbel of its image."""
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        for source in ROOT.glob(line[1:]) if line.startswith("!") else ():
            target = tmp_path / source.relative_to(ROOT)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.parent.mkdir(exist_ok=True)
                shutil.copy(source, target)
    assert build_bundle(tmp_path) == build_bundle(ROOT)
