"""The table audit: exact without noise, nothing under much, never beyond epsilon, and through the real gate."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from umbel.data import Manifest, offsets_of, open_dataset, write_dataset
from umbel.protocol.errors import ConfigError, DatasetError, FleetError
from umbel.protocol.release import ReleaseBy
from umbel_lab.attacks.__main__ import app
from umbel_lab.attacks.rows import audit as table_audit
from umbel_lab.attacks.rows.audit import Finding, ask, attack, audit, formal, guesses, law_of, modes
from umbel_lab.attacks.rows.hospitals import PAYMENT, PLACE, SERVICE, Data, Hospitals, victims
from umbel_lab.attacks.rows.posterior import Law, log_likelihood, site_log_likelihood, weights
from umbel_lab.attacks.rows.probes import N, feature_probe, payment_probe, tail_probe, train, whole_probe
from umbel_lab.attacks.victims import SITE, Mode, Victims

pytestmark = pytest.mark.rest

SERVICES = 3
UNITS = {
    "features": [{"scale": 4.0, "unit": "index"}, {"scale": 50.0, "unit": "degrees"}, {"scale": 50.0}],
    "target": {"scale": 10_000.0, "unit": "dollars"},
}


def made(count: int, seed: int, rows: int = SERVICES) -> Hospitals:
    """Hospitals whose payments fall with the service and rise with the longitude; those of one row keep one."""
    generator = np.random.default_rng(seed)
    service = np.tile(np.arange(SERVICES) / 4, (count, 1))
    place = np.repeat(generator.normal(0, (0.3, 0.1), (count, 1, 2)), SERVICES, axis=1)
    payments = 0.8 - 0.3 * service + 0.2 * place[..., 0] + 0.05 * generator.standard_normal((count, SERVICES))
    features = np.concatenate([service[..., None], place], axis=2)
    if rows == SERVICES:
        return Hospitals(features, payments)
    kept = np.arange(count), generator.integers(SERVICES, size=count)
    return Hospitals(features[kept][:, None], payments[kept][:, None])


def manifest_of(train: int, validation: int, model: str = "mlp") -> Manifest:
    return manifest(train, validation, name="clinics", model=model, loss="rmse", units=UNITS)


def write_clinics(folder: Path, train: int = 40, validation: int = 60, model: str = "mlp", lost: int = 0) -> Path:
    """A dataset of hospitals that all have all services, but for rows that the first has lost."""
    hospitals, count = made(train + validation, 0), train + validation
    features, payments = hospitals.features.reshape(-1, 3)[lost:], hospitals.payments.reshape(-1)[lost:]
    offsets = offsets_of([SERVICES - lost, *[SERVICES] * (count - 1)])
    own = manifest_of(train, validation, model)
    write_dataset(folder, own, features.astype(np.float32), payments.astype(np.float32), offsets)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weigh fewer made-up hospitals than an audit does."""
    for name, value in {"_PILOTS": 50, "_TRIED": 100, "_CANDIDATES": 500, "_IN_SITES": 300, "_OTHERS": 20}.items():
        monkeypatch.setattr(table_audit, name, value)


@pytest.fixture
def data() -> Data:
    """300 victims and 300 known hospitals, of one row and of all."""
    return Data(manifest_of(300, 300), *({rows: made(300, seed, rows) for rows in (1, SERVICES)} for seed in (1, 2)))


def plain(name: str) -> Mode:
    return next(mode for mode in modes() if mode.name == name)


def by_quantity(found: list[Finding]) -> dict[str, Finding]:
    return {one.quantity: one for one in found}


# --- the server's own copy of training


@pytest.mark.parametrize("rows", [1, SERVICES])
def test_what_the_server_computes_is_what_clients_release_without_noise(rows: int) -> None:
    hospitals, mode, everybody = made(20, 0, rows), plain("no noise"), np.arange(20)
    centres = np.array([0.5, 0.7, 0.9])
    probes = [
        payment_probe(centres, 10, 0.2).marked(1.0),
        feature_probe(1, centres - 0.7, 10, 0.2).marked(1.0),
        whole_probe(centres[:1], 5, 0.05, 0.3),
        tail_probe(0.25, 0.7, centres, 0.25),
    ]
    with victims(hospitals, manifest_of(20, 0)) as folder:
        node = Victims(folder, mode.policy, 0)
        for probe in probes:
            releases, _ = ask(node, mode, probe, 0.01, range(20))
            updates, best = train(probe, hospitals)
            np.testing.assert_allclose(releases, probe.hypotheses[best] + updates[everybody, best], atol=2e-3)


# --- no noise


@pytest.mark.parametrize("rows", [1, SERVICES])
def test_without_noise_one_release_shows_everything(data: Data, rows: int) -> None:
    found = by_quantity(attack(data, plain("no noise"), rows, made(20, 1, rows), 0))
    assert all(one.relative < 0.01 and one.claimed == "none" for one in found.values())
    assert set(found) == ({SERVICE, PLACE, PAYMENT} if rows == 1 else {PLACE, PAYMENT})
    if rows == 1:
        assert found[SERVICE].right == 1


