"""Recipe: FEMNIST's digits as a few public features, one client for each writer, in two groups of clients.

A linear layer on 20 features has 200 parameters, where the paper's network has 1.2 million (see
``datasets/qmnist_features.py``). A fifth of the writers, drawn at random, are public: they are no clients. The map from
images to features is learnt from their digits, without labels, each upright and turned: the position of an image among
them. It is the same at all clients and never trained.

    python lab/umbel_lab/datasets/femnist_features.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from umbel.data import BUNDLED

# Python does not find the modules beside a script that is loaded by path.
sys.path.insert(0, str(BUNDLED))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import femnist
from qmnist_features import in_chunks, learn
from writers import About, Handwriting, Limit, Seed, build

from umbel.data import DatasetError, Manifest, write_dataset
from umbel.data.making import Out, command, counted, writing

DIGITS = 10
"""Classes 0 to 9 of FEMNIST."""
PUBLIC_SHARE = 0.2
"""Share of the writers whose images are public."""

app = command()


def split_off(found: Handwriting, seed: int) -> tuple[Handwriting, Handwriting]:
    """Return the digits of the public writers and those of all others; the order of the rows does not matter."""
    names = np.unique(found.writers)
    public = np.random.default_rng([seed, 1]).permutation(names)[: round(PUBLIC_SHARE * len(names))]
    others, digit = ~np.isin(found.writers, public), found.labels < DIGITS
    parts = (digit & ~others, digit & others)
    first, second = (Handwriting(found.images[part], found.labels[part], found.writers[part]) for part in parts)
    return first, second


@app.command()
def main(
    leaf: femnist.Leaf = None,
    parquet: femnist.Parquet = None,
    name: Annotated[str, typer.Option(help="Name of the dataset.")] = "femnist-features",
    out: Out = None,
    features: Annotated[int, typer.Option(min=1, help="Features of an image.")] = 20,
    rows: Limit = None,
    seed: Seed = 0,
) -> None:
    """Write FEMNIST's digits as features that are learnt from a fifth of the writers, who are no clients."""
    with writing(out, name) as folder:
        found, source = femnist.read(leaf, parquet)
        public, others = split_off(found, seed)
        if not len(public.images) or not len(others.images):
            wrong = f"{len(public.images)} digits of public writers and {len(others.images)} of others"
            raise DatasetError(f"{wrong}; give all of the data", code="data.no-rows")
        # In one order, which the features depend on.
        shown = public.images[np.lexsort(public.images.reshape(len(public.images), -1).T)]
        to_features = learn(np.concatenate([shown, np.rot90(shown, axes=(1, 2))]), features)
        about = About(
            recipe=Path(__file__).stem,
            name=name,
            model=f"softmax features={features} classes={DIGITS}",
            provenance=(
                f"Digits of {source} {features} features of an image, learnt without labels from {len(shown)} digits "
                f"of {len(np.unique(public.writers))} other writers, each upright and turned."
            ),
            licence=femnist.LICENCE,
        )
        manifest, images, classes, offsets = build(others, about, rows, seed)
        manifest = Manifest(**(manifest.model_dump() | {"feature_scale": 1.0}))
        write_dataset(folder, manifest, in_chunks(to_features, images), classes, offsets)
    turned = f"clients whose images are turned: {sum(manifest.groups)}"
    typer.echo(f"{counted(manifest)}, {len(classes)} rows of {features} features; {turned}")
    typer.echo(folder)


if __name__ == "__main__":
    app()
