"""`import umbel`: runs from Python."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tomli_w
import torch

import umbel
from tests.cli.conftest import SMALL
from tests.helpers.errors import raises
from umbel.data import BUNDLED
from umbel.protocol.errors import ConfigError, ModelError
from umbel.protocol.project import ENGINE
from umbel.simulation.start import values_of


def test_a_run_from_python_is_that_of_the_app_and_can_be_loaded_by_name(umbel_home: Path, kept: Path) -> None:
    own = {key.replace("-", "_"): value for key, value in SMALL.items()}
    run = umbel.run("synthetic", **own)
    assert run.path.parent == umbel_home / "runs"
    assert run.outcome == "all 3 rounds done"
    for found in (umbel.load(), umbel.load(run.name), umbel.load(run.path)):
        assert found.path == run.path
    one, other = (safetensors.numpy.load_file(path / "latest.safetensors") for path in (run.path, kept))
    assert {name: value.tobytes() for name, value in one.items()} == {name: v.tobytes() for name, v in other.items()}


def test_a_value_that_cannot_be_used_is_named_before_anything_starts(
    umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENGINE, "batched")
    drop = {"model": f"{__name__}:drops", "loss": "mse"}
    for values, kind, code, parts in (
        ({"ronds": 3}, ConfigError, "config.unknown-key", ("ronds", "rounds?")),
        ({"config": {"rounds": 0.5}}, ConfigError, "config.wrong-value", ("rounds", 0.5)),
        ({"nodes": 0}, ConfigError, "config.nodes", ()),
        (drop, ModelError, "model.batches", ("drops", "engine")),
    ):
        with raises(kind, code, *parts):
            umbel.run(**values)
    assert not (umbel_home / "runs").exists()


def test_values_may_be_numpys_numbers() -> None:
    run = umbel.run({"hypotheses": np.int64(1)}, rounds=np.int64(2), step_size=np.float32(0.5), baselines=False)
    assert len(run.history) == 3, "two rounds, and the first hypotheses"
    assert run.config["step-size"] == 0.5


def drops() -> torch.nn.Module:
    """What each client must be computed with by itself."""
    return torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(0.1))


@pytest.fixture
def entries(kept: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (kept / "history.jsonl").read_text().splitlines()]


def test_history_and_losses_are_in_the_datas_unit(kept: Path, entries: list[dict[str, Any]], tmp_path: Path) -> None:
    run, path = umbel.load(kept), shutil.copytree(kept, tmp_path / "run")
    assert list(run.history.index) == [0, 1, 2, 3]
    losses = [entry["loss"] for entry in entries]
    assert run.history["loss"].tolist() == pytest.approx(losses)
    assert (run.loss, run.last_loss) == pytest.approx((min(losses), losses[-1]))
    latest = safetensors.numpy.load_file(kept / "latest.safetensors")["weight"]
    np.testing.assert_array_equal(run.last_parameters["weight"], latest)
    assert run.unit == "", "made-up numbers have none"
    save_manifest_of_run(path, {"target": {"name": "cost", "unit": "dollars", "scale": 1000.0}})
    scaled = umbel.load(path)
    assert scaled.unit == "dollars"
    for name in ("loss_spread", "metric_spread"):
        np.testing.assert_allclose(np.stack(scaled.history[name]), 1000 * np.stack(run.history[name]))
        assert run.history[name].map(len).eq(5).all()


def test_a_runs_config_is_refused_where_its_data_have_other_scales_by_now(kept: Path, tmp_path: Path) -> None:
    """A step size of the old ones would learn something else, or nothing."""
    path = shutil.copytree(kept, tmp_path / "run")
    values_of(path / "config.toml")
    save_manifest_of_run(path, {"target": {"name": "cost", "scale": 1000.0}})
    now = json.loads((BUNDLED / "synthetic.json").read_text())
    now["manifest"]["units"] = {"target": {"name": "cost", "scale": 10.0}}
    (tmp_path / "other.json").write_text(json.dumps(now))
    config = tomllib.loads((path / "config.toml").read_text())
    config["config"]["dataset"] = str(tmp_path / "other.json")
    (path / "config.toml").write_text(tomli_w.dumps(config))
    with raises(ConfigError, "config.other-data", "umbel run"):
        values_of(path / "config.toml")
    values_of(path / "config.toml", {"dataset": "synthetic"})


def save_manifest_of_run(path: Path, units: dict[str, Any]) -> None:
    manifest = json.loads((path / "dataset.json").read_text())
    (path / "dataset.json").write_text(json.dumps(manifest | {"units": units}))


def test_a_run_that_goes_on_while_it_is_shown_is_not_damaged(
    kept: Path, entries: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = shutil.copytree(kept, tmp_path / "run")
    run = umbel.load(path)
    last = entries[-1]
    assert len(run.history) == last["number"] + 1
    often = last["max_participations"] + 9
    for name, line in (
        ("history.jsonl", last | {"number": last["number"] + 1, "max_participations": often}),
        ("participations.jsonl", {"0": 9}),
    ):
        with (path / name).open("a") as file:
            file.write(json.dumps(line) + "\n")
    assert run.privacy == umbel.load(path).privacy


def test_the_loss_is_that_of_the_hypotheses_that_are_kept(
    kept: Path, entries: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Where their number was chosen or split, an earlier round of more of them may have scored better."""
    best = entries[-1]["best_round"]
    assert best > 0
    entries[0] |= {"loss": entries[best]["loss"] / 2, "groups": [4, 8, 8], "nearest": [1.0, 1.0, 1.0]}
    path = shutil.copytree(kept, tmp_path / "run")
    (path / "history.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert umbel.load(path).loss == pytest.approx(entries[best]["loss"])


def test_clients_predict_with_their_best_hypothesis_which_is_a_network(kept: Path) -> None:
    run = umbel.load(kept)
    weights = safetensors.numpy.load_file(kept / "hypotheses.safetensors")["weight"]
    made, dataset = run.predict("synthetic", clients=[0, 5]), run.dataset
    assert list(made.columns) == ["client", "name", "row", "hypothesis", "prediction", "target"]
    assert set(zip(made["client"], made["name"], strict=True)) == {(0, "train-0"), (5, "train-5")}
    assert dataset is not None
    x, y = dataset.client(5)
    own, errors = made[made["client"] == 5], []
    for network, weight in zip(run.hypotheses, weights, strict=True):
        outputs = network(torch.tensor(x)).detach().numpy()[:, 0]
        np.testing.assert_allclose(outputs, x @ weight[0], rtol=1e-5)
        errors.append(np.square(outputs - y).mean())
    assert set(own["hypothesis"]) == {int(np.argmin(errors))}
    np.testing.assert_allclose(own["target"], y)


def test_a_run_that_is_not_there_is_named(umbel_home: Path, tmp_path: Path) -> None:
    with raises(ConfigError, "config.no-run", "'last'"):
        umbel.load()
    with raises(ConfigError, "config.no-run", tmp_path, "config.toml"):
        umbel.load(tmp_path)


@pytest.mark.parametrize("version", ["", "version = 8\n"])
def test_a_run_folder_of_another_version_is_refused(kept: Path, tmp_path: Path, version: str) -> None:
    run = shutil.copytree(kept, tmp_path / "run")
    config = run / "config.toml"
    config.write_text(config.read_text().replace("version = 1\n", version, 1))
    with raises(ConfigError, "config.version", "version 1", "run it again"):
        _ = umbel.load(run).config
    with raises(ConfigError, "config.version"):
        umbel.run(str(config))
    with raises(ConfigError, "config.version"):
        umbel.run("synthetic", start_from=str(run), seed=1, rounds=1)


@pytest.mark.usefixtures("blank_figures")
def test_a_run_says_what_it_was_worth(umbel_home: Path, kept: Path) -> None:
    run = umbel.run("synthetic", rounds=3, restarts=1)
    assert list(run.worth.columns) == ["way", "mean", "worst_decile", "remark"]
    assert {"the best constant", "this run, last round"} <= set(run.worth.index)
    assert run.worth.loc["the best constant", "mean"] == pytest.approx(3.849, abs=1e-3)
    assert run.verdict
    with raises(ConfigError, "config.no-worth", "umbel runs report"):
        _ = umbel.load(kept).worth
    with raises(ConfigError, "config.no-worth"):
        _ = umbel.run("synthetic", rounds=1, restarts=1, baselines=False).verdict


def test_networks_are_not_put_together_with_other_frozen_parameters(kept: Path, tmp_path: Path) -> None:
    """As where the file of weights has been replaced."""
    run = umbel.load(shutil.copytree(kept, tmp_path / "run"))
    config = run.path / "config.toml"
    config.write_text(config.read_text().replace('frozen = ""', 'frozen = "of another body"', 1))
    with raises(ConfigError, "config.other-frozen", "pretrained"):
        _ = run.hypotheses
    with raises(ConfigError, "config.other-frozen", "pretrained"):
        run.predict("synthetic")
