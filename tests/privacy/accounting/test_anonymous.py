"""Releases in shuffled batches: the account is above what a server can really learn, and close to the theory.

Each check uses other mathematics than the implementation's: enumeration of all batches of choices, simulation of a
server that reads batches of noisy vectors, and sums over a fine grid in the plane.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.helpers.errors import raises
from tests.helpers.examples import examples
from umbel.privacy.accounting.accountant import compose
from umbel.privacy.accounting.anonymous import Anonymous, _expected_excess, anonymous, hockey_stick
from umbel.privacy.accounting.blanket import Cells, blanket
from umbel.privacy.accounting.guarantee import guarantee
from umbel.privacy.mechanisms import Gaussian, Laplace
from umbel.privacy.mechanisms.base import Matrix
from umbel.privacy.mechanisms.laplace import LaplaceLoss
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Clipping, Kind, Release

DELTA = 1e-5
ERRORS = 4.5
"""Standard errors that a simulation may be off: a right bound fails with a chance of 4e-6."""


def cells(mechanism: Laplace | Gaussian | None, n: int, k: int = 1, choice: float = 0.0) -> Cells:
    found = blanket(mechanism, n, k, choice)
    assert found is not None
    return found


def excess(p: Matrix, q: Matrix, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


# --- choices alone, by enumeration


def shuffled(k: int, choice: float, best: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Return the probability of each count of choices, from clients whose best hypotheses are these."""
    law: Counter[tuple[int, ...]] = Counter()
    total = math.exp(choice) + k - 1
    for drawn in itertools.product(range(k), repeat=len(best)):
        chance = math.prod((math.exp(choice) if a == b else 1) / total for a, b in zip(drawn, best, strict=True))
        law[tuple(drawn.count(j) for j in range(k))] += chance
    return law


@pytest.mark.parametrize(("k", "batch"), [(2, 1), (2, 3), (2, 6), (3, 1), (3, 2), (3, 5)])
def test_choices_reveal_no_more_than_the_account_says_whatever_the_others_prefer(k: int, batch: int) -> None:
    choice = 1.0
    for others in itertools.combinations_with_replacement(range(k), batch - 1):
        one, other = shuffled(k, choice, (0, *others)), shuffled(k, choice, (1, *others))
        for epsilon in (0.0, 0.1, 0.4, 0.8, 0.99):
            exact = excess(np.array([one[key] for key in one]), np.array([other[key] for key in one]), epsilon)
            assert hockey_stick(cells(None, 1, k, choice), batch, epsilon) >= exact - 1e-12


@pytest.mark.parametrize(("k", "batch"), [(2, 2), (2, 9), (3, 4), (5, 4)])
def test_choices_cost_what_the_lemma_says(k: int, batch: int) -> None:
    """Balle et al. 2019, Lemma 5.3, as a sum over all sequences of N draws, each from the blanket or not.

    gamma = k/(e^c + k - 1); Z is e^c - e^epsilon for hypothesis 0, 1 - e^(c + epsilon) for 1, else 1 - e^epsilon.
    """
    choice, epsilon = 1.0, 0.3
    more, times = math.exp(choice), math.exp(epsilon)
    values = [0.0, more - times, 1 - more * times, *[1 - times] * (k - 2)]
    rare = 1 / (more + k - 1)
    chances = [1 - k * rare, *[rare] * k]
    total = 0.0
    for drawn in itertools.product(range(k + 1), repeat=batch):
        total += math.prod(chances[i] for i in drawn) * max(sum(values[i] for i in drawn), 0.0)
    assert hockey_stick(cells(None, 1, k, choice), batch, epsilon) == pytest.approx(total / batch, rel=2e-3)


def test_two_choices_by_hand() -> None:
    """k = 2, N = 1, e^c = 3, epsilon = 0: 3/4 against 1/4."""
    assert hockey_stick(cells(None, 1, 2, math.log(3)), 1, 0.0) == pytest.approx(0.5, rel=1e-6)


@settings(max_examples=examples(10), deadline=None)
@given(
    st.lists(st.just(0.0) | st.floats(1e-3, 1), min_size=4, max_size=12).filter(lambda weights: sum(weights) > 0.1),
    st.integers(0, 11),
    st.integers(1, 60),
)
def test_the_transform_loses_no_digits(weights: list[float], below: int, times: int) -> None:
    """A sum by repeated convolution has nonnegative terms only, so all its digits are right.

    Beside a far smaller weight, the rounding that is added would be larger than the result.
    """
    law = np.array(weights) / sum(weights)
    sums = np.array([1.0])
    for _ in range(times):
        sums = np.convolve(sums, law)
    exact = float(np.maximum(np.arange(len(sums)) - below * times, 0) @ sums)
    found = _expected_excess(law, -below, times)
    assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-6) + 1e-200


