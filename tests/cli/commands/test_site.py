"""`umbel site check`: a site looks at itself before it goes online."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.helpers.datasets import manifest
from tests.helpers.errors import ended
from umbel.cli.main import app
from umbel.data import offsets_of, write_dataset
from umbel.privacy.gate.ledger import Ledger
from umbel.protocol.project import OWN_PATH


@pytest.fixture
def data(tmp_path: Path) -> Path:
    own = manifest(3, 1, model="linear", loss="mse")
    write_dataset(tmp_path / "data", own, np.ones((8, 2), np.float32), np.ones(8, np.float32), offsets_of([2] * 4))
    return tmp_path / "data"


def check(node_config: str, *options: str) -> tuple[int, str]:
    command = ["site", "check", node_config, *options]
    told = CliRunner(env={"COLUMNS": "400"}).invoke(app, command, prog_name="umbel")
    return told.exit_code, told.output


def test_it_says_what_the_site_has_and_what_it_accepts(data: Path, tmp_path: Path) -> None:
    Ledger.create(tmp_path / "ledger.sqlite")
    config = f'data-path="{data}" ledger-path="{tmp_path}/ledger.sqlite" budget=7.0 clipping="any"'
    code, told = check(config)
    assert code == 0, told
    for text in (
        "4 clients, 8 rows", "4 train, 0 report", "linear, n = 2, loss mse", "intact",
        "budget = 7.0", "maximum epsilon between any two data sets", "The site can go online",
    ):  # fmt: skip
        assert text in told
    assert "min-clients" not in told, "is as it always is"


@pytest.mark.parametrize(
    ("node_config", "options", "code", "part"),
    [
        ("", [], "site", "data-path"),
        ('data-path="{data}" bugdet=3.0', [], "site", "did you mean budget?"),
        ('data-path="{data}" budget="inf" delta=0.1', [], "site", "delta"),
        ('data-path="{data}" min-clients=3', [], "site", 'release = "site"'),
        ('data-path="{data}-gone"', [], "data", "gone"),
        ('data-path="{data}"', ["--model", "mlp"], "protocol", "'linear'"),
        ('data-path="{data}" ledger-path="{data}/manifest.json" budget=1.0', [], "ledger", "manifest.json"),
        ("nonsense", [], "site.bad-pairs", "NODE_CONFIG"),
    ],
)
def test_what_would_fail_later_is_told_now_in_one_line(
    data: Path, node_config: str, options: list[str], code: str, part: str
) -> None:
    ended(*check(node_config.format(data=data), *options), code, part)


def test_a_reader_that_is_installed_is_not_one_of_that_name_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder came with the data, it would be the sender's code."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(OWN_PATH, "")
    for place, text in (("installed", ""), ("sent", "raise RuntimeError('of the sender')")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "umbel_test_reader.py").write_text(text)
    (tmp_path / "sent" / "rows.csv").write_text("who,x\n")
    sys.path.append(str(tmp_path / "installed"))
    monkeypatch.chdir(tmp_path / "sent")
    config = f'data-path="{tmp_path}/sent/rows.csv" reader="umbel_test_reader:read"'
    ended(*check(config), "config.import", "umbel_test_reader", "'read'")
