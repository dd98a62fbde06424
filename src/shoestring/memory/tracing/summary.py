"""A recording of memory as text: the peak by kind, its largest tensors, and what torch cannot see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoestring.memory.tracing.recording import Held, MemoryFacts, MemoryProfile, MemoryWindow
from shoestring.report.figures import size


def summary(profile: MemoryProfile, most: int = 15) -> Iterator[str]:
    """The text, with at most so many tensors of each device."""
    if not profile.windows:
        yield "no allocation was recorded"
    for device in sorted(profile.windows, key=lambda name: name == "cpu"):
        window = profile.windows[device]
        yield f"{device}: {size(window.peak)} at the peak, in step {window.step + 1}"
        kinds = [[kind, size(nbytes), f"{nbytes / max(window.peak, 1):.1%}"] for kind, nbytes in by_size(window)]
        yield from _columns(kinds)
        yield "largest:"
        held = window.held()
        yield from _columns([row(each) for each in held[:most]])
        if len(held) > most:
            yield f"  and {len(held) - most} more, {size(sum(each.nbytes for each in held[most:]))}"
    yield from outside(profile)


def by_size(window: MemoryWindow) -> list[tuple[str, int]]:
    """Kinds at the peak, the largest first."""
    return sorted(window.by_kind().items(), key=lambda item: -item[1])


def row(held: Held) -> list[str]:
    """Size, kind, name and operator of what was held."""
    times = f" ({held.tensors} of {size(held.nbytes // held.tensors)})" if held.tensors > 1 else ""
    return [size(held.nbytes) + times, *held.name]


def outside(profile: MemoryProfile) -> Iterator[str]:
    """Sentences on memory that torch's allocators do not know."""
    facts = profile.facts
    if facts.resident and "cpu" in profile.windows:
        peak = profile.windows["cpu"].peak
        yield (
            f"The process had at most {size(facts.resident)} in memory: {size(max(facts.resident - peak, 0))} more than"
            " the CPU's allocator gave out (Python, libraries, and memory that was freed but kept)."
        )
    yield from _accelerators(facts, profile)
    for name, nbytes in facts.host.items():
        yield f"Host memory outside of the CPU's allocator: {size(nbytes)} for {name}."
    if facts.failed:
        yield f"Memory ran out: there was no room for {facts.failed}."


def _accelerators(facts: MemoryFacts, profile: MemoryProfile) -> Iterator[str]:
    for device, reserved in facts.reserved.items():
        unused = max(reserved - profile.windows[device].peak, 0)
        yield f"Of {device} torch held {size(reserved)}, of which {size(unused)} were not in use at the peak."
        if used := facts.used.get(device, 0):
            yield f"{device} reports {size(used)} in use: {size(max(used - reserved, 0))} are not torch's."


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(each) for each in column) for column in zip(*rows, strict=True)] if rows else []
    for cells in rows:
        first, *rest = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
        yield "  " + "  ".join([first.rstrip().rjust(widths[0]), *rest]).rstrip()
