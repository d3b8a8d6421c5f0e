"""The audit stays below what is claimed of the real gate, comes near it, and finds a gate or an account at fault.

All of it goes through the app's own gate in this process, with noise from seeds, but for that of a deployed site.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict
from scipy import stats
from typer.testing import CliRunner

from tests.helpers.errors import raises
from umbel.deploy import executor
from umbel.privacy.accounting import guarantee
from umbel.privacy.channels import client
from umbel.privacy.mechanisms import Gaussian, Laplace, choice, randomness
from umbel.privacy.mechanisms.base import Mechanism, NoiseSource
from umbel.privacy.mechanisms.randomness import SecureGenerator
from umbel.privacy.site.charges import Charge
from umbel.privacy.site.totals import Totals
from umbel.protocol.errors import ConfigError, FleetError
from umbel.protocol.release import Clipping, Kind, Release
from umbel.simulation.grid import InProcessGrid
from umbel_lab.attacks.__main__ import app as commands
from umbel_lab.attacks.audit import canaries as herd
from umbel_lab.attacks.audit.bounds import ALARM, Verdict, best_guesses, count_right, lower_bound, most, p_value
from umbel_lab.attacks.audit.canaries import Setting, watch
from umbel_lab.attacks.audit.findings import affordable, audit, deployed, site_release, standard, training
from umbel_lab.attacks.audit.site import SiteHerd

GAUSSIAN = Gaussian.name
REST = pytest.mark.rest(twin="tests/lab/attacks/test_audit.py::test_what_is_at_fault_is_found")
CHOICE = Setting("choice of 2", training(1, 1e6, 2, 1.0), moves=False)
JOINT = Setting("update and choice", training(2, 4, 2, 1.0))
LINE = Setting("n = 1", training(1, 1.0))


# --- what right guesses say


def of_one_run(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the paper's bound on the probability (Theorem 5.2), for canaries that share a training run."""
    chance = 1 / (1 + math.exp(-epsilon))
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, chance)) / np.arange(1, right + 1)
    return float(stats.binom.sf(right - 1, guesses, chance) + 2 * canaries * delta * below.max())


@pytest.mark.parametrize(
    ("counts", "delta", "printed"), [((1000, 100, 75), 1e-4, 0.673), ((100_000, 1510, 1439), 1e-5, 2.675)]
)
def test_bounds_are_a_little_above_the_papers(counts: tuple[int, int, int], delta: float, printed: float) -> None:
    """Appendix D and section 7; at delta = 0, where the theorems are one, nothing is above."""
    assert of_one_run(*counts, printed, delta) == pytest.approx(0.05, abs=5e-4)
    assert printed - 1e-3 < lower_bound(*counts, delta) < printed + 0.15
    for epsilon in (0.1, 0.5, 1.0, 2.0, 3.0):
        assert p_value(*counts, epsilon, delta) <= of_one_run(*counts, epsilon, delta) + 1e-12
        assert p_value(*counts, epsilon) == pytest.approx(of_one_run(*counts, epsilon, 0.0), rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0, 5.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.05])
def test_a_bound_is_too_large_in_one_of_twenty_at_most(epsilon: float, delta: float) -> None:
    """All outcomes of the worst mechanism: it tells with probability delta, and is randomised response otherwise."""
    right = delta + (1 - delta) / (1 + math.exp(-epsilon))
    for canaries in (1, 20, 200):
        too_large = [v for v in range(canaries + 1) if lower_bound(canaries, canaries, v, delta) > epsilon + 1e-6]
        assert sum(stats.binom.pmf(v, canaries, right) for v in too_large) <= 0.05