# --- the paper's heuristic


@pytest.mark.parametrize("rows", [1, SERVICES])
def test_an_open_choice_gives_digits_away_under_any_noise(
    data: Data, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_audit, "FEW", 3)
    often = max(modes(), key=lambda mode: (mode.releases, mode.noise_multiplier))
    assert often.noise_multiplier == 10
    found = by_quantity(attack(data, often, rows, data.victims[rows], 0))
    assert all(one.relative < 0.01 for one in found.values())


def test_the_heuristic_in_one_release_hides_no_tenth(data: Data) -> None:
    mode = next(mode for mode in modes() if mode.noise_multiplier == 10 and mode.releases == 1)
    found = by_quantity(attack(data, mode, SERVICES, data.victims[SERVICES].some(slice(0, 100)), 0))
    assert found[PLACE].high < 0.6
    assert found[PAYMENT].high < 0.7
    assert found[PAYMENT].claimed == "none"


# --- with a guarantee


@pytest.mark.parametrize("by", [ReleaseBy.CLIENT, ReleaseBy.SITE])
def test_much_noise_leaves_the_mean(data: Data, by: ReleaseBy) -> None:
    """At epsilon 0.02 nothing is claimed to be learnt, and nothing lost beside the mean."""
    mode = formal(2, by)
    mode = replace(mode, noise_multiplier=2200.0, choice_epsilon=0.01, policy=dict(mode.policy) | {"budget": 0.02})
    for one in attack(data, mode, 1, data.victims[1].some(slice(0, 150)), 0):
        assert 0.98 < one.relative < 1.03, one
        assert float(one.claimed) <= 0.02 + 1e-9
        if one.right is not None:
            assert one.right < 0.45


def test_less_epsilon_shows_less_and_the_ledger_says_how_much(data: Data) -> None:
    asked = data.victims[SERVICES].some(slice(0, 200))
    little, much = (by_quantity(attack(data, formal(epsilon), SERVICES, asked, 0)) for epsilon in (2, 16))
    for quantity in (PLACE, PAYMENT):
        assert much[quantity].relative < 0.75 < 0.9 < little[quantity].relative
        assert float(little[quantity].claimed) <= 2
        assert float(much[quantity].claimed) <= 16


def test_a_sites_sums_hide_what_a_client_alone_would_show(data: Data) -> None:
    asked = data.victims[SERVICES].some(slice(0, 100))
    alone, among, known = (
        by_quantity(attack(data, mode, SERVICES, asked, 0))[PAYMENT].relative
        for mode in (formal(16), formal(16, ReleaseBy.SITE), formal(16, ReleaseBy.SITE, others_known=True))
    )
    assert alone < 0.8 < among
    # Who knows the others subtracts them.
    assert known < among - 0.1


@pytest.mark.parametrize("k", [1, 2])
def test_no_release_moves_odds_by_more_than_epsilon(k: int) -> None:
    """Between any two hospitals, for any release: the bound that the guarantee states, of a client and of a site."""
    generator = np.random.default_rng(0)
    law = Law(4.0, 0.02, True, 2.5 if k > 1 else 0.0)
    probe = payment_probe(np.array([0.72, 0.73])[:k], 20, 0.3).marked(1.0)
    updates, best = train(probe, made(100, 3))
    epsilon = 2 * N / 4.0 + law.choice_epsilon
    # Any release at all, and some far out along the direction of the updates, where the odds move most.
    releases = probe.hypotheses[generator.integers(k, size=50)] + generator.standard_normal((50, N))
    releases[:10] = probe.hypotheses[0] + np.eye(N)[-1] * np.linspace(-5, 5, 10)[:, None]
    logs = log_likelihood(law, probe.hypotheses, releases, updates, best)
    assert np.ptp(logs, axis=1).max() <= epsilon + 1e-6
    assert np.ptp(logs, axis=1).max() > 0.9 * 2 * N / 4.0
    for _ in range(20):
        sums, counts = generator.standard_normal((k, N)), 10 * generator.random(k)
        others, chosen = generator.standard_normal((7, k, N)), 5 * generator.random((7, k))
        logs = site_log_likelihood(law, sums, counts, updates, best, others, chosen)
        assert np.ptp(logs) <= epsilon + 1e-6


def test_two_hospitals_are_told_apart_no_more_often_than_epsilon_allows() -> None:
    """A fair coin decides which of two hospitals a client is; e^eps/(1 + e^eps) guesses are right at most."""
    two, count = Hospitals(np.zeros((2, 1, 3)), np.array([[0.3], [0.9]])), 1500
    coins = np.random.default_rng(0).integers(2, size=count)
    mode = formal(2)
    mode = replace(mode, noise_multiplier=22.0, choice_epsilon=0.5, policy={**mode.policy, "max-choice-epsilon": 0.5})
    probe = payment_probe(np.array([0.5, 0.7]), 20, 0.4).marked(22 * 0.1)
    with victims(two.some(coins), manifest_of(count, 0)) as folder:
        node = Victims(folder, mode.policy, 0)
        releases, _ = ask(node, mode, probe, 0.1, range(count))
        claimed = node.claimed(0)
    assert claimed is not None
    assert claimed.pure == pytest.approx(1.5)
    updates, best = train(probe, two)
    posterior = weights(log_likelihood(law_of(mode, probe, 0.1), probe.hypotheses, releases, updates, best))
    right = float((posterior.argmax(axis=1) == coins).mean())
    most = math.exp(1.5) / (1 + math.exp(1.5))
    assert posterior.max() <= most + 1e-6
    spread = 0.5 / math.sqrt(count)
    assert 0.5 + 4 * spread < right < most + 3 * spread
    # What is believed is as often true: the posterior is no more sure than it may be.
    assert abs(posterior.max(axis=1).mean() - right) < 4 * spread


