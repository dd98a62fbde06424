"""A small network that learns, while the model trains, which layers are worth their bytes.

The idea is from "Layer-Wised Sparsification Based on Hypernetwork" (Wu, Ye, ICANN 2024): layers that contribute more to
learning are sent first. No more of it is public, so the objective and the training are our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from shoestring.comm.selection.budget import Layers, Notes, Selector, choose_fitting

Weights = dict[str, np.ndarray]


class Hypernetwork(Selector):
    """Maps each layer's features to the probability p of sending it, with one hidden layer.

    It maximises J = Σ p (v - λ b) by gradient ascent. b is the layer's share of all bytes. v is the share of the loss
    reduction, to first order, that sending it gives: ⟨g, M⟩, with g of the next step, whose noise is not in M. It is
    known for layers that were sent and for those that were not, so no layer must be sent just to learn its value. λ is
    the price of a byte: it rises while Σ p b exceeds the budget, and falls otherwise.

    All numbers are fp64 and computed by + - x / and √ alone, in a fixed order. IEEE processors round these alike, so
    ranks with different processors choose alike. Hence x / (1 + |x|) instead of tanh, and a piecewise linear logarithm.

    Args:
        hidden: number of hidden units.
        rate: length of a training step along the gradient.
        repeats: training steps after each exchange.
        longest: most steps that a layer waits, as far as the budget allows, because its value is only an estimate.
        progress: steps after which training counts as half done.
    """

    learns: ClassVar[bool] = True

    def __init__(
        self,
        *,
        hidden: int = 16,
        rate: float = 0.1,
        repeats: int = 4,
        longest: int = 50,
        progress: int = 1000,
        seed: int = 0,
    ) -> None:
        self.hidden, self.rate, self.repeats, self.longest = hidden, rate, repeats, longest
        self.progress, self.seed = progress, seed

    def choose(self, layers: Layers, notes: Notes) -> tuple[Sequence[int], Notes]:
        net = {key: note.cpu().numpy() for key, note in notes.items()} or self._start()
        X = self._features(layers)
        if net["recent"].shape[1:] == X.shape:
            net |= self._learn(net, layers)
        p = probability(forward(net, X)[1])
        spent = float((p * layers.price).sum()) / layers.budget
        net["price"] = np.maximum(net["price"] * min(max(0.9 + 0.1 * spent, 0.8), 1.25), 1e-6)
        earlier = net["recent"][-1:] if net["recent"].shape[1:] == X.shape else X[None]
        net["recent"] = np.concatenate([earlier, X[None]])
        draws = np.random.default_rng((self.seed, layers.step)).random(len(p))
        # First layers that have waited too long or that bytes are saved up for, then those drawn, then the likeliest.
        urgent = (layers.waited >= self.longest) | (np.arange(len(p)) == int(net["saving"]))
        order = np.lexsort((-p, draws >= p, ~urgent))
        chosen = choose_fitting(order, layers, patience=layers.budget)
        large = (layers.price > layers.budget) & ((draws < p) | urgent)
        net["saving"] = np.array(next((layer for layer in order if large[layer] and layer not in chosen), -1))
        return chosen, {key: torch.from_numpy(np.array(value)) for key, value in net.items()}

    def _start(self) -> Weights:
        draw = np.random.default_rng(self.seed).random
        return {
            "W": draw((7, self.hidden)) - 0.5,
            "w": (draw((self.hidden, 1)) - 0.5) / self.hidden,
            "price": np.ones(()),
            "saving": np.array(-1),
            "recent": np.zeros((0, 0, 7)),
        }

    def _features(self, layers: Layers) -> np.ndarray:
        """Features (layers, 7): size, gradient, residual and waiting time, each standardised; depth, progress, 1."""
        squares = np.maximum(layers.gradient, 1e-60)
        compared = [log2(layers.entries), log2(squares), log2(1 + layers.unsent**2 / squares), log2(1 + layers.waited)]
        depth = np.arange(len(squares)) / len(squares) - 0.5
        done = np.full(len(squares), layers.step / (layers.step + self.progress))
        return np.stack([*map(standardise, compared), depth, done, np.ones(len(squares))], axis=1)

    def _learn(self, net: Weights, layers: Layers) -> Weights:
        """Make a few steps of gradient ascent on J for the choice before the last, whose v the last exchange gave."""
        v = layers.gain
        worth = v / max(float(np.abs(v).sum()), 1e-300) - net["price"] * layers.price / layers.price.sum()
        X, weights = net["recent"][0], {"W": net["W"], "w": net["w"]}
        for _ in range(self.repeats):
            H, z = forward(weights, X)
            dz = worth[:, None] / (1 + z**2) / np.sqrt(1 + z**2)
            dw = product(H.T, dz)
            dW = product(X.T, dz * weights["w"].T * (1 - np.abs(H)) ** 2)
            length = self.rate / max(float(np.sqrt((dw**2).sum() + (dW**2).sum())), 1e-300)
            weights = {"W": weights["W"] + length * dW, "w": weights["w"] + length * dw}
        return weights


def forward(net: Weights, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden units (layers, hidden) and the output (layers, 1)."""
    H = softsign(product(X, net["W"]))
    return H, product(H, net["w"])


def probability(z: np.ndarray) -> np.ndarray:
    """(layers,) in (0, 1), of slope (1 + z²)^-1.5 / 2."""
    return (0.5 + 0.5 * z / np.sqrt(1 + z**2))[:, 0]


def softsign(x: np.ndarray) -> np.ndarray:
    """x / (1 + |x|), whose slope is (1 - |y|)²."""
    return x / (1 + np.abs(x))


def product(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """A B without BLAS, whose order of summation differs between processors."""
    return (A[:, :, None] * B[None]).sum(1)


def standardise(x: np.ndarray) -> np.ndarray:
    """Shift and scale to mean 0 and variance 1; 0 where all are alike."""
    centred = x - x.mean()
    return centred / np.sqrt((centred**2).mean() + 1e-6)


def log2(x: np.ndarray) -> np.ndarray:
    """The logarithm, exact at powers of two and linear between them."""
    mantissa, exponent = np.frexp(x)
    return exponent + 2 * mantissa - 2
