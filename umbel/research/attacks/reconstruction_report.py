"""What the reconstruction audit leaves behind: a table, the words under it, and a picture."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from umbel.protocol.home import write_atomically
from umbel.research.attacks import quality
from umbel.research.attacks.reconstruct import DLG, RANK_ONE, Audit, Images

AVERAGE = "mean image"
"""The baseline: what one scores who answers with the mean of other clients' images and has seen no release."""

COLUMNS = ("ν", "attack", "PSNR", "SSIM", "correlation", "label", *quality.VERDICTS)


@dataclass(frozen=True)
class Scores:
    """How close images come to the originals.

    Attributes
    ----------
    psnr, ssim, correlation : float
        Means over images.
    verdicts : dict
        Number of images by verdict (`quality.verdict`).
    """

    psnr: float
    ssim: float
    correlation: float
    verdicts: dict[str, int]

    @classmethod
    def of(cls, images: Images, originals: Images) -> Scores:
        """Compare images with their originals, both (images, 28, 28)."""
        pairs = list(zip(images, originals, strict=True))
        counts = Counter(quality.verdict(*pair) for pair in pairs)
        psnr, ssim, correlation = (
            float(np.mean([measure(*pair) for pair in pairs]))
            for measure in (quality.psnr, quality.ssim, quality.correlation)
        )
        return cls(psnr, ssim, correlation, {verdict: counts[verdict] for verdict in quality.VERDICTS})

    @property
    def shown(self) -> int:
        """Number of images that are shown in full or in part."""
        return self.verdicts["full"] + self.verdicts["partial"]

    def beats(self, other: Scores) -> bool:
        """Return whether these come closer by both PSNR and correlation."""
        return self.psnr > other.psnr and self.correlation > other.correlation


@dataclass(frozen=True)
class Row:
    """What an attack scored at a noise multiplier, or the baseline, which has none.

    Attributes
    ----------
    noise_multiplier : float or None
    attack : str
    scores : Scores or None
        None for an attack on the label alone.
    label : float or None
        Share of labels that were read rightly; None for the baseline.
    seconds : float
        An image.
    obstacle : str
        Why the attack cannot be made; empty if it can.
    """

    noise_multiplier: float | None
    attack: str
    scores: Scores | None = None
    label: float | None = None
    seconds: float = 0.0
    obstacle: str = ""

    def cells(self) -> list[str]:
        """Return the row as text, a cell for each of `COLUMNS`."""
        if self.obstacle:
            return [*self._place, "not applicable", *[""] * (len(COLUMNS) - 3)]
        digits = (".1f", ".2f", ".2f", ".2f", "d", "d", "d")
        return [*self._place, *_texts(self._numbers, digits)]

    def plain(self) -> list[str]:
        """Return the row with its numbers in full, for the CSV file."""
        return [*self._place, *_texts(self._numbers, [".6g"] * len(self._numbers))]

    @property
    def _place(self) -> tuple[str, str]:
        return "" if self.noise_multiplier is None else f"{self.noise_multiplier:g}", self.attack

    @property
    def _numbers(self) -> list[float | None]:
        if self.scores is None:
            return [None, None, None, self.label, *[None] * len(quality.VERDICTS)]
        scores = self.scores
        return [scores.psnr, scores.ssim, scores.correlation, self.label, *scores.verdicts.values()]


def rows_of(audit: Audit) -> list[Row]:
    """Return a row for the baseline, then one for each attempt."""
    secret = audit.secret
    rows = [Row(None, AVERAGE, Scores.of(np.broadcast_to(secret.average, secret.images.shape), secret.images))]
    for one in audit.attempts:
        scores = None if one.images is None else Scores.of(one.images, secret.images)
        label = None if one.obstacle else float(np.mean(secret.labels == np.array(one.labels)))
        rows.append(Row(one.noise_multiplier, one.attack, scores, label, one.seconds, one.obstacle))
    return rows


