"""Classical methods: four descriptions of a face, three classifiers, and people found again by descriptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.core.errors import ConfigError
from shoestring_recipes.faces.crops import LANDMARKS, SIZE

try:
    from skimage.feature import hog, local_binary_pattern
    from skimage.filters import sobel
    from sklearn.decomposition import PCA
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.ensemble import BaggingClassifier
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC
except ImportError as error:
    raise ConfigError("the recipe `faces` needs scikit-learn", hint='pip install "shoestring[faces]"') from error

Values = NDArray[Any]
Pictures = NDArray[np.uint8]
"""Aligned faces, (N, SIZE, SIZE)."""
_RADII = (1, 2, 3)
"""Radii of local binary patterns in pixels: the scales."""
_CODES = 59
"""Number of uniform patterns of eight neighbours, with one for all others."""
_UNIFORM: Any = "nri_uniform"  # which scikit-image's types leave out
_REACH = 6
"""Half the side in pixels of the patch around a landmark."""


def pixels(pictures: Pictures) -> Values:
    """Grey values without their mean and of one length, so that light matters little: (N, SIZE²)."""
    flat = pictures.reshape(len(pictures), -1).astype(float)
    flat -= flat.mean(1, keepdims=True)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-9)


def gradients(pictures: Pictures) -> Values:
    """Histograms of oriented gradients (Dalal and Triggs, 2005): nine angles, cells of 8×8, blocks of 2×2."""
    return np.stack([hog(one, 9, (8, 8), (2, 2)) for one in pictures])


def outlines(pictures: Pictures) -> Values:
    """Sobel's gradient magnitudes, means of 2×2 pixels: (N, SIZE² / 4)."""
    half = SIZE // 2
    edges = np.stack([sobel(one / 255.0) for one in pictures])
    return edges.reshape(-1, half, 2, half, 2).mean((2, 4)).reshape(len(pictures), -1)


def patterns(pictures: Pictures) -> Values:
    """Histograms of local binary patterns at three scales in a patch around each landmark (Chen et al., 2013), as
    square roots, whose differences are Hellinger's: (N, scales × landmarks × 59)."""
    places = (np.array(list(LANDMARKS.values())) * SIZE).round().astype(int)
    lows, highs = (places - _REACH).clip(0), (places + _REACH).clip(max=SIZE)
    histograms_by_face = np.zeros((len(pictures), len(_RADII), len(places), _CODES))
    for one, rows in zip(pictures, histograms_by_face, strict=True):
        for radius, histograms in zip(_RADII, rows, strict=True):
            codes = local_binary_pattern(one, 8, radius, _UNIFORM).astype(int)
            for histogram, (left, top), (right, bottom) in zip(histograms, lows, highs, strict=True):
                histogram[:] = np.bincount(codes[top:bottom, left:right].ravel(), minlength=_CODES)
    return np.sqrt(histograms_by_face / histograms_by_face.sum(-1, keepdims=True)).reshape(len(pictures), -1)


DESCRIPTIONS: Mapping[str, Callable[[Pictures], Values]] = {
    "HOG": gradients,
    "Sobel": outlines,
    "PCA": pixels,
    "LBP": patterns,
}
"""Descriptions of faces; PCA follows where they are learnt from."""
CLASSIFIERS: Mapping[str, Callable[[int], Any]] = {
    "SVM": lambda seed: LinearSVC(C=0.003, random_state=seed),
    "kNN": lambda seed: KNeighborsClassifier(7),
    "bagging": lambda seed: BaggingClassifier(
        LinearSVC(C=0.01), n_estimators=20, max_samples=0.3, max_features=0.3, random_state=seed
    ),
}
"""Classifiers, given a seed."""


def described(pictures: Pictures) -> dict[str, Values]:
    """All descriptions of some faces."""
    return {name: describe(pictures) for name, describe in DESCRIPTIONS.items()}


def contest(
    taught: Mapping[str, Values], masked: Values, judged: Mapping[str, Values], seed: int = 0
) -> dict[str, Values]:
    """Which faces each method says are masked, by the name of description and classifier: (N,) of bool.

    Args:
        taught: descriptions of the faces to learn from, by name. masked: whether they are, (M,).
        judged: descriptions of the faces to judge.
    """
    answers = {}
    for name, rows in taught.items():
        first = [PCA(min(60, *rows.shape), random_state=seed)] if name == "PCA" else []
        prepared = make_pipeline(*first, StandardScaler()).fit(rows)
        learnt, asked = prepared.transform(rows), prepared.transform(judged[name])
        for kind, make in CLASSIFIERS.items():
            answers[f"{name} + {kind}"] = make(seed).fit(learnt, masked).predict(asked).astype(bool)
    return answers


def similarities(taught: Pictures, people: Values, queries: Pictures, gallery: Pictures) -> dict[str, Values]:
    """How alike each query and each face of the gallery are, by each way to describe them: (N, M) cosines.

    Besides whole descriptions there are those of the upper half, which masks leave free, and Fisherfaces (Belhumeur et
    al., 1997), which learn from `taught`, of `people`, (M,), what tells people apart.
    """
    upper = np.arange(SIZE) < SIZE // 2
    components = PCA(min(100, *taught.reshape(len(taught), -1).shape), whiten=True, random_state=0).fit(pixels(taught))
    fisher = LinearDiscriminantAnalysis().fit(components.transform(pixels(taught)), people)
    ways: dict[str, Callable[[Pictures], Values]] = {
        **DESCRIPTIONS,
        "pixels": pixels,
        "PCA": lambda pictures: components.transform(pixels(pictures)),
        "upper pixels": lambda pictures: pixels(pictures[:, upper]),
        "upper HOG": lambda pictures: gradients(pictures[:, upper]),
        "Fisherfaces": lambda pictures: fisher.transform(components.transform(pixels(pictures))),
    }
    return {name: cosines(describe(queries), describe(gallery)) for name, describe in ways.items()}


def cosines(queries: Values, gallery: Values) -> Values:
    """The cosines of rows (N, D) and (M, D): (N, M); 0 for rows of zeros."""
    lengths = [np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9) for rows in (queries, gallery)]
    return (queries / lengths[0]) @ (gallery / lengths[1]).T