def test_a_server_may_not_ask_twice(data: Data, caplog: pytest.LogCaptureFixture) -> None:
    """The policy that the attack meets is the site's own: it holds."""
    mode, hospitals = formal(8), made(SITE, 1)
    probe = payment_probe(np.array([0.6, 0.8]), 5, 0.2).marked(1.0)
    with victims(hospitals, data.manifest) as folder:
        node = Victims(folder, mode.policy, 0)
        ask(node, mode, probe, 0.1, range(SITE))
        with raises(FleetError, "nodes.refused"):
            ask(node, mode, probe, 0.1, range(SITE))
        assert "no asked client is within budget" in caplog.text
        with raises(FleetError, "nodes.refused"):
            ask(node, replace(mode, noise_multiplier=1.0), probe, 0.1, range(SITE))
        assert "accepts no less than 4.0" in caplog.text


# --- baselines, data, figures


def test_the_mean_is_one_and_a_public_model_knows_more(data: Data) -> None:
    found = guesses(data, data.victims[1], 1)
    assert [one.relative for one in found[:3]] == [1, 1, 1]
    assert [one.quantity for one in found] == [SERVICE, PLACE, PAYMENT, PAYMENT]
    # The noise of payments is 0.05, of which their deviation is twice as much.
    assert 400 < found[3].error < 800
    assert found[3].relative < 0.8
    assert found[3].unit == "dollars"


def test_made_up_hospitals_have_the_mean_of_those_known() -> None:
    known = made(100, 0)
    drawn = known.blurred(5000, np.random.default_rng(0))
    np.testing.assert_allclose(drawn.payments.mean(axis=0), known.payments.mean(axis=0), rtol=0.01)
    assert np.array_equal(np.unique(drawn.features[..., 0]), np.unique(known.features[..., 0]))


def test_clients_are_sorted_by_their_rows(tmp_path: Path) -> None:
    data = Data.of(open_dataset(write_clinics(tmp_path / "clinics", 30, 30, lost=1)), 0)
    assert {rows: len(some) for rows, some in data.victims.items()} == {1: 30, SERVICES: 29}
    assert {rows: len(some) for rows, some in data.known.items()} == {1: 90, SERVICES: 30}


@pytest.mark.parametrize(
    ("validation", "model", "code"), [(10, "mlp", "data.too-few-clients"), (30, "linear", "data.not-hospitals")]
)
def test_data_that_cannot_be_audited_are_told(tmp_path: Path, validation: int, model: str, code: str) -> None:
    path = write_clinics(tmp_path / "clinics", 20, validation, model)
    with raises(DatasetError, code, "the dataset hospital, which comes with umbel"):
        Data.of(open_dataset(path), 0)


def test_too_few_victims_are_refused() -> None:
    with raises(ConfigError, "config.too-few-clients", 10, 9):
        audit(clients=9)


# --- the command


def run(*words: str) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "240"}).invoke(app, ["rows", *words])
    return done.exit_code, done.output


def test_the_command_prints_and_writes_and_a_seed_reproduces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [plain("no noise"), formal(8)]
    monkeypatch.setattr(table_audit, "modes", lambda: few)
    clinics, outs = write_clinics(tmp_path / "clinics"), [tmp_path / name for name in ("one", "two")]
    for out in outs:
        code, output = run("--dataset", str(clinics), "--clients", "10", "--seed", "1", "--out", str(out))
        assert code == 0, output
    one, two = ((out / "table.csv").read_bytes() for out in outs)
    assert one == two
    said = (outs[1] / "table.md").read_text()
    parts = "public model", "dollars", "no noise", "formal"
    for text in ("Clients of 1 row (10 attacked)", "Clients of 3 rows", *parts):
        assert text in output
        assert text in said
    assert "An attack that fails proves nothing" in output
    assert output.splitlines()[-1] == str(outs[1] / "table.md")
    rows = list(csv.DictReader(one.decode().splitlines()))
    assert {row["quantity"] for row in rows} == {SERVICE, PLACE, PAYMENT}
    assert {row["claimed"] for row in rows if row["mode"] == "no noise"} == {"none"}
    assert all(float(row["claimed"]) <= 8 for row in rows if row["mode"].startswith("formal"))


def test_the_command_names_data_that_are_missing() -> None:
    code, output = run("--dataset", "clinics")
    assert code == 3
    assert "no dataset 'clinics'" in output
