"""All attacks in all modes, through the real gate: what is subtracted is right, budgets hold, and the table says so."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.helpers.errors import raises
from umbel import models
from umbel.data import Dataset, open_dataset, write_dataset
from umbel.models.model import Model, Parameters
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import FleetError
from umbel.protocol.release import Clipping, ReleaseBy
from umbel_lab.attacks import images as on_images
from umbel_lab.attacks.__main__ import app
from umbel_lab.attacks.images import GUESSING, Finding, matched, table
from umbel_lab.attacks.membership import apart, started_from
from umbel_lab.attacks.victims import (
    CLIP_NORM,
    EPSILON,
    FORMAL,
    NO_NOISE,
    PAPER,
    SITE,
    Mode,
    Victims,
    compared,
    gradients,
    last_of_cluster,
    last_of_sums,
    write_victims,
)

from .conftest import gradient_of, write_strokes

pytestmark = pytest.mark.rest

NETWORKS = """
from torch import nn

def dense():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, 12))

def smooth():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.Sigmoid(), nn.Linear(8, 10))
"""
NAME = "orchard:dense"


@pytest.fixture
def strokes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of strokes, and two small networks."""
    (tmp_path / "orchard.py").write_text(NETWORKS)
    monkeypatch.syspath_prepend(tmp_path)
    return write_strokes(tmp_path / "strokes", "strokes")


@pytest.fixture
def dataset(strokes: Path) -> Dataset:
    return open_dataset(strokes)


@pytest.fixture
def model(strokes: Path) -> Model:
    return models.load(NAME, "cross-entropy")


@pytest.fixture
def hypothesis(model: Model) -> Arrays:
    return model.initial(0)


@pytest.fixture
def ten(dataset: Dataset, tmp_path: Path) -> Path:
    """Ten clients with the first ten rows."""
    write_victims(tmp_path / "ten", dataset, [np.array([row]) for row in range(SITE)])
    return tmp_path / "ten"


def behind(folder: Path, mode: Mode) -> Victims:
    return Victims(folder, mode.policy, 0, {"model": NAME, "loss": "cross-entropy"})


def truth(dataset: Dataset, model: Model, hypothesis: Arrays) -> Parameters:
    """The gradient of the first client."""
    start = {name: torch.from_numpy(value) for name, value in hypothesis.items()}
    return gradient_of(model, start, torch.from_numpy(dataset.features[0] / 255.0), int(dataset.targets[0]))


OPEN = Mode("without noise", 0.0)
OPEN_SUMS = Mode("sums without noise", 0.0, clipping=Clipping.PUBLIC, release_by=ReleaseBy.SITE)


