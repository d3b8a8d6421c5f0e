"""The recipe of few public features: who gets which rows by hand, what the features are, then the real files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.datasets.conftest import DATA, LAB, Recipe, experiment, needs
from tests.helpers.errors import raises
from tests.lab.datasets.test_qmnist import idx
from umbel import models
from umbel.data import Dataset, DatasetError, Manifest
from umbel.privacy.accounting.accountant import compose
from umbel.privacy.mechanisms import Laplace

pytestmark = pytest.mark.rest

REAL = {
    "--images": DATA / "train-images-idx3-ubyte.gz",
    "--labels": DATA / "qmnist-train-labels-idx2-int.gz",
    "--public-images": DATA / "t10k-images-idx3-ubyte.gz",
    "--public-labels": DATA / "qmnist-test-labels-idx2-int.gz",
}

recipe = Recipe("qmnist_features", LAB)
module = recipe.module

WRITERS = {7: 7, 5: 4, 11: 3, 2100: 2}
"""How many images each writer has."""
PUBLIC = 70


def strokes(count: int, seed: int) -> NDArray[np.uint8]:
    """Draw bars, upright and level ones by turns, each at a place of its own."""
    generator = np.random.default_rng(seed)
    pictures = np.zeros((count, 28, 28), np.uint8)
    for row, (place, ink) in enumerate(generator.integers((4, 100), (22, 256), size=(count, 2))):
        pictures[row, 4:24, place : place + 3] = ink
        if row % 2:
            pictures[row] = pictures[row].T.copy()
    return pictures


def table(writers: Sequence[int], digits: Sequence[int]) -> NDArray[np.int32]:
    rows = np.full((len(writers), 8), -1, np.int32)
    rows[:, 0], rows[:, 2] = digits, writers
    return rows


def write_files(
    folder: Path, public: NDArray[np.uint8] | None = None, others: int = 3000, writers: dict[int, int] = WRITERS
) -> dict[str, Path]:
    """Write the four files: writers' bars, digit 1 for a level one, and public ones with labels to spare."""
    names = [name for name, often in writers.items() for _ in range(often)]
    public = strokes(PUBLIC, 1) if public is None else public
    content = {
        "--images": strokes(len(names), 0),
        "--labels": table(names, [row % 2 for row in range(len(names))]),
        "--public-images": public,
        "--public-labels": table([*[others] * len(public), 7], [0] * (len(public) + 1)),
    }
    paths = {}
    for option, array in content.items():
        paths[option] = folder / option.strip("-")
        paths[option].write_bytes(idx(array))
    return paths


def options_of(files: dict[str, Path]) -> list[str | Path]:
    return [word for pair in files.items() for word in pair]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return write_files(tmp_path)


def made(files: dict[str, Path], out: Path, *options: str) -> Dataset:
    """Run the recipe with two images a client, and open what it wrote."""
    return recipe.made(out, *options_of(files), "--rows", "2", *options)


# --- who gets what


def handwriting(writers: dict[int, int]) -> Any:
    """Give writers images that say who wrote them, and which of the writer's they are; the digit is the latter's."""
    rows = [(writer, row) for writer, often in writers.items() for row in range(often)]
    pictures = np.zeros((len(rows), 28, 28), np.uint8)
    for picture, (writer, row) in zip(pictures, rows, strict=True):
        picture[0, 27], picture[0, 26] = writer, row + 100  # at the top right; turned, at the top left and below
    writer_of, row_of = np.array(rows).T
    return module.Handwriting(pictures, row_of % 10, writer_of)


def told(picture: NDArray[np.uint8]) -> tuple[int, int, int]:
    """Return writer, row, and whether the image is turned."""
    turned = int(picture[1, 0] > 0)
    writer, row = (picture[0, 0], picture[1, 0]) if turned else (picture[0, 27], picture[0, 26])
    assert np.count_nonzero(picture) == 2
    return int(writer), int(row) - 100, turned


