"""Out of memory: what was held, what of it was largest, and the setting that lowers it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.core.job import Job
from shoestring.memory.tracing.labels import Label, labels, optimizer_state
from shoestring.report.figures import size

REST = "activations and all else"

_TO_THE_HOST = ("memory.offload", "memory.offloadactivations")
"""What gains nothing where host memory is all there is."""

# What lowers each kind, the cheapest first: the feature, where it needs several ranks, and how to write it.
_KNOBS = {
    REST: (
        ("", False, "raise `run.accumulate`, or lower `run.batch` or `data.sequence`"),
        ("memory.recompute", False, "add [memory.recompute]"),
        ("memory.offloadactivations", False, "add [memory.offloadactivations]"),
    ),
    "optimizer state": (
        ("memory.zero", True, "add [memory.zero], which divides it among the ranks"),
        ("memory.offload", False, "add [memory.offload]"),
        ("memory.lora", False, "fine-tune with [memory.lora]"),
    ),
    "gradient": (
        ("memory.zero", True, "add [memory.zero], which divides them among the ranks"),
        ("memory.lora", False, "fine-tune with [memory.lora]"),
    ),
    "parameter": (
        ("parallel.fsdp", True, "add [parallel.fsdp] in place of the present way to share the model among ranks"),
        ("memory.lora", False, "fine-tune with [memory.lora] and `base_bits = 4`"),
        ("precision.autocast", False, "train in 16 bits"),
    ),
}


class Exhaustion(NamedTuple):
    """What is said when memory has run out."""

    held: str
    """What was asked for and what was held, in words."""
    hint: str


def explain(job: Job, error: BaseException) -> Exhaustion:
    """What a job held when `error` said that there is no more memory, and what to change."""
    found = labels(_named(job))
    sums = Counter[str]()
    for label in found:
        sums[label.kind] += label.nbytes
    sums[REST] = max(_taken(job) - sum(sums.values()), 0)
    kind = max(sums, key=lambda each: sums[each])
    parts = ", ".join(f"{each} {size(nbytes)}" for each, nbytes in sums.most_common() if nbytes)
    said = f"{parts}{_largest(found)}"
    asked = re.search(r"ried to allocate ([\d.]+) (\w+)", str(error))
    if asked:
        amount = size(int(asked[1])) if asked[2] == "bytes" and asked[1].isdecimal() else f"{asked[1]} {asked[2]}"
        said = f"asked for {amount} while it held {said}"
    hint = f"most is {kind}: {_knobs(job, kind)}"
    if any(feature.name == "memory.tracing" for feature in job.features):
        hint += "; memory.html in the run's folder names every tensor"
    else:
        hint += "; [memory.tracing] names every tensor"
    return Exhaustion(said, hint)


def advice(job: Job, held: Mapping[str, int]) -> str:
    """What to change where a job needs too much, from the bytes that it holds by kind."""
    sums = {kind: held.get(kind, 0) for kind in _KNOBS if kind != REST}
    sums[REST] = sum(held.values()) - sum(sums.values())
    kind = max(sums, key=lambda each: sums[each])
    return f"most is {kind}: {_knobs(job, kind)}"


def _knobs(job: Job, kind: str) -> str:
    """What lowers a kind and is not on already."""
    from shoestring import memory

    on = {feature.name for feature in job.features}
    known = {f"memory.{name.lower()}" for name in memory.__all__}
    if job.world.device.type == "cpu":
        on.update(_TO_THE_HOST)
    knobs = [
        text
        for name, several, text in _KNOBS[kind]
        if name not in on and (not several or job.world.size > 1) and (not name.startswith("memory.") or name in known)
    ]
    return ", or ".join(knobs) or "use a smaller model"


def _named(job: Job) -> Iterator[tuple[str, str, Tensor]]:
    names = {}
    for name, tensor in job.named().items():
        names[id(tensor)] = name
        yield "parameter", name, tensor
        if tensor.grad is not None:
            yield "gradient", name, tensor.grad
    for name, parameter in job.module.named_parameters():  # where the optimizer steps others in their place
        yield "parameter", name, parameter
        if parameter.grad is not None:
            yield "gradient", name, parameter.grad
    if hasattr(job, "built_optimizer"):
        yield from optimizer_state([job.built_optimizer], names)


def _largest(found: list[Label]) -> str:
    if not found:
        return ""
    largest = max(found, key=lambda label: label.nbytes)
    return f"; its largest tensor with a name is the {largest.kind} {largest.name}, {size(largest.nbytes)}"


def _taken(job: Job) -> int:
    """Bytes in use: by torch on an accelerator, by the process on a CPU."""
    if job.world.device.type != "cpu":
        return torch.cuda.memory_allocated(job.world.device)
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    return 0
