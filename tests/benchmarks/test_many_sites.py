"""Nodes that only answer answer as umbel's do, and a run with them ends with nothing left behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks import many_sites
from benchmarks.light_nodes import FAILED, answer
from tests.benchmarks.conftest import invoked
from umbel.data import open_dataset
from umbel.nodes.roster import admitted
from umbel.privacy.channels.client import released_in
from umbel.privacy.channels.reports import scores_in
from umbel.protocol.messages import keep_request, query, round_request
from umbel.protocol.records import pack
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

pytestmark = pytest.mark.rest

HYPOTHESES = pack({"weight": np.ones((2, 1, 3), np.float32), "bias": np.zeros((2, 1), np.float32)})
TRAINING = TrainingSpec(round=1, clients=(0,), local_epochs=1, step_size=0.1, batch_size=0, noise_multiplier=5.0)
EVALUATION = EvaluationSpec(round=1, clients=(0,))


def test_a_light_node_answers_what_it_is_asked_as_umbels_do() -> None:
    source = np.random.default_rng(0)
    hosting = admitted(answer(query(), source), max_clients=2, together=False)
    assert (hosting.train, hosting.validation, hosting.simulated) == (1, 1, False)
    reply = answer(round_request(HYPOTHESES, TRAINING, EVALUATION), source)
    arrays, released, choices = released_in(reply, asked=1)
    assert (released.tolist(), choices, arrays["weight"].shape) == ([True], None, (1, 1, 3))
    assert 0 < np.abs(arrays["weight"] - 1).max() < 1, "a release beside the first hypothesis"
    scores = scores_in(reply, asked=1)
    assert scores is not None
    assert np.isfinite(scores).all()
    assert set(answer(round_request(HYPOTHESES, None, EVALUATION), source)) == {"scores"}
    assert set(answer(keep_request(HYPOTHESES), source)) == {"hosting"}


def test_a_real_site_serves_a_model_of_as_many_parameters(tmp_path: Path) -> None:
    many_sites.write_site(tmp_path / "site", 7)
    dataset = open_dataset(tmp_path / "site")
    assert dataset.manifest.model == many_sites.run_config(3, 2, 7)["model"] == "linear inputs=6 outputs=1"
    assert dataset.manifest.split == {"train": 1, "validation": 1}


def test_no_number_of_nodes_and_a_run_without_an_end_are_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed is counted by its words."""
    for options in (["--nodes", "abc"], ["--nodes", "5,0"], ["--nodes=-5"], ["--nodes", ""]):
        result = invoked(many_sites.main, *options, "--real", "")
        assert (result.exit_code, "number of nodes" in result.output) == (2, True)
    for rounds, code in (([1.0, 2.0], 0), ([1.0], 1), ([], 1)):
        monkeypatch.setattr(many_sites, "measure", lambda *_, rounds=rounds: many_sites.Reading("5", rounds=rounds))
        assert invoked(many_sites.main, "--nodes", "5", "--real", "", "--rounds", "3").exit_code == code
    (tmp_path / "site-0.log").write_text(f"{FAILED}ReadTimeout: timed out\n" * 2)
    (tmp_path / "superlink.log").write_text(
        "\x1b[91mERROR\x1b[0m:     Failed to store object 0123456789abcdef: locked\nINFO:  all is well\n"
    )
    assert many_sites.failures(tmp_path) == {"ReadTimeout: timed out": 2, "Failed to store object ...: locked": 1}


@pytest.mark.rest
def test_a_run_with_light_nodes_is_measured_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    homes: list[str] = []
    end = many_sites.end

    def note(home: str) -> None:
        homes.append(home)
        end(home)

    monkeypatch.setattr(many_sites, "end", note)
    reading = many_sites.measure(3, rounds=2, parameters=2, sqlite=False)
    assert not {what for what in reading.failures if "did not" in what or what.startswith("finished")}
    assert len(reading.rounds) == 1, "the first warms up"
    assert reading.rounds[0] > 0
    assert reading.joined > 0
    assert {*reading.cpu} == {*reading.memory} == {"SuperLink", "ServerApp"}
    assert all(number > 0 for number in (*reading.cpu.values(), *reading.memory.values(), reading.node))
    assert reading.database == 0, "it is in memory"
    assert len(reading.cells) == len(many_sites.HEADINGS)
    [home] = homes
    assert not Path(home).exists()
    assert not [one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get("FLWR_HOME") == home]