def test_bound_and_probability_say_the_same_and_guesses_no_better_than_chance_show_nothing() -> None:
    for delta in (0.0, 1e-5, 1e-3):
        bound = lower_bound(1000, 400, 350, delta)
        assert p_value(1000, 400, 350, bound, delta) == pytest.approx(0.05, abs=1e-5)
    assert lower_bound(1000, 400, 350) > lower_bound(1000, 400, 350, 1e-3) > 0
    assert lower_bound(1000, 400, 350, 1e-300) == pytest.approx(lower_bound(1000, 400, 350), abs=1e-6)
    assert lower_bound(100, 100, 50) == lower_bound(100, 100, 0) == lower_bound(100, 10, 5, 1e-5) == 0
    assert p_value(100, 100, 0, 1.0) == 1
    assert lower_bound(100, 20, 17, 0.5) == 0, "a delta that explains everything"
    assert most(1000) == pytest.approx(math.log(0.05**1e-3 / (1 - 0.05**1e-3)))
    assert math.isfinite(most(10**9))
    for counts in ((10, 11, 5), (10, 5, 6), (10, 5, -1)):
        with pytest.raises(ValueError, match="canaries"):
            p_value(*counts, 1.0)


def test_the_surest_are_guessed_as_many_as_give_the_best_bound_and_a_score_of_zero_is_no_guess() -> None:
    """Of 1000 pilots 300 are sure and the others guess blindly: as many as are sure, in proportion, within the grid."""
    scores, coins = np.array([0.1, -3.0, 2.0, 0.0]), np.array([-1, -1, 1, 1])
    assert [count_right(scores, coins, guesses) for guesses in (1, 2, 3, 4)] == [1, 2, 2, 2]
    assert 2700 <= best_guesses(np.where(np.arange(1000) < 300, 2.0, 0.0), 10_000) <= 3300


# --- the claim holds, and the audit comes near it


@pytest.mark.parametrize("setting", [LINE, CHOICE], ids=lambda setting: setting.name)
def test_of_a_hundred_audits_one_in_twenty_is_above_the_claim_at_most(setting: Setting) -> None:
    """Each is with probability .05 at most, the hundred binomial(100, .05). False-alarm rate 1e-6 for each count.

    Both leave nothing of the claim unused, so about five of a hundred are to be expected. That one of a hundred audits
    raises an alarm has probability 2e-4 at most, the seeds being fixed.
    """
    findings = [audit(setting, 400, seed) for seed in range(100)]
    for bounds in ([one.pure for one in findings], [one.at_delta for one in findings]):
        above = sum(bound.shown > bound.claimed for bound in bounds)
        print(f"{setting.name}: {above} of 100 above the claim at delta {bounds[0].delta:g}")
        assert above <= stats.binom.isf(1e-6, 100, 0.05)
    assert not any(one.verdict is Verdict.EXCEEDS for one in findings)


@pytest.mark.parametrize(
    ("setting", "canaries"),
    [
        (Setting("laplace", training(1, 0.5)), 5_000),
        (Setting("laplace", training(11, 5.5), random=True), 10_000),
        (Setting("gaussian", training(11, 2.0, mechanism=GAUSSIAN), random=True), 20_000),
        (Setting("choice of 10", training(1, 1e6, 10, 3.0), moves=False), 5_000),
        (Setting("update and choice", training(4, 4, 3, 1.0)), 5_000),
        (Setting("four times", training(2, 8.0, 2, 0.25), times=4), 5_000),
        (Setting("all at once", training(2, 4.0, 2, 1.0), random=True), 5_000),
        (Setting("site", site_release(training(1, 1.0))), 400),
        (Setting("site, choice", site_release(training(2, 4.0, 2, 1.0))), 600),
    ],
    ids=lambda value: value.name if isinstance(value, Setting) else "",
)
def test_at_least_half_of_the_claim_is_shown(setting: Setting, canaries: int) -> None:
    found = audit(setting, canaries, seed=1)
    assert found.verdict is not Verdict.EXCEEDS
    assert found.at_delta.shown > found.at_delta.claimed / 2
    if math.isfinite(found.pure.claimed):
        assert found.pure.shown > found.pure.claimed / 2
        assert 1 <= found.pure.claimed <= 4
    else:
        assert setting.release.mechanism == GAUSSIAN