def test_without_noise_those_who_know_the_others_hold_the_last_ones_gradient(
    dataset: Dataset, model: Model, hypothesis: Arrays, ten: Path
) -> None:
    wanted = truth(dataset, model, hypothesis)
    length = float(torch.stack([value.square().sum() for value in wanted.values()]).sum().sqrt())
    cluster = last_of_cluster(behind(ten, OPEN), OPEN, hypothesis, range(SITE))
    sums = last_of_sums(behind(ten, OPEN), behind(ten, OPEN), OPEN_SUMS, hypothesis, range(SITE))
    (alone,) = gradients(behind(ten, OPEN), OPEN, hypothesis, [range(SITE)])
    for name, value in wanted.items():
        torch.testing.assert_close(alone[name].float(), value.float(), rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(cluster[name].float(), value.float(), rtol=1e-3, atol=1e-6)
        # A site clips it first.
        torch.testing.assert_close(sums[name].float(), (value * CLIP_NORM / length).float(), rtol=1e-3, atol=1e-6)


def test_each_mode_passes_its_own_policy_and_a_budget_answers_once(hypothesis: Arrays, ten: Path) -> None:
    for mode in compared():
        victims = behind(ten, mode)
        ask = partial(gradients, victims, mode, hypothesis, [range(SITE)])
        ask()
        claimed = victims.claimed(0)
        if "budget" not in mode.policy:
            ask()
            continue
        assert claimed is not None
        assert 0.99 * EPSILON < claimed.epsilon <= EPSILON, "an attack spends all that its column names"
        with raises(FleetError, "nodes.refused"):
            ask()


def test_a_release_shows_where_it_started_and_the_lean_is_to_one_side(model: Model, hypothesis: Arrays) -> None:
    start = {name: torch.from_numpy(value) for name, value in hypothesis.items()}
    (low, high), name = apart(model, start, (28, 28), 4)
    assert started_from(torch.stack([low[name], high[name]]).numpy()).tolist() == [0, 1]
    image = torch.zeros(1, 28, 28)
    lean = model.apply(high, image).log_softmax(1) - model.apply(low, image).log_softmax(1)
    assert (lean[0, 4:] > 0).all()
    assert (lean[0, :4] < 0).all()


def test_images_of_a_batch_are_matched_together() -> None:
    one, two = np.zeros((2, 2)), np.ones((2, 2))
    assert [float(image.mean()) for image in matched([two, one], np.stack([one, two]), one)] == [0.0, 1.0]
    assert [float(image.mean()) for image in matched([two], np.stack([one, two]), one + 0.5)] == [0.5, 1.0]


def test_a_cell_says_how_often_and_the_interval_is_exact() -> None:
    found = Finding.count("label", PAPER, 8, 8, 21.4, "64 answered")
    assert found.cell() == "8 of 8, 21 dB (64 answered)"
    assert (found.low, found.high) == (pytest.approx(0.025 ** (1 / 8)), 1.0)
    assert table([found, Finding.count("label", GUESSING, 0, 8)]).columns == ("attack", GUESSING, PAPER)


def test_the_command_makes_every_attack_in_every_mode(
    strokes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TIMES": 2, "_DLG_ITERATIONS": 2, "_COINS": 4}.items():
        monkeypatch.setattr(on_images, name, value)
    for name in ("invert_first_layer", "image_of_input"):
        monkeypatch.setattr(on_images, name, partial(getattr(on_images, name), iterations=2))
    words = ["all", "--dataset", str(strokes), "--model", NAME, "--smooth-model", "orchard:smooth", "--images", "1"]
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    with (tmp_path / "out" / "table.csv").open() as file:
        rows = {(row["attack"], row["mode"]): row for row in csv.DictReader(file)}
    attacks = list(dict.fromkeys(attack for attack, _ in rows))
    assert attacks == [
        "rank one", "label", "DLG", "batch of 4", "batch of 8", "batch of 8, averaging", "sum of 10",
        "collusion", "membership", "choice",
    ]  # fmt: skip
    assert {mode for _, mode in rows} == {GUESSING, NO_NOISE, *(mode.name for mode in compared())}
    assert rows["batch of 4", NO_NOISE]["note"] == "sure of 4"
    assert rows["choice", PAPER]["right"] == rows["membership", PAPER]["right"] == "4"
    assert rows["batch of 8, averaging", PAPER]["note"].startswith("2 answered")
    assert rows["batch of 8, averaging", FORMAL]["note"].startswith("1 answered")
    assert rows["batch of 4", FORMAL]["note"] == "says no for 1 of 1"
    assert "An attack that fails proves nothing" in (tmp_path / "out" / "table.md").read_text()


def chosen(dataset: Path, model: str, out: Path, *attacks: str) -> tuple[int, str, str]:
    """Make some attacks on one image; return the exit status, the output and the table."""
    words = ["all", "--dataset", str(dataset), "--model", model, "--smooth-model", model, "--images", "1"]
    words += [word for attack in attacks for word in ("--attack", attack)]
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, [*words, "--out", str(out)])
    table = out / "table.md"
    return done.exit_code, done.output, table.read_text() if table.exists() else ""


def test_attacks_may_be_chosen_and_must_be_there(strokes: Path, tmp_path: Path) -> None:
    code, output, _ = chosen(strokes, NAME, tmp_path, "rose")
    assert (code, "[config.unknown-attack]" in output, ", ".join(on_images.ATTACKS) in output) == (2, True, True)


def test_clients_of_one_class_have_no_choice_to_find_out(strokes: Path, tmp_path: Path) -> None:
    dataset = open_dataset(strokes)
    labels = np.zeros(len(dataset.targets), np.int64)
    write_dataset(tmp_path / "alike", dataset.manifest, dataset.features, labels, dataset.offsets)
    code, output, table = chosen(tmp_path / "alike", NAME, tmp_path, "choice")
    assert code == 0, output
    assert "not applicable: all known images are of one class" in table


def test_an_attack_that_cannot_be_made_says_why_and_the_others_are_made(strokes: Path, tmp_path: Path) -> None:
    code, output, table = chosen(strokes, "orchard:smooth", tmp_path, "membership", "choice")
    assert code == 0, output
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["| attack", "| ---", "| membership", "| choice"]
    assert rows[2][1].startswith("not applicable: model 'orchard:smooth' does not end in two")