# --- vectors, by simulation


def ratios(n: int, a: float, points: Matrix) -> tuple[Matrix, Matrix]:
    """Return the densities of Laplace noise around e and -e over that around 0."""
    unit = np.eye(n)[0]
    lengths = np.linalg.norm(points, axis=-1)
    return (
        np.exp(a * (lengths - np.linalg.norm(points - unit, axis=-1))),
        np.exp(a * (lengths - np.linalg.norm(points + unit, axis=-1))),
    )


def noise(n: int, a: float, shape: tuple[int, ...], generator: np.random.Generator) -> Matrix:
    directions = generator.standard_normal((*shape, n))
    directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
    return directions * generator.gamma(n, 1 / a, (*shape, 1))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("batch", "epsilon"), [(2, 1.0), (20, 0.5)])
def test_a_server_that_knows_all_other_updates_learns_no_more(n: int, batch: int, epsilon: float) -> None:
    """All others have the update 0. The likelihood ratio of a batch is the sum of ratios to e over that to -e."""
    a, generator = 1.2, np.random.default_rng(n)
    points = noise(n, a, (20_000, batch), generator)
    points[:, 0] += np.eye(n)[0]
    first, second = (side.sum(1) for side in ratios(n, a, points))
    gains = np.maximum(1 - math.exp(epsilon) * second / first, 0)
    bound = hockey_stick(cells(Laplace(n / a), n), batch, epsilon)
    assert bound >= gains.mean() - ERRORS * gains.std() / math.sqrt(len(gains))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", [Laplace, Gaussian])
@pytest.mark.parametrize(("batch", "epsilon"), [(4, 0.6), (30, 0.4)])
def test_the_bound_is_the_lemma_for_the_extreme_pair(
    n: int, k: int, kind: type[Laplace | Gaussian], batch: int, epsilon: float
) -> None:
    """A release (j, y) is drawn with j uniform and noise y around 0, and kept with probability k q f(|y| + 1)/f(|y|).

    So what is kept is the blanket. Z follows from the densities around e and -e, of preferences for j = 0 and 1.
    """
    choice, a, runs = 0.5, 1.2, 40_000
    nu = n / a if kind is Laplace else 2.0
    generator = np.random.default_rng(10 * n + k)

    def log_density(points: Matrix) -> Matrix:
        lengths = np.linalg.norm(points, axis=-1)
        return -a * lengths if kind is Laplace else -np.square(lengths / nu) / 2

    def further(points: Matrix) -> Matrix:
        return points + points / np.linalg.norm(points, axis=-1, keepdims=True)

    points = (
        noise(n, a, (runs, batch), generator) if kind is Laplace else nu * generator.standard_normal((runs, batch, n))
    )
    j = generator.integers(k, size=(runs, batch))
    share = k / (math.exp(choice) + k - 1) if k > 1 else 1.0
    least = log_density(further(points))
    kept = generator.random((runs, batch)) < share * np.exp(least - log_density(points))
    first = np.exp(log_density(points - np.eye(n)[0]) - least + (choice * (j == 0) if k > 1 else 0))
    second = np.exp(log_density(points + np.eye(n)[0]) - least + (choice * (j == 1) if k > 1 else 0))
    sums = np.maximum((kept * (first - math.exp(epsilon) * second)).sum(1), 0) / batch
    error = ERRORS * sums.std() / math.sqrt(runs)
    bound = hockey_stick(cells(kind(nu), n, k, choice), batch, epsilon)
    assert sums.mean() - error <= bound <= sums.mean() * 1.015 + error


