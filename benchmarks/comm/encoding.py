"""What the arithmetic of an exchange costs a rank, over a copy of its gradients: 8 bytes of memory traffic an entry."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import Bar, Deadline, Measured, paired
from shoestring.comm.codecs.codec import ExchangeContext, Grads, advance
from shoestring.comm.codecs.quantize import QuantizeCodec, ReduceScatterCodec
from shoestring.comm.codecs.sign import SignCodec
from shoestring.models.gpt import small

RANKS = 4


def exchange(codec: ReduceScatterCodec, grads: Grads) -> Callable[[], None]:
    """One rank's part of an exchange, answered as if the other ranks had the same gradients."""
    steps = 0

    def run() -> None:
        nonlocal steps
        steps += 1
        coding = codec.code(grads, ExchangeContext(0, RANKS, steps))
        sent = advance(coding)
        assert sent is not None
        shards = advance(coding, [request.tensor for request in sent])
        assert shards is not None
        advance(coding, [request.tensor.expand(RANKS, *request.tensor.shape) for request in shards])

    return run


def cost(_: Deadline) -> Measured:
    """Of 4 bits to nearest, with error feedback, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        grads = {name: torch.randn_like(each) for name, each in small().named_parameters()}
        copies: list[Tensor] = [torch.empty_like(grad) for grad in grads.values()]

        def copy() -> None:
            for target, source in zip(copies, grads.values(), strict=True):
                target.copy_(source)

        bits, torchs_bits = (QuantizeCodec(4, rounding="nearest", feedback=True) for _ in range(2))
        signs, torchs_signs = SignCodec(), SignCodec()
        torchs_bits.compiled = torchs_signs.compiled = False
        found = paired(exchange(bits, grads), copy, rounds=15, warmup=2)
        beside = [
            paired(exchange(codec, grads), copy, rounds=7, warmup=1).median
            for codec in (torchs_bits, signs, torchs_signs)
        ]
    finally:
        torch.set_num_threads(threads)
    entries = sum(grad.numel() for grad in grads.values())
    return Measured(
        found.median,
        f"{entries / 1e6:.1f} M entries between {RANKS} ranks, one thread; {found}; by torch's operations"
        f" {beside[0]:.1f}; signs {beside[1]:.1f}, by torch's operations {beside[2]:.1f}",
    )


def rows() -> list[Bar]:
    said = "time of a rank's encoding and decoding in an exchange in 4 bits with error feedback, over a copy"
    return [Bar("comm.encoding", said, "<=", 6.0, measure=cost, baseline="a copy of the gradients")]
