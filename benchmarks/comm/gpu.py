"""Bars that need a GPU: what codecs cost beside a backward pass, and NCCL as far as one GPU shows it."""

from __future__ import annotations

import tempfile
import time
from statistics import median

from benchmarks.harness import Bar, Deadline, Measured
from benchmarks.timing import gpu_seconds

ROUNDS = 5


def overhead(_: Deadline) -> Measured:
    """Encode and decode of all gradients of a model of 1.1 B parameters over its backward pass, PowerSGD of rank 4."""
    import torch

    from shoestring import comm
    from shoestring.comm.auto.probes import time_codec
    from shoestring.comm.codecs.codec import ExchangeContext
    from shoestring.models.gpt import gpt1b

    device = torch.device("cuda")
    with device:
        model = gpt1b().to(torch.bfloat16)
        tokens = torch.randint(1000, (2, 2048))
    backward = median(seconds_of_backward(model, tokens) for _ in range(ROUNDS))
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    found = time_codec(comm.PowerSGD(rank=4).make_codec, grads, ExchangeContext(0, 4, 0), ROUNDS)
    seconds = sum(found.seconds)
    enough = tokens.numel() * seconds / backward / 0.1
    note = (
        f"{1e3 * seconds:.1f} ms beside {1e3 * backward:.1f} ms of a backward pass over {tokens.numel():,} tokens in "
        f"bf16; a tenth of one over {enough:,.0f}"
    )
    return Measured(seconds / backward, note)


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

    from shoestring.comm.codecs.fused import WeightedSum, launch_split

    device, n, k = torch.device("cuda"), 2**28, 2**18
    fresh, e, g = torch.randn(n, device=device), torch.randn(n, device=device), torch.empty(n, device=device)
    threshold = (fresh + e).abs().topk(k).values[-1]
    copying, launching = [], []
    for _round in range(2 * ROUNDS):
        copying.append(gpu_seconds(lambda: g.copy_(fresh)))
        launching.append(gpu_seconds(lambda: launch_split(WeightedSum(g, e), threshold, 2 * k)))
    copied, seconds = median(copying[ROUNDS:]), median(launching[ROUNDS:])
    moved = 3 * g.nbytes + k * (8 + 4)
    note = f"{1e-9 * moved / seconds:.0f} GB/s, a copy {2e-9 * g.nbytes / copied:.0f}; {k:,} of {n:,} entries are sent"
    return Measured(moved / seconds / (2 * g.nbytes / copied), note)


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
                fine = wire.run(comm.Dense().make_codec(), whole, 0) and torch.allclose(whole["weight"], grad)
        finally:
            dist.destroy_process_group()
    return Measured(float(fine), "one rank: no more than a smoke test")


def rows() -> list[Bar]:
    """All bars that need a GPU."""
    share = "encode and decode of PowerSGD over the backward pass of a model of 1.1 B parameters"
    return [
        Bar("comm.gpu-codec", share, "<=", 0.10, measure=overhead, gpu=True),
        Bar(
            "comm.gpu-fused",
            "fused selection and error feedback: share of the memory bandwidth that a copy reaches",
            ">=",
            0.6,
            measure=fused,
            gpu=True,
        ),
        Bar("comm.gpu-nccl", "an exchange over NCCL on one GPU works (1 is yes)", ">=", 1.0, measure=smoke, gpu=True),
    ]
