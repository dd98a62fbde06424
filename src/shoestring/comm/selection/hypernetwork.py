"""A selector: a small network that learns, while the model trains, which layers are worth their bytes.

The idea is from "Layer-Wised Sparsification Based on Hypernetwork" (Wu, Ye, ICANN 2024): layers that contribute more to
learning are sent first. Nothing more of the paper is public, so the objective and the training are our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from shoestring.comm.selection.budget import Layers, Notes, Selector, choose_fitting

Weights = dict[str, np.ndarray]


class Hypernetwork(Selector):
    """A network with one hidden layer that maps a layer's features to the probability p of sending the layer.

    The network is trained by gradient ascent on J = Σ p (v - λ b), summed over layers. Here b is the layer's share of
    all bytes, and v the layer's share of the loss reduction by sending. To first order, the loss reduction is ⟨g, M⟩
    with the gradient g of the next step, whose noise is independent of M. The value v is known for sent and for unsent
    layers, so no layer has to be sent just to learn its value. The price λ of bytes rises while Σ p b exceeds the
    budget, and falls otherwise.

    All numbers are fp64 and computed only by + - x / and √, in a fixed order. IEEE processors round these operations
    identically, so ranks with different processors make the same choice. To use only these operations, the code
    replaces tanh by x / (1 + |x|), and the logarithm by a piecewise linear function.

    Args:
        hidden: number of hidden units.
        rate: length of a training step along the gradient.
        repeats: number of training steps after each exchange.
        longest: number of steps after which an unsent layer gets priority, because its estimated value may be wrong.
        progress: number of steps after which training counts as half done.
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
        # Features (layers, 7): size, gradient, residual and waiting time, each standardised over layers; then depth,
        # progress, and a constant 1.
        squares = np.maximum(layers.gradient, 1e-60)
        compared = [log2(layers.entries), log2(squares), log2(1 + layers.unsent**2 / squares), log2(1 + layers.waited)]
        depth = np.arange(len(squares)) / len(squares) - 0.5
        done = np.full(len(squares), layers.step / (layers.step + self.progress))
        X = np.stack([*map(standardise, compared), depth, done, np.ones(len(squares))], axis=1)
        if net["recent"].shape[1:] == X.shape:
            net |= self._learn(net, layers)
        p = probability(forward(net, X)[1])
        spent = float((p * layers.price).sum()) / layers.budget
        # The price changes slowly and within bounds, so that a single step has little influence.
        net["price"] = np.maximum(net["price"] * min(max(0.9 + 0.1 * spent, 0.8), 1.25), 1e-6)
        earlier = net["recent"][-1:] if net["recent"].shape[1:] == X.shape else X[None]
        net["recent"] = np.concatenate([earlier, X[None]])
        draws = np.random.default_rng((self.seed, layers.step)).random(len(p))
        # Order: layers that have waited too long or for which bytes are being saved; then layers drawn at random with
        # probability p; then the other layers in order of falling p.
        urgent = (layers.waited >= self.longest) | (np.arange(len(p)) == int(net["saving"]))
        order = np.lexsort((-p, draws >= p, ~urgent))
        chosen = choose_fitting(order, layers, patience=layers.budget)
        large = (layers.price > layers.budget) & ((draws < p) | urgent)
        net["saving"] = np.array(next((layer for layer in order if large[layer] and layer not in chosen), -1))
        return chosen, {key: torch.from_numpy(np.array(value)) for key, value in net.items()}

    def _start(self) -> Weights:
        """Initial notes: random weights, the same on all ranks, and an empty history."""
        draw = np.random.default_rng(self.seed).random
        return {
            "W": draw((7, self.hidden)) - 0.5,
            "w": (draw((self.hidden, 1)) - 0.5) / self.hidden,
            "price": np.ones(()),
            "saving": np.array(-1),
            "recent": np.zeros((0, 0, 7)),
        }

    def _learn(self, net: Weights, layers: Layers) -> Weights:
        """Take a few steps of gradient ascent on J for the second-newest choice, whose values v the newest exchange has
        measured."""
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
    """Run the network: returns hidden units (layers, hidden) and outputs (layers, 1)."""
    H = softsign(product(X, net["W"]))
    return H, product(H, net["w"])


def probability(z: np.ndarray) -> np.ndarray:
    """Map outputs z (layers, 1) to probabilities (layers,); the slope is (1 + z²)^-1.5 / 2."""
    return (0.5 + 0.5 * z / np.sqrt(1 + z**2))[:, 0]


def softsign(x: np.ndarray) -> np.ndarray:
    """y = x / (1 + |x|), with slope (1 - |y|)²."""
    return x / (1 + np.abs(x))


def product(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """The matrix product A B without BLAS, because BLAS adds in a different order on different processors."""
    return (A[:, :, None] * B[None]).sum(1)


def standardise(x: np.ndarray) -> np.ndarray:
    """Shift and scale to mean 0 and variance 1; all zeros if all values are equal."""
    centred = x - x.mean()
    return centred / np.sqrt((centred**2).mean() + 1e-6)


def log2(x: np.ndarray) -> np.ndarray:
    """An approximate base-2 logarithm: exact at powers of two, and linear between them."""
    mantissa, exponent = np.frexp(x)
    return exponent + 2 * mantissa - 2
