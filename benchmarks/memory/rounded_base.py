"""What a base of 4 bits loses and costs, beside NF4 with double quantisation, which QLoRA has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import nn

from benchmarks.harness import Bar, Deadline, Measured, NotRun, paired
from shoestring.models import quantized
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.models.nf4 import NF4Linear

SHAPE = GPTConfig(vocab_size=256, dim=1024, layers=1, heads=8, kv_heads=2, hidden=3584, context=512)
"""That of Llama 3 8B, a quarter as wide."""
TOKENS = 512


def layers() -> Iterator[nn.Linear]:
    """The linear layers of a block of this shape, of normal numbers."""
    generator = torch.Generator().manual_seed(0)
    for module in GPT(SHAPE).blocks[0].modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02, generator=generator)
            yield module.requires_grad_(False)


def error(_: Deadline) -> Measured | NotRun:
    """The squared error of our 4 bits over that of NF4, and the bits of each."""
    if find_spec("bitsandbytes") is None:
        return NotRun("bitsandbytes is not installed")
    errors, nbytes, count = [0.0, 0.0], [0, 0], 0
    for layer in layers():
        count += layer.weight.numel()
        for side, rounded in enumerate((quantized.of(layer, 4), NF4Linear(layer))):
            errors[side] += float((rounded.dense() - layer.weight).square().sum())
            nbytes[side] += sum(each.nbytes for each in rounded.buffers())
    ours, theirs = (8 * each / count for each in nbytes)
    return Measured(errors[0] / errors[1], f"{ours:.2f} bits a weight beside {theirs:.2f}; normal weights")


def time(_: Deadline) -> Measured | NotRun:
    """Of the forward and backward pass through the layers."""
    if find_spec("bitsandbytes") is None:
        return NotRun("bitsandbytes is not installed")

    def passes(rounded: Callable[[nn.Linear], nn.Module]) -> Callable[[], object]:
        pairs = [(rounded(layer), torch.randn(TOKENS, layer.in_features, requires_grad=True)) for layer in layers()]
        return lambda: [layer(x).sum().backward() for layer, x in pairs]

    found = paired(passes(lambda layer: quantized.of(layer, 4)), passes(NF4Linear), rounds=15, warmup=2)
    return found.measured(f"{TOKENS} tokens in float32, {torch.get_num_threads()} threads; {found}")


def rows() -> list[Bar]:
    where = "the linear layers of a block"
    beside = "NF4 with double quantisation by bitsandbytes"
    return [
        Bar(
            "memory.base-error", f"squared error of a base of 4 bits over that of NF4, {where}", "<=", 1.0, error,
            baseline=beside, peers=("bitsandbytes",), kind="exact",
        ),
        Bar(
            "memory.base-time", f"time of a forward and backward pass with a base of 4 bits over NF4's, {where}",
            "<=", 1.05, time, baseline=beside, peers=("bitsandbytes",),
        ),
    ]  # fmt: skip
