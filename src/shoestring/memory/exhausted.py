"""Explains an out-of-memory error: what used the memory, which tensor was largest, and which setting reduces memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring import figures
from shoestring.core.attachments import Attachments
from shoestring.memory.tracing.labels import labels, optimizer_state

REST = "activations and all else"
"""Label of the bytes in use that belong to no named tensor."""

_TO_THE_HOST = ("memory.offload", "memory.offloadactivations")
"""Features that move tensors to host memory; useless if the device is the CPU."""

# Ways to reduce each kind of memory, the cheapest first: (feature, whether the feature needs several ranks, advice).
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
    """The explanation of an out-of-memory error."""

    held: str
    """Description of the memory that the job used and tried to allocate."""
    hint: str
    """Advice on what to change, for the error's hint."""


def explain(attachments: Attachments, error: BaseException) -> Exhaustion:
    """Explain an out-of-memory error that a job raised."""
    named = labels(_named(attachments))
    sums = Counter[str]()
    for label in named:
        sums[label.kind] += label.nbytes
    sums[REST] = max(_taken(attachments) - sum(sums.values()), 0)
    kind = max(sums, key=lambda name: sums[name])
    parts = ", ".join(f"{name} {figures.memory(nbytes)}" for name, nbytes in sums.most_common() if nbytes)
    held = parts
    if named:
        largest = max(named, key=lambda label: label.nbytes)
        size = figures.memory(largest.nbytes)
        held += f"; its largest tensor with a name is the {largest.kind} {largest.name}, {size}"
    # the message contains "Tried" on a GPU, "you tried" on a CPU; on a CPU, the amount is in bytes
    asked = re.search(r"ried to allocate ([\d.]+) (\w+)", str(error))
    if asked:
        amount = (
            figures.memory(int(asked[1])) if asked[2] == "bytes" and asked[1].isdecimal() else f"{asked[1]} {asked[2]}"
        )
        held = f"asked for {amount} while it held {held}"
    hint = f"most is {kind}: {_knobs(attachments, kind)}"
    if any(feature.name == "memory.tracing" for feature in attachments.features):
        hint += "; memory.html in the run's folder names every tensor"
    else:
        hint += "; [memory.tracing] names every tensor"
    return Exhaustion(held, hint)


def advice(attachments: Attachments, held: Mapping[str, int]) -> str:
    """Advice for a job that needs too much memory; `held` maps kinds to the job's bytes."""
    sums = {kind: held.get(kind, 0) for kind in _KNOBS if kind != REST}
    sums[REST] = sum(held.values()) - sum(sums.values())
    kind = max(sums, key=lambda name: sums[name])
    return f"most is {kind}: {_knobs(attachments, kind)}"


def _knobs(attachments: Attachments, kind: str) -> str:
    """Advice on how to reduce the memory of one kind, leaving out features that the job already uses."""
    from shoestring import memory

    on = {feature.name for feature in attachments.features}
    known = {f"memory.{name.lower()}" for name in memory.__all__}
    if attachments.world.device.type == "cpu":
        on.update(_TO_THE_HOST)
    knobs = [
        text
        for name, several, text in _KNOBS[kind]
        if name not in on
        and (not several or attachments.world.size > 1)
        and (not name.startswith("memory.") or name in known)
    ]
    return ", or ".join(knobs) or "use a smaller model"


def _named(attachments: Attachments) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (kind, name, tensor) of the parameters, gradients and optimizer state of a job."""
    names = {}
    for name, tensor in attachments.named().items():
        names[id(tensor)] = name
        yield "parameter", name, tensor
        if tensor.grad is not None:
            yield "gradient", name, tensor.grad
    for name, parameter in attachments.module.named_parameters():  # the optimizer may update other tensors instead
        yield "parameter", name, parameter
        if parameter.grad is not None:
            yield "gradient", name, parameter.grad
    if hasattr(attachments, "optimizer"):
        yield from optimizer_state([attachments.optimizer], names)


def _taken(attachments: Attachments) -> int:
    """Bytes in use: on an accelerator, the bytes that torch has allocated; on a CPU, the process's resident bytes."""
    if attachments.world.device.type != "cpu":
        return torch.cuda.memory_allocated(attachments.world.device)
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    return 0
