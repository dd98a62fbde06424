"""Chains of small operators that one fused operator can replace."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.profile.planted.program import Planted, seeded, weights


class NewGELU(nn.Module):
    """The tanh approximation, written out as in many language models."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))  # fault: gelu-by-hand


class Mixer(nn.Module):
    """Two residual blocks of an MLP-Mixer."""

    def __init__(self, activation: type[nn.Module], **arguments: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(64) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(64, 256) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(256, 64) for _ in range(2)])
        self.activation = activation(**arguments)

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            hidden = self.activation(up(norm(x)))
            x = x + down(hidden)
        return x.mean(1)


def mixer(steps: int, model: Mixer) -> list[Tensor]:
    random = seeded(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, y = torch.randn(32, 32, 64, generator=random), torch.randn(32, 64, generator=random)
    for _ in range(steps):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def layer_norm_by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)  # fault: layer-norm-by-hand
    variance = (x - mean).pow(2).mean(-1, keepdim=True)  # fault: layer-norm-by-hand
    normed = (x - mean) / torch.sqrt(variance + 1e-5)  # fault: layer-norm-by-hand
    return normed * weight + bias  # fault: layer-norm-by-hand


def fused_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def recurrent(steps: int, by_hand: bool) -> list[Tensor]:
    """A recurrent network with a normalized state, on sequences of 24 items."""
    random = seeded()
    norm = layer_norm_by_hand if by_hand else fused_layer_norm
    inward, onward = torch.nn.Linear(16, 128), torch.nn.Linear(128, 128)
    weight, bias = torch.ones(128, requires_grad=True), torch.zeros(128, requires_grad=True)
    parameters = [*inward.parameters(), *onward.parameters(), weight, bias]
    optimizer = torch.optim.SGD(parameters, lr=0.05, fused=True)
    sequences, targets = torch.randn(24, 32, 16, generator=random), torch.randn(32, 128, generator=random)
    for _ in range(steps):
        state = torch.zeros(32, 128)
        for item in sequences.unbind(0):
            moved = inward(item) + onward(state)
            state = norm(torch.tanh(moved), weight, bias)
        loss = F.mse_loss(state, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores = scores / math.sqrt(q.shape[-1])  # fault: softmax-by-hand
    scores = scores - scores.amax(-1, keepdim=True)  # fault: softmax-by-hand
    scores = torch.exp(scores)  # fault: softmax-by-hand
    scores = scores / scores.sum(-1, keepdim=True)  # fault: softmax-by-hand
    return scores @ v


def set_pooling(steps: int, by_hand: bool) -> list[Tensor]:
    """A set transformer's pooling: learned queries over the members of each set."""
    random = seeded()
    attend = attention_by_hand if by_hand else F.scaled_dot_product_attention
    embed, keys, read = nn.Linear(8, 64), nn.Linear(64, 128), nn.Linear(64, 1)
    queries = nn.Parameter(torch.randn(4, 64, 16, generator=random))
    parameters = [*embed.parameters(), *keys.parameters(), *read.parameters(), queries]
    optimizer = torch.optim.SGD(parameters, lr=0.01, fused=True)
    sets = torch.randn(16, 96, 8, generator=random)
    target = sets.square().sum((1, 2)) / 100
    for _ in range(steps):
        k, v = keys(F.relu(embed(sets))).view(16, 96, 2, 4, 16).permute(2, 0, 3, 1, 4)
        pooled = attend(queries.expand(16, -1, -1, -1), k, v)
        predicted = read(pooled.transpose(1, 2).reshape(16, 64, 64)).mean((1, 2))
        loss = F.mse_loss(predicted, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in parameters]


def focal_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    probability = torch.sigmoid(logits)  # fault: cross-entropy-by-hand
    positive = labels * torch.log(probability + 1e-9)  # fault: cross-entropy-by-hand
    negative = (1 - labels) * torch.log(1 - probability + 1e-9)  # fault: cross-entropy-by-hand
    return -(positive + negative).mean()  # fault: cross-entropy-by-hand


def tagging(steps: int, by_hand: bool) -> list[Tensor]:
    """Multi-label classification with very many labels."""
    random = seeded()
    loss_of = focal_by_hand if by_hand else F.binary_cross_entropy_with_logits
    body, head = nn.Linear(32, 32), nn.Linear(32, 4000)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1, momentum=0.9, fused=True)
    x, labels = torch.randn(64, 32, generator=random), (torch.rand(64, 4000, generator=random) < 0.01).float()
    for _ in range(steps):
        logits = head(F.relu(body(x)))
        loss = loss_of(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*weights(body), *weights(head)]


PROGRAMS = [
    Planted(
        "gelu-by-hand",
        "fusible",
        lambda n: mixer(n, Mixer(NewGELU)),
        lambda n: mixer(n, Mixer(nn.GELU, approximate="tanh")),
        40,
        __name__,
    ),
    Planted("layer-norm-by-hand", "fusible", lambda n: recurrent(n, True), lambda n: recurrent(n, False), 60, __name__),
    Planted(
        "softmax-by-hand", "fusible", lambda n: set_pooling(n, True), lambda n: set_pooling(n, False), 80, __name__
    ),
    Planted("cross-entropy-by-hand", "fusible", lambda n: tagging(n, True), lambda n: tagging(n, False), 100, __name__),
]
