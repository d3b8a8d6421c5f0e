"""What a round takes is a sum of its parts: by cases that a reader can compute, and by rounds that are played."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.table import Table

from benchmarks import capacity
from benchmarks.capacity import CNN, HOSPITAL, PARTS, Costs, Round, Size, cost, forecast, memory_of
from tests.benchmarks.conftest import invoked
from umbel.client import learner
from umbel.data import open_dataset
from umbel.models import load_for
from umbel.protocol.run_config import RunConfig

HUNDRED = Size("mlp", 1000, 100, 0, 25)


def costs_of(**each: dict[str, float]) -> Costs:
    """Return costs that are 0 but for those given: of a part, by quantity."""
    named = {name.replace("_", " "): one for name, one in each.items()}
    return {
        (part, network): [named.get(part, {}).get(name, 0.0) for name in names]
        for part, names in PARTS.items()
        for network in capacity.NETWORKS
    }


def rows_of(table: Table) -> list[list[str]]:
    return [list(row) for row in zip(*(list(column.cells) for column in table.columns), strict=True)]


def test_a_client_takes_so_many_steps() -> None:
    assert replace(HUNDRED, batch=10, epochs=2).steps == 6, "of 10, 10 and 5 rows, twice"
    assert replace(HUNDRED, batch=0, epochs=2).steps == 2, "all rows at once"
    assert replace(HUNDRED, batch=99).steps == 1


def test_machines_share_the_clients_and_not_the_server() -> None:
    costs = costs_of(training={"released": 0, "released and step": 1e-3}, reading={"released": 1e-4})
    one = forecast(costs, HUNDRED)
    assert one.clients == pytest.approx(100 * 1000 * 3 * 1e-3)
    assert one.server == pytest.approx(100 * 1000 * 1e-4)
    four = forecast(costs, replace(HUNDRED, machines=2, cores=2))
    assert four.clients == pytest.approx(one.clients / 4)
    assert four.server == one.server
    uneven = forecast(costs, replace(HUNDRED, machines=3))
    assert uneven.clients == pytest.approx(34 * 1000 * 3 * 1e-3), "the busiest has 34 of 100"


def test_what_a_node_takes_whoever_is_asked_is_not_shared() -> None:
    costs = costs_of(noise={"a round": 0.5, "a client": 0.01})
    assert forecast(costs, HUNDRED).clients == pytest.approx(0.5 + 1.0)
    assert forecast(costs, replace(HUNDRED, machines=10)).clients == pytest.approx(0.5 + 0.1)


def test_hypotheses_travel_once_a_node_and_releases_once_a_client() -> None:
    size = replace(HUNDRED, hypotheses=3, machines=4, cores=2)
    one = forecast(costs_of(), size, bandwidth=0.5, wait=2.0)
    assert one.sent_bytes == 4 * 1000 * (8 * 3 + 100)
    assert one.network == pytest.approx(one.sent_bytes * 8 / 0.5e9 * 3 / 4), "a fourth stays on the server's machine"
    assert one.seconds == pytest.approx(one.network + 2.0)
    assert forecast(costs_of(), HUNDRED, bandwidth=0.5).network == 0


def test_a_release_is_compared_with_every_hypothesis() -> None:
    costs = costs_of(
        **{"k-means": {"released and hypothesis": 1e-9}, "the rest of the server": {"sent and hypothesis": 1}}
    )
    assert cost(costs, "k-means", replace(HUNDRED, hypotheses=5)) == pytest.approx(5e5 * 1e-9)


def test_memory_of_a_node_is_as_fitted_until_a_chunk_is_full() -> None:
    costs = costs_of(memory={"a round": 5.0, "sent": 10.0, "released": 20.0, "kept": 8.0})
    assert memory_of(costs, HUNDRED) == 5 + 10 * 2000 + (20 + 8) * 100_000
    full = capacity.CHUNK_BYTES / 12
    assert capacity.CHUNK_BYTES == learner.CPU_CHUNK_BYTES
    large = Size("mlp", 10**6, 100, 0, 25)
    assert large.releases > full
    assert memory_of(costs, large) == pytest.approx(5 + 10 * 2e6 + 4 * 1e8 + 16 * full), "nothing is kept"
    larger = replace(large, clients=2000)
    assert memory_of(costs, larger) == pytest.approx(5 + 10 * 2e6 + 3 * 4 * 2e9), "trained, released and packed"


def test_the_server_holds_answers_and_of_several_nodes_an_order() -> None:
    costs = costs_of(memory={"a round": 5.0, "sent": 10.0})
    assert forecast(costs, HUNDRED).server_bytes == 5 + 10 * 2000 + 4e5
    assert forecast(costs, replace(HUNDRED, machines=2)).server_bytes == 5 + 10 * 2000 + 2 * 4e5


def test_the_fit_finds_what_rounds_were_made_of() -> None:
    """With seconds that are a sum of the same quantities, sizes that were not fitted come out right."""
    made = {
        key: [(1 + i) * 10.0 ** -(3 if name == "a round" else 9) for i, name in enumerate(PARTS[key[0]])]
        for key in costs_of()
    }
    parts = [part for part in PARTS if part != "memory"]

    def round_of(size: Size) -> Round:
        return Round({part: cost(made, part, size) for part in parts}, cost(made, "memory", size))

    found = capacity.fit({size: round_of(size) for size in capacity.FITTED})
    other = replace(capacity.CHECKED[0], clients=70, rows=35)
    for part in PARTS:
        assert cost(found, part, other) == pytest.approx(cost(made, part, other), rel=1e-3), part
    assert all(one >= 0 for each in found.values() for one in each)


def test_a_size_that_took_no_more_than_the_one_before_is_no_fault() -> None:
    """Memory that is there already is not taken again, and a clock may not have moved."""
    parts = [part for part in PARTS if part != "memory"]
    nothing = {size: Round(dict.fromkeys(parts, 0.0), 0.0) for size in capacity.FITTED}
    costs = capacity.fit(nothing)
    assert np.isfinite([one for each in costs.values() for one in each]).all()
    first = capacity.FITTED[0]
    assert list(capacity.comparison(costs, {first: nothing[first]}).columns[-1].cells) == ["-"]


def test_nothing_is_fitted_to_what_is_checked() -> None:
    assert not set(capacity.CHECKED) & set(capacity.FITTED)
    for size in capacity.CHECKED:
        others = [one for one in capacity.FITTED if one.network == size.network]
        assert all(one.clients != size.clients for one in others)
        assert all(one.rows != size.rows or one.hypotheses != size.hypotheses for one in others)


def test_dollars_are_shown_where_a_price_is_given() -> None:
    costs, size = costs_of(reading={"a round": 1800.0}), replace(HUNDRED, machines=4)
    without = capacity.predictions(costs, [size], 10.0, 0.0, None)
    assert "dollars a round" not in [column.header for column in without.columns]
    table = capacity.predictions(costs, [size], math.inf, 0.0, 3.0)
    assert table.columns[-1].header == "dollars a round"
    assert rows_of(table)[0][-1] == "6", "half an hour of four machines at 3 dollars"


def test_a_matrix_takes_four_bytes_a_number() -> None:
    rows = rows_of(capacity.matrices(costs_of(**{"k-means": {"released": 1e-9}, "reading": {"released": 1e-9}})))
    assert rows[1] == ["1,000 x 1,000,000", "3.73", "1", "2"]


@pytest.mark.parametrize(
    "size", [Size("mlp", HOSPITAL, 3, 2, 4), Size("mlp", 20_000, 3, 2, 5), Size("cnn", CNN, 1, 1, 2)]
)
def test_networks_have_about_as_many_parameters_as_a_size_says(size: Size, tmp_path: Path) -> None:
    capacity.write(tmp_path / "data", size)
    dataset = open_dataset(tmp_path / "data")
    manifest = dataset.manifest
    assert manifest.split == {"train": size.clients, "validation": size.validation}
    assert len(dataset.targets) == (size.clients + size.validation) * size.rows
    model = load_for(RunConfig(), manifest)
    assert model.num_parameters == pytest.approx(size.parameters, rel=0.01)


def test_every_part_is_timed_somewhere() -> None:
    measured = {*capacity.PLACES, "the rest of the server", "memory"}
    assert measured == set(PARTS)
    assert all(set(names) <= set(capacity.QUANTITIES) for names in PARTS.values())


def test_the_quickest_of_turns_and_the_most_memory_count() -> None:
    one = capacity.quickest([Round({"noise": 1.0, "packing": 5.0}, 7.0), Round({"noise": 2.0, "packing": 3.0}, 6.0)])
    assert one == Round({"noise": 1.0, "packing": 3.0}, 7.0)


@pytest.mark.usefixtures("here")
def test_a_round_is_timed_by_parts_that_are_all_of_it() -> None:
    one = capacity.play(Size("mlp", HOSPITAL, 5, 5, 4), 3)
    assert set(one.seconds) == set(PARTS) - {"memory"}
    assert all(seconds > 0 for seconds in one.seconds.values())


@pytest.mark.usefixtures("here")
def test_the_command_predicts_what_is_asked_and_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    few: dict[str, Any] = {"parameters": 2000, "clients": 3, "validation": 2, "rows": 5}
    monkeypatch.setattr(
        capacity, "FITTED", (Size("mlp", HOSPITAL, 3, 2, 4), Size("mlp", **few), Size("mlp", **few, epochs=3))
    )
    monkeypatch.setattr(capacity, "CHECKED", (Size("mlp", **{**few, "clients": 4}),))
    asked = ["--parameters", "1000", "--clients-per-round", "12345", "--machines", "3", "--rounds", "3", "--price", "2"]
    result = invoked(capacity.main, *asked)
    assert result.exit_code == 0, result.output
    assert "│  12,345 │" in result.output
    assert "3 x 1" in result.output
    assert "mlp, 4 clients, 2,000 parameters" in result.output
    assert "dollars" in result.output
    assert invoked(capacity.main, "--network", "lstm").exit_code == 2
    assert invoked(capacity.main, "--machines", "3").exit_code == 2, "of how many parameters?"
    for bandwidth in ("0", "-1", "nan"):
        assert invoked(capacity.main, "--parameters", "9", f"--bandwidth={bandwidth}").exit_code == 2
