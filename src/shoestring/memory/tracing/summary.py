"""Formats a memory recording as text: the peak by kind, the largest tensors, and memory outside torch's allocators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoestring.figures import memory, percent
from shoestring.memory.tracing.recording import Held, MemoryProfile, MemoryWindow


def summary(profile: MemoryProfile, most: int = 15) -> Iterator[str]:
    """Format a summary: yield lines of text, with at most `most` tensors per device."""
    if not profile.windows:
        yield "no allocation was recorded"
    for device in sorted(profile.windows, key=lambda name: name == "cpu"):
        window = profile.windows[device]
        yield f"{device}: {memory(window.peak)} at the peak, in step {window.step + 1}"
        kinds = [[kind, memory(nbytes), percent(nbytes / max(window.peak, 1))] for kind, nbytes in by_size(window)]
        yield from _columns(kinds)
        yield "largest:"
        held = window.held()
        yield from _columns([row(group) for group in held[:most]])
        if len(held) > most:
            yield f"  and {len(held) - most} more, {memory(sum(group.nbytes for group in held[most:]))}"
    yield from outside(profile)


def by_size(window: MemoryWindow) -> list[tuple[str, int]]:
    """List (kind, bytes at the peak), the largest kind first."""
    return sorted(window.by_kind().items(), key=lambda item: -item[1])


def row(held: Held) -> list[str]:
    """Format the cells of a table row: size, kind, name and operator."""
    times = f" ({held.tensors} of {memory(held.nbytes // held.tensors)})" if held.tensors > 1 else ""
    return [memory(held.nbytes) + times, *held.name]


def outside(profile: MemoryProfile) -> Iterator[str]:
    """Yield sentences about memory outside torch's allocators."""
    facts = profile.facts
    if facts.resident and "cpu" in profile.windows:
        beyond = max(facts.resident - profile.windows["cpu"].peak, 0)
        yield (
            f"The process had at most {memory(facts.resident)} in memory: {memory(beyond)} more than"
            " the CPU's allocator gave out (Python, libraries, and memory that was freed but kept)."
        )
    for device, reserved in facts.reserved.items():
        unused = max(reserved - profile.windows[device].peak, 0)
        yield f"Of {device} torch held {memory(reserved)}, of which {memory(unused)} were not in use at the peak."
        if used := facts.used.get(device, 0):
            yield f"{device} reports {memory(used)} in use: {memory(max(used - reserved, 0))} are not torch's."
    for name, nbytes in facts.host.items():
        yield f"Host memory outside of the CPU's allocator: {memory(nbytes)} for {name}."
    if facts.failed:
        yield f"Memory ran out: there was no room for {facts.failed}."


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format rows as lines of text with aligned columns; the first column is right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)] if rows else []
    for cells in rows:
        first, *rest = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
        yield "  " + "  ".join([first.rstrip().rjust(widths[0]), *rest]).rstrip()
