"""Which bundles a site answers."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.helpers.errors import raises
from tests.helpers.sources import ROOT
from umbel.client import bundle as module
from umbel.client.bundle import Bundle, reviewed
from umbel.protocol.errors import SiteError
from umbel.protocol.flower import build_bundle

OWN = build_bundle(ROOT)
SHA256 = hashlib.sha256(OWN).hexdigest()


@pytest.fixture
def site(umbel_home: Path) -> dict[str, Any]:
    return {"data-path": str(umbel_home)}


def test_the_bundle_of_the_installed_umbel_is_answered_and_no_other(site: dict[str, Any]) -> None:
    assert not reviewed(OWN, site)
    other = hashlib.sha256(b"another").hexdigest()
    assert {SHA256, other} <= {*re.findall("[0-9a-f]{64}", reviewed(b"another", site))}


def test_a_site_that_names_bundles_answers_these_alone(site: dict[str, Any]) -> None:
    other = hashlib.sha256(b"another").hexdigest()
    site["bundle"] = f"{'0' * 64} {other.upper()}"
    assert not reviewed(b"another", site)
    assert reviewed(OWN, site)


@pytest.mark.parametrize("digits", [8, 63])
def test_the_whole_sum_counts(site: dict[str, Any], digits: int) -> None:
    """Flower names a bundle by eight digits, and another with the same is found in minutes."""
    other = "f" if SHA256[digits] != "f" else "e"
    site["bundle"] = SHA256[:digits] + other + SHA256[digits + 1 :]
    assert reviewed(OWN, site)


@pytest.mark.parametrize("wrong", [SHA256[:8], SHA256 + "0", SHA256[:-1] + "x", "any"])
def test_what_is_no_sum_is_refused(site: dict[str, Any], wrong: str) -> None:
    with raises(SiteError, "site.conflict", "bundle", 64):
        reviewed(OWN, site | {"bundle": wrong})


def test_without_a_pyproject_a_site_must_name_what_it_has_reviewed(
    site: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "APP", tmp_path)
    monkeypatch.setattr(Bundle, "installed", Bundle.installed.__wrapped__.__get__(Bundle))  # type: ignore[attr-defined]
    with raises(SiteError, "site.no-bundle"):
        reviewed(OWN, site)
    assert not reviewed(OWN, site | {"bundle": SHA256})


def test_a_bundle_is_written_into_a_new_folder_only(tmp_path: Path) -> None:
    assert CliRunner().invoke(module.app, ["--out", str(tmp_path / "new" / "bundle")]).exit_code == 0
    assert (tmp_path / "new" / "bundle" / "pyproject.toml").exists()
    (tmp_path / "own.txt").write_text("mine")
    again = CliRunner().invoke(module.app, ["--out", str(tmp_path)])
    assert again.exit_code == 2
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["own.txt"]