@pytest.mark.parametrize("release", [training(2, 4.0, 3, 1.0), site_release(training(2, 4.0, 3, 1.0))])
def test_what_is_claimed_is_what_the_ledger_has_and_a_seed_gives_the_same_scores_again(release: Release) -> None:
    setting = Setting("all", release, times=3, random=True)
    first, again, other = (watch(setting, 40, seed) for seed in (4, 4, 5))
    assert first.account == {release: 3}
    np.testing.assert_array_equal(first.scores, again.scores)
    np.testing.assert_array_equal(first.coins, again.coins)
    assert (first.scores != other.scores).all()
    assert (first.coins != other.coins).any()
    # 3 times 2 n / nu = 1, and choice-epsilon 1.
    assert audit(setting, 100).pure.claimed == pytest.approx(6)


@pytest.mark.parametrize(
    ("setting", "canaries"),
    [
        (LINE, 2000),
        (JOINT, 2000),
        (Setting("n = 11", training(11, 4.0), random=True), 2000),
        (Setting("gaussian", training(7, 1.5, mechanism=GAUSSIAN), random=True), 2000),
        (Setting("three times", training(2, 4.0, 2, 1.0), times=3), 1000),
        (Setting("site", site_release(training(2, 1.0)), random=True), 400),
        (Setting("site, gaussian", site_release(training(2, 1.5, 3, mechanism=GAUSSIAN)), times=2), 200),
    ],
    ids=lambda value: value.name if isinstance(value, Setting) else "",
)
def test_the_auditor_leaves_nothing_of_the_loss_unused(setting: Setting, canaries: int) -> None:
    """Where a canary's data sets are the worst, scores have the law of the privacy loss; here its mean.

    False-alarm rate 6e-7, five deviations.
    """
    laws = guarantee.losses(setting.release)
    seen = watch(setting, canaries, seed=6)
    mean = setting.times * sum(law.mean for law in laws)
    deviation = math.sqrt(setting.times * sum(law.deviation**2 for law in laws))
    assert abs(float((seen.scores * seen.coins).mean()) - mean) < 5 * deviation / math.sqrt(canaries)


# --- what is at fault is found


Fault = Callable[[pytest.MonkeyPatch], None]


def half_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Laplace, Gaussian):
        whole = kind.noise
        monkeypatch.setattr(kind, "noise", lambda *args, whole=whole: whole(*args) / 2)


def an_open_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "at_random", lambda *args: np.array([choice.OWN for _ in args[-1]], np.int64))


def half_the_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The account forgets that two updates may be two radii apart."""
    for kind in (Kind.TRAIN, Kind.SITE):
        monkeypatch.setitem(guarantee.DISTANCE, kind, 1)


def no_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mechanism, "constrain", lambda self, updates, radius: updates)


def a_charge_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two rounds the ledger has one."""
    charge = Totals.charge

    def forgetful(self: Totals, asked: Charge, clients: Sequence[int], *rest: Any) -> list[bool]:
        return charge(self, asked, clients, *rest) if asked.round == 1 else [True] * len(clients)

    monkeypatch.setattr(Totals, "charge", forgetful)


def counts_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Laplace.noise

    def of_sums_alone(self: Laplace, sizes: Any, radii: Any, generators: Any) -> Any:
        """In a site's release the parts of another radius than the first are counts."""
        return noise(self, sizes, radii, generators) * np.repeat(radii == radii[:, :1], sizes, axis=1)

    monkeypatch.setattr(Laplace, "noise", of_sums_alone)