def notes(rows: Sequence[Row]) -> list[str]:
    """Return the sentences that belong under the table; `rows` are those of `rows_of`."""
    baseline = rows[0].scores
    assert baseline is not None
    images = sum(baseline.verdicts.values())
    said = [
        f"full: PSNR of at least {quality.FULL_PSNR:g} dB; partial: correlation of at least "
        f"{quality.PARTIAL_CORRELATION:g}. The mean image of other clients, which needs no release, is partial for "
        f"{baseline.verdicts['partial']} of {images}: only what scores above it is read off a release.",
        "An attack that fails proves nothing: not that a release hides its image, only that this attack, made like "
        "this, did not find it.",
    ]
    leaked = {row.noise_multiplier: row.scores for row in rows if row.attack == DLG and row.scores}
    read = {row.noise_multiplier: row.scores for row in rows if row.attack == RANK_ONE and row.scores}
    further = [nu for nu in read if nu in leaked and read[nu].shown > leaked[nu].shown]
    if further:
        pairs = (
            f"ν = {nu:g} ({read[nu].shown} of {images} images in full or in part against {leaked[nu].shown}, "
            f"{read[nu].psnr:.1f} dB against {leaked[nu].psnr:.1f})"
            for nu in further
        )
        said.append(
            "The rank-one attack, which reads the first fully connected layer's input off the same releases, goes "
            f"further than plain DLG at {', '.join(pairs)}; the mean image has {baseline.psnr:.1f} dB."
        )
    hidden = [nu for nu in further if read[nu].beats(baseline) and not leaked[nu].beats(baseline)]
    if hidden:
        said.append(
            f"At ν = {', '.join(f'{nu:g}' for nu in hidden)} DLG shows no more than the mean image does, and the "
            "rank-one attack does: that DLG fails does not mean that the image is hidden."
        )
    told = [row for row in rows if row.noise_multiplier is not None and row.label is not None and row.label >= 0.5]
    if told:
        last = max(told, key=lambda row: (row.noise_multiplier, row.label))
        said.append(
            f"Labels are not images: at ν = {last.noise_multiplier:g}, the attack {last.attack!r} still reads "
            f"{round((last.label or 0) * images)} of {images} labels rightly."
        )
    if 0.0 in leaked and not leaked[0.0].beats(baseline):
        said.append(
            "DLG fails here without any noise, as is to be expected of networks that are not twice differentiable "
            "(ReLU, max pooling): its failures at larger ν say nothing about the noise. Compare a sigmoid network, "
            "such as lenet10."
        )
    return said + sorted({f"{row.attack}: {row.obstacle}." for row in rows if row.obstacle})


def write(folder: Path, audit: Audit, rows: Sequence[Row]) -> None:
    """Write ``table.csv``, ``table.md``, ``reconstructions.svg`` and ``reconstructions.png``.

    The same audit gives the same bytes.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("noise multiplier", *COLUMNS[1:]))
    writer.writerows(row.plain() for row in rows)
    write_atomically(folder / "table.csv", buffer.getvalue().encode())
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row.cells() for row in rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    page = "\n".join([f"# {title(audit)}\n", table, *(f"{note}\n" for note in notes(rows))])
    write_atomically(folder / "table.md", page.encode())
    # Ids in an SVG are random unless they are salted.
    with matplotlib.rc_context({"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "reconstructions"}):
        drawing = draw(audit)
        for ending, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            content = io.BytesIO()
            drawing.savefig(content, format=ending, dpi=150, metadata=metadata)
            write_atomically(folder / f"reconstructions.{ending}", content.getvalue())


def title(audit: Audit) -> str:
    """Return what was audited, in a line."""
    setting = audit.setting
    noise = "each layer by itself" if setting.per_layer else "the whole vector"
    return (
        f"Reconstruction from one step on one image: {setting.dataset}, {setting.model}, {setting.images} images, "
        f"noise on {noise}, seed {setting.seed}"
        + (f", means of {setting.releases} releases" if setting.releases > 1 else "")
    )


def draw(audit: Audit, image: int = 0) -> Figure:
    """Return a picture like the paper's Figure 3: the original above, a row an attack, a column a noise multiplier."""
    nus = audit.setting.noise_multipliers
    attacks = [name for name in (DLG, RANK_ONE) if any(one.attack == name for one in audit.attempts)]
    columns = max(len(nus), 2)
    figure = Figure(figsize=(1.2 * columns + 0.4, 1.3 * (len(attacks) + 1) + 0.2), layout="constrained")
    axes = figure.subplots(len(attacks) + 1, columns, squeeze=False)
    for place in axes.flat:
        place.set(xticks=[], yticks=[])
        place.set_frame_on(False)
    _show(axes[0, 0], audit.secret.images[image], "original")
    _show(axes[0, 1], audit.secret.average, AVERAGE)
    for row, name in zip(axes[1:], attacks, strict=True):
        row[0].set_ylabel(name)
        for place, nu in zip(row, nus, strict=False):
            (attempt,) = [one for one in audit.attempts if (one.attack, one.noise_multiplier) == (name, nu)]
            if attempt.images is None:
                place.set_title(f"ν = {nu:g}")
                place.text(0.5, 0.5, "n/a", ha="center", va="center", transform=place.transAxes)
            else:
                _show(place, attempt.images[image], f"ν = {nu:g}")
    return figure


def _show(place: Axes, image: NDArray[np.float64], name: str) -> None:
    place.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    place.set_title(name)


def _texts(numbers: Iterable[float | None], formats: Iterable[str]) -> list[str]:
    return ["" if number is None else format(number, how) for number, how in zip(numbers, formats, strict=True)]
