"""Classical scores of quality: features of BRISQUE (natural scene statistics, Mittal et al., 2012) for a support vector
regression, and BRISQUE's public model, which its authors trained on people's ratings in LIVE and OpenCV publishes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import correlate1d
from scipy.special import gammaln

from shoestring.core.errors import ConfigError, DataError
from shoestring.storage import foreign

Values = NDArray[np.float64]
OPENCV = Path("/usr/share/opencv4/quality")
"""Folder in which Debian's package `opencv-data` stores BRISQUE's model."""
_SHAPES = np.arange(0.2, 10.001, 0.001)
_RATIOS = np.exp(2 * gammaln(2 / _SHAPES) - gammaln(1 / _SHAPES) - gammaln(3 / _SHAPES))
"""The ratio E[|x|]² / E[x²] of a generalised Gaussian with each of the shapes; increases with the shape."""
_WINDOW = np.exp(-0.5 * (np.arange(-3, 4) / (7 / 6)) ** 2)
_SHIFTS = ((0, 1), (1, 0), (1, 1), (-1, 1))
_TINY = 1e-12


def _smooth(pictures: Values) -> Values:
    window = _WINDOW / _WINDOW.sum()
    return correlate1d(correlate1d(pictures, window, 1, mode="nearest"), window, 2, mode="nearest")


def _shape(ratio: Values) -> Values:
    return _SHAPES[np.searchsorted(_RATIOS, ratio).clip(0, len(_SHAPES) - 1)]


def _products(pairs: Values) -> Values:
    """Fit asymmetric generalised Gaussians to products of neighbouring values; returns shape, mean, left and right
    variance, (N, 4)."""

    def variance(side: NDArray[np.bool_]) -> Values:
        return (pairs**2 * side).sum((1, 2)) / np.maximum(side.sum((1, 2)), 1)

    left, right = variance(pairs < 0), variance(pairs > 0)
    balance = np.sqrt((left + _TINY) / (right + _TINY))
    ratio = np.abs(pairs).mean((1, 2)) ** 2 / ((pairs**2).mean((1, 2)) + _TINY)
    shape = _shape(ratio * (balance**3 + 1) * (balance + 1) / (balance**2 + 1) ** 2)
    factor = np.exp(gammaln(2 / shape) - 0.5 * (gammaln(1 / shape) + gammaln(3 / shape)))
    return np.stack([shape, (np.sqrt(right) - np.sqrt(left)) * factor, left, right], 1)


def features(pictures: NDArray[np.uint8]) -> Values:
    """Compute BRISQUE's 36 features, followed by the mean and deviation of the local contrast at two scales.

    Args:
        pictures: grey values (N, H, W); H and W are at least 14.

    Returns:
        The features, (N, 40): 18 of the image, 18 of the image at half size, and four of the local contrast.
    """
    parts, contrasts, scaled = [], [], pictures.astype(float)
    for _ in range(2):
        mean = _smooth(scaled)
        deviation = np.sqrt(np.abs(_smooth(scaled**2) - mean**2))
        normal = (scaled - mean) / (deviation + 1)
        square = (normal**2).mean((1, 2))
        parts += [_shape(np.abs(normal).mean((1, 2)) ** 2 / (square + _TINY))[:, None], square[:, None]]
        parts += [_products(normal * np.roll(normal, shift, (1, 2))) for shift in _SHIFTS]
        contrasts += [deviation.mean((1, 2))[:, None], deviation.std((1, 2))[:, None]]
        # Averages of 2×2 grey values; an odd last row or column is left out.
        count, height, width = len(scaled), scaled.shape[1] // 2, scaled.shape[2] // 2
        scaled = scaled[:, : 2 * height, : 2 * width].reshape(count, height, 2, width, 2).mean((2, 4))
    return np.concatenate(parts + contrasts, 1)


# -- BRISQUE's model ---------------------------------------------------------------------------------------------------


@cache
def _published() -> dict[str, Values]:
    """Read BRISQUE's public model: the support vectors, their coefficients, and the ranges from which features are
    scaled.

    Raises:
        ConfigError: opencv-data is not installed.
        DataError: the files have another format.
    """
    texts = []
    for name in ("brisque_model_live.yml", "brisque_range_live.yml"):
        if not (path := OPENCV / name).is_file():
            raise ConfigError(f"`opencv-data` is not installed: `{path}` is missing", hint="apt install opencv-data")
        texts.append(foreign.read_text(path, 4 << 20))
    number = r"[-+]?\d[\d.]*(?:e[-+]?\d+)?"

    def array(text: str, name: str) -> Values:
        part = re.search(rf"^ *{name}: *(\[[^\]]*\]|{number})", text, re.MULTILINE)
        return np.array(re.findall(number, part.group(1)) if part else [], float)

    vectors = texts[0].partition("support_vectors:")[2].partition("decision_functions:")[0]
    model = {name: array(texts[0], name) for name in ("gamma", "rho", "alpha")}
    model |= {"vectors": np.array(re.findall(number, vectors), float), "ranges": array(texts[1], "data")}
    sizes = {name: value.size for name, value in model.items()}
    if sizes != {"gamma": 1, "rho": 1, "alpha": model["alpha"].size, "vectors": 36 * model["alpha"].size, "ranges": 72}:
        raise DataError(f"`{OPENCV}` has no BRISQUE model in OpenCV's format: {sizes}")
    return model | {"vectors": model["vectors"].reshape(-1, 36), "ranges": model["ranges"].reshape(2, 36)}


def brisque(statistics: Values) -> Values:
    """Compute the quality, (N,), by BRISQUE's public model from features (N, 40). The quality is minus the model's
    score, so that higher is better."""
    model = _published()
    low, high = model["ranges"]
    scaled = 2 * (statistics[:, :36] - low) / (high - low) - 1
    distances = (scaled**2).sum(1)[:, None] + (model["vectors"] ** 2).sum(1) - 2 * scaled @ model["vectors"].T
    return model["rho"] - np.exp(-model["gamma"] * distances) @ model["alpha"]
