"""A node knows whether it is simulated from where it runs, never from what it is told."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from client.app import app
from federation import BUNDLED
from privacy.site import Site, in_process, runs_in_simulation
from protocol.errors import SiteError
from protocol.messages import CONFIG, COUNTS, Hosting, query
from protocol.plugins import import_by_name

ROOT = Path(__file__).parents[2]
SIMULATED = {"partition-id": 1, "num-partitions": 4}


def ask(node_config: dict[str, Any], run_config: dict[str, Any], **more: Any) -> Message:
    """Return a node's reply to a query, which may say more than it should."""
    content = query()
    for key, value in more.items():
        content.config_records[CONFIG][key.replace("_", "-")] = value
    message = Message(content, 100, "query")
    return app(message, Context(1, 100, node_config, RecordDict(), run_config))


# --- where the data are the site's own


def test_the_data_path_of_a_site_wins_over_its_partition() -> None:
    with in_process():
        site = Site.of(SIMULATED | {"data-path": "/data/hospital"})
    assert site == Site(Path("/data/hospital"), first=0, step=1)
    assert not site.simulated


def test_a_home_in_the_data_path_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/site")
    assert Site.of({"data-path": "~/data"}).data_path == Path("/home/site/data")


def test_a_site_with_data_of_its_own_counts_its_clients_from_zero() -> None:
    assert Site(Path("/data/hospital")).client_ids((0, 5, 2)) == [0, 5, 2]


def test_a_site_with_data_of_its_own_has_no_seed() -> None:
    with in_process():
        assert Site.of({"data-path": "/data/hospital"}).seed({"seed": 7}) is None


@pytest.mark.parametrize("node_config", [{}, SIMULATED, {"data-path": ""}])
def test_a_node_without_data_names_the_fix(node_config: dict[str, Any]) -> None:
    with pytest.raises(SiteError, match="start it with --node-config 'data-path=\"/path/to/data\"'"):
        Site.of(node_config)


# --- in simulation


def test_a_simulated_node_serves_every_so_manieth_client() -> None:
    with in_process():
        site = Site.of(SIMULATED)
    assert site == Site(None, first=1, step=4)
    assert site.simulated
    assert site.client_ids((0, 1, 2)) == [1, 5, 9]


def test_a_simulated_node_takes_the_runs_seed() -> None:
    assert Site(None).seed({"seed": 7}) == 7


def test_the_process_is_a_simulation_only_inside_the_grid() -> None:
    assert not runs_in_simulation()
    with in_process():
        assert runs_in_simulation()
        with in_process():
            assert runs_in_simulation()
        assert runs_in_simulation()
    assert not runs_in_simulation()


def test_an_error_ends_the_simulation_too() -> None:
    with pytest.raises(ZeroDivisionError), in_process():
        _ = 1 / 0
    assert not runs_in_simulation()


def test_another_thread_is_no_simulation() -> None:
    seen: list[bool] = []
    with in_process():
        thread = threading.Thread(target=lambda: seen.append(runs_in_simulation()))
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.mark.slow
def test_a_ray_worker_is_a_simulation_and_the_driver_is_not(run_config: dict[str, Any]) -> None:
    import ray
    from flwr.simulation.ray_transport.ray_actor import ClientAppActor

    assert not runs_in_simulation(), "Ray is imported but not started"
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(
        "local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}},
    )
    try:
        assert not runs_in_simulation()
        with pytest.raises(SiteError):
            Site.of(SIMULATED)
        assert ray.get(ray.remote(runs_in_simulation).remote())
        site_of = ray.remote(lambda node_config: Site.of(node_config))
        assert ray.get(site_of.remote(SIMULATED)) == Site(None, first=1, step=4)
        assert ray.get(site_of.remote({"data-path": "/data/hospital"})) == Site(Path("/data/hospital"))
        # Flower's own worker, with the app as it is.
        context = Context(1, 100, SIMULATED, RecordDict(), run_config)
        actor = ClientAppActor.remote()
        message = Message(query(), 100, "query")
        _, reply, _ = ray.get(actor.run.remote(lambda: import_by_name("client.app:app"), message, "1", context))
        assert Hosting.from_record(reply.content.metric_records[COUNTS]) == Hosting(25, 25, first=1, step=4)
    finally:
        ray.shutdown()


# --- what the server says

CLAIMS: dict[str, Any] = {
    "simulated": True,
    "umbel_in_process": True,
    "partition-id": 0,
    "num-partitions": 1,
    "step": 1,
    "data-path": str(BUNDLED / "synthetic.json"),
}


@pytest.mark.parametrize("node_config", [{}, SIMULATED])
def test_no_message_and_no_run_config_make_a_node_simulated(
    node_config: dict[str, Any], run_config: dict[str, Any]
) -> None:
    reply = ask(node_config, run_config | CLAIMS, **{key.replace("-", "_"): value for key, value in CLAIMS.items()})
    assert reply.has_error()
    assert reply.error.reason == "refused"


def test_no_message_and_no_run_config_name_the_data_of_a_site(run_config: dict[str, Any], tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(
        '{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1, 2]], "y": [0]}},'
        ' "manifest": {"name": "own", "model": "linear", "clients": 1, "split": {"train": 1, "validation": 0}}}'
    )
    with in_process():
        reply = ask({"data-path": str(own)} | SIMULATED, run_config | CLAIMS, data_path=CLAIMS["data-path"])
    # One client: the site's own, not the hundred of the run config's federation.
    assert Hosting.from_record(reply.content.metric_records[COUNTS]) == Hosting(train=1, validation=0)
