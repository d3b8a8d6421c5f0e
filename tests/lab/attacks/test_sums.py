"""Attacks on secure sums: what few and many clients, noise, and a server that isolates a client change."""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray
from typer.testing import CliRunner

from tests.helpers.errors import raises
from umbel.data import find_dataset
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.errors import ConfigError
from umbel.protocol.releases import Sums
from umbel.simulation.in_process import play, run_config
from umbel.strategies.base import Outcome
from umbel.strategies.secure_average import SecureAverage
from umbel_lab.attacks import rank_one, sums
from umbel_lab.attacks.__main__ import app
from umbel_lab.attacks.sums import HONEST, OTHERS, SAME, Found, Setting, audit, epsilon, table
from umbel_lab.attacks.victims import Victims

from .conftest import write_strokes

pytestmark = pytest.mark.rest

# --- local vectors


@cache
def found() -> dict[tuple[int, str, float], Found]:
    setting = Setting("preferences", sizes=(1, 4), multipliers=(0.0, 0.1, 10.0), interactions=12, victims=4)
    return {(one.clients, one.members, one.noise_multiplier): one for one in audit(setting)}


def test_without_noise_a_sum_hides_no_vector() -> None:
    for size, members in ((1, SAME), (1, HONEST), (4, SAME), (4, OTHERS)):
        one = found()[size, members, 0.0]
        assert (one.found, one.of) == (4, 4), (size, members)
        assert one.epsilon is None


def test_a_little_noise_hides_clients_among_others_and_enough_noise_hides_all() -> None:
    """At 10 clip norms an error of .05 has a chance below 1 in 10,000 for each guess, as for a random direction."""
    assert found()[1, SAME, 0.1].quality < found()[4, SAME, 0.1].quality
    for members in (SAME, HONEST, OTHERS):
        assert found()[4, members, 10.0].found == 0


def test_the_price_is_that_of_the_discrete_gaussian() -> None:
    """rho = T 2 / nu^2; (rho + 2 sqrt(rho log(1/delta)), delta) bounds it from above, and T / 2 from below."""
    rho = 12 * 2 / 10**2
    assert epsilon(800, 0.0, 12) is None
    price = found()[4, SAME, 10.0].epsilon
    assert price is not None
    assert rho < price < rho + 2 * math.sqrt(rho * math.log(1e5))
    assert price == epsilon(10**6, 10.0, 12), "it does not depend on the number of parameters"


@pytest.mark.parametrize("changes", [{"sizes": (0,)}, {"sizes": (61,)}, {"multipliers": (-1.0,)}], ids=str)
def test_sums_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with raises(ConfigError, "config.sums"):
        audit(Setting("preferences", **changes))


def test_a_table_has_a_row_for_each_sum_and_a_column_for_each_noise() -> None:
    some = [Found(3, SAME, 0.0, 2, 3, 0.04, None), Found(3, SAME, 1.0, 0, 3, 17.2, 11.14)]
    section = table([*some, *(Found(3, OTHERS, nu, 3, 3, 0.0, None) for nu in (0.0, 1.0))])
    assert list(section.columns) == ["clients", "in the sums", "ν = 0", "ν = 1, ε = 11.1"]
    assert section.rows[0] == ["3", SAME, "2 of 3, 0.04", "0 of 3, 17 dB"]
    assert Found.sum([some[0], some[0]]) == Found(3, SAME, 0.0, 4, 6, 0.04, None)


# --- images


def test_the_command_reads_images_from_one_sum_and_from_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meadow.py").write_text(
        "from torch import nn\n\ndef dense():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(784, 60), nn.ReLU(), nn.Linear(60, 12))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sums, "image_of_input", partial(rank_one.image_of_input, iterations=50))
    words = ["sums", "--dataset", str(write_strokes(tmp_path / "strokes", "strokes")), "--model", "meadow:dense"]
    words += ["--clients", "1", "--clients", "4", "--noise-multiplier", "0", "--noise-multiplier", "3"]
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, [*words, "--victims", "2", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    rows = [line.split(" | ") for line in (tmp_path / "out" / "table.md").read_text().splitlines()]
    shown = {(row[0].strip("| "), row[1]): [cell.split(",")[0] for cell in row[2:]] for row in rows if len(row) == 4}
    assert shown["1", SAME] == shown["4", OTHERS] == ["2 of 2", "0 of 2"]
    assert shown["4", SAME][0] in ("1 of 2", "2 of 2")
    assert shown["4", SAME][1] == "0 of 2"


# --- a server that isolates a client


class Isolating(SecureAverage):
    """Sends only the first node a step that moves anything; a party sees its own message alone."""

    seen: ClassVar[list[tuple[Arrays, list[int], NDArray[np.float64]]]] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        messages = super().configure_train(server_round, arrays, config, grid)
        for message in messages:
            place = sorted(grid.get_node_ids()).index(message.metadata.dst_node_id)
            task = message.content["training"]
            if place:
                task["step_size"] = 1e-12
            else:
                self.asked = [place + len(messages) * client for client in task["clients"]]
        return messages

    def learn_sums(self, round: int, found: Sums) -> Outcome:
        self.seen.append((self.fleet.sent, self.asked, found.sums))
        return super().learn_sums(round, found)


def test_a_secure_sum_of_one_site_and_steps_of_size_0_is_that_sites_own_sum() -> None:
    """So masks protect no client from a malicious server; the noise does, which is left out here."""
    config = run_config(
        "synthetic", strategy=f"{__name__}:Isolating", clipping="public", hypotheses=1,
        mechanism="discrete-gaussian", noise_multiplier=0.0, rounds=1, clients_per_round=60, clip_norm=10.0,
        batch_size=0,
    )  # fmt: skip
    Isolating.seen.clear()
    run = play(config, nodes=4)
    ((start, clients, read),) = Isolating.seen
    assert 5 < len(clients) < 25
    task = {"local_epochs": 1, "step_size": 0.1, "batch_size": 0, "clip_norm": 10.0}
    victims = Victims(find_dataset("synthetic"), {}, 0, {"model": run.setup.model.name, "loss": run.setup.config.loss})
    alone, _ = victims.ask(sums.mode(0.0), start, clients, **task)
    np.testing.assert_allclose(read.sum(axis=0), flatten(alone), atol=25 * 10 * 2.0**-16)
    assert np.abs(read).max() > 1
