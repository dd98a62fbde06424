"""Data that look like the real ones of each field, made from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Arrays = tuple[np.ndarray, ...]


def text(seed: int, vocabulary: int, length: int) -> np.ndarray:
    """Tokens (length,) of a first-order Markov chain whose transitions follow Zipf's law."""
    rng = np.random.default_rng(seed)
    successors = np.stack([rng.permutation(vocabulary) for _ in range(vocabulary)])
    ranks = np.minimum(rng.zipf(1.6, length), vocabulary) - 1
    tokens = np.zeros(length, np.int64)
    for position in range(1, length):
        tokens[position] = successors[tokens[position - 1], ranks[position]]
    return tokens


def text_windows(seed: int, vocabulary: int, count: int, length: int) -> np.ndarray:
    """Windows (count, length + 1) of one text, half overlapping."""
    tokens = text(seed, vocabulary, (count + 2) * length // 2 + length)
    starts = np.arange(count) * (length // 2)
    return tokens[starts[:, None] + np.arange(length + 1)]


def images(seed: int, count: int, size: int, classes: int) -> Arrays:
    """Images (count, 3, size, size) of gratings whose angle and colour tell the class, with noise; labels (count,)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=count)
    y, x = np.mgrid[0:size, 0:size] / size
    angle = (labels * np.pi / classes)[:, None, None]
    waves = np.sin(2 * np.pi * 4 * (np.cos(angle) * x + np.sin(angle) * y) + rng.uniform(0, 6, (count, 1, 1)))
    colours = np.random.default_rng(0).uniform(0.3, 1, (classes, 3))[labels]
    pixels = waves[:, None] * colours[:, :, None, None] + rng.normal(0, 0.3, (count, 3, size, size))
    return pixels.astype(np.float32), labels


def blobs(seed: int, count: int, size: int) -> Arrays:
    """Grey images (count, 1, size, size) of bright discs on noise, and masks (count, size, size) of the discs."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:size, 0:size]
    centres, radii = rng.uniform(0, size, (count, 3, 2, 1, 1)), rng.uniform(size / 12, size / 5, (count, 3, 1, 1))
    inside = (x - centres[:, :, 0]) ** 2 + (y - centres[:, :, 1]) ** 2 < radii**2
    masks = inside.any(1)
    pixels = masks + rng.normal(0, 0.4, masks.shape)
    return pixels[:, None].astype(np.float32), masks.astype(np.int64)


def clicks(seed: int, count: int, rows: list[int], bag: int) -> Arrays:
    """Dense features (count, 13), ids (count, len(rows), bag) with popular ones, and clicks (count,)."""
    rng = np.random.default_rng(seed)
    dense = rng.lognormal(0, 1, (count, 13)).astype(np.float32)
    ids = np.stack([(rng.zipf(1.3, (count, bag)) - 1) % size for size in rows], 1)
    score = np.log1p(dense)[:, :4].sum(1) - 2 + (ids[:, 0] % 7 == 0).any(1) * 2.0
    clicked = rng.uniform(size=count) < 1 / (1 + np.exp(-score))
    return np.log1p(dense), ids, clicked.astype(np.float32)


def citations(seed: int, nodes: int, edges: int, features: int, classes: int) -> Arrays:
    """Word counts (nodes, features), edges (2, edges) that favour nodes of the same class, and labels (nodes,)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=nodes)
    topics = 0.05 + 0.05 * rng.uniform(-1, 1, (classes, features))
    words = (rng.uniform(size=(nodes, features)) < topics[labels]).astype(np.float32)
    source, other = rng.integers(nodes, size=edges), np.minimum(rng.zipf(1.5, edges) - 1, nodes - 1)
    by_class = [np.flatnonzero(labels == topic) for topic in range(classes)]
    same = np.array([rng.choice(by_class[labels[node]]) for node in source])
    target = np.where(rng.uniform(size=edges) < 0.7, same, other)
    return words, np.stack([source, target]), labels


def speech(seed: int, count: int, frames: int, bands: int, symbols: int, spoken: int) -> Arrays:
    """Spectra (count, frames, bands), their lengths (count,), and transcripts (count, spoken) of symbols from 1."""
    rng = np.random.default_rng(seed)
    transcripts = rng.integers(1, symbols, (count, spoken))
    voices = np.random.default_rng(1).normal(size=(symbols, bands))
    when = np.minimum(np.arange(frames) * spoken // frames, spoken - 1)
    spectra = voices[transcripts[:, when]] + rng.normal(0, 0.5, (count, frames, bands))
    lengths = rng.integers(frames * 3 // 4, frames + 1, count)
    return spectra.astype(np.float32), lengths, transcripts


def shuffled_batches(arrays: Arrays, size: int, seed: int) -> Iterator[Any]:
    """Batches of rows of the arrays in random order, epoch after epoch."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(arrays[0]))
        for start in range(0, len(order) - size + 1, size):
            yield tuple(array[order[start : start + size]] for array in arrays)
