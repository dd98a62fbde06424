"""One rank under torchrun: what ZeRO computes beside DDP, what it holds at its peak, and what it resumes.

    python -m benchmarks.memory.zero_checks OUT CHECK

Rank 0 writes JSON to OUT. CHECK is `equal`, `state`, `save` or `resume` (of what `save` left beside OUT).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory.zero_worker import SHAPE, build_model
from shoestring.checkpoint import Plain
from shoestring.core.compose import compose
from shoestring.core.feature import Feature
from shoestring.core.job import Job
from shoestring.core.kept import Progress
from shoestring.memory import Zero
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.optim import AdamW, Clip
from shoestring.parallel import DDP

STEPS = 50
DEEP = GPTConfig(vocab_size=512, dim=384, layers=32, heads=6, kv_heads=6, hidden=1024, context=8)


def batches(step: int, micro: int) -> list[dict[str, Tensor]]:
    """This rank's micro-batches of a step."""
    found = []
    for index in range(micro):
        seed = (step * micro + index) * dist.get_world_size() + dist.get_rank()
        tokens = torch.randint(SHAPE.vocab_size, (2, 17), generator=torch.Generator().manual_seed(seed))
        found.append({"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()})
    return found


def curve(features: list[Feature], steps: int, micro: int) -> tuple[list[float], Tensor]:
    """Losses, and all weights at the end; the embedding is tied to the output layer, and a block's norms are frozen."""
    model = build_model(torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (name.startswith("blocks.0.") and parameter.ndim == 1))
    with compose(Job(model, progress=Progress(total=steps)), [AdamW(lr=1e-3), *features]) as job:
        losses = [float(job.step(*batches(step, micro))) for step in range(steps)]
        model.state_dict()  # waits for what is being gathered
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def check_equal(out: Path) -> dict[str, Any]:
    """Largest differences from DDP."""
    found: dict[str, Any] = {}
    cases: dict[str, tuple[list[Feature], list[Feature], int]] = {
        "stage 2": ([Zero()], [DDP()], 1),
        "stage 1, accumulated": ([Zero(stage=1)], [DDP()], 2),
        "stage 2, accumulated": ([Zero()], [DDP()], 2),
        "stage 2, clipped": ([Zero(), Clip(max_norm=0.5)], [DDP(), Clip(max_norm=0.5)], 1),
    }
    for name, (ours, theirs, micro) in cases.items():
        (one, weights), (other, expected) = curve(ours, STEPS, micro), curve(theirs, STEPS, micro)
        loss = max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))
        found[name] = {"loss": loss, "weights": float((weights - expected).abs().max())}
    return found


def check_state(out: Path) -> dict[str, Any]:
    """The most bytes that torch allocates in three steps, of parameters in bf16 with hardly any activations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.manual_seed(0)
        model = GPT(DEEP).bfloat16()
        tokens = torch.randint(DEEP.vocab_size, (1, 5))
        batch = {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        with compose(Job(model), [AdamW(), Zero(in_flight_mb=2.0)]) as job:
            for _ in range(3):
                job.step(batch)
    most = _most_allocated(profiler)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"most": most, "parameters": parameters, "ranks": dist.get_world_size()}


def _most_allocated(profiler: Any) -> int:
    """The highest sum of the allocations that torch made and had not freed."""
    pending, most = list(profiler.profiler.kineto_results.experimental_event_tree()), 0
    while pending:
        event = pending.pop()
        pending += event.children
        total = getattr(event.extra_fields, "total_allocated", None)
        most = max(most, total or 0)
    return most


def check_saved(out: Path, *, resume: bool) -> dict[str, Any]:
    """A digest of each tensor of the whole state, after three steps or right after they were restored."""
    plain = Plain(folder=str(out.parent / "checkpoints"), every=3)
    model = build_model(torch.bfloat16)
    with compose(Job(model, progress=Progress(total=3)), [AdamW(), plain, Zero()]) as job:
        if resume:
            assert job.restore is not None and job.restore("auto") == 3
        while job.progress.step < 3:
            job.step(*batches(job.progress.step, 1))
        state = {name: job.kept[name].state.state_dict() for name in ("model", "optimizer")}
        return {name: _digest(tensor) for name, tensor in _tensors(state)}


def _digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(whole.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _tensors(tree: Any, name: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        return [(name, tree)]
    items = tree.items() if isinstance(tree, Mapping) else ()
    return [pair for key, value in items for pair in _tensors(value, f"{name}/{key}")]


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("out", type=Path)
    flags.add_argument("check", choices=("equal", "state", "save", "resume"))
    known = flags.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if known.check in ("save", "resume"):
        found = check_saved(known.out, resume=known.check == "resume")
    else:
        found = {"equal": check_equal, "state": check_state}[known.check](known.out)
    if dist.get_rank() == 0:
        known.out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
