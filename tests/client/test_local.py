"""A client's local parameters are kept from round to round, by its node alone, and outlive what goes wrong."""

from __future__ import annotations

import os
from pathlib import Path
from time import time

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import RecordDict
from numpy.typing import NDArray

from tests.helpers.models import headed_one, headed_other, own
from umbel import models
from umbel.client.local import LocalParameters
from umbel.models import Model
from umbel.privacy.site.charges import Charge
from umbel.privacy.site.config import Site
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.policy import Policy
from umbel.protocol.arrays import Arrays
from umbel.protocol.release import Clipping, Kind, Release

FACTORS = models.load("factors items=9 size=2")
SIMULATED = Site(Policy(), None, simulated=True)


def site(folder: Path) -> Site:
    return Site(Policy(ledger_path=str(folder / "ledger.jsonl")), folder / "data")


def kept(
    state: RecordDict | None = None,
    where: Site = SIMULATED,
    model: Model = FACTORS,
    run: str = "",
    seed: int | None = 3,
) -> LocalParameters:
    return LocalParameters(where, RecordDict() if state is None else state, model, run, seed)


def users(*vectors: list[float]) -> Arrays:
    return {"user": np.array(vectors, np.float32)}


def read(local: LocalParameters, *clients: int) -> NDArray[np.float32]:
    return local.read(clients)["user"]


def shared(clients: int) -> Arrays:
    return {"items": np.zeros((clients, 9, 2), np.float32)}


# --- where they begin


def test_a_seed_gives_a_client_the_same_beginning_wherever_it_is_asked() -> None:
    np.testing.assert_array_equal(read(kept(), 5, 2), read(kept(), 2, 7, 5)[[2, 0]])
    first, second = read(kept(), 0, 1)
    assert (first != second).all()
    assert (read(kept(), 5) != read(kept(seed=4), 5)).all()
    assert (read(kept(seed=None), 5) != read(kept(seed=None), 5)).all(), "without a seed it cannot be told"


def test_a_newcomer_starts_afresh_even_where_something_is_kept() -> None:
    state = RecordDict()
    kept(state).write([4], users([1, 2]), shared(1))
    local = kept(state)
    np.testing.assert_array_equal(local.fresh([4])["user"], read(kept(), 4))
    assert read(local, 4).tolist() == [[1, 2]]


# --- where they are kept


def places(folder: Path) -> list[tuple[Site, RecordDict]]:
    return [(SIMULATED, RecordDict()), (site(folder), RecordDict())]


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    for where, state in places(tmp_path):
        kept(state, where).write([4, 9], users([1, 2], [3, 4]), shared(2))
        later = kept(state, where)
        assert read(later, 9, 4).tolist() == [[3, 4], [1, 2]]
        later.write([4], users([5, 6]), shared(1))
        assert read(kept(state, where, seed=None), 4, 9).tolist() == [[5, 6], [3, 4]]
        assert list(state) == (["umbel.local"] if where.simulated else []), "in simulation in the node's own state"
    assert (read(kept(RecordDict()), 4) != [[5, 6]]).all(), "another node knows nothing of them"
    (file,) = tmp_path.rglob("*.safetensors")
    assert file.parent.parent == tmp_path / "ledger.jsonl.local", "at a site beside its ledger, for a new process"
    assert not any(one.stat().st_mode & 0o077 for one in (file, file.parent, file.parent.parent)), "the site's alone"
    assert sorted(safetensors.numpy.load_file(file)["user"].tolist()) == [[3, 4], [5, 6]]


def test_in_simulation_nothing_is_written(umbel_home: Path, tmp_path: Path) -> None:
    simulated = Site(Policy(ledger_path=str(tmp_path / "ledger.jsonl")), None, simulated=True)
    kept(RecordDict(), simulated).write([4], users([1, 2]), shared(1))
    assert not umbel_home.exists()
    assert not [*tmp_path.glob("ledger*")]


@pytest.mark.parametrize("other", ["summer", "", "spring ", "../spring", "spring\n"])
def test_another_run_does_not_see_them(other: str, tmp_path: Path) -> None:
    kept(where=site(tmp_path), run="spring").write([4], users([1, 2]), shared(1))
    local = kept(where=site(tmp_path), run=other)
    np.testing.assert_array_equal(read(local, 4), read(kept(), 4))
    local.write([4], users([7, 8]), shared(1))
    assert read(kept(where=site(tmp_path), run="spring"), 4).tolist() == [[1, 2]]


@pytest.mark.parametrize("run", ["../../up", "/etc/passwd", "a/b", ".", "\0", "ä" * 200])
def test_a_runs_name_is_no_path(run: str, tmp_path: Path) -> None:
    """It is the server's word."""
    folder = tmp_path / "deep" / "site"
    kept(where=site(folder), run=run).write([4], users([1, 2]), shared(1))
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file.parent.parent == folder / "ledger.jsonl.local"