def test_a_writer_is_dealt_out_to_clients_that_train_or_validate_together() -> None:
    often = {writer: 3 + writer % 9 for writer in range(1, 41)}
    images, classes, lengths, split = module.deal(handwriting(often), 3, seed=4)
    assert lengths == [3] * sum(count // 3 for count in often.values())
    seen: set[tuple[int, int]] = set()
    clients: dict[int, list[int]] = {}
    for client in range(len(lengths)):
        own = slice(3 * client, 3 * client + 3)
        writers, rows, turned = zip(*map(told, images[own]), strict=True)
        assert len(set(writers)) == 1
        assert set(turned) == {0}
        np.testing.assert_array_equal(classes[own], np.array(rows) % 10)
        seen |= set(zip(writers, rows, strict=True))
        clients.setdefault(writers[0], []).append(client)
    # No image is dealt twice, and what is left is too few for another client.
    assert len(seen) == len(images)
    assert {writer: len(own) for writer, own in clients.items()} == {w: count // 3 for w, count in often.items()}
    training = [writer for writer, own in clients.items() if max(own) < split["train"]]
    validating = [writer for writer, own in clients.items() if min(own) >= split["train"]]
    assert (len(training), len(validating)) == (36, 4)


def test_clients_of_few_digits_get_shards_of_each(tmp_path: Path) -> None:
    often = {writer: 3 + writer % 9 for writer in range(1, 41)}
    found = handwriting(often)
    images, classes, lengths, split = module.deal_digits(found, 6, 3, seed=4)
    clients = sum(count // 2 for count in np.bincount(found.labels)) // 3
    assert split == {"train": clients * 9 // 10, "validation": -(-clients // 10)}
    assert lengths == [6] * clients
    own = classes.reshape(-1, 6)
    assert max(len(set(digits)) for digits in own) <= 3
    assert all(count % 2 == 0 for digits in own for count in np.bincount(digits))
    rows = [told(one) for one in images]
    assert len({(writer, row) for writer, row, _ in rows}) == len(images), "no image is dealt twice"
    assert [row % 10 for _, row, _ in rows] == classes.tolist()
    again = module.deal_digits(found, 6, 3, seed=4)
    np.testing.assert_array_equal(images, again[0])
    with raises(DatasetError, "data.too-few-rows", "2 images are not enough for 3 digits"):
        module.deal_digits(found, 2, 3, seed=4)


@pytest.mark.parametrize("kind", ["images", "neighbours"])
def test_such_clients_have_a_dataset_of_their_own(kind: str, files: dict[str, Path], tmp_path: Path) -> None:
    options = ["--kind", kind, "--digits", "1"] + ([] if kind == "images" else ["--features", "3"])
    dataset = made(files, tmp_path / "out", *options)
    assert dataset.manifest.name == ("qmnist-users-images" if kind == "images" else "qmnist-users")
    assert dataset.manifest.model == (module.MODELS[True] if kind == "images" else "softmax features=3 classes=10")
    assert "2 images and at most 1 digits" in dataset.manifest.provenance
    assert all(len(set(pair)) == 1 for pair in dataset.targets.reshape(-1, 2))


# --- what the features are


def test_the_features_are_those_of_the_images_in_their_order(files: dict[str, Path], tmp_path: Path) -> None:
    dataset = made(files, tmp_path / "out", "--features", "3", "--seed", "2")
    images, classes, lengths, split = module.deal(module.qmnist.read_digits(files["--images"], files["--labels"]), 2, 2)
    learnt = module.learn(strokes(PUBLIC, 1), 3)
    np.testing.assert_allclose(dataset.features, learnt(images), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(dataset.targets, classes)
    np.testing.assert_array_equal(np.diff(dataset.offsets), lengths)
    assert (dataset.features.dtype, dataset.targets.dtype) == (np.float32, np.int64)
    assert dataset.manifest.split == split
    assert "of kind neighbours" in dataset.manifest.provenance


def test_features_have_mean_square_one_on_average_over_public_images() -> None:
    public = strokes(100, 3)
    for learn, least in ((module.principal, 0.98), (module.learn, 0.7)):
        rows = learn(public, 4)(public)
        assert rows.shape == (100, 4)
        # Those of neighbours are averages over neighbours and so a little less.
        assert least < np.square(rows).mean() <= 1.01


def test_principal_components_are_over_the_root_of_their_deviation() -> None:
    public = np.random.default_rng(0).integers(256, size=(200, 28, 28)).astype(np.uint8)
    public[:, :, :14] //= 8
    rows, counts = module.principal(public, 3)(public), module.gradients(public).astype(float)
    values = np.linalg.svd(counts - counts.mean(0), compute_uv=False)[:3] / np.sqrt(199)
    np.testing.assert_allclose(rows.var(0, ddof=1), values / values.mean(), rtol=1e-3)


def test_a_gradient_is_counted_where_it_is_and_the_way_it_points() -> None:
    # One edge from dark to light, left to right, in the lower half of the image.
    picture = np.zeros((1, 28, 28), np.uint8)
    picture[0, 14:, 14:] = 255
    counts = module.gradients(picture).reshape(9, 9, module.DIRECTIONS)
    assert np.linalg.norm(counts) == pytest.approx(1)
    # To the right is direction 0, and the corner's edge downwards, 3 of 12, lies right of the middle.
    assert counts[7, 4].argmax() == 0
    assert counts[4, 7].argmax() == 3
    assert counts[7, 4, 6] == pytest.approx(0, abs=1e-6)
    assert counts[0, 0].sum() == pytest.approx(0, abs=1e-3)
    assert not np.isnan(module.gradients(np.zeros((1, 28, 28), np.uint8))).any()


def test_one_feature_of_neighbours_tells_two_clusters_apart() -> None:
    generator = np.random.default_rng(0)

    def near(centre: int, count: int) -> NDArray[np.uint8]:
        pictures = generator.integers(60, size=(count, 28, 28)).astype(np.uint8)
        pictures[:, 4:24, centre : centre + 3] = 255
        return pictures

    # Pictures in between, fewer than a neighbourhood, join the two: the smoothest function has a sign for each.
    public = np.concatenate([near(6, 100), near(12, 4), near(18, 100)])
    feature = module.learn(public, 1)
    one, other = (feature(near(centre, 20))[:, 0] for centre in (6, 18))
    assert one.max() * other.max() < 0
    assert one.min() * one.max() > 0
    assert other.min() * other.max() > 0


# --- the images themselves


def test_the_images_are_those_of_the_same_clients(files: dict[str, Path], tmp_path: Path) -> None:
    dataset = made(files, tmp_path / "out", "--kind", "images", "--seed", "2")
    beside = made(files, tmp_path / "beside", "--features", "3", "--seed", "2")
    found = module.qmnist.read_digits(files["--images"], files["--labels"])
    np.testing.assert_array_equal(dataset.features, module.deal(found, 2, 2)[0])
    assert dataset.features.dtype == np.uint8
    np.testing.assert_array_equal(dataset.targets, beside.targets)
    np.testing.assert_array_equal(dataset.offsets, beside.offsets)
    assert dataset.manifest.split == beside.manifest.split


def test_the_manifest_of_images_names_a_network_and_no_public_images(files: dict[str, Path], tmp_path: Path) -> None:
    manifest = made(files, tmp_path / "out", "--kind", "images").manifest
    assert (manifest.name, manifest.model, manifest.loss) == ("qmnist-images", "lenet10", "cross-entropy")
    assert manifest.feature_scale == 1 / 255
    assert models.load(manifest.model, manifest.loss).num_parameters == 13_426
    assert "test images" not in manifest.provenance
    assert "database 19. The images of a writer are dealt out to clients of 2 images:" in manifest.provenance


# --- the whole


def test_the_manifest_tells_model_source_and_what_is_promised(files: dict[str, Path], tmp_path: Path) -> None:
    manifest = made(files, tmp_path / "out", "--features", "4").manifest
    assert (manifest.name, manifest.loss, manifest.feature_scale) == ("qmnist-features", "cross-entropy", 1.0)
    assert manifest.model == "softmax features=4 classes=10"
    assert models.load(manifest.model, manifest.loss).num_parameters == 40
    assert f"{PUBLIC} MNIST test images of 1 other writers." in manifest.provenance
    assert "dealt out to clients of 2 images: a writer has up to 3, and a guarantee is for one." in manifest.provenance


def test_clients_that_are_writers_are_said_to_be(tmp_path: Path) -> None:
    files = write_files(tmp_path, writers={writer: 3 for writer in range(1, 21)})
    dataset = made(files, tmp_path / "out", "--features", "4")
    assert dataset.manifest.split == {"train": 18, "validation": 2}
    assert "clients of 2 images: one client a writer." in dataset.manifest.provenance


# --- what cannot be used


@pytest.mark.parametrize(
    ("changed", "reasons"),
    [
        ({"others": 11}, ["writer 11", "not public", "test files"]),
        ({"public": strokes(60, 0)}, ["10 features need 61 public images, got 60"]),
    ],
)
def test_public_images_that_cannot_be_used_are_refused(
    changed: dict[str, Any], reasons: list[str], tmp_path: Path
) -> None:
    files, out = write_files(tmp_path, **changed), tmp_path / "out"
    recipe.assert_refused(recipe.run(out, *options_of(files), "--rows", "2"), out, *reasons)


def test_more_public_images_than_labels_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    files["--public-images"].write_bytes(idx(strokes(PUBLIC + 2, 0)))
    result = recipe.run(out := tmp_path / "out", *options_of(files))
    recipe.assert_refused(result, out, f"has {PUBLIC + 2} images", f"has {PUBLIC + 1} labels")


@pytest.mark.parametrize("rows", ["8", "5"])
def test_clients_of_more_images_than_writers_have_are_refused(
    files: dict[str, Path], tmp_path: Path, rows: str
) -> None:
    # Writer 7 alone has five images: whether it trains or validates, the other side has nobody.
    out = tmp_path / "out"
    result = recipe.run(out, *options_of(files), "--rows", rows)
    recipe.assert_refused(result, out, f"validation clients of {rows} images; lower --rows")


# --- the experiment


def test_the_experiment_is_a_run_config_at_eight(umbel_home: Path) -> None:
    manifest = Manifest(
        name="qmnist-features", clients=1757, split={"train": 1576, "validation": 181},
        model="softmax features=10 classes=10", loss="cross-entropy",
    )  # fmt: skip
    setup = experiment("qmnist-features-epsilon-8", umbel_home, manifest, 10)
    assert (setup.config.rounds, setup.config.clients_per_round, setup.strategy.hypotheses) == (1, manifest.train, 1)
    assert setup.config.clipping == "public"
    # Clipped updates are two radii apart at most.
    loss = Laplace(setup.config.noise_multiplier).loss(setup.model.num_parameters, 2.0)
    assert 7.9 < compose({loss: setup.config.rounds}, 1e-5) <= 8.0


# --- the real files


@pytest.mark.rest
@needs(*REAL.values())
def test_the_real_files_give_features_that_tell_digits_apart(tmp_path: Path) -> None:
    dataset = recipe.made(tmp_path / "out", *options_of(REAL))
    manifest = dataset.manifest
    assert manifest.split == {"train": 1576, "validation": 181}
    assert np.diff(dataset.offsets).tolist() == [30] * 1757
    assert "10000 MNIST test images of 297 other writers" in manifest.provenance
    # The nearest class mean of the training clients, on the validation clients' rows.
    border = dataset.offsets[manifest.train]
    rows, digits = np.array(dataset.features), np.array(dataset.targets)
    means = np.stack([rows[:border][digits[:border] == digit].mean(0) for digit in range(10)])
    found = np.square(rows[border:, None] - means).sum(-1).argmin(1)
    assert (found == digits[border:]).mean() > 0.95
