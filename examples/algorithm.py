"""Algorithm 1 of *Group privacy for personalized federated learning*, in NumPy and PyTorch alone.

The names are those of the paper (Galli, Biswas, Jung, Palamidessi and Cucinotta). Hypothesis j of k is `theta[j]`, a
vector of n parameters. Client c holds the rows `Z[c] = (x, y)`. `F(theta_j, x, y)` is the cost of a hypothesis on rows.
`rng(purpose, t, c)` returns the generator that client c draws from in round t for one purpose.
The tests compare umbel's runs with this file. To repeat the synthetic experiment (Sec. 5.1):

    python examples/algorithm.py [SEED]
"""

import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

Array = np.ndarray
Rows = tuple[torch.Tensor, torch.Tensor]
Cost = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Draw = np.random.Generator


def algorithm_1(
    theta: Array, Z: Sequence[Rows], F: Cost, rng: Callable[[str, int, int], Draw],
    T: int, U: int, E: int, s: float, B_s: int, nu: float, r_min: float = 0.01,
) -> Iterator[tuple[Array, Array, list[Array]]]:  # fmt: skip
    """Train k hypotheses round by round (Algorithm 1).

    Parameters
    ----------
    theta : ndarray, shape (k, n)
        Initial hypotheses.
    T, U, E, s, B_s, nu, r_min : int or float
        Rounds, clients per round, local epochs, step size, batch size, noise multiplier and smallest radius.

    Yields
    ------
    theta, C, S : ndarray, shape (k, n); ndarray, shape (U,); list of k ndarrays
        The next hypotheses, the clients of the round, and the positions in C of the clients of each cluster.
    """
    for t in range(T):  # line 1
        C = np.sort(rng("sample", t, 0).choice(len(Z), U, replace=False))  # line 2
        theta_hat = np.empty((U, theta.shape[1]))
        for i, c in enumerate(C.tolist()):  # lines 3 and 4: in a real dataset, clients compute in parallel
            j = np.argmin(costs(theta, Z[c], F))  # line 5
            theta_c = local_update(theta[j], s, E, B_s, Z[c], F, rng("shuffle", t, c))  # line 6
            theta_hat[i] = sanitize_update(theta[j], theta_c, nu, r_min, rng("noise", t, c))  # line 7
        S = k_means(theta_hat, theta)  # line 9
        theta = average(theta_hat, S, theta)  # line 10
        yield theta, C, S


def costs(theta: Array, Z_c: Rows, F: Cost) -> list[float]:
    """Return the cost of each hypothesis on the rows of a client (line 5)."""
    return [float(F(theta_j, *Z_c)) for theta_j in torch.from_numpy(theta).to(Z_c[0].dtype)]


def local_update(theta_j: Array, s: float, E: int, B_s: int, Z_c: Rows, F: Cost, rng: Draw) -> Array:
    """Train theta_j by E epochs of minibatch gradient descent on the rows of a client (line 6)."""
    x, y = Z_c
    theta_c = torch.tensor(theta_j, dtype=x.dtype)
    for _ in range(E):
        for rows in torch.from_numpy(rng.permutation(len(y))).split(B_s):
            theta_c.requires_grad_()
            (gradient,) = torch.autograd.grad(F(theta_c, x[rows], y[rows]), theta_c)
            theta_c = theta_c.detach() - s * gradient
    return theta_c.double().numpy()


def sanitize_update(theta_j: Array, theta_c: Array, nu: float, r_min: float, rng: Draw) -> Array:
    """Return theta_c + rho, with rho of density proportional to exp(-epsilon |rho|) (Algorithm 2, Lemma 4.1).

    epsilon = n / (nu |delta|). The paper adds no noise where delta = 0. Here |delta| counts as at least r_min.
    The paper draws |rho| from Gamma(n, 1 / epsilon), and a direction (Sec. 4.2). rho = sqrt(W) g has the same law
    for W ~ Gamma((n + 1) / 2, scale 2 / epsilon^2) and g ~ N(0, I_n), and is not divided by a norm.
    """
    n, delta = len(theta_j), theta_c - theta_j
    scale = nu * max(float(np.linalg.norm(delta)), r_min) / n  # 1 / epsilon; 0 without noise
    W = 2 * scale**2 * rng.standard_gamma((n + 1) / 2)
    return theta_c + np.sqrt(W) * rng.standard_normal(n)


def k_means(theta_hat: Array, theta: Array) -> list[Array]:
    """Cluster the releases by Lloyd's iterations that start at the hypotheses (line 9)."""
    centroids, before = theta, np.array([])
    while True:
        nearest = np.square(theta_hat[:, None] - centroids).sum(axis=2).argmin(axis=1)
        S = [np.flatnonzero(nearest == j) for j in range(len(theta))]
        if np.array_equal(nearest, before):
            return S
        centroids, before = average(theta_hat, S, centroids), nearest


def average(theta_hat: Array, S: list[Array], theta: Array) -> Array:
    """Return the mean of each cluster (line 10). Where a cluster is empty, theta_j stays as it was."""
    return np.stack([theta_hat[S_j].mean(axis=0) if len(S_j) else theta[j] for j, S_j in enumerate(S)])


def main(seed: int = 0) -> None:
    """Learn one model, two models, and two models with noise from the data of Sec. 5.1 (Eqs. 23 and 24)."""
    draw, optima = np.random.default_rng(seed), np.array([[5, 6], [4, -4.5]])
    x = draw.uniform(-1, 1, (200, 10, 2))  # the paper does not state the law of x
    y = np.einsum("crn,cn->cr", x, draw.choice(optima, 200)) + draw.uniform(0, 1, (200, 10))
    Z = list(zip(torch.tensor(x), torch.tensor(y), strict=True))
    for k, nu in (1, 0), (2, 0), (2, 5):
        thetas, C, _ = zip(*algorithm_1(
            draw.standard_normal((k, 2)), Z[:100], lambda theta, x, y: (x @ theta - y).square().mean(),
            lambda purpose, t, c: np.random.default_rng([seed, t, c, *purpose.encode()]),
            T=100, U=7, E=1, s=0.1, B_s=10, nu=nu,
        ), strict=True)  # fmt: skip
        # Eq. 10 on clients held out. A client has the hypothesis of lowest cost.
        rmse = [(np.square(y[100:, :, None] - x[100:] @ theta.T).mean(1).min(1) ** 0.5).mean() for theta in thetas]
        best = int(np.argmin(rmse))
        leakage = 2 / nu * np.bincount(np.ravel(C[: best + 1])).max() if nu else np.inf  # n / nu each time (Sec. 4.1.3)
        print(f"k = {k}, nu = {nu}: RMSE {rmse[best]:.3f} after {best + 1} rounds, highest leakage {leakage:.1f}")
        print(f"    theta = {thetas[best].round(2).tolist()}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
