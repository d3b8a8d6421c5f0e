"""A node knows what it is and what it allows from where it runs, never from what it is told."""

from __future__ import annotations

import math
import os
import threading
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from tests.helpers.errors import raises
from tests.helpers.messages import refused
from tests.helpers.sites import OWN, PARTITION, field, own, simulated
from umbel.client.app import app
from umbel.data import BUNDLED
from umbel.privacy.site.charges import Limits
from umbel.privacy.site.config import Site
from umbel.privacy.site.policy import (
    AcceptedClipping,
    AcceptedRadius,
    AcceptedRanges,
    AcceptedRows,
    Budget,
    MaxWork,
    Personalise,
    Policy,
    Reports,
    Role,
)
from umbel.protocol.errors import SiteError
from umbel.protocol.messages import hosting_in, query
from umbel.protocol.options import Options
from umbel.protocol.plugins import import_by_name
from umbel.protocol.run_config import RunConfig
from umbel.protocol.simulated import in_process, runs_in_simulation
from umbel.protocol.tasks import Hosting

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def sites_accept_the_paper() -> None:
    """Leave the policy's own defaults, which these tests are about."""


# --- where the data are the site's own


def test_the_data_path_of_a_site_wins_over_its_partition() -> None:
    with in_process():
        site = Site.of(PARTITION | OWN)
    assert (site.data_path, site.first, site.step) == (Path("/data/hospital"), 0, 1)
    assert not site.simulated
    assert not site.placed
    assert site.client_ids((0, 5, 2)) == [0, 5, 2]


def test_the_process_is_a_simulation_only_inside_the_grid_and_in_its_thread() -> None:
    seen: list[bool] = []
    with suppress(ZeroDivisionError), in_process():
        with in_process():
            assert runs_in_simulation()
        assert runs_in_simulation()
        thread = threading.Thread(target=lambda: seen.append(runs_in_simulation()))
        thread.start()
        thread.join()
        _ = 1 / 0
    assert not runs_in_simulation()
    assert seen == [False]


@pytest.mark.parametrize("path", ["here/it/is", "~no-such-user/it/is"])
@pytest.mark.parametrize("key", ["data-path", "ledger-path", "witness-path", "keep-model"])
def test_a_path_is_absolute_because_a_process_may_work_anywhere(key: str, path: str) -> None:
    with raises(SiteError, "site.relative-path", key, path):
        Site.of(OWN | {key: path})


def test_a_site_may_host_a_part_of_a_dataset_of_many_sites() -> None:
    site = own(role="split", place="2/5")
    assert site.placed
    assert site.client_ids((0, 1)) == [2, 7]
    assert site.local_ids([2, 7]) == [0, 1]


@pytest.mark.parametrize("place", ["5/5", "2", "/5", "a/b", "-1/5", "1/0", "", 2])
def test_a_place_is_one_of_so_many(place: Any) -> None:
    with raises(SiteError, "site.place", "i/n"):
        own(role="split", place=place)
    with raises(SiteError, "site.role", "split"):
        own(place="2/5")


def test_a_site_with_data_of_its_own_has_no_seed_and_a_simulated_node_the_runs() -> None:
    assert simulated().seed(RunConfig(seed=7)) == 7
    assert not simulated(insecure_seed=True).insecure_seed, "there is nothing insecure in it"
    with in_process():
        assert own().seed(RunConfig(seed=7)) is None
    assert own(insecure_seed="true", budget="inf").seed(RunConfig(seed=7)) == 7
    assert own(insecure_seed="true", budget="inf").insecure_seed