def test_another_model_does_not_see_them(tmp_path: Path) -> None:
    """Of the same name and shapes, but on another frozen layer."""
    one, other = (own(network, "mse", local=("head.*",)) for network in (headed_one, headed_other))
    values = {"head.weight": np.ones((1, 1, 3), np.float32), "head.bias": np.ones((1, 1), np.float32)}
    kept(where=site(tmp_path), model=one).write([4], values, {"body.weight": np.zeros((1, 3, 2))})
    assert kept(where=site(tmp_path), model=one).read([4])["head.bias"].tolist() == [[1]]
    assert kept(where=site(tmp_path), model=other).read([4])["head.bias"].tolist() != [[1]]
    assert (read(kept(where=site(tmp_path)), 4) == read(kept(), 4)).all()


# --- training that blew up counts as none


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_they_outlive_training_that_blew_up(broken: float, tmp_path: Path) -> None:
    """Else a server could destroy them for good, with items or steps beyond all bounds."""
    for where, state in places(tmp_path):
        kept(state, where).write([4, 9], users([1, 2], [3, 4]), shared(2))
        kept(state, where).write([4, 9], users([5, broken], [7, 8]), shared(2))
        assert read(kept(state, where), 4, 9).tolist() == [[1, 2], [7, 8]]
        kept(state, where).write([2], users([broken, 1]), shared(1))
        np.testing.assert_array_equal(read(kept(state, where), 2), read(kept(), 2))


def test_they_stay_with_the_shared_ones_that_they_were_trained_with() -> None:
    """The gate releases no update where these are not finite; neither kind has then one."""
    state = RecordDict()
    kept(state).write([4, 9], users([1, 2], [3, 4]), shared(2))
    blown = shared(2)
    blown["items"][1, 8, 1] = np.inf
    kept(state).write([4, 9], users([5, 6], [7, 8]), blown)
    assert read(kept(state), 4, 9).tolist() == [[5, 6], [3, 4]]


# --- whose they are


def test_nodes_that_share_a_ledger_keep_what_is_theirs(tmp_path: Path) -> None:
    """As two nodes do that serve every second client of the same data."""
    policy = Policy(ledger_path=str(tmp_path / "ledger.jsonl"))
    even, odd = Site(policy, tmp_path / "data", 0, 2), Site(policy, tmp_path / "data", 1, 2)
    elsewhere = Site(policy, tmp_path / "other")
    mine, yours = kept(where=even), kept(where=odd)
    mine.write([0], users([1, 2]), shared(1))
    yours.write([1], users([3, 4]), shared(1))
    assert read(kept(where=even), 0).tolist() == [[1, 2]], "not lost to what the other node wrote"
    assert kept(where=even).known([0, 1]) == [0]
    assert kept(where=elsewhere).known([0, 1]) == []


def test_the_disk_keeps_few_runs_and_a_clock_that_went_back_costs_the_newest_nothing(tmp_path: Path) -> None:
    """Else a server that names run after run would fill the disk."""
    for number in range(20):
        kept(where=site(tmp_path), run=f"run-{number}").write([0], users([1, 2]), shared(1))
    for file in (tmp_path / "ledger.jsonl.local").rglob("*.safetensors"):
        os.utime(file, (time() + 3600, time() + 3600))
    kept(where=site(tmp_path), run="run-20").write([0], users([3, 4]), shared(1))
    assert read(kept(where=site(tmp_path), run="run-20"), 0).tolist() == [[3, 4]]
    assert len(list((tmp_path / "ledger.jsonl.local").rglob("*.safetensors"))) == 20


def test_training_that_hides_rows_begins_only_with_what_hides_them(tmp_path: Path) -> None:
    Journal.create(tmp_path / "ledger.jsonl")
    Journal(tmp_path / "ledger.jsonl").charge(Charge("", 1, Release(Kind.TRAIN, 18, 3.0, Clipping.UPDATE)), [4, 9])
    for where, state in places(tmp_path):
        kept(state, where).write([4, 9], users([1, 2], [3, 4]), shared(2), hidden=True)
        kept(state, where).write([9, 2], users([5, 6], [7, 8]), shared(2))
        assert read(kept(state, where), 4, 9, 2).tolist() == [[1, 2], [5, 6], [7, 8]]
        hidden = kept(state, where).read([4, 9, 2], hidden=True)["user"]
        assert hidden[0].tolist() == [1, 2]
        np.testing.assert_array_equal(hidden[1:], kept(state, where).fresh([9, 2])["user"])
        kept(state, where).write([9], users([np.nan, 1]), shared(1), hidden=True)
        assert kept(state, where).read([9], hidden=True)["user"].tolist() != [[5, 6]], "it did not train"