def test_rounds_compose_like_the_losses_of_a_simulated_server() -> None:
    """Four rounds of 20 on the line: delta of the sum of the simulated losses at the epsilon of the account."""
    a, batch, rounds, runs, delta = 1.2, 20, 4, 40_000, 0.05
    generator = np.random.default_rng(3)
    epsilon = compose({Anonymous(Laplace(1 / a), 1, 1, 0.0, batch): rounds}, delta)
    points = noise(1, a, (runs, rounds, batch), generator)
    points[:, :, 0] += 1
    first, second = ratios(1, a, points)
    # The client's own release, and those of the others that are from the blanket.
    kept = generator.random(first.shape) < math.exp(-a)
    kept[:, :, 0] = True
    losses = np.log((kept * first).sum(2) / (kept * second).sum(2)).sum(1)
    gains = np.maximum(-np.expm1(epsilon - losses), 0)
    error = ERRORS * gains.std() / math.sqrt(runs)
    assert delta * 0.97 - error <= gains.mean() <= delta + error


# --- the extreme pair


@settings(max_examples=examples(10), deadline=None)
@given(st.sampled_from(["laplace", "gaussian"]), st.floats(0, 1), st.floats(0, 1), st.floats(0, math.pi), st.data())
def test_opposite_updates_are_extreme(kind: str, r: float, s: float, angle: float, data: st.DataObject) -> None:
    """In the plane, no pair of updates has a larger integral of (alpha p - beta p' - t omega)+ than e and -e."""
    alpha, beta = data.draw(st.floats(0.3, 3)), data.draw(st.floats(0.3, 3))
    t = data.draw(st.floats(-4, 4))
    axis = np.linspace(-12, 12, 241)
    grid = np.stack(np.meshgrid(axis, axis), -1)

    def density(length: Matrix) -> Matrix:
        return np.exp(-length if kind == "laplace" else -np.square(length) / 2)

    def integral(one: tuple[float, float], other: tuple[float, float]) -> float:
        p, q = (density(np.linalg.norm(grid - centre, axis=-1)) for centre in (one, other))
        base = t * density(np.linalg.norm(grid, axis=-1) + 1)
        # For t < 0 the mean is added, which is the same for all pairs.
        return float(np.maximum(alpha * p - beta * q - base, 0).sum())

    drawn = integral((r, 0.0), (s * math.cos(angle), s * math.sin(angle)))
    # The sum over the grid is an integral up to a thousandth.
    assert drawn <= integral((1.0, 0.0), (-1.0, 0.0)) * (1 + 1e-3) + 1e-9


# --- the cells


@pytest.mark.parametrize(
    ("mechanism", "n"),
    [
        *((Laplace(n / 1.6), n) for n in (1, 2, 3, 11, 210)),
        (Laplace(0.5), 3),
        (Laplace(3000.0), 10_000),
        *((Gaussian(3.0), n) for n in (1, 2, 11, 1000)),
    ],
)
def test_probabilities_of_the_cells_add_up_to_one(mechanism: Laplace | Gaussian, n: int) -> None:
    """The blanket of Laplace noise is e^-a times the noise itself, a = n/nu."""
    found = cells(mechanism, n)
    # Means are moved up by what the quadrature may miss, most at the kinks in a plane.
    assert -1e-9 <= found.mass @ found.first[1] - 1 <= 1e-7
    if isinstance(mechanism, Laplace):
        assert found.mass.sum() == pytest.approx(math.exp(-n / mechanism.noise_multiplier), rel=2e-8)
    for side in (found.first, found.second):
        assert (side[0] <= side[1] * (1 + 1e-9)).all()
        assert (side[1] <= side[2] * (1 + 1e-9)).all()


def test_the_cells_hold_the_law_of_the_ratios() -> None:
    """P(A > x) for n = 3 lies between the masses of cells wholly above x, and partly above."""
    a, runs = 1.6, 100_000
    found = cells(Laplace(3 / a), 3)
    drawn = ratios(3, a, noise(3, a, (runs,), np.random.default_rng(0)))[0] * math.exp(a)
    share = found.mass / found.mass.sum()
    for x in (1.5, 4.0, 5.5, 10.0, 20.0):
        above, error = (drawn > x).mean(), ERRORS * 0.5 / math.sqrt(runs)
        assert share[found.first[0] > x].sum() - error <= above <= share[found.first[2] > x].sum() + error


# --- the shape of the account


