"""CENTAUR's protocol: what its runs promise, and the command in its quick form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.helpers.datasets import manifest
from tests.lab.experiments.conftest import read_csv
from umbel.data import offsets_of, write_dataset
from umbel.models import load
from umbel.privacy.accounting.guarantee import guarantee
from umbel.server.setup import Setup
from umbel_lab.experiments import centaur, scaffold
from umbel_lab.experiments.__main__ import app

pytestmark = pytest.mark.rest

IMAGES, FEATURES = "qmnist-users-images", "qmnist-users"
LARGE, SMALL = "mlp inputs=784 hidden=256,128 outputs=10", "mlp inputs=784 hidden=32 outputs=10"


@pytest.fixture
def users(umbel_home: Path) -> Path:
    """Images and features of ten users, two of whom validate."""
    generator = np.random.default_rng(0)
    own = manifest(8, 2, name=IMAGES, model=LARGE, loss="cross-entropy", feature_scale=1 / 255)
    images = generator.integers(0, 256, (60, 28, 28), np.uint8)
    classes, offsets = np.arange(60) % 10, offsets_of([6] * 10)
    write_dataset(umbel_home / "data" / IMAGES, own, images, classes, offsets)
    own = manifest(8, 2, name=FEATURES, model="softmax features=10 classes=10", loss="cross-entropy")
    rows = generator.normal(size=(60, 10)).astype(np.float32)
    write_dataset(umbel_home / "data" / FEATURES, own, rows, classes, offsets)
    return umbel_home


def test_the_networks_have_the_numbers_that_the_paper_says() -> None:
    assert load(LARGE, "cross-entropy").num_parameters == 235_146
    heads = {model: load(model, "cross-entropy", local=head) for model, head in {LARGE: "5.*", SMALL: "3.*"}.items()}
    assert [own.num_parameters for own in heads.values()] == [235_146 - 1290, 25_120]


@pytest.mark.usefixtures("users")
def test_each_arm_promises_the_epsilon_in_its_name(tmp_path: Path) -> None:
    for spec in scaffold.specs(centaur, tmp_path, [2000]):
        epsilon = spec.arm[-1]
        if epsilon is None:
            assert spec.config["noise-multiplier"] == 0
            continue
        release = Setup.parse(spec.config).release
        found = guarantee({release: spec.config["rounds"]})
        assert found is not None
        assert 0.99 * epsilon < found.epsilon <= epsilon


@pytest.mark.slow
@pytest.mark.usefixtures("in_process", "users", "sites_accept_the_paper")
def test_the_command(users: Path) -> None:
    done = CliRunner().invoke(app, ["centaur", "--quick"])
    assert done.exit_code == 0, done.output
    rows = read_csv(users / "experiments" / "centaur-quick")
    assert len(rows) == len(scaffold.specs(centaur, users, [2000]))
    ditto = [row for row in rows if row["ditto"]]
    assert {row["who"] for row in ditto} == {"fine-tuned"}
    assert all(0 <= float(row["ditto"]) <= 1 for row in ditto)
    assert {row["parameters"] for row in rows} == {"", "235146", "233856", "25450", "25120", "100"}
