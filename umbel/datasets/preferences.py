"""Recipe: synthetic preferences for items, one client for each user.

The setting of *PAC identifiability in federated personalization*: a user likes the items whose vectors v point in the
direction of her vector u. Each client has a label for some of the items, and likes a fixed share of them, below one
half, as required by the paper's Assumption 1::

    u ~ N(0, I/d),   v_i ~ N(0, I),   the items of highest score u . v_i are liked

These commands make the dataset in the app, and one of the shape of MovieLens's ml-100k:

    python datasets/preferences.py --clients 67 --items 100 --out datasets/preferences.json
    python datasets/preferences.py --clients 943 --items 1682 --rows 106 --skew 1 --spread 1
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

# A script finds modules next to itself; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from umbel.data import Dataset, DatasetError, Manifest, offsets_of
from umbel.data.making import command, counted, split_of, write, writing

MIN_ROWS = 20
"""Lower limit of the rows that `spread` gives a client, unless `rows` is smaller; MovieLens has no smaller user."""

STEEPEST = 10
"""Largest `skew` and `spread`; far above it, numbers overflow."""

Drawn = tuple[NDArray[np.int32], NDArray[np.int8], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]

app = command()


def draw(
    clients: int = 100,
    items: int = 500,
    factors: int = 8,
    rows: int = 40,
    like_rate: float = 0.2,
    skew: float = 0.0,
    seed: int = 0,
    spread: float = 0.0,
) -> Drawn:
    """Draw features, targets, offsets, the users' vectors (clients, factors) and those of the items (items, factors).

    A row (1,) is the item's index, and the target is 1 for a like, else -1; a client's rows come by increasing index.
    One generator draws the items and another each client: client ``c`` does not depend on the number of clients. It
    likes ``round(like_rate * n)`` of its n items, those with the highest scores.

    Parameters
    ----------
    skew : float
        Items are drawn with probability proportional to (index + 1)**-skew, without replacement; 0 for uniform.
    spread : float
        Standard deviation of the logarithm of a client's number of rows, which is log-normal with mean `rows`, then
        limited to 20 to `items`; 0 for `rows` each.
    """
    wrong = ""
    if min(clients, items, factors, rows) < 1:
        wrong = f"clients, items, factors and rows must be at least 1, got {clients}, {items}, {factors} and {rows}"
    elif rows > items:
        wrong = f"{rows} rows a client exceed the {items} items; lower --rows, or raise --items"
    elif not 0 < like_rate < 0.5:
        wrong = f"--like-rate must be above 0 and below .5 (Assumption 1 of the paper), got {like_rate}; give .2, say"
    elif not (0 <= skew <= STEEPEST and 0 <= spread <= STEEPEST):
        wrong = f"--skew and --spread must be from 0 to {STEEPEST}, got {skew} and {spread}"
    if wrong:
        raise DatasetError(wrong, code="data.options")
    item_vectors = np.random.default_rng(seed).standard_normal((items, factors))
    log_weights = -skew * np.log(np.arange(1, items + 1))
    users, features, targets = [], [], []
    for client in range(clients):
        generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(client,)))
        user = generator.standard_normal(factors) / math.sqrt(factors)
        # Drawn even if unused, so that the rest of the client is the same for any spread.
        normal = generator.standard_normal()
        count = round(rows * math.exp(spread * normal - spread**2 / 2))
        count = min(max(count, min(rows, MIN_ROWS)), items)
        liked = round(like_rate * count)
        if not 0 < 2 * liked < count:
            wrong = f"client {client} would like {liked} of its {count} items; it must like one or more, and under half"
            fix = "give another --like-rate, or more --rows"
            raise DatasetError(f"{wrong} (Assumption 1 of the paper); {fix}", code="data.options")
        chosen = _choose(count, log_weights, generator)
        labels = np.full(count, -1, np.int8)
        # A plain sum of products, which every platform rounds alike; BLAS may round differently.
        labels[np.argsort((item_vectors[chosen] * user).sum(axis=1))[count - liked :]] = 1
        users.append(user)
        features.append(chosen.astype(np.int32)[:, None])
        targets.append(labels)
    return (
        np.concatenate(features), np.concatenate(targets), offsets_of(map(len, targets)), np.array(users), item_vectors
    )  # fmt: skip


def _choose(count: int, log_weights: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw items by weight, without replacement, and return their indices in increasing order."""
    # Exponential waiting times with the probabilities as rates end in the order of draws without replacement.
    # Logarithms keep tiny probabilities above 0.
    waiting = np.log(generator.standard_exponential(len(log_weights))) - log_weights
    return np.sort(np.argsort(waiting)[:count])


@app.command()
def main(
    clients: Annotated[int, typer.Option(min=2, help="Number of clients; the last 10 % validate.")] = 100,
    items: Annotated[int, typer.Option(min=1, help="Number of items.")] = 500,
    factors: Annotated[int, typer.Option(min=1, help="Latent factors, of the data and of their model.")] = 8,
    rows: Annotated[int, typer.Option(min=1, help="Items that a client labels.")] = 40,
    like_rate: Annotated[float, typer.Option(help="Share of its items that a client likes, from 0 to .5.")] = 0.2,
    skew: Annotated[
        float, typer.Option(min=0, help="Clients label an item in proportion to rank**-skew; 0 for all alike.")
    ] = 0.0,
    spread: Annotated[
        float, typer.Option(min=0, help="Standard deviation of the logarithm of clients' rows; MovieLens has about 1.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data.")] = 0,
    name: Annotated[str, typer.Option(help="Name of the dataset.")] = "preferences",
    out: Annotated[
        Path | None, typer.Option(help="Folder, or LEAF JSON file (.json).", show_default="$UMBEL_HOME/data/NAME")
    ] = None,
) -> None:
    """Write synthetic preferences for items as a dataset, one client for each user."""
    with writing(out, name) as path:
        features, targets, offsets, _, _ = draw(clients, items, factors, rows, like_rate, skew, seed, spread)
        settings = f"seed {seed}, rows {rows}, like rate {like_rate:g}, skew {skew:g}, spread {spread:g}"
        manifest = Manifest(
            name=name,
            model=f"factors items={items} size={factors}",
            clients=clients,
            split=split_of(clients, 90, f"{clients} clients", "raise --clients"),
            units={"items": items},
            provenance=(
                f"Generated by datasets/preferences.py with {settings}: a client likes the items of highest score "
                f"u . v among those it labels, u ~ N(0, I/{factors}), v ~ N(0, I)."
            ),
            licence="Apache-2.0 (generated data)",
        )
        names = [f"{part}-{i}" for part in ("train", "validation") for i in range(manifest.split[part])]
        write(path, Dataset(manifest, features, targets, offsets, names if path.suffix == ".json" else ()))
    likes = f"{len(targets)} rows, {(targets > 0).mean():.1%} of them likes"
    typer.echo(f"{counted(manifest)}, {items} items, {likes}")
    typer.echo(path)


if __name__ == "__main__":
    app()