def draws_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client draws is the same in each round."""
    sources = randomness.noise_sources
    for module in (randomness, client):
        monkeypatch.setattr(module, "noise_sources", lambda seed, round, *args: sources(seed, 1, *args))


def forget() -> None:
    """Empty the account's caches: what it has computed at fault must not be found there, nor the other way round."""
    guarantee._pure_cost.cache_clear()
    guarantee.composed.cache_clear()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A monkeypatch, after which the account remembers nothing."""
    yield monkeypatch
    forget()


TWICE = Setting("twice", training(1, 2.0), times=2)
CAUGHT: list[tuple[Fault, Setting]] = [
    (half_the_noise, LINE),
    (half_the_noise, Setting("gaussian", training(2, 4.0, mechanism=GAUSSIAN))),
    (an_open_choice, CHOICE),
    (an_open_choice, JOINT),
    (half_the_distance, LINE),
    (no_clipping, Setting("n = 11", training(11, 11.0), random=True)),
    (a_charge_forgotten, TWICE),
    (draws_used_twice, TWICE),
    (draws_used_twice, Setting("choice of 2, twice", CHOICE.release, times=2, moves=False)),
    (half_the_noise, Setting("site", site_release(training(1, 2.0)))),
    (counts_without_noise, Setting("site, choice", site_release(training(1, 1e6, 2, 1.0)), moves=False)),
    (half_the_distance, Setting("site", site_release(training(1, 1.0)))),
]


@pytest.mark.parametrize(
    ("fault", "setting"), CAUGHT, ids=lambda one: getattr(one, "name", getattr(one, "__name__", ""))
)
def test_what_is_at_fault_is_found(fault: Fault, setting: Setting, faulty: pytest.MonkeyPatch) -> None:
    # Where losses are nearly normal, few are large, and it takes more canaries.
    release = setting.release
    many = release.n > 4 or release.mechanism == GAUSSIAN
    canaries = 40_000 if many else 400 if setting.by_site else 4_000
    forget()
    fault(faulty)
    found = audit(setting, canaries, seed=2)
    assert found.verdict is Verdict.EXCEEDS
    assert min(found.pure.chance, found.at_delta.chance) < ALARM


# --- what cannot be audited


def test_where_nothing_is_claimed_there_is_nothing_to_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    release = training(2, 4.0)
    for heuristic, reason in (
        (Release(release.kind, 2, 4.0, Clipping.UPDATE), "each update is clipped to its own norm"),
        (training(2, 0.0), "there is no noise"),
        (training(2, 4.0, 2), "the choice among 2 hypotheses is open"),
    ):
        with raises(ConfigError, "config.nothing-claimed", reason):
            Setting("heuristic", heuristic)
    with raises(ConfigError, "config.out-of-range", 0):
        Setting("never", release, times=0)
    with raises(ConfigError, "config.too-few-canaries", 100, 99):
        audit(LINE, 99)
    with raises(ConfigError, "config.out-of-range", "delta"):
        audit(LINE, delta=0.0)
    monkeypatch.setenv("UMBEL_MIN_NOISE_MULTIPLIER", "50")
    with raises(FleetError, "nodes.refused"):
        watch(LINE, 100, seed=0)


def test_as_many_canaries_take_part_as_can_be_waited_for_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, here, at_site in (
        (LINE, 50_000, 10_000),
        (Setting("update and choice", training(2, 4.0, 2, 1.0), times=2), 50_000, 5_000),
        (Setting("large", training(1_000_000, 5.0)), 200, 100),
        (Setting("site", site_release(training(1, 1.0)), times=8), 500, 125),
    ):
        assert (affordable(setting, 50_000), affordable(setting, 50_000, as_site=True)) == (here, at_site)
    monkeypatch.setattr("umbel_lab.attacks.audit.canaries._NUMBERS", 1000)
    assert (watch(Setting("large", training(300, 300.0), random=True), 100, seed=0).scores != 0).all()


class Unknown(Laplace):
    """A mechanism of somebody else, whose density the audit does not know."""


def test_a_mechanism_that_is_not_known_is_audited_by_distances() -> None:
    found = audit(Setting("own", training(1, 1.0, mechanism=f"{__name__}:Unknown")), 10_000)
    assert found.pure.shown > 0.9 * found.pure.claimed


# --- as a command


def run(*words: str) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(commands, ["audit", *words])
    return done.exit_code, done.output


SIMPLE = "parameters=1 noise-multiplier=1"


def test_the_command_prints_claims_beside_bounds_and_fails_where_one_is_exceeded(faulty: pytest.MonkeyPatch) -> None:
    own = ("--canaries", "4000", "--seed", "3")
    code, text = run(f"{SIMPLE} hypotheses=2 choice-epsilon=1 participations=2", *own)
    assert code == 0
    assert all(words in text for words in ("choice alone", "update and choice", "2 times", "claimed at 1e-05"))
    assert run(f"{SIMPLE} release=site", "--canaries", "100")[0] == 0
    code, text = run("--canaries", "100")
    assert code == 0
    assert text.count("within the claim") + text.count("by chance") == len(standard())
    code, text = run("parameters=2")
    assert (code, "[config.missing-option]" in text, "noise_multiplier" in text) == (2, True, True)
    half_the_noise(faulty)
    code, text = run(SIMPLE, *own)
    assert (code, "EXCEEDS THE CLAIM" in text) == (1, True)


# --- canaries of a deployed site: they come near the claim, and show faults of its noise that simulations lack
#
# A simulation draws from seeds. So an audit of a simulation passes a source of noise that is at fault where there is
# no seed.


BOTH_TWICE = Setting("update and choice", training(2, 4.0, 2, 1.0), times=2)


@pytest.fixture
def fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system's entropy from a fixed seed, so that a statistical test says the same every time."""
    keys = np.random.default_rng(12)
    monkeypatch.setattr(randomness.secrets, "token_bytes", keys.bytes)


