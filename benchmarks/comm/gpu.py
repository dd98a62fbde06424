"""Bars that need a GPU: what codecs cost beside a backward pass, and NCCL as far as one GPU shows it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Bar, Deadline, Measured, shared
from benchmarks.timing import gpu_seconds

if TYPE_CHECKING:
    from torch import Tensor

ROUNDS = 5


BATCHES = 4  # of 4,096 tokens each, whose gradients are added up
CODECS: dict[str, dict[str, Any]] = {
    "PowerSGD": {"rank": 4},
    "Quantize 4": {"bits": 4, "rounding": "nearest", "feedback": True},
    "Quantize 8": {"bits": 8},
    "TernGrad": {},
    "Sign": {},
    "TopK": {},
    "DGC": {},
    "RandomK": {},
    "BF16": {},
    "Dense": {},
}
"""Those that are timed beside a backward pass; the first word is the name of the settings."""


def overhead(name: str, _: Deadline) -> Measured:
    """Encode and decode of all gradients of a model of 1.1 B parameters over its backward pass on 16,384 tokens."""
    import torch

    from shoestring import comm
    from shoestring.comm.auto.probes import time_codec
    from shoestring.comm.codecs.codec import ExchangeContext

    grads, backward, tokens = beside()
    make = getattr(comm, name.split()[0])(**CODECS[name]).make_codec
    found = time_codec(make, grads, ExchangeContext(0, 4, 0), ROUNDS)
    torch.cuda.empty_cache()
    seconds = sum(found.seconds)
    enough = tokens * seconds / backward / 0.1
    times, passes = f"{1e3 * seconds:.1f} ms beside {1e3 * backward:.1f} ms", f"{BATCHES} x {tokens // BATCHES:,}"
    note = f"{times} of backward passes over {passes} tokens in bf16; a tenth of one over {enough:,.0f}"
    return Measured(seconds / backward, note)


@shared
def beside() -> tuple[dict[str, Tensor], float, int]:
    """The gradients, the seconds that their backward passes take together, and the tokens of these."""
    import torch

    from shoestring.models.gpt import gpt1b

    with torch.device("cuda"):
        model = gpt1b().to(torch.bfloat16)
        tokens = torch.randint(1000, (2, 2048))
    backward = BATCHES * median(seconds_of_backward(model, tokens) for _ in range(ROUNDS))
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return grads, backward, BATCHES * tokens.numel()


def seconds_of_backward(model: object, tokens: object) -> float:
    import torch
    import torch.nn.functional as F

    assert isinstance(model, torch.nn.Module) and isinstance(tokens, torch.Tensor)
    model.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    torch.cuda.synchronize()
    began = time.perf_counter()
    loss.backward()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def fused(_: Deadline) -> Measured:
    """Bytes that selection with error feedback must move, over its time, as a share of what a copy reaches."""
    import torch

    from shoestring.comm.codecs.grad_table import GradTable

    device, n, k = torch.device("cuda"), 2**28, 2**18
    g, e, M = torch.randn(n, device=device), torch.randn(n, device=device), torch.empty(n, device=device)
    largest = (g + e).abs().topk(k + 1).values
    table, threshold, above = GradTable([g]), largest[-1:].clone(), int((largest > largest[-1]).sum())

    def select() -> None:
        bits, counts, _ = table.split(M, e, None, threshold, 1.0, 0.0)
        table.collect(M, bits, counts.cumsum(0), above)

    copying, launching = [], []
    for _round in range(2 * ROUNDS):
        copying.append(gpu_seconds(lambda: M.copy_(g)))
        launching.append(gpu_seconds(select))
    copied, seconds = median(copying[ROUNDS:]), median(launching[ROUNDS:])
    moved = 3 * g.nbytes + k * (8 + 4)
    note = f"{1e-9 * moved / seconds:.0f} GB/s, a copy {2e-9 * g.nbytes / copied:.0f}; {k:,} of {n:,} entries are sent"
    return Measured(moved / seconds / (2 * g.nbytes / copied), note)


def buckets(name: str, _: Deadline) -> Measured:
    """Bytes that encoding with error feedback and decoding must move, over their time, as a share of what a copy
    reaches: of gradients in bf16, for one of four ranks."""
    import torch

    from shoestring import comm
    from shoestring.comm.codecs.buckets import BucketLayout
    from shoestring.comm.codecs.kernel_buckets import KernelBuckets
    from shoestring.comm.codecs.quantize import ReduceScatterCodec
    from shoestring.comm.codecs.verdict import ExchangeVerdict

    device, n, ranks = torch.device("cuda"), 2**28, 4
    codec = getattr(comm, name.split()[0])(**CODECS[name]).make_codec()
    assert isinstance(codec, ReduceScatterCodec)
    grad, residual = torch.randn(n, device=device).bfloat16(), torch.zeros(n, device=device)
    layout, kept = BucketLayout([grad], ranks, codec.bucket), codec.feedback
    kernels = KernelBuckets(
        codec, layout, [grad], [residual] if kept else [], 1 if codec.stochastic else None, ExchangeVerdict()
    )
    width = codec.bucket * codec.bits // 8
    codes = torch.zeros(ranks, layout.buckets, width, dtype=torch.uint8, device=device)
    scales = torch.ones(ranks, layout.buckets, 1, device=device)

    def encode() -> None:
        kernels.encode(slice(0, ranks), codes.flatten(0, 1), scales.flatten(0, 1))

    encode()
    kernels.encode_average(0, codes, scales, codes[0].clone(), scales[0].clone())
    kernels.remember(codes, scales)
    fresh = grad.clone()
    encoded = codes.nbytes + 2 * grad.nbytes + kept * 2 * residual.nbytes * (1 + 1 / ranks)
    return share_of_copy(fresh, grad, encoded + codes.nbytes, [encode, lambda: kernels.decode(codes, scales)])


def ternary(_: Deadline) -> Measured:
    """The same of TernGrad: scales, encoding, and decoding for four ranks."""
    import torch

    from shoestring.comm.codecs.ternary import TernaryEntries

    grad, ranks = torch.randn(2**28, device="cuda").bfloat16(), 4
    fresh, entries = grad.clone(), TernaryEntries([grad])
    scales = entries.scales(2.5)
    codes = torch.stack([entries.encode(scales, rank) for rank in range(ranks)])
    work = [
        lambda: entries.scales(2.5),
        lambda: entries.encode(scales, 1),
        lambda: entries.decode(codes, scales),
    ]
    return share_of_copy(fresh, grad, 3 * grad.nbytes + codes.nbytes * (1 + 1 / ranks), work)


def share_of_copy(source: Tensor, target: Tensor, moved: float, work: Sequence[Callable[[], object]]) -> Measured:
    """Bytes moved by `work` a second, over those of a copy."""
    copying, working = [], []
    for _ in range(2 * ROUNDS):
        copying.append(gpu_seconds(lambda: target.copy_(source)))
        working.append(sum(gpu_seconds(each) for each in work))
    copied, seconds = median(copying[ROUNDS:]), median(working[ROUNDS:])
    note = f"{1e-9 * moved / seconds:.0f} GB/s, a copy {2e-9 * source.nbytes / copied:.0f}; {source.numel():,} entries"
    return Measured(moved / seconds / (2 * source.nbytes / copied), note)


def smoke(_: Deadline) -> Measured:
    """Whether an exchange over NCCL among one rank leaves gradients that are finite and near what they were."""
    import torch
    import torch.distributed as dist

    from shoestring import comm
    from shoestring.comm.exchange.wire import Wire

    with tempfile.TemporaryDirectory() as folder:
        device = torch.device("cuda", 0)
        dist.init_process_group("nccl", f"file://{folder}/store", rank=0, world_size=1, device_id=device)
        try:
            with Wire(dist.group.WORLD, device) as wire:
                grad = torch.randn(512, 512, device=device)
                whole = {"weight": grad.clone()}
                fine = bool(wire.run(comm.Dense().make_codec(), whole, 0)) and torch.allclose(whole["weight"], grad)
        finally:
            dist.destroy_process_group()
    return Measured(float(fine), "one rank: no more than a smoke test")


def rows() -> list[Bar]:
    """All bars that need a GPU."""
    bandwidth = "share of the memory bandwidth that a copy reaches"
    found = [
        Bar(
            "comm.gpu-codec" if name == "PowerSGD" else f"comm.gpu-codec-{name.lower().replace(' ', '')}",
            f"encode and decode by {name} over the backward pass of a model of 1.1 B parameters on 16,384 tokens",
            "<=",
            0.10,
            measure=partial(overhead, name),
            gpu=True,
        )
        for name in CODECS
    ]
    for name in ("Quantize 4", "Quantize 8", "Sign"):
        found.append(
            Bar(
                f"comm.gpu-{name.lower().replace(' ', '')}",
                f"encoding and decoding by {name}: {bandwidth}",
                ">=",
                0.6,
                measure=partial(buckets, name),
                gpu=True,
            )
        )
    said = f"encoding and decoding by TernGrad: {bandwidth}"
    fused_said = f"fused selection and error feedback: {bandwidth}"
    works = "an exchange over NCCL on one GPU works (1 is yes)"
    return [
        *found,
        Bar("comm.gpu-terngrad", said, ">=", 0.6, measure=ternary, gpu=True),
        Bar("comm.gpu-fused", fused_said, ">=", 0.6, measure=fused, gpu=True),
        Bar("comm.gpu-nccl", works, ">=", 1.0, measure=smoke, gpu=True, kind="exact"),
    ]
