"""How much of an image a reconstruction shows. Images are (height, width) with pixels in [0, 1]."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

FULL_PSNR = 20.0
"""In dB; a reconstruction at or above it counts as full."""

PARTIAL_CORRELATION = 0.5
"""A reconstruction at or above it counts as partial."""

VERDICTS = ("full", "partial", "none")

Image = NDArray[np.floating[Any]]

# Wang et al.: an 11x11 window, a Gaussian of standard deviation 1.5, and K1, K2 for a range of 1.
_WINDOW, _DEVIATION, _K1, _K2 = 11, 1.5, 0.01, 0.03


def psnr(image: Image, original: Image) -> float:
    """Return the peak signal-to-noise ratio in dB, for a peak of 1: -10 log10 of the mean squared error.

    Infinite for equal images.
    """
    error = float(np.mean(np.square(np.asarray(image, np.float64) - original)))
    return math.inf if error == 0 else -10 * math.log10(error)


def ssim(image: Image, original: Image) -> float:
    """Return the mean structural similarity over all windows in an image, at most 1; `ValueError` below 11x11 pixels.

    Wang, Bovik, Sheikh and Simoncelli, *Image quality assessment*, IEEE Transactions on Image Processing 13 (2004), Eq.
    13 and Sec. III-C.
    """
    if min(np.shape(image)) < _WINDOW:
        raise ValueError(f"structural similarity needs images of at least {_WINDOW}x{_WINDOW}, got {np.shape(image)}")
    x, y = np.asarray(image, np.float64), np.asarray(original, np.float64)
    mean_x, mean_y = _smooth(x), _smooth(y)
    variance_x, variance_y = _smooth(x * x) - mean_x**2, _smooth(y * y) - mean_y**2
    covariance = _smooth(x * y) - mean_x * mean_y
    c1, c2 = _K1**2, _K2**2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    structure = (2 * covariance + c2) / (variance_x + variance_y + c2)
    return float(np.mean(luminance * structure))


def correlation(image: Image, original: Image) -> float:
    """Return Pearson's correlation of the pixels; 0 for an image of a single grey."""
    x, y = (np.asarray(one, np.float64) - np.mean(one) for one in (image, original))
    norms = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float((x * y).sum() / norms) if norms > 1e-12 else 0.0


def verdict(image: Image, original: Image) -> str:
    """Return ``full`` (`FULL_PSNR`), ``partial`` (`PARTIAL_CORRELATION`) or ``none``.

    ``none`` means that this image shows little of the original, not that the release does.
    """
    if psnr(image, original) >= FULL_PSNR:
        return "full"
    return "partial" if correlation(image, original) >= PARTIAL_CORRELATION else "none"


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Gaussian-weighted mean of every window."""
    offsets = np.arange(_WINDOW) - _WINDOW // 2
    weights = np.exp(-(offsets**2) / (2 * _DEVIATION**2))
    weights /= weights.sum()
    windows = sliding_window_view(values, (_WINDOW, _WINDOW))
    smooth: NDArray[np.float64] = np.einsum("ijkl,k,l->ij", windows, weights, weights)
    return smooth