def replace_noise(monkeypatch: pytest.MonkeyPatch, sources: Callable[..., Iterator[NoiseSource]]) -> None:
    """Let all of umbel draw from other sources: modules have imported the function by its name, or will."""
    known = randomness.noise_sources
    for name, module in list(sys.modules.items()):
        if name.startswith("umbel.") and vars(module).get("noise_sources") is known:
            monkeypatch.setattr(module, "noise_sources", sources)


@REST
@pytest.mark.usefixtures("fixed_keys")
def test_a_deployed_site_answers_by_its_executor_with_noise_without_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is audited is what is deployed."""
    answers: list[RecordDict] = []
    kinds, seeds, sites = [], [], []
    load, noise, answer = executor.load, randomness.noise_sources, herd.answer

    def drawn(seed: int | None, *rest: Any) -> Iterator[NoiseSource]:
        seeds.append(seed)
        yield from noise(seed, *rest)

    def answered(grid: InProcessGrid, content: RecordDict) -> RecordDict:
        sites.append(dict(next(iter(grid.contexts.values())).node_config))
        answers.append(answer(grid, content))
        return answers[-1]

    monkeypatch.setattr(
        "umbel_lab.attacks.audit.site.load", lambda kind, bundle: kinds.append(kind) or load(kind, bundle)
    )
    replace_noise(monkeypatch, drawn)
    monkeypatch.setattr(herd, "answer", answered)
    seen = watch(BOTH_TWICE, 10, 3, SiteHerd)
    assert kinds == ["flwr-clientapp"] * 2
    assert {*seeds} == {None}
    assert len({site["data-path"] for site in sites}) == 2, "canaries change sides"
    assert len({site["ledger-path"] for site in sites}) == 1
    assert not any({"partition-id", "num-partitions"} & site.keys() for site in sites)
    steps = [content.metric_records["released"]["step"] for content in answers]
    assert all(step > 0 for step in steps), "numbers travel as 16-bit steps"
    assert seen.account == {BOTH_TWICE.release: 2}


@REST
@pytest.mark.usefixtures("fixed_keys")
@pytest.mark.parametrize(
    ("setting", "canaries"),
    [
        (LINE, 400),
        (Setting("laplace, random", training(3, 3.0), random=True), 600),
        (Setting("gaussian", training(2, 1.5, mechanism=Gaussian.name)), 400),
        (Setting("choice of 3", training(1, 1e6, 3, 3.0), moves=False), 400),
        (BOTH_TWICE, 400),
        (Setting("site", site_release(training(2, 4.0, 2, 1.0))), 400),
    ],
    ids=lambda value: value.name if isinstance(value, Setting) else "",
)
def test_a_deployed_site_shows_a_part_of_the_claim_and_no_more(setting: Setting, canaries: int) -> None:
    """False-alarm rate 1e-6 each, the audit's own; a sixth of the claim takes coins that are guessed from releases."""
    found = audit(setting, canaries, 1, as_site=True)
    assert found.verdict is not Verdict.EXCEEDS
    assert found.at_delta.shown > found.at_delta.claimed / 6


