"""Classical methods: four feature vectors of a face, three classifiers of masks, and recognition of people by
features."""

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
"""Images of aligned faces, with shape (N, SIZE, SIZE)."""
_RADII = (1, 2, 3)
"""Radii of the local binary patterns in pixels, one for each scale."""
_CODES = 59
"""Number of codes: the uniform patterns of eight neighbours, and one code for all other patterns."""
_UNIFORM: Any = "nri_uniform"  # missing from scikit-image's type hints
_REACH = 6
"""Half the side of the patch around a landmark, in pixels."""


def pixels(pictures: Pictures) -> Values:
    """Return the grey values of each image with mean 0 and norm 1, so that lighting has little effect; shape (N,
    SIZE²)."""
    flat = pictures.reshape(len(pictures), -1).astype(float)
    flat -= flat.mean(1, keepdims=True)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-9)


def gradients(pictures: Pictures) -> Values:
    """Return histograms of oriented gradients (Dalal and Triggs, 2005): nine angles, cells of 8×8 pixels, blocks of 2×2
    cells."""
    return np.stack([hog(one, 9, (8, 8), (2, 2)) for one in pictures])


def outlines(pictures: Pictures) -> Values:
    """Return the gradient magnitudes by Sobel's filter, averaged over 2×2 pixels; shape (N, SIZE² / 4)."""
    half = SIZE // 2
    edges = np.stack([sobel(one / 255.0) for one in pictures])
    return edges.reshape(-1, half, 2, half, 2).mean((2, 4)).reshape(len(pictures), -1)


def patterns(pictures: Pictures) -> Values:
    """Return histograms of local binary patterns at three scales in a patch around each landmark (Chen et al., 2013);
    shape (N, scales × landmarks × 59). The values are square roots, so that Euclidean distances are Hellinger
    distances."""
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
"""Maps names to functions that compute the features of faces. For "PCA", `contest` fits the PCA of the pixels."""
CLASSIFIERS: Mapping[str, Callable[[int], Any]] = {
    "SVM": lambda seed: LinearSVC(C=0.003, random_state=seed),
    "kNN": lambda seed: KNeighborsClassifier(7),
    "bagging": lambda seed: BaggingClassifier(
        LinearSVC(C=0.01), n_estimators=20, max_samples=0.3, max_features=0.3, random_state=seed
    ),
}
"""Maps names to functions that build a classifier from a seed."""


def described(pictures: Pictures) -> dict[str, Values]:
    """Return all features of the faces, by name."""
    return {name: describe(pictures) for name, describe in DESCRIPTIONS.items()}


def contest(
    taught: Mapping[str, Values], masked: Values, judged: Mapping[str, Values], seed: int = 0
) -> dict[str, Values]:
    """Predict with every pair of features and classifier whether the test faces are masked; returns bool arrays (N,) by
    the pair's name.

    Args:
        taught: features of the M training faces, by name. masked: whether each training face is masked, (M,).
        judged: features of the N test faces, by name.
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
    """Return the cosine similarities (N, M) of the queries and the faces of the gallery, for several kinds of features.

    Some features use only the upper half of the face, which masks leave free. Fisherfaces (Belhumeur et al., 1997) are
    trained on the faces `taught` to distinguish the people given by `people`.
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
    """Return the cosines between rows with shapes (N, D) and (M, D), as a matrix (N, M); 0 for rows of zeros."""
    lengths = [np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9) for rows in (queries, gallery)]
    return (queries / lengths[0]) @ (gallery / lengths[1]).T
