"""umbel runs Algorithm 1: round by round, its saved runs equal `examples/algorithm.py` up to rounding.

Both draw from the same generators. What umbel adds to the paper stands here: restarts, and the grid of releases.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import umbel
import umbel.client.app
from tests.helpers.runs import run_app
from tests.helpers.sources import ROOT, packages_imported
from tests.test_saved_runs import COMMON, RUNS, make_data
from umbel.models.networks import LeNet
from umbel.mods import laplace
from umbel.privacy.mechanisms.randomness import noise_sources, streams
from umbel.protocol.arrays import flatten
from umbel.protocol.project import ENGINE
from umbel.server.run import distances, draw_hypotheses
from umbel.server.setup import Setup
from umbel.simulation.grid import InProcessGrid

pytestmark = pytest.mark.usefixtures("one_thread")

PATH = ROOT / "examples" / "algorithm.py"
_spec = importlib.util.spec_from_file_location("algorithm", PATH)
assert _spec is not None
assert _spec.loader is not None
algorithm = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(algorithm)

SAMPLE = 1  # the server's key for the draw of training clients
TOLERANCE = 1e-5
# Of many thousand numbers, some lie so near to the middle of two grid points that they round to either.
GRID = {"images": 4e-6}
Rows = tuple[Tensor, Tensor]
Cost = Callable[[Tensor, Tensor, Tensor], Tensor]


def linear_mse(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (x @ theta - y).square().mean()


def mlp_rmse(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The network of Sec. 5.2, 3 -> 2 -> 1, and the cost of Eq. 10."""
    w, b, v, d = theta.split([6, 2, 2, 1])
    outputs = torch.relu(x @ w.view(2, 3).T + b) @ v + d
    return ((outputs - y).square().mean() + 1e-12).sqrt()


def lenet_cross_entropy(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """A network whose parameters are the pieces of theta."""
    pieces = theta.split([value.numel() for value in LENET.parameters()])
    named = zip(LENET.named_parameters(), pieces, strict=True)
    outputs = functional_call(LENET, {name: piece.view(value.shape) for (name, value), piece in named}, (x / 255,))
    return cross_entropy(outputs, y.long())


LENET = LeNet(10)
CASES: dict[str, tuple[Cost, dict[str, Any]]] = {
    "synthetic": (linear_mse, RUNS["synthetic"]),
    "without noise": (linear_mse, RUNS["synthetic"] | {"noise-multiplier": 0.0}),
    "short updates": (linear_mse, RUNS["synthetic"] | {"clipping": "update floor=0.5"}),
    "hospital": (mlp_rmse, RUNS["hospital"]),
    "images": (lenet_cross_entropy, RUNS["images"]),
}


def clients_of(setup: Setup) -> tuple[list[Rows], list[Rows]]:
    """Return the rows of the clients that train, and of those that validate."""
    dataset = setup.open_dataset()
    assert dataset is not None
    x, y = torch.tensor(dataset.features).float(), torch.tensor(dataset.targets).float().flatten()
    rows = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(dataset.offsets.tolist())]
    return rows[: dataset.manifest.train], rows[dataset.manifest.train :]


def umbel_draws(seed: int) -> Callable[[str, int, int], Any]:
    """Return the generators that umbel draws from in simulation. umbel counts rounds from 1."""

    def rng(purpose: str, t: int, c: int) -> Any:
        if purpose == "sample":
            return np.random.default_rng([seed, SAMPLE, t + 1])
        return next(noise_sources(seed, t + 1, [c])) if purpose == "noise" else streams(seed, purpose, t + 1, [c])[0]

    return rng


