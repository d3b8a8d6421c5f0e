"""Measures of images, by numbers that can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from umbel_lab.attacks.quality import correlation, psnr, ssim, verdict

pytestmark = pytest.mark.rest

rng = np.random.default_rng(0)
PICTURE = rng.random((28, 28))


def test_psnr_by_hand() -> None:
    for image, original, decibels in (
        (np.full((2, 2), 0.4), np.full((2, 2), 0.5), 20),  # a tenth off everywhere
        (np.zeros((2, 2)), np.ones((2, 2)), 0),
        (PICTURE, PICTURE, math.inf),
        (np.eye(10), np.zeros((10, 10)), 10),  # ten wrong pixels of a hundred
    ):
        assert psnr(image, original) == pytest.approx(decibels)


def test_ssim_by_hand() -> None:
    # Of two greys it is the luminance term alone: without variance the second factor is c2 / c2; c1 = .01^2.
    luminance = (2 * 0.25 * 0.5 + 1e-4) / (0.25**2 + 0.5**2 + 1e-4)
    assert ssim(np.full((11, 11), 0.25), np.full((11, 11), 0.5)) == pytest.approx(luminance)
    # One window of an 11x11 image, its weights the outer product of a Gaussian of deviation 1.5.
    x, y = rng.random((11, 11)), rng.random((11, 11))
    g = np.array([math.exp(-(i * i) / 4.5) for i in range(-5, 6)])
    w = np.outer(g, g) / g.sum() ** 2
    mx, my = (w * x).sum(), (w * y).sum()
    vx, vy, cov = (w * (x - mx) ** 2).sum(), (w * (y - my) ** 2).sum(), (w * (x - mx) * (y - my)).sum()
    expected = (2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
    assert ssim(x, y) == pytest.approx(expected)
    assert ssim(PICTURE, PICTURE) == pytest.approx(1)
    assert ssim(1 - PICTURE, PICTURE) < 0
    with pytest.raises(ValueError, match="at least 11x11, got \\(10, 28\\)"):
        ssim(np.zeros((10, 28)), np.zeros((10, 28)))


def test_correlation_knows_neither_scale_nor_brightness() -> None:
    assert correlation(0.3 * PICTURE + 0.2, PICTURE) == pytest.approx(1)
    assert correlation(1 - PICTURE, PICTURE) == pytest.approx(-1)
    assert correlation(np.full((28, 28), 0.5), PICTURE) == 0


def test_verdicts() -> None:
    guesses = {0.099: "full", 0.101: "partial"}  # 20.1 dB, and 19.9 dB, but the same shape
    assert {off: verdict(PICTURE + off, PICTURE) for off in guesses} == guesses
    assert verdict(np.full((28, 28), 0.5), PICTURE) == verdict(1 - PICTURE, PICTURE) == "none"