@pytest.mark.parametrize(
    ("mechanism", "n", "k", "choice"),
    [
        (Laplace(6.8), 11, 5, 0.75),
        (Laplace(1.0), 1, 2, 0.5),
        (Gaussian(3.0), 11, 1, 0.0),
        (Laplace(40.0), 1000, 1, 0.0),
    ],
)
def test_a_batch_of_one_hides_nothing_and_more_hide_more(
    mechanism: Laplace | Gaussian, n: int, k: int, choice: float
) -> None:
    alone = Anonymous(mechanism, n, k, choice, 1)
    local = compose({alone.with_sender: 1}, DELTA)
    found = [compose({Anonymous(mechanism, n, k, choice, batch): 1}, DELTA) for batch in (1, 10, 100, 3000)]
    assert found[0] == pytest.approx(local, rel=2e-3)
    assert all(more <= less * (1 + 1e-6) for less, more in itertools.pairwise(found))


def test_a_huge_batch_hides_nearly_everything() -> None:
    """The loss becomes normal, with a deviation that shrinks like 1/sqrt(N); rare large ratios fade even faster."""
    small, large = (compose({Anonymous(Laplace(1.0), 1, 1, 0.0, batch): 1}, DELTA) for batch in (10_000, 160_000))
    assert large < 0.025
    assert 4 <= small / large < 5


def test_a_large_batch_is_nearly_a_gaussian_release() -> None:
    """Its deviation is the root of the integral of (p - p')^2 / omega over N, here on the line by hand.

    With a = 1: e^(2a)(e^a - e^-a)^2 ... the density is constant beyond 1, and between -1 and 1 (e^y - e^-y)^2 e^-|y|.
    """
    batch = 50_000
    between, _ = np.polynomial.legendre.leggauss(40)
    y, weights = (1 + between) / 2, np.polynomial.legendre.leggauss(40)[1] / 2
    # p/omega is e^(1 + |y| - |y - 1|), and omega is e^(-1 - |y|)/2.
    ratio = np.exp(1 + y - (1 - y)) - 1
    inside = float((weights * ratio**2 * np.exp(-1 - y)).sum())
    outside = (math.exp(2) - 1) ** 2 * math.exp(-2)
    loss = Anonymous(Laplace(1.0), 1, 1, 0.0, batch)
    mu = math.sqrt((inside + outside) / batch)
    assert loss.deviation == pytest.approx(mu, rel=1e-3)
    normal = stats.norm
    epsilon = compose({loss: 1}, DELTA)
    assert normal.sf(epsilon / mu - mu / 2) - math.exp(epsilon) * normal.sf(epsilon / mu + mu / 2) == pytest.approx(
        DELTA, rel=0.2
    )


@pytest.mark.parametrize(
    ("n", "k", "nu", "choice", "figures"),
    [
        (11, 5, 6.8, 0.75, {2062: 0.207, 700: 0.375, 600: 0.41, 206: 0.75, 100: 1.17}),
        (7, 1, 3.5, 0.0, {2062: 0.302, 600: 0.6, 206: 1.11, 100: 1.79}),
        (11, 5, 22 / 6, 2.0, {2062: 1.73, 700: 3.25, 600: 3.62, 100: 7.22}),
    ],
)
def test_figures_known_before(n: int, k: int, nu: float, choice: float, figures: dict[int, float]) -> None:
    for batch, epsilon in figures.items():
        found = compose({Anonymous(Laplace(nu), n, k, choice, batch): 1}, DELTA)
        assert found == pytest.approx(epsilon, rel=0.006)


def test_the_table_between_epsilons_is_above_what_is_computed_at_them() -> None:
    loss = Anonymous(Laplace(6.8), 11, 1, 0.0, 200)
    epsilons = np.linspace(0.02, 1.2, 9)
    table = loss.delta(epsilons)
    found = cells(Laplace(6.8), 11)
    exact = np.array([hockey_stick(found, 200, epsilon) for epsilon in epsilons])
    assert (table >= exact * (1 - 1e-3)).all()
    assert (table <= exact * 1.2 + 1e-15).all()
    assert loss.delta(np.array([-0.5]))[0] == pytest.approx(1 - math.exp(-0.5) * (1 - loss.delta(np.array([0.5]))[0]))


def test_where_ratios_exceed_all_bounds_a_batch_hides_nothing() -> None:
    loss = Anonymous(Laplace(0.01), 11, 1, 0.0, 1000)
    assert (loss.delta(np.linspace(0, 2000, 5)) == LaplaceLoss(11, 2200.0).delta(np.linspace(0, 2000, 5))).all()
    assert compose({loss: 1}, DELTA) == pytest.approx(compose({LaplaceLoss(11, 2200.0): 1}, DELTA), rel=1e-8)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_a_large_model_gains_nothing(mechanism: str) -> None:
    large = release(n=1_000_000, noise_multiplier=0.4, mechanism=mechanism, hypotheses=5, choice_epsilon=1.0)
    assert anonymous(large, 10, 2062, DELTA) == guarantee({large: 10}, DELTA)