@pytest.mark.parametrize("node_config", [{}, PARTITION, {"data-path": ""}])
def test_a_node_without_data_names_the_fix(node_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_DATA_PATH", "/data/elsewhere")
    with raises(SiteError, "site.no-data", "data-path"):
        Site.of(node_config)


# --- in simulation


def test_a_simulated_node_serves_every_so_manieth_client() -> None:
    site = simulated()
    assert (site.data_path, site.first, site.step) == (None, 1, 4)
    assert site.simulated
    assert site.placed
    assert site.client_ids((0, 1, 2)) == [1, 5, 9]


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
            Site.of(PARTITION)
        assert ray.get(ray.remote(runs_in_simulation).remote())
        site_of = ray.remote(lambda node_config: Site.of(node_config))
        assert ray.get(site_of.remote(PARTITION)) == simulated()
        assert ray.get(site_of.remote(OWN)) == own()
        # Flower's own worker, with the app as it is.
        context = Context(1, 100, PARTITION, RecordDict(), run_config)
        actor = ClientAppActor.remote()
        message = Message(query(), 100, "query")
        _, reply, _ = ray.get(actor.run.remote(lambda: import_by_name("umbel.client.app:app"), message, "1", context))
        assert hosting_in(reply.content) == Hosting(25, 25, first=1, step=4)
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


@pytest.mark.parametrize("node_config", [{}, PARTITION])
def test_no_message_and_no_run_config_make_a_node_simulated(
    node_config: dict[str, Any], run_config: dict[str, Any]
) -> None:
    content = query()
    content.config_records["version"].update(CLAIMS)
    message = Message(content, 100, "query")
    assert refused(app(message, Context(1, 100, node_config, RecordDict(), run_config | CLAIMS)))


# --- the policy


def test_the_policy_of_a_simulated_node() -> None:
    site = simulated()
    assert (site.policy.min_noise_multiplier, site.policy.clipping.floor, site.limits) == (0.0, 0.0, Limits())
    assert (site.policy.role, site.policy.clipping.mode) == (Role.SPLIT, AcceptedRadius.ANY)
    assert site.policy.allow_unsanitised
    assert site.ledger_path is None, "what it spends is kept in memory"


def test_the_policy_of_a_site_that_sets_nothing_but_its_data(umbel_home: Path) -> None:
    site = own()
    assert (site.policy.min_noise_multiplier, site.policy.clipping.floor, site.limits) == (
        1.0, 0.01, Limits(Fraction(8), min_noise_multiplier=1.0, max_choice_epsilon=2.0)
    )  # fmt: skip
    assert (site.policy.role, site.policy.clipping.mode) == (Role.TRAIN, AcceptedRadius.PUBLIC)
    assert site.policy.reports.noise == 0.0
    assert not site.policy.allow_unsanitised
    assert site.ledger_path == umbel_home / "ledger.jsonl"
    assert site.keep_model is None


def test_a_budget_is_kept_exactly() -> None:
    floor: dict[str, Any] = {"min_noise_multiplier": 1.0, "max_choice_epsilon": 2.0}
    assert own(budget=0.1).limits == Limits(Fraction(1, 10), **floor)
    assert own(budget="40", max_participations=9).limits == Limits(Fraction(40), participations=9, **floor)
    assert own(paper_budget="40").limits == Limits(Fraction(8), paper_budget=Fraction(40), **floor)
    assert own(budget="inf").limits == Limits(**floor)
    own_delta = own(budget="8 delta=1e-5", max_choice_epsilon=1.0).limits
    assert own_delta == Limits(Fraction(8), 1e-5, **floor | {"max_choice_epsilon": 1.0})


@pytest.mark.parametrize(
    ("entry", "code", "rule"),
    [
        ({"role": "both"}, "wrong-value", "train, validation, split"),
        ({"min-noise-multiplier": 0}, "not-positive", "above 0"),
        ({"min-noise-multiplier": "nan"}, "wrong-value", "a number"),
        ({"min-noise-multiplier": "1e400"}, "wrong-value", "finite"),
        ({"clipping": "public floor=small"}, "wrong-value", "a number"),
        ({"clipping": "public floor=0.0"}, "not-positive", "above 0"), ({"budget": -1}, "wrong-value", "at least 0"),
        ({"budget": True}, "wrong-value", "a number"), ({"budget": "1e400"}, "wrong-value", '"inf"'),
        ({"budget": math.inf}, "wrong-value", '"inf"'), ({"max-participations": "infinity"}, "wrong-value", '"inf"'),
        ({"max-participations": 1.5}, "wrong-value", "whole"), ({"budget": "8 epsilon=inf"}, "wrong-value", "once"),
        ({"max-participations": 10**400}, "wrong-value", "at least 0"),
        ({"max-work": "epochs=0"}, "wrong-value", "at least 1"), ({"max-work": "steps=2.5"}, "wrong-value", "whole"),
        ({"max-seconds": 0}, "wrong-value", "above 0"), ({"max-hypotheses": 1.5}, "wrong-value", "whole"),
        ({"max-evaluations": 0}, "wrong-value", "at least 1"), ({"reports": "bound=inf"}, "wrong-value", "finite"),
        ({"allow-unsanitised": "perhaps"}, "wrong-value", "true or false"),
        ({"allow-unsanitised": True}, "allow-unsanitised", "simulation"),
        ({"ledger-path": ""}, "relative-path", "absolute"),
        ({"role": "validation", "budget": "inf", "reports": "noise=1"}, "conflict", "max-evaluations"),
        ({"budget": "inf delta=1e-5"}, "wrong-value", "delta"), ({"budget": "8 delta=1"}, "wrong-value", "below 1"),
        ({"budget": "8 delta="}, "wrong-value", "a number"), ({"budget": "8 dleta=1e-5"}, "wrong-value", "delta"),
        ({"budget": "8 delta=1e-5 delta=0"}, "wrong-value", "once"), ({"delta": 1e-5}, "unknown-key", "delta"),
        ({"budget": "delta=1e-5"}, "wrong-value", "a number"),
        ({"role": "validation", "reports": "exact=yes", "budget": 40}, "conflict", "max-evaluations"),
        ({"insecure-seed": True, "budget": 8}, "insecure-seed", "inf"),
        ({"reports": "exact=perhaps"}, "wrong-value", "true"),
        ({"role": "validation", "budget": "inf", "max-participations": 9}, "conflict", "max-evaluations"),
        ({"approve": "yes"}, "wrong-value", "policy, ask"), ({"report": "exact=true"}, "unknown-key", "reports"),
        ({"min_noise_multiplier": 9.0, "min-noise-multiplier": 1.0}, "unknown-key", "min-noise-multiplier"),
        ({"Budget": 9.0}, "unknown-key", "budget"),
        *(({"mechanisms": names}, "conflict", "") for names in ("laplace gausian", "laplace, gaussian", "")),
        ({"budget": 8, "protect": "rows"}, "conflict", "budget"), ({"rows": "noise=0"}, "not-positive", "above 0"),
        ({"budget": "inf", "protect": "rows"}, "row-budget", ""), ({"row-budget": "inf delta=0.1"}, "wrong-value", ""),
        ({"insecure-seed": True, "row-budget": 3, "budget": "inf"}, "insecure-seed", ""),
    ],
)  # fmt: skip
def test_an_entry_that_cannot_be_used_is_named(entry: dict[str, Any], code: str, rule: str) -> None:
    with raises(SiteError, f"site.{code}", [*entry][-1], rule):
        Site.of(OWN | entry)


# --- node configuration and environment have one reader

# A value for each key that is not its default, as the environment has it, and what it is read as.
SET: dict[str, tuple[str, Any]] = {
    "min-noise-multiplier": ("4", 4.0), "min-clients": ("25", 25),
    "clipping": ("any floor=0.5", AcceptedClipping(AcceptedRadius.ANY, 0.5)),
    "max-hypotheses": ("3", 3), "max-work": ("epochs=7 steps=inf examples=5000", MaxWork(7, math.inf, 5000)),
    "rows": ("largest=30000 noise=1.5 rate=0.5", AcceptedRows(1.5, 0.5, 30000)),
    "ranges": ("age,bmi clients=20", AcceptedRanges("age,bmi", 20)),
    "max-seconds": ("0.5", 0.5), "max-choice-epsilon": ("3", 3.0),
    "reports": ("noise=4 bound=3", Reports(noise=4, bound=3)),
    "budget": ("7 delta=1e-5", Budget(7.0, 1e-5)), "paper-budget": ("40", 40.0), "max-participations": ("9", 9.0),
    "max-evaluations": ("12", 12.0), "insecure-seed": ("true", True), "row-budget": ("3", Budget(3.0)),
    "least-parties": ("4", 4), "colluding-parties": ("1", 1),
}  # fmt: skip
TEXTS = {
    "researchers": "ann=AAAAC3NzaC1lZDI1NTE5AAAAII5esJklLdUt2GoWtWkgDFbiKIwOkFmx72zoQsuZiyZb",
    "strategies": "group-privacy fedavg",
    "reader": "umbel.data.table:read schema=/data/schema.toml", "role": "split",
    "place": "1/3", "release": "site", "mechanisms": "laplace gaussian",
    "ledger-path": "/ledger/umbel.jsonl", "witness-path": "/witness", "approve": "ask",
    "app": "hospital.client_app:app",
    "app-keys": "device workers", "bundle": "ab" * 32, "keep-model": "/models",
    "parties": "north=AAAAC3NzaC1lZDI1NTE5AAAAII5esJklLdUt2GoWtWkgDFbiKIwOkFmx72zoQsuZiyZb", "party-key": "/keys/north",
    "protect": "both",
}  # fmt: skip
SET |= {key: (text, text) for key, text in TEXTS.items()}
SET["personalise"] = ("fine-tune epochs=3", Personalise("fine-tune", 3))
# What a key is of no use without.
WITH: dict[str, dict[str, str]] = {
    "place": {"role": "split"},
    "min-clients": {"release": "site"},
    "insecure-seed": {"budget": "inf"},
    "parties": {"party-key": "/keys/own"},
    "party-key": {"parties": "north=AAAAC3NzaC1lZDI1NTE5AAAAII5esJklLdUt2GoWtWkgDFbiKIwOkFmx72zoQsuZiyZb"},
    "personalise": {"keep-model": "/models"},
}
# Refused where the data are a site's own, by whichever way it comes.
NEVER = "allow-unsanitised"


def variable(key: str) -> str:
    return "UMBEL_" + key.replace("-", "_").upper()


@pytest.mark.parametrize(
    ("name", "value", "code", "parts"),
    [
        (variable(NEVER), "true", "allow-unsanitised", ()),
        ("UMBEL_DATA_PATH", "/data/elsewhere", "variable", ("UMBEL_DATA_PATH",)),  # which is said to a node itself
        *((name, "50", "unknown-key", ()) for name in ("UMBEL_LEAST_NOISE", "UMBEL_", "UMBEL_GEONAMES_PATH")),
        ("UMBEL_BUDGET", "lots", "wrong-value", ("budget", "lots")),
        # In another spelling it would be no limit, or one of two.
        *((name, "1", "variable", (name, "UMBEL_")) for name in ("umbel_budget", "UMBEL_budget", "UMBEL_MAX-SECONDS")),
    ],
)
def test_a_variable_that_cannot_be_used_closes_the_site(
    name: str, value: str, code: str, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = simulated()
    monkeypatch.setenv(name, value)
    with raises(SiteError, f"site.{code}", *parts):
        own()
    if name == "UMBEL_BUDGET":
        assert own(budget=3).limits.budget == 3, "what the node's configuration overrules plays no part"
    elif code in ("allow-unsanitised", "unknown-key"):
        assert simulated() == without, "it is nothing to a simulation"


def test_every_key_is_tried_here() -> None:
    assert {*SET, NEVER, "data-path", "policy-file"} == set(Policy.names())


@pytest.mark.parametrize("key", SET)
def test_a_key_may_come_from_the_environment_and_the_node_configuration_wins(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, value = SET[key]
    base = OWN | WITH.get(key, {})
    default = field(Site.of(base).policy, key)
    assert default != value
    assert field(Site.of(base | {key: text}).policy, key) == value
    monkeypatch.setenv(variable(key), text)
    assert field(Site.of(base).policy, key) == value
    if key not in ("ledger-path", "researchers"):  # of which none is nowhere
        written = str(default) if default == math.inf or isinstance(default, Options) else default
        assert field(Site.of(base | {key: written}).policy, key) == default
    # A simulated node reads the same, by either way.
    entries = PARTITION | WITH.get(key, {}) | ({"role": "train"} if key == "reports" else {})
    with in_process():
        assert field(Site.of(entries).policy, key) == value
