"""Features that reduce peak memory, and memory tracing, which shows the tensors that make up the peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoestring.memory.settings.broker import Broker
from shoestring.memory.settings.budget import Budget
from shoestring.memory.settings.chunked_loss import ChunkedLoss
from shoestring.memory.settings.lora import LoRA
from shoestring.memory.settings.offload import Offload
from shoestring.memory.settings.offload_activations import OffloadActivations
from shoestring.memory.settings.recompute import Recompute
from shoestring.memory.settings.tracing import Tracing
from shoestring.memory.settings.zero import Zero

if TYPE_CHECKING:
    from shoestring.memory.tracing.recording import MemoryProfile

__all__ = [
    "Broker",
    "Budget",
    "ChunkedLoss",
    "LoRA",
    "Offload",
    "OffloadActivations",
    "Recompute",
    "TracedMemory",
    "Tracing",
    "Zero",
    "load",
    "traced",
]


class TracedMemory:
    """The result of `traced`; the attribute `profile` is set when the `with` block ends."""

    profile: MemoryProfile

    def __str__(self) -> str:
        from shoestring.memory.tracing.summary import summary

        return "\n".join(summary(self.profile))


@contextmanager
def traced(path: Path | str | None = None) -> Iterator[TracedMemory]:
    """Record and name every allocation of torch in a `with` block, on all threads.

    Tensors that exist before the block are recorded as well. The size of the recording is bounded, because for each
    device only the step with the highest peak is stored. If the block raises an error, the recording is still stored.
    Recording does not change losses or weights: they stay bit-identical.

    Args:
        path: file to write, NAME.npz; `shoestring memory view` shows the file as a page. If None, no file is written.

    Raises:
        CompileError: there is no C++ compiler, or Python's headers are missing.
        RuntimeError: allocations are being recorded already, or another library has replaced torch's allocator.
        OSError: the file cannot be written.
    """
    from shoestring.memory.tracing.recorder import AllocationRecorder

    result, recorder = TracedMemory(), AllocationRecorder()
    recorder.start()
    try:
        yield result
    finally:
        result.profile = recorder.stop()
        if path is not None:
            result.profile.save(Path(path))


def load(path: Path | str) -> MemoryProfile:
    """Load a memory recording from a file.

    Raises:
        DataError: the file is missing or damaged.
    """
    from shoestring.memory.tracing.recording import FORMAT

    return FORMAT.load(Path(path))