# --- releases


def release(**changes: object) -> Release:
    given = {"kind": Kind.TRAIN, "n": 7, "noise_multiplier": 3.5, "clipping": Clipping.PUBLIC, **changes}
    return Release(**given)  # type: ignore[arg-type]


def test_a_batch_lowers_no_pure_epsilon() -> None:
    found = anonymous(release(), 2, 2062, DELTA)
    assert found is not None
    assert found.pure == 8
    assert found.epsilon < 0.5
    at_zero = anonymous(release(), 2, 2062, 0.0)
    assert at_zero is not None
    assert at_zero.epsilon == 8


@pytest.mark.parametrize("changes", [{"clipping": Clipping.UPDATE}, {"hypotheses": 5}, {"noise_multiplier": 0.0}])
def test_what_has_no_guarantee_has_none_in_a_batch(changes: dict[str, object]) -> None:
    assert anonymous(release(**changes), 1, 2062, DELTA) is None


@pytest.mark.parametrize("changes", [{"mechanism": "discrete-gaussian"}, {"kind": Kind.SITE}, {"kind": Kind.REPORT}])
def test_what_has_no_blanket_is_named(changes: dict[str, object]) -> None:
    with raises(ConfigError, "config.anonymous", "laplace"):
        anonymous(release(**changes), 1, 2062, DELTA)


# --- two data sets whose updates are near each other


@pytest.mark.parametrize("kind", [Laplace, Gaussian])
@pytest.mark.parametrize("distance", [0.1, 0.5, 1.5, 1.99])
def test_near_data_sets_are_hidden_better_and_never_worse(kind: type[Laplace | Gaussian], distance: float) -> None:
    release = Release(Kind.TRAIN, 7, 9.0, Clipping.PUBLIC, mechanism=kind.name)
    found = [anonymous(release, 2, 500, DELTA, at) for at in (distance, 2.0)]
    near, far = (one.epsilon for one in found if one is not None)
    alone = compose({kind(9.0).loss(7, distance): 2}, DELTA)
    assert near <= min(far, alone)
    assert near < far or distance > 1


def test_all_of_the_ball_is_as_near_as_any_two_updates() -> None:
    """Just below two clip norms, the middle of both updates is that of the ball, and the blanket is the same."""
    whole, nearly = (blanket(Laplace(5.0), 3, 1, 0.0, at) for at in (2.0, 2.0 - 1e-12))
    assert whole is not None
    assert nearly is not None
    for epsilon in (0.0, 0.5):
        assert hockey_stick(nearly, 40, epsilon) == pytest.approx(hockey_stick(whole, 40, epsilon), rel=1e-4)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("middle", [0.0, 0.6, -0.6])
def test_a_server_that_knows_all_other_updates_learns_no_more_of_near_ones(n: int, middle: float) -> None:
    """All others have the update 0, and the client's updates are 0.8 apart, wherever they lie."""
    a, batch, epsilon, generator = 1.2, 20, 0.2, np.random.default_rng(n)
    unit = np.eye(n)[0]
    one, other = (middle + 0.4) * unit, (middle - 0.4) * unit
    points = noise(n, a, (20_000, batch), generator)
    points[:, 0] += one
    lengths = np.linalg.norm(points, axis=-1)
    first, second = (np.exp(a * (lengths - np.linalg.norm(points - centre, axis=-1))).sum(1) for centre in (one, other))
    gains = np.maximum(1 - math.exp(epsilon) * second / first, 0)
    found = blanket(Laplace(n / a), n, 1, 0.0, 0.8)
    assert found is not None
    bound = min(hockey_stick(found, batch, epsilon), hockey_stick(cells(Laplace(n / a), n), batch, epsilon))
    assert bound >= gains.mean() - ERRORS * gains.std() / math.sqrt(len(gains))


@pytest.mark.parametrize("distance", [0.0, -1.0, 2.1, math.nan])
def test_a_distance_that_no_two_updates_have_is_refused(distance: float) -> None:
    with pytest.raises(ValueError, match="clip norms apart"):
        anonymous(Release(Kind.TRAIN, 3, 5.0, Clipping.PUBLIC), 1, 10, DELTA, distance)