def on_umbels_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round releases as umbel's gate does: to a public grid, with steps of at most 1/16 of the least noise."""
    sanitize = algorithm.sanitize_update

    def rounded(theta_j: Any, theta_c: Any, nu: float, r_min: float, rng: Any) -> Any:
        epsilon = len(theta_j) / (nu * r_min)
        deviation = math.sqrt(len(theta_j) + 1) / epsilon  # Lemma 4.3
        step = 2.0 ** math.floor(math.log2(deviation / 16))
        return np.rint(sanitize(theta_j, theta_c, nu, r_min, rng) / step) * step

    monkeypatch.setattr(algorithm, "sanitize_update", rounded)


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("name", CASES)
def test_a_run_of_umbel_is_a_run_of_the_algorithm(
    name: str, engine: str, run_config: dict[str, Any], umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_data(umbel_home)
    F, own = CASES[name]
    monkeypatch.setenv(ENGINE, engine)
    config = run_config | COMMON | own
    ours = run_app(config, InProcessGrid(umbel.client.app.app, config, nodes=2))

    setup = Setup.parse(config)
    run, (Z, held_out) = setup.config, clients_of(setup)
    if run.noise_multiplier:
        on_umbels_grid(monkeypatch)

    def validation_loss(theta: NDArray[np.float64]) -> float:
        lowest = np.array([min(algorithm.costs(theta, rows, F)) for rows in held_out])
        return float((np.sqrt(lowest) if F is linear_mse else lowest).mean())

    sets = [flatten(draw_hypotheses(setup.model, run.hypotheses, run.seed, r)) for r in range(run.restarts)]
    theta = sets[int(np.argmin([validation_loss(one) for one in sets]))]
    rounds = algorithm.algorithm_1(
        theta, Z, F, umbel_draws(run.seed), T=run.rounds, U=run.clients_per_round, E=run.local_epochs,
        s=run.step_size, B_s=run.batch_size, nu=run.noise_multiplier, r_min=run.clipping.floor,
    )  # fmt: skip
    thetas, C, S = zip((theta, None, None), *rounds, strict=True)

    losses = [validation_loss(one) for one in thetas]
    np.testing.assert_allclose([entry["loss"] for entry in ours.history], losses, rtol=TOLERANCE)
    nearest = [distances(one) for one in thetas]
    np.testing.assert_allclose([entry["nearest"] for entry in ours.history], nearest, rtol=TOLERANCE)
    assert [entry["groups"] for entry in ours.trained] == [[len(S_j) for S_j in one] for one in S[1:]]
    participations = dict(zip(*np.unique(np.concatenate(C[1:]), return_counts=True), strict=True))
    assert {c: spent for c, (spent, _) in ours.ledger.items()} == participations
    if run.noise_multiplier:
        leakage = {c: spent * theta.shape[1] / run.noise_multiplier for c, spent in participations.items()}
        assert {c: budget for c, (_, budget) in ours.ledger.items()} == pytest.approx(leakage)  # Theorem 4.2
    for file, expected in ("latest", thetas[-1]), ("hypotheses", thetas[int(np.argmin(losses))]):
        found = ours.arrays(file)
        vectors = flatten({name: found[name] for name in setup.model.shapes})
        np.testing.assert_allclose(vectors, expected, rtol=TOLERANCE, atol=GRID.get(name, 1e-6), err_msg=file)


def test_noise_has_the_law_of_the_paper() -> None:
    # n = 3, |delta| = 5 and nu = 2, so 1 / epsilon = 10/3: E|rho| = n / epsilon, and Lemma 4.3.
    theta_j, theta_c, rng = np.zeros(3), np.array([3.0, 0.0, 4.0]), np.random.default_rng(0)
    rho = np.array([algorithm.sanitize_update(theta_j, theta_c, 2.0, 0.01, rng) for _ in range(20_000)]) - theta_c
    np.testing.assert_allclose(np.linalg.norm(rho, axis=1).mean(), 10.0, rtol=0.02)
    np.testing.assert_allclose(rho.var(axis=0), 4 * (10 / 3) ** 2, rtol=0.05)
    np.testing.assert_allclose(rho.mean(axis=0), 0, atol=0.2)


def test_an_update_of_length_0_gets_noise_and_a_noise_multiplier_of_0_none() -> None:
    theta, rng = np.array([3.0, 4.0]), np.random.default_rng(0)
    assert not np.array_equal(algorithm.sanitize_update(theta, theta, 5.0, 0.01, rng), theta)
    np.testing.assert_array_equal(algorithm.sanitize_update(theta, theta, 0.0, 0.01, rng), theta)


def test_k_means_leaves_an_empty_cluster_where_it_was() -> None:
    # 1 and 5 are both nearest to 2. Their mean, 3, then loses neither. 9 attracts nothing until 8 comes.
    theta = np.array([[2.0], [9.0]])
    S = algorithm.k_means(np.array([[1.0], [5.0]]), theta)
    assert [one.tolist() for one in S] == [[0, 1], []]
    assert algorithm.average(np.array([[1.0], [5.0]]), S, theta).tolist() == [[3.0], [9.0]]
    S = algorithm.k_means(np.array([[1.0], [5.0], [8.0]]), theta)
    assert [one.tolist() for one in S] == [[0, 1], [2]]
    # 6 is nearer to 9 than to 2. Once 9 has moved to 6, 4.5 is nearer to it than to the other's new mean, 2.75.
    S = algorithm.k_means(np.array([[1.0], [4.5], [6.0]]), theta)
    assert [one.tolist() for one in S] == [[0], [1, 2]]


def test_training_that_diverges_ends() -> None:
    S = algorithm.k_means(np.full((4, 2), np.nan), np.zeros((2, 2)))
    assert [len(one) for one in S] == [4, 0]


def test_it_is_short_and_finds_both_models_without_umbel_or_flower(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(PATH.read_text(encoding="utf-8").splitlines()) <= 120
    assert packages_imported(PATH) - sys.stdlib_module_names == {"numpy", "torch"}
    monkeypatch.setattr(sys, "argv", [str(PATH)])
    runpy.run_path(str(PATH), run_name="__main__")
    one, ifca, private = [line for line in capsys.readouterr().out.splitlines() if line.startswith("k = ")]
    rmse = [float(line.split("RMSE ")[1].split()[0]) for line in (one, ifca, private)]
    assert rmse[0] > 2 > 0.7 > rmse[2]
    assert rmse[1] < 0.7


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize("name", ["synthetic", "short updates"])
def test_an_ordinary_flower_app_with_umbels_parts_is_a_run_of_the_algorithm_too(
    name: str, run_config: dict[str, Any], umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strategy and two Mods, whose nodes are one client each: all take part, since plain nodes have no order."""
    make_data(umbel_home)
    F, own = CASES[name]
    config = run_config | COMMON | own | {"restarts": 1}
    setup = Setup.parse(config)
    run, (Z, _) = setup.config, clients_of(setup)
    draws, start = umbel_draws(run.seed), draw_hypotheses(setup.model, run.hypotheses, run.seed, 0)
    shapes = {array: value.shape[1:] for array, value in start.items()}

    def vector(arrays: ArrayRecord) -> NDArray[np.float64]:
        return flatten({array: arrays[array].numpy()[None] for array in shapes})[0]

    def loss(arrays: ArrayRecord, context: Context) -> float:
        theta = torch.from_numpy(vector(arrays)).float()
        return float(F(theta, *Z[int(context.node_config["partition-id"])]))

    mods = [umbel.ChooseHypothesis(loss), umbel.LaplaceMod(run.noise_multiplier, seed=run.seed)]
    monkeypatch.setattr(laplace, "_FLOOR", run.clipping.floor)
    app = ClientApp(mods=mods)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        c, t = int(context.node_config["partition-id"]), int(msg.content["config"]["server-round"])
        trained = algorithm.local_update(
            vector(msg.content["arrays"]), run.step_size, run.local_epochs, run.batch_size, Z[c], F,
            draws("shuffle", t - 1, c),
        )  # fmt: skip
        parts = np.split(trained.astype(np.float32), np.cumsum([math.prod(s) for s in shapes.values()])[:-1])
        arrays = {array: Array(part.reshape(s)) for (array, s), part in zip(shapes.items(), parts, strict=True)}
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=msg)

    nodes = [{"partition-id": c} for c in range(len(Z))]
    result = umbel.GroupPrivacy().start(
        InProcessGrid(app, {}, node_configs=nodes),
        ArrayRecord({array: Array(value) for array, value in start.items()}),
        num_rounds=run.rounds,
    )
    on_umbels_grid(monkeypatch)
    *_, (theta, _, S) = algorithm.algorithm_1(
        flatten(start), Z, F, draws, T=run.rounds, U=len(Z), E=run.local_epochs, s=run.step_size, B_s=run.batch_size,
        nu=run.noise_multiplier, r_min=run.clipping.floor,
    )  # fmt: skip
    found = flatten({array: result.arrays[array].numpy() for array in shapes})
    np.testing.assert_allclose(found, theta, rtol=TOLERANCE, atol=1e-6)
    assert result.train_metrics_clientapp[run.rounds]["groups"] == [len(S_j) for S_j in S]
