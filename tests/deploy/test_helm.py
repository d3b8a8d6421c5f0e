"""The Helm chart, as it was rendered into tests/deploy/helm: the same programs as the containers, no more open."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from typing import Any

import pytest
import yaml
from flwr.common.config import parse_config_args
from jsonschema import Draft7Validator

from tests.deploy.test_compose import GUARDED, compose, parse, start_guarded
from tests.helpers import helm
from umbel.deploy.guard import Rules
from umbel.protocol.project import described

Document = dict[str, Any]


roles = pytest.mark.parametrize("role", helm.ROLES)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return compose("*")


def document(role: str, kind: str) -> Document:
    [found] = [one for one in helm.copied(role)[1] if one["kind"] == kind]
    return found


def pod(role: str) -> Document:
    found: Document = document(role, "StatefulSet")["spec"]["template"]["spec"]
    return found


def container(name: str) -> Document:
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


def test_the_guard_admits_the_secret_and_the_pods_own_executor() -> None:
    command = container("superlink")["command"]
    assert command[:3] == GUARDED
    assert start_guarded(command)[1] == Rules(secret=b"/run/secrets/umbel/control.secret")
    [address] = [word for word in container("serverapp")["command"] if word.startswith("--runtime-api-address=")]
    assert address.endswith("=localhost:8000"), "a name of every certificate"


def test_a_site_has_the_policy_of_a_file_and_a_ledger_that_no_chart_makes(services: dict[str, Any]) -> None:
    """An empty one would hide that the old one was lost."""
    command, own = container("supernode")["command"], container("clientapp")["env"]
    [entries] = [word.partition("=")[2] for word in command if word.startswith("--node-config=")]
    assert parse_config_args([entries]) == {"policy-file": "/etc/umbel/policy.toml"}
    policy = tomllib.loads(document("site", "ConfigMap")["data"]["policy.toml"])
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
    server, site = (document(role, "NetworkPolicy")["spec"] for role in helm.ROLES)
    port = {"ports": [{"protocol": "TCP", "port": 8000}]}
    assert server["ingress"] == [port]
    assert server["egress"] == site["ingress"] == []
    assert server["policyTypes"] == site["policyTypes"] == ["Ingress", "Egress"]
    [to_server, to_dns] = site["egress"]
    assert to_server == {"to": [{"ipBlock": {"cidr": "203.0.113.7/32"}}], **port}
    assert {port["port"] for port in to_dns["ports"]} == {53}
    for role, policy in zip(helm.ROLES, (server, site), strict=True):
        labels = document(role, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
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
    assert document(role, "StatefulSet")["spec"]["replicas"] == 1, "one ledger, one database: one pod"
    assert document(role, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 0
