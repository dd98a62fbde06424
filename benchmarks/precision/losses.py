"""Losses after 200 steps whose operators compute in 16 bits, beside those of 32 bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from benchmarks.graph.models import Case, Shape, WithLoss, gpt, llama, resnet_case, text_case, vit_case
from benchmarks.harness import Bar, Deadline
from benchmarks.precision.steps import RoundedProducts, gradients
from benchmarks.rows import Measured
from shoestring.graph.trace import trace
from shoestring.precision.graph_pass import Rules, narrow

STEPS, SEEDS, LAST = 200, 3, 20
"""Steps of a training, trainings, and steps at the end whose losses are averaged."""
LR = 3e-3
_TEXT = Shape(2, dim=64, hidden=128, vocabulary=64, tokens=32, batch=16)
TRAINED: dict[str, Case] = {
    "gpt": text_case(gpt, _TEXT),
    "llama": text_case(llama, _TEXT),
    "vit": vit_case(Shape(2, dim=64, hidden=128, vocabulary=10, batch=16), 32),
    "resnet50": resnet_case(8, 32, 10, batch=16),
}
"""Models of at most a million weights."""


def batches_of(case: Case, seed: int) -> list[list[Tensor]]:
    """Batches that can be learnt: a token follows from the one before it, and pictures have the mean of their class."""
    torch.manual_seed(seed)
    drawn = list[list[Tensor]]()
    first, labels = case.batch()
    if first.is_floating_point():
        means = torch.randn(int(labels.max()) + 20, *first.shape[1:])
        for _ in range(STEPS):
            _, labels = case.batch()
            drawn.append([means[labels] + torch.randn(first.shape), labels])
        return drawn
    follows = torch.randint(64, (64, 4))
    for _ in range(STEPS):
        tokens = [torch.randint(64, (first.shape[0],))]
        for _ in range(first.shape[1]):
            tokens.append(follows[tokens[-1], torch.randint(4, (first.shape[0],))])
        line = torch.stack(tokens, dim=1)
        # transformers' models read a number out of a view while they are traced.
        drawn.append([line[:, :-1].contiguous(), line[:, 1:].contiguous()])
    return drawn


@cache
def final_loss(name: str, seed: int, *, narrowed: bool, forward: bool = False) -> float:
    """The mean loss of the last steps of a training."""
    case, batches = TRAINED[name], batches_of(TRAINED[name], seed)
    torch.manual_seed(seed)
    model: nn.Module = WithLoss(case.prepare()()).train()
    step = trace(model, *batches[0])
    if narrowed:
        narrow(step.module, Rules(forward=forward))
    optimizer, losses = torch.optim.AdamW(model.parameters(), LR), list[float]()
    for batch in batches:
        outputs = gradients(step, model, batch, RoundedProducts)
        for parameter_name, parameter in model.named_parameters():
            parameter.grad = outputs.gradients.get(parameter_name)
        optimizer.step()
        losses.append(outputs.loss)
    return sum(losses[-LAST:]) / LAST


def difference(name: str, *, forward: bool) -> Measured:
    """How far the mean loss of narrowed trainings is from that of 32 bits, over the spread of the latter."""
    wide = [final_loss(name, seed, narrowed=False) for seed in range(SEEDS)]
    narrow_ones = [final_loss(name, seed, narrowed=True, forward=forward) for seed in range(SEEDS)]
    apart = abs(sum(narrow_ones) - sum(wide)) / SEEDS
    return Measured(apart / (max(wide) - min(wide)), f"32 bits {_told(wide)}; narrowed {_told(narrow_ones)}")


def _told(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)


def rows() -> list[Bar]:
    """The bars of trainings."""

    def bar(name: str, forward: bool) -> Bar:
        def measure(deadline: Deadline) -> Measured:
            deadline.check()
            return difference(name, forward=forward)

        what = f"{name}: mean loss after {STEPS} steps against 32 bits, over the spread of {SEEDS} seeds"
        ending = "-forward" if forward else ""
        how = ", with forward propagation" if forward else ""
        return Bar(f"precision.loss-{name}{ending}", what + how, "<=", 1.0, measure, kind="exact")

    return [bar(name, forward) for name in TRAINED for forward in (False, True)]
