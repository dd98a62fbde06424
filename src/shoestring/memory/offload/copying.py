"""Asynchronous copies between a device and the host; on a GPU, copies run on a stream of their own."""

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
        """Context whose copies go to this stream, and run after the computation queued so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Wait:
        """Return a function that makes later computation on the device (not the host) wait for all copies so far."""
        if self.stream is None:
            return lambda: None
        return self.stream.record_event().wait

    def synchronize(self) -> None:
        """Make the host wait for all copies so far."""
        if self.stream is not None:
            self.stream.synchronize()
