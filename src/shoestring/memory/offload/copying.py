"""Asynchronous copies between a device and the host; on a GPU, they run on their own stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoestring.memory.zero.placement import Wait


class CopyStream:
    """A stream of copies to and from a GPU, which overlap with computation; on a CPU, copies are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Put copies made in this context on the stream; they run after the computation that was queued before."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Wait:
        """A function that makes later computation on the device wait for all copies so far; the host does not wait."""
        if self.stream is None:
            return lambda: None
        return self.stream.record_event().wait

    def synchronize(self) -> None:
        """Make the host wait for all copies so far."""
        if self.stream is not None:
            self.stream.synchronize()