def noise_that_all_clients_of_a_message_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no seed, each client's key stream begins with the same key."""
    noise = randomness.noise_sources

    def shared(seed: int | None, round: int, clients: Iterable[int], *purpose: str) -> Iterator[NoiseSource]:
        sources = noise(seed, round, clients, *purpose)
        if seed is None:
            key = randomness.secrets.token_bytes(32)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(randomness.secrets, "token_bytes", lambda _size: key)
                sources = iter(list(sources))
        yield from sources

    replace_noise(monkeypatch, shared)


def lengths_a_fifth_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    gamma = SecureGenerator.standard_gamma
    monkeypatch.setattr(SecureGenerator, "standard_gamma", lambda self, shape: 0.65 * gamma(self, shape))


def the_same_entropy_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a node that is restored from a snapshot."""
    noise = randomness.noise_sources

    def restored(*asked: Any) -> Iterator[NoiseSource]:
        keys = np.random.default_rng(13)
        monkeypatch.setattr(randomness.secrets, "token_bytes", keys.bytes)
        yield from noise(*asked)

    replace_noise(monkeypatch, restored)


# Which hypothesis a release began from shows; noise is compared about it.
CHOSEN = Setting("update and choice", training(2, 4.0, 2, 1.0))


@REST
@pytest.mark.usefixtures("fixed_keys")
@pytest.mark.parametrize(
    ("fault", "setting", "canaries", "here"),
    [
        (noise_that_all_clients_of_a_message_share, LINE, 400, False),
        (noise_that_all_clients_of_a_message_share, CHOSEN, 400, None),
        (lengths_a_fifth_too_small, LINE, 8000, False),
        (the_same_entropy_in_each_round, TWICE, 1500, None),
    ],
)
def test_faults_of_a_sites_noise_are_found_at_a_site_and_not_in_simulation(
    fault: Fault, setting: Setting, canaries: int, here: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alarm without a fault has probability 1e-6 at most.

    Clients that share their noise give every coin away. The chance to guess all of 150, half of those tested, is 6e-9
    under the claim. Lengths that are a fifth too small escaped 8,000 canaries with one of 40 keys; the keys are fixed
    here.
    """
    fault(monkeypatch)
    assert audit(setting, canaries, 2, as_site=True).verdict is Verdict.EXCEEDS
    if here is not None:
        assert (audit(setting, canaries, 2).verdict is Verdict.EXCEEDS) is here


@REST
@pytest.mark.usefixtures("fixed_keys")
def test_the_command_audits_a_deployed_site(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run("--as-site", "--canaries", "100")
    assert code == 0
    assert text.count("within the claim") + text.count("by chance") == len(deployed())
    noise_that_all_clients_of_a_message_share(monkeypatch)
    code, text = run("parameters=1 noise-multiplier=1", "--as-site", "--canaries", "400")
    assert (code, "EXCEEDS THE CLAIM" in text) == (1, True)
